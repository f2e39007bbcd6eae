"""The report of a live run from what workers, programs and the broker leave behind."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv.compute_times import compute_times
from zkv.policy import policy
from zkv.simulation_report import to_plain
from zkv.simulator import Simulation
from zkv_cli import run_report as rr


def figures(rank: int, life: int = 1, **changes: Any) -> dict[str, Any]:
    """What a worker writes: two batches committed, one cancelled."""
    return {
        "rank": rank,
        "incarnation": life,
        "compute_s": 3.0,
        "useful_s": 2.0,
        "cancelled_s": 1.0,
        "wait_s": 1.5,
        "communication_s": 0.5,
        "bytes_up": 100,
        "bytes_down": 200,
        "outcomes": {"committed": 2, "cancelled": 1, "discarded": 0},
        "updates": [[1, 0, 101.0], [2, 0, 103.0]],
    } | changes


def leave(folder: Path, plain: dict[str, Any]) -> None:
    name = f"figures-{plain['rank']}-{plain['incarnation']}.json"
    (folder / name).write_text(json.dumps(plain), "utf-8")


def tally(applied: int, *, late: int = 0, cancelled: int = 0, **staleness: int) -> dict[str, Any]:
    return {
        "applied": applied,
        "late": late,
        "cancelled": cancelled,
        "discarded": 0,
        "staleness": {age.removeprefix("age"): n for age, n in staleness.items()},
    }


STATUS = {
    "policy": "k-bsp:2",
    "version": 2,
    "pending": [1],
    "contributions": {"0": tally(2, cancelled=1, age0=2), "1": tally(2, late=1, age0=1, age3=1)},
}


def whole(folder: Path, before: Any = None, after: Any = STATUS) -> rr.LiveRun:
    leave(folder, figures(0))
    leave(folder, figures(1, updates=[[1, 0, 100.5], [2, 3, 103.5]]))
    lives, warnings = rr.read(folder, range(2), {})
    return rr.live_run(lives, after, before, began=100.0, wall_s=5.0, warnings=warnings)


def test_a_run_of_two_workers_with_its_own_numbers(tmp_path):
    plain = json.loads(json.dumps(rr.plain_of(whole(tmp_path))))
    expected = {
        "policy": "k-bsp:2",
        "workers": [0, 1],
        "updates": [0.5, 3.0],
        "applied": [2, 2],
        "arrived": [2, 4],
        "waiting": [1.0, 1.0],
        "pending": 1,
        "pending_contributions": [{"time": None, "worker": 1}],
        "busy_share": 0.6,
        "useful_share": 0.4,
        "waiting_share": 0.2,
        "transfer_share": 0.1,
        "staleness": [0, 0, 0, 3],
        "staleness_histogram": {"0": 3, "3": 1},
        "wall_s": 5.0,
        "compute_s": [3.0, 3.0],
        "communication_s": [0.5, 0.5],
        "late": [0, 1],
        "bytes_up": [100, 100],
        "bytes_down": [200, 200],
        "loss": [None, None],
        "warnings": [],
    }
    assert {name: plain[name] for name in expected} == expected
    assert plain["cancelled"]["count"] == 1
    assert plain["cancelled"]["time_per_worker"] == [1.0, 1.0]


def test_the_fields_are_those_of_a_simulated_run(tmp_path):
    simulation = Simulation(policy("ssp:1"), compute_times("2,5,7")).run(until=15)
    simulated = to_plain(simulation.report())
    live = rr.plain_of(whole(tmp_path))
    assert simulated.keys() <= live.keys()
    for name, value in simulated.items():
        if name not in ("time", "waiting", "busy", "transfer", "useful"):
            assert type(live[name]) is type(value), name


def test_a_broker_that_had_a_life_before_is_subtracted(tmp_path):
    before = {
        "version": 1,
        "contributions": {"0": tally(1, age0=1), "1": tally(1, late=1, age0=1)},
    }
    plain = rr.plain_of(whole(tmp_path, before))
    assert (plain["applied"], plain["late"]) == ([1, 1], [0, 0])
    assert plain["staleness_histogram"] == {"0": 1, "3": 1}


def test_without_a_broker_the_workers_words_count(tmp_path):
    run = whole(tmp_path, after=None)
    plain = rr.plain_of(run)
    assert (plain["applied"], plain["cancelled"]["count"], plain["version"]) == ([2, 2], 2, 2)
    assert "note: the broker did not answer" in rr.as_text(run)


def test_the_lives_of_one_rank_are_added_up_and_old_files_do_not_count(tmp_path):
    leave(tmp_path, figures(0, 7))
    own = tmp_path / "worker-0.json"
    own.write_text(json.dumps({"loss": [[1, 9.0]]}), "utf-8")
    ages = rr.prepare(tmp_path, range(2))
    assert not list(tmp_path.glob("figures-*"))
    leave(tmp_path, figures(0, 8))
    leave(tmp_path, figures(0, 9, updates=[[3, 1, 104.0]]))
    leave(tmp_path, figures(1, 3))
    (one, _), warnings = rr.read(tmp_path, range(2), ages)
    assert (one.compute_s, one.bytes_down, one.waiting_s) == (6.0, 400, 2.0)
    assert [version for version, *_ in one.updates] == [1, 2, 3]
    assert one.outcomes == Counter(committed=4, cancelled=2)
    assert (one.loss, warnings) == (None, [])


@pytest.mark.parametrize("losses", [[[1.5, 2.5], [2.5, 0.5]], [2.5, 7, 0.5]])
def test_what_a_program_tells_is_told(tmp_path, losses):
    own = {"loss": losses, "accuracy": 0.97, "rank": 0}
    (tmp_path / "worker-0.json").write_text(json.dumps(own), "utf-8")
    run = whole(tmp_path)
    plain = rr.plain_of(run)
    assert plain["loss"] == [{"first": 2.5, "last": 0.5}, None]
    assert plain["accuracy"] == [0.97, None]
    text = rr.as_text(run)
    assert "accuracy 0.9700" in text
    assert "2.5 to 0.5" in text


@pytest.mark.parametrize("torn", ["", "{", "[]", '{"rank": 0}', '{"updates": [1]}', "null"])
def test_a_file_that_cannot_be_read_is_named_and_the_rest_is_told(tmp_path, torn):
    leave(tmp_path, figures(1))
    (tmp_path / "figures-0-5.json").write_text(torn, "utf-8")
    (tmp_path / "worker-1.json").write_text("{torn", "utf-8")
    lives, warnings = rr.read(tmp_path, range(3), {})
    assert [life.compute_s for life in lives] == [0, 3.0, 0]
    for name in ("figures-0-5.json", "worker-1.json", "worker 2 has left no figures"):
        assert any(name in one for one in warnings), name
    run = rr.live_run(lives, STATUS, None, began=100.0, wall_s=5.0, warnings=warnings)
    assert rr.as_text(run).count("note: ") == len(warnings)


updates = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 5), st.floats(0, 1e6)), max_size=30)


@given(st.lists(updates, min_size=1, max_size=4))
def test_update_times_rise_and_none_is_later_than_it_was_heard_of(heard):
    lives = [rr.Life(rank, updates=tuple(mine)) for rank, mine in enumerate(heard)]
    run = rr.live_run(lives, None, None, began=0.0, wall_s=1.0)
    times = run.report.update_times
    versions = sorted({version for mine in heard for version, *_ in mine})
    assert len(times) == len(versions)
    assert list(times) == sorted(times)
    for mine in heard:
        for version, _, at in mine:
            assert times[versions.index(version)] <= at
    assert sum(run.staleness.values()) == sum(map(len, heard))
