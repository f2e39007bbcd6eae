"""The seven policies over real sockets. The tests decide who finishes when; time never does."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from crew import POLICIES, all_begun, begun, blocked, crew, end, model, ones, version, work, zeros
from harness import cluster, until

from zkv.aio import AsyncWorker
from zkv.dtypes import Array
from zkv.errors import Cancelled

SGD = "sgd:lr=1"


@pytest.mark.parametrize("policy", [*POLICIES, "ssp:0", "k-bsp:1", "k-batch-asp:5"])
async def test_one_worker_and_one_server(policy: str) -> None:
    """No policy may wait for workers that do not exist: the threshold is at most the members."""

    async def body(worker: AsyncWorker) -> Array:
        await worker.init({"w": zeros(), "b": zeros(1)})
        await worker.init({"plain": zeros()}, plain=True, rule="assign")
        for turn in range(5):
            async with worker.batch(weight=8) as batch:
                assert batch.version == turn
                batch.push("w", ones())
                batch.push("b", ones(1))
            assert await batch.wait() == "committed"
            assert (await worker.pushpull("plain", ones() * turn)).tolist() == [turn] * 3
        value: Array = await worker.pull("w")
        return value

    async with cluster(1, policy_text=policy, optimizer=SGD) as made:
        ((value),) = await made.run(body)
        np.testing.assert_array_equal(value, -5 * ones())
        assert version(made) == 5


@pytest.mark.parametrize("policy", POLICIES)
async def test_three_workers_that_run_freely_all_come_to_their_end(policy: str) -> None:
    """Whatever the order in which they finish: every batch has a fate, and all updates are made."""

    async def body(worker: AsyncWorker) -> list[str]:
        await worker.init({"w": zeros()})
        batches = [await work(worker) for _ in range(8)]
        await worker.leave()
        return [batch.outcome for batch in batches]

    async with cluster(2, policy_text=policy, optimizer="sgd:lr=1") as made:
        fates = [fate for mine in await made.run(*[body] * 3) for fate in mine]
        assert set(fates) <= {"committed", "cancelled", "discarded", "pending"}
        group = model(made)
        applied = sum(book.applied for book in group.tallies.values())
        assert applied >= fates.count("committed")
        assert not group.sync.live
        holder = [server.shard for server in made.servers if server.shard.store.blocks]
        await until(
            lambda: {shard.versions.get(0) for shard in holder} == {group.sync.version},
            what="that the server has made all updates",
        )
        assert group.sync.version <= applied <= 24


async def test_bsp_waits_for_everybody_and_nobody_else() -> None:
    async with cluster(2, optimizer=SGD) as made, crew(made, 3) as workers:
        for turn in range(3):
            open_ones = await all_begun(workers)
            assert [batch.version for batch in open_ones] == [turn] * 3
            for batch in open_ones[:2]:
                await end(batch, ones())
            assert "every worker" in await blocked(made, 0)
            assert version(made) == turn
            await end(open_ones[2], ones())
            assert {await batch.wait() for batch in open_ones} == {"committed"}
            assert version(made) == turn + 1
        np.testing.assert_array_equal(await workers[0].pull("w"), -3 * ones())


async def test_asp_updates_with_every_batch_and_counts_late_ones() -> None:
    async with cluster(2, policy_text="asp", optimizer=SGD) as made, crew(made, 3) as workers:
        first, second, slow = await all_begun(workers)
        await end(first, ones())
        await end(second, ones())
        for turn in range(4):
            assert await (await work(workers[turn % 2])).wait() == "committed"
        assert await second.wait() == "committed"
        assert version(made) == 6
        assert (slow.version, slow.cancelled) == (0, False)
        await end(slow, ones())
        assert await slow.wait() == "committed"
        assert version(made) == 7
        np.testing.assert_array_equal(await workers[0].pull("w"), -7 * ones())


@pytest.mark.parametrize("slack", [0, 1, 3])
async def test_ssp_stops_the_fast_worker_at_the_bound(slack: int) -> None:
    policy = f"ssp:{slack}"
    async with cluster(2, policy_text=policy, optimizer=SGD) as made, crew(made, 3) as workers:
        *fast, slow = await all_begun(workers)
        for rank in (0, 1):
            await end(fast[rank], ones())
            for _ in range(slack):
                await (await work(workers[rank])).wait()
            await fast[rank].wait()
        # slack + 1 batches are finished, so the next would begin slack + 1 ahead of the slowest.
        next_one = asyncio.ensure_future(begun(workers[0]))
        assert f"at most {slack} finished batches" in await blocked(made, 0)
        assert not next_one.done()
        assert version(made) == 2 * (slack + 1)
        await end(slow, ones())
        batch = await next_one
        assert batch.version == 2 * (slack + 1) + 1
        await end(batch, ones())
        assert await batch.wait() == "committed"


async def test_k_bsp_cancels_a_worker_that_computes() -> None:
    async with cluster(2, policy_text="k-bsp:2", optimizer=SGD) as made, crew(made, 3) as workers:
        first, second, slow = await all_begun(workers)
        await end(first, ones())
        await end(second, ones())
        assert await second.wait() == "committed"
        await until(lambda: slow.cancelled, what="the cancellation of worker 2's batch")
        with pytest.raises(Cancelled):
            _ = slow.params
        with pytest.raises(Cancelled) as raised:
            slow.push("w", ones())
        # The block swallows it: this is what `async with` does with the exception of its body.
        assert await slow.__aexit__(Cancelled, raised.value, None) is True
        assert await slow.wait() == "cancelled"
        # Whoever is cancelled begins again on the new model, like everybody else.
        again = await all_begun(workers)
        assert [one.version for one in again] == [1, 1, 1]
        await end(again[2], ones())
        await end(again[0], ones())
        assert await again[2].wait() == "committed"
        await until(lambda: again[1].cancelled, what="the cancellation of worker 1's batch")
        await end(again[1])
        assert await again[1].wait() == "cancelled"
        assert version(made) == 2
        np.testing.assert_array_equal(await workers[0].pull("w"), -2 * ones())
        assert workers[2].stats()["outcomes"] == {"committed": 1, "discarded": 0, "cancelled": 1}


async def test_half_of_a_cancelled_batch_is_in_no_sum() -> None:
    """What was sent before the cancellation stays out, on every server."""
    params = {"a": zeros(200_000), "b": zeros(200_000), "c": zeros(200_000)}
    async with (
        cluster(2, policy_text="k-bsp:1", optimizer=SGD) as made,
        crew(made, 2, params) as workers,
    ):
        ran_on = False
        ready = asyncio.ensure_future(begun(workers[0]))
        async with workers[1].batch() as slow:
            slow.push("a", 100 * ones(200_000))
            await end(await ready, ones(200_000), "b")
            await until(lambda: slow.cancelled, what="the cancellation of worker 1's batch")
            slow.push("b", 100 * ones(200_000))
            ran_on = True
        assert not ran_on, "push in a cancelled batch must raise, and the block swallow it"
        assert await slow.wait() == "cancelled"
        async with workers[1].batch() as batch:
            assert batch.version == 1
            assert [batch[key][0] for key in params] == [0, -1, 0]
            batch.push("a", ones(200_000))
        assert await batch.wait() == "committed"
        pulled = await workers[1].pull()
        assert {key: set(value.tolist()) for key, value in pulled.items()} == {
            "a": {-1.0},
            "b": {-1.0},
            "c": {0.0},
        }


async def test_k_batch_bsp_lets_a_fast_worker_go_on() -> None:
    """Two batches on one model make the update, also of one worker; all others are cancelled."""
    policy = "k-batch-bsp:2"
    async with cluster(2, policy_text=policy, optimizer=SGD) as made, crew(made, 3) as workers:
        first, *others = await all_begun(workers)
        await end(first, 2 * ones())
        second = await begun(workers[0])
        assert (first.version, second.version, version(made)) == (0, 0, 0)
        await end(second, 4 * ones())
        assert [await one.wait() for one in (first, second)] == ["committed"] * 2
        assert version(made) == 1
        for other in others:
            await until(lambda one=other: one.cancelled, what="the cancellation")
            await end(other)
            assert await other.wait() == "cancelled"
        third = await begun(workers[0])
        assert third.version == 1
        np.testing.assert_array_equal(third["w"], -3 * ones())
        await end(third)


async def test_k_asp_makes_contributors_wait_and_keeps_the_others() -> None:
    async with cluster(2, policy_text="k-asp:2", optimizer=SGD) as made, crew(made, 3) as workers:
        first, second, slow = await all_begun(workers)
        await end(first, ones())
        next_one = asyncio.ensure_future(begun(workers[0]))
        assert "2 workers" in await blocked(made, 0)
        assert not next_one.done()
        assert first.outcome == "pending"
        await end(second, ones())
        fresh = await next_one
        assert (await first.wait(), fresh.version) == ("committed", 1)
        assert (slow.version, slow.cancelled) == (0, False)
        await end(slow, ones())
        await end(fresh, ones())
        # The late contribution counts for the update after the one that it missed.
        assert [await one.wait() for one in (slow, fresh)] == ["committed"] * 2
        assert version(made) == 2
        np.testing.assert_array_equal(await workers[1].pull("w"), -2 * ones())


async def test_k_batch_asp_counts_batches_and_nobody_waits() -> None:
    policy = "k-batch-asp:3"
    async with cluster(2, policy_text=policy, optimizer=SGD) as made, crew(made, 3) as workers:
        first, second, slow = await all_begun(workers)
        await end(first, ones())
        versions = []
        for _ in range(6):
            batch = await begun(workers[0])
            versions.append(batch.version)
            await end(batch, ones())
        assert versions == [0, 0, 1, 1, 1, 2]
        assert not slow.cancelled
        await end(slow, ones())
        await end(second, ones())
        assert [await one.wait() for one in (slow, second)] == ["committed"] * 2
        assert version(made) == 3
        np.testing.assert_array_equal(await workers[1].pull("w"), -3 * ones())


@pytest.mark.parametrize("policy", ["asp", "k-asp:2", "k-bsp:2", "bsp"])
async def test_plain_pushes_follow_the_policy(policy: str) -> None:
    """A key that is pushed by itself has a version of its own, under the same policy."""
    pushes = {"asp": [1], "k-asp:2": [1, 2], "k-bsp:2": [1, 2], "bsp": [1, 2, 3]}[policy]
    async with cluster(2, policy_text=policy) as made, crew(made, 3) as workers:
        outcomes = [
            worker.push("w", n * ones()) for worker, n in zip(workers, pushes, strict=False)
        ]
        async with asyncio.timeout(5):
            assert [await one for one in outcomes] == ["committed"] * len(pushes)
        # Pushed together they are added, and the sum replaces the value.
        np.testing.assert_array_equal(await workers[0].pull("w"), sum(pushes) * ones())
