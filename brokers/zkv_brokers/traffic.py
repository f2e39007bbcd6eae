"""What a server's blocks have carried: payload bytes, in and out, since its start. Figures alone:
nothing here decides anything."""

from __future__ import annotations

from collections.abc import Sequence

from zkv.data_messages import Block
from zkv_brokers.grants import ToWorker

TOLD_MAX = 4096
"""Blocks that are told of at a time."""


class Traffic:
    """Bytes by block, and which of them the broker was told."""

    def __init__(self) -> None:
        self.by_block: dict[int, int] = {}
        self._told: dict[int, int] = {}

    def carried(self, bid: int, nbytes: int) -> None:
        """So much has come for a block, or was sent of it."""
        self.by_block[bid] = self.by_block.get(bid, 0) + nbytes

    def sent(self, messages: Sequence[ToWorker]) -> Sequence[ToWorker]:
        """Count blocks that are about to be sent; return the messages."""
        for one in messages:
            if isinstance(one.message, Block) and one.payload is not None:
                self.carried(one.message.bid, one.payload.nbytes)
        return messages

    def news(self) -> list[tuple[int, int]]:
        """Return what has changed since it was told last, and take it as told."""
        sums = self.by_block.items()
        fresh = [(bid, total) for bid, total in sums if total != self._told.get(bid)][:TOLD_MAX]
        self._told.update(fresh)
        return fresh
