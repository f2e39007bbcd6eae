"""Sparsifiers: what is chosen, what is left, and that all kernels give the same bits."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv_codecs.backend import NUMPY, Backend, fastest
from zkv_codecs.kernels import numpy_sparse
from zkv_codecs.packed import Packed, Stage, dense
from zkv_codecs.sparse import RandomK, Threshold, TopK, TopKSampled, kept

needs_numba = pytest.mark.skipif(not importlib.util.find_spec("numba"), reason="needs numba")
NUMBA = Backend("numba")
backends = pytest.mark.parametrize(
    "backend", [NUMPY, pytest.param(NUMBA, marks=needs_numba)], ids=lambda backend: backend.name
)
STAGES = [TopK(0.02), TopK(0.5), TopKSampled(0.02), RandomK(0.02), Threshold(0.75)]
stages = pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.text)

of_all = st.sampled_from(STAGES)
CHOOSING = [TopK(0.1), TopKSampled(0.1), Threshold(1.0)]
"""Those that send the largest elements."""

seeds = st.integers(0, 2**63 - 1)
ratios = st.sampled_from([1e-4, 0.001, 0.01, 0.1, 0.25, 0.9, 1.0]) | st.floats(1e-6, 1)
weights = st.sampled_from([1.0, 0.0, 32.0, 1 / 3, -2.5])


def small(elements: st.SearchStrategy[float]) -> st.SearchStrategy[Array]:
    return st.lists(elements, max_size=40).map(lambda values: np.array(values, np.float32))


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38])


def normal(chance: np.random.Generator, n: int) -> Array:
    return chance.normal(size=n)


def peaked(chance: np.random.Generator, n: int) -> Array:
    """Most of the energy in few elements, as in real gradients."""
    return chance.normal(size=n) ** 7


def level(chance: np.random.Generator, n: int) -> Array:
    """Five magnitudes: ties everywhere."""
    return chance.integers(-4, 5, n) / 4


def mostly_zero(chance: np.random.Generator, n: int) -> Array:
    return np.where(chance.random(n) < 0.002, chance.normal(size=n), 0)


def constant(chance: np.random.Generator, n: int) -> Array:
    return np.full(n, chance.normal())


def rising(chance: np.random.Generator, n: int) -> Array:
    return np.arange(n) - n * chance.random()


def flattering(chance: np.random.Generator, n: int) -> Array:
    """A sample sees nothing but large elements, so that fewer than k reach its threshold."""
    values = chance.normal(size=n)
    values[:: numpy_sparse.stride_of(n)] *= 1000
    return values


def belittling(chance: np.random.Generator, n: int) -> Array:
    """A sample sees nothing but small elements, so that nearly all reach its threshold."""
    values = chance.normal(size=n)
    values[:: numpy_sparse.stride_of(n)] /= 1000
    return values


def huge(chance: np.random.Generator, n: int) -> Array:
    return chance.uniform(-3.4e38, 3.4e38, n)


def tiny(chance: np.random.Generator, n: int) -> Array:
    """Subnormal numbers."""
    return chance.integers(-1000, 1000, n) * 1e-45


SHAPES = [
    normal,
    peaked,
    level,
    mostly_zero,
    constant,
    rising,
    flattering,
    belittling,
    huge,
    tiny,
]


@st.composite
def large(draw: st.DrawFn) -> Array:
    """Arrays on both sides of the size from which on a sample is taken, of all sorts."""
    n = draw(st.sampled_from([1, 7, 8, 4095, 4096, 8192, 8193, 12293]) | st.integers(1, 20000))
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    return draw(st.sampled_from(SHAPES))(chance, n).astype(np.float32)


arrays = small(finite) | small(few) | large()


def bits(array: Array | None) -> Any:
    return None if array is None else (array.dtype, array.shape, array.tobytes())


def same(one: Packed, other: Packed) -> bool:
    return (one.shape, one.seed, bits(one.values), bits(one.indices), bits(one.scales)) == (
        other.shape,
        other.seed,
        bits(other.values),
        bits(other.indices),
        bits(other.scales),
    )


def total(x: Array, e: Array) -> Array:
    with np.errstate(over="ignore"):
        return x + e


def residual_for(x: Array, seed: int) -> Array:
    return np.random.default_rng(seed).permutation(x)[: x.size] * np.float32(0.5)


def in_order(x: Array) -> Array:
    """Positions from the largest magnitude down, ties from the lowest position up."""
    return np.lexsort((np.arange(x.size), -np.abs(x.astype(np.float64))))


def encoded(stage: Stage, x: Array, backend: Backend, seed: int = 0) -> Packed:
    return stage.encode(dense(x), (), seed, backend)[0]


# --- the same bits everywhere -----------------------------------------------------------------


@needs_numba
@stages
@given(x=arrays, seed=seeds, weight=weights)
def test_numba_gives_the_bits_of_numpy(stage: Stage, x: Array, seed: int, weight: float) -> None:
    sent = encoded(stage, x, NUMPY, seed)
    assert same(encoded(stage, x, NUMBA, seed), sent)
    e = residual_for(x, seed % 2**32)
    sent, left, _ = stage.encode_residual(dense(x), e, (), seed, NUMPY)
    again, left_again, _ = stage.encode_residual(dense(x), e, (), seed, NUMBA)
    assert same(again, sent)
    assert bits(left_again) == bits(left)
    assert same(stage.decode(sent, NUMBA), stage.decode(sent, NUMPY))
    for dtype in (np.float32, np.float64):
        sums = [x.astype(dtype), x.astype(dtype)]
        for to, backend in zip(sums, (NUMPY, NUMBA), strict=True):
            stage.add(sent, weight, to, backend)
        assert bits(sums[0]) == bits(sums[1])


@needs_numba
@stages
@pytest.mark.parametrize("n", [5, 9000])
def test_numbers_that_are_none_break_no_kernel(stage: Stage, n: int) -> None:
    """D17: a gradient with NaN is refused before; a kernel that sees one must stay in bounds."""
    x = np.zeros(n, np.float32)
    x[:: n // 5] = [np.nan, np.inf, -np.inf, -np.nan, 1][: x[:: n // 5].size]
    for given_ in (x, np.full(n, np.nan, np.float32), np.full(n, -np.inf, np.float32)):
        e = np.zeros_like(x)
        sent, left, _ = stage.encode_residual(dense(given_), e, (), 3, NUMPY)
        again, left_again, _ = stage.encode_residual(dense(given_), e, (), 3, NUMBA)
        assert same(again, sent)
        assert bits(left_again) == bits(left)


@needs_numba
@stages
def test_a_read_only_array_compiles_nothing_and_is_not_written_to(stage: Stage) -> None:
    kernels = NUMBA.family("sparse")
    x = np.linspace(-1, 1, 9001, dtype=np.float32)
    x.setflags(write=False)
    sent, left, _ = stage.encode_residual(dense(x), x, (), 1, NUMBA)
    for array in (sent.values, sent.indices, left):
        if array is not None:
            array.setflags(write=False)
    stage.encode(dense(x), (), 1, NUMBA)
    stage.encode_residual(dense(x), left, (), 1, NUMBA)
    stage.decode(sent, NUMBA)
    stage.add(sent, 1.0, np.zeros(9001, np.float32), NUMBA)
    compiled = [f for f in vars(kernels).values() if hasattr(f, "signatures")]
    assert all(len(f.signatures) <= 1 for f in compiled)


@needs_numba
@given(
    size=st.integers(1, 3000) | st.sampled_from([63, 64, 65, 128]),
    shares=st.lists(st.sampled_from([0.0, 0.001, 0.05, 0.9, 1.0]), max_size=9),
    seed=st.integers(0, 2**32 - 1),
)
def test_positions_are_merged_alike(size: int, shares: list[float], seed: int) -> None:
    """Every position once, ascending, and each given one is found where its slot says."""
    chance = np.random.default_rng(seed)
    given_ = [np.flatnonzero(chance.random(size) < share) for share in shares]
    indices = np.concatenate([*given_, np.empty(0, np.int64)]).astype(np.uint32)
    indices.setflags(write=False)
    found = []
    for backend in (NUMPY, NUMBA):
        positions, slots = np.full((2, indices.size), 7, np.uint32)
        count = backend.family("sparse").merge(indices, size, positions, slots)
        found.append((positions[:count].tolist(), slots.tolist()))
    assert found[0] == found[1]
    positions = np.array(found[0][0], np.uint32)
    assert set(found[0][0]) == set(indices.tolist())
    assert np.all(np.diff(positions.astype(np.int64)) > 0)
    assert np.array_equal(positions[slots], indices)


# --- laws of all ------------------------------------------------------------------------------


@backends
@given(stage=of_all, x=arrays, seed=seeds)
def test_what_is_sent_and_what_is_left_are_what_was_given(
    backend: Backend, stage: Stage, x: Array, seed: int
) -> None:
    e = residual_for(x, seed % 2**32)
    sent, left, _ = stage.encode_residual(dense(x), e, (), seed, backend)
    decoded = stage.decode(sent, backend)
    assert decoded.shape == x.shape
    assert decoded.indices is None
    # Each element is in one of the two, so their sum is exact.
    assert np.array_equal(decoded.values + left, total(x, e))
    assert not np.any((decoded.values != 0) & (left != 0))


@backends
@given(stage=of_all, x=arrays, seed=seeds)
def test_the_first_residual_is_zero(backend: Backend, stage: Stage, x: Array, seed: int) -> None:
    sent, left, _ = stage.encode_residual(dense(x), None, (), seed, backend)
    again, left_again, _ = stage.encode_residual(dense(x), np.zeros_like(x), (), seed, backend)
    assert same(again, sent)
    assert bits(left_again) == bits(left)


@backends
@given(stage=of_all, x=arrays, seed=seeds)
def test_sizes_are_those_of_what_is_sent(
    backend: Backend, stage: Stage, x: Array, seed: int
) -> None:
    sizes = stage.sizes(x.size)
    for sent in (
        encoded(stage, x, backend, seed),
        stage.encode_residual(dense(x), x, (), seed, backend)[0],
    ):
        assert sent.values.dtype == sizes.dtype
        assert sent.scales is None
        assert sizes.scales == 0
        if sizes.at_most:
            assert sent.values.size <= sizes.values
        else:
            assert sent.values.size == sizes.values
        if sent.indices is not None:
            assert sent.indices.dtype == np.uint32
            assert sent.indices.size == sent.values.size
            assert np.all(np.diff(sent.indices.astype(np.int64)) > 0)


@backends
@given(stage=of_all, x=arrays, seed=seeds, weight=weights)
def test_adding_is_decoding_and_adding(
    backend: Backend, stage: Stage, x: Array, seed: int, weight: float
) -> None:
    sent = encoded(stage, x, backend, seed)
    for dtype in (np.float32, np.float64):
        fused = np.arange(x.size, dtype=dtype)
        plain = fused.copy()
        stage.add(sent, weight, fused, backend)
        with np.errstate(all="ignore"):
            Stage.add(stage, sent, weight, plain, backend)
        # 0 · weight is added by the plain way only; with an infinite product it would be NaN.
        assert np.array_equal(fused, plain, equal_nan=True)


@backends
@given(stage=st.sampled_from(CHOOSING), x=arrays, seed=seeds)
def test_the_best_choice_contracts(backend: Backend, stage: Stage, x: Array, seed: int) -> None:
    """‖x − C(x)‖² ≤ (1 − k/n) ‖x‖² for the k values that are sent."""
    sent = encoded(stage, x, backend, seed)
    left = (x - stage.decode(sent, backend).values).astype(np.float64)
    wide = x.astype(np.float64)
    share = 1 - sent.values.size / max(1, x.size)
    assert left @ left <= share * (wide @ wide) * (1 + 1e-9)


@backends
@given(stage=of_all, n=st.integers(1, 60), steps=st.integers(1, 6), seed=seeds)
def test_error_feedback_loses_nothing(
    backend: Backend, stage: Stage, n: int, steps: int, seed: int
) -> None:
    """Σ decode(c_t) + e_T = Σ g_t, exactly where sums are."""
    g = np.random.default_rng(seed).integers(-50, 51, (steps, n)).astype(np.float32)
    e, sum_ = None, np.zeros(n, np.float32)
    for t in range(steps):
        sent, e, _ = stage.encode_residual(dense(g[t]), e, (), t, backend)
        stage.add(sent, 1.0, sum_, backend)
    assert e is not None
    assert np.array_equal(sum_ + e, g.sum(axis=0))


@backends
@stages
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (0, 3), (2, 3)], ids=str)
def test_every_shape_passes(backend: Backend, stage: Stage, shape: tuple[int, ...]) -> None:
    """D04, D05: an array without dimensions has one element, one with a 0 in its shape none."""
    x = np.full(shape, 3.14, np.float32)
    sent, left, _ = stage.encode_residual(dense(x), None, (), 0, backend)
    decoded = stage.decode(sent, backend)
    assert decoded.shape == shape
    assert np.array_equal(decoded.values + left, x.reshape(-1))


@backends
@stages
@pytest.mark.parametrize("n", [1, 1000, 10000])
def test_zeros_stay_zeros(backend: Backend, stage: Stage, n: int) -> None:
    """D12: no scale is divided by, and nothing is left, in three rounds."""
    x, e = np.zeros(n, np.float32), None
    for seed in range(3):
        assert not stage.decode(encoded(stage, x, backend, seed), backend).values.any()
        sent, e, _ = stage.encode_residual(dense(x), e, (), seed, backend)
        assert not stage.decode(sent, backend).values.any()
        assert not e.any()


# --- top-k ------------------------------------------------------------------------------------


@backends
@given(x=arrays, ratio=ratios, seed=seeds)
def test_topk_takes_the_largest_and_of_ties_the_first(
    backend: Backend, x: Array, ratio: float, seed: int
) -> None:
    stage = TopK(ratio)
    sent = encoded(stage, x, backend)
    expected = np.sort(in_order(x)[: kept(ratio, x.size)])
    assert np.array_equal(sent.indices, expected)
    assert bits(sent.values) == bits(x[expected])
    e = residual_for(x, seed % 2**32)
    sent, left, _ = stage.encode_residual(dense(x), e, (), 0, backend)
    t = total(x, e)
    expected = np.sort(in_order(t)[: kept(ratio, x.size)])
    assert np.array_equal(sent.indices, expected)
    assert bits(sent.values) == bits(t[expected])
    t[expected] = 0
    assert bits(left) == bits(t)


@backends
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
@pytest.mark.parametrize("ratio", [1e-5, 0.01, 0.5])
def test_topk_is_exact_where_a_sample_misleads(backend: Backend, shape: Any, ratio: float) -> None:
    x = shape(np.random.default_rng(7), 100_003).astype(np.float32)
    sent, left, _ = TopK(ratio).encode_residual(dense(x), None, (), 0, backend)
    expected = np.sort(in_order(x)[: kept(ratio, x.size)])
    assert np.array_equal(sent.indices, expected)
    assert np.array_equal(sent.values, x[expected])
    left[expected] = x[expected]
    assert np.array_equal(left, x)


@backends
def test_a_quarter_of_eight(backend: Backend) -> None:
    """The page's example: −1.2 and 0.9 are sent, six values are left."""
    x = np.array([0.1, -1.2, 0.3, 0.05, 0.9, -0.4, 0.2, -0.1], np.float32)
    sent, left, _ = TopK(0.25).encode_residual(dense(x), None, (), 0, backend)
    assert sent.indices is not None
    assert sent.indices.tolist() == [1, 4]
    assert np.array_equal(sent.values, np.array([-1.2, 0.9], np.float32))
    assert np.array_equal(left, np.array([0.1, 0, 0.3, 0.05, 0, -0.4, 0.2, -0.1], np.float32))


@pytest.mark.parametrize(
    ("ratio", "n", "k"),
    [
        (0.01, 0, 0),
        (0.01, 1, 1),
        (0.01, 3, 1),
        (0.01, 50, 1),
        (0.01, 99, 1),
        (0.01, 100, 1),
        (0.01, 101, 2),
        (0.07, 100, 7),
        (0.25, 8, 2),
        (1, 5, 5),
        (1e-6, 2**31 - 1, 2148),
    ],
)
def test_a_ratio_keeps_at_least_one_and_is_read_as_a_decimal(ratio: float, n: int, k: int) -> None:
    """D16: a fraction of a tiny tensor is not rounded to nothing."""
    assert kept(ratio, n) == k
    for stage in (TopK(ratio), TopKSampled(ratio), RandomK(ratio)):
        assert stage.sizes(n).values == k


@backends
@pytest.mark.parametrize("n", [1, 3, 50, 99, 100, 101])
def test_a_ratio_of_one_is_lossless(backend: Backend, n: int) -> None:
    """D16: and the smallest tensors go through."""
    x = np.random.default_rng(n).normal(size=n).astype(np.float32)
    for stage in (TopK(1), RandomK(1), TopKSampled(1)):
        assert np.array_equal(stage.decode(encoded(stage, x, backend), backend).values, x)
    assert encoded(TopK(0.01), x, backend).values.size == (2 if n == 101 else 1)


@pytest.mark.parametrize("cls", [TopK, TopKSampled, RandomK])
@pytest.mark.parametrize("ratio", [0, -0.1, 1.5, math.nan, math.inf])
def test_a_ratio_that_is_no_share_is_refused(cls: Any, ratio: float) -> None:
    """D16: refused where it is written, with the valid range."""
    with pytest.raises(ValueError, match=rf"^\w+:{ratio}: .*above 0 and at most 1"):
        cls(ratio)


@pytest.mark.parametrize("least", [0, -1.0, math.nan, math.inf, 1e-50, 1e39])
def test_a_threshold_must_be_a_positive_float32(least: float) -> None:
    with pytest.raises(ValueError, match=r"^threshold:.*above 0"):
        Threshold(least)


@given(ratio=ratios)
def test_the_text_gives_the_number_back(ratio: float) -> None:
    for cls, name in ((TopK, "topk"), (TopKSampled, "topk_sampled"), (RandomK, "randomk")):
        assert cls(float(cls(ratio).text.removeprefix(f"{name}:"))) == cls(ratio)
    assert Threshold(float(Threshold(ratio).text.removeprefix("threshold:"))) == Threshold(ratio)
    assert TopK(1.0).text == "topk:1"


# --- sampled top-k and threshold --------------------------------------------------------------


@backends
@given(x=arrays, ratio=ratios, seed=seeds)
def test_a_sampled_topk_takes_no_more_than_k_and_nothing_but_the_largest(
    backend: Backend, x: Array, ratio: float, seed: int
) -> None:
    stage = TopKSampled(ratio)
    sent = encoded(stage, x, backend, seed)
    assert sent.indices is not None
    count = sent.values.size
    assert count <= kept(ratio, x.size)
    assert (count > 0) == bool(x.any())
    assert np.array_equal(sent.indices, np.sort(in_order(x)[:count]))
    assert np.array_equal(sent.values, x[sent.indices])
    assert np.all(sent.values != 0)


@backends
def test_a_sampled_topk_nearly_keeps_its_ratio(backend: Backend) -> None:
    chance = np.random.default_rng(5)
    x = chance.normal(size=200_000).astype(np.float32)
    counts = {encoded(TopKSampled(0.01), x, backend, seed).values.size for seed in range(20)}
    # A threshold at the 41st of 4,096 sampled elements is 16 % off, one standard deviation.
    assert all(1000 <= count <= 2000 for count in counts)
    assert len(counts) > 1


@backends
@given(x=arrays, least=st.floats(2**-149, float(np.finfo(np.float32).max), width=32))
@example(x=np.array([0.7, -0.7, 0.69999], np.float32), least=0.7)
def test_a_threshold_takes_what_reaches_it(backend: Backend, x: Array, least: float) -> None:
    sent = encoded(Threshold(least), x, backend)
    expected = np.flatnonzero(np.abs(x) >= np.float32(least))
    assert np.array_equal(sent.indices, expected)
    assert np.array_equal(sent.values, x[expected])


# --- random-k ---------------------------------------------------------------------------------


def fmix32(h: int) -> int:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift) * factor % 2**32
    return h ^ h >> 16


def drawn(n: int, k: int, seed: int) -> list[int]:
    """The definition, in plain integers, one position at a time."""
    rows = math.isqrt(n - 1) + 1
    columns = math.ceil(n / rows)
    low, high = seed % 2**32, seed >> 32
    keys = [fmix32(fmix32(low ^ (j + 1) * 0x9E3779B1 % 2**32) ^ high) for j in range(12)]

    def image(value: int) -> int:
        row, column = divmod(value, columns)
        for j, key in enumerate(keys):
            other = column if j % 2 == 0 else row
            hashed = fmix32(other * 0x9E3779B1 % 2**32 ^ key)
            if j % 2 == 0:
                row = (row + (hashed * rows >> 32)) % rows
            else:
                column = (column + (hashed * columns >> 32)) % columns
        value = row * columns + column
        return value if value < n else image(value)

    return sorted(image(i) for i in range(k))


def positions(n: int, k: int, seed: int, backend: Backend) -> Array:
    indices = np.empty(k, np.uint32)
    backend.family("sparse").draw(n, numpy_sparse.round_keys(seed), indices)
    return indices


@backends
@given(data=st.data(), n=st.integers(1, 300) | st.integers(1, 2**31 - 1), seed=seeds)
def test_positions_are_drawn_as_defined_and_never_twice(
    backend: Backend, data: st.DataObject, n: int, seed: int
) -> None:
    k = data.draw(st.integers(0, min(n, 60)) | st.just(min(n, 60)))
    given_ = positions(n, k, seed, backend)
    assert given_.tolist() == drawn(n, k, seed)
    assert len(set(given_.tolist())) == k
    assert np.all(given_ < n)


@backends
def test_positions_are_part_of_the_wire_format(backend: Backend) -> None:
    """Written down once: another definition would be another codec."""
    assert positions(44, 8, 1, backend).tolist() == [9, 10, 12, 13, 15, 16, 20, 30]
    assert positions(2**31 - 1, 4, 2**63 - 1, backend).tolist() == [
        159891561,
        213860086,
        461024170,
        545051184,
    ]


@pytest.mark.parametrize(("n", "k"), [(2, 1), (3, 2), (4, 2), (6, 3), (7, 2)])
def test_every_choice_is_equally_frequent(n: int, k: int) -> None:
    draws = 2000
    counts = Counter(tuple(positions(n, k, seed, fastest()).tolist()) for seed in range(draws))
    choices = list(combinations(range(n), k))
    share = 1 / len(choices)
    sigma = math.sqrt(draws * share * (1 - share))
    assert all(abs(counts[choice] - draws * share) < 4 * sigma for choice in choices)


@backends
def test_every_bit_of_a_seed_counts(backend: Backend) -> None:
    drawn_ = {positions(10**6, 4, 1 << bit, backend).tobytes() for bit in range(63)}
    assert len(drawn_) == 63


def test_random_k_is_unbiased_without_error_feedback() -> None:
    """The mean of decode(encode(x)) is x, within 4 standard deviations."""
    n, draws, backend = 40, 2000, fastest()
    x = np.random.default_rng(3).normal(size=n).astype(np.float32)
    stage = RandomK(0.1)
    sums = np.zeros(n)
    for seed in range(draws):
        stage.add(encoded(stage, x, backend, seed), 1.0, sums, backend)
    sigma = np.abs(x) * math.sqrt((n / 4 - 1) / draws)
    assert np.all(np.abs(sums / draws - x) < 4 * sigma + 1e-6)


@backends
@given(x=small(finite), seed=seeds)
def test_random_k_scales_what_it_sends_but_not_under_error_feedback(
    backend: Backend, x: Array, seed: int
) -> None:
    stage = RandomK(0.3)
    sent = encoded(stage, x, backend, seed)
    at = stage.positions(sent, backend)
    assert sent.indices is None
    assert sent.seed == seed
    with np.errstate(over="ignore"):
        expected = x[at] * np.float32(x.size / at.size) if x.size else x
    assert np.array_equal(sent.values, expected)
    under, _, _ = stage.encode_residual(dense(x), None, (), seed, backend)
    assert np.array_equal(under.values, x[at])
    # The receiver knows no scale: it puts down what was sent.
    assert np.array_equal(stage.decode(sent, backend).values[at], sent.values)


@backends
def test_random_k_refuses_another_number_of_values(backend: Backend) -> None:
    sent = encoded(RandomK(0.1), np.ones(40, np.float32), backend)
    with pytest.raises(ProtocolError, match=r"randomk:0.1 of 40 elements: 4 values, not 3"):
        RandomK(0.1).decode(replace(sent, values=sent.values[:3]), backend)


@backends
@pytest.mark.parametrize("stage", CHOOSING, ids=repr)
def test_values_without_their_positions_are_refused(backend: Backend, stage: Stage) -> None:
    with pytest.raises(ValueError, match="indices"):
        stage.decode(dense(np.ones(4, np.float32)), backend)


def test_only_random_k_is_unbiased() -> None:
    assert not RandomK(0.1).biased
    assert all(stage.biased for stage in (TopK(0.1), TopKSampled(0.1), Threshold(1)))
