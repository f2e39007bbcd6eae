"""A process that has no memory for something: what of a worker's it was for is refused, and who
cannot go on says so and ends. Memory runs out by a stand-in that refuses at one place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from crew import all_begun, crew, end, ones, work
from harness import cluster, until

import zkv_brokers.shard as shard
from zkv.errors import PushRefused, Refused, ServerLost
from zkv_brokers import requests
from zkv_brokers.store import Store

SGD = "sgd:lr=1"
FULL = "Unable to allocate 8.00 GiB"


def failing(original: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    def stand_in(*arguments: Any, **named: Any) -> Any:
        if when(*arguments, **named):
            raise MemoryError(FULL)
        return original(*arguments, **named)

    return stand_in


async def test_a_push_that_there_is_no_memory_for_costs_that_contribution_alone(monkeypatch):
    async with cluster(2, optimizer=SGD) as made, crew(made, 3) as workers:
        batches = await all_begun(workers)

        def of_worker_1(store: Any, block: Any, message: Any, payload: Any, **_: Any) -> bool:
            members = made.broker.router.members
            return message.contribution.incarnation == members.numbered(1).incarnation

        monkeypatch.setattr(shard, "admit", failing(shard.admit, of_worker_1))
        for number, batch in enumerate(batches):
            await end(batch, np.full(3, number, np.float32))
        assert [await batch.wait() for batch in batches] == ["committed", "discarded", "committed"]
        monkeypatch.undo()
        # (0 + 2) / 2: worker 1 is in neither.
        np.testing.assert_array_equal(await workers[0].pull("w"), -ones())
        with pytest.raises(PushRefused, match=f"worker 1 .*no memory left for it .{FULL}"):
            await work(workers[1])
        done = await asyncio.gather(*(work(worker) for worker in workers))
        assert [await batch.wait() for batch in done] == ["committed"] * 3
        np.testing.assert_array_equal(await workers[0].pull("w"), -2 * ones())


async def test_first_values_that_there_is_no_memory_for_are_refused_to_who_sends_them(monkeypatch):
    async with cluster(1, optimizer=SGD) as made:
        monkeypatch.setattr(Store, "put", failing(Store.put, lambda *_: True))
        async with made.worker(0) as worker:
            with pytest.raises(PushRefused, match="no memory left"):
                await worker.init({"w": ones()})
        monkeypatch.undo()
        async with made.worker(0) as worker:
            await worker.init({"w": ones()})
            np.testing.assert_array_equal(await worker.pull("w"), ones())


async def test_a_server_that_has_no_memory_for_an_update_ends_the_run_with_its_reason(monkeypatch):
    async with cluster(2, optimizer=SGD) as made, crew(made, 1) as workers:
        owner = next(one for one in made.servers if one.shard.store.blocks)
        no_room = failing(Store.commit, lambda store, *_: store is owner.shard.store)
        monkeypatch.setattr(Store, "commit", no_room)
        # Not streamed, or the update would have been made by then.
        monkeypatch.setattr(shard.Shard, "_make", lambda self, blocks=None: None)
        # Its contribution counts, and a pull may be quicker than the update that it is in.
        await (await work(workers[0])).wait()
        await until(lambda: made.broker.router.failed is not None, what="the end of the run")
        with pytest.raises(ServerLost, match=f"cannot go on: MemoryError: {FULL}"):
            await workers[0].pull("w")
        with pytest.raises(ServerLost, match="this server is lost: it cannot go on"):
            await asyncio.wait_for(made.tasks[1 + made.servers.index(owner)], 10)


async def test_a_request_that_the_broker_has_no_memory_for_is_refused_alone(monkeypatch):
    async with cluster(1, optimizer=SGD) as made, crew(made, 2) as workers:
        monkeypatch.setattr(requests, "change", failing(requests.change, lambda *_: True))
        with pytest.raises(Refused, match=FULL):
            await workers[1].set(lr=0.5)
        monkeypatch.undo()
        done = await asyncio.gather(*(work(worker) for worker in workers))
        assert [await batch.wait() for batch in done] == ["committed"] * 2
