"""`evaluate` reads one version of the model and is seen by nobody; waits are explained in time."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
from crew import all_begun, begun, crew, end, model, ones, version, work, zeros
from harness import cluster, until

from zkv.errors import UnknownKey, WaitTimeout
from zkv_cli import run_report as rr
from zkv_workers.config import SessionConfig
from zkv_workers.faces import pauses

SGD = "sgd:lr=1"


def places(made):
    sync = model(made).sync
    return dict(sync.clocks), sync.version, {n: model(made).tally(n).plain() for n in sync.live}


# --- evaluate --------------------------------------------------------------------------------


async def test_evaluate_moves_no_clock_and_no_version_under_bsp() -> None:
    params = {"w": zeros(), "b": zeros(1)}
    async with cluster(2, optimizer=SGD) as made, crew(made, 2, params) as workers:
        opened = await all_begun(workers)
        before = places(made)
        inside = await workers[0].evaluate()
        assert (inside.version, places(made)) == (0, before)
        for batch in opened:
            batch.push("b", ones(1))
            await end(batch, ones())
        assert {await batch.wait() for batch in opened} == {"committed"}
        before, counts = places(made), workers[0].stats()
        seen = [await worker.evaluate() for worker in (*workers, *workers)]
        assert [one.version for one in seen] == [1] * 4
        for one in seen:
            np.testing.assert_array_equal(one.params["w"], -ones())
            np.testing.assert_array_equal(one.params["b"], -ones(1))
        assert places(made) == before
        after = workers[0].stats()
        assert (after["batches"], after["outcomes"]) == (counts["batches"], counts["outcomes"])
        # What was given belongs to whoever asked.
        seen[0].params["w"][:] = 9
        np.testing.assert_array_equal((await workers[1].evaluate()).params["w"], -ones())


async def test_an_observer_evaluates_while_others_wait_for_each_other() -> None:
    async with (
        cluster(2, optimizer=SGD) as made,
        crew(made, 2) as workers,
        made.worker(observer=True) as observer,
    ):
        slow, fast = await all_begun(workers)
        await end(fast, ones())
        assert (await observer.evaluate()).version == 0
        await end(slow, ones())
        assert await slow.wait() == "committed"
        assert (await observer.evaluate()).version == 1
        # Nobody waits for the observer: the next update is made without it.
        await asyncio.gather(*(work(worker) for worker in workers))
        await until(lambda: version(made) == 2, what="the second update")
        assert set(model(made).sync.clocks) == {0, 1}


async def test_every_key_of_one_evaluation_is_of_one_version() -> None:
    """Each update adds one to every key, so a torn read would show two numbers."""
    params = {f"k{n}": zeros(5) for n in range(6)}

    async with (
        cluster(3, policy_text="asp", optimizer=SGD) as made,
        crew(made, 2, params) as both,
        made.worker(observer=True) as observer,
    ):

        async def train(worker) -> None:
            for _ in range(20):
                async with worker.batch() as batch:
                    for key in params:
                        batch.push(key, -ones(5))

        training = [asyncio.ensure_future(train(worker)) for worker in both]
        while not all(one.done() for one in training):
            seen = await observer.evaluate()
            assert {float(v) for a in seen.params.values() for v in a} == {float(seen.version)}
        await asyncio.gather(*training)


async def test_there_is_nothing_to_evaluate_without_a_model() -> None:
    async with cluster(1) as made, made.worker(0, world=1) as worker:
        await worker.init({"p": zeros()}, plain=True)
        with pytest.raises(UnknownKey, match="no model"):
            await worker.evaluate()


# --- figures ---------------------------------------------------------------------------------


async def test_workers_leave_their_figures_and_observers_do_not(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ZKV_REPORT", str(tmp_path))
    async with (
        cluster(1, policy_text="asp", optimizer=SGD) as made,
        made.worker(observer=True),
        crew(made, 2) as workers,
    ):
        for batch in await all_begun(workers):
            await end(batch, ones())
            assert await batch.wait() == "committed"
    lives, warnings = rr.read(tmp_path, range(2), {})
    assert warnings == []
    assert sorted(version for life in lives for version, *_ in life.updates) == [1, 2]
    assert [life.outcomes["committed"] for life in lives] == [1, 1]
    for life in lives:
        assert life.useful_s == life.compute_s > 0
        assert (life.cancelled_s, life.bytes_up > 0, life.bytes_down > 0) == (0, True, True)
    assert len(list(tmp_path.iterdir())) == 2


async def test_a_folder_that_is_not_there_is_a_warning(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("ZKV_REPORT", str(tmp_path / "absent"))
    with caplog.at_level(logging.WARNING, "zkv.worker"):
        async with cluster(1) as made, crew(made, 1) as (worker,):
            assert await (await work(worker)).wait() == "committed"
    assert "the figures of worker 0 are lost" in caplog.text


# --- why am I waiting ------------------------------------------------------------------------


async def test_a_blocked_worker_has_a_reason_with_parts_and_words() -> None:
    async with cluster(1, optimizer=SGD) as made, crew(made, 2) as workers:
        fast, slow = await all_begun(workers)
        await end(fast, ones())
        await until(lambda: model(made).sync.waiting(0), what="that worker 0 waits")
        status = await workers[1].status()
        reason, none = (one["waiting"] for one in status["workers"])
        assert none is None
        assert (reason["need"], reason["have"]) == (2, 1)
        assert reason["rule"].startswith("bsp: the update needs")
        assert [(who["number"], who["name"]) for who in reason["on"]] == [(1, "worker-1")]
        assert reason["on"][0]["last_heard_s"] >= 0
        assert "worker 1 ('worker-1' on" in reason["text"]
        assert status["pending"] == [0]
        await end(slow, ones())


async def test_a_wait_is_told_in_words_and_then_ends_with_the_guilty(caplog) -> None:
    patient = {"narrate_after_s": 0.7, "narrate_every_s": 0.3, "wait_timeout_s": 1.6}
    with caplog.at_level(logging.WARNING, "zkv.worker"):
        async with cluster(1, optimizer=SGD) as made, crew(made, 2, **patient) as workers:
            fast, slow = await all_begun(workers)
            await end(fast, ones())
            with pytest.raises(WaitTimeout, match=r"batch 1 did not come.*worker 1 \('worker-1'"):
                await fast.wait()
            with pytest.raises(
                WaitTimeout, match=r"next batch did not come.*worker 1 \('worker-1'"
            ):
                await begun(workers[0])
            await end(slow, ones())
    told = [record.getMessage() for record in caplog.records]
    for what in ("the fate of batch 1", "the next batch"):
        mine = [one for one in told if one.startswith(f"waiting for {what}")]
        assert len(mine) >= 2
        assert any("worker 1 ('worker-1'" in one for one in mine)


def test_a_wait_is_cut_where_words_are_due_and_ends_in_time() -> None:
    config = SessionConfig("n", "tcp://x:1", narrate_after_s=2, narrate_every_s=5)
    assert list(pauses(config, 14)) == [2, 5, 5, 2]
    assert list(pauses(config, 1)) == [1]
    assert list(pauses(config, 0)) == [0]


async def test_a_grant_that_a_barrier_takes_back_is_no_cancelled_batch() -> None:
    async with cluster(1, policy_text="k-bsp:1", optimizer=SGD) as made, crew(made, 2) as workers:
        first, second = await all_begun(workers)
        await end(first, ones())
        assert await first.wait() == "committed"
        await until(lambda: second.cancelled, what="that the second is cancelled")
        await asyncio.gather(end(second), *(worker.barrier() for worker in workers))
        tallies = [model(made).tally(number).plain()["cancelled"] for number in range(2)]
        assert tallies == [0, 1]
