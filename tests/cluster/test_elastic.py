"""Members that come and go while the others train, under each policy: docs/policies.md in tests.

Also the public cases of silence, torn reads and mixed keys (D21 to D23), of a worker that dies and
of one that comes back under its name (D25, D26), and settings that change while training runs.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crew import (
    POLICIES,
    all_begun,
    begun,
    blocked,
    crew,
    end,
    model,
    ones,
    version,
    work,
    zeros,
)
from harness import Cluster, cluster, until

from zkv.aio import AsyncWorker
from zkv.dtypes import Array
from zkv.errors import NameInUse, Refused, WaitTimeout

SGD = "sgd:lr=1"
LOST_S = 1.2
"""Two beats and a bit: a worker that is silent for so long is gone."""
TWO = ["k-bsp:2", "k-batch-bsp:2", "k-asp:2", "k-batch-asp:2"]
DEPARTURES = ["leave", "crash"]


def crash(worker: AsyncWorker) -> None:
    """End a worker as a kill does: its sockets go, and it says nothing."""
    worker._driver.close()


async def depart(made: Cluster, worker: AsyncWorker, how: str) -> None:
    """Leave or crash, and wait until the broker counts without this worker."""
    rank = worker.rank
    if how == "leave":
        await worker.leave()
    else:
        crash(worker)
    await until(lambda: rank not in model(made).sync.live, what=f"that worker {rank} is gone")


def incarnation(made: Cluster, rank: int) -> int:
    """Return which life of a worker number takes part in the model."""
    return model(made).incarnations[rank]


async def ended(batch: Any, gradient: Array) -> Any:
    """Finish a batch that `begun` has opened, and return it."""
    await end(batch, gradient)
    return batch


async def arrived(made: Cluster, rank: int, clock: int) -> None:
    """Wait until the broker has taken in so many batches of a worker."""
    await until(
        lambda: model(made).sync.clocks[rank] == clock,
        what=f"that batch {clock} of worker {rank} is at the broker",
    )


async def together(scenario: Callable[..., Awaitable[None]], policies: list[str], how: str) -> None:
    """Play a scenario under several policies at once: most of its time is spent on silence."""

    async def one(policy: str) -> None:
        try:
            await scenario(policy, how)
        except BaseException as error:
            error.add_note(f"under {policy}")
            raise

    async with asyncio.TaskGroup() as group:
        for policy in policies:
            group.create_task(one(policy))


# --- join ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [*POLICIES, "ssp:0"])
async def test_a_joiner_starts_level_with_the_slowest(policy: str) -> None:
    """On the current version at once; where every worker is needed, with the next update."""
    async with cluster(2, policy_text=policy, optimizer=SGD) as made, crew(made, 2) as workers:
        first, second = await all_begun(workers)
        await end(first, ones())
        await end(second, ones())
        # Cancelled or not: both have an open batch again, and some update has been made.
        open_ones = await all_begun(workers)
        await until(lambda: version(made) > 0, what="the first update")
        async with made.worker(2, wait_timeout_s=6.0) as late:
            await late.init({"w": 7 * ones()})
            joining = asyncio.ensure_future(begun(late))
            if policy == "bsp":
                assert "a joiner starts after the update" in await blocked(made, 2)
                assert not joining.done()
                for one in open_ones:
                    await end(one, ones())
                open_ones = []
            batch = await joining
            assert batch.version == version(made)
            assert batch.clock == min(model(made).sync.clocks.values())
            np.testing.assert_array_equal(batch["w"], -version(made) * ones())
            assert model(made).sync.live == {0, 1, 2}
            for one in open_ones:
                if not one.cancelled:
                    await end(one, ones())
            await end(batch)


@pytest.mark.parametrize("policy", TWO)
async def test_a_joiner_raises_what_an_update_needs_to_k(policy: str) -> None:
    """One worker alone makes updates by itself; with the second, two contributions are needed."""
    async with cluster(2, policy_text=policy, optimizer=SGD) as made, crew(made, 1) as workers:
        for turn in range(2):
            assert await (await work(workers[0])).wait() == "committed"
            assert version(made) == turn + 1
        async with made.worker(1, wait_timeout_s=6.0) as late:
            await late.init({"w": zeros()})
            joined = await begun(late)
            assert joined.version == 2
            alone = await work(workers[0])
            await arrived(made, 0, 3)
            assert (version(made), alone.outcome) == (2, "pending")
            await end(joined, 3 * ones())
            assert [await one.wait() for one in (alone, joined)] == ["committed"] * 2
            assert version(made) == 3
            np.testing.assert_array_equal(await late.pull("w"), -4 * ones())


async def test_a_joiner_does_not_hold_the_others_back_under_ssp() -> None:
    """At its own clock of 0, it would stop everybody until it had caught up."""
    async with (
        cluster(2, policy_text="ssp:1", optimizer=SGD) as made,
        crew(made, 2) as workers,
    ):
        for _ in range(4):
            for batch in await all_begun(workers):
                await end(batch, ones())
                await batch.wait()
        async with made.worker(2, wait_timeout_s=6.0) as late:
            await late.init({"w": zeros()})
            slow = await begun(late)
            assert (slow.clock, slow.version) == (4, 8)
            # One batch ahead of the joiner is allowed, two are not.
            await (await work(workers[0])).wait()
            ahead = await begun(workers[0])
            await end(ahead, ones())
            held = asyncio.ensure_future(begun(workers[0]))
            assert "at most 1 finished batches" in await blocked(made, 0)
            await end(slow, ones())
            await (await work(workers[1])).wait()
            await end(await held, ones())


# --- leave and crash -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", DEPARTURES)
async def test_whoever_goes_in_mid_batch_leaves_nothing_and_holds_nobody(how: str) -> None:
    """Half of its batch is on one server: it is in no sum, and what waited for it goes on."""
    await together(goes_in_mid_batch, [*POLICIES], how)


async def goes_in_mid_batch(policy: str, how: str) -> None:
    params = {"a": zeros(70_000), "b": zeros(70_000)}
    async with (
        cluster(2, policy_text=policy, optimizer=SGD, worker_lost_s=LOST_S) as made,
        crew(made, 2, params) as workers,
    ):
        stays, goes = workers
        mine, half = await all_begun(workers)
        half.push("a", 100 * ones(70_000))
        await end(mine, ones(70_000), "b")
        if policy == "ssp:1":
            await (await work(stays, ones(70_000), "b")).wait()
        next_one = asyncio.ensure_future(begun(stays))
        if policy in ("asp", "k-batch-bsp:2", "k-batch-asp:2"):
            assert (await next_one).version == version(made)
        else:
            assert await blocked(made, 0)
            assert not next_one.done()
        assert version(made) == {"asp": 1, "ssp:1": 2}.get(policy, 0)
        await depart(made, goes, how)
        assert await mine.wait() == "committed"
        batch = await next_one
        if policy == "k-batch-bsp:2":
            # The departure has made the update, which cancels what was computed on the old model.
            await until(lambda: batch.cancelled, what="the cancellation")
            await end(batch)
            batch = await begun(stays)
        await end(batch, ones(70_000), "b")
        assert await batch.wait() == "committed"
        pulled = await stays.pull()
        assert set(pulled["a"]) == {0.0}
        assert set(pulled["b"]) == {-float(version(made))}
        assert model(made).sync.live == {0}


@pytest.mark.parametrize("how", DEPARTURES)
async def test_what_was_finished_before_going_is_in_the_next_update(how: str) -> None:
    """Where workers are counted it takes no member's place; where batches are, it counts as one."""
    await together(goes_after_finishing, ["bsp", *TWO], how)


async def goes_after_finishing(policy: str, how: str) -> None:
    async with (
        cluster(2, policy_text=policy, optimizer=SGD, worker_lost_s=LOST_S) as made,
        crew(made, 3) as workers,
    ):
        first, second, gone = await all_begun(workers)
        await end(gone, 4 * ones())
        await arrived(made, 2, 1)
        await depart(made, workers[2], how)
        assert version(made) == 0
        await end(first, ones())
        if policy.startswith("k-batch"):
            assert await first.wait() == "committed"
            expected = -2.5 * ones()
        else:
            await arrived(made, 0, 1)
            assert (version(made), first.outcome) == (0, "pending")
            await end(second, ones())
            assert [await one.wait() for one in (first, second)] == ["committed"] * 2
            expected = -2 * ones()
        assert version(made) == 1
        np.testing.assert_array_equal(await workers[0].pull("w"), expected)
        assert model(made).tally(2).applied == 1


@pytest.mark.parametrize("policy", POLICIES)
async def test_after_everybody_has_gone_a_newcomer_goes_on(policy: str) -> None:
    """At once, on the last version; what waited for its update then is in the newcomer's."""
    async with (
        cluster(2, policy_text=policy, optimizer=SGD) as made,
        crew(made, 2) as workers,
    ):
        _, finished = await all_begun(workers)
        await end(finished, 3 * ones())
        await arrived(made, 1, 1)
        for worker in reversed(workers):
            await worker.leave()
        assert not model(made).sync.live
        waits = policy in ("bsp", "k-bsp:2", "k-asp:2")
        assert version(made) == (0 if waits else 1)
        async with made.worker(2, wait_timeout_s=6.0) as late:
            await late.init({"w": zeros()})
            batch = await work(late)
            assert batch.version == (0 if waits else 1)
            assert await batch.wait() == "committed"
            np.testing.assert_array_equal(await late.pull("w"), (-2 if waits else -4) * ones())


async def test_a_crash_is_logged_with_who_and_why(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        cluster(1, policy_text="asp", optimizer=SGD, worker_lost_s=LOST_S) as made,
        crew(made, 2) as workers,
    ):
        await all_begun(workers)
        await depart(made, workers[1], "crash")
        said = [record.getMessage() for record in caplog.records if "is gone" in record.message]
        assert len(said) == 1
        assert said[0].startswith("worker 1 ('worker-1' on ")
        assert "nothing was heard of it for" in said[0]


# --- uneven numbers of batches -------------------------------------------------------------------


@pytest.mark.parametrize("policy", [*POLICIES, "ssp:0"])
async def test_a_worker_with_more_batches_ends_by_itself(policy: str) -> None:
    """D20: 3 batches and 7; the last ones are made alone, and nobody waits for who has left."""

    async def body(worker: AsyncWorker) -> list[str]:
        await worker.init({"w": zeros()})
        batches = [await work(worker) for _ in range(3 + 4 * worker.rank)]
        if worker.rank == 1:
            assert await batches[-1].wait() in ("committed", "cancelled")
            last = await work(worker)
            assert await last.wait() == "committed"
        await worker.leave()
        return [batch.outcome for batch in batches]

    async with cluster(2, policy_text=policy, optimizer=SGD) as made:
        await made.run(body, body)
        books = model(made).tallies
        applied = [books[rank].applied for rank in (0, 1)]
        async with made.worker(observer=True) as reader:
            np.testing.assert_array_equal(await reader.pull("w"), -version(made) * ones())
        if policy == "bsp":
            assert (version(made), applied) == (8, [3, 8])
        elif policy in ("asp", "ssp:1", "ssp:0"):
            assert (version(made), applied) == (11, [3, 8])
        else:
            assert version(made) <= sum(applied) <= 2 * version(made)
            assert sum(applied) + sum(b.cancelled + b.late for b in books.values()) >= 11


# --- return --------------------------------------------------------------------------------------


RETURNS = {
    # Version that the returned worker begins on; version and value once both have finished again.
    "bsp": (1, 1, -2.0),
    "asp": (1, 3, -6.0),
    "ssp:1": (1, 3, -6.0),
    "k-bsp:2": (0, 1, -2.0),
    "k-asp:2": (0, 1, -2.0),
    "k-batch-bsp:2": (1, 2, -4.5),
    "k-batch-asp:2": (1, 2, -4.5),
}
"""Worker 1 finishes 3 and goes; then worker 0 finishes 1, and the returned worker 1 finishes 2.

BSP: the mean of 3 and 1, and 2 waits for the next round. By worker: the mean of 1, 3 and 2. By
batch: 3 alone, as one member is left when it goes; then the mean of 1 and 2.
"""


@pytest.mark.parametrize("how", DEPARTURES)
async def test_a_worker_comes_back_under_its_name(how: str) -> None:
    """A new incarnation at the current version; what the old one finished counts once (D26).

    The crashed one comes back long before the broker would miss it.
    """
    assert set(RETURNS) == set(POLICIES)
    await together(comes_back, [*POLICIES], how)


async def comes_back(policy: str, how: str) -> None:
    starts_at, ends_at, value = RETURNS[policy]
    async with (
        cluster(2, policy_text=policy, optimizer=SGD, worker_lost_s=60.0) as made,
        crew(made, 2) as workers,
    ):
        first, before = await all_begun(workers)
        old = incarnation(made, 1)
        await end(before, 3 * ones())
        await arrived(made, 1, 1)
        if how == "leave":
            await workers[1].leave()
        else:
            crash(workers[1])
        async with made.worker(1, wait_timeout_s=6.0) as again:
            await again.init({"w": 9 * ones()})
            joining = asyncio.ensure_future(begun(again))
            if policy == "bsp":
                assert "a joiner starts after" in await blocked(made, 1)
                await end(first, ones())
            batch = await joining
            assert incarnation(made, 1) > old
            assert (again.rank, batch.number, batch.version) == (1, 1, starts_at)
            assert batch.clock == min(model(made).sync.clocks.values())
            if policy == "k-batch-bsp:2":
                await until(lambda: first.cancelled, what="the cancellation")
                await end(first)
                first = await begun(workers[0])
            if policy != "bsp":
                await end(first, ones())
                await arrived(made, 0, first.clock + 1)
            await end(batch, 2 * ones())
            await arrived(made, 1, batch.clock + 1)
            assert version(made) == ends_at
            np.testing.assert_array_equal(await again.pull("w"), value * ones())
            assert model(made).tally(1).applied == (1 if policy == "bsp" else 2)


async def test_a_second_live_worker_of_a_name_or_a_rank_is_refused() -> None:
    """The holder is heard, so it keeps its place, and trains on undisturbed."""
    async with cluster(1, policy_text="bsp", optimizer=SGD) as made, crew(made, 1) as workers:
        with pytest.raises(NameInUse, match="already has the name 'worker-0'"):
            await made.worker(5, name="worker-0").connect()
        with pytest.raises(Refused, match=r"rank 0 is taken by worker 0 \('worker-0'"):
            await made.worker(0, name="another").connect()
        assert await (await work(workers[0])).wait() == "committed"


async def test_many_newcomers_for_one_dead_name_get_one_place() -> None:
    """Two processes come for the same name at once: one is served, the other is told."""
    async with (
        cluster(1, policy_text="asp", optimizer=SGD, worker_lost_s=60.0) as made,
        crew(made, 2) as workers,
    ):
        await all_begun(workers)
        crash(workers[1])
        rivals = [made.worker(1) for _ in range(2)]
        results = await asyncio.gather(*(one.connect() for one in rivals), return_exceptions=True)
        refused = [one for one in results if isinstance(one, NameInUse)]
        served = [one for one in results if isinstance(one, AsyncWorker)]
        assert (len(refused), len(served)) == (1, 1)
        await served[0].init({"w": zeros()})
        assert await (await work(served[0])).wait() == "committed"
        await served[0].close()


# --- waits that are explained, reads that are whole ----------------------------------------------


async def test_a_worker_that_never_pushes_is_named_and_the_servers_survive(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """D21: it stays connected; whoever waits is told of it first, and then has an error."""
    async with (
        cluster(2, policy_text="bsp", optimizer=SGD) as made,
        crew(made, 2, wait_timeout_s=1.5, narrate_after_s=0.7) as workers,
    ):
        mine, silent = await all_begun(workers)
        await end(mine, ones())
        with pytest.raises(WaitTimeout) as raised:
            await begun(workers[0])
        (told,) = [r.getMessage() for r in caplog.records if "waiting for the next" in r.message]
        for text in (told, str(raised.value)):
            assert "the next batch waits for worker 1 ('worker-1' on" in text
            assert "clock 0" in text
            assert "bsp: the update needs a contribution of every worker; it has 1 of 2" in text
        status = await workers[1].status()
        (guilty,) = status["workers"][0]["waiting"]["on"]
        assert (guilty["number"], guilty["name"], guilty["clock"]) == (1, "worker-1", 0)
        assert status["failed"] is None
        await end(silent, ones())
        assert [await one.wait() for one in (mine, silent)] == ["committed"] * 2
        np.testing.assert_array_equal(await workers[0].pull("w"), -ones())


async def test_keys_of_different_sizes_are_never_mixed_up_under_ssp() -> None:
    """D22: sizes 10 and 96 on 2 servers, 200 batches; one key counts in ones, one in thousands."""
    params = {"small": zeros(10), "large": zeros(96)}

    async def body(worker: AsyncWorker) -> None:
        await worker.init(params)
        for _ in range((67, 67, 66)[worker.rank]):
            async with worker.batch() as batch:
                values = batch.params
                assert {value.shape for value in values.values()} == {(10,), (96,)}
                assert set(values["small"]) == {float(batch.version)}
                assert set(values["large"]) == {1000.0 * batch.version}
                batch.push("large", -1000 * ones(96))
                batch.push("small", -ones(10))
                assert batch.spread_clocks <= 2
        await batch.wait()
        await worker.leave()

    async with cluster(2, policy_text="ssp:1", optimizer=SGD) as made:
        await made.run(body, body, body)
        assert version(made) == 200
        assert {len(server.shard.store.blocks) > 0 for server in made.servers} == {True}
        async with made.worker(observer=True) as reader:
            assert set(await reader.pull("small")) == {200.0}
            assert set(await reader.pull("large")) == {200_000.0}


async def test_a_pull_between_updates_is_of_one_version() -> None:
    """D23: 4 asynchronous workers add 1 to a large vector and 10 keys while somebody reads."""
    params: dict[Any, Array] = {"vector": zeros(1_000_000)}
    params |= {f"k{number}": zeros(50) for number in range(10)}
    pushes, seen = 6, []

    async def body(worker: AsyncWorker) -> None:
        await worker.init(params)
        for _ in range(pushes):
            async with worker.batch() as batch:
                for key, value in params.items():
                    batch.push(key, -ones(value.size))
        await batch.wait()

    async with cluster(2, policy_text="asp", optimizer=SGD) as made:

        async def read(reader: AsyncWorker, over: asyncio.Event) -> None:
            while not over.is_set():
                pulled = await reader.pull()
                entries = np.unique(np.concatenate(list(pulled.values())))
                assert entries.size == 1, f"torn: {entries[:4]}"
                seen.append(float(entries[0]))

        over = asyncio.Event()
        async with made.worker(0, name="initialiser", world=1) as first:
            await first.init(params)
        async with made.worker(observer=True) as reader:
            reading = asyncio.ensure_future(read(reader, over))
            await made.run(*[body] * 4)
            await until(lambda: seen[-1:] == [4.0 * pushes], what="that all pushes were read")
            over.set()
            await reading
        assert seen == sorted(seen)
        assert version(made) == 4 * pushes


# --- settings that change while training runs ----------------------------------------------------


async def test_from_bsp_to_asp_in_mid_round() -> None:
    """What was complete makes one last update; who computes goes on, and counts as it is."""
    async with cluster(2, policy_text="bsp", optimizer=SGD) as made, crew(made, 3) as workers:
        first, second, third = await all_begun(workers)
        await end(first, 3 * ones())
        await arrived(made, 0, 1)
        next_one = asyncio.ensure_future(begun(workers[0]))
        assert "every worker" in await blocked(made, 0)
        assert await workers[1].set(policy="asp") == {"policy": 1}
        assert await first.wait() == "committed"
        assert (await next_one).version == 1
        assert not second.cancelled
        await end(second, ones())
        assert await second.wait() == "committed"
        await end(third, ones())
        assert await third.wait() == "committed"
        assert version(made) == 3
        np.testing.assert_array_equal(await workers[2].pull("w"), -5 * ones())
        assert workers[1].stats()["staleness"] == {"1": 1}
        assert workers[2].stats()["staleness"] == {"2": 1}
        assert (await workers[0].status())["policy"] == "asp"


@pytest.mark.parametrize("policy", ["bsp", "k-bsp:3", "k-batch-bsp:3"])
async def test_from_asp_to_a_policy_that_cancels(policy: str) -> None:
    """Nobody's old work is in the new policy's updates: all begin again on one version."""
    async with cluster(2, policy_text="asp", optimizer=SGD) as made, crew(made, 3) as workers:
        old = await all_begun(workers)
        assert await (await ended(old[0], ones())).wait() == "committed"
        assert await workers[2].set(policy=policy) == {"policy": 1}
        for batch in old[1:]:
            await until(lambda one=batch: one.cancelled, what="the cancellation")
            await end(batch)
            assert await batch.wait() == "cancelled"
        # Worker 0 had a grant that it has not used; with an answer it has heard what came of it.
        await workers[0].status()
        fresh = await all_begun(workers)
        assert [batch.version for batch in fresh] == [1, 1, 1]
        for batch in fresh:
            await end(batch, 2 * ones())
        assert [await batch.wait() for batch in fresh] == ["committed"] * 3
        assert version(made) == 2
        np.testing.assert_array_equal(await workers[2].pull("w"), -3 * ones())


async def test_a_larger_slack_lets_go_who_was_held() -> None:
    async with cluster(2, policy_text="ssp:0", optimizer=SGD) as made, crew(made, 2) as workers:
        first, slow = await all_begun(workers)
        await end(first, ones())
        held = asyncio.ensure_future(begun(workers[0]))
        assert "at most 0 finished batches" in await blocked(made, 0)
        assert await workers[1].set(policy="ssp:1") == {"policy": 1}
        await end(await held, ones())
        held = asyncio.ensure_future(begun(workers[0]))
        assert "at most 1 finished batches" in await blocked(made, 0)
        assert not slow.cancelled
        await end(slow, ones())
        await end(await held)
        assert version(made) >= 3


async def test_from_k_asp_to_k_batch_asp_a_contributor_no_longer_waits() -> None:
    async with cluster(2, policy_text="k-asp:2", optimizer=SGD) as made, crew(made, 3) as workers:
        first, second, third = await all_begun(workers)
        await end(first, ones())
        held = asyncio.ensure_future(begun(workers[0]))
        assert "2 workers" in await blocked(made, 0)
        assert await workers[1].set(policy="k-batch-asp:3") == {"policy": 1}
        batch = await held
        assert batch.version == 1
        await end(batch, ones())
        await end(await begun(workers[0]), ones())
        assert version(made) == 1
        assert not second.cancelled
        await end(second, 4 * ones())
        assert await second.wait() == "committed"
        assert version(made) == 2
        await end(third)
        # One, then the mean of 1, 1 and 4.
        np.testing.assert_array_equal(await workers[0].pull("w"), -3 * ones())


async def test_what_cannot_be_set_is_refused_and_changes_nothing() -> None:
    async with cluster(1, policy_text="asp", optimizer=SGD) as made, crew(made, 1) as workers:
        for setting, value, words in (
            ("policy", "k-bsp:0", "threshold must be at least 1"),
            ("policy", "ssp:-1", "none of bsp, asp, ssp:S"),
            ("policy", "bulk", "none of bsp, asp, ssp:S"),
            ("staleness", "drop:-1", "drop needs a count"),
            ("slack", "1", "there are: codec, codec_down, lr, policy, staleness"),
        ):
            with pytest.raises(Refused, match=words):
                await workers[0].set(**{setting: value})
        status = await workers[0].status()
        assert (status["policy"], status["staleness"]) == ("asp", "none")
        assert await (await work(workers[0])).wait() == "committed"


async def test_a_policy_that_the_budget_cannot_hold_is_refused_and_changes_nothing() -> None:
    """BSP with three workers needs room for three contributions; there is room for two."""
    async with (
        cluster(
            1, policy_text="asp", optimizer=SGD, server_options={"budget_bytes": 8_000}
        ) as made,
        crew(made, 3, {"w": zeros(1_000)}) as workers,
    ):
        # Only two of them can have a grant at a time; the third gets the first one's place.
        await asyncio.gather(*(work(worker, ones(1_000)) for worker in workers))
        await until(lambda: version(made) == 3, what="three updates")
        with pytest.raises(Refused, match=r"policy bsp with 3 workers needs 3 x 4000 = 12000"):
            await workers[0].set(policy="bsp")
        assert (await workers[0].status())["policy"] == "asp"
        assert await workers[0].set(policy="k-asp:2") == {"policy": version(made)}


def shortages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the broker's warnings that k is too large, each up to what follows from it."""
    said = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    return [text.partition(": an")[0] for text in said if "contributions for each update" in text]


@pytest.mark.parametrize("name", ["k-bsp", "k-batch-bsp", "k-asp", "k-batch-asp"])
async def test_k_above_the_members_is_said_with_both_numbers_and_works(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An update takes min(k, live); the broker says so once, when it begins or is switched."""
    async with (
        cluster(2, policy_text=f"{name}:5", optimizer=SGD) as made,
        crew(made, 2) as workers,
    ):
        for turn in range(2):
            batches = await all_begun(workers)
            for batch in batches:
                await end(batch, ones())
            assert [await batch.wait() for batch in batches] == ["committed"] * 2
            assert version(made) == turn + 1
        said = [f"policy {name}:5 wants 5 contributions for each update, but 2 workers are here"]
        assert shortages(caplog) == said
        await workers[0].set(policy=f"{name}:2")
        assert shortages(caplog) == said
        await workers[0].set(policy=f"{name}:3")
        said += [f"policy {name}:3 wants 3 contributions for each update, but 2 workers are here"]
        assert shortages(caplog) == said


async def test_a_loss_that_makes_k_too_large_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        cluster(1, policy_text="k-asp:2", optimizer=SGD, worker_lost_s=LOST_S) as made,
        crew(made, 2) as workers,
    ):
        await all_begun(workers)
        assert shortages(caplog) == []
        await depart(made, workers[1], "crash")
        said = "policy k-asp:2 wants 2 contributions for each update, but 1 worker is here"
        assert shortages(caplog) == [said]


async def test_enough_workers_are_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    """Not while they come in one by one, and not when they leave one by one at the end."""
    async with cluster(1, policy_text="k-bsp:3", optimizer=SGD) as made, crew(made, 3) as workers:
        for batch in await all_begun(workers):
            await end(batch, ones())
        for worker in workers:
            await worker.leave()
        assert shortages(caplog) == []


# --- stale gradients -----------------------------------------------------------------------------

LAMBDA = 0.5


def by_hand(rule: str, gradients: list[Array], ages: list[int], start: Array) -> Array:
    """Apply gradients one by one with learning rate 1, each computed `age` updates ago.

    scale: weight 1 of g / (1 + age). dc: g + LAMBDA * g * g * (w_now - w_then).
    """
    history = [start.astype(np.float64)]
    for gradient, age in zip(gradients, ages, strict=True):
        now, then = history[-1], history[-1 - age]
        used = gradient.astype(np.float64)
        if rule.startswith("dc"):
            used = used + LAMBDA * used * used * (now - then)
        if rule.startswith("scale"):
            used = used / (1 + age)
        history.append(now - used)
    return history[-1]


@pytest.mark.parametrize("live", [False, True], ids=["from the start", "set live"])
@pytest.mark.parametrize("rule", ["scale", f"dc:{LAMBDA}", "none"])
async def test_stale_gradients_are_treated_as_one_process_would(rule: str, live: bool) -> None:
    """Staleness 0, 0, 2, 1, 1 and 5, forced by the order in which three workers finish."""
    start = np.array([1.0, -2.0, 0.5], np.float32)
    gradients = [
        np.array([0.25 * n, -0.5, 0.125 * (n % 3)], np.float32) * (-1) ** n for n in range(1, 7)
    ]
    given = "none" if live else rule
    async with (
        cluster(2, policy_text="asp", optimizer=SGD, staleness=given) as made,
        crew(made, 3, {"w": start}) as workers,
    ):
        if live:
            assert await workers[0].set(staleness=rule) == {"staleness": 0}
        fast, middle, slow = await all_begun(workers)
        order: list[Any] = []

        async def finish(batch: Any) -> None:
            await end(batch, gradients[len(order)])
            assert await batch.wait() == "committed"
            order.append(batch)

        await finish(fast)
        await finish(await begun(workers[0]))
        late = await begun(workers[0])
        await finish(middle)
        await finish(late)
        # Worker 1 got its next grant with its own update, the third; worker 2 is at 0 still.
        await finish(await begun(workers[1]))
        await finish(slow)
        ages = [at - batch.version for at, batch in enumerate(order)]
        assert ages == [0, 0, 2, 1, 1, 5]
        expected = by_hand(rule, gradients, ages, start)
        np.testing.assert_allclose(await workers[0].pull("w"), expected, rtol=1e-6)
        assert (await workers[0].status())["staleness"] == rule


async def test_a_gradient_beyond_the_bound_is_dropped_and_counted_late() -> None:
    async with (
        cluster(2, policy_text="asp", optimizer=SGD, staleness="drop:1") as made,
        crew(made, 2) as workers,
    ):
        first, slow = await all_begun(workers)
        await end(first, ones())
        await (await work(workers[0])).wait()
        await end(slow, 100 * ones())
        assert await slow.wait() in ("cancelled", "discarded")
        assert version(made) == 2
        assert await (await work(workers[1])).wait() == "committed"
        np.testing.assert_array_equal(await workers[0].pull("w"), -3 * ones())
        book = model(made).tally(1)
        assert (book.applied, book.late, book.discarded) == (1, 1, 0)


# --- the page ------------------------------------------------------------------------------------


@pytest.mark.source
def test_the_page_about_policies_names_tests_that_exist() -> None:
    """docs/policies.md backs what it says with tests by name; a renamed one must not stay there."""
    tests = Path(__file__).parent.parent
    page = (tests.parent / "docs" / "policies.md").read_text("utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 10
    files = [path.read_text("utf-8") for path in sorted(tests.rglob("test_*.py"))]
    there = {name for text in files for name in re.findall(r"def (test_\w+)\(", text)}
    assert named <= there, f"not there: {sorted(named - there)}"
    for policy in ("bsp", "asp", "ssp:S", "k-bsp:K", "k-batch-bsp:K", "k-asp:K", "k-batch-asp:K"):
        assert f"| `{policy}` |" in page
