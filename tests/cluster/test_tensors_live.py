"""Arrays over real sockets: every shape, layout and dtype comes back as it was sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from crew import crew, end, ones, zeros
from harness import cluster

from zkv.aio import AsyncWorker
from zkv.dtypes import DTYPES

DTYPE_NAMES = [name for name in DTYPES if name != "bfloat16"]


async def test_a_scalar_stays_a_scalar() -> None:
    """D04: shape () comes back with the sum of both workers."""

    async def body(worker: AsyncWorker) -> Any:
        await worker.init({"loss_scale": np.array(0, np.float32), "w": ones()})
        await worker.push("loss_scale", np.array(3.14, dtype=np.float32))
        return await worker.pull("loss_scale")

    async with cluster(2) as made:
        for value in await made.run(body, body):
            assert (value.shape, value.dtype) == ((), np.float32)
            assert value == np.float32(3.14) + np.float32(3.14)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 5)])
async def test_arrays_without_elements_keep_shape_and_dtype(shape: tuple[int, ...]) -> None:
    """D05: alone and next to others, by itself and in batches."""
    empty = np.zeros(shape, np.float64)
    async with (
        cluster(2, optimizer="adam:lr=0.1") as made,
        crew(made, 1, {"empty": empty}) as workers,
    ):
        (worker,) = workers
        batch = await worker.batch().__aenter__()
        assert (batch["empty"].shape, batch["empty"].dtype) == (shape, np.float64)
        await end(batch, empty, "empty")
        assert await batch.wait() == "committed"
        assert (await worker.pull("empty")).shape == shape
        await worker.init({"other": empty, "w": ones()}, plain=True, rule="assign")
        assert (await worker.pushpull("other", empty)).shape == shape
        assert (await worker.pushpull("w", 2 * ones())).tolist() == [2.0] * 3
        assert (await worker.pull("other")).dtype == np.float64


async def test_strided_input_gives_the_same_numbers() -> None:
    """D06: transposed, reversed, sliced, Fortran-ordered, broadcast, of the other byte order."""
    a = np.arange(24, dtype=np.float32).reshape(4, 6)
    before = a.copy()
    views = {
        "transposed": a.T,
        "column": a[:, 0],
        "every second": a[::2],
        "reversed": a[::-1],
        "fortran": np.asfortranarray(a),
        "broadcast": np.broadcast_to(a[0], (4, 6)),
        "swapped": a.astype(a.dtype.newbyteorder(">")),
    }
    params = {name: np.zeros(view.shape, np.float32) for name, view in views.items()}
    async with cluster(2) as made, crew(made, 1, params) as workers:
        for name, view in views.items():
            await workers[0].push(name, view)
        pulled = await workers[0].pull(list(views))
        for name, view in views.items():
            np.testing.assert_array_equal(pulled[name], np.ascontiguousarray(view), err_msg=name)
    async with cluster(2, optimizer="sgd:lr=1") as made, crew(made, 1, views) as workers:
        async with workers[0].batch() as batch:
            for name, view in views.items():
                np.testing.assert_array_equal(batch[name], view, err_msg=name)
                batch.push(name, view)
        await batch.wait()
        for value in (await workers[0].pull()).values():
            np.testing.assert_array_equal(value, np.zeros_like(value))
    np.testing.assert_array_equal(a, before)


@pytest.mark.parametrize("size", [3, 300_000])
async def test_a_pulled_array_is_the_callers_own(size: int) -> None:
    """D07: it can be changed, and nobody else sees that."""
    params = {"w": ones(size)}
    async with cluster(2) as made, crew(made, 2, params) as workers:
        x = await workers[0].pull("w")
        x += 1
        y = await workers[0].pull("w")
        z = await workers[1].pull()
        for value in (y, z["w"], params["w"]):
            np.testing.assert_array_equal(value, ones(size))
        z["w"][:] = 5
        np.testing.assert_array_equal(await workers[0].pull("w"), ones(size))


async def test_params_of_a_batch_are_the_workers_own() -> None:
    async with (
        cluster(1, policy_text="asp", optimizer="sgd:lr=1") as made,
        crew(made, 1, {"w": ones(200_000)}) as workers,
    ):
        for turn in range(3):
            async with workers[0].batch() as batch:
                assert set(batch.params["w"]) == {1.0 - turn}
                batch.params["w"] -= 100
                assert batch["w"][0] == -99.0 - turn
                batch.push("w", ones(200_000))


@pytest.mark.parametrize("size", [250, 16_383, 16_384, 1 << 20])
async def test_the_callers_buffer_is_free_at_once(size: int) -> None:
    """D08: 1 KB, 64 KB less one element, 64 KB and 4 MB, overwritten right after the push."""
    async with cluster(2) as made, crew(made, 1, {"w": zeros(size)}) as workers:
        for _ in range(6):
            gradient = ones(size)
            pushed = workers[0].push("w", gradient)
            gradient[:] = 0
            assert await pushed == "committed"
            np.testing.assert_array_equal(await workers[0].pull("w"), ones(size))


async def test_the_callers_buffer_is_free_inside_a_batch_too() -> None:
    params = {"large": zeros(1 << 19), "small": zeros(5)}
    async with cluster(2, optimizer="sgd:lr=1") as made, crew(made, 1, params) as workers:
        for turn in range(5):
            async with workers[0].batch() as batch:
                for key, value in params.items():
                    gradient = ones(len(value))
                    batch.push(key, gradient)
                    gradient[:] = 77
            await batch.wait()
            for value in (await workers[0].pull()).values():
                np.testing.assert_array_equal(value, -(turn + 1) * ones(len(value)))


async def test_initial_values_are_copied_too() -> None:
    first = ones(300_000)
    async with cluster(2) as made, made.worker(0, world=1) as worker:
        initialising = worker.init({"w": first})
        await initialising
        first[:] = 9
        np.testing.assert_array_equal(await worker.pull("w"), ones(300_000))


@pytest.mark.parametrize("name", DTYPE_NAMES)
async def test_every_dtype_comes_back_as_it_was_sent(name: str) -> None:
    info = np.finfo(name) if name.startswith("float") else np.iinfo(name)
    sent = np.array([0, 1, 7, info.min, info.max], dtype=name)
    async with cluster(1) as made, crew(made, 1, {"w": np.zeros_like(sent)}) as workers:
        assert await workers[0].push("w", sent) == "committed"
        pulled = await workers[0].pull("w")
        assert pulled.dtype == np.dtype(name)
        np.testing.assert_array_equal(pulled, sent)


@pytest.mark.parametrize("size", [1000, 0])
async def test_bfloat16_comes_back_as_bfloat16(size: int) -> None:
    """D11: two bytes for each element, never decoded as another dtype."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    sent = np.linspace(-3, 3, size).astype(ml_dtypes.bfloat16)
    async with cluster(1) as made, crew(made, 1, {"w": np.zeros_like(sent)}) as workers:
        up = workers[0].stats()["bytes_up"]
        await workers[0].push("w", sent)
        assert workers[0].stats()["bytes_up"] - up == 2 * size
        pulled = await workers[0].pull("w")
        assert pulled.dtype == ml_dtypes.bfloat16
        assert pulled.tobytes() == sent.tobytes()


async def test_two_workers_with_other_shapes_for_one_key() -> None:
    """D10: the wrong push fails at once, the other worker is not left waiting for ever."""
    async with cluster(2) as made, crew(made, 2, {"w": zeros(4)}) as workers:
        good = workers[0].push("w", ones(4))
        with pytest.raises(ValueError, match=r"'w'.*\(4,\).*\(5,\)"):
            workers[1].push("w", ones(5))
        assert not good.done()
        again = workers[1].push("w", ones(4))
        assert [await good, await again] == ["committed"] * 2
        assert (await workers[0].pull("w")).tolist() == [2.0] * 4


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_more_than_two_gigabytes() -> None:
    """D09: one key of 2^31 + 8 bytes, and 5,000 keys of half a megabyte; needs 14 GB of memory."""
    size = 2**31 + 8
    sent = np.arange(size // 8, dtype=np.int64)
    sent[-1] = -1
    async with (
        cluster(2) as made,
        crew(made, 1, {"w": np.zeros(size // 8, np.int64)}, wait_timeout_s=500) as workers,
    ):
        assert await workers[0].push("w", sent) == "committed"
        assert np.array_equal(await workers[0].pull("w"), sent)
    del sent
    many = {key: np.full(1 << 16, key, np.int64) for key in range(5000)}
    async with cluster(2) as made, crew(made, 1, many, wait_timeout_s=500) as workers:
        pulled = await workers[0].pull()
        assert list(pulled) == list(many)
        assert all((value == key).all() for key, value in pulled.items())
