"""Prefetch over real sockets: a delay of one batch exactly, counted, the same in every run."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from crew import crew, work
from harness import cluster
from worker_threads import on_threads

from zkv import weighted_mean
from zkv.dtypes import Array
from zkv.errors import PushRefused

LR, BATCHES = 0.25, 8
SIZES = {"large": 400_000, "small": 7}


def start(key: str) -> Array:
    return np.random.default_rng(SIZES[key]).standard_normal(SIZES[key])


def gradient(rank: int, key: str, value: Array) -> Array:
    """Of half the squared distance to a point of this worker's own."""
    return value - np.float64(rank + len(key))


def body(rank: int) -> Any:
    def train(worker: Any) -> Any:
        worker.init({key: start(key) for key in SIZES})
        versions = []
        for _ in range(BATCHES):
            with worker.batch() as batch:
                versions.append(batch.version)
                for key in SIZES:
                    batch.push(key, gradient(rank, key, batch[key]))
            last = batch
        last.wait()
        return versions, worker.evaluate().params, worker.stats()["staleness"]

    return train


def delayed(key: str, workers: int, delay: int) -> Array:
    """What one process makes of it, with gradients of so many updates before."""
    values = [start(key)]
    for _ in range(BATCHES):
        old = values[max(0, len(values) - 1 - delay)]
        mean = weighted_mean([gradient(rank, key, old) for rank in range(workers)], [1.0] * workers)
        values.append(values[-1] - LR * mean)
    return values[-1]


async def run(servers: int) -> list[Any]:
    async with cluster(servers, optimizer=f"sgd:lr={LR}") as made:
        return await on_threads(made, body(0), body(1), prefetch=1)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_run_is_that_of_one_process_whose_gradients_are_one_update_old(servers: int) -> None:
    told = asyncio.run(run(servers))
    for versions, params, stale in told:
        assert versions == [0, *range(BATCHES - 1)]
        assert {int(age): count for age, count in stale.items()} == {0: 1, 1: BATCHES - 1}
        for key in SIZES:
            np.testing.assert_array_equal(params[key], delayed(key, 2, 1))
    assert not np.array_equal(delayed("small", 2, 1), delayed("small", 2, 0))


async def test_delay_compensation_refuses_what_was_computed_on_older_values() -> None:
    async with (
        cluster(1, policy_text="asp", staleness="dc:0.04") as made,
        crew(made, 1, prefetch=1) as (worker,),
    ):
        first, second = await work(worker), await work(worker)
        assert await first.wait() == "committed"
        assert await second.wait() == "discarded"
        with pytest.raises(PushRefused, match="prefetch=0"):
            await work(worker)
