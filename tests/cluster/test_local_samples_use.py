"""Local rounds on dealt samples: what bad use is told, and the blocking face."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from crew import crew, pool
from harness import Cluster, cluster, until
from tokens import SGD, TOKENS, Mine, assert_once_per_pass, compute, handed, the_rest, tokens, train

import zkv
from zkv.errors import Refused
from zkv.pool import Shard
from zkv_workers.blocking import Batch
from zkv_workers.local import AsyncLocalBatch

# --- bad use ------------------------------------------------------------------------------------


async def next_inside(batch: AsyncLocalBatch, batches: AsyncIterator[AsyncLocalBatch]) -> None:
    """Take the next local batch inside the block of the one before."""
    async with batch:
        compute(batch)
        await anext(batches)


@pytest.mark.parametrize("inside", [False, True])
async def test_a_local_batch_that_is_not_left_is_an_error_and_does_not_count(inside: bool) -> None:
    shard = zkv.data.shard(6, size=2)
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, tokens(6), **TOKENS) as (worker,):
        async with worker.local(h=3) as local:
            batches = local.batches(shard)
            await handed(batches)
            batch = await anext(batches)
            with pytest.raises(RuntimeError, match=r"not finished.*in local\.batches\(data\)"):
                await (next_inside(batch, batches) if inside else anext(batches))
            assert local.last.outcome == "withdrawn"
            await the_rest(local, shard)
        await assert_once_per_pass(made, worker, shard)


async def test_a_local_batch_is_used_once() -> None:
    shard = zkv.data.shard(4, size=2)
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, tokens(4), **TOKENS) as (worker,):
        async with worker.local(h=2) as local:
            batches = local.batches(shard)
            batch = await handed(batches)
            with pytest.raises(RuntimeError, match="used once"):
                async with batch:
                    pass
            async for batch in batches:
                async with batch:
                    compute(batch)
        await assert_once_per_pass(made, worker, shard)


async def test_a_block_whose_round_was_given_up_inside_says_so() -> None:
    shard = zkv.data.shard(4, size=2)
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, tokens(4), **TOKENS) as (worker,):
        local = worker.local(h=2)
        batch = await anext(local.batches(shard))
        with pytest.raises(RuntimeError, match="round of this local batch is over"):
            await next_inside(batch, local.batches(shard))
        async with local:
            await the_rest(local, shard)
        await assert_once_per_pass(made, worker, shard)


async def test_dealt_and_weighed_local_batches_do_not_mix() -> None:
    shard = zkv.data.shard(12, size=2)
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, tokens(12), **TOKENS) as (worker,):
        async with worker.local(h=3) as local:
            made_before = local.batch()
            batches = local.batches(shard)
            await handed(batches)
            for batch in (made_before, local.batch(weight=2.0)):
                with pytest.raises(RuntimeError, match="do not mix"):
                    async with batch:
                        pass
        async with worker.local(h=3) as local:
            with pytest.raises(Refused, match=r"those of local rounds from local\.batches"):
                async with local.batch():
                    pass
            await the_rest(local, shard)
        await assert_once_per_pass(made, worker, shard)


async def test_weighed_and_dealt_local_batches_do_not_mix() -> None:
    shard = zkv.data.shard(12, size=2)
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, tokens(12), **TOKENS) as (worker,):
        async with worker.local(h=2) as local:
            async with local.batch() as batch:
                batch.params["w"] -= 1
                with pytest.raises(RuntimeError, match=r"no samples.*local\.batches\(data\)"):
                    _ = batch.samples
                with pytest.raises(RuntimeError, match="do not mix"):
                    await anext(local.batches(shard))
            async with local.batch() as batch:
                batch.params["w"] -= 1
        assert await local.last.wait() == "committed"
        assert (await worker.pull("w")).tolist() == [-2.0] * 12
        async with worker.local(h=2) as local:
            with pytest.raises(Refused, match="batches were begun without any"):
                await anext(local.batches(shard))


async def test_all_must_take_rounds_of_one_size() -> None:
    shard = zkv.data.shard(10, size=2)
    async with (
        cluster(1, optimizer=SGD) as made,
        crew(made, 2, tokens(10), **TOKENS) as members,
        members[0].local(h=3) as one,
        members[1].local(h=2) as other,
    ):
        first = asyncio.ensure_future(anext(one.batches(shard)))
        await until(lambda: made.broker.router and made.broker.router.groups.draws.pool)
        with pytest.raises(Refused, match=r"size=4.*size=6.*draws h \* size"):
            await anext(other.batches(shard))
        first.cancel()


async def test_what_is_no_shard_is_refused_by_name() -> None:
    async with cluster(1) as made, crew(made, 1) as (worker,), worker.local(h=2) as local:
        with pytest.raises(TypeError, match="not int"):
            await anext(local.batches(10))  # type: ignore[arg-type]


# --- the blocking face --------------------------------------------------------------------------


def blocking_train(address: str, rank: int, shard: Shard, h: int) -> tuple[int, Any]:
    """Train by rounds, and break all rules on the way; return how many samples counted, and the
    model."""
    with zkv.connect(address, rank=rank, world=2, wait_timeout_s=15.0) as worker:
        worker.init(tokens(shard.n), reduce="sum")
        with worker.local(h=h) as local:
            batches = local.batches(shard)
            batch = next(batches)
            with pytest.raises(RuntimeError, match="not finished"):
                next(batches)
            with pytest.raises(RuntimeError, match="is over"), batch:
                pass
            with pytest.raises(Mine), next(local.batches(shard)):
                raise Mine
            assert local.last.outcome == "withdrawn"
            with pytest.raises(RuntimeError, match="do not mix"), local.batch():
                pass
        with worker.local(h=h) as local:
            for batch in local.batches(shard):
                with batch:
                    compute(batch)
                break
        # The last round of a pass may have one local batch: then it is complete.
        whole = len(local.last.samples) <= shard.size
        assert local.last.cancelled or (local.last.outcome != "withdrawn") == whole
        with worker.local(h=h) as local:
            for batch in local.batches(shard):
                with batch:
                    assert batch.pass_number in (1, 2)
                    assert 0 < len(batch.samples) <= shard.size
                    compute(batch)
        worker.barrier()
        return worker.stats()["samples"], worker.pull("w")


@pytest.mark.parametrize("h", [1, 3])
@pytest.mark.parametrize("policy", ["bsp", "asp", "k-bsp:1"])
async def test_blocking_each_sample_counts_once_per_pass(policy: str, h: int) -> None:
    shard = zkv.data.shard(31, 2, size=2, passes=2)
    async with cluster(2, policy_text=policy, optimizer=SGD) as made:
        results = await asyncio.gather(
            *(asyncio.to_thread(blocking_train, made.address, r, shard, h) for r in range(2))
        )
        assert pool(made).done
    assert sum(counted for counted, _ in results) == 62
    for _, model in results:
        np.testing.assert_array_equal(model, np.full(31, -2, np.float32))


def leave_in_mid_round(address: str, shard: Shard) -> str:
    """Compute a part of a round, go, and then leave the round's block."""
    with zkv.connect(address, rank=0, world=1, wait_timeout_s=15.0) as worker:
        worker.init(tokens(shard.n), reduce="sum")
        with worker.local(h=3) as local:
            with next(local.batches(shard)) as batch:
                compute(batch)
            worker.leave()
        return local.last.outcome


async def test_blocking_a_worker_may_leave_in_mid_round() -> None:
    shard = zkv.data.shard(12, size=2)
    async with cluster(1, optimizer=SGD) as made:
        assert await asyncio.to_thread(leave_in_mid_round, made.address, shard) == "withdrawn"
        async with made.worker(1) as other:
            await other.init(tokens(12), reduce="sum")
            await train(other, shard, 3)
            await assert_once_per_pass(made, other, shard)
            assert pool(made).shares[0].counted == 0


class Slow:
    """A blocking worker in a thread, that goes on when the test says so."""

    def __init__(self, address: str, shard: Shard) -> None:
        self.address = address
        self.shard = shard
        self.begun = threading.Event()
        self.cancelled = threading.Event()

    def meet(self) -> None:
        """Say that a round has begun, and wait until it is cancelled."""
        if not self.begun.is_set():
            self.begun.set()
            assert self.cancelled.wait(15.0)

    def train(self) -> list[str]:
        """Train by rounds of three; return what became of the first round and of the last."""
        with zkv.connect(self.address, rank=0, world=2, wait_timeout_s=15.0) as worker:
            self.worker = worker
            worker.init(tokens(self.shard.n), reduce="sum")
            with worker.local(h=3) as local:
                rounds = []
                for batch in local.batches(self.shard):
                    with batch:
                        compute(batch)
                    self.meet()
                    if local.last not in rounds:
                        rounds.append(local.last)
            return [one.wait() for one in (rounds[0], rounds[-1])]


async def cancel_the_first_round(made: Cluster, slow: Slow) -> None:
    """Make an update without the slow worker's first round, and train on beside it."""
    async with made.worker(1, world=2) as fast:
        await fast.init(tokens(slow.shard.n), reduce="sum")
        async with fast.local(h=3) as local:
            batches = local.batches(slow.shard)
            await handed(batches)
            await until(slow.begun.is_set, what="the slow worker's round")
            await handed(batches)
            await handed(batches)
            await until(lambda: slow.worker._running.is_cancelled(1), what="the cancellation")
            slow.cancelled.set()
            async for batch in batches:
                async with batch:
                    compute(batch)
        await assert_once_per_pass(made, fast, slow.shard)


@pytest.mark.parametrize("entering", [False, True])
async def test_blocking_a_round_is_cancelled(
    entering: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two local batches; or at once, between the grant and the first look at the model."""
    shard = zkv.data.shard(18, size=2)
    async with cluster(1, policy_text="k-bsp:1", optimizer=SGD) as made:
        slow = Slow(made.address, shard)
        if entering:
            begin = Batch._begin

            def begin_late(batch: Batch) -> None:
                begin(batch)
                slow.meet()

            monkeypatch.setattr(Batch, "_begin", begin_late)
        outcomes, _ = await asyncio.gather(
            asyncio.to_thread(slow.train), cancel_the_first_round(made, slow)
        )
        assert outcomes[0] == "cancelled"
