"""The samples of one worker's batches: from a grant's place in a permutation to index arrays.

Knows batches and grants; it must not know frames, or what the samples are.
"""

from __future__ import annotations

from zkv.errors import ProtocolError
from zkv.pool import Orders, Shard
from zkv_workers import signals as s
from zkv_workers.batch import AnyBatch


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
        self._orders = Orders(shard)
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
        samples = self._orders.samples(where.pass_number, where.start, where.stop)
        batch.hand_out(grant, samples, where.pass_number)
        self._last = batch
