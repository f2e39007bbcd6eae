"""Where a worker's contributions go while blocks move between servers.

Part of the session. A contribution goes by one placement from its first block to its end: the
newest that was known when it began, or when it was granted, if its values come on demand (its
servers have to hear of its end). The broker is told which of them went by older ones. Knows no
frames.
"""

from __future__ import annotations

from collections.abc import Iterable

from zkv import control as c
from zkv.errors import ProtocolError
from zkv.layout import Layout
from zkv.owners import Owners
from zkv.wire import MODEL, SEEDS, BlockSpec, ContributionId


class Places:
    """The placements that a worker has heard of, and what it sends by which."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._owners = Owners()
        self._begun: dict[ContributionId, tuple[int, int]] = {}
        """Grant and placement of what is not settled."""
        self._granted: dict[int, int] = {}
        """The placements of grants on demand."""
        self._here: frozenset[int] = frozenset()
        """The servers that there are; none: nothing was told yet."""

    def begun(self, name: ContributionId, grant: int) -> int:
        """Return the placement that a contribution goes by, from now on."""
        if name.group == SEEDS:
            return 0
        if name not in self._begun:
            at_grant = self._granted.get(grant) if name.group == MODEL else None
            self._begun[name] = grant, self._owners.placement if at_grant is None else at_grant
        return self._begun[name][1]

    def servers(self, name: ContributionId, grant: int, block: BlockSpec) -> tuple[int, ...]:
        """Return the servers that a block of a contribution goes to."""
        if name.group == SEEDS:
            return (block.server,)
        there = self._owners.of(block, self.begun(name, grant))
        if self._here and not self._here.issuperset(there):
            # The others hold what was lost with a server.
            there = tuple(one for one in there if one in self._here) or (block.server,)
        return there

    def others(self, bid: int) -> tuple[int, ...]:
        """Return the servers that have a copy of a block at present, or make one."""
        there = self._owners.of(self._layout.blocks[bid], self._owners.placement)
        return there[1:]

    def here(self, servers: Iterable[int]) -> None:
        """Nothing goes to other servers than these from here on."""
        self._here = frozenset(servers)

    def settled(self, name: ContributionId) -> None:
        """Nothing more is sent of a contribution."""
        self._begun.pop(name, None)

    def granted(self, grant: int) -> None:
        """Values of this grant are asked for: its contribution goes by the present placement."""
        self._granted[grant] = self._owners.placement

    def over(self, grant: int) -> None:
        """Nothing more comes of a grant on demand."""
        self._granted.pop(grant, None)

    def follow(self, message: c.Follow) -> c.Followed:
        """Blocks get other servers; return what to tell the broker.

        Raises:
            ProtocolError: there is no such block, or no server of it is named.
        """
        for bid, servers in message.blocks:
            if bid not in self._layout.blocks or not servers:
                raise ProtocolError(f"block {bid} cannot be on servers {servers}")
        for bid, servers in message.blocks:
            before = self._layout.blocks[bid].server
            self._owners.change(message.placement, bid, before, servers)
        self._layout.move((bid, servers[0]) for bid, servers in message.blocks)
        older = {
            (name.group, grant)
            for name, (grant, placement) in self._begun.items()
            if placement < message.placement
        }
        older |= {(MODEL, grant) for grant, at in self._granted.items() if at < message.placement}
        return c.Followed(message.placement, sorted(older))

    def clear(self) -> None:
        """The broker is a new one, before anything was begun."""
        self._owners.clear()
        self._begun.clear()
        self._granted.clear()
        self._here = frozenset()
