"""Which servers a block's gradients go to, placement by placement.

A placement is a number that rises whenever that changes for some block. A contribution goes by one
placement from its first block to its end, so that the broker knows who has to hold it; several
servers stand for a block of which others have live copies, or make one. Pure, and the same at the
broker and at every worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from zkv.wire import BlockSpec

KEPT = 8
"""Placements that are remembered: no copy begins before what went by those before it is settled, so
that contributions go by three different ones at most."""


@dataclass(slots=True)
class Owners:
    """The servers of each block that has ever moved; of the others it is the layout's."""

    placement: int = 0
    """The present one."""
    _changes: dict[int, list[tuple[int, tuple[int, ...]]]] = field(default_factory=dict)
    """By block, (from which placement on, servers), the latest last."""

    def change(self, placement: int, bid: int, before: int, servers: Sequence[int]) -> None:
        """From this placement on a block's gradients go to these servers. `before` is its owner."""
        self.placement = max(self.placement, placement)
        known = self._changes.setdefault(bid, [(0, (before,))])
        if placement > known[-1][0]:
            known.append((placement, tuple(servers)))
            del known[:-KEPT]

    def of(self, block: BlockSpec, placement: int) -> tuple[int, ...]:
        """Return the servers of a block in a placement."""
        for since, servers in reversed(self._changes.get(block.bid, ())):
            if since <= placement:
                return servers
        return (block.server,)

    def clear(self) -> None:
        """Forget everything."""
        self.placement = 0
        self._changes.clear()


class Homes:
    """The servers that must hold a contribution to one group, by the placement that it goes by."""

    def __init__(self, servers: Iterable[int]) -> None:
        self.owners = frozenset(servers)
        """Those that own a block of the group at present."""
        self.bids: frozenset[int] = frozenset()
        """The group's blocks."""
        self._changes: list[tuple[int, frozenset[int]]] = [(0, self.owners)]
        self._gone: set[int] = set()

    def change(self, placement: int, owners: Iterable[int], more: Set[int] = frozenset()) -> None:
        """From this placement on these servers own blocks, and `more` make copies of some."""
        self.owners = frozenset(owners)
        self._changes.append((placement, self.owners | more))
        del self._changes[:-KEPT]

    def at(self, placement: int) -> frozenset[int]:
        """Return who must hold what goes by this placement."""
        since = (servers for known, servers in reversed(self._changes) if known <= placement)
        return next(since, self._changes[0][1]) - self._gone

    def without(self, server: int) -> None:
        """A server is gone, which owns nothing (any more)."""
        self._gone.add(server)
