"""Where the time goes, in both faces, by a clock that is set by hand: so that each second is known.

The meter's clock is the test's; everything else has its own.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from beside import blocking, cluster_beside
from harness import cluster, until

from zkv import time_split
from zkv.advice import advise
from zkv.run_times import run_times
from zkv.span_split import split
from zkv.spans import Spans
from zkv_cli import run_report
from zkv_workers import faces


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> float:
        return self.now


def timed(worker: Any) -> Hand:
    clock = Hand()
    worker._ledger.meter.clock = clock
    worker._ledger.spans = Spans(clock)
    return clock


def times(worker: Any) -> dict[str, float]:
    told = worker.stats()["time"]
    assert sum(told[f"{name}_s"] for name in time_split.PARTS) == told["wall_s"]
    assert sum(told["waits"].values()) == pytest.approx(told["wait_s"])
    # Its spans alone tell the same.
    traced = split(worker._ledger.spans.kept).to_plain()
    assert {name: traced[name] for name in traced if name not in ("peak_mib", "waits")} == {
        name: told[name] for name in traced if name not in ("peak_mib", "waits")
    }
    return {
        name: told[f"{name}_s"] for name in (*time_split.PARTS, "wall") if told[f"{name}_s"]
    } | {"batches": told["batches"]}


def test_each_second_of_a_blocking_loop_is_told_and_reaches_the_broker(monkeypatch):
    monkeypatch.setattr(faces, "TELL_EVERY_S", 0.0)
    with cluster_beside() as (made, _), blocking(made, rank=0) as worker:
        clock = timed(worker)
        clock.now += 1000
        worker.init({"w": np.zeros(9, "f4"), "large": np.zeros(100_000, "f4")})
        for number in range(3):
            with worker.batch() as batch:
                clock.now += 20
                for key, values in batch.params.items():
                    batch.push(key, values + 1)
            assert batch.wait() == "committed"
            clock.now += 10 * number
        assert times(worker) == {"compute": 60, "data": 10, "wall": 70, "batches": 3}
        rows = worker.stats()["time_by_batch"]
        assert rows["parts"] == list(time_split.PARTS)
        assert [row[:2] for row in rows["rows"]] == [[0, 20], [0, 20], [10, 20]]
        (told,) = [one["time"] for one in worker.status()["workers"]]
        # It was told as the third block was left, so it is of the two before.
        assert (told["batches"], told["compute_s"], told["wall_s"]) == (2, 40, 40)
        assert told["peak_mib"] > 10
        memory = worker.stats()["memory"]
        # The blocks of the next grant may be on their way here.
        assert 4 * 100_009 <= memory["values_bytes"] <= 2 * 4 * 100_009
        assert (memory["frames_bytes"], memory["residual_bytes"]) == (0, 0)
        sent = worker.stats()["sent"]
        # Three gradients and the first values.
        assert sum(one["bytes"] for one in sent.values()) == 4 * 4 * 100_009
        assert all(one["busy_s"] > 0 for one in sent.values())
        servers = worker.status()["servers"]
        while any(one["updates"] < 3 for one in servers):  # It is told once a second.
            servers = worker.status()["servers"]
        assert all(one["update_s"] > 0 for one in servers)


def test_between_the_batches_of_a_local_round_data_are_loaded():
    with cluster_beside() as (made, _), blocking(made, rank=0) as worker:
        clock = timed(worker)
        worker.init({"w": np.zeros(9, "f4")})
        with worker.local(h=2) as local:
            for _ in range(4):
                clock.now += 3
                with local.batch() as batch:
                    clock.now += 20
                    batch["w"][:] = 1
        # Before the first batch of all, three seconds passed that are nobody's.
        assert times(worker) == {"compute": 80, "data": 9, "wall": 89, "batches": 2}


def test_a_block_that_fails_and_one_that_is_given_up_leave_the_meter_in_order():
    with cluster_beside() as (made, _), blocking(made, rank=0) as worker:
        clock = timed(worker)
        worker.init({"w": np.zeros(9, "f4")})

        def fails() -> None:
            with worker.batch():
                clock.now += 5
                _ = 1 / 0

        with pytest.raises(ZeroDivisionError):
            fails()
        clock.now += 2
        with worker.batch() as batch:
            clock.now += 20
            batch.push("w", np.ones(9, "f4"))
        assert times(worker) == {"compute": 25, "data": 2, "wall": 27, "batches": 2}


async def test_waiting_is_told_by_its_reason_and_values_on_their_way_apart():
    async with (
        cluster() as made,
        made.worker(0, world=2) as first,
        made.worker(1, world=2) as other,
    ):
        clock = timed(first)
        for worker in (first, other):
            await worker.init({"w": np.zeros(9, "f4")})
        fast = asyncio.create_task(first.batch().__aenter__())
        async with other.batch() as slow:
            (await fast).push("w", np.ones(9, "f4"))
            clock.now += 5
            await (await fast).__aexit__(None, None, None)
            asked = asyncio.create_task(first.batch(early=True).__aenter__())
            await until(lambda: "worker 1" in first._driver.session.requests.reason)
            clock.now += 40
            slow.push("w", np.ones(9, "f4"))
        batch = await asked
        await batch.arrived()
        await batch.__aexit__(None, None, None)
        assert times(first) == {"compute": 5, "wait": 40, "wall": 45, "batches": 2}
        waits = first.stats()["time"]["waits"]
        (why,) = [reason for reason in waits if "worker 1" in reason]
        assert why == "worker 1: bsp: the update needs a contribution of every worker"
        assert waits[why] == pytest.approx(40, abs=5)
        async with other.batch():
            pass


@pytest.mark.parametrize(("data", "slow", "named"), [(90, 20, "data"), (3, 150, "straggler")])
async def test_a_bottleneck_of_a_real_cluster_is_named(data, slow, named):
    """Worker 1 computes for so long, worker 0 for 20 s, and both load data."""
    async with (
        cluster() as made,
        made.worker(0, world=2) as first,
        made.worker(1, world=2) as other,
    ):
        clocks = timed(first), timed(other)
        for worker in (first, other):
            await worker.init({"w": np.zeros(9, "f4")})

        async def enter(worker: Any, clock: Hand) -> Any:
            clock.now += data
            return await worker.batch().__aenter__()

        for _ in range(3):
            both = zip((first, other), clocks, strict=True)
            mine, others = await asyncio.gather(*(enter(*one) for one in both))
            clocks[0].now += 20
            mine.push("w", np.ones(9, "f4"))
            await mine.__aexit__(None, None, None)
            fate = asyncio.create_task(mine.wait())
            await asyncio.sleep(0)
            clocks[0].now += slow - 20
            clocks[1].now += slow
            others.push("w", np.ones(9, "f4"))
            await others.__aexit__(None, None, None)
            await fate
        lives = [
            run_report._lived(run_report.Life(rank), worker.stats() | {"updates": []})
            for rank, worker in enumerate((first, other))
        ]
        run = run_report.live_run(lives, await first.status(), None, began=0.0, wall_s=9.0)
        found = advise(run_times(json.loads(json.dumps(run_report.plain_of(run)))))
        assert found.largest.name == named
        assert found.remedies[0].name == ("data ahead" if named == "data" else "policy asp")
        assert found.remedies[0].worth
