"""The nemesis without processes: its plans, and checks that see what is wrong in a history."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from nemesis import layout_of
from nemesis_checks import (
    Said,
    beyond_slack,
    committed_after,
    contradictions,
    outcomes,
    said,
    wrong_counts,
)
from nemesis_faults import BROKER, CUTS_LEAST, KILLS_LEAST, SPARES_S, plan
from nemesis_relay import Rules

LAYOUT = layout_of(2, 4)


def history(text: str, life: int = 0) -> list[Said]:
    return [said(line.strip(), life) for line in text.strip().splitlines()]


def model(*digits: int, rank: int = 1) -> np.ndarray:
    return np.array([digit * 4**rank for digit in digits], np.float32)


# --- plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [4.0, 8.5, 60.0])
def test_every_seed_has_enough_kills_and_cuts_within_its_time(seconds: float) -> None:
    for seed in range(200):
        faults = plan(seed, seconds, LAYOUT)
        kinds = Counter(one.kind for one in faults)
        assert kinds["kill"] + kinds["fill"] >= KILLS_LEAST
        assert kinds["cut"] >= CUTS_LEAST
        assert all(0 <= one.at_s < seconds for one in faults)
        assert [one.at_s for one in faults] == sorted(one.at_s for one in faults)


def test_a_seed_is_a_plan_and_others_are_others() -> None:
    assert plan(5, 8.5, LAYOUT) == plan(5, 8.5, LAYOUT)
    assert plan(5, 8.5, LAYOUT) != plan(6, 8.5, LAYOUT)


def test_all_kinds_of_faults_are_drawn_and_servers_die_only_if_asked() -> None:
    drawn = [one for seed in range(60) for one in plan(seed, 8.5, LAYOUT)]
    kinds = {one.kind for one in drawn}
    assert kinds == {"kill", "fill", "term", "stop", "cut", "treat", "limit"}
    assert any(len(one.pairs) == 1 for one in drawn)
    assert any(one.gap_s and list(one.mends) != sorted(one.mends) for one in drawn)
    killed = {name for one in drawn if one.kind == "kill" for name in one.targets}
    assert killed == {BROKER, *LAYOUT.workers}
    die = layout_of(3, 4, servers_die=True)
    killed = {
        name
        for seed in range(60)
        for one in plan(seed, 8.5, die)
        if one.kind == "kill"
        for name in one.targets
    }
    assert killed == set(die.everybody)


def test_who_was_started_again_is_spared_for_a_while() -> None:
    for seed in range(50):
        died: dict[str, float] = {}
        for one in plan(seed, 8.5, LAYOUT):
            if one.kind in ("kill", "fill", "term"):
                (name,) = one.targets
                # A broker's turn goes to the worker who died the longest time ago.
                if name == BROKER:
                    assert one.at_s >= died.get(name, -SPARES_S) + SPARES_S
                died[name] = one.at_s


def test_a_wire_loses_delays_doubles_and_reorders() -> None:
    chance = random.Random(1)
    assert Rules().dues(5.0, chance) == [5.0]
    lost = sum(not Rules(loss=0.2).dues(0.0, chance) for _ in range(2000))
    assert 300 < lost < 500
    doubled = sum(len(Rules(double=0.2).dues(0.0, chance)) for _ in range(2000))
    assert 2300 < doubled < 2500
    (dues,) = zip(
        *(Rules(delay_s=1.0, jitter_s=0.5).dues(0.0, chance) for _ in range(9)), strict=True
    )
    assert all(1.0 <= due <= 1.5 for due in dues)
    assert list(dues) != sorted(dues)


# --- checks ------------------------------------------------------------------------------------


def test_each_outcome_has_its_count() -> None:
    told = history("""
        S 1.0 0 5 0
        F 1.1 0 0
        O 1.2 0 committed
        S 1.3 1 6 1
        F 1.4 1 1
        O 1.5 1 cancelled
        S 1.6 2 7 2
        F 1.7 2 2
        O 1.8 2 pending
        S 1.9 3 8 3
        F 2.0 3 3
        S 2.1 4 9 4
    """)
    for pending, unheard in ((0, 0), (1, 1), (0, 1)):
        assert wrong_counts(1, told, model(1, 0, pending, unheard, 0, 0)) == []
    assert "index 0: lost: counts 0, was told committed" in wrong_counts(1, told, model(0))[0]
    for digits, told_of in (
        ((2,), "committed"),
        ((1, 1), "cancelled"),
        ((1, 0, 2), "pending"),
        ((1, 0, 0, 2), "unheard"),
        ((1, 0, 0, 0, 1), "unfinished"),
        ((1, 0, 0, 0, 0, 1), "never begun"),
    ):
        (found,) = wrong_counts(1, told, model(*digits))
        assert found.endswith(f"counted too often: counts {digits[-1]}, was told {told_of}")
    assert outcomes({1: told})["unfinished"] == 1


def test_a_cancelled_one_that_was_pushed_again_counts_once() -> None:
    told = history("""
        S 1.0 0 5 0
        F 1.1 0 0
        O 1.2 0 cancelled
        S 1.3 0 6 1
        F 1.4 0 1
        O 1.5 0 committed
    """)
    assert wrong_counts(1, told, model(1)) == []
    assert len(wrong_counts(1, told, model(2))) == len(wrong_counts(1, told, model(0))) == 1


def test_other_workers_digits_are_theirs() -> None:
    told = history("S 1.0 0 5 0\nF 1.1 0 0\nO 1.2 0 committed")
    assert wrong_counts(1, told, model(1) + model(3, rank=0) + model(2, rank=2)) == []


def test_a_committed_batch_on_an_older_version_is_found_and_a_voided_one_ahead_is_not() -> None:
    good = "S 1.0 0 5 0\nF 1.1 0 0\nO 1.2 0 committed\n"
    ahead = "S 1.3 1 9 0\nF 1.4 1 0\n"
    older = "S 1.5 2 {} 0\nF 1.6 2 0\nO 1.7 2 committed"
    assert contradictions(1, history(good + ahead + older.format(6))) == []
    (found,) = contradictions(1, history(good + ahead + older.format(4)))
    assert "index 2 was committed on version 4, after index 0 on version 5" in found
    (found,) = contradictions(1, history("B 1.0 index 3 counts 2 times"))
    assert found == "worker 1: index 3 counts 2 times"


def test_a_start_that_is_too_far_ahead_of_a_member_is_found() -> None:
    slow = "J 1.0 0\nS 1.1 0 0 {0}\nF 1.2 0 {0}\nS 9.0 1 1 {1}\n"
    fast = "J 1.0 0\nS 2.0 0 0 {}\n"
    at = {0: history(slow.format(3, 4))}
    assert beyond_slack(2, {**at, 1: history(fast.format(6))}) == []
    (found,) = beyond_slack(2, {**at, 1: history(fast.format(7))})
    assert "worker 1 started batch 7 when worker 0 had finished 4: more than 2 ahead" in found


def test_who_was_no_member_for_sure_holds_nobody() -> None:
    fast = history("J 1.0 0\nS 5.0 0 0 50\n")
    gone = history("J 1.0 0\nS 1.1 0 0 3\nF 1.2 0 3\nE 2.0 Evicted\nJ 8.0 1\nS 8.1 1 1 50\n")
    died = history("J 1.0 0\nS 1.1 0 0 3\nF 1.2 0 3\nJ 8.0 0\nS 8.1 1 1 50\n")
    for other in (gone, died):
        assert beyond_slack(2, {0: other, 1: fast}) == []


def test_progress_is_a_batch_that_was_begun_and_committed_since() -> None:
    told = history("S 1.0 0 5 0\nF 1.1 0 0\nO 2.1 0 committed\nS 2.2 1 6 1\nF 2.3 1 1")
    assert committed_after(2.0, {0: told}) == {0: None}
    more = [*told, *history("O 2.5 1 committed")]
    assert committed_after(2.0, {0: more})[0] == pytest.approx(0.5)
