"""BSP over real sockets gives, bit for bit, the parameters of a single process."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from harness import cluster
from reference import Reference, assert_same_bits

import zkv
from zkv.aio import AsyncWorker
from zkv.dtypes import Array

VERSIONS = 4
WEIGHTS = (32.0, 7.0, 16.0)


def model() -> dict[Any, Array]:
    """Keys of several dtypes and odd shapes; one is cut into blocks, the small ones share some."""
    chance = np.random.default_rng(2)

    def normal(*shape: int) -> Array:
        return chance.normal(size=shape).astype(np.float32)

    return {
        "large": normal(701, 521),  # 1.39 MiB: two blocks
        "weight": normal(33, 7),
        "bias": normal(7),
        "scale": normal(),
        "nothing": normal(3, 0),
        3: normal(5, 1, 3),
        "3": normal(2),
        "double": chance.normal(size=(13, 11)),
        "half": normal(17, 3).astype(np.float16),
        "größe": normal(70_001),  # above a bucket, below a block
    }


def gradients(params: dict[Any, Array], rank: int, version: int) -> dict[Any, Array]:
    """Gradients that depend on the values, so that one wrong bit stays wrong."""
    chance = np.random.default_rng([rank, version])
    out = {}
    for key, value in params.items():
        noise = chance.normal(size=value.shape)
        out[key] = np.asarray(value * 0.25 + noise, dtype=value.dtype)
    return out


def expected(optimizer: str, workers: int, skipped: Any = lambda *_: False) -> dict[Any, Array]:
    alone = Reference(model(), optimizer)
    for version in range(VERSIONS):
        params = alone.params()
        pushed = []
        for rank in range(workers):
            mine = gradients(params, rank, version)
            pushed.append({k: g for k, g in mine.items() if not skipped(k, rank, version)})
        alone.update(pushed, WEIGHTS[:workers])
    return alone.params()


async def trained(
    workers: int, servers: int, route: str, optimizer: str, skipped: Any = lambda *_: False
) -> list[dict[Any, Array]]:
    """Train on a cluster and return the final model as each worker has pulled it."""

    async def body(worker: AsyncWorker) -> dict[Any, Array]:
        await worker.init(model())
        for version in range(VERSIONS):
            async with worker.batch(weight=WEIGHTS[worker.rank]) as batch:
                assert batch.version == version
                mine = gradients(batch.params, worker.rank, version)
                # The order of the pushes must not matter.
                order = list(mine) if worker.rank % 2 else list(reversed(mine))
                for key in order:
                    if not skipped(key, worker.rank, version):
                        batch.push(key, mine[key])
        assert await batch.wait() == "committed"
        pulled: dict[Any, Array] = await worker.pull()
        return pulled

    async with cluster(servers, route=route, optimizer=optimizer) as made:
        return await made.run(*[body] * workers)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("servers", [1, 2, 4])
@pytest.mark.parametrize("route", ["direct", "broker"])
async def test_a_cluster_has_the_bits_of_one_process(
    route: str, servers: int, workers: int
) -> None:
    optimizer = "momentum:lr=0.05,momentum=0.9,weight_decay=0.001"
    alone = expected(optimizer, workers)
    for pulled in await trained(workers, servers, route, optimizer):
        assert_same_bits(pulled, alone)


@pytest.mark.parametrize(
    "optimizer",
    [
        "sgd:lr=0.1,schedule=warmup:2+cosine:6",
        "nesterov:lr=0.05,momentum=0.9",
        "adam:lr=0.01",
        "adamw:lr=0.01,weight_decay=0.1;*a*:weight_decay=0;3:lr=10x",
        "adagrad:lr=0.1",
    ],
)
async def test_every_rule_has_the_bits_of_one_process(optimizer: str) -> None:
    alone = expected(optimizer, 3)
    for pulled in await trained(3, 2, "direct", optimizer):
        assert_same_bits(pulled, alone)


@pytest.mark.parametrize("servers", [1, 2, 4])
async def test_skipped_keys_have_the_bits_of_one_process(servers: int) -> None:
    """One worker's skip counts as zero; where all skip, Adam's state and its count stay."""

    def skipped(key: Any, rank: int, version: int) -> bool:
        return (key == "bias" and rank == version % 3) or (key == "weight" and version == 1)

    alone = expected("adam:lr=0.01", 3, skipped)
    for pulled in await trained(3, servers, "direct", "adam:lr=0.01", skipped):
        assert_same_bits(pulled, alone)


async def test_bfloat16_is_trained_with_a_wide_copy() -> None:
    """D11: two bytes for each element on the wire, and a master copy that keeps small updates."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    first = {"w": np.linspace(-2, 2, 1000).astype(ml_dtypes.bfloat16)}
    alone = Reference(first, "sgd:lr=0.001")
    gradient = np.full(1000, 0.125, ml_dtypes.bfloat16)
    for _ in range(8):
        alone.update([{"w": gradient}], [1.0])

    async def body(worker: AsyncWorker) -> tuple[dict[Any, Array], dict[str, Any]]:
        await worker.init(first)
        for _ in range(8):
            async with worker.batch() as batch:
                batch.push("w", gradient)
        await batch.wait()
        return await worker.pull(), worker.stats()

    async with cluster(1, optimizer="sgd:lr=0.001") as made:
        ((pulled, stats),) = await made.run(body)
    assert_same_bits(pulled, alone.params())
    assert not np.array_equal(pulled["w"], first["w"])
    assert stats["bytes_up"] == 9 * 1000 * 2


@pytest.mark.parametrize("route", ["direct", "broker"])
async def test_the_weighted_mean_of_the_worked_example(route: str) -> None:
    """Batches of 32, 32, 32 and 16 samples with mean gradients 1, 2, 3 and 8 give 2.857143."""
    weights, means = (32, 32, 32, 16), (1.0, 2.0, 3.0, 8.0)

    async def body(worker: AsyncWorker) -> Array:
        await worker.init({"w": np.zeros(3, np.float32)})
        async with worker.batch(weight=weights[worker.rank]) as batch:
            batch.push("w", np.full(3, means[worker.rank], np.float32))
        await batch.wait()
        value: Array = await worker.pull("w")
        return value

    async with cluster(2, route=route, optimizer="sgd:lr=1") as made:
        for value in await made.run(*[body] * 4):
            np.testing.assert_array_equal(value, np.full(3, -np.float32(320 / 112)))
            assert f"{-value[0]:.6f}" == "2.857143"
    gradients_ = [np.full(1, mean, np.float32) for mean in means]
    assert f"{zkv.weighted_mean(gradients_, weights)[0]:.6f}" == "2.857143"


@pytest.mark.parametrize("route", ["direct", "broker"])
async def test_plain_pushes_are_summed(route: str) -> None:
    async def body(worker: AsyncWorker) -> list[Array]:
        await worker.init({"w": np.zeros(3, np.float32)})
        values = []
        for turn in range(3):
            worker.push("w", np.full(3, 10.0**turn * (worker.rank + 1), np.float32))
            values.append(await worker.pull("w"))
        return values

    async with cluster(2, route=route) as made:
        for values in await made.run(*[body] * 3):
            np.testing.assert_array_equal(values, [[6.0] * 3, [60.0] * 3, [600.0] * 3])


async def test_two_routes_in_one_cluster_make_one_model() -> None:
    """Workers may reach the servers in different ways and still train together."""
    alone = expected("sgd:lr=0.1", 2)

    async def body(worker: AsyncWorker) -> dict[Any, Array]:
        await worker.init(model())
        for version in range(VERSIONS):
            async with worker.batch(weight=WEIGHTS[worker.rank]) as batch:
                for key, gradient in gradients(batch.params, worker.rank, version).items():
                    batch.push(key, gradient)
        await batch.wait()
        pulled: dict[Any, Array] = await worker.pull()
        return pulled

    async with cluster(2, optimizer="sgd:lr=0.1") as made:

        async def one(rank: int, route: str) -> dict[Any, Array]:
            async with made.worker(rank, world=2, route=route) as worker:
                return await body(worker)

        for pulled in await asyncio.gather(one(0, "direct"), one(1, "broker")):
            assert_same_bits(pulled, alone)
