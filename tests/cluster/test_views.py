"""Values that are looked at where a server has put them, and stay as they were."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from crew import crew
from harness import cluster, until

from zkv.aio import AsyncWorker
from zkv_workers import unpacking

LARGE = 700_000
"""Three blocks of 1 MiB."""
PARAMS = {
    "large": np.arange(LARGE, dtype=np.float32),
    "wide": np.arange(LARGE // 2, dtype=np.float64).reshape(2, -1),
    "half": np.arange(40_000, dtype=np.float16),
    "b": np.arange(7, dtype=np.float32),
    "c": np.arange(7, dtype=np.float32),
}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The keys that were copied for `views`."""
    found: list[int] = []
    whole = unpacking.unpack_kids

    def unpack(layout: Any, kids: Any, *rest: Any, **named: Any) -> Any:
        found.extend(kids)
        return whole(layout, kids, *rest, **named)

    monkeypatch.setattr(unpacking, "unpack_kids", unpack)
    return found


async def step(worker: AsyncWorker, *, look: bool = True) -> dict[Any, Any]:
    """One batch; return what was seen of its values."""
    async with worker.batch() as batch:
        seen = batch.views if look else batch.params
        for key, array in PARAMS.items():
            batch.push(key, np.ones_like(array))
    await batch.wait()
    return seen


@pytest.mark.parametrize("options", [{}, {"optimizer": "momentum:lr=1,momentum=0"}])
@pytest.mark.parametrize("prefetch", [0, 1])
async def test_views_stay_as_they_were_while_training_goes_on(
    copies: list[int], options: dict[str, str], prefetch: int
) -> None:
    given = {"optimizer": "sgd:lr=1"} | options
    async with (
        cluster(1, **given) as made,
        crew(made, 2, PARAMS, prefetch=prefetch) as workers,
    ):
        members = made.broker.router.members.workers
        await until(lambda: all(one.transport == "memory" for one in members.values()))
        kept: list[tuple[dict[Any, Any], dict[Any, bytes]]] = []
        for _ in range(5):
            for seen in await asyncio.gather(*(step(worker) for worker in workers)):
                assert seen.keys() == PARAMS.keys()
                kept.append((seen, {key: one.tobytes() for key, one in seen.items()}))
        for seen, was in kept:
            assert all(one.tobytes() == was[key] for key, one in seen.items())
            assert not any(one.flags.writeable for one in seen.values())
            assert all(seen[key].shape == one.shape for key, one in PARAMS.items())
            assert all(seen[key].dtype == one.dtype for key, one in PARAMS.items())
        lost = [float(PARAMS["large"][-1] - seen["large"][-1]) for seen, _ in kept]
        assert lost == sorted(lost)
        assert len(set(lost)) == 5 - prefetch
        # The first values came through sockets or memory; from then on each key is in one piece.
        assert len(copies) <= 2 * len(PARAMS)


async def test_what_lies_on_several_servers_is_copied(copies: list[int]) -> None:
    async with cluster(2, optimizer="sgd:lr=1") as made, crew(made, 1, PARAMS) as (worker,):
        for number in range(3):
            copies.clear()
            seen = await step(worker)
            for key, one in seen.items():
                np.testing.assert_array_equal(one, PARAMS[key] - PARAMS[key].dtype.type(number))
                assert not one.flags.writeable
        assert copies


async def test_sockets_give_views_too_where_a_key_is_one_block() -> None:
    async with (
        cluster(1, optimizer="sgd:lr=1") as made,
        crew(made, 1, PARAMS, shared_bytes=0) as (worker,),
    ):
        await step(worker)
        seen = await step(worker)
        fresh = await step(worker, look=False)
        for key, one in PARAMS.items():
            np.testing.assert_array_equal(seen[key], one - one.dtype.type(1))
            fresh[key][...] = 0
            assert not seen[key].flags.writeable
