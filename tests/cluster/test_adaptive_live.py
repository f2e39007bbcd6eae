"""Codecs that adapt, over real sockets: what is sent, what is told, and that nothing is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from crew import all_begun, crew, end, model, work
from harness import Cluster, cluster

from zkv.dtypes import Array
from zkv.errors import Refused
from zkv_codecs.auto import CANDIDATES

SGD = "sgd:lr=1"
SIZE = 5000


def noise(seed: int, size: int = SIZE) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def books(made: Cluster) -> list[dict[str, Any]]:
    """What the broker knows of codecs, with nobody there to ask it."""
    router = made.broker.router
    assert router is not None
    return router.coding.books(router.layout)


def last_loss(made: Cluster) -> float:
    """What the controller of the widths has heard last."""
    router = made.broker.router
    assert router is not None
    assert router.coding.widths is not None
    state: Any = router.coding.widths.state
    loss: float = state.last.mean_loss
    return loss


async def test_a_schedule_sets_the_codec_of_all_workers_and_nothing_is_lost() -> None:
    """What narrow widths cut off comes with the first batch of 32 bits."""
    text = "bits:schedule=8@0,2@3,4@6,32@9;small=0"
    params: dict[Any, Array] = {"w": np.zeros(SIZE, np.float32)}
    used: list[list[str]] = []
    given = np.zeros(SIZE)
    async with (
        cluster(2, optimizer=SGD, codec=text) as made,
        crew(made, 2, params) as workers,
    ):
        for turn in range(12):
            batches = await all_begun(workers)
            for worker, batch in zip(workers, batches, strict=True):
                await end(batch, noise(2 * turn + worker.rank))
                given += noise(2 * turn + worker.rank).astype(np.float64) / 2
            assert [await batch.wait() for batch in batches] == ["committed"] * 2
            used.append([worker.stats()["codecs"]["w"]["codec"] for worker in workers])
        got = -(await workers[0].pull("w"))
        status = await workers[0].status()
    np.testing.assert_allclose(got, given, atol=2e-3)
    # The first update has no time since the one before, so it is no step.
    texts = ["int8+ef"] * 4 + ["ternary+ef"] * 3 + ["int4+ef"] * 3 + ["none"] * 2
    assert used == [[one, one] for one in texts]
    assert status["codec_chosen"] == "none"
    assert status["codec_why"] == "32 bits since step 9, as the schedule says."


async def test_losses_reach_the_controller_from_batches_and_from_local_rounds() -> None:
    params: dict[Any, Array] = {"w": np.zeros(SIZE, np.float32)}
    async with (
        cluster(1, optimizer=SGD, codec="bits:heuristic,every=1;small=0") as made,
        crew(made, 1, params) as (worker,),
    ):
        batch = await work(worker, noise(0))
        await batch.wait()
        await (await work(worker, noise(1))).wait()
        assert "batch.set_loss" in (await worker.status())["codec_why"]
        for turn in range(3):
            async with worker.batch() as batch:
                batch.set_loss(2.0 - turn)
                batch.push("w", noise(turn))
            await batch.wait()
        assert "batch.set_loss" not in (await worker.status())["codec_why"]
        assert last_loss(made) == 0.0
        async with worker.local(2) as local:
            for loss, weight in ((4.0, 1.0), (1.0, 3.0)):
                async with local.batch(weight=weight) as part:
                    part.set_loss(loss)
        assert local.last is not None
        await local.last.wait()
        assert last_loss(made) == 1.75


async def test_auto_says_what_it_has_chosen_for_each_key_and_why() -> None:
    """Which that is depends on the machine's speed: `scripts/bench_adaptive` shows that."""
    params: dict[Any, Array] = {"w": np.zeros(200_000, np.float32), "b": np.zeros(4, np.float32)}
    async with (
        cluster(2, optimizer=SGD, codec="auto") as made,
        crew(made, 2, params) as workers,
    ):
        for turn in range(30):
            batches = await all_begun(workers)
            for batch in batches:
                batch.push("b", np.ones(4, np.float32))
                await end(batch, noise(turn, 200_000))
            await asyncio.gather(*(batch.wait() for batch in batches))
        rows = [worker.stats()["codecs"] for worker in workers]
        await asyncio.gather(*(worker.leave() for worker in workers))
        (row,) = books(made)
    assert [one.keys() for one in rows] == [{"w"}] * 2
    assert {one["w"]["codec"] for one in rows} <= set(CANDIDATES)
    assert {row["codec"]} <= set(row["codecs"]) <= set(CANDIDATES)
    assert row["key"] == "w"
    assert row["bytes_before"] == 2 * 30 * 800_000
    assert f"'w' (200000 elements): {row['codec']}, " in row["why"]


async def test_live_changes_between_fixed_and_adaptive_codecs_lose_nothing() -> None:
    params: dict[Any, Array] = {"w": np.zeros(SIZE, np.float32)}
    given = np.zeros(SIZE)
    async with (
        cluster(1, optimizer=SGD, codec="onebit+ef;small=0") as made,
        crew(made, 1, params) as (worker,),
    ):
        for turn, text in enumerate(
            (
                "auto;small=0",
                "bits:learned,seed=1;small=0",
                "topk:0.01+ef;small=0",
                "auto;small=0",
                "none",
            )
        ):
            for at in (2 * turn, 2 * turn + 1):
                given += noise(at)
                await (await work(worker, noise(at))).wait()
            await worker.set(codec=text)
        # Two batches were granted before the last change.
        for _ in range(3):
            await (await work(worker, np.zeros(SIZE, np.float32))).wait()
        got = -(await worker.pull("w"))
        for bad, said in (
            ("bits:none", "no controller is called 'none'"),
            ("auto:owed=-1", "it is a finite number, at least 0"),
            ("auto:candidates=majority", "votes and gradients cannot be summed"),
        ):
            with pytest.raises(Refused, match=said):
                await worker.set(codec=bad)
        with pytest.raises(Refused, match="what adapts does so by gradients"):
            await worker.set(codec_down="auto")
    np.testing.assert_allclose(got, given, atol=2e-4)


async def test_a_worker_that_leaves_takes_no_figures_with_it() -> None:
    params: dict[Any, Array] = {"w": np.zeros(SIZE, np.float32)}
    async with (
        cluster(1, optimizer=SGD, codec="int8+ef;small=0") as made,
        crew(made, 2, params) as workers,
    ):
        for turn in range(3):
            batches = await all_begun(workers)
            for batch in batches:
                await end(batch, noise(turn))
            await asyncio.gather(*(batch.wait() for batch in batches))
        await workers[1].leave()
        batch = await work(workers[0], noise(9))
        await batch.wait()
        await workers[0].leave()
        (row,) = books(made)
        assert not model(made).sync.live
    assert row["bytes_before"] == 7 * 4 * SIZE
    assert row["bytes_after"] == 7 * (SIZE + 4 * -(-SIZE // 256))
    assert row["codec"] == "int8+ef"
