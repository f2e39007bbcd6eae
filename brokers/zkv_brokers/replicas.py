"""Copies that stand by: where each block has one, and what happens when its owner is lost.

A copy is made as for a move (`zkv_brokers.moves`), and kept: contributions go to both servers, none
counts before both hold all of it, and the log does to the copy what it does to the block. So when
the owner is lost, the copy has the same bits, and holds whatever may still become an update; one
entry makes it the block, and nothing that was acknowledged is lost. Pure: what is decided is
collected in `Decisions`. Part of the router.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from zkv.reasons import Reason
from zkv.wire import MODEL
from zkv_brokers.decisions import Decisions
from zkv_brokers.members import Server
from zkv_brokers.moves import IDLE, Step

if TYPE_CHECKING:
    from zkv_brokers.router import Router

Grant = tuple[int, int, int]
"""One that is not received: incarnation, group, and number."""
AGAIN_S = 5.0
"""Copies that could not be made are tried again after so long."""


class Replicas:
    """The copies of one broker's blocks."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.wanted = bool(router.config.replicas)
        self.taken_over = 0
        """Servers that were lost, and whose copies took over."""
        self._older: dict[tuple[int, int], set[Grant]] = {}
        """Of copies (block, server), the grants that were out before: they cannot send those."""
        self._senders: dict[tuple[int, int], set[Grant]] = {}
        """Of blocks that have moved (block, former owner), the grants that it has to send."""
        self._tried_at = float("-inf")
        self._copied = False
        """Whether copies have been made since the last look."""
        self._complete = False
        """Whether all blocks have had copies that stand by, when it was looked last."""
        self._places: object = None
        """What tells whether blocks or copies were elsewhere then."""

    # --- making them -----------------------------------------------------------------------------

    def look(self, out: Decisions) -> None:
        """Have copies made of the blocks that lack one."""
        if not self.wanted:
            return
        moves, closed = self._router.moves, self._router.fleet.closed()
        places = len(self._router.layout.blocks), len(moves.kept), moves.placement, sorted(closed)
        if self._complete and places == self._places:
            return
        self._places = places
        self._prune()
        if self._copied and not self.holds_back():
            self._copied = False
            self._router.begin(out)
        lacking, now = self._lacking(), self._router.hub.now
        self._tell_complete(lacking)
        idle = moves.stage == IDLE and not moves.waiting
        if not lacking or not idle or now < self._tried_at + AGAIN_S:
            return
        steps = self._planned(lacking)
        if steps:
            self._tried_at = now
            moves.plan(steps)
            moves.look(out)

    def _lacking(self) -> list[int]:
        """Return the blocks that have no copy, or one on a server that is to leave."""
        layout, kept = self._router.layout, self._router.moves.kept
        closed = self._router.fleet.closed()
        return [
            bid
            for bid, block in layout.blocks.items()
            if block.segments and (bid not in kept or kept[bid] in closed)
        ]

    def _planned(self, lacking: Iterable[int]) -> list[Step]:
        """Return steps that give each of these blocks a copy: the largest first, on the server that
        has the least of blocks and copies; none where there is no other server."""
        router, layout, kept = self._router, self._router.layout, self._router.moves.kept
        here = sorted(router.members.servers.keys() - router.fleet.closed())
        filled = dict.fromkeys(here, 0)
        sizes = {bid: layout.block_bytes(block) for bid, block in layout.blocks.items()}
        for bid, block in layout.blocks.items():
            for server in {block.server, kept.get(bid, block.server)} & filled.keys():
                filled[server] += sizes[bid]
        steps = []
        for bid in sorted(lacking, key=lambda one: (-sizes[one], one)):
            source = layout.blocks[bid].server
            others = [server for server in here if server != source]
            if others:
                target = min(others, key=lambda server: (filled[server], server))
                filled[target] += sizes[bid]
                steps.append(Step(bid, source, target, "it stands by", stays=True))
        return sorted(steps, key=lambda step: step.bid)

    def _tell_complete(self, lacking: Iterable[int]) -> None:
        """Say so when every block has a copy that stands by, again."""
        kept = self._router.moves.kept
        complete = bool(kept) and not lacking and all(map(self.stands_by, kept))
        if complete and not self._complete:
            self._router.hub.note("info", f"all {len(kept)} blocks have copies that stand by")
        self._complete = complete

    def _prune(self) -> None:
        """Forget grants that have been received."""
        here = self._router.groups.pins.by_grant.keys()
        for known in (self._older, self._senders):
            for name in [name for name, grants in known.items() if not grants & here]:
                del known[name]

    def holds_back(self) -> bool:
        """Return whether nobody may begin a first batch yet: blocks of the model have no copy."""
        router = self._router
        if not self.wanted or router.groups.model is not None or len(router.members.servers) < 2:
            return False
        kept = router.moves.kept
        return any(b.segments and b.bid not in kept for b in router.layout.blocks_in(MODEL))

    def copied(self, copies: Iterable[tuple[int, int]]) -> None:
        """Live copies are there, of these blocks on these servers."""
        for bid, server in copies if self.wanted else ():
            self._older[bid, server] = set(self._router.groups.pins.by_grant)
        self._tried_at = float("-inf")
        self._copied = True

    def moving(self, moves: Iterable[tuple[int, int]]) -> None:
        """Blocks move from these servers, which still have to send what they were granted to."""
        if self.wanted:
            for bid, source in moves:
                self._senders[bid, source] = set(self._router.groups.pins.by_grant)

    def _has_all(self, bid: int, server: int, of: set[Grant] | None = None) -> bool:
        """Return whether a server could send what is on its way of a block it has a copy of (`of`:
        of these grants), whoever was to send it."""
        needed = self._router.groups.pins.by_grant.keys() & self._older.get((bid, server), set())
        return not (needed if of is None else needed & of)

    def stands_by(self, bid: int) -> bool:
        """Return whether a block's copy could take over now."""
        kept = self._router.moves.kept
        return bid in kept and self._has_all(bid, kept[bid])

    # --- when a server is lost -------------------------------------------------------------------

    def hindrance(self, server: Server) -> str:
        """Return why the others cannot go on with copies of a server's blocks; "" if they can."""
        if not self.wanted:
            return "there are no copies of its blocks (--replicas 1)"
        router, layout = self._router, self._router.layout
        pending = router.catalog.pending.values()
        if any(block.server == server.index for one in pending for block in one.blocks):
            return "first values were on their way to it"
        mine = [b for b in layout.blocks.values() if b.server == server.index and b.segments]
        alone = [block for block in mine if not self.stands_by(block.bid)]
        for (bid, sender), grants in self._senders.items():
            if sender == server.index and bid in layout.blocks:
                owner = layout.blocks[bid].server
                heir = router.moves.kept.get(bid, owner) if owner == sender else owner
                if not self._has_all(bid, heir, grants):
                    return "it had values to send that were granted before blocks moved"
        if alone:
            keys = sorted({str(layout.entries[kid].spec.key) for b in alone for kid in b.kids})
            more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
            return (
                f"{len(alone)} of its {len(mine)} blocks had no copy that was complete yet "
                f"(of {', '.join(map(repr, keys[:5]))}{more})"
            )
        return ""

    def take_over(self, server: Server, why: str, out: Decisions) -> None:
        """Go on without a server that is lost: the copies of its blocks are the blocks now."""
        router, index = self._router, server.index
        count = sum(block.server == index for block in router.layout.blocks.values())
        text = f"{server} is lost: {why}; copies of its {count} blocks have taken over"
        router.hub.note("warning", text)
        self.taken_over += 1
        router.moves.lost(index, out)
        if (model := router.groups.model) is not None and model.together.version:
            # Sums go where their senders' contributions go, and that is not the same for all now.
            model.ahead.drop(model, out)
        router.moves.take_over(index, out)
        router.snapshots.lost(server)
        router.members.lose(server)
        router.fleet.without(server, why, out)

    # --- what is told ----------------------------------------------------------------------------

    def waited_for(self) -> Reason | None:
        """Return why nobody may begin yet, if that is because of copies."""
        if not self.holds_back():
            return None
        lacking, all_of = len(self._lacking()), len(self._router.layout.blocks)
        return Reason(
            "every block must have a copy on another server (--replicas 1)",
            need=all_of,
            have=all_of - lacking,
            words=f"{lacking} of {all_of} blocks have no copy on another server yet (--replicas 1)",
        )

    def plain(self) -> dict[str, Any]:
        """Return the status's figures."""
        layout, kept = self._router.layout, self._router.moves.kept
        by_server = dict.fromkeys(sorted(self._router.members.servers), 0)
        for bid, server in kept.items():
            by_server[server] = by_server.get(server, 0) + layout.block_bytes(layout.blocks[bid])
        return {
            "wanted": int(self.wanted),
            "blocks": len([block for block in layout.blocks.values() if block.segments]),
            "copies": len(kept),
            "standing_by": sum(map(self.stands_by, kept)),
            "bytes": {str(server): nbytes for server, nbytes in by_server.items()},
            "taken_over": self.taken_over,
        }
