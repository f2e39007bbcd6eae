"""Samples as tokens: the model itself says how often each one was computed and counted.

A local batch takes 1 from its samples' own entries of `w`, and contributions are summed. It knows
the workers' local rounds; it must not know messages or machines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from crew import pool
from harness import Cluster

from zkv.aio import AsyncWorker
from zkv.pool import Shard
from zkv_workers.local import AsyncLocal, AsyncLocalBatch

SGD = "sgd:lr=1"
TOKENS: dict[str, Any] = {"init_options": {"reduce": "sum"}, "wait_timeout_s": 15.0}


def tokens(n: int) -> dict[str, Any]:
    """Return a model of one entry for each sample."""
    return {"w": np.zeros(n, np.float32)}


def compute(batch: Any) -> None:
    """Mark the samples of a local batch as computed."""
    batch.params["w"][batch.samples] -= 1


async def the_rest(local: AsyncLocal, shard: Shard) -> None:
    """Compute all local batches that still come."""
    async for batch in local.batches(shard):
        async with batch:
            compute(batch)


async def train(worker: AsyncWorker, shard: Shard, h: int) -> None:
    """Compute all rounds that come."""
    async with worker.local(h=h) as local:
        await the_rest(local, shard)


async def handed(batches: AsyncIterator[AsyncLocalBatch]) -> AsyncLocalBatch:
    """Take the next local batch, and compute it."""
    batch = await anext(batches)
    async with batch:
        compute(batch)
    return batch


async def assert_once_per_pass(made: Cluster, worker: AsyncWorker, shard: Shard) -> None:
    """Check that each sample was computed and counted once in each pass."""
    assert pool(made).done
    assert shard.passes is not None
    model = await worker.pull("w")
    np.testing.assert_array_equal(model, np.full(shard.n, -shard.passes, np.float32))
    assert sum(one.counted for one in pool(made).shares.values()) == shard.n * shard.passes


class Mine(Exception):
    """What the tests' own code fails with."""


async def fail_in(batch: AsyncLocalBatch) -> None:
    """Compute a local batch, and fail inside its block."""
    async with batch:
        compute(batch)
        raise Mine
