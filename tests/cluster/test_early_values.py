"""Values are waited for key by key, over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from crew import crew, work
from harness import cluster

import zkv
from zkv.dtypes import Array
from zkv.errors import UnknownKey

SGD = "sgd:lr=1"


def model() -> dict[Any, Array]:
    """Two keys of several blocks, and small ones."""
    chance = np.random.default_rng(0)
    return {
        "first": chance.standard_normal((600, 1000)).astype(np.float32),
        "bias": np.arange(5, dtype=np.float32),
        "last": chance.standard_normal((500, 1000)),
    }


async def test_a_batch_that_is_entered_early_has_each_key_once_it_has_arrived() -> None:
    params = model()
    async with (
        cluster(2, optimizer=SGD) as made,
        crew(made, 1, params) as (worker,),
    ):
        async with worker.batch(early=True) as batch:
            assert batch.version == 0
            # What `batch[key]` does while the key's values are on their way.
            with pytest.raises(RuntimeError, match=r"await batch.arrived\(key\)"):
                batch._wait_for((0,), ())
            await batch.arrived("first", "bias")
            np.testing.assert_array_equal(batch["first"], params["first"])
            np.testing.assert_array_equal(batch["bias"], params["bias"])
            await batch.arrived()
            assert batch.params.keys() == params.keys()
            assert batch.params["first"] is batch["first"]
            with pytest.raises(UnknownKey, match="'frist'"):
                await batch.arrived("frist")
            batch.push("bias", np.ones(5, np.float32))
        assert await batch.wait() == "committed"
        # One that never looks at its values counts too.
        async with worker.batch(early=True) as batch:
            batch.push("bias", np.ones(5, np.float32))
        assert await batch.wait() == "committed"
        np.testing.assert_array_equal(await worker.pull("bias"), params["bias"] - 2)
        stats = worker.stats()
    assert stats["compute_s"] >= 0
    assert stats["wait_s"] >= 0


async def test_without_early_all_values_are_here_when_the_block_is_entered() -> None:
    params = model()
    async with (
        cluster(2, optimizer=SGD) as made,
        crew(made, 1, params) as (worker,),
    ):
        for turn in range(3):
            async with worker.batch() as batch:
                for key, value in params.items():
                    if key != "bias":
                        np.testing.assert_array_equal(batch[key], value)
                batch.push("bias", np.ones(5, np.float32))
            await batch.wait()
            assert batch.version == turn


async def test_blocking_workers_wait_for_each_key_when_it_is_looked_at() -> None:
    params = model()
    out: dict[Any, Array] = {key: np.empty_like(value) for key, value in params.items()}

    def program(address: str) -> None:
        with zkv.connect(address, rank=0, wait_timeout_s=8.0) as worker:
            worker.init(params)
            for turn in range(4):
                with worker.batch() as batch:
                    for key in reversed(params):
                        batch.read_into(key, out[key])
                        np.testing.assert_array_equal(batch[key], out[key])
                    np.testing.assert_allclose(out["last"], params["last"] - turn, atol=1e-12)
                    batch.push("last", np.ones((500, 1000)))
                assert batch.wait() == "committed"

    async with cluster(1, optimizer=SGD) as made:
        await asyncio.to_thread(program, made.address)


async def test_a_task_that_is_cancelled_while_values_arrive_gives_its_grant_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        cluster(1, optimizer=SGD) as made,
        crew(made, 1, model()) as (worker,),
    ):
        batch = worker.batch()

        async def cancelled(*keys: Any) -> None:
            raise asyncio.CancelledError

        monkeypatch.setattr(batch, "arrived", cancelled)
        with pytest.raises(asyncio.CancelledError):
            await batch.__aenter__()
        assert batch.outcome == "withdrawn"
        for _ in range(2):
            one = await work(worker, np.ones(5, np.float32), key="bias")
            assert await one.wait() == "committed"
        np.testing.assert_array_equal(await worker.pull("bias"), np.arange(5) - 2)
