"""All groups of one broker: the model, and each key that is pushed by itself.

Which key belongs to which group, who takes part in it, and who still owes it something. Pure: what
is decided is collected in `Decisions`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from zkv import control as c
from zkv.errors import ProtocolError, Refused
from zkv.layout import Layout
from zkv.owners import Homes
from zkv.policy import SyncPolicy
from zkv.wire import MODEL, ContributionId
from zkv_brokers.catalog import Catalog
from zkv_brokers.decisions import Decisions, Pins
from zkv_brokers.draws import Draws
from zkv_brokers.group import Group
from zkv_brokers.members import Members, Worker


def _from_nothing(number: int) -> tuple[int, Mapping[int, int]]:
    return 0, {}


@dataclass(slots=True)
class Groups:
    """The groups by number; `layout`, `catalog` and `members` are shared with the router."""

    layout: Layout
    catalog: Catalog
    members: Members
    policy: SyncPolicy
    pins: Pins
    prepare: Callable[[Group], None]
    """Called with the model's group before its first member joins."""
    by_number: dict[int, Group] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    """Incarnations that asked for batches before there was a model."""
    draws: Draws = field(default_factory=Draws)
    """The samples that go with the model's grants."""
    house: Callable[[int, Homes], None] = lambda number, homes: None
    """Called with each new group's number, to tell it where contributions go by now."""
    regroups: Callable[[int, Decisions], None] = lambda kid, out: None
    """Called with a key before it leaves its group."""
    begins_at: Callable[[int], tuple[int, Mapping[int, int]]] = _from_nothing
    """Returns the version that a new group (by its number) begins with, and workers' clocks."""
    cohort: set[int] = field(default_factory=set)
    """Who starts together: after a barrier that has let somebody out, or when all have gone back to
    a snapshot."""
    _rested: set[int] = field(default_factory=set)
    """Who was let out by the present barrier."""
    _let_out: dict[int, set[int]] = field(default_factory=dict)
    """Incarnations that a barrier has let out of plain keys' groups, by group."""
    _next: int = 1

    @property
    def model(self) -> Group | None:
        """The model's group, once somebody trains."""
        return self.by_number.get(MODEL)

    @property
    def version(self) -> int:
        """The model's version."""
        return (
            self.by_number[MODEL].version if MODEL in self.by_number else self.begins_at(MODEL)[0]
        )

    def __getitem__(self, number: int) -> Group:
        group = self.by_number.get(number)
        if group is None:
            raise ProtocolError(f"there is no group {number}")
        return group

    def _new(self, number: int) -> Group:
        version, clocks = self.begins_at(number)
        group = self.by_number[number] = Group(
            number,
            self.policy,
            members_min=self.members.expected,
            servers=self.layout.servers_in(number),
            pins=self.pins,
            version=version,
            clocks=clocks,
        )
        self.house(number, group.homes)
        group.shortage = self.members.shortage
        return group

    def make_plain(self, kid: int, out: Decisions, *, at_birth: bool = False) -> int:
        """Give a key a group of its own (at its first plain push); return the group's number.

        Raises:
            Refused: the key is trained in batches.
        """
        number = self.layout.group_of[kid]
        if number != MODEL:
            return number
        key = self.layout.entries[kid].spec.key
        if MODEL in self.by_number and not at_birth:
            raise Refused(
                f"key {key!r} belongs to the model, which is trained in batches; a plain push "
                f"would "
                "tear its version: push it inside a batch, or initialise it with plain=True"
            )
        self.regroups(kid, out)
        number, bid = self._next, self.catalog.next_block()
        self._next += 1
        out.log(c.Regroup(kid, number, bid))
        self.layout.regroup(kid, number, bid)
        told = c.Regrouped(kid, number, bid, out.index)
        self.catalog.history.append(told)
        for incarnation in self.members.incarnations():
            out.tell(incarnation, told)
        group = self._new(number)
        group.join({w.number: w.incarnation for w in self.members.training()}, out)
        return number

    def ask(self, incarnation: int, *, on_demand: bool) -> None:
        """A worker wants batches; `on_demand`: it will ask servers for what it needs of them."""
        self.begun.add(incarnation)
        (self.pins.on_demand.add if on_demand else self.pins.on_demand.discard)(incarnation)

    def begin(self, out: Decisions) -> bool:
        """Let those who asked for batches into the model's group; return whether anybody came in.

        Nobody is granted anything before every shard holds all initial values (rule 7).
        """
        if not self.begun or not self.layout.has_model or self.catalog.pending:
            return False
        group = self.model
        if group is None:
            group = self._new(MODEL)
            group.draws = self.draws
            self.prepare(group)
        if not self._cohort_is_here():
            return False
        members = [self.members.workers.get(incarnation) for incarnation in sorted(self.begun)]
        group.join({w.number: w.incarnation for w in members if w and not w.hello.observer}, out)
        self.begun.clear()
        return True

    def _cohort_is_here(self) -> bool:
        """Whether all who start together have asked for a batch, or are gone."""
        self.cohort &= set(self.members.workers)
        if not self.cohort <= self.begun:
            return False
        self.cohort.clear()
        return True

    def rest(self, worker: Worker) -> None:
        """A worker waits in a barrier: it wants no batch meanwhile, and nobody begins with it."""
        self.begun.discard(worker.incarnation)
        self.cohort.discard(worker.incarnation)
        self.draws.forget(worker)

    def welcome(self, worker: Worker, out: Decisions) -> None:
        """A new member takes part in every plain key from the start; it may end a shortage."""
        for number, group in self.by_number.items():
            if number != MODEL:
                group.join({worker.number: worker.incarnation}, out)
            group.release_starts(out)

    def leave(self, worker: Worker, out: Decisions) -> None:
        """A member is gone."""
        self.begun.discard(worker.incarnation)
        self.draws.forget(worker)
        self.pins.release(worker.incarnation)
        for group in self.by_number.values():
            if group.incarnations.get(worker.number) == worker.incarnation:
                group.leave(worker.number, out)

    def pause(self, out: Decisions) -> None:
        """While workers wait in a barrier, the others' updates must not wait for them for ever.

        Under a policy that needs every worker they stay members as long as the others have work to
        do: who takes part in a round must not depend on who is first at the barrier, or the sums
        would differ from run to run. Only when all the others wait for them are they let out.
        """
        if not any(w.barrier_token for w in self.members.workers.values()):
            return
        for number, plain in self.by_number.items():
            # Who waits has pushed, or is ahead of others; there may be thousands of these groups.
            if number != MODEL and (plain.arrivals or plain.sync.policy.slack is not None):
                self._pause_plain(number, plain, out)
        group = self.model
        if group is None:
            return
        resting = [w for w in self.members.training() if w.barrier_token and self._takes_part(w)]
        if group.sync.policy.threshold is None and not self._all_wait_for(resting):
            return
        for worker in resting:
            if not group.unfinished(worker.incarnation):
                self._rest(group, worker, out)

    def _pause_plain(self, number: int, group: Group, out: Decisions) -> None:
        """Let those in a barrier out of a plain key's group, if somebody waits for them alone.

        Whoever pushes the key would wait for a push of theirs, and they for it in the barrier.
        """
        here = [
            w for w in self.members.training() if group.incarnations.get(w.number) == w.incarnation
        ]
        resting = [w for w in here if w.barrier_token and not group.unfinished(w.incarnation)]
        there = {worker.number for worker in resting}
        others = [group.sync.waiting(w.number) for w in here if w.number not in there]
        if any(one is not None and one.on and set(one.on) <= there for one in others):
            for worker in resting:
                group.pause(worker.number, out)
                self._let_out.setdefault(number, set()).add(worker.incarnation)

    def come_back(self, out: Decisions, *, together: bool = False) -> None:
        """Who is in no barrier any more takes part in all plain keys again.

        `together`: a barrier has opened. Then all begin the next round at once, or those who were
        let out would be one round behind the others for ever.
        """
        training = self.members.training()
        for number, who in list(self._let_out.items()):
            group = self.by_number[number]
            free = [w for w in training if not w.barrier_token]
            back = {w.number: w.incarnation for w in free if together or w.incarnation in who}
            for worker in training if together else ():
                here = group.incarnations.get(worker.number) == worker.incarnation
                if here and worker.number in back and not group.unfinished(worker.incarnation):
                    group.pause(worker.number, out)
            group.join(back, out)
            self._let_out[number] = {w.incarnation for w in training} & who - set(back.values())
            if not self._let_out[number]:
                del self._let_out[number]

    def _rest(self, group: Group, worker: Worker, out: Decisions) -> None:
        self._rested.add(worker.incarnation)
        group.pause(worker.number, out)

    def _takes_part(self, worker: Worker) -> bool:
        group = self.model
        return group is not None and group.incarnations.get(worker.number) == worker.incarnation

    def _all_wait_for(self, resting: Sequence[Worker]) -> bool:
        """Whether members that are not in the barrier wait for nobody but those who are."""
        group, there = self.model, {worker.number for worker in resting}
        if group is None or not there:
            return False
        for worker in self.members.training():
            if worker.number not in there and self._takes_part(worker):
                waiting = group.sync.waiting(worker.number)
                # Whoever computes will finish; one waiting member tells for all.
                return waiting is not None and bool(waiting.on) and set(waiting.on) <= there
        # Who has finished a batch ahead of the log waits in the barrier for an update, too.
        stuck = {w.number for w in resting if group.unfinished(w.incarnation)}
        for waiting in map(group.sync.waiting, stuck):
            if waiting is not None and waiting.on and set(waiting.on) <= there - stuck:
                return True
        # Who is out of samples waits for those that the resting ones hold.
        return bool(self.draws.idle)

    def barrier_opened(self, out: Decisions) -> None:
        """All go on together: if the barrier has let somebody out, the next round is for all
        again."""
        self.come_back(out, together=True)
        group = self.model
        if group is None or group.sync.policy.threshold is not None:
            self._rested.clear()
            return
        self._rested &= set(self.members.workers)
        if self._rested:
            for worker in self.members.training():
                if self._takes_part(worker):
                    self._rest(group, worker, out)
            self.cohort, self._rested = self._rested, set()

    def unfinished(self, worker: Worker) -> bool:
        """Return whether something that a worker has finished is not held everywhere yet."""
        return any(group.unfinished(worker.incarnation) for group in self.by_number.values())

    def kept(self) -> list[ContributionId]:
        """Return all contributions that have arrived and wait for their update."""
        return [name for group in self.by_number.values() for name in group.kept()]

    def shortage(self) -> str:
        """Return a warning if the policy's k is more than there are workers; "" if it is not.

        While the start line still waits for workers, nothing is short.
        """
        wanted, here = self.policy.threshold, len(self.members.training())
        if wanted is None or wanted <= here or self.model is None or not self.model.under_way:
            return ""
        there = "1 worker is" if here == 1 else f"{here} workers are"
        return (
            f"policy {self.policy} wants {wanted} contributions for each update, but {there} "
            f"here: an update takes {here} until more join"
        )

    def switch(self, policy: SyncPolicy, out: Decisions) -> None:
        """Change the policy of all groups (rule 14)."""
        self.policy = policy
        for group in self.by_number.values():
            group.switch(policy, out)
