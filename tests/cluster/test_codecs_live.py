"""Codecs over real sockets: chosen by the broker, decoded into the sum, taken back with a batch."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from codec_texts import PLAIN, REMEMBERING
from crew import all_begun, crew, end, model, version, work
from harness import cluster, until

from zkv.aio import AsyncWorker
from zkv.dtypes import Array
from zkv.errors import PushRefused, Refused
from zkv.sums import weighted_mean
from zkv_codecs.backend import NUMPY
from zkv_codecs.packed import dense
from zkv_codecs.spec import codec
from zkv_workers.encoding import seed_of

SGD = "sgd:lr=1"
SIZE = 700
SPARSE = ("topk", "randomk", "threshold")
COARSE = {
    "qsgd:127": (2.8, 3.6),
    "qsgd:8:64": (0.0, 6.6),
    "natural": (2.0, 4.0),
    "majority": (1.0, 1.0),
    "powersgd:2+int4+ef": (2.7, 3.8),
    "mx1bit": (1.0, 1.0),
    "mx2bit:0.5": (0.5, 0.5),
}
"""What may become of 3.25 at once, where that is not nearly itself."""


def noise(seed: int, size: int = SIZE) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


async def mean_of(text: str, *pushed: Array, start: Array | None = None) -> Array:
    """Return the mean that a cluster makes of these gradients, one worker for each."""
    zero = np.zeros_like(pushed[0]) if start is None else start
    async with (
        cluster(2, optimizer=SGD, codec=text) as made,
        crew(made, len(pushed), {"w": zero}) as workers,
    ):
        batches = await asyncio.gather(
            *(work(worker, gradient) for worker, gradient in zip(workers, pushed, strict=True))
        )
        assert [await batch.wait() for batch in batches] == ["committed"] * len(pushed)
        got: Array = zero - await workers[0].pull("w")
    return got


async def test_each_payload_is_decoded_with_its_own_scale() -> None:
    """D14: the mean is taken of values, not of codes."""
    got = await mean_of(
        "int8;small=0", np.array([1, -1], np.float32), np.array([100, 50], np.float32)
    )
    np.testing.assert_allclose(got, [50.5, 24.5], atol=(1 / 127 + 100 / 127) / 2)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("fp16;small=0", np.float32), ("fp16;small=0", np.float16), ("none", np.float16)],
)
async def test_the_mean_of_eight_halves_is_exact_where_their_sum_is_no_half(
    text: str, dtype: type
) -> None:
    """D13: 8 · 20,000 is above 65,504, the largest float16; sums are float32."""
    got = await mean_of(text, *(np.full(4, 20000, dtype) for _ in range(8)))
    assert got.dtype == dtype
    assert got.tolist() == [20000] * 4


@pytest.mark.parametrize("text", PLAIN + REMEMBERING)
async def test_every_shape_comes_back_as_it_was_sent(text: str) -> None:
    """D04, D05: scalars and empty arrays, beside others that are not disturbed."""
    shapes = {"scalar": (), "empty": (0,), "rows": (3, 0), "columns": (0, 3), "w": (40, 30)}
    params = {key: np.zeros(shape, np.float32) for key, shape in shapes.items()}
    async with (
        cluster(2, optimizer=SGD, codec=f"{text};small=0") as made,
        crew(made, 2, params) as workers,
    ):
        batches = await all_begun(workers)
        for batch in batches:
            for key, value in params.items():
                batch.push(key, np.full_like(value, 3.25))
            await end(batch)
        assert [await batch.wait() for batch in batches] == ["committed"] * 2
        got = await workers[1].pull()
    for key, value in params.items():
        assert (got[key].shape, got[key].dtype) == (value.shape, np.float32)
        low, high = (
            (0.0, 40.0) if any(name in text for name in SPARSE) else COARSE.get(text, (3.1, 3.4))
        )
        assert ((low <= -got[key]) & (-got[key] <= high)).all()


@pytest.mark.parametrize("route", ["direct", "broker"])
@pytest.mark.parametrize("text", REMEMBERING)
async def test_a_run_is_that_of_one_process_that_encodes_the_same(text: str, route: str) -> None:
    """Bit for bit, over three workers, residuals included."""
    params = {"w": noise(0, 1200).reshape(40, 30)}
    weights = (1.0, 2.0, 5.0)

    async def body(worker: AsyncWorker) -> Array:
        await worker.init(params)
        for turn in range(4):
            async with worker.batch(weight=weights[worker.rank]) as batch:
                batch.push("w", noise(10 * turn + worker.rank, 1200).reshape(40, 30))
        await batch.wait()
        pulled: Array = await worker.pull("w")
        return pulled

    async with cluster(2, route=route, optimizer=SGD, codec=f"{text};small=0") as made:
        results = await made.run(body, body, body)
    one = codec(text)
    value = params["w"].reshape(-1).copy()
    states = [one.start((40, 30)) for _ in weights]
    for turn in range(4):
        decoded = []
        for rank in range(3):
            gradient = noise(10 * turn + rank, 1200).reshape(40, 30)
            seed = seed_of(rank, turn + 1, 1)
            encoded, states[rank] = one.encode(dense(gradient), states[rank], seed, NUMPY)
            decoded.append(encoded.chain.decode(encoded.packed, NUMPY).values)
        value = value + weighted_mean(decoded, weights) * np.float32(-1)
    for got in results:
        np.testing.assert_array_equal(got.reshape(-1), value)


async def test_the_codec_is_changed_while_it_runs_and_nothing_is_lost() -> None:
    """What the old codec had kept back comes with the next batch."""
    async with (
        cluster(1, optimizer=SGD, codec="int8+ef;small=0") as made,
        crew(made, 1, {"w": np.zeros(SIZE, np.float32)}) as (worker,),
    ):
        given = np.zeros(SIZE)
        for turn, text in enumerate(["", "powersgd:2+ef;small=0", "", "none", ""]):
            if text:
                assert await worker.set(codec=text) == {"codec": version(made)}
                assert (await worker.status())["codec"] == text
                await (await work(worker, np.zeros(SIZE, np.float32))).wait()
            await (await work(worker, noise(turn))).wait()
            given += noise(turn)
        await (await work(worker, np.zeros(SIZE, np.float32))).wait()
        np.testing.assert_allclose(-await worker.pull("w"), given, atol=2e-5)
        with pytest.raises(Refused, match="no codec is called 'int9'"):
            await worker.set(codec="int9")
        assert (await worker.status())["codec"] == "none"


async def test_a_cancelled_batch_gives_back_what_it_took_from_the_residual() -> None:
    """k-BSP: the straggler's batch is cancelled after it was encoded, again and again."""
    async with (
        cluster(1, policy_text="k-bsp:1", optimizer=SGD, codec="int8+ef;small=0") as made,
        crew(made, 2, {"w": np.zeros(SIZE, np.float32)}) as workers,
    ):
        given = np.zeros(SIZE)
        for turn in range(6):
            batches = await all_begun(workers)
            fast, slow = batches if turn % 2 == 0 else batches[::-1]
            slow.push("w", noise(100 + turn))
            await end(fast, noise(turn))
            assert await fast.wait() == "committed"
            given += noise(turn)
            await until(lambda one=slow: one.cancelled, what="the cancellation")
            await end(slow)
            assert await slow.wait() == "cancelled"
        # Both residuals come now, with gradients of zero through a codec that cuts nothing.
        await workers[0].set(codec="none")
        before = await workers[0].pull("w")
        # Two batches may have been granted before that.
        for worker in [*workers] * 3:
            await (await work(worker, np.zeros(SIZE, np.float32))).wait()
        got = -(await workers[0].pull("w"))
        assert np.abs(got + before).max() > 0
        np.testing.assert_allclose(got, given, atol=5e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
async def test_a_push_that_is_not_finite_is_refused_and_the_run_goes_on(bad: float) -> None:
    """D17: by name, at the push; later values are clean."""
    async with (
        cluster(1, optimizer=SGD, codec="int8+ef;small=0") as made,
        crew(made, 1, {"w": np.zeros(SIZE, np.float32)}) as (worker,),
    ):
        poisoned = noise(0)
        poisoned[33] = bad
        with pytest.raises(PushRefused, match="key 'w': element 33"):
            await work(worker, poisoned)
        for turn in range(3):
            assert await (await work(worker, noise(turn))).wait() == "committed"
        assert np.isfinite(await worker.pull("w")).all()
        for how in ("skip", "zero"):
            await worker.set(codec=f"int8+ef;small=0;nonfinite={how}")
            # The next two batches were granted before that.
            for _ in range(2):
                await (await work(worker, noise(7))).wait()
            before = await worker.pull("w")
            await (await work(worker, poisoned)).wait()
            moved = before - await worker.pull("w")
            assert np.isfinite(moved).all()
            assert (np.abs(moved).max() > 1) == (how == "zero")


async def test_zeros_stay_zeros() -> None:
    """D12: with and without a residual, of one element and of many."""
    for text in ("int8;small=0", "int8+ef;small=0", "powersgd:1+ef;small=0"):
        for size in (1, 1000):
            zeros = np.zeros(size, np.float32)
            np.testing.assert_array_equal(await mean_of(text, zeros, zeros), zeros)


async def test_halves_and_doubles_come_through_a_codec() -> None:
    """D15: the key's dtype stays; sums are made in float32 or wider."""
    for dtype in (np.float16, np.float64):
        got = await mean_of("int8;small=0", np.full(300, 2, dtype), np.full(300, 4, dtype))
        assert got.dtype == dtype
        np.testing.assert_allclose(got, 3, rtol=1e-3)


async def test_stats_and_status_say_what_a_codec_saves() -> None:
    params: dict[Any, Array] = {"w": np.zeros(5000, np.float32), "b": np.zeros(4, np.float32)}
    text = "int8+ef;small=5000"
    async with (
        cluster(2, optimizer=SGD, codec=text) as made,
        crew(made, 1, params) as (worker,),
    ):
        async with worker.batch() as batch:
            batch.push("w", noise(1, 5000))
            batch.push("b", np.ones(4, np.float32))
        await batch.wait()
        rows = worker.stats()["codecs"]
        assert rows.keys() == {"w"}
        assert rows["w"]["bytes_before"] == 20_000
        assert rows["w"]["bytes_after"] == 5000 + 4 * 20
        assert worker.stats()["bytes_up"] == 20_000 + 16 + 5080 + 16
        assert (await worker.status())["codec"] == text
        assert model(made).rules.coding.up.text == text
        timed = [one.shard.layout.spread(one.shard.store.decode_s) for one in made.servers]
        assert [kid for times in timed for kid in times] == [worker._driver.session.layout.kid("w")]
        assert all(seconds > 0 for times in timed for seconds in times.values())

        router = made.broker.router
        assert router is not None
        await until(
            lambda: any(row["decode_s"] > 0 for row in router.coding.books(router.layout)),
            what="that a server has told what decoding took",
        )
        (row,) = (await worker.status())["codecs"]
    assert (row["key"], row["codec"], row["bytes_after"]) == ("w", "int8+ef", 5080)
    assert row["decode_s"] > 0
