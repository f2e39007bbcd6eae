"""A batch's values are gone as soon as nobody has the batch, and not some day."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from crew import crew
from harness import cluster
from worker_threads import on_threads

ZEROS = {"w": np.zeros(100, np.float32)}


@pytest.fixture
def no_cycles() -> Any:
    """Let nothing look for cycles meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_cycles")
async def test_a_settled_batch_is_no_cycle() -> None:
    def body(worker: Any) -> None:
        worker.init(ZEROS)
        for leaves in (False, True):
            with worker.batch() as batch:
                assert batch.params["w"].size == 100
                batch.push("w", np.ones(100, np.float32))
            if leaves:
                batch.wait()
            gone = weakref.ref(batch)
            fate = batch._fate
            del batch
            fate.result(10)
            worker.status()  # Whoever settles a batch holds it for as long as that takes.
            assert gone() is None

    async with cluster(1) as made:
        await on_threads(made, body)


@pytest.mark.usefixtures("no_cycles")
async def test_a_settled_batch_of_a_coroutine_is_no_cycle() -> None:
    async with cluster(1) as made, crew(made, 1, ZEROS) as (worker,):
        async with worker.batch() as batch:
            batch.push("w", np.ones(100, np.float32))
        assert await batch.wait() == "committed"
        gone = weakref.ref(batch)
        del batch
        await worker.status()
        assert gone() is None
