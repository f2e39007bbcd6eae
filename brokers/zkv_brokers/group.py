"""One group of keys with one version: its synchronizer, and what its decisions mean for the log.

The synchronizer knows workers and grants; this knows contributions, who holds them, credits and
pinned versions, and turns each decision into log entries and messages to workers, in order. A
decision that has to wait (for square sums, for credit) holds the later ones of its group back.
Pure: what is decided is collected in `Decisions`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from zkv import control as c
from zkv import events as e
from zkv.marks import Marks
from zkv.owners import Homes
from zkv.policy import SyncPolicy
from zkv.sync import Synchronizer
from zkv.wire import MODEL, NO_BATCH, ContributionId
from zkv_brokers.book import Book
from zkv_brokers.decisions import CANCELLED, Arrival, Decisions, Pins
from zkv_brokers.draws import Draws
from zkv_brokers.giving import give
from zkv_brokers.holdings import Holdings
from zkv_brokers.rules import Rules
from zkv_brokers.summing import Summing


class Group(Book):
    """The model (group 0) or one plain key, from joins and finishes to commits and grants."""

    def __init__(
        self,
        group: int,
        policy: SyncPolicy,
        *,
        members_min: int,
        servers: Iterable[int],
        pins: Pins,
        version: int = 0,
        clocks: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.group, self.version = group, version
        """The version that the log has reached; the synchronizer's may be ahead of it (`Sum`)."""
        self.sync = Synchronizer(policy, members_min=members_min, version=version, clocks=clocks)
        self.homes = Homes(servers)
        self.rules = Rules()
        self.shortage: Callable[[], str] = str
        self.draws = Draws()
        """The samples that go with the grants; of the model only."""
        self._pins = pins
        self.holdings = Holdings(group, pins)
        self._queue: deque[e.Action] = deque()
        self._starts: deque[e.Start] = deque()
        self._summing: Summing | None = None
        self._after_sum: list[c.Entry] = []

    # --- members -----------------------------------------------------------------------------

    def join(self, members: Mapping[int, int], out: Decisions) -> None:
        """Workers (incarnations by number) take part from now on, all from the same moment."""
        fresh = {n: i for n, i in sorted(members.items()) if self.incarnations.get(n) != i}
        if fresh:
            self.incarnations.update(fresh)
            first, *others = fresh
            self._decide(e.Joined(first, tuple(others)), out)

    def leave(self, number: int, out: Decisions) -> None:
        """A worker has left or was lost. What it finished still counts, the rest never arrives."""
        if number not in self.incarnations:
            return
        self.ahead.without(number, self, out)
        incarnation = self.incarnations.pop(number)
        for name, arrival in list(self.arrivals.items()):
            if name.incarnation == incarnation and not arrival.arrived:
                del self.arrivals[name]
        self.reserved = {r for r in self.reserved if r[0] != number or r in self._arrived}
        self._forget_queued(number)
        self.bases = {b: v for b, v in self.bases.items() if b[0] != number or b in self._arrived}
        self.over.pop(incarnation, None)
        self.holdings.left(incarnation)
        self.draws.left(number, self._arrived)
        self._decide(e.Left(number), out)

    def pause(self, number: int, out: Decisions) -> None:
        """A worker waits in a barrier: no update may wait for it. Its unused grant is taken
        back."""
        self.ahead.without(number, self, out)
        incarnation, grant = self.incarnations.pop(number), self.current.get(number)
        unused = grant is not None and not self.is_over(incarnation, grant)
        if grant is not None and unused and (number, grant) not in self._arrived:
            self.take_back(incarnation, number, grant, out)
        self._forget_queued(number)
        self._decide(e.Left(number), out)

    def rest(self, number: int, out: Decisions) -> None:
        """A worker has found no samples for its newest grant: no update may wait for it."""
        self.ahead.without(number, self, out)
        self.incarnations.pop(number)
        self._forget_queued(number)
        self._decide(e.Left(number), out)

    @property
    def is_still(self) -> bool:
        """Whether nobody is a member and nothing is undecided: nothing can come back."""
        return not (self.sync.live or self._queue or self._summing)

    def _forget_queued(self, number: int) -> None:
        """Drop what was decided for a worker and not carried out: it is no member now.

        Its number may be taken by another incarnation before a pending commit lets the queue move.
        """
        self._starts = deque(start for start in self._starts if start.worker != number)
        self._queue = deque(
            action
            for action in self._queue
            if not (isinstance(action, e.Start | e.Cancel) and action.worker == number)
        )

    def switch(self, policy: SyncPolicy, out: Decisions) -> None:
        """Change the policy at the current version (rule 14)."""
        self.ahead.drop(self, out)
        self._decide(e.Switched(policy), out)

    # --- contributions -----------------------------------------------------------------------

    def finish(self, said: c.Finish, number: int, out: Decisions) -> None:
        """The worker says that it has sent all of a contribution."""
        if self.is_over(said.contribution.incarnation, said.grant):
            self._settle(said.contribution, -1, CANCELLED, out)
            return
        arrival = self.arrival(said.contribution, number, said.grant)
        arrival.finished, arrival.grant, arrival.weight = True, said.grant, said.weight
        arrival.loss, arrival.nbytes, arrival.placement = said.loss, said.nbytes, said.placement
        if said.behind:
            self.computed_on_older(arrival, said.behind, self.rules)
        arrival.misled = said.declared not in (None, said.weight)
        if arrival.misled and self.ahead.members.get(number) == said.grant:
            self.ahead.drop(self, out)
        unpinned = self.holdings.finished(said.contribution.incarnation, said.grant)
        self._check(arrival, out)
        if unpinned:
            self.release_starts(out)

    def held(
        self, name: ContributionId, number: int, grant: int, server: int, index: int, out: Decisions
    ) -> None:
        """A server says that it holds its part of a contribution, at this index of the log."""
        if self.is_over(name.incarnation, grant) or self.together.is_stale(
            name.incarnation, grant, index
        ):
            return
        arrival = self.arrival(name, number, grant)
        arrival.held.add(server)
        self._check(arrival, out)

    def void(
        self, name: ContributionId, number: int, grant: int, reason: str, out: Decisions
    ) -> None:
        """A server's guard refuses a contribution (rule 9)."""
        if self.is_over(name.incarnation, grant):
            return
        arrival = self.arrival(name, number, grant)
        arrival.void = arrival.void or reason
        self._check(arrival, out)

    def withdraw(self, name: ContributionId, grant: int, out: Decisions) -> None:
        """The worker takes back what it has sent of a batch; its grant stays."""
        arrival = self.arrivals.get(name)
        finished = arrival is not None and arrival.finished
        if finished or self.is_over(name.incarnation, grant):
            return
        number = next((n for n, i in self.incarnations.items() if i == name.incarnation), -1)
        if self.ahead.members.get(number) == grant:
            self.ahead.drop(self, out)
        self.together.stops(number, "withdraws a batch", self, out)
        self.arrivals.pop(name, None)
        out.log(c.Discard(name.incarnation, self.group, grant, name.batch))

    def received(self, incarnation: int, grant: int, out: Decisions) -> None:
        """The worker holds all blocks of a grant: its version is no longer pinned for it."""
        self.holdings.received(incarnation, grant)
        self.release_starts(out)
        if self.together.undecided:
            self._look_ahead(out)

    def _check(self, arrival: Arrival, out: Decisions) -> None:
        if arrival.arrived or not arrival.finished or self.ahead.holds_back(arrival):
            return
        for one in self.together.ready(arrival, self, out):
            self._arrive(one, out)

    def _arrive(self, arrival: Arrival, out: Decisions) -> None:
        if arrival.void or self.homes.at(arrival.placement) <= arrival.held:
            arrival.arrived = True
            # No update happens between arrival and application: the age is the same then.
            age = self._age(arrival.number, arrival.grant)
            arrival.void = arrival.void or self.rules.refuses(age, arrival)
            self._arrived[arrival.number, arrival.grant] = arrival.contribution
            if arrival.void and self.ahead.members.get(arrival.number) == arrival.grant:
                self.ahead.drop(self, out)
            self._decide(e.Finished(arrival.number, arrival.grant, void=bool(arrival.void)), out)

    # --- decisions ---------------------------------------------------------------------------

    def _decide(self, event: e.Event, out: Decisions) -> None:
        self._queue.extend(self.sync.handle(event))
        self._carry_out(out)
        # A departure may leave room for a grant that waits, without any decision of the policy.
        self.release_starts(out)
        confirmed, self.ahead.confirmed = self.ahead.confirmed, []
        for arrival in confirmed:
            self._check(arrival, out)
        self._look_ahead(out)

    def _look_ahead(self, out: Decisions) -> None:
        self.ahead.look(self, out)
        for arrival in self.together.look(self, out):
            self._check(arrival, out)

    def check_all(self, out: Decisions) -> None:
        """Look at all contributions that have not arrived: fewer servers may have to hold them."""
        for name, arrival in list(self.arrivals.items()):
            if name in self.arrivals:
                self._check(arrival, out)

    def sum_again(self, out: Decisions) -> None:
        """Blocks have other owners: ask again for the sums that a commit waits for, if one does."""
        if self._summing is not None and isinstance(action := self._queue[0], e.Commit):
            self._ask_for_sums(action, out)

    def _ask_for_sums(self, action: e.Commit, out: Decisions) -> None:
        self._summing = Summing(action.version)
        out.log(c.Sum(self.group, action.version, self._counted(action)))

    @property
    def is_summing(self) -> bool:
        """Whether servers were asked for sums of an update that is not in the log yet."""
        return self._summing is not None

    @property
    def busy(self) -> bool:
        """Whether something is decided and not carried out."""
        return bool(self._queue or self._starts or self._summing)

    def _carry_out(self, out: Decisions) -> None:
        while self._queue and self._summing is None:
            action = self._queue[0]
            match action:
                case e.Commit() if self.rules.clips:
                    self._ask_for_sums(action, out)
                    return
                case e.Commit():
                    self._commit(action, None, out)
                case e.Start():
                    if not self.ahead.takes(action, self):
                        self._starts.append(action)
                case e.Cancel(worker=number, grant=grant):
                    self._cancel(number, grant, out)
                case e.Discard(worker=number, grant=grant):
                    self._discard(number, grant, out)
            self._queue.popleft()
            self.release_starts(out)

    def _counted(self, action: e.Commit) -> list[c.Counted]:
        found = [self.found(one.worker, one.grant) for one in action.contributions]
        return [
            c.Counted(one.contribution, one.weight, self._age(one.number, one.grant), one.clip)
            for one in found
        ]

    def _age(self, number: int, grant: int) -> int:
        """Return how many updates have happened since a grant: its contribution's staleness."""
        return self.version - self.bases.get((number, grant), self.version)

    def _commit(self, action: e.Commit, square_sum: float | None, out: Decisions) -> None:
        counted = self._counted(action)
        out.log(c.Commit(self.group, action.version, counted, square_sum))
        self.version = action.version
        if self.rules.coding.widths is not None:
            self.rules.coding.widths.updated([self.arrivals[one.contribution] for one in counted])
        for one in counted:
            book = self.tally(self.arrivals[one.contribution].number)
            book.applied += 1
            book.staleness[one.staleness] += 1
            self._settle(one.contribution, action.version, "", out)
        self.ahead.committed(action.version, out)
        self.together.committed(action.version)

    def square_sums(self, server: int, message: c.SquareSums, out: Decisions) -> None:
        """A server's answer to `Sum`; with the last one the commit is written."""
        total = None
        if self._summing is not None:
            total = self._summing.take(server, message, self.homes.owners, self.homes.bids)
        if total is not None:
            action = self._queue.popleft()
            self._summing = None
            if isinstance(action, e.Commit):
                self._commit(action, total, out)
            out.entries += self._after_sum
            self._after_sum = []
            self._carry_out(out)

    def log_between_commits(self, entry: c.Entry, out: Decisions) -> None:
        """Write an entry, but never between a `Sum` and its commit."""
        if self._summing is None:
            out.log(entry)
        else:
            self._after_sum.append(entry)

    def configure(self, entry: c.Entry, out: Decisions, *, late: bool) -> None:
        """Write settings into the log; `late`: behind the next update, if that is foreseen.

        So are those that follow such settings: each entry names them all.
        """
        if self.ahead.version and (late or self.ahead.later):
            self.ahead.later.append(entry)
            return
        self.log_between_commits(entry, out)

    def _settle(self, name: ContributionId, version: int, why: str, out: Decisions) -> None:
        arrival = self.arrivals.pop(name, None)
        if arrival is not None:
            self.draws.settle(arrival.number, arrival.grant, counted=version >= 0)
            self.reserved.discard((arrival.number, arrival.grant))
            self._arrived.pop((arrival.number, arrival.grant), None)
            self.bases.pop((arrival.number, arrival.grant), None)
            if arrival.arrived:
                self.over.setdefault(name.incarnation, Marks()).settle(arrival.grant)
        out.tell(name.incarnation, c.Settled([(self.group, name.batch, version, why)]))

    def _cancel(self, number: int, grant: int, out: Decisions) -> None:
        # A grant that is not used before a barrier is taken back too, but nothing was cancelled.
        if (number, grant) in self.bases:
            self.tally(number).cancelled += 1
        self.take_back(self.incarnations[number], number, grant, out)

    def take_back(self, incarnation: int, number: int, grant: int, out: Decisions) -> None:
        """A grant counts no more, nor what was computed under it."""
        self.reserved.discard((number, grant))
        self.draws.settle(number, grant, counted=False)
        self.bases.pop((number, grant), None)
        self.over.setdefault(incarnation, Marks()).settle(grant)
        self.holdings.taken_back(incarnation, grant)
        self._starts = deque(s for s in self._starts if (s.worker, s.grant) != (number, grant))
        out.log(c.Discard(incarnation, self.group, grant, NO_BATCH))
        out.tell(incarnation, c.Cancel(self.group, grant))
        for name in [
            n for n, a in self.arrivals.items() if n.incarnation == incarnation and a.grant == grant
        ]:
            self._settle(name, -1, CANCELLED, out)

    def _discard(self, number: int, grant: int, out: Decisions) -> None:
        if (number, grant) not in self._arrived:
            # It arrived while a commit waited for its square sums, and was cancelled by that
            # commit.
            return
        arrival = self.found(number, grant)
        name = arrival.contribution
        out.log(c.Discard(name.incarnation, self.group, grant, NO_BATCH, values=True))
        if arrival.void and not arrival.void.startswith("late"):
            self.tally(number).discarded += 1
        else:
            self.tally(number).late += 1
        self._settle(name, -1, arrival.void or "late: the update happened without it", out)

    def release_starts(self, out: Decisions) -> None:
        """Grant what the policy has released, as far as nothing else holds it."""
        while self._starts and not self.held_because():
            start = self._starts.popleft()
            if start.worker in self.incarnations:
                give(self, start.worker, start.grant, self.version, out)

    def is_held(self, number: int) -> bool:
        """Return whether the policy has released this worker, but its grant has to wait."""
        return any(start.worker == number for start in self._starts)

    def held_because(self, version: int | None = None) -> str:
        """Return why the next grant has to wait though the policy allows it; "" if it need not.

        It would be at this version; None: at the present one.
        """
        room = self.rules.capacity
        if room is not None and len(self.reserved) >= room:
            return (
                f"the servers' budget has room for {room} contributions, and all of it "
                "is taken; raise --budget or wait for the next update"
            )
        if self.group == MODEL and not self._pins.admits(
            self.version if version is None else version
        ):
            return f"{self._pins.versions_max} versions of the model are still on their way"
        return self.shortage()

    def need(self, policy: SyncPolicy | None = None) -> int:
        """Return how many contributions a server must have room for; None: this policy's need."""
        wanted, live = (policy or self.sync.policy).threshold, len(self.sync.live)
        return max(1, live if wanted is None else min(wanted, live))
