"""Workers for tests that decide themselves who computes when: joined and driven one by one.

It knows the worker's face and the harness; it must not know messages or machines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
from harness import Cluster, until

from zkv.aio import AsyncWorker
from zkv.dtypes import Array
from zkv.pool import Pool
from zkv_brokers.group import Group

POLICIES = ("bsp", "asp", "ssp:1", "k-bsp:2", "k-batch-bsp:2", "k-asp:2", "k-batch-asp:2")
"""All seven."""


def ones(size: int = 3) -> Array:
    """Return float32 ones."""
    return np.ones(size, np.float32)


def zeros(size: int = 3) -> Array:
    """Return float32 zeros."""
    return np.zeros(size, np.float32)


@asynccontextmanager
async def crew(
    made: Cluster, count: int, params: Mapping[Any, Any] | None = None, **options: Any
) -> AsyncIterator[list[AsyncWorker]]:
    """Yield workers 0, 1, ... that have joined and initialised `params` (default: w, three zeros).

    `init_options` in `options` go to `init`, the rest to `connect`.
    """
    init_options = options.pop("init_options", {})
    options.setdefault("wait_timeout_s", 6.0)
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(made.worker(rank, world=count, **options))
            for rank in range(count)
        ]
        first = {"w": zeros()} if params is None else params
        await asyncio.gather(*(worker.init(first, **init_options) for worker in workers))
        yield workers


async def work(worker: AsyncWorker, gradient: Any = None, key: Any = "w", **options: Any) -> Any:
    """Do one batch with one gradient (default: ones) and return it, finished but not settled."""
    async with worker.batch(**options) as batch:
        batch.push(key, ones() if gradient is None else gradient)
    return batch


async def begun(worker: AsyncWorker, **options: Any) -> Any:
    """Begin a batch and return it, open; `end` finishes it."""
    return await worker.batch(**options).__aenter__()


async def all_begun(workers: list[AsyncWorker], **options: Any) -> list[Any]:
    """Begin a batch of each worker and return them, open. The start line needs all to ask."""
    return list(await asyncio.gather(*(begun(worker, **options) for worker in workers)))


async def end(batch: Any, gradient: Any = None, key: Any = "w") -> None:
    """Push one gradient, if one is given, and finish a batch that `begun` has opened."""
    if gradient is not None:
        batch.push(key, gradient)
    await batch.__aexit__(None, None, None)


def model(made: Cluster) -> Group:
    """Return the model's group at the broker; it is there once somebody has begun a batch."""
    assert made.broker.router is not None
    group = made.broker.router.groups.model
    assert group is not None
    return group


async def blocked(made: Cluster, rank: int) -> str:
    """Wait until the policy holds this worker back; return the rule that does."""

    def waiting() -> Any:
        sync = model(made).sync
        return rank in sync.live and sync.waiting(rank)

    await until(waiting, what=f"that worker {rank} has to wait")
    rule: str = waiting().rule
    return rule


def version(made: Cluster) -> int:
    """Return the model's version at the broker."""
    return model(made).sync.version


def pool(made: Cluster) -> Pool:
    """Return the pool of samples at the broker; it is there once somebody has named it."""
    assert made.broker.router is not None
    found = made.broker.router.groups.draws.pool
    assert found is not None
    return found
