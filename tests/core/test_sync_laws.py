"""What always holds for the synchroniser, for any play of joins, departures, batches and switches.

A referee keeps its own plain account of the cluster and checks each answer against it. The
mutants at the end are wrong machines; the referee must catch every one.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from zkv.floor import Floor
from zkv.sync import (
    Cancel,
    Commit,
    Discard,
    Finished,
    Joined,
    Left,
    Start,
    Switched,
    Synchronizer,
    SyncPolicy,
    asp,
    bsp,
    k_asp,
    k_batch_asp,
    k_batch_bsp,
    k_bsp,
    ssp,
)

WORKERS = 6


class Referee:
    """Plays events on a machine, keeps its own account, and asserts the laws."""

    def __init__(self, make, policy, members_min):
        self.machine = make(policy, members_min=members_min)
        self.policy, self.members_min = policy, members_min
        self.running = False
        self.version = 0
        self.clocks: dict[int, int] = {}
        self.newest: dict[int, int] = {}  # grants given to each worker number, ever
        self.open: dict[int, tuple[int, int]] = {}  # live worker: (grant, version)
        self.late: set[tuple[int, int]] = set()
        self.pending: dict[tuple[int, int], int] = {}
        self.fates: dict[tuple[int, int], list[str]] = {}  # of each arrival that was not late
        self.round: set[int] = set()  # members of the open round
        self.contributors: set[int] = set()
        self.batches = 0

    # Events, each with what it must lead to

    def join(self, worker):
        self.clocks[worker] = min(self.clocks.values(), default=0)
        self.running = self.running or len(self.clocks) >= self.members_min
        self.check(self.handle(Joined(worker)))

    def leave(self, worker):
        del self.clocks[worker]
        self.open.pop(worker, None)
        self.late = {(w, grant) for w, grant in self.late if w != worker}
        self.round.discard(worker)
        self.contributors.discard(worker)
        self.check(self.handle(Left(worker)))

    def finish(self, worker, void):
        grant, base = self.open.pop(worker)
        self.clocks[worker] += 1
        self.fates[worker, grant] = []
        if not void:
            self.pending[worker, grant] = base
        if self.policy.distinct:
            self.contributors.add(worker)
        else:
            self.batches += 1
        self.check(
            self.handle(Finished(worker, grant, void)), refused=(worker, grant) if void else None
        )

    def finish_late(self, worker, grant):
        self.late.remove((worker, grant))
        assert self.handle(Finished(worker, grant)) == [Discard(worker, grant)]
        self.check_account()

    def switch(self, policy):
        self.policy = policy
        self.check(self.handle(Switched(policy)), switched=True)

    def err(self, event):
        with pytest.raises(ValueError, match="worker"):
            self.machine.handle(event)
        self.check_account()

    def handle(self, event):
        try:
            return self.machine.handle(event)
        except ValueError as error:
            raise AssertionError(f"a legal event was refused: {event}") from error

    # Laws

    def need(self):
        members = len(self.round)
        return members if self.policy.threshold is None else min(self.policy.threshold, members)

    def check(self, actions, refused=None, switched=False):
        actions = list(actions)
        if refused:
            assert actions[:1] == [Discard(*refused)]
            del actions[0]
            self.fates[refused].append("discarded")
        have = len(self.contributors) if self.policy.distinct else self.batches
        due = (switched and self.running) or 0 < self.need() <= have
        if due and not switched:
            # An update takes exactly what it needs, leavers' contributions apart.
            assert have == self.need()
        committed = due and bool(self.pending)
        if committed:
            assert actions, "an update is due"
            self.check_commit(actions.pop(0))
        if due:
            self.contributors.clear()
            self.batches = 0
        everyone = self.policy.threshold is None
        if self.running and (due or not everyone or not self.round):
            self.round = set(self.clocks)
        self.check_grants(actions, cancelling=self.policy.cancel and (committed or switched))
        self.check_account()

    def check_commit(self, commit):
        assert isinstance(commit, Commit)
        assert commit.version == self.version + 1
        self.version += 1
        given = [(c.worker, c.grant) for c in commit.contributions]
        assert given == sorted(self.pending), "all that is pending, once, in worker order"
        for c in commit.contributions:
            assert c.base_version == self.pending.pop((c.worker, c.grant))
            self.fates[c.worker, c.grant].append("committed")

    def check_grants(self, actions, cancelling):
        assert all(isinstance(action, Start | Cancel) for action in actions), "none other is due"
        workers = [action.worker for action in actions]
        assert workers == sorted(workers)
        was_open = set(self.open)
        for following, action in enumerate(actions, start=1):
            worker = action.worker
            if isinstance(action, Cancel):
                assert cancelling
                assert self.open.pop(worker)[0] == action.grant
                self.late.add((worker, action.grant))
                assert isinstance(actions[following], Start)
                assert actions[following].worker == worker
                continue
            assert worker not in self.open
            assert action.grant == self.newest.get(worker, 0) + 1
            assert action.version == self.version
            assert self.may_start(worker)
            self.newest[worker] = action.grant
            self.open[worker] = (action.grant, action.version)
        if cancelling and self.running:
            cancelled = {action.worker for action in actions if isinstance(action, Cancel)}
            assert cancelled == was_open

    def may_start(self, worker):
        if worker not in self.round or worker in self.contributors:
            return False
        lead = self.clocks[worker] - min(self.clocks.values())
        return self.policy.slack is None or lead <= self.policy.slack

    def check_account(self):
        machine = self.machine
        assert machine.version == self.version
        assert set(machine.live) == set(self.clocks)
        assert dict(machine.clocks) == self.clocks
        assert {(c.worker, c.grant): c.base_version for c in machine.pending} == self.pending
        if self.running and self.clocks:
            assert self.open, "somebody computes, or nobody ever will"
        for worker in self.clocks:
            reason = machine.waiting(worker)
            if worker in self.open:
                assert reason is None
                continue
            assert not self.may_start(worker), "nobody waits when the policy lets it start"
            self.check_reason(worker, reason)

    def check_reason(self, worker, reason):
        assert reason is not None
        assert reason.have < reason.need
        if not self.running:
            assert (reason.on, reason.need) == ((), self.members_min)
        elif worker in self.round and worker not in self.contributors:
            assert reason.need == self.clocks[worker] - self.policy.slack
            assert reason.have == min(self.clocks.values())
            behind = {w for w, clock in self.clocks.items() if clock < reason.need}
            assert set(reason.on) == behind
        else:
            assert reason.on == tuple(sorted(self.open))
            assert reason.need == self.need()

    def check_end(self):
        for arrival, fate in self.fates.items():
            assert fate + ["pending"] * (arrival in self.pending) in (
                ["committed"],
                ["discarded"],
                ["pending"],
            )


policies = st.one_of(
    st.just(bsp()),
    st.just(asp()),
    st.integers(0, 3).map(ssp),
    *(st.integers(1, 4).map(make) for make in (k_bsp, k_batch_bsp, k_asp, k_batch_asp)),
    # Policies without a name of their own: the laws are of the fields, not of the seven rows.
    st.builds(
        SyncPolicy,
        name=st.just("own"),
        threshold=st.integers(1, 4),
        distinct=st.just(False),
        cancel=st.just(False),
        slack=st.none() | st.integers(0, 3),
    ),
    st.just(SyncPolicy("own", threshold=None, distinct=False, cancel=False, slack=None)),
    st.just(SyncPolicy("own", threshold=None, distinct=True, cancel=False, slack=None)),
    st.just(SyncPolicy("own", threshold=None, distinct=False, cancel=True, slack=None)),
)
kinds = ["finish"] * 8 + ["void", "join", "join", "leave", "leave", "late", "illegal", "switch"]
moves = st.tuples(st.sampled_from(kinds), st.integers(0, WORKERS**2), policies)
plays = st.tuples(policies, st.integers(1, 5), st.lists(moves, min_size=15, max_size=60))


def pick(number, choices):
    choices = sorted(choices)
    return choices[number % len(choices)] if choices else None


def illegal_event(referee, number):
    live = sorted(referee.clocks)
    absent = [worker for worker in range(WORKERS) if worker not in referee.clocks]
    events = [Joined(worker) for worker in live] + [Left(worker) for worker in absent]
    for worker in live:
        newest = referee.newest.get(worker, 0)
        legal = {grant for w, grant in referee.late if w == worker}
        legal |= {referee.open[worker][0]} if worker in referee.open else set()
        events += [Finished(worker, g) for g in range(newest + 2) if g not in legal]
    events += [Finished(worker, referee.newest.get(worker, 1)) for worker in absent]
    return events[number % len(events)]


def play_on(make, play):
    """Play on a machine that `make` makes; AssertionError if it breaks a law."""
    policy, members_min, all_moves = play
    referee = Referee(make, policy, members_min)
    for worker in range(members_min):
        referee.join(worker)
    for kind, number, other_policy in all_moves:
        if kind == "switch":
            referee.switch(other_policy)
        elif kind == "illegal":
            referee.err(illegal_event(referee, number))
        elif kind == "join":
            worker = pick(number, set(range(WORKERS)) - set(referee.clocks))
            if worker is not None:
                referee.join(worker)
        elif kind == "late":
            late = pick(number, referee.late)
            if late is not None:
                referee.finish_late(*late)
        else:
            worker = pick(number, referee.clocks if kind == "leave" else referee.open)
            if worker is not None and kind == "leave":
                referee.leave(worker)
            elif worker is not None:
                referee.finish(worker, void=kind == "void")
    referee.check_end()


@given(plays)
def test_every_play_keeps_the_laws(play):
    play_on(Synchronizer, play)


@given(plays)
def test_the_same_events_give_the_same_actions(play):
    logs = []

    class Recorded(Synchronizer):
        def handle(self, event):
            actions = super().handle(event)
            logs[-1].append((event, tuple(actions)))
            return actions

    for _ in range(2):
        logs.append([])
        play_on(Recorded, play)
    assert logs[0] == logs[1]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300)), max_size=400))
def test_the_floor_is_the_least_clock_and_forgets_what_was_passed(changes):
    floor, clocks = Floor(), []
    for add, number in changes:
        if add or not clocks:
            clocks.append(number)
            floor.add(number)
        else:
            floor.remove(clocks.pop(number % len(clocks)))
        assert floor.value() == min(clocks, default=0)


def test_one_stuck_worker_does_not_let_memory_grow():
    floor = Floor()
    floor.add(0)
    floor.add(0)
    for clock in range(10_000):
        floor.add(clock + 1)
        floor.remove(clock)
    assert floor.value() == 0
    assert len(floor._heap) < 100


# Mutants


class NeedIsAlwaysK(Synchronizer):
    def _need(self):
        members = len(self._members) - len(self._joining)
        return members if self._policy.threshold is None else self._policy.threshold


class JoinerClockIsZero(Synchronizer):
    def _joiner_clock(self):
        return 0


class JoinerCountsAtOnce(Synchronizer):
    def _need(self):
        members = len(self._members)
        threshold = self._policy.threshold
        return members if threshold is None else min(threshold, members)


class LateIsAccepted(Synchronizer):
    def _on_late(self, worker, member, grant):
        if not member.settle_late(grant):
            return super()._on_late(worker, member, grant)
        member.late.append(range(member.grant, member.grant + 1))
        member.grant = grant
        return self._on_finished(worker, grant, False)


class OneMoreSlack(Synchronizer):
    def _within_slack(self, clock):
        return super()._within_slack(clock - 1)


class OneLessSlack(Synchronizer):
    def _within_slack(self, clock):
        return clock == self._floor.value() or super()._within_slack(clock + 1)


class LeaverFillsAPlace(Synchronizer):
    def _have(self):
        if not self._policy.distinct:
            return self._batches
        return len(self._contributed | {c.worker for c in self._pending})


class LeaversContributionIsLost(Synchronizer):
    def _on_left(self, worker):
        actions = super()._on_left(worker)
        self._pending = [c for c in self._pending if c.worker != worker]
        return actions


class DepartureCompletesNothing(Synchronizer):
    def _on_left(self, worker):
        settle, self._settle = self._settle, lambda actions, ready: actions
        try:
            return super()._on_left(worker)
        finally:
            self._settle = settle


class HeldAreNeverReleased(Synchronizer):
    def _released(self):
        return set()


class VoidFillsNoPlace(Synchronizer):
    def _on_finished(self, worker, grant, void):
        if void and self._member(worker).grant == grant:
            self._tick(worker)
            return [Discard(worker, grant)]
        return super()._on_finished(worker, grant, void)


class VoidIsApplied(Synchronizer):
    def _on_finished(self, worker, grant, void):
        return super()._on_finished(worker, grant, False)


class AllVoidIsAnUpdate(Synchronizer):
    def _commit(self, actions):
        if not self._pending:
            self._version += 1
            actions.append(Commit(self._version, ()))
            return True
        return super()._commit(actions)


class ArrivalOrder(Synchronizer):
    @property
    def pending(self):
        return tuple(self._pending)


class CancelledIsForgotten(Synchronizer):
    def handle(self, event):
        return [action for action in super().handle(event) if not isinstance(action, Cancel)]


class UnfinishedIsAlwaysCancelled(Synchronizer):
    def _settle(self, actions, ready):
        before = self._version
        super()._settle(actions, ready)
        if self._version > before and not self._policy.cancel:
            self._grant(self._members.keys() - ready, actions)
        return actions


class ContributorsGoOn(Synchronizer):
    def _on_finished(self, worker, grant, void):
        actions = super()._on_finished(worker, grant, void)
        if worker in self._contributed:
            self._grant({worker}, actions)
        return actions


class OldVersionIsGranted(Synchronizer):
    def _grant(self, ready, actions):
        at = len(actions)
        super()._grant(ready, actions)
        if any(isinstance(action, Commit) for action in actions):
            actions[at:] = [
                Start(a.worker, a.grant, a.version - 1) if isinstance(a, Start) else a
                for a in actions[at:]
            ]


class SwitchForgetsPending(Synchronizer):
    def _on_switched(self, policy):
        self._pending.clear()
        return super()._on_switched(policy)


class SwitchKeepsOldWork(Synchronizer):
    def _on_switched(self, policy):
        self._policy = policy
        return self._settle([], set())


MUTANTS = [
    NeedIsAlwaysK,
    JoinerClockIsZero,
    JoinerCountsAtOnce,
    LateIsAccepted,
    OneMoreSlack,
    OneLessSlack,
    LeaverFillsAPlace,
    LeaversContributionIsLost,
    DepartureCompletesNothing,
    HeldAreNeverReleased,
    VoidFillsNoPlace,
    VoidIsApplied,
    AllVoidIsAnUpdate,
    ArrivalOrder,
    CancelledIsForgotten,
    UnfinishedIsAlwaysCancelled,
    ContributorsGoOn,
    OldVersionIsGranted,
    SwitchForgetsPending,
    SwitchKeepsOldWork,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_laws_catch_the_mutant(mutant):
    # One seed and no shrinking: what is asked is only whether a break is found.
    @settings(
        derandomize=True,
        database=None,
        max_examples=500,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    @given(plays)
    def law(play):
        play_on(mutant, play)

    with pytest.raises(AssertionError):
        law()
