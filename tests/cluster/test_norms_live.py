"""A limit for the norm of what one worker contributes: refuse, clip, quarantine."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest
from crew import crew, work
from harness import cluster, until

import zkv
from zkv.errors import ConfigError, Evicted, PushRefused, Refused
from zkv_brokers.replay import replay

pytestmark = pytest.mark.one_loop

PARAMS = {"a": np.zeros(300_000, np.float32), "b": np.zeros(5, np.float32)}
"""Several blocks, on both servers."""


def gradient(norm: float) -> dict[str, np.ndarray]:
    """Gradients of both keys with this norm in all."""
    size = sum(value.size for value in PARAMS.values())
    return {key: np.full_like(value, norm / math.sqrt(size)) for key, value in PARAMS.items()}


async def both(worker, norm: float):
    async with worker.batch() as batch:
        for key, value in gradient(norm).items():
            batch.push(key, value)
    return batch


def norm_of(values) -> float:
    return math.sqrt(sum(float(np.dot(v.astype(float), v.astype(float))) for v in values.values()))


async def test_a_gradient_above_the_limit_is_refused_with_its_norm_and_nobody_else_is() -> None:
    async with (
        cluster(2, optimizer="sgd:lr=1", norm_limit=10.0) as made,
        crew(made, 2, PARAMS) as (good, bad),
    ):
        fine, large = await asyncio.gather(both(good, 9.0), both(bad, 11.0))
        assert await fine.wait() == "committed"
        assert await large.wait() == "discarded"
        with pytest.raises(PushRefused, match=r"norm is 11.* above the limit of 10"):
            await bad.pull("b")
        # Only the good one's is in the update, with all of the weight.
        assert norm_of(await good.pull(["a", "b"])) == pytest.approx(9.0, rel=1e-4)
        fine, small = await asyncio.gather(both(good, 9.0), both(bad, 1.0))
        assert [await fine.wait(), await small.wait()] == ["committed"] * 2


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_a_gradient_above_the_limit_is_clipped_to_it(tmp_path: Path, codec: str) -> None:
    records = [tmp_path / f"server-{at}" for at in range(2)]
    async with (
        cluster(
            2,
            optimizer="sgd:lr=1",
            norm_limit=10.0,
            norm_action="clip",
            codec=codec,
            record=tmp_path / "broker",
            server_records=records,
        ) as made,
        crew(made, 2, PARAMS) as (first, second),
    ):
        one, two = await asyncio.gather(both(first, 10.0 - 1e-3), both(second, 1000.0))
        assert [await one.wait(), await two.wait()] == ["committed"] * 2
        # The mean of two of the same direction and the same norm.
        assert norm_of(await first.pull(["a", "b"])) == pytest.approx(10.0, rel=1e-2)
    # A replay comes to the same bits.
    for record in (tmp_path / "broker", *records):
        found = replay(record)
        assert found.recorded is not None
        assert found.digest == found.recorded


async def until_put_out(worker) -> None:
    """Go on with gradients that are too large."""
    for _ in range(2000):
        try:
            await (await both(worker, 1e9)).wait()
        except PushRefused:
            continue


async def test_three_above_the_limit_put_a_worker_out_until_the_broker_is_another() -> None:
    async with (
        cluster(
            1, optimizer="sgd:lr=1", policy_text="asp", norm_limit=10.0, norm_action="quarantine"
        ) as made,
        made.worker(0, name="good") as good,
        made.worker(1, name="bad") as bad,
    ):
        await asyncio.gather(good.init(PARAMS), bad.init(PARAMS))
        for _ in range(2):
            batch = await both(bad, 1e9)
            assert await batch.wait() == "discarded"
            with pytest.raises(PushRefused, match="above the limit"):
                await bad.pull("b")
        with pytest.raises(Evicted, match=r"quarantine: the norms of \d+ of its gradients"):
            await until_put_out(bad)
        with pytest.raises(Refused, match="in quarantine until a new run begins"):
            await made.worker(1, name="bad").connect()
        batch = await both(good, 3.0)
        assert await batch.wait() == "committed"
        await until(lambda: len(made.broker.router.members.workers) == 1)


async def test_a_norm_that_is_no_number_is_never_clipped() -> None:
    async with (
        cluster(1, optimizer="sgd:lr=1", norm_limit=10.0, norm_action="clip") as made,
        crew(made, 1, {"w": np.zeros(3, np.float64)}) as (worker,),
    ):
        batch = await work(worker, np.full(3, 1e300))
        assert await batch.wait() == "discarded"
        with pytest.raises(PushRefused, match="norm is inf"):
            await worker.pull("w")


async def test_rows_of_tables_are_in_the_norm() -> None:
    async with (
        cluster(2, optimizer="sgd:lr=1", norm_limit=10.0) as made,
        made.worker(0) as worker,
    ):
        await worker.init({"w": np.zeros(1, np.float32)}, tables={"emb": zkv.Table(dim=4)})
        for scale, outcome in ((4.0, "committed"), (6.0, "discarded")):
            async with worker.batch() as batch:
                batch.push("w", np.zeros(1, np.float32))
                batch.push_rows("emb", np.array([7]), np.full((1, 4), scale, np.float32))
            assert await batch.wait() == outcome


async def test_sums_of_several_workers_have_no_norm_of_one() -> None:
    with pytest.raises(ConfigError, match="--norm-limit goes with --topology servers"):
        async with cluster(1, norm_limit=1.0, topology="ring"):
            pass
