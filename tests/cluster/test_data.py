"""Data assignment live and simulated: each sample counts once per pass, whatever happens.

The tests decide who finishes when; where workers run freely, any order must give the same sums.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from crew import POLICIES, begun, crew, end, model, ones, pool
from harness import Cluster, cluster, until
from simcluster import Options, simulate

import zkv
from zkv.aio import AsyncBatch, AsyncWorker
from zkv.errors import Refused
from zkv.pool import Shard, permutation
from zkv_brokers import draws as dr

SGD = "sgd:lr=1"
LOST_S = 1.2
"""How long a worker may be silent here: two beats and a bit."""
Seen = list[tuple[int, int]]
"""(pass, sample) of each sample of committed batches."""


def is_idle(made: Cluster, rank: int) -> bool:
    """Return whether a worker waits for samples that may come back."""
    assert made.broker.router is not None
    return rank in made.broker.router.groups.draws.idle


def whole(shard: Shard) -> list[tuple[int, int]]:
    """Return what every run has to have counted, in order."""
    assert shard.passes is not None
    return [(number, at) for number in range(1, shard.passes + 1) for at in range(shard.n)]


async def counted(batches: list[AsyncBatch]) -> Seen:
    """Return the samples of the batches that became part of the model."""
    kept = [batch for batch in batches if await batch.wait() == "committed"]
    return [(batch.pass_number, int(at)) for batch in kept for at in batch.samples]


async def train(worker: AsyncWorker, shard: Shard) -> Seen:
    """Do all batches that come, and return what counted."""
    return await counted(await the_rest(worker.batches(shard)))


# --- every sample once per pass ----------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("workers", "n"), [(1, 7), (2, 23), (3, 31), (4, 17)])
async def test_each_sample_counts_once_per_pass(policy: str, workers: int, n: int) -> None:
    """The sizes do not divide each other, so that the last round has fewer batches than workers."""
    shard = zkv.data.shard(n, 3, size=4, passes=2)
    async with (
        cluster(2, policy_text=policy, optimizer=SGD) as made,
        crew(made, workers) as members,
    ):
        seen = await asyncio.gather(*(train(worker, shard) for worker in members))
        assert sorted(one for mine in seen for one in mine) == whole(shard)
        assert pool(made).done
        for worker, mine in zip(members, seen, strict=True):
            assert worker.stats()["samples"] == len(mine)
            assert pool(made).shares[worker.rank].counted == len(mine)
        status = await members[0].status()
        assert status["data"]["done"] is True
        assert status["data"]["n"] == n
        assert sum(one["counted"] for one in status["data"]["workers"].values()) == 2 * n
        # Whoever asks again is told at once.
        assert await train(members[0], shard) == []


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_worker_that_crashes_in_mid_pass_leaves_its_samples_to_the_others(
    policy: str,
) -> None:
    shard = zkv.data.shard(29, 1, size=3, passes=2)
    async with (
        cluster(2, policy_text=policy, optimizer=SGD, worker_lost_s=LOST_S) as made,
        crew(made, 3, wait_timeout_s=15.0) as members,
    ):
        others = [asyncio.ensure_future(train(worker, shard)) for worker in members[:2]]
        batches = members[2].batches(shard)
        batch = await anext(batches)
        async with batch:
            batch.push("w", ones())
            lost = [(batch.pass_number, int(at)) for at in batch.samples]
            members[2]._driver.close()
        seen = [one for mine in await asyncio.gather(*others) for one in mine]
        assert sorted(seen) == whole(shard)
        assert set(lost) <= set(seen)
        assert pool(made).done
        assert pool(made).shares[2].returned >= len(lost)


@pytest.mark.parametrize("policy", POLICIES)
async def test_members_come_and_go(policy: str) -> None:
    shard = zkv.data.shard(40, 1, size=3)

    async def some(worker: AsyncWorker) -> Seen:
        """Do one batch, leave the second by an exception, and go."""
        batches = worker.batches(shard)
        first = await begun_next(batches)
        await end(first, ones())
        second = await begun_next(batches)
        await second.__aexit__(RuntimeError, RuntimeError("mine"), None)
        mine = await counted([first])
        await worker.leave()
        return mine

    async with cluster(2, policy_text=policy, optimizer=SGD) as made, crew(made, 2) as members:
        goes, stays = (
            asyncio.ensure_future(some(members[0])),
            asyncio.ensure_future(train(members[1], shard)),
        )
        seen = await goes
        async with made.worker(5) as late:
            seen += await train(late, shard)
        seen += await stays
        assert sorted(seen) == whole(shard)


async def begun_next(batches: AsyncIterator[AsyncBatch]) -> AsyncBatch:
    """Take the next batch and enter its block."""
    batch = await anext(batches)
    return await batch.__aenter__()


# --- who gets which samples ---------------------------------------------------------------------


async def test_under_bsp_every_run_deals_alike_and_every_worker_can_tell_how() -> None:
    shard = zkv.data.shard(14, 9, size=4, passes=2)
    runs = []
    for _ in range(2):
        async with cluster(2, optimizer=SGD) as made, crew(made, 3) as members:
            runs.append(await asyncio.gather(*(train(worker, shard) for worker in members)))
    assert runs[0] == runs[1]
    # Batches of 4, 4, 4, 2 in each pass, dealt in rounds to workers 0, 1, 2.
    first, second = permutation(14, 9, 1).tolist(), permutation(14, 9, 2).tolist()
    expected = [
        [(1, at) for at in first[0:4] + first[12:14]] + [(2, at) for at in second[8:12]],
        [(1, at) for at in first[4:8]] + [(2, at) for at in second[0:4] + second[12:14]],
        [(1, at) for at in first[8:12]] + [(2, at) for at in second[4:8]],
    ]
    assert runs[0] == expected


async def test_the_weight_is_the_number_of_samples() -> None:
    """Batches of 3 and 1 samples with gradients 1 and 5: the mean of four samples is 2."""
    shard = zkv.data.shard(4, size=3)
    async with cluster(1, optimizer=SGD) as made, crew(made, 2) as members:
        first, second = await asyncio.gather(
            *(begun_next(worker.batches(shard)) for worker in members)
        )
        assert (first.samples.dtype, len(first.samples), len(second.samples)) == (np.int64, 3, 1)
        await end(first, ones())
        await end(second, 5 * ones())
        assert await first.wait() == "committed"
        np.testing.assert_array_equal(await members[0].pull("w"), -2 * ones())


@pytest.mark.parametrize("retry", [True, False])
async def test_a_cancelled_batch_is_dealt_again_or_counted_as_skipped(retry: bool) -> None:
    shard = zkv.data.shard(9, size=3, retry=retry)
    async with (
        cluster(1, policy_text="k-bsp:1", optimizer=SGD) as made,
        crew(made, 2) as members,
    ):
        slow_batches, fast_batches = (worker.batches(shard) for worker in members)
        slow, fast = await asyncio.gather(begun_next(slow_batches), begun_next(fast_batches))
        await end(fast, ones())
        assert await fast.wait() == "committed"
        await until(lambda: slow.cancelled, what="the cancellation")
        await end(slow)
        assert pool(made).shares[0].returned == (3 if retry else 0)
        assert pool(made).shares[0].skipped == (0 if retry else 3)
        # The first who asks now gets what has come back, or else the next that is fresh.
        again = await begun_next(slow_batches)
        back, fresh = permutation(9, 0, 1)[0:3], permutation(9, 0, 1)[6:9]
        np.testing.assert_array_equal(again.samples, back if retry else fresh)


async def test_a_batch_that_an_exception_has_left_is_dealt_to_the_same_worker_again() -> None:
    shard = zkv.data.shard(8, size=4)
    async with cluster(1, optimizer=SGD) as made, crew(made, 1) as (worker,):
        batches = worker.batches(shard)
        first = await begun_next(batches)
        await first.__aexit__(RuntimeError, RuntimeError("mine"), None)
        second = await begun_next(batches)
        np.testing.assert_array_equal(first.samples, second.samples)
        await end(second, ones())
        assert len(await train(worker, shard)) == 4
        assert pool(made).done


# --- the end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
async def test_who_has_no_samples_waits_for_what_may_come_back(policy: str) -> None:
    """Two batches for three workers: the third blocks nobody; what one gives up another does."""
    shard = zkv.data.shard(4, size=2)
    async with cluster(1, policy_text=policy, optimizer=SGD) as made, crew(made, 3) as members:
        loops = [worker.batches(shard) for worker in members]
        third = asyncio.ensure_future(the_rest(loops[2]))
        first, second = await asyncio.gather(*map(begun_next, loops[:2]))
        await until(lambda: is_idle(made, 2), what="that worker 2 is out of samples")
        reason = (await members[0].status())["workers"][2]["waiting"]
        assert "all samples are handed out" in reason["text"]
        assert [who["number"] for who in reason["on"]] == [0, 1]
        await end(first, ones())
        await members[1].leave()
        done = [first, *await the_rest(loops[0]), *await third]
        assert sorted(await counted(done)) == whole(shard)
        # What worker 1 had was done by one of the others.
        assert {int(at) for at in second.samples} <= {at for _, at in await counted(done[1:])}
        assert pool(made).done


async def the_rest(batches: AsyncIterator[AsyncBatch]) -> list[AsyncBatch]:
    """Do all batches that still come."""
    done = []
    async for batch in batches:
        async with batch:
            batch.push("w", ones())
        done.append(batch)
    return done


async def test_a_barrier_gives_back_what_its_workers_have_not_begun() -> None:
    """A loop that is left early and a barrier: the samples go to those who still ask."""
    shard = zkv.data.shard(12, size=2)

    async def stops_early(worker: AsyncWorker) -> Seen:
        done = []
        async for batch in worker.batches(shard):
            async with batch:
                batch.push("w", ones())
            done.append(batch)
            break
        await worker.barrier()
        return await counted(done)

    async def goes_on(worker: AsyncWorker) -> Seen:
        seen = await train(worker, shard)
        await worker.barrier()
        return seen

    for policy in POLICIES:
        async with cluster(1, policy_text=policy, optimizer=SGD) as made, crew(made, 2) as members:
            seen = await asyncio.gather(stops_early(members[0]), goes_on(members[1]))
            assert sorted(one for mine in seen for one in mine) == whole(shard)


def blocking(address: str, rank: int, shard: Shard) -> list[int]:
    """Train as the README's loop does."""
    with zkv.connect(address, rank=rank, world=2, wait_timeout_s=10.0) as worker:
        worker.init({"w": ones()})
        done = []
        for batch in worker.batches(shard):
            with batch:
                batch.push("w", ones())
            done.append(batch)
        kept = [batch for batch in done if batch.wait() == "committed"]
        assert worker.stats()["samples"] == sum(len(batch.samples) for batch in kept)
        with pytest.raises(Refused, match="used up"), worker.batch():
            pass
        return [int(at) for batch in kept for at in batch.samples]


async def test_the_blocking_face() -> None:
    shard = zkv.data.shard(11, size=2)
    async with cluster(1, optimizer=SGD) as made:
        seen = await asyncio.gather(
            *(asyncio.to_thread(blocking, made.address, rank, shard) for rank in range(2))
        )
    assert sorted(seen[0] + seen[1]) == list(range(11))


# --- bad use -----------------------------------------------------------------------------------


async def test_all_must_name_the_same_data() -> None:
    async with cluster(1, optimizer=SGD) as made, crew(made, 2) as members:
        first = asyncio.ensure_future(begun_next(members[0].batches(zkv.data.shard(10))))
        await until(lambda: made.broker.router and made.broker.router.groups.draws.pool)
        with pytest.raises(Refused, match=r"worker 1 .*n=11.*share Shard\(n=10"):
            await anext(members[1].batches(zkv.data.shard(11)))
        with pytest.raises(Refused, match="without samples"):
            await begun(members[1])
        first.cancel()


async def test_data_comes_before_the_first_batch() -> None:
    async with cluster(1, optimizer=SGD) as made, crew(made, 1) as (worker,):
        await end(await begun(worker), ones())
        with pytest.raises(Refused, match="batches were begun without any"):
            await anext(worker.batches(zkv.data.shard(10)))
        batch = await begun(worker)
        with pytest.raises(RuntimeError, match="no samples"):
            _ = batch.samples
        assert model(made).sync.live == {0}


async def test_a_batch_that_is_not_used_is_an_error_and_not_a_loop_without_end() -> None:
    shard = zkv.data.shard(6, size=3)
    async with cluster(1, optimizer=SGD) as made, crew(made, 1) as (worker,):
        batches = worker.batches(shard)
        batch = await anext(batches)
        with pytest.raises(RuntimeError, match="inside its block"):
            batch.push("w", ones())
        with pytest.raises(RuntimeError, match="enter and leave each batch"):
            await anext(batches)
        assert await train(worker, shard) == [(1, int(at)) for at in permutation(6, 0, 1)]
        assert pool(made).done


async def test_a_batch_that_is_not_dealt_is_refused_and_takes_no_samples() -> None:
    shard = zkv.data.shard(6, size=3)
    async with cluster(1, optimizer=SGD) as made, crew(made, 1) as (worker,):
        await end(await begun_next(worker.batches(shard)), ones())
        with pytest.raises(Refused, match=r"not from worker\.batch\(\)"):
            await begun(worker)
        assert len(await train(worker, shard)) == 3
        assert pool(made).shares[0].counted == 6


async def test_an_observer_takes_no_batches() -> None:
    async with cluster(1) as made, crew(made, 1), made.worker(observer=True) as observer:
        with pytest.raises(Refused, match="observer, which computes no batches"):
            await anext(observer.batches(zkv.data.shard(10)))


async def test_what_is_no_shard_is_refused_by_name() -> None:
    async with cluster(1) as made, crew(made, 1) as (worker,):
        with pytest.raises(TypeError, match="not int"):
            await anext(worker.batches(10))  # type: ignore[arg-type]


# --- the simulated cluster, and broken variants that it must catch --------------------------------


def drawn(seed: int, policy: str) -> Options:
    """Draw a run: sizes that do not divide each other, and every fault."""
    return Options(
        policy=policy,
        workers=1 + seed % 4,
        samples=(23, 40, 7)[seed % 3],
        passes=1 + seed % 3,
        retry=seed % 4 != 3,
        reorder=seed % 2 == 1,
        loss=(0.0, 0.05)[seed % 2],
        duplicate=(0.0, 0.2)[seed % 2],
        crashes=seed % 3,
        restart=seed % 5 != 4,
        withdraw=(0.0, 0.2)[seed // 2 % 2],
        void=(0.0, 0.2)[seed // 3 % 2],
        barrier=seed % 3 == 1,
        optimizer=("momentum:lr=0.1,momentum=0.9", "sgd:lr=0.1,clip_global_norm=1.0")[seed % 2],
        staleness=("none", "drop:1")[seed // 4 % 2],
        until_s=200.0,
    )


def slow(seed: int) -> Options:
    """Draw a run in which much that is finished waits for the slowest, and three workers die."""
    policy = ("k-bsp:2", "k-asp:3", "bsp")[seed % 3]
    fixed = {"crashes": 3, "workers": 3, "samples": 40, "restart": True, "barrier": False}
    return replace(drawn(seed, policy), compute_s=(0.05, 0.3, 3.0), **fixed)


@pytest.mark.parametrize("policy", POLICIES)
def test_with_faults_each_sample_counts_once_per_pass(policy: str) -> None:
    for seed in range(12):
        simulate(seed, drawn(seed, policy))


def test_what_the_dead_had_finished_counts_once() -> None:
    for seed in range(12):
        simulate(seed, slow(seed))


def _the_gone_keep_their_samples(patch: pytest.MonkeyPatch) -> None:
    """What a lost worker has drawn never comes back."""
    patch.setattr(dr.Draws, "left", lambda self, number, arrived: None)


def _all_of_the_gone_comes_back(patch: pytest.MonkeyPatch) -> None:
    """Also what a lost worker had finished is handed out again."""
    original = dr.Draws.left
    patch.setattr(dr.Draws, "left", lambda self, number, arrived: original(self, number, ()))


def _whatever_is_settled_counts(patch: pytest.MonkeyPatch) -> None:
    """Samples of cancelled and refused batches count as if they were part of the model."""
    original = dr.Draws.settle
    patch.setattr(
        dr.Draws,
        "settle",
        lambda self, number, grant, *, counted: original(self, number, grant, counted=True),
    )


def _who_is_out_of_samples_stays_a_member(patch: pytest.MonkeyPatch) -> None:
    """The others' updates wait for a worker that has nothing to compute on."""

    def circulate(self: dr.Draws, group: Any, out: Any) -> None:
        self.dry.clear()

    patch.setattr(dr.Draws, "circulate", circulate)


MUTANTS = (
    _the_gone_keep_their_samples,
    _all_of_the_gone_comes_back,
    _whatever_is_settled_counts,
    _who_is_out_of_samples_stays_a_member,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_dealing_without_this_rule_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    failures: Counter[str] = Counter()
    for seed in range(60):
        try:
            simulate(seed, drawn(seed, POLICIES[seed % len(POLICIES)]))
            simulate(seed, slow(seed))
        except AssertionError:
            failures[mutant.__name__] += 1
            break
    assert failures, mutant.__doc__
