"""Shards of one model without sockets: a broker's log and workers' frames written by hand.

It drives shards by their events alone, as a server does; it must not know brokers or sockets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from strategies import Model

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import DTYPES, Array
from zkv.layout import size_of
from zkv.optimizer_spec import optimizer
from zkv.wire import SEEDS, ContributionId
from zkv_brokers.grants import ToWorker
from zkv_brokers.shard import FromBroker, FromWorker, Prepare, Shard, ToBroker

WINDOW = 1 << 30
INITIALISER = 1


def raw(array: Array) -> Array:
    return np.ascontiguousarray(array).view(np.uint8)


class Rig:
    """The shards of a model, and a broker's log written by hand."""

    def __init__(
        self,
        model: Model,
        *,
        optimizer_text: str = "sgd:lr=0.1",
        members: Sequence[int] = (1, 2, 3),
    ) -> None:
        self.model, self.layout = model, model.layout
        self.spec = optimizer(optimizer_text)
        self.shards = [Shard(window_bytes=WINDOW) for _ in range(model.servers)]
        self.index = 0
        self.sent: list[tuple[int, Any]] = []
        for number, shard in enumerate(self.shards):
            self._take(
                number, shard.handle(FromBroker(c.ServerWelcome(number, model.servers, 1)), 0.0)
            )
        plain = optimizer("assign")
        self.log(c.Configure({"model": self.spec.to_plain(), "plain": plain.to_plain()}))
        self.log(c.Epoch(1, list(members), []))

    def _take(self, number: int, actions: Sequence[Any]) -> list[Any]:
        for action in actions:
            if isinstance(action, Prepare):
                continue
            self.sent.append((number, action.message if isinstance(action, ToBroker) else action))
        return list(actions)

    def log(self, *entries: c.Entry) -> None:
        for number, shard in enumerate(self.shards):
            self._take(number, shard.handle(FromBroker(c.Log(1, self.index, list(entries))), 0.0))
        self.index += len(entries)

    def data(self, server: int, message: d.Data, payload: Array | None = None) -> list[Any]:
        given_bytes = None if payload is None else raw(payload)
        return self._take(server, self.shards[server].handle(FromWorker(message, given_bytes), 0.0))

    def cut(self, values: Mapping[int, Array], bid: int) -> Array:
        block = self.layout.blocks[bid]
        return np.concatenate(
            [values[segment.kid][segment.start : segment.stop] for segment in block.segments]
        )

    def init(self, values: Mapping[int, Array]) -> None:
        self.log(c.Init(1, INITIALISER, self.model.entries, self.model.blocks))
        name = ContributionId(INITIALISER, SEEDS, 1)
        self.push(name, 1, values, blocks=[b.bid for b in self.model.blocks])

    def push(
        self,
        name: ContributionId,
        grant: int,
        values: Mapping[int, Array],
        *,
        blocks: Sequence[int] | None = None,
        order: Sequence[int] = (),
        weight: float = 1.0,
    ) -> None:
        """Send a contribution as a worker does: zeros for a key that `values` lacks."""
        chosen = (
            self.layout.blocks_in(name.group)
            if blocks is None
            else [self.layout.blocks[bid] for bid in blocks]
        )
        kids = self.layout.kids_in(max(name.group, 0))
        skipped = [kid for kid in kids if kid not in values]
        filled = {
            kid: values.get(kid, np.zeros_like(self.zero(kid))) for b in chosen for kid in b.kids
        }
        by_server: dict[int, list[int]] = {b.server: [] for b in chosen}
        for block in sorted(chosen, key=lambda b: order.index(b.bid) if order else b.bid):
            if set(block.kids) <= set(skipped):
                continue
            by_server[block.server].append(block.bid)
            message = d.Push(name, grant, block.bid, "none", self.index)
            self.data(block.server, message, self.cut(filled, block.bid))
        for server, bids in by_server.items():
            self.data(server, d.Done(name, grant, weight, bids, skipped, self.index))

    def zero(self, kid: int) -> Array:
        spec = self.layout.entries[kid].spec
        return np.zeros(size_of(spec), DTYPES[spec.dtype].stored)

    def values(self) -> dict[int, Array]:
        """The values that the shards hold now, by key, copied."""
        found = {entry.kid: self.zero(entry.kid) for entry in self.model.own}
        for block in self.layout.blocks.values():
            state = self.shards[block.server].store.blocks[block.bid]
            start = 0
            for segment in block.segments:
                stop = start + segment.stop - segment.start
                found[segment.kid][segment.start : segment.stop] = state.current.values[start:stop]
                start = stop
        return found

    def said(self, kind: type) -> list[Any]:
        """What the shards have sent of one kind of message, with the server that sent it."""
        found = []
        for server, one in self.sent:
            message = one.message if isinstance(one, ToWorker) else one
            if isinstance(message, kind):
                found.append((server, message))
        return found


def same_bits(given_values: Mapping[int, Array], expected: Mapping[int, Array]) -> None:
    assert given_values.keys() == expected.keys()
    for kid, value in expected.items():
        assert given_values[kid].tobytes() == value.tobytes(), f"key {kid}"
