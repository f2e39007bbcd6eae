"""The samples of one worker's batches: from a grant's place in a permutation to index arrays.

Knows batches and grants; it must not know frames, or what the samples are.
"""

from __future__ import annotations

from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv.pool import Shard, permutation
from zkv_workers import signals as s
from zkv_workers.batch import AnyBatch

ORDERS_MAX = 2
"""Permutations that are kept: while one pass begins, samples of the one before may come back."""


def check_shard(data: Shard) -> Shard:
    """Return what a loop over batches is given.

    Raises:
        TypeError: it is no shard.
    """
    if not isinstance(data, Shard):
        raise TypeError(f"batches takes what zkv.data.shard(n) returns, not {type(data).__name__}")
    return data


class Source:
    """One loop over `worker.batches(data)`."""

    def __init__(self, shard: Shard) -> None:
        self.shard = check_shard(shard)
        self._orders: dict[int, Array] = {}
        self._last: AnyBatch | None = None

    def check(self) -> None:
        """Check that the batch before was used: its samples would be handed out without end.

        Raises:
            RuntimeError: its block was not entered, or not left.
        """
        if self._last is not None and self._last.outcome == "open":
            self._last.abandon()
            raise RuntimeError(
                "the batch before this one is not finished: enter and leave each batch in its turn,"
                " `for batch in worker.batches(data):` and in it `with batch:`"
            )

    def hand_out(self, batch: AnyBatch, grant: s.Grant) -> None:
        """Give a batch its grant and samples.

        Raises:
            ProtocolError: the broker has granted a batch without samples.
        """
        where = grant.samples
        if where is None:
            raise ProtocolError("the broker has granted a batch without samples")
        samples = self._order(where.pass_number)[where.start : where.stop].copy()
        batch.hand_out(grant, samples, where.pass_number)
        self._last = batch

    def _order(self, pass_number: int) -> Array:
        if pass_number not in self._orders:
            while len(self._orders) >= ORDERS_MAX:
                del self._orders[min(self._orders)]
            shard = self.shard
            self._orders[pass_number] = permutation(shard.n, shard.seed, pass_number)
        return self._orders[pass_number]
