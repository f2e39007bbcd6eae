"""Who counts in an update: workers that skip a key, have fewer batches, raise, or are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from crew import POLICIES, all_begun, crew, end, model, ones, version, work, zeros
from harness import cluster, until

from zkv.aio import AsyncWorker
from zkv.dtypes import Array

SGD = "sgd:lr=1"


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_key_without_a_gradient_on_one_worker(policy: str) -> None:
    """D19: worker 1 never pushes b. Nobody hangs; under BSP b's mean is over both workers."""

    async def body(worker: AsyncWorker) -> dict[Any, Array]:
        await worker.init({"a": zeros(), "b": zeros()})
        async with worker.batch() as batch:
            for key, gradient in {"a": ones(), "b": None if worker.rank else ones()}.items():
                if gradient is not None:
                    batch.push(key, gradient)
        await batch.wait()
        await worker.barrier()
        pulled: dict[Any, Array] = await worker.pull()
        return pulled

    async with cluster(2, policy_text=policy, optimizer=SGD) as made:
        pulled, again = await made.run(body, body)
        for key in pulled:
            np.testing.assert_array_equal(pulled[key], again[key])
        if policy == "bsp":
            np.testing.assert_array_equal(pulled["a"], -ones())
            np.testing.assert_array_equal(pulled["b"], -ones() / 2)


@pytest.mark.parametrize(("absent", "expected"), [("zero", -4 / 4), ("out", -4 / 1)])
async def test_what_a_skipped_key_means_is_part_of_its_spec(absent: str, expected: float) -> None:
    """Weights 1 and 3; only the first pushes b: zero with full weight, or out of the mean."""
    params = {"a": zeros(), "b": zeros()}
    async with (
        cluster(2, optimizer=SGD) as made,
        crew(made, 2, params, init_options={"absent": absent}) as workers,
    ):
        first, second = await asyncio.gather(
            workers[0].batch(weight=1).__aenter__(), workers[1].batch(weight=3).__aenter__()
        )
        for batch in (first, second):
            batch.push("a", ones())
        first.push("b", 4 * ones())
        await end(first)
        await end(second)
        await second.wait()
        pulled = await workers[1].pull()
        np.testing.assert_array_equal(pulled["a"], -ones())
        np.testing.assert_array_equal(pulled["b"], expected * ones())


async def test_a_key_that_all_skip_keeps_value_and_momentum() -> None:
    """Its rule is not run: with a zero gradient, momentum alone would move the value."""
    params = {"a": zeros(), "b": zeros()}
    optimizer = "momentum:lr=1,momentum=0.5"
    async with cluster(2, optimizer=optimizer) as made, crew(made, 2, params) as workers:
        for keys in ("ab", "a", "a", "ab"):
            batches = await all_begun(workers)
            for batch in batches:
                for key in keys:
                    batch.push(key, ones())
                await end(batch)
        await batches[0].wait()
        pulled = await workers[0].pull()
        # a: velocities 1, 1.5, 1.75, 1.875; b: 1, 1.5, the second right after the first.
        np.testing.assert_array_equal(pulled["a"], -6.125 * ones())
        np.testing.assert_array_equal(pulled["b"], -2.5 * ones())
        assert version(made) == 4


async def test_a_batch_in_which_nothing_is_pushed_counts_as_zero() -> None:
    async with cluster(2, optimizer=SGD) as made, crew(made, 2) as workers:
        first, second = await all_begun(workers)
        await end(first)
        await end(second, ones())
        assert [await one.wait() for one in (first, second)] == ["committed"] * 2
        np.testing.assert_array_equal(await workers[0].pull("w"), -ones() / 2)


@pytest.mark.parametrize("policy", ["bsp", "ssp:1", "k-bsp:2", "k-batch-bsp:2", "k-asp:2"])
async def test_workers_with_different_numbers_of_batches(policy: str) -> None:
    """D20: worker 0 does 10 batches and leaves, worker 1 does 11; k and the clocks follow."""

    async def body(worker: AsyncWorker) -> str:
        await worker.init({"w": zeros()})
        for _ in range(10 + worker.rank):
            batch = await work(worker)
        if worker.rank == 0:
            await worker.leave()
            return "left"
        outcome: str = await batch.wait()
        return outcome

    async with cluster(2, policy_text=policy, optimizer=SGD) as made:
        left, last = await made.run(body, body)
        assert left == "left"
        # Cancelled only if worker 0's last ones made the update: then worker 1 is alone as well.
        assert last == "committed" or policy.startswith("k-")
        if policy == "bsp":
            assert version(made) == 11


async def test_leaving_in_the_middle_of_a_round_lets_the_others_go_on() -> None:
    async with cluster(2, optimizer=SGD) as made, crew(made, 3) as workers:
        first, second, third = await all_begun(workers)
        third.push("w", 100 * ones())
        await end(first, ones())
        await end(second, ones())
        await workers[2].leave()
        assert [await one.wait() for one in (first, second)] == ["committed"] * 2
        np.testing.assert_array_equal(await workers[0].pull("w"), -ones())
        assert model(made).sync.live == {0, 1}


async def test_a_joiner_starts_with_the_next_update() -> None:
    async with cluster(2, optimizer=SGD) as made, crew(made, 2) as workers:
        batches = await all_begun(workers)
        async with made.worker(2, wait_timeout_s=6.0) as late:
            await late.init({"w": 7 * ones()})
            np.testing.assert_array_equal(await late.pull("w"), zeros())
            joining = asyncio.ensure_future(work(late))
            await until(lambda: 2 in model(made).sync.live, what="that worker 2 has asked")
            for batch in batches:
                await end(batch, ones())
            assert await batches[0].wait() == "committed"
            await asyncio.gather(*(work(worker) for worker in workers))
            joined = await joining
            assert await joined.wait() == "committed"
            assert joined.version >= 1
            np.testing.assert_array_equal(await late.pull("w"), -2 * ones())


async def test_tied_weights_are_one_key_with_two_names() -> None:
    """D24: the gradient is applied once, both names show the same value."""
    shared = ones(6)
    params = {"emb": shared, "body": zeros(), "head": shared}
    async with cluster(2, optimizer=SGD) as made, crew(made, 2, params) as workers:
        for names in (("emb",), ("head",), ("emb", "head")):
            batches = await all_begun(workers)
            for batch in batches:
                gradient = ones(6)
                for name in names:
                    batch.push(name, gradient)
                await end(batch)
        assert await batches[0].wait() == "committed"
        pulled = await workers[1].pull()
        assert list(pulled) == ["emb", "body", "head"]
        np.testing.assert_array_equal(pulled["emb"], -2 * ones(6))
        np.testing.assert_array_equal(pulled["head"], -2 * ones(6))
        assert (await workers[0].pull("head")).tolist() == [-2.0] * 6
        async with workers[0].batch() as batch:
            batch.push("emb", ones(6))
            with pytest.raises(ValueError, match="tied to 'emb'"):
                batch.push("head", ones(6))


async def test_equal_values_on_purpose_are_two_keys() -> None:
    params = {"emb": ones(), "head": ones()}
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, params) as workers:
        await (await work(workers[0], key="emb")).wait()
        pulled = await workers[0].pull()
        assert (pulled["emb"].tolist(), pulled["head"].tolist()) == ([0.0] * 3, [1.0] * 3)


@pytest.mark.parametrize("policy", POLICIES)
async def test_an_exception_inside_the_block_withdraws_the_batch(policy: str) -> None:
    """Nothing of it counts, the grant stays, and the next batch goes on with the same version."""
    params = {"a": zeros(100_000), "b": zeros()}
    async with (
        cluster(2, policy_text=policy, optimizer=SGD) as made,
        crew(made, 1, params) as workers,
    ):
        (worker,) = workers
        broken = worker.batch()

        async def fails() -> None:
            async with broken:
                broken.push("a", 100 * ones(100_000))
                broken.push("b", 100 * ones())
                _ = 1 / 0

        with pytest.raises(ZeroDivisionError):
            await fails()
        assert (broken.outcome, broken.version) == ("withdrawn", 0)
        async with worker.batch() as batch:
            assert batch.version == 0
            assert batch.number == broken.number + 1
            batch.push("b", ones())
        assert await batch.wait() == "committed"
        pulled = await worker.pull()
        assert (set(pulled["a"]), set(pulled["b"])) == ({0.0}, {-1.0})
        assert version(made) == 1


async def test_a_withdrawn_batch_does_not_end_the_round_of_the_others() -> None:
    async with cluster(2, optimizer=SGD) as made, crew(made, 2) as workers:
        first, second = await all_begun(workers)
        await end(first, ones())
        second.push("w", 100 * ones())
        error = RuntimeError("the data loader has failed")
        assert await second.__aexit__(RuntimeError, error, None) is False
        assert first.outcome == "pending"
        again = await work(workers[1], 3 * ones())
        assert again.version == 0
        assert [await one.wait() for one in (first, again)] == ["committed"] * 2
        np.testing.assert_array_equal(await workers[0].pull("w"), -2 * ones())


async def test_a_barrier_waits_for_all_and_for_what_was_finished() -> None:
    async with cluster(2, policy_text="asp", optimizer=SGD) as made, crew(made, 3) as workers:
        batches = await all_begun(workers)
        await end(batches[0], ones())
        first = asyncio.ensure_future(workers[0].barrier())
        await end(batches[1], ones())
        second = asyncio.ensure_future(workers[1].barrier())
        await end(batches[2], ones())
        await (await work(workers[2])).wait()
        assert not first.done()
        assert not second.done()
        await workers[2].barrier()
        await asyncio.gather(first, second)
        values = await asyncio.gather(*(worker.pull("w") for worker in workers))
        np.testing.assert_array_equal(values, [[-4.0] * 3] * 3)
