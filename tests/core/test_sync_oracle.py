"""Worked examples of the synchroniser's rules: joins, departures, void and late work, switches.

Whole runs with compute times are the simulator's: see test_simulator_oracle.py.
"""

from __future__ import annotations

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

EVERY_POLICY = (
    *("bsp", "asp", "ssp:0", "ssp:1", "ssp:2", "ssp:3"),
    *("k-bsp:2", "k-batch-bsp:2", "k-asp:2", "k-batch-asp:2"),
)

# Joins, departures and odd sizes


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
