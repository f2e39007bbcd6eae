"""min_workers: with too few workers a run waits for others, or fails and says whom it lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from crew import begun, crew, end, model, ones, work, zeros
from harness import cluster, until

from zkv.aio import AsyncWorker
from zkv.errors import WorkersLost


def lose(worker: AsyncWorker) -> None:
    """End a worker as a crash does: no goodbye."""
    worker._driver.close()


async def one_after_another(worker: AsyncWorker, batches: int) -> Any:
    for _ in range(batches):
        batch = await work(worker)
    return batch


@pytest.mark.parametrize("policy", ["bsp", "asp"])
async def test_a_run_waits_for_enough_workers_at_the_start_and_after_a_loss(policy: str) -> None:
    async with (
        cluster(1, policy_text=policy, min_workers=2, worker_lost_s=0.6) as made,
        crew(made, 1) as (first,),
    ):
        alone = asyncio.create_task(first.batch().__aenter__())
        status = made.broker.router
        await until(lambda: status.groups.model is not None, what="the model's group")
        assert not alone.done()
        assert "1 of at least 2 workers" in status.members.shortage()
        async with made.worker(1) as second:
            await second.init({"w": zeros()})
            # Before a round of the first alone may open, which it would have to wait for.
            joining = asyncio.create_task(begun(second))
            await until(lambda: 1 in model(made).incarnations, what="the second worker's part")
            await end(await asyncio.wait_for(alone, 10), ones())
            await asyncio.gather(work(first), end(await joining, ones()))
            lose(second)
            await until(lambda: len(status.members.training()) == 1, what="the loss")
            # What was granted before the loss is still finished; then the first has to wait.
            going_on = asyncio.create_task(one_after_another(first, 40))
            await until(
                lambda: "1 of at least 2" in str(first._driver.session.requests.reason),
                what="that the first worker is told of the shortage",
            )
            assert not going_on.done()
        async with made.worker(2) as third:
            await third.init({"w": zeros()})
            await work(third)
        batch = await asyncio.wait_for(going_on, 10)
        assert await batch.wait() == "committed"


async def test_a_run_fails_with_the_name_of_whom_it_lost_if_it_is_told_so() -> None:
    async with (
        cluster(1, min_workers=2, on_short="fail", worker_lost_s=0.6) as made,
        crew(made, 2) as (first, second),
    ):
        lose(second)
        with pytest.raises(WorkersLost, match=r"worker 1 .* is gone: .*1 of at least 2 workers"):
            await one_after_another(first, 3)


async def test_who_leaves_is_not_missed() -> None:
    async with (
        cluster(1, min_workers=2, on_short="fail") as made,
        crew(made, 2) as (first, second),
    ):
        await asyncio.gather(work(first), work(second))
        await second.leave()
        batch = await one_after_another(first, 3)
        assert await batch.wait() == "committed"
