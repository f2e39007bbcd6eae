"""Moves of blocks to other servers while workers train: a few blocks at a time, each in four steps.

1. `Mirror`: contributions that begin from here on send these blocks to both servers. Workers say
   which of theirs had begun before (`Followed`).
2. When these are settled, `Copy`: the owner packs the blocks as they are at that place in the log,
   the target asks for them, and does to them what the log has done since.
3. When the target holds live copies (`Copied`), `Move`: between two updates, and where the next one
   is foreseen, behind it; so no value that was made ahead of the log is of a block that moves.
4. Contributions that begin from there on send to the new owner alone.

A copy that stays (`zkv_brokers.replicas`) is a move that ends behind the third step: contributions
go on being sent to both servers. Where a block has one and moves, they go to three meanwhile.

Nobody waits for any of it: a move waits, for batches that were begun before it. If it cannot go on
(a target is lost, or cannot keep up), `Unmirror` gives it up, and the owner is what it was. Pure:
what is decided is collected in `Decisions`. Part of the router.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zkv import control as c
from zkv.owners import Homes
from zkv_brokers import requests
from zkv_brokers.decisions import Decisions
from zkv_brokers.members import Server, Worker

if TYPE_CHECKING:
    from zkv_brokers.router import Router

BATCH_BYTES = 16 * 1024 * 1024
"""Values that move at a time: gradients of so many bytes are sent twice meanwhile."""
TRIES_MAX = 3
"""How often copies are begun before a move is given up."""
IDLE, FOLLOWING, COPYING, FLIPPING = "idle", "following", "copying", "flipping"


@dataclass(frozen=True, slots=True)
class Step:
    """One block that is to move."""

    bid: int
    source: int
    target: int
    why: str = ""
    stays: bool = False
    """It is no move: the copy is kept beside the block."""


class Moves:
    """All moves of one broker: those that wait, and the blocks that are moving now."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.placement = 0
        """The newest one; numbers that no worker is told of name copies."""
        self.stage = IDLE
        self.waiting: deque[Step] = deque()
        self.batch: list[Step] = []
        self.moved = 0
        """Blocks that have moved since the start."""
        self.kept: dict[int, int] = {}
        """Blocks of which another server keeps a live copy, and that server."""
        self.given_up: Counter[str] = Counter()
        """Moves that were given up, by reason."""
        self.floor = 0
        """No contribution goes by an older placement than this any more: copies rest on that."""
        self._told = 0
        """The placement that workers were told last."""
        self._awaited: set[int] = set()
        """Incarnations that have not said that they follow it."""
        self._open: set[tuple[int, int, int]] = set()
        """What they had begun before: (incarnation, group, grant)."""
        self._copy = 0
        self._copying: set[int] = set()
        self._tries = 0

    # --- what is asked for, and what happens ---------------------------------------------------

    def plan(self, steps: Iterable[Step]) -> None:
        """Move these blocks, behind those that are moving now; what waited is forgotten."""
        self.waiting = deque(steps)

    def followed(self, worker: Worker, message: c.Followed) -> None:
        """A worker goes by a placement from here on."""
        if message.placement == self._told and worker.incarnation in self._awaited:
            self._awaited.discard(worker.incarnation)
            self._open |= {(worker.incarnation, group, grant) for group, grant in message.open}

    def copied(self, server: Server, message: c.Copied, out: Decisions) -> None:
        """A server holds live copies, or has given them up."""
        if self.stage != COPYING or message.placement != self._copy:
            return
        if message.why:
            self._tries += 1
            if self._tries < TRIES_MAX:
                self._begin_copies(out)
            else:
                self.abandon({step.bid for step in self.batch}, message.why, out)
            return
        mine = {step.bid for step in self.batch if step.target == server.index}
        self._copying -= mine & set(message.bids)
        self._copied_all(out)

    def _copied_all(self, out: Decisions) -> None:
        """Go on if no copy is on its way any more."""
        if self.stage != COPYING or self._copying:
            return
        self._router.replicas.copied([(step.bid, step.target) for step in self.batch])
        if not any(step.stays for step in self.batch):
            self.stage = FLIPPING
            return
        self.let_go([step.bid for step in self.batch], out)
        self.kept.update({step.bid: step.target for step in self.batch})
        self.batch, self.stage = [], IDLE

    def lost(self, index: int, out: Decisions) -> None:
        """A server is gone: nothing can move there, nor from there, and no copy is there."""
        self.waiting = deque(s for s in self.waiting if index not in (s.source, s.target))
        gone = {step.bid for step in self.batch if index in (step.source, step.target)}
        self.abandon(gone, f"server {index} is gone", out)
        self.let_go([bid for bid, server in self.kept.items() if server == index], out)

    def abandon(self, bids: Iterable[int], why: str, out: Decisions) -> None:
        """Give up those of the moves under way that are of these blocks."""
        wanted = set(bids)
        gone = [step for step in self.batch if step.bid in wanted]
        self.waiting = deque(step for step in self.waiting if step.bid not in wanted)
        if not gone:
            return
        self.given_up[why] += len(gone)
        stay = "get no copy yet" if gone[0].stays else "stay where they are"
        self._router.hub.note("warning", f"{len(gone)} blocks {stay}: {why}")
        self.batch = [step for step in self.batch if step not in gone]
        self._unmirror([(step.bid, step.target) for step in gone], out)
        self._copying -= wanted
        if not self.batch:
            self.stage = IDLE
        self._copied_all(out)

    def let_go(self, bids: Iterable[int], out: Decisions) -> None:
        """Keep no copies of these blocks any more."""
        gone = [(bid, self.kept.pop(bid)) for bid in sorted(set(bids) & self.kept.keys())]
        if gone:
            self._unmirror(gone, out)

    def _unmirror(self, copies: list[tuple[int, int]], out: Decisions) -> None:
        self.placement += 1
        out.log(c.Unmirror(self.placement, copies))
        self._tell([bid for bid, _ in copies], out)

    def take_over(self, index: int, out: Decisions) -> None:
        """A server is lost: the copies of its blocks are the blocks from here on."""
        owned = (b for b in self._router.layout.blocks.values() if b.server == index and b.segments)
        moves = [(bid, self.kept.pop(bid)) for bid in sorted(block.bid for block in owned)]
        self.placement += 1
        # Also with no block: it may have had values to send that were granted while it had some.
        out.log(c.Move(self.placement, moves, lost=index))
        self._router.layout.move(moves)
        if moves:
            self._tell([bid for bid, _ in moves], out)
        self._router.loads.anew(self._router.hub.now)

    # --- step by step --------------------------------------------------------------------------

    def look(self, out: Decisions) -> None:
        """Go on as far as nothing has to be waited for."""
        if self._router.fleet.suspects():
            return
        if self.stage == FLIPPING:
            self._flip_between_updates(out)
        if self.stage == IDLE and self.waiting:
            self._begin(out)
        if self.stage == FOLLOWING and not self.waits_for():
            self._tries, self.floor = 0, self._told
            self._begin_copies(out)

    def waits_for(self) -> list[int]:
        """Return the numbers of workers whose contributions have begun in an older placement than
        they were told of last, or that have not said which have."""
        workers, groups = self._router.members.workers, self._router.groups.by_number
        self._awaited &= workers.keys()
        self._open = {one for one in self._open if one[0] in workers and not self._is_over(*one)}
        found = {workers[who].number for who in (*self._awaited, *(one[0] for one in self._open))}
        for group in groups.values():
            arrivals = group.arrivals.values()
            older = (one for one in arrivals if one.finished and one.placement < self._told)
            found |= {one.number for one in older}
        return sorted(found)

    def _waited_for(self) -> list[int]:
        """Return the numbers of workers that the blocks that are moving now wait for."""
        model = self._router.groups.model
        if self.stage == FOLLOWING:
            return self.waits_for()
        if self.stage == FLIPPING and model is not None:
            return sorted(
                n for n, grant in model.ahead.members.items() if not model.has_arrived(n, grant)
            )
        return []

    def _is_over(self, incarnation: int, group: int, grant: int) -> bool:
        known = self._router.groups.by_number.get(group)
        return known is None or known.is_over(incarnation, grant)

    def _begin(self, out: Decisions) -> None:
        layout, servers = self._router.layout, self._router.members.servers
        nbytes, kind = 0, (False, False)
        while self.waiting:
            step = self.waiting[0]
            block = layout.blocks.get(step.bid)
            here = block is not None and block.server == step.source and step.target in servers
            by = self.kept.get(step.bid)
            if block is None or not here or (step.stays and by == step.target):
                self.waiting.popleft()
                continue
            if self.batch and kind != (step.stays, by == step.target):
                break
            kind = step.stays, by == step.target
            nbytes += layout.block_bytes(block)
            if self.batch and nbytes > BATCH_BYTES:
                break
            self.batch.append(self.waiting.popleft())
        while self.batch and not self._has_room():
            self.waiting.appendleft(self.batch.pop())
            if not self.batch:
                self._refuse(self.waiting.popleft())
        if not self.batch:
            return
        if kind == (False, True):
            # Who stands by for a block has all that its owner has.
            self.stage = FLIPPING
            self._flip_between_updates(out)
            return
        self.stage = FOLLOWING
        self.placement += 1
        out.log(c.Mirror(self.placement, [(step.bid, step.target) for step in self.batch]))
        self._tell([step.bid for step in self.batch], out)

    def _has_room(self) -> bool:
        """Whether servers keep room for what the policy needs while the batch moves (rule 11)."""
        model, room = self._router.groups.model, requests.capacity(self._router)
        return model is None or room is None or room >= model.need()

    def _refuse(self, step: Step) -> None:
        why = f"the budget of server {step.target} has no room for contributions to more blocks"
        self.given_up[why] += 1
        self._router.hub.note("warning", f"block {step.bid} stays where it is: {why}")

    def _begin_copies(self, out: Decisions) -> None:
        self.stage = COPYING
        self.placement += 1
        self._copy, self._copying = self.placement, {step.bid for step in self.batch}
        servers = self._router.members.servers
        sources = [servers[index] for index in sorted({step.source for step in self.batch})]
        out.log(
            c.Copy(
                self._copy,
                [(step.bid, step.target) for step in self.batch],
                [c.ServerAt(s.index, s.hello.name, s.hello.address) for s in sources],
                self._router.config.data_address,
            )
        )

    def _flip_between_updates(self, out: Decisions) -> None:
        """Write the move, but for where servers make values ahead of the log, or know sums of an
        update that is not written: then behind that update."""
        model = self._router.groups.model
        if model is None or not (model.ahead.version or model.is_summing):
            self._flip(out)
        elif model.ahead.version and self._flip_then not in model.ahead.then:
            model.ahead.then.append(self._flip_then)

    def _flip_then(self, out: Decisions) -> None:
        if self.stage == FLIPPING and not self._router.fleet.suspects():
            self._flip(out)

    def _flip(self, out: Decisions) -> None:
        moves = [(step.bid, step.target) for step in self.batch]
        stays = self._stand_by()
        self._router.replicas.moving([(step.bid, step.source) for step in self.batch])
        self.placement += 1
        out.log(c.Move(self.placement, moves, stays))
        self._router.layout.move(moves)
        steps, self.batch, self.stage = self.batch, [], IDLE
        self._tell([step.bid for step in steps], out)
        self.moved += len(steps)
        self._router.loads.anew(self._router.hub.now)

    def _stand_by(self) -> tuple[int, ...]:
        """Have former owners keep copies of what is moving, where there would be none else; return
        of which blocks."""
        if not self._router.replicas.wanted:
            return ()
        found = [s for s in self.batch if self.kept.get(s.bid, s.target) == s.target]
        self.kept.update({step.bid: step.source for step in found})
        return tuple(step.bid for step in found)

    def _tell(self, bids: Sequence[int], out: Decisions) -> None:
        """Tell workers, and groups, where gradients of these blocks go from here on."""
        router, targets = self._router, self.targets()
        self._told = self.placement
        owners = router.layout.blocks
        blocks = [(bid, [owners[bid].server, *sorted(targets.get(bid, ()))]) for bid in bids]
        follow = c.Follow(self.placement, blocks, out.index)
        router.catalog.history.append(follow)
        for incarnation in router.members.incarnations():
            out.tell(incarnation, follow)
        self._awaited = {worker.incarnation for worker in router.members.training()}
        self._open = set()
        layout = router.layout
        of = {layout.group_of[layout.blocks[bid].segments[0].kid] for bid, _ in blocks}
        for number in sorted(of & router.groups.by_number.keys()):
            self.house(number, router.groups.by_number[number].homes)
        model = router.groups.model
        if model is not None:
            model.rules.capacity = requests.capacity(router)

    def house(self, number: int, homes: Homes) -> None:
        """Tell a group which servers its contributions go to."""
        layout, mirrored = self._router.layout, self.targets()
        blocks = layout.blocks_in(number)
        more = {server for block in blocks for server in mirrored.get(block.bid, ())}
        homes.change(self._told, layout.servers_in(number), more)
        homes.bids = frozenset(block.bid for block in blocks if block.segments)

    @property
    def is_still(self) -> bool:
        """Whether nothing moves, and every contribution goes by the present placement."""
        return self.stage == IDLE and not self.waiting and not self.waits_for()

    def targets(self) -> dict[int, set[int]]:
        """Return the other servers of the blocks whose gradients go to more than their owner."""
        found = {bid: {server} for bid, server in self.kept.items()}
        for step in self.batch:
            found.setdefault(step.bid, set()).add(step.target)
        return found

    def heading(self) -> dict[int, int]:
        """Return where the blocks that are moving will be."""
        return {step.bid: step.target for step in self.batch if not step.stays}

    def plain(self) -> dict[str, Any]:
        """Return the moves under way for the status."""
        return {
            "stage": self.stage,
            "moving": [_plain(step) for step in self.batch],
            "waiting": len(self.waiting),
            "moved": self.moved,
            "given_up": dict(self.given_up),
            "waits_for": self._waited_for(),
        }


def _plain(step: Step) -> dict[str, Any]:
    return {"block": step.bid, "from": step.source, "to": step.target, "why": step.why}
