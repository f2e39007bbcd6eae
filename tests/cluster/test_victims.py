"""Adapters of processes that are killed inside a backward pass, or that fork."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Cluster, cluster
from victim import PATIENCE_S, SIZE, TOGETHER, train
from worker_threads import worker_of

BATCHES = 5
TORCH, JIT, JAX = (
    pytest.param(kind, marks=getattr(pytest.mark, mark))
    for kind, mark in (("torch", "torch"), ("jit", "torch"), ("jax", "jax"))
)


async def victim(made: Cluster, kind: str, what: str) -> Process:
    script = str(Path(__file__).parents[1] / "victim.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, script, kind, what, made.address), stdout=PIPE, env=environment
    )


@pytest.mark.parametrize("kind", [TORCH, JIT, JAX])
def test_a_worker_that_is_killed_in_mid_backward_leaves_nothing_of_that_batch(kind: str) -> None:
    """Gradients of 1 here and of 3 there: twice the mean of both, and then the survivor's."""
    pytest.importorskip("jax" if kind == "jax" else "torch")

    def survivor(made: Cluster) -> Any:
        with worker_of(made, 0, 2, wait_timeout_s=PATIENCE_S) as worker:
            assert train(kind, worker, BATCHES, 1.0).wait() == "committed"
            return worker.evaluate()

    async def run() -> Any:
        async with cluster(1, optimizer="sgd:lr=1", worker_lost_s=1.0) as made:
            process = await victim(made, kind, "dies")
            model = await asyncio.to_thread(survivor, made)
            assert await process.wait() == -9
            return model

    model = asyncio.run(run())
    # A batch of the survivor's that had begun on the update with both is cancelled with that.
    assert model.version in (BATCHES - 1, BATCHES)
    expected = np.full(SIZE, -2.0 * TOGETHER - (model.version - TOGETHER), np.float32)
    assert len(model.params) == 2
    for value in model.params.values():
        np.testing.assert_array_equal(value, expected)


def told(kind: str) -> dict[str, str]:
    """What the child of a worker of this kind is told."""

    async def run() -> bytes:
        async with cluster(1, optimizer="sgd:lr=1") as made:
            process = await victim(made, kind, "forks")
            out, _ = await asyncio.wait_for(process.communicate(), 2 * PATIENCE_S)
            return out

    found: dict[str, str] = json.loads(asyncio.run(run()))
    return found


def test_a_fork_is_named_in_asyncio_too() -> None:
    found = told("aio")
    assert found.pop("the parent's fate") == "committed"
    assert len(found) == 6
    for call, text in found.items():
        assert text.startswith("Closed: this worker belongs to the"), call


@pytest.mark.parametrize("kind", [JIT, JAX])
def test_a_fork_is_named_whatever_a_child_does_with_its_parents_worker(kind: str) -> None:
    pytest.importorskip("jax" if kind == "jax" else "torch")
    found = told(kind)
    assert found.pop("the parent's fate") == "committed"
    assert found.pop("the parent's push") == "committed"
    assert found.pop("close") == "returned None"
    assert len(found) == 8
    for call, text in found.items():
        # What was settled before the fork is known in the child, too.
        known = "returned 'committed'" if call in ("fate", "a push") else None
        assert text == known or text.startswith("Closed: this worker belongs to the"), call
