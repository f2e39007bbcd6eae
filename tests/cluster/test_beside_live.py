"""Encoding beside the caller, over real sockets and in both faces."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from crew import crew, work
from harness import cluster

import zkv
from zkv.aio import AsyncWorker
from zkv.dtypes import Array
from zkv_workers.encoding import LONG

SGD = "sgd:lr=1"
SIZE = 3 * LONG
"""One key of less than a block of 1 MiB: encoded beside the caller."""


def noise(seed: int, size: int = SIZE) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


async def left_by_an_exception(worker: AsyncWorker, gradient: Array) -> None:
    async with worker.batch() as batch:
        batch.push("w", gradient)
        raise ZeroDivisionError


def changed_while_lent(worker: zkv.Worker, gradient: Array) -> None:
    view = gradient[1:]
    with worker.batch() as batch:
        batch.push("w", gradient, lend=True)
        view[7] = 1e3


async def test_an_error_beside_reaches_who_waits_and_the_next_call_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params: dict[Any, Array] = {"w": np.zeros(SIZE, np.float32)}
    async with (
        cluster(1, optimizer=SGD, codec="int8+ef") as made,
        crew(made, 1, params) as (worker,),
    ):
        await (await work(worker, noise(0))).wait()
        before = await worker.pull("w")
        encode = type(worker._encoder)._encode

        def fails(*given: Any) -> Any:
            raise MemoryError("no room for a block")

        monkeypatch.setattr(type(worker._encoder), "_encode", fails)
        batch = await work(worker, noise(1))
        with pytest.raises(MemoryError, match="no room for a block"):
            await batch.wait()
        assert batch.outcome == "withdrawn"
        monkeypatch.setattr(type(worker._encoder), "_encode", encode)
        with pytest.raises(MemoryError, match="no room for a block"):
            await work(worker, noise(2))
        np.testing.assert_array_equal(await worker.pull("w"), before)
        assert await (await work(worker, noise(3))).wait() == "committed"
        moved = before - await worker.pull("w")
    # Nothing of what failed is in it, nor in what the codec had kept of the batch before.
    np.testing.assert_allclose(moved, noise(3), atol=0.05)


async def test_a_batch_that_an_exception_leaves_while_it_is_encoded_leaves_no_trace() -> None:
    params: dict[Any, Array] = {"w": np.zeros(SIZE, np.float32)}
    async with (
        cluster(1, optimizer=SGD, codec="topk:0.01+ef") as made,
        crew(made, 1, params) as (worker,),
    ):
        given = np.zeros(SIZE)
        for turn in range(6):
            if turn % 2:
                with pytest.raises(ZeroDivisionError):
                    await left_by_an_exception(worker, noise(100 + turn))
            given += noise(turn)
            assert await (await work(worker, noise(turn))).wait() == "committed"
        await worker.set(codec="none")
        # Two batches were granted before that.
        for _ in range(3):
            await (await work(worker, np.zeros(SIZE, np.float32))).wait()
        np.testing.assert_allclose(-(await worker.pull("w")), given, atol=1e-4)


async def test_blocking_workers_lend_their_gradients() -> None:
    """The sums are those of copied ones, to the bit, and arrays are free after the block."""
    found: list[Array] = []

    def program(address: str, lend: bool) -> None:
        with zkv.connect(address, rank=0, wait_timeout_s=10.0) as worker:
            worker.init({"w": np.zeros(SIZE, np.float32), "b": np.zeros(4, np.float32)})
            gradients = {"w": np.empty(SIZE, np.float32), "b": np.ones(4, np.float32)}
            for turn in range(4):
                with worker.batch() as batch:
                    gradients["w"][:] = noise(turn)
                    for key, gradient in gradients.items():
                        batch.push(key, gradient, lend=lend)
            batch.wait()
            if lend:
                with pytest.raises(BufferError, match="'w'"):
                    changed_while_lent(worker, gradients["w"])
            found.append(worker.pull("w"))

    for lend in (False, True):
        async with cluster(1, optimizer=SGD, codec="int8+ef") as made:
            await asyncio.to_thread(program, made.address, lend)
    np.testing.assert_array_equal(found[0], found[1])


async def test_the_next_batch_begins_behind_the_end_of_the_last_one() -> None:
    """Nobody waits for a batch's fate, and encoding takes longer than computing."""
    params: dict[Any, Array] = {"w": np.zeros(SIZE, np.float32)}
    turns = 12

    async def body(worker: AsyncWorker) -> None:
        await worker.init(params)
        for turn in range(turns):
            async with worker.batch() as batch:
                batch.push("w", noise(turn))
        await worker.barrier()

    async with cluster(1, optimizer=SGD, codec="int8+ef") as made:
        found: list[dict[str, Any]] = []

        async def watched(worker: AsyncWorker) -> None:
            await body(worker)
            found.append(worker.stats()["outcomes"])

        await made.run(watched, watched)
    assert found == [{"committed": turns, "discarded": 0, "cancelled": 0}] * 2


async def test_blocking_workers_begin_the_next_batch_behind_the_end_of_the_last_one() -> None:
    turns, found = 12, []

    def program(address: str, rank: int) -> None:
        with zkv.connect(address, rank=rank, world=2, wait_timeout_s=10.0) as worker:
            worker.init({"w": np.zeros(SIZE, np.float32)})
            for turn in range(turns):
                with worker.batch() as batch:
                    batch.push("w", noise(turn))
            worker.barrier()
            found.append(worker.stats()["outcomes"])

    async with cluster(1, optimizer=SGD, codec="int8+ef") as made:
        await asyncio.gather(*(asyncio.to_thread(program, made.address, rank) for rank in (0, 1)))
    assert found == [{"committed": turns, "discarded": 0, "cancelled": 0}] * 2
