"""Cancelled calls, floods, interrupts and endings, on both faces of the worker."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from beside import blocking, cluster_beside
from crew import all_begun, begun, crew, end, ones, work, zeros
from harness import cluster, until

from zkv.aio import AsyncWorker, connect
from zkv.errors import Cancelled, Closed, KeyMismatch, WaitTimeout

# --- asyncio -------------------------------------------------------------------------------------


async def test_answers_after_cancelled_pulls_belong_to_their_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """D33: 100 pulls given up at different moments, then 100 of different keys."""
    params = {key: np.full(50, key, np.float32) for key in range(100)}
    async with cluster(2) as made, crew(made, 1, params) as workers:
        (worker,) = workers
        for turn in range(100):
            pull = asyncio.ensure_future(worker.pull(turn))
            for _ in range(turn % 12):
                await asyncio.sleep(0)
            pull.cancel()
            await asyncio.gather(pull, return_exceptions=True)
        for key in reversed(range(100)):
            assert set(await worker.pull(key)) == {float(key)}
        values = await asyncio.gather(*(worker.pull(key) for key in range(100)))
        assert [value[0] for value in values] == list(range(100))
        assert not worker._driver._futures
    assert "never retrieved" not in caplog.text


async def test_a_batch_that_nobody_waits_for_any_more_is_granted_to_the_next() -> None:
    async with cluster(1, optimizer="sgd:lr=1") as made, crew(made, 2) as workers:
        for _ in range(5):
            waiting = asyncio.ensure_future(begun(workers[0]))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        first, second = await asyncio.gather(*(work(worker) for worker in workers))
        assert [await first.wait(), await second.wait()] == ["committed"] * 2
        assert (await workers[0].pull("w")).tolist() == [-1.0] * 3


@pytest.mark.parametrize("pushes", [1000, pytest.param(5000, marks=pytest.mark.slow)])
async def test_a_flood_of_small_pushes_is_acknowledged_to_the_last(pushes: int) -> None:
    """D34: no wake-up is missed, whoever sends and receives on the same sockets meanwhile."""
    params = {key: zeros(2) for key in range(32)}

    async def body(worker: AsyncWorker) -> list[str]:
        await worker.init(params, plain=True, rule="sgd:lr=1")
        outcomes = [worker.push(8 * worker.rank + turn % 8, -ones(2)) for turn in range(pushes)]
        fates = [await outcome for outcome in outcomes]
        await worker.barrier()
        return fates

    async with cluster(2, policy_text="asp") as made:
        for fates in await made.run(*[body] * 4):
            assert fates == ["committed"] * pushes
        async with made.worker(observer=True) as reader:
            pulled = await reader.pull(list(params))
            assert sum(float(value[0]) for value in pulled.values()) == 4 * pushes


async def test_closing_ends_what_still_waits() -> None:
    async with cluster(1) as made:
        worker = await made.worker(0, world=2).connect()
        await worker.init({"w": zeros()})
        waiting = [asyncio.ensure_future(worker.barrier()), asyncio.ensure_future(begun(worker))]
        await worker.status()
        await worker.close()
        for one in waiting:
            with pytest.raises(Closed):
                await one
        with pytest.raises(Closed):
            await worker.pull()
        await worker.close()


async def test_a_worker_that_never_connected_says_how_to() -> None:
    worker = connect("tcp://127.0.0.1:1")
    with pytest.raises(Closed, match="async with"):
        await worker.pull()
    with pytest.raises(Closed, match="async with"):
        _ = worker.rank
    await worker.close()


async def test_a_batch_is_used_once_and_inside_its_block() -> None:
    async with cluster(1, optimizer="sgd:lr=1") as made, crew(made, 1) as workers:
        batch = workers[0].batch()
        with pytest.raises(RuntimeError, match="inside its block"):
            _ = batch.params
        async with batch:
            batch.push("w", ones())
            assert batch.outcome == "open"
            with pytest.raises(KeyMismatch, match="already pushed"):
                batch.push("w", ones())
        with pytest.raises(RuntimeError, match="used once"):
            async with batch:
                pass
        assert await batch.wait() == "committed"


async def test_what_was_finished_before_leaving_still_counts() -> None:
    async with cluster(2, optimizer="sgd:lr=1") as made:
        async with made.worker(0, world=1) as worker:
            await worker.init({"w": zeros(300_000)})
            await work(worker, ones(300_000))
        async with made.worker(0) as again:
            assert set(await again.pull("w")) == {-1.0}


async def test_a_wait_that_ends_names_whom_it_waited_for() -> None:
    async with cluster(1, optimizer="sgd:lr=1") as made:  # noqa: SIM117
        async with made.worker(0, world=2, wait_timeout_s=1.2) as first:
            await first.init({"w": zeros()})
            with pytest.raises(WaitTimeout) as raised:
                await begun(first)
            assert "1 of 2 workers to join" in str(raised.value)
            async with made.worker(1, world=2) as second:
                with pytest.raises(WaitTimeout) as raised:
                    await begun(first)
                assert "not asked for a batch" in str(raised.value)
                assert "worker-1" in str(raised.value)
                batches = [await begun(second), await begun(first)]
                await end(batches[1], ones())
                with pytest.raises(WaitTimeout) as raised:
                    await begun(first)
                for word in ("worker 1", "worker-1", "bsp", "1 of 2"):
                    assert word in str(raised.value)
                await end(batches[0], ones())
                assert await batches[1].wait() == "committed"


async def test_the_wait_for_a_fate_ends_too() -> None:
    """The other worker never finishes: whoever waits for the update is not left there for ever."""
    async with (
        cluster(1, optimizer="sgd:lr=1") as made,
        crew(made, 2, wait_timeout_s=0.6) as workers,
    ):
        batches = await all_begun(workers)
        await end(batches[0], ones())
        for patience in (None, 0.1):
            with pytest.raises(WaitTimeout, match="fate of batch 1"):
                await batches[0].wait(patience)
        assert batches[0].outcome == "pending"
        await end(batches[1], ones())
        assert [await batch.wait(8) for batch in batches] == ["committed"] * 2


# --- blocking ------------------------------------------------------------------------------------


async def test_the_blocking_worker_inside_a_running_loop() -> None:
    """D36: two blocking workers in one thread, in a coroutine, as in a notebook's cell."""
    with cluster_beside(optimizer="sgd:lr=1") as (made, _):
        with blocking(made, rank=0, world=2) as first, blocking(made, rank=1, world=2) as second:
            assert (first.rank, second.rank, second.world) == (0, 1, 2)
            first.init({"w": zeros()})
            second.init({"w": ones()})
            pushed = [worker.push("w", ones()) for worker in (first, second)]
            assert [one.result(8) for one in pushed] == ["committed"] * 2
            np.testing.assert_array_equal(first.pull("w"), -2 * ones())
        assert asyncio.get_running_loop().is_running()


def test_the_blocking_worker_trains() -> None:
    with cluster_beside(optimizer="sgd:lr=1") as (made, _), blocking(made, rank=0) as worker:
        worker.init({"w": zeros(), "large": zeros(300_000)})
        for turn in range(4):
            with worker.batch(weight=8) as batch:
                assert (batch.version, batch.outcome) == (turn, "open")
                batch.push("w", batch["w"] + 1)
                batch.push("large", ones(300_000))
            assert batch.wait(8) == "committed"
        broken = worker.batch()

        def fails() -> None:
            with broken:
                broken.push("w", 100 * ones())
                _ = 1 / 0

        with pytest.raises(ZeroDivisionError):
            fails()
        assert broken.outcome == "withdrawn"
        worker.barrier()
        pulled = worker.pull()
        # Each update takes w + 1 away from w, so it is at -1 ever after.
        assert (set(pulled["w"]), set(pulled["large"])) == ({-1.0}, {-4.0})
        stats = worker.stats()
        assert stats["outcomes"] == {"committed": 4, "discarded": 0, "cancelled": 0}
        assert worker.set(lr=0.5) == {"lr": 4}
        assert worker.status()["version"] == 4
        worker.leave()
        with pytest.raises(Closed):
            worker.pull()
        with pytest.raises(Closed), worker.batch():
            pass
        worker.close()
        worker.close()


def test_a_cancelled_batch_in_blocking_code() -> None:
    with cluster_beside(optimizer="sgd:lr=1", policy_text="k-bsp:1") as (made, beside):  # noqa: SIM117
        with blocking(made, rank=0, world=2) as slow, blocking(made, rank=1, world=2) as fast:
            slow.init({"w": zeros()})
            fast.init({"w": zeros()})
            with ThreadPoolExecutor(1) as pool:
                begun_by_fast = pool.submit(fast.batch().__enter__)
                ran_on = False
                with slow.batch() as batch:
                    other = begun_by_fast.result(8)
                    other.push("w", ones())
                    other.__exit__(None, None, None)
                    assert other.wait(8) == "committed"
                    beside(until(lambda: batch.cancelled, what="the cancellation")).result(10)
                    batch.push("w", 100 * ones())
                    ran_on = True
                assert not ran_on
                assert batch.wait(8) == "cancelled"
                with pytest.raises(Cancelled):
                    _ = batch.params
            assert slow.pull("w").tolist() == [-1.0] * 3


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals to threads are POSIX's")
def test_an_interrupted_call_can_be_made_again() -> None:
    """D36: Ctrl-C in a cell that waits, then the same call once more."""
    with cluster_beside(optimizer="sgd:lr=1") as (made, beside):  # noqa: SIM117
        with blocking(made, rank=0, world=2) as worker:
            worker.init({"w": zeros()})

            def at_barrier() -> bool:
                assert made.broker.router is not None
                members = made.broker.router.members.training()
                return any(member.barrier_token for member in members)

            async def interrupt() -> None:
                await until(at_barrier, what="that the worker waits in its barrier")
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

            interrupting = beside(interrupt())
            with pytest.raises(KeyboardInterrupt):
                worker.barrier()
            interrupting.result(8)
            with ThreadPoolExecutor(1) as pool:
                second = blocking(made, rank=1, world=2)
                second.init({"w": zeros()})

                def beside_it() -> str:
                    with second.batch() as batch:
                        batch.push("w", ones())
                    return batch.wait(8)

                other = pool.submit(beside_it)
                with worker.batch() as batch:
                    batch.push("w", ones())
                assert batch.wait(8) == other.result(8) == "committed"
                second.close()
            assert worker.pull("w").tolist() == [-1.0] * 3


def test_closing_is_bounded_when_the_broker_is_gone() -> None:
    with cluster_beside(optimizer="sgd:lr=1") as (made, beside):
        worker = blocking(made, rank=0, broker_lost_s=0.5)
        worker.init({"w": zeros(300_000)})

        async def crash() -> None:
            made.broker.stop()
            await made.tasks[0]
            made.broker.close()
            for server in made.servers:
                server.close()

        beside(crash()).result(8)
        worker.push("w", ones(300_000))
        worker.close()
        assert not worker._thread.is_alive()


TOLD_TWICE = """
import asyncio, os, signal, sys
from zkv.errors import ServerLost
from zkv_brokers.node import Failed
from zkv_brokers.server import Server, ServerConfig, serve
if sys.argv[1] == "uvloop":
    import uvloop as loops
else:
    import asyncio as loops

def ready(server):
    def both():
        server._carry_out([Failed(ServerLost("another one has gone"))])
        os.kill(os.getpid(), signal.SIGTERM)
    asyncio.get_running_loop().call_later(0.1, both)

loops.run(serve(ServerConfig("tcp://127.0.0.1:9"), ready))
print("ended as it was told to")
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_server_that_was_told_to_end_is_not_ended_by_others_that_were(loop: str) -> None:
    """All of a cluster are told at once, and the first goodbye ends the run for the rest."""
    told = subprocess.run(
        [sys.executable, "-c", TOLD_TWICE, loop],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert told.stdout == "ended as it was told to\n", told.stderr
