"""CUDA's sparsifiers, on the CPU and on a device: the bits of NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_on_cpu import family
from hypothesis import given
from hypothesis import strategies as st
from strategies_codecs import float_arrays, orders

from zkv.dtypes import Array
from zkv_codecs.kernels import cuda_sparse, numpy_sparse
from zkv_codecs.kernels.cuda_module import source

sparse = family("sparse")
weights = st.sampled_from([1.0, 0.0, 32.0, 1 / 3, -2.5])
seeds = st.integers(0, 2**63 - 1)


def level(chance: np.random.Generator, n: int) -> Array:
    """Five magnitudes: ties everywhere."""
    return chance.integers(-4, 5, n) / 4


def near(chance: np.random.Generator, n: int) -> Array:
    """Magnitudes that differ in their last digits."""
    return (
        (np.float32(1).view(np.uint32) + chance.integers(0, 3000, n))
        .astype(np.uint32)
        .view(np.float32)
    )


def mostly_zero(chance: np.random.Generator, n: int) -> Array:
    return np.where(chance.random(n) < 0.002, chance.normal(size=n), 0)


@st.composite
def large_arrays(draw: st.DrawFn) -> tuple[Array, Array]:
    """Two arrays of one size, with many chunks of a warp, or sampled ones."""
    n = draw(st.sampled_from([1, 31, 1024, 1025, 8192, 8193, 20000]) | st.integers(1, 10000))
    chance = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = st.sampled_from([level, near, mostly_zero, np.random.Generator.standard_normal])
    arrays = tuple(draw(kinds)(chance, n).astype(np.float32) for _ in range(2))
    for array in arrays:
        array.setflags(write=False)
    return arrays


arrays = float_arrays(2) | large_arrays()


def room(k: int) -> tuple[Array, Array]:
    """Room for values and positions, full of what must not be left."""
    return np.full(k, np.nan, np.float32), np.full(k, 2**32 - 1, np.uint32)


def draw_rank(data: st.DataObject, n: int) -> int:
    return data.draw(st.integers(0, n) | st.sampled_from([min(1, n), n // 100, n]))


@given(orders, arrays, st.data())
def test_topk(sparse, order, drawn, data):
    x, e = drawn
    k = draw_rank(data, x.size)
    sparse.same("topk_encode", x, *room(k), order=order)
    sparse.same("topk_encode_residual", x, e, *room(k), np.empty_like(x), order=order)


@given(orders, arrays, st.data())
def test_sampled_topk(sparse, order, drawn, data):
    x, e = drawn
    n = x.size
    k = data.draw(st.integers(min(1, n), n) | st.just(-(-n // 100)))
    start = data.draw(st.integers(0, numpy_sparse.stride_of(n) - 1))
    # Behind what is sent, the room is as it was: both backends leave it alone.
    sparse.same("sampled_encode", x, start, *room(k), order=order)
    sparse.same("sampled_encode_residual", x, e, start, *room(k), np.empty_like(x), order=order)


@given(orders, arrays, st.sampled_from([1e-45, 1e-30, 0.5, 0.75, 1.0, 3e38]))
def test_threshold(sparse, order, drawn, least):
    x, e = drawn
    sparse.same("reaching", x, least, order=order)
    sparse.same("reaching_sum", x, e, least, np.empty_like(x), order=order)
    k = numpy_sparse.reaching(x, least)
    sparse.same("reaching_encode", x, least, *room(k), order=order)


@given(orders, st.integers(0, 300) | st.integers(0, 2**31 - 1), seeds, st.data())
def test_positions_that_are_drawn(sparse, order, n, seed, data):
    k = data.draw(st.integers(0, min(n, 300)))
    keys = numpy_sparse.round_keys(seed)
    sparse.same("draw", n, keys, np.empty(k, np.uint32), order=order)


@st.composite
def chosen(draw: st.DrawFn) -> tuple[Array, Array, Array, Array]:
    """Two dense arrays, positions in them, and as many values."""
    x, e, values = draw(float_arrays(3))
    chance = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    k = draw(st.integers(0, x.size))
    indices = np.sort(chance.permutation(x.size)[:k]).astype(np.uint32)
    return x, e, indices, values[:k]


@given(orders, chosen(), weights)
def test_gather_scatter_and_add(sparse, order, drawn, weight):
    x, e, indices, values = drawn
    for array in indices, values:
        array.setflags(write=False)
    out = np.empty_like(values)
    sparse.same("gather", x, indices, abs(weight), out, order=order)
    sparse.same("gather_residual", x, e, indices, out, np.empty_like(x), order=order)
    sparse.same("scatter", values, indices, np.full_like(x, np.nan), order=order)
    sparse.same("clear", indices, x.copy(), order=order)
    sparse.same("add", values, indices, weight, e.copy(), order=order)
    sparse.same("add_wide", values, indices, weight, e.astype(np.float64), order=order)


@pytest.mark.parametrize("order", range(8))
def test_topk_of_more_chunks_than_a_warp_adds_up(sparse, order):
    chance = np.random.default_rng(order)
    x = level(chance, 150_000).astype(np.float32)
    sparse.same("topk_encode", x, *room(40_000 + order), order=order)


def test_the_text_and_the_launches_agree_on_sizes():
    text = source("sparse")
    for name, value in {
        "BINS": cuda_sparse.BINS,
        "CHUNK": cuda_sparse.CHUNK,
        "ROUNDS": numpy_sparse.ROUNDS,
    }.items():
        assert f"#define {name} {value}\n" in text


@pytest.mark.parametrize("blocks", [1, 3])
def test_few_blocks_count_all(sparse, blocks, monkeypatch):
    """As of a million elements on, where a block counts more than once."""
    monkeypatch.setattr(cuda_sparse, "COUNT_BLOCKS_MAX", blocks)
    x = np.random.default_rng(1).normal(size=9000).astype(np.float32)
    sparse.same("topk_encode", x, *room(90))
