"""Worked examples of every policy: three workers that need 2, 5 and 7 for each batch.

The expected runs stand in fixtures/sync_oracle.json. The driver here is the smallest that can
carry out the synchroniser's actions: one heap of finish times, in worker order at one time.
"""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import pytest

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
    Waiting,
    bsp,
    k_asp,
    k_batch_bsp,
    k_bsp,
    policy,
    ssp,
)

FIXTURE = Path(__file__).parent.parent / "fixtures" / "sync_oracle.json"
ORACLE = {name: run for name, run in json.loads(FIXTURE.read_text()).items() if name != "about"}
COMPUTE = {1: 2, 2: 5, 3: 7}
EVERY_POLICY = tuple(ORACLE)


@dataclass
class Run:
    """A cluster in virtual time, and everything that happened in it."""

    text: str
    compute: dict[int, int]
    now: int = 0
    applied: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    update_times: list[int] = field(default_factory=list)
    arrivals: list[tuple[int, int, int]] = field(default_factory=list)  # time, worker, grant
    cancels: list[tuple[int, int, int]] = field(default_factory=list)  # time, worker, time lost
    busy: dict[int, int] = field(default_factory=dict)

    def __post_init__(self):
        self.machine = Synchronizer(policy(self.text), members_min=len(self.compute))
        self.open: dict[int, tuple[int, int]] = {}  # worker: (grant, begun at)
        self.finishes: list[tuple[int, int, int]] = []
        self.busy = dict.fromkeys(self.compute, 0)
        for worker in self.compute:
            self.carry_out(Joined(worker))

    def through(self, until: int) -> Run:
        while self.finishes and self.finishes[0][0] <= until:
            self.now, worker, grant = heapq.heappop(self.finishes)
            if self.open.get(worker, (0, 0))[0] == grant:
                self.end(worker)
                self.arrivals.append((self.now, worker, grant))
                self.carry_out(Finished(worker, grant))
        self.now = until
        for worker, (grant, begun) in self.open.items():
            self.busy[worker] += until - begun
            self.open[worker] = (grant, until)
        return self

    def carry_out(self, event):
        if isinstance(event, Left) and event.worker in self.open:
            self.end(event.worker)
        for action in self.machine.handle(event):
            match action:
                case Commit(version, contributions):
                    self.update_times.append(self.now)
                    # The oracle lists an update's contributions as they arrived.
                    arrived = {(w, grant): at for at, (_, w, grant) in enumerate(self.arrivals)}
                    for c in sorted(contributions, key=lambda c: arrived[c.worker, c.grant]):
                        time = self.arrivals[arrived[c.worker, c.grant]][0]
                        row = (time, self.now, c.worker, c.base_version, version - 1)
                        self.applied.append(row)
                case Cancel(worker, grant):
                    assert self.open[worker][0] == grant
                    self.cancels.append((self.now, worker, self.now - self.open[worker][1]))
                    self.end(worker)
                case Start(worker, grant, _):
                    self.open[worker] = (grant, self.now)
                    heapq.heappush(self.finishes, (self.now + self.compute[worker], worker, grant))

    def end(self, worker: int):
        self.busy[worker] += self.now - self.open.pop(worker)[1]

    def staleness(self) -> list[int]:
        return [before - base for _, _, _, base, before in self.applied]


def per_worker(rows) -> list[int]:
    workers = [row[0] for row in rows]
    return [workers.count(worker) for worker in COMPUTE]


@pytest.mark.parametrize("until", [14, 15, 30, 60])
@pytest.mark.parametrize("text", ORACLE)
def test_workers_of_2_5_and_7_give_the_oracles_numbers(text, until):
    run = Run(text, COMPUTE).through(until)
    expected = ORACLE[text]["through"][str(until)]
    pending = {(c.worker, c.grant) for c in run.machine.pending}

    assert run.update_times == expected["update_times"]
    assert run.machine.version == len(expected["update_times"])
    assert per_worker((w,) for _, w, _ in run.arrivals) == expected["arrived"]
    assert per_worker((row[2],) for row in run.applied) == expected["applied"]
    assert [[t, w] for t, w, g in run.arrivals if (w, g) in pending] == expected["pending"]
    assert list(run.busy.values()) == expected["busy"]
    assert [until - busy for busy in run.busy.values()] == expected["waiting"]
    assert sum(COMPUTE[row[2]] for row in run.applied) == expected["useful"]
    assert [list(cancel) for cancel in run.cancels] == expected["cancels"]
    assert per_worker((w,) for _, w, _ in run.cancels) == expected["cancelled"]
    lost = [sum(lost for _, w, lost in run.cancels if w == worker) for worker in COMPUTE]
    assert lost == expected["cancelled_time"]
    assert run.staleness() == expected["staleness"]
    assert Fraction(sum(run.staleness()), len(run.applied)) == Fraction(expected["staleness_mean"])
    trace = [row for row in ORACLE[text]["applied"] if row[1] <= until]
    assert [list(row) for row in run.applied] == trace


def test_bsp_updates_at_7_and_14_with_six_gradients_and_14_of_21_busy():
    run = Run("bsp", COMPUTE).through(14)
    assert (run.update_times, len(run.applied)) == ([7, 14], 6)
    assert Fraction(sum(run.busy.values()), 3 * 14) == Fraction(14, 21)


def test_asp_applies_twelve_gradients_by_15_and_the_third_workers_first_is_four_updates_old():
    run = Run("asp", COMPUTE).through(15)
    assert len(run.applied) == 12
    assert next(row for row in run.applied if row[2] == 3) == (7, 7, 3, 0, 4)


def test_ssp_1_holds_the_first_worker_from_4_to_7_for_the_third():
    run = Run("ssp:1", COMPUTE).through(4)
    assert run.machine.waiting(1) == Waiting(
        "ssp:1: at most 1 finished batches ahead of the slowest", on=(2, 3), need=1, have=0
    )
    run.through(5)
    assert run.machine.waiting(1).on == (3,)
    assert run.through(7).machine.waiting(1) is None
    assert run.busy[1] == 4


def test_k_batch_bsp_cancels_two_thirds_of_the_work_for_one_worker():
    run = Run("k-batch-bsp:2", COMPUTE).through(12)
    assert run.update_times == [4, 8, 12]
    assert {row[2] for row in run.applied} == {1}
    assert sum(lost for _, _, lost in run.cancels) == 24


@pytest.mark.parametrize(
    ("text", "k", "period"), [("asp", 1, 700), ("k-batch-asp:2", 2, 700), ("k-asp:2", 2, 640)]
)
def test_staleness_in_the_long_run(text, k, period):
    # With K workers of any speeds, ASP's mean staleness tends to K - 1; groups of k divide it.
    run = Run(text, COMPUTE).through(period)
    mean = Fraction(sum(run.staleness()), len(run.applied))
    expected = Fraction(1, 2) if text == "k-asp:2" else Fraction(3 - 1, k)
    assert abs(mean - expected) < Fraction(2, 100)


# Joins, departures and odd sizes


@pytest.mark.parametrize("text", EVERY_POLICY)
def test_one_worker_alone_makes_an_update_of_every_batch(text):
    run = Run(text, {1: 3}).through(30)
    assert run.update_times == list(range(3, 31, 3))
    assert run.busy == {1: 30}
    assert set(run.staleness()) == {0}
    assert run.cancels == []


@pytest.mark.parametrize("text", EVERY_POLICY)
def test_workers_with_uneven_numbers_of_batches_leave_one_by_one_and_nobody_hangs(text):
    # 4, 6 and 9 batches: each leaves when its share is done; the last is alone in the end.
    shares = {1: 4, 2: 6, 3: 9}
    machine = Synchronizer(policy(text), members_min=3)
    open_grants: dict[int, int] = {}
    counted, committed = dict.fromkeys(shares, 0), []

    def carry_out(event):
        for action in machine.handle(event):
            match action:
                case Start(worker, grant, _):
                    open_grants[worker] = grant
                case Commit(_, contributions):
                    committed.extend(contributions)

    for worker in shares:
        carry_out(Joined(worker))
    while machine.live:
        worker = min(open_grants, key=lambda w: (counted[w] / shares[w], w))
        counted[worker] += 1
        carry_out(Finished(worker, open_grants.pop(worker)))
        for done in [w for w in sorted(machine.live) if counted[w] == shares[w]]:
            open_grants.pop(done, None)
            carry_out(Left(done))
    assert counted == shares
    assert len(committed) + len(machine.pending) == sum(shares.values())


def joined(machine, *workers):
    return [action for worker in workers for action in machine.handle(Joined(worker))]


def test_nobody_starts_before_the_start_line_and_later_few_are_enough():
    machine = Synchronizer(policy("asp"), members_min=3)
    assert joined(machine, 5, 2) == []
    assert machine.waiting(5) == Waiting("the first start needs 3 workers", (), need=3, have=2)
    assert machine.handle(Left(5)) == []
    assert machine.handle(Switched(bsp())) == []
    assert joined(machine, 7) == []
    assert joined(machine, 1) == [Start(1, 1, 0), Start(2, 1, 0), Start(7, 1, 0)]
    assert machine.handle(Left(1)) == machine.handle(Left(7)) == []
    assert [type(action) for action in machine.handle(Finished(2, 1))] == [Commit, Start]


def test_a_bsp_joiner_counts_from_the_next_update():
    machine = Synchronizer(bsp(), members_min=2)
    joined(machine, 1, 2)
    assert joined(machine, 3) == []
    rule = "bsp: a joiner starts after the update of the open round"
    assert machine.waiting(3) == Waiting(rule, on=(1, 2), need=2, have=0)
    machine.handle(Finished(1, 1))
    rule = "bsp: the update needs a contribution of every worker"
    assert machine.waiting(1) == Waiting(rule, on=(2,), need=2, have=1)
    commit, *starts = machine.handle(Finished(2, 1))
    assert [c.worker for c in commit.contributions] == [1, 2]
    assert starts == [Start(1, 2, 1), Start(2, 2, 1), Start(3, 1, 1)]


def test_a_bsp_joiner_does_not_wait_for_a_round_that_everyone_has_left():
    machine = Synchronizer(bsp(), members_min=2)
    joined(machine, 1, 2)
    machine.handle(Finished(1, 1))
    machine.handle(Left(1))
    joined(machine, 3)
    # Worker 1's contribution has had no update yet; it goes with the first of the new round.
    assert machine.handle(Left(2)) == [Start(3, 1, 0)]
    commit, start = machine.handle(Finished(3, 1))
    assert [(c.worker, c.base_version) for c in commit.contributions] == [(1, 0), (3, 0)]
    assert start == Start(3, 2, 1)


def test_a_departure_completes_the_round_and_the_leavers_contribution_is_applied():
    machine = Synchronizer(bsp(), members_min=3)
    joined(machine, 1, 2, 3)
    machine.handle(Finished(1, 1))
    machine.handle(Finished(2, 1))
    assert machine.handle(Left(1)) == []
    commit, *starts = machine.handle(Left(3))
    assert [c.worker for c in commit.contributions] == [1, 2]
    assert starts == [Start(2, 2, 1)]


def test_a_leavers_contribution_fills_no_place_under_distinct_workers():
    machine = Synchronizer(k_bsp(2), members_min=3)
    joined(machine, 1, 2, 3)
    machine.handle(Finished(1, 1))
    machine.handle(Left(1))
    assert machine.handle(Finished(2, 1)) == []
    commit, *_ = machine.handle(Finished(3, 1))
    assert [c.worker for c in commit.contributions] == [1, 2, 3]


def test_a_leavers_contribution_counts_among_batches():
    machine = Synchronizer(k_batch_bsp(2), members_min=3)
    joined(machine, 1, 2, 3)
    machine.handle(Finished(1, 1))
    machine.handle(Left(1))
    commit, *rest = machine.handle(Finished(2, 1))
    assert [c.worker for c in commit.contributions] == [1, 2]
    assert rest == [Start(2, 2, 1), Cancel(3, 1), Start(3, 2, 1)]


def test_an_ssp_joiner_starts_level_with_the_slowest_and_its_departure_releases_others():
    machine = Synchronizer(ssp(1), members_min=2)
    joined(machine, 1, 2)
    for grant in (1, 2):
        machine.handle(Finished(1, grant))
    machine.handle(Finished(2, 1))
    machine.handle(Finished(1, 3))
    assert dict(machine.clocks) == {1: 3, 2: 1}
    joined(machine, 3)
    assert machine.clocks[3] == 1
    machine.handle(Finished(2, 2))
    assert machine.waiting(1).on == (3,)
    assert machine.handle(Left(3)) == [Start(1, 4, machine.version)]


# Void and late contributions


def test_a_void_contribution_fills_a_place_and_is_discarded():
    machine = Synchronizer(bsp(), members_min=2)
    joined(machine, 1, 2)
    assert machine.handle(Finished(1, 1, void=True)) == [Discard(1, 1)]
    commit, *starts = machine.handle(Finished(2, 1))
    assert [c.worker for c in commit.contributions] == [2]
    assert starts == [Start(1, 2, 1), Start(2, 2, 1)]
    assert dict(machine.clocks) == {1: 1, 2: 1}


def test_when_all_are_void_the_version_stays_and_the_others_are_not_cancelled():
    machine = Synchronizer(k_bsp(2), members_min=3)
    joined(machine, 1, 2, 3)
    machine.handle(Finished(1, 1, void=True))
    assert machine.handle(Finished(2, 1, void=True)) == [
        Discard(2, 1),
        Start(1, 2, 0),
        Start(2, 2, 0),
    ]
    assert machine.waiting(3) is None


def test_a_worker_cancelled_a_thousand_times_may_still_finish_the_first_grant_once():
    machine = Synchronizer(k_bsp(1), members_min=2)
    joined(machine, 1, 2)
    for grant in range(1, 1001):
        machine.handle(Finished(1, grant))
    assert machine.handle(Finished(2, 1)) == [Discard(2, 1)]
    assert machine.handle(Finished(2, 500)) == [Discard(2, 500)]
    assert machine.clocks[2] == 0
    for grant in (1, 500):
        with pytest.raises(ValueError, match=rf"worker 2 finished grant {grant}, which is not"):
            machine.handle(Finished(2, grant))


def test_only_the_newest_runs_of_cancelled_grants_are_remembered():
    machine = Synchronizer(k_bsp(1), members_min=2)
    joined(machine, 1, 2)
    newest = {1: 1, 2: 1}
    # Turn and turn about, so that no two cancelled grants of a worker are neighbours.
    for turn in range(200):
        worker = 1 + turn % 2
        for action in machine.handle(Finished(worker, newest[worker])):
            if isinstance(action, Start):
                newest[action.worker] = action.grant
    assert machine.handle(Finished(1, 200)) == [Discard(1, 200)]
    with pytest.raises(ValueError, match="grants 1 to 201"):
        machine.handle(Finished(1, 2))


# Switches


def test_a_switch_makes_one_last_update_and_a_cancelling_policy_starts_all_anew():
    machine = Synchronizer(k_asp(3), members_min=3)
    joined(machine, 1, 2, 3)
    machine.handle(Finished(2, 1))
    commit, *rest = machine.handle(Switched(bsp()))
    assert [c.worker for c in commit.contributions] == [2]
    assert rest == [
        Cancel(1, 1),
        Start(1, 2, 1),
        Start(2, 2, 1),
        Cancel(3, 1),
        Start(3, 2, 1),
    ]


def test_a_switch_to_a_policy_that_keeps_work_counts_it_when_it_arrives():
    machine = Synchronizer(bsp(), members_min=3)
    joined(machine, 1, 2, 3)
    machine.handle(Finished(2, 1))
    commit, start = machine.handle(Switched(k_asp(2)))
    assert commit.version == 1
    assert start == Start(2, 2, 1)
    machine.handle(Finished(3, 1))
    commit, *_ = machine.handle(Finished(1, 1))
    assert [(c.worker, c.base_version) for c in commit.contributions] == [(1, 0), (3, 0)]


def test_a_switch_admits_a_bsp_joiner_and_judges_the_waiting_by_the_new_slack():
    machine = Synchronizer(policy("asp"), members_min=2)
    joined(machine, 1, 2)
    for grant in (1, 2, 3):
        machine.handle(Finished(1, grant))
    assert machine.handle(Switched(ssp(0))) == []
    assert [type(action) for action in machine.handle(Finished(1, 4))] == [Commit]
    assert machine.waiting(1).need == 4
    assert machine.handle(Switched(ssp(4))) == [Start(1, 5, 4)]
    machine.handle(Switched(bsp()))
    joined(machine, 3)
    assert machine.waiting(3) is not None
    assert machine.handle(Switched(policy("asp"))) == [Start(3, 1, 4)]


# Refusals


@pytest.mark.parametrize(
    ("event", "complaint"),
    [
        (Joined(1), "worker 1 joined twice"),
        (Left(9), "worker 9 never joined"),
        (Left(3), "worker 3 has left"),
        (Finished(3, 1), "worker 3 has left"),
        (Finished(2, 2), "worker 2 finished grant 2, which is not open: .* grants 1 to 1"),
        (Finished(2, 0), "worker 2 finished grant 0"),
        (Finished(1, 1), "worker 1 finished grant 1"),
    ],
)
def test_an_event_that_contradicts_the_past_is_refused_and_changes_nothing(event, complaint):
    machine = Synchronizer(bsp(), members_min=3)
    joined(machine, 1, 2, 3)
    machine.handle(Finished(1, 1))
    machine.handle(Left(3))
    with pytest.raises(ValueError, match=complaint):
        machine.handle(event)
    commit, *_ = machine.handle(Finished(2, 1))
    assert [(c.worker, c.grant) for c in commit.contributions] == [(1, 1), (2, 1)]


def test_a_worker_that_comes_back_gets_new_grants_and_its_old_ones_are_refused():
    machine = Synchronizer(policy("asp"))
    joined(machine, 1)
    machine.handle(Left(1))
    assert joined(machine, 1) == [Start(1, 2, 0)]
    with pytest.raises(ValueError, match="worker 1 finished grant 1"):
        machine.handle(Finished(1, 1))


def test_the_start_line_needs_at_least_one_worker():
    with pytest.raises(ValueError, match="members_min must be at least 1, given 0"):
        Synchronizer(bsp(), members_min=0)


def test_waiting_refuses_a_worker_that_is_no_member():
    with pytest.raises(ValueError, match="worker 4 never joined"):
        Synchronizer(bsp()).waiting(4)
