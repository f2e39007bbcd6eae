"""First values of keys that are made one after the other, by a worker that cannot hold them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from zkv.dtypes import Array, stored_view
from zkv.placement import BLOCK_BYTES
from zkv.wire import BlockSpec, KeySpec
from zkv_workers import signals as s
from zkv_workers.bucket import ranges
from zkv_workers.packing import check_gradient

if TYPE_CHECKING:
    from zkv_workers.blocking import Worker

ROOM_BYTES = 4 * BLOCK_BYTES
"""So much may be on its way to servers before the next values are made."""


def offer(worker: Worker, specs: Sequence[KeySpec]) -> Seeds | None:
    """Initialise keys of the model by their specs; return where to give the values, if this worker
    has to: else the first worker's are there.

    Raises:
        KeyMismatch: the keys were initialised otherwise; the key and both specs are named.
    """
    answer = worker._call(
        lambda token: s.Initialise(token, tuple(specs), {}, plain=False, in_parts=True)
    )
    return Seeds(worker, answer) if isinstance(answer, s.Seeding) else None


class Seeds:
    """The values that the broker asks this worker for: `give` each key's once, then `end`."""

    def __init__(self, worker: Worker, seeding: s.Seeding) -> None:
        self._worker, self._seeding = worker, seeding
        self._layout = seeding.layout
        self._buckets: dict[int, tuple[Array, set[int]]] = {}
        self.given: set[str | int] = set()

    def give(self, key: str | int, array: Array) -> None:
        """Send the values of a key; returns when there is room for more.

        `array` may be changed as soon as this returns.

        Raises:
            UnknownKey, KeyMismatch: no key of these, or not an array for it.
            WaitTimeout: servers did not take it in time.
        """
        kid = self._layout.kid(key)
        dtype = check_gradient(self._layout, key, kid, array)
        flat = stored_view(array, dtype)
        for block in self._layout.blocks_for([kid]):
            values = self._filled(block, kid, flat)
            if values is not None:
                self._worker._feed(s.Seed(self._seeding, block.bid, values))
        self.given.add(key)
        self._worker._call(lambda token: s.Room(token, ROOM_BYTES))

    def _filled(self, block: BlockSpec, kid: int, flat: Array) -> Array | None:
        if len(block.segments) == 1:
            (only,) = block.segments
            return flat[only.start : only.stop].copy()
        values, missing = self._buckets.setdefault(
            block.bid, (np.zeros(block.size, flat.dtype), set(block.kids))
        )
        start, stop = ranges(block)[kid]
        values[start:stop] = flat
        missing.discard(kid)
        return None if missing else self._buckets.pop(block.bid)[0]

    def end(self) -> None:
        """Wait until every server holds all values.

        Raises:
            BrokerLost: the broker that has asked for them is gone.
            WaitTimeout: it did not come in time.
        """
        self._worker._call(lambda token: s.EndSeeds(token, self._seeding))
