"""Local SGD: rounds on the worker's own copy, and one contribution of what they changed."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from crew import crew
from harness import cluster, until

from zkv.optim import init_slots, rule, update
from zkv.sums import weighted_mean

START = {"w": np.arange(4, dtype=np.float32), "b": np.zeros((), np.float32)}
LR = np.float32(0.1)


def gradient(rank: int, number: int, value: np.ndarray) -> np.ndarray:
    """A gradient that depends on the values, so that local batches build on each other."""
    return (value * np.float32(0.5) + np.float32(rank + number)).astype(np.float32)


def rounds_of(rank: int, first: int, h: int, params: dict) -> dict:
    """Return what a worker's own copy is after `h` local batches."""
    own = {key: value.copy() for key, value in params.items()}
    for number in range(first, first + h):
        for key, value in own.items():
            own[key] = (value - LR * gradient(rank, number, value)).astype(np.float32)
    return own


async def work(worker, h: int, batches: int) -> list:
    carriers = []
    async with worker.local(h=h) as local:
        for number in range(batches):
            async with local.batch(weight=2.0 + worker.rank) as batch:
                for value in batch.params.values():
                    value[...] = value - LR * gradient(worker.rank, number, value)
            if (number + 1) % h == 0:
                carriers.append(local.last)
    return carriers


@pytest.mark.parametrize("outer", ["sgd:lr=1", "nesterov:lr=0.7,momentum=0.9"])
@pytest.mark.parametrize("h", [1, 3])
async def test_rounds_equal_one_process_that_averages_changes(h: int, outer: str) -> None:
    """DiLoCo's outer step: the mean change of all workers is the gradient of the outer rule."""
    rounds = 3
    async with cluster(2, optimizer=outer) as made:
        bodies = [lambda worker: body(worker, h, rounds)] * 2
        results = await made.run(*bodies)
    chosen, lr = rule(outer.split(":")[0]), 1.0 if outer == "sgd:lr=1" else 0.7
    params = {key: value.copy() for key, value in START.items()}
    slots = {key: init_slots(chosen, value.reshape(-1)) for key, value in params.items()}
    for number in range(rounds):
        ends = [rounds_of(rank, number * h, h, params) for rank in range(2)]
        for key, value in params.items():
            changes = [(value - end[key]).reshape(-1) for end in ends]
            mean = weighted_mean(changes, [h * 2.0, h * 3.0])
            new, slots[key] = update(
                chosen, value.reshape(-1), slots[key], mean, lr=lr, count=number + 1
            )
            params[key] = new.reshape(value.shape)
    for got in results:
        for key, value in params.items():
            np.testing.assert_array_equal(got[key], value)


async def body(worker, h: int, rounds: int) -> dict:
    await worker.init(START)
    await work(worker, h, h * rounds)
    await worker.barrier()
    return dict(await worker.pull())


async def test_h_of_one_with_an_outer_sgd_of_rate_one_is_plain_sgd() -> None:
    async with cluster(1, optimizer="sgd:lr=1") as made, crew(made, 1, START) as (worker,):
        await (await work(worker, 1, 5))[-1].wait()
        local = dict(await worker.pull())
    async with cluster(1, optimizer="sgd:lr=0.1") as made, crew(made, 1, START) as (worker,):
        for number in range(5):
            async with worker.batch(weight=2.0) as batch:
                for key, value in batch.params.items():
                    batch.push(key, gradient(0, number, value))
        await batch.wait()
        plain = dict(await worker.pull())
    for key, value in plain.items():
        np.testing.assert_allclose(local[key], value, rtol=1e-6, atol=1e-6)


async def test_a_part_of_a_round_counts_when_the_loop_ends() -> None:
    async with cluster(1, optimizer="sgd:lr=1") as made, crew(made, 1, START) as (worker,):
        async with worker.local(h=10) as local:
            for _ in range(2):
                async with local.batch(weight=1.0) as batch:
                    batch.params["w"] -= 1
        assert await local.last.wait() == "committed"
        assert (await worker.pull("w")).tolist() == [-2.0, -1.0, 0.0, 1.0]


async def failing(local) -> None:
    async with local.batch() as batch:
        batch.params["w"] += 100
        raise RuntimeError("mine")


async def test_an_exception_withdraws_the_round_and_the_next_one_begins_anew() -> None:
    async with cluster(1, optimizer="sgd:lr=1") as made, crew(made, 1, START) as (worker,):
        async with worker.local(h=2) as local:
            with pytest.raises(RuntimeError, match="mine"):
                await failing(local)
            for _ in range(2):
                async with local.batch() as batch:
                    batch.params["w"] -= 1
        assert await local.last.wait() == "committed"
        assert (await worker.pull("w")).tolist() == [-2.0, -1.0, 0.0, 1.0]


async def test_a_cancelled_round_ends_with_its_local_batch_and_the_next_one_begins_anew() -> None:
    async with (
        cluster(1, policy_text="k-bsp:1", optimizer="sgd:lr=1") as made,
        crew(made, 2, START) as (worker, other),
        worker.local(h=3) as local,
    ):

        async def late() -> None:
            async with local.batch() as mine:
                mine.params["w"] += 100
                await until(lambda: mine.cancelled, what="the cancellation")

        await asyncio.gather(late(), work(other, 1, 1))
        assert await local.last.wait() == "cancelled"
        for _ in range(3):
            async with local.batch() as batch:
                assert batch.version == 1
                batch.params["b"] -= 1
        assert await local.last.wait() == "committed"
        np.testing.assert_array_equal(await worker.pull("w"), batch.params["w"])
        assert worker.stats()["outcomes"] == {"committed": 1, "discarded": 0, "cancelled": 1}


@pytest.mark.parametrize("h", [0, -1, 1.5, True])
async def test_a_round_has_at_least_one_batch(h: object) -> None:
    async with cluster(1) as made, crew(made, 1, START) as (worker,):
        with pytest.raises(ValueError, match="h="):
            worker.local(h=h)
