"""The synchroniser: when contributions become an update, and who may compute meanwhile.

Events go in, actions come out, and `Synchronizer.handle` is the only method that changes
anything. The same events give the same actions, so a log of events is also a snapshot. It knows
worker numbers, grants and versions; it must not know gradients, keys, servers, sockets or time.

Two counters, never mixed. A worker's *clock* counts its finished batches, and `slack` bounds its
lead over the slowest. The model's *version* counts updates, and the staleness of a contribution
is the version just before the update that applies it, less the version it was computed on.

The rules that are choices:

- Events are handled one by one: each is applied, and those it releases are started, before the
  next. A worker that waited starts on the version at its release.
- An update needs min(k, members of the round). A departure can therefore complete it. A
  contribution of a worker that left is still applied; where distinct workers are counted it fills
  no member's place, where batches are counted it is a batch like any other.
- Under a policy that needs *every* worker, the members of a round are fixed when it opens: a
  joiner starts when the next round opens, so who contributes is known in advance. If the last
  member leaves, that is at once, on the current version, and what the leavers contributed is
  applied with the first update of the new round. Under all other policies a joiner starts and
  counts at once.
- A void contribution fills a place with weight 0. When all of a round are void the version stays,
  nothing is cancelled, and the round's contributors start anew.
- A grant that was cancelled may still be finished by a worker that had not heard of it; that
  contribution is discarded and moves no clock.

An event costs O(log n) for n workers, and each action O(log n) more for its place in the order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Set
from types import MappingProxyType
from typing import assert_never

from zkv.events import (
    Action,
    Cancel,
    Commit,
    Contribution,
    Discard,
    Event,
    Finished,
    Joined,
    Left,
    Skipped,
    Start,
    Switched,
    Waiting,
)
from zkv.floor import Floor
from zkv.policy import (
    SyncPolicy,
    asp,
    bsp,
    k_asp,
    k_batch_asp,
    k_batch_bsp,
    k_bsp,
    policy,
    ssp,
)
from zkv.sync_members import Member, Place

__all__ = [
    "Action",
    "Cancel",
    "Commit",
    "Contribution",
    "Discard",
    "Event",
    "Finished",
    "Joined",
    "Left",
    "Start",
    "Switched",
    "SyncPolicy",
    "Synchronizer",
    "Waiting",
    "asp",
    "bsp",
    "k_asp",
    "k_batch_asp",
    "k_batch_bsp",
    "k_bsp",
    "policy",
    "ssp",
]


class Synchronizer:
    """Decides commits, grants, cancellations and discards for one group of keys.

    No worker starts before `members_min` of them are live at once for the first time; after that
    start line it goes on with however many are live. `version` and `clocks` are those of a run that
    it goes on with: a worker that has a clock there joins with that one, once.
    """

    def __init__(
        self,
        policy: SyncPolicy,
        *,
        members_min: int = 1,
        version: int = 0,
        clocks: Mapping[int, int] | None = None,
    ) -> None:
        if members_min < 1:
            raise ValueError(f"members_min must be at least 1, given {members_min}")
        self._policy = policy
        self._members_min = members_min
        self._running = False
        self._version = version
        self._earlier = dict(clocks or {})
        self._members: dict[int, Member] = {}
        self._clocks: dict[int, int] = {}
        self._floor = Floor()
        self._retired: dict[int, int] = {}  # newest grant of each worker that left
        self._joining: set[int] = set()
        self._contributed: set[int] = set()  # live workers that wait for the update
        self._batches = 0  # batches that arrived since the last update, where those are counted
        self._pending: list[Contribution] = []
        self._held: list[tuple[int, int]] = []  # heap of (clock, worker); leavers stay in it

    @property
    def policy(self) -> SyncPolicy:
        """The policy in force."""
        return self._policy

    @property
    def version(self) -> int:
        """How many updates there have been."""
        return self._version

    @property
    def live(self) -> Set[int]:
        """The workers that are members now; a read-only view."""
        return self._members.keys()

    @property
    def clocks(self) -> Mapping[int, int]:
        """Finished batches of each live worker; a joiner inherits the least; a read-only view."""
        return MappingProxyType(self._clocks)

    @property
    def pending(self) -> tuple[Contribution, ...]:
        """What the next update will apply already, sorted by (worker, grant)."""
        return tuple(sorted(self._pending))

    def round(self) -> dict[int, int]:
        """Return whose contributions the next update will be made of: their open grants, or those
        that they have finished, by worker.

        Empty where that is not known in advance: the policy does not need every worker, nobody has
        started, or one of them has contributed nothing, or something of an earlier round waits.
        """
        if self._policy.threshold is not None or not self._running:
            return {}
        found = {w: m.grant for w, m in self._members.items() if m.place is not Place.JOINING}
        pending = {(one.worker, one.grant) for one in self._pending}
        contributed = {(worker, found[worker]) for worker in self._contributed}
        return found if pending == contributed else {}

    def next_grant(self, worker: int) -> int:
        """Return the number that this member's next grant will have."""
        member = self._member(worker)
        return member.grant + member.skipped + 1

    def computing(self) -> list[int]:
        """Return the workers with open grants, rising."""
        return sorted(w for w, m in self._members.items() if m.place is Place.COMPUTING)

    def handle(self, event: Event) -> list[Action]:
        """Apply one event and return what must be done, in this order.

        Raises ValueError, and changes nothing, for an event that contradicts what went before:
        a worker that joins twice, is unknown or has left, a grant never given or finished twice.
        """
        match event:
            case Joined(worker, others):
                return self._on_joined((worker, *others))
            case Left(worker):
                return self._on_left(worker)
            case Finished(worker, grant, void):
                return self._on_finished(worker, grant, void)
            case Switched(policy):
                return self._on_switched(policy)
            case Skipped(worker):
                self._member(worker).skipped += 1
                return []
        assert_never(event)

    def waiting(self, worker: int) -> Waiting | None:
        """Why this worker is not computing; None if it is. Scans the members.

        Raises ValueError if the worker is not a member.
        """
        member = self._member(worker)
        if member.place is Place.COMPUTING:
            return None
        if not self._running:
            rule = f"the first start needs {self._members_min} workers"
            return Waiting(rule, (), self._members_min, len(self._members))
        if member.place is Place.HELD:
            slack = self._policy.slack or 0
            need = self._clocks[worker] - slack
            on = tuple(sorted(w for w, clock in self._clocks.items() if clock < need))
            rule = f"{self._policy}: at most {slack} finished batches ahead of the slowest"
            return Waiting(rule, on, need, self._floor.value())
        who = "every worker" if self._policy.threshold is None else f"{self._need()} workers"
        rule = f"{self._policy}: the update needs a contribution of {who}"
        if member.place is Place.JOINING:
            rule = f"{self._policy}: a joiner starts after the update of the open round"
        computing = (w for w, m in self._members.items() if m.place is Place.COMPUTING)
        return Waiting(rule, tuple(sorted(computing)), self._need(), self._have())

    # Events

    def _on_joined(self, workers: tuple[int, ...]) -> list[Action]:
        for worker in workers:
            if worker in self._members or workers.count(worker) > 1:
                raise ValueError(
                    f"worker {worker} joined twice; it must leave before it joins again"
                )
        for worker in workers:
            self._members[worker] = Member(self._retired.pop(worker, 0))
            clock = self._earlier.pop(worker, None)
            self._clocks[worker] = self._joiner_clock() if clock is None else clock
            self._floor.add(self._clocks[worker])
            self._joining.add(worker)
        self._running = self._running or len(self._members) >= self._members_min
        return self._settle([], set())

    def _on_left(self, worker: int) -> list[Action]:
        gone = self._member(worker)
        self._retired[worker] = gone.grant + gone.skipped
        del self._members[worker]
        self._floor.remove(self._clocks.pop(worker))
        self._joining.discard(worker)
        self._contributed.discard(worker)
        return self._settle([], set())

    def _on_finished(self, worker: int, grant: int, void: bool) -> list[Action]:
        member = self._member(worker)
        if grant != member.grant or member.place is not Place.COMPUTING:
            return self._on_late(worker, member, grant)
        self._tick(worker)
        actions: list[Action] = []
        if void:
            actions.append(Discard(worker, grant))
        else:
            self._pending.append(Contribution(worker, grant, member.base_version))
        # Until it is granted again, here or at the update, it has no place in the computation.
        member.place = Place.CONTRIBUTED
        if self._policy.distinct:
            self._contributed.add(worker)
            return self._settle(actions, set())
        self._batches += 1
        return self._settle(actions, {worker})

    def _on_late(self, worker: int, member: Member, grant: int) -> list[Action]:
        if member.settle_late(grant):
            return [Discard(worker, grant)]
        given = f"grants 1 to {member.grant}" if member.grant else "no grant"
        raise ValueError(
            f"worker {worker} finished grant {grant}, which is not open: it was given {given}, "
            "and each can be finished once, within the membership it was given in"
        )

    def _on_switched(self, policy: SyncPolicy) -> list[Action]:
        actions: list[Action] = []
        if not self._running:
            self._policy = policy
            return actions
        self._commit(actions)
        self._policy = policy
        self._close_round()
        self._held.clear()
        # A new round for all: who waits is judged by the new policy, who computes goes on
        # unless the new policy cancels.
        ready = {
            worker
            for worker, member in self._members.items()
            if policy.cancel or member.place is not Place.COMPUTING
        }
        self._grant(ready, actions)
        return actions

    # Decisions

    def _settle(self, actions: list[Action], ready: set[int]) -> list[Action]:
        """Make the update if it is due, then start those who are `ready` or become so."""
        need = self._need()
        if 0 < need <= self._have():
            committed = self._commit(actions)
            ready |= self._close_round()
            if committed and self._policy.cancel:
                ready |= self._members.keys()
        elif self._running and (self._policy.threshold is not None or not need):
            ready |= self._joining
            self._joining.clear()
        self._grant(ready | self._released(), actions)
        return actions

    def _need(self) -> int:
        """How many contributions the open round needs; 0 if it has no members."""
        members = len(self._members) - len(self._joining)
        threshold = self._policy.threshold
        return members if threshold is None else min(threshold, members)

    def _have(self) -> int:
        """How many of them it has."""
        return len(self._contributed) if self._policy.distinct else self._batches

    def _commit(self, actions: list[Action]) -> bool:
        """Apply what is pending; False, and the version stays, if nothing is."""
        if not self._pending:
            return False
        self._version += 1
        actions.append(Commit(self._version, self.pending))
        self._pending.clear()
        return True

    def _close_round(self) -> set[int]:
        """Open the next round; returns the workers that waited for it."""
        waited = self._contributed | self._joining
        self._contributed.clear()
        self._joining.clear()
        self._batches = 0
        return waited

    def _released(self) -> set[int]:
        """Take out the held workers that the slowest has let go."""
        released = set()
        while self._held and self._within_slack(self._held[0][0]):
            clock, worker = heapq.heappop(self._held)
            member = self._members.get(worker)
            # The entry of a worker that left is stale, also when it has joined again.
            if member and member.place is Place.HELD and self._clocks[worker] == clock:
                released.add(worker)
        return released

    def _grant(self, ready: Iterable[int], actions: list[Action]) -> None:
        """In worker order, cancel what is open and start, or hold, each of these workers."""
        for worker in sorted(ready):
            member = self._members[worker]
            if member.place is Place.COMPUTING:
                member.cancelled()
                actions.append(Cancel(worker, member.grant))
            clock = self._clocks[worker]
            if not self._within_slack(clock):
                member.place = Place.HELD
                heapq.heappush(self._held, (clock, worker))
                continue
            member.place = Place.COMPUTING
            member.grant += 1 + member.skipped
            member.skipped = 0
            member.base_version = self._version
            actions.append(Start(worker, member.grant, self._version))

    # Members and clocks

    def _member(self, worker: int) -> Member:
        member = self._members.get(worker)
        if member is None:
            was = "has left" if worker in self._retired else "never joined"
            raise ValueError(f"worker {worker} {was}; it must join before anything else")
        return member

    def _joiner_clock(self) -> int:
        # At its own 0, a newcomer would hold everyone until it had caught up.
        return self._floor.value()

    def _tick(self, worker: int) -> None:
        clock = self._clocks[worker]
        self._clocks[worker] = clock + 1
        self._floor.add(clock + 1)
        self._floor.remove(clock)

    def _within_slack(self, clock: int) -> bool:
        slack = self._policy.slack
        return slack is None or clock - self._floor.value() <= slack
