"""The wait between a `Sum` and its commit: every server tells the square sums of its blocks."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from zkv import control as c


@dataclass(slots=True)
class Summing:
    """The square sums of one update, as far as they have come."""

    version: int
    by_block: dict[int, float] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)

    def take(
        self, server: int, message: c.SquareSums, servers: Set[int], bids: Set[int]
    ) -> float | None:
        """Take a server's answer in; return Σ g² over all blocks with the last one of these
        `servers` and blocks (`bids`): one that has taken blocks over answers twice.

        The order of blocks is fixed, and with it the bits.
        """
        if message.version != self.version:
            return None
        self.by_block.update(dict(message.blocks))
        self.answered.add(server)
        if not (servers <= self.answered and bids <= self.by_block.keys()):
            return None
        return sum(self.by_block[bid] for bid in sorted(self.by_block))
