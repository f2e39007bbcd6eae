"""Local rounds on dealt samples: each counts once per pass, or its whole round comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from crew import POLICIES, crew, pool
from harness import cluster, until
from hypothesis import given, settings
from hypothesis import strategies as st
from tokens import (
    SGD,
    TOKENS,
    Mine,
    assert_once_per_pass,
    compute,
    fail_in,
    handed,
    tokens,
    train,
)

import zkv
from zkv.aio import AsyncWorker
from zkv.pool import INT_MAX, Shard, permutation
from zkv_workers.local import AsyncLocal, AsyncLocalBatch

MOVES = ("go", "raise", "other loop", "other rounds", "barrier", "leave")


# --- every sample once per pass ----------------------------------------------------------------


async def move(worker: AsyncWorker, batch: AsyncLocalBatch, how: str) -> None:
    """Compute a local batch, and fail, meet the others or go inside its block."""
    async with batch:
        compute(batch)
        match how:
            case "raise":
                raise Mine
            case "leave":
                await worker.leave()
            case "barrier":
                await worker.barrier()


async def follow(worker: AsyncWorker, shard: Shard, h: int, moves: list[str]) -> None:
    """Take all samples that come, and meanwhile do what a plan says."""
    plan = iter(moves)
    while True:
        async with worker.local(h=h) as local:
            how = "other loop"
            while how == "other loop":
                async for batch in local.batches(shard):
                    how = next(plan, "go")
                    try:
                        await move(worker, batch, how)
                    except Mine:
                        continue
                    if how == "leave":
                        return
                    if how.startswith("other"):
                        break
                else:
                    return


@given(data=st.data())
@settings(max_examples=40)
def test_whatever_workers_do_each_sample_counts_once_per_pass(data: st.DataObject) -> None:
    """Rounds that fail, that are cancelled, that a loop or a worker leaves half done."""
    workers = data.draw(st.integers(1, 3), "workers")
    h = data.draw(st.sampled_from([1, 2, 3]), "h")
    shard = zkv.data.shard(
        data.draw(st.integers(1, 30), "n"),
        data.draw(st.integers(0, 9), "seed"),
        size=data.draw(st.integers(1, 5), "size"),
        passes=data.draw(st.integers(1, 2), "passes"),
    )
    # A barrier needs all workers, so one alone may plan it; the first never leaves.
    alone = workers == 1
    mine = [how for how in MOVES if how != "leave" and (alone or how != "barrier")]
    others = [how for how in MOVES if how != "barrier"]
    plans = [
        data.draw(st.lists(st.sampled_from(others if rank else mine), max_size=5), f"plan {rank}")
        for rank in range(workers)
    ]
    policy = data.draw(st.sampled_from(POLICIES), "policy")

    async def run() -> None:
        async with (
            cluster(2, policy_text=policy, optimizer=SGD) as made,
            crew(made, workers, tokens(shard.n), **TOKENS) as members,
        ):
            bodies = zip(members, plans, strict=True)
            await asyncio.gather(*(follow(worker, shard, h, plan) for worker, plan in bodies))
            await assert_once_per_pass(made, members[0], shard)

    asyncio.run(run())


@pytest.mark.parametrize("policy", ["bsp", "asp", "k-bsp:2"])
async def test_a_worker_that_crashes_in_mid_round_leaves_its_samples_to_the_others(
    policy: str,
) -> None:
    shard = zkv.data.shard(29, 1, size=2, passes=2)
    async with (
        cluster(2, policy_text=policy, optimizer=SGD, worker_lost_s=1.2) as made,
        crew(made, 3, tokens(29), **TOKENS) as members,
    ):
        others = [asyncio.ensure_future(train(worker, shard, 3)) for worker in members[:2]]
        async with members[2].local(h=3) as local:
            batches = local.batches(shard)
            async with await anext(batches) as batch:
                try:
                    # The others' update may have cancelled it already, which the block swallows.
                    compute(batch)
                finally:
                    members[2]._driver.close()
        await asyncio.gather(*others)
        await assert_once_per_pass(made, members[0], shard)
        assert pool(made).shares[2].counted == 0
        assert pool(made).shares[2].returned >= 6


# --- rounds and their local batches --------------------------------------------------------------


async def test_a_draw_is_cut_into_local_batches() -> None:
    """Eleven samples in rounds of three times two: 2, 2, 2 and then 2, 2, 1."""
    shard = zkv.data.shard(11, 5, size=2, passes=2)
    seen: list[tuple[int, int, list[int]]] = []
    weights = []
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, tokens(11), **TOKENS) as (worker,):
        async with worker.local(h=3) as local:
            async for batch in local.batches(shard):
                async with batch:
                    compute(batch)
                    seen.append((batch.pass_number, batch.version, batch.samples.tolist()))
                if local.last.outcome != "open":
                    weights.append(local.last._state.weight)
                    assert await local.last.wait() == "committed"
        assert worker.stats()["samples"] == 22
        await assert_once_per_pass(made, worker, shard)
    first, second = permutation(11, 5, 1).tolist(), permutation(11, 5, 2).tolist()
    expected = [
        (number, 2 * (number - 1) + at // 6, order[at : at + 2])
        for number, order in ((1, first), (2, second))
        for at in range(0, 11, 2)
    ]
    assert seen == expected
    assert weights == [6, 5, 6, 5]


async def test_a_round_is_as_long_as_the_data_at_most() -> None:
    shard = zkv.data.shard(5, size=INT_MAX)
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, tokens(5), **TOKENS) as (worker,):
        await train(worker, shard, 2)
        assert worker.stats()["batches"] == 1
        await assert_once_per_pass(made, worker, shard)


LR = np.float32(0.1)


def gradient(value: Any, samples: Any) -> Any:
    """A gradient that depends on the values and the samples."""
    return value * np.float32(0.5) + samples.mean(dtype=np.float32)


async def test_h_of_one_is_training_on_dealt_batches() -> None:
    shard = zkv.data.shard(23, 4, size=4, passes=3)

    async def rounds(worker: AsyncWorker) -> None:
        async with worker.local(h=1) as local:
            async for batch in local.batches(shard):
                async with batch:
                    batch.params["w"] -= LR * gradient(batch["w"], batch.samples)

    async def plain(worker: AsyncWorker) -> None:
        async for batch in worker.batches(shard):
            async with batch:
                batch.push("w", gradient(batch["w"], batch.samples))

    models = []
    for outer, train_all in (("sgd:lr=1", rounds), ("sgd:lr=0.1", plain)):
        async with cluster(2, optimizer=outer) as made, crew(made, 2) as members:
            await asyncio.gather(*map(train_all, members))
            models.append(await members[0].pull("w"))
    assert np.abs(models[1]).min() > 1
    np.testing.assert_allclose(models[0], models[1], rtol=1e-6, atol=1e-6)


async def test_rounds_and_batches_of_their_size_share_one_pool() -> None:
    rounds = zkv.data.shard(23, size=2)
    async with cluster(1, optimizer=SGD) as made, crew(made, 2, tokens(23), **TOKENS) as members:

        async def plain() -> None:
            async for batch in members[1].batches(zkv.data.shard(23, size=6)):
                async with batch:
                    gradient = np.zeros(23, np.float32)
                    gradient[batch.samples] = 1
                    batch.push("w", gradient)

        await asyncio.gather(train(members[0], rounds, 3), plain())
        await assert_once_per_pass(made, members[0], rounds)


# --- rounds that do not count -------------------------------------------------------------------


@pytest.mark.parametrize("retry", [True, False])
@pytest.mark.parametrize("inside", [True, False])
async def test_the_rest_of_a_cancelled_round_is_not_handed_out(inside: bool, retry: bool) -> None:
    shard = zkv.data.shard(18, size=2, retry=retry)
    async with (
        cluster(1, policy_text="k-bsp:1", optimizer=SGD) as made,
        crew(made, 2, tokens(18), **TOKENS) as members,
    ):
        async with members[0].local(h=3) as slow, members[1].local(h=3) as fast:
            slow_batches, fast_batches = slow.batches(shard), fast.batches(shard)
            begun, first = await asyncio.gather(anext(slow_batches), handed(fast_batches))
            async with begun:
                compute(begun)
                if inside:
                    await fast_round(fast, fast_batches)
                    await until(lambda: begun.cancelled, what="the cancellation")
            if not inside:
                await fast_round(fast, fast_batches)
                await until(lambda: begun.cancelled, what="the cancellation")
            cancelled = slow.last
            # The first who asks now gets what has come back, or else the next that is fresh.
            again = await handed(slow_batches)
            assert await cancelled.wait() == "cancelled"
            order = permutation(18, 0, 1).tolist()
            assert begun.samples.tolist() == order[0:2]
            assert first.samples.tolist() == order[6:8]
            assert again.samples.tolist() == (order[0:2] if retry else order[12:14])
            share = pool(made).shares[0]
            assert (share.returned, share.skipped) == ((6, 0) if retry else (0, 6))
            assert members[0].stats()["outcomes"]["cancelled"] == 1
        # The round that was open here is withdrawn, and comes back like a cancelled one.
        await members[0].leave()
        await train(members[1], shard, 3)
        model = await members[1].pull("w")
        skipped = [] if retry else order[0:6] + order[12:18]
        np.testing.assert_array_equal(model, [-1.0 * (at not in skipped) for at in range(18)])
        assert pool(made).done


async def fast_round(local: AsyncLocal, batches: AsyncIterator[AsyncLocalBatch]) -> None:
    """Compute the other two local batches of a round, and wait for its update."""
    await handed(batches)
    await handed(batches)
    assert await local.last.wait() == "committed"


async def test_a_local_batch_whose_round_was_cancelled_before_it_is_entered_is_skipped() -> None:
    shard = zkv.data.shard(4, size=1)
    async with (
        cluster(1, policy_text="k-bsp:1", optimizer=SGD) as made,
        crew(made, 2, tokens(4), **TOKENS) as members,
    ):
        async with members[0].local(h=2) as slow, members[1].local(h=2) as fast:
            slow_batches, fast_batches = slow.batches(shard), fast.batches(shard)
            batch, _ = await asyncio.gather(anext(slow_batches), handed(fast_batches))
            await handed(fast_batches)
            await until(lambda: members[0]._running.is_cancelled(1), what="the cancellation")
            reached = False
            async with batch:
                compute(batch)
                reached = True
            assert not reached
            assert await slow.last.wait() == "cancelled"
        await asyncio.gather(*(train(worker, shard, 2) for worker in members))
        await assert_once_per_pass(made, members[0], shard)


@pytest.mark.parametrize("where", ["inside", "between"])
async def test_an_exception_withdraws_the_whole_round(where: str) -> None:
    """The same worker gets the samples of all its local batches again, in a round of its own."""
    shard = zkv.data.shard(12, size=2)
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, tokens(12), **TOKENS) as (worker,):
        local, first = worker.local(h=3), []

        async def fail() -> None:
            async with local:
                batches = local.batches(shard)
                first.extend((await handed(batches)).samples)
                if where == "between":
                    raise Mine
                await fail_in(await anext(batches))

        with pytest.raises(Mine):
            await fail()
        assert local.last.outcome == "withdrawn"
        async with worker.local(h=3) as local:
            again = await handed(local.batches(shard))
            np.testing.assert_array_equal(again.samples, first)
            assert again.version == 0
        await train(worker, shard, 3)
        await assert_once_per_pass(made, worker, shard)
        assert worker.stats()["outcomes"]["committed"] == 2


async def test_the_rest_of_a_failed_round_is_not_handed_out() -> None:
    shard = zkv.data.shard(12, size=2)
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, tokens(12), **TOKENS) as (worker,):
        async with worker.local(h=3) as local:
            batches = local.batches(shard)
            first = await handed(batches)
            with pytest.raises(Mine):
                await fail_in(await anext(batches))
            failed = local.last
            again = await handed(batches)
            np.testing.assert_array_equal(again.samples, first.samples)
            assert failed.outcome == "withdrawn"
            assert local.last is not failed
            # This loop goes on, in the same round.
            async for batch in batches:
                async with batch:
                    compute(batch)
        await assert_once_per_pass(made, worker, shard)


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_loop_that_ends_in_mid_round_gives_all_of_it_back(policy: str) -> None:
    """Two of three local batches are computed: they must not count, as the third would with
    them."""
    shard = zkv.data.shard(24, size=2)

    async def stops(worker: AsyncWorker) -> str:
        async with worker.local(h=3) as local:
            batches = local.batches(shard)
            await handed(batches)
            await handed(batches)
        await worker.barrier()
        return await local.last.wait()

    async def goes_on(worker: AsyncWorker) -> None:
        await train(worker, shard, 3)
        await worker.barrier()

    async with (
        cluster(1, policy_text=policy, optimizer=SGD) as made,
        crew(made, 2, tokens(24), **TOKENS) as members,
    ):
        outcome, _ = await asyncio.gather(stops(members[0]), goes_on(members[1]))
        await assert_once_per_pass(made, members[1], shard)
        assert outcome == "withdrawn"
        share = pool(made).shares[0]
        # Six were computed on in part; under BSP six were dealt for the round after that too. Two
        # rounds of the other one alone may have cancelled one that had begun before.
        returned = {"bsp": {12}, "k-batch-bsp:2": {6, 12}}.get(policy, {6})
        assert share.counted == 0
        assert share.returned in returned


async def test_a_second_loop_begins_the_round_anew() -> None:
    shard = zkv.data.shard(6, size=2)
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, tokens(6), **TOKENS) as (worker,):
        async with worker.local(h=3) as local:
            first_loop = local.batches(shard)
            first = await handed(first_loop)
            broken = local.last
            again = await handed(local.batches(shard))
            np.testing.assert_array_equal(again.samples, first.samples)
            assert broken.outcome == "withdrawn"
            # The first loop goes on as a third one would.
            await handed(first_loop)
            async for batch in first_loop:
                async with batch:
                    compute(batch)
        await assert_once_per_pass(made, worker, shard)
        assert worker.stats()["outcomes"] == {"committed": 1, "discarded": 0, "cancelled": 0}


async def test_a_batch_that_was_handed_out_is_given_back_when_the_rounds_are_left() -> None:
    shard = zkv.data.shard(6, size=2)
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, tokens(6), **TOKENS) as (worker,):
        async with worker.local(h=3) as local:
            batch = await anext(local.batches(shard))
            with pytest.raises(RuntimeError, match="inside its block"):
                compute(batch)
        assert local.last.outcome == "withdrawn"
        with pytest.raises(RuntimeError, match="round of this local batch is over"):
            async with batch:
                pass
        await train(worker, shard, 3)
        await assert_once_per_pass(made, worker, shard)
