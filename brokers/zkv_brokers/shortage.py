"""A server that has no memory for something: what of a worker's it was for is refused, and costs
nobody else anything. Part of one server's shard; knows no sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.wire import ContributionId
from zkv_brokers.contributions import Contributions, Open
from zkv_brokers.guards import Problem
from zkv_brokers.shard_events import Action, FromWorker
from zkv_brokers.store import Store

SLACK_PART = 8
"""Of a model's bytes, that ZeroMQ needs beside them while they come."""
Hear = Callable[[d.Data, Array | None, list[Action], float], None]
Void = Callable[[ContributionId, Open, Problem], None]


def check_room(store: Store, bids: Iterable[int]) -> None:
    """See, when the first of these first values comes, whether there is room for all: they are held
    until the last one is here, and what ZeroMQ has no memory for it drops, connection and all,
    without a word.

    Raises:
        MemoryError: there is none.
    """
    blocks = [store.layout.blocks[bid] for bid in bids if bid in store.layout.blocks]
    total = sum(store.layout.dtype(block).stored.itemsize * block.size for block in blocks)
    # It is let go at once, and never written to: that costs nothing.
    store.memory.empty(total + total // SLACK_PART, np.dtype(np.uint8))


def spared(
    hear: Hear,
    void: Void,
    contributions: Contributions,
    event: FromWorker,
    out: list[Action],
    now: float,
) -> None:
    """Have a worker's message heard. If there is no memory for it, its contribution is void, for
    that reason; what it asks for is not answered, and will be asked for again.

    Raises:
        ProtocolError: `hear` does.
    """
    message = event.message
    try:
        hear(message, event.payload, out, now)
    except MemoryError as error:
        if isinstance(message, d.Push | d.Done):
            why = f" ({error})" if str(error) else ""
            text = (
                f"the server has no memory left for it{why}: give its machine more, start more "
                "servers, or limit what waits there (zkv server --budget)"
            )
            held = contributions.at(message.contribution, message.grant)
            void(message.contribution, held, ("?", text))
