"""Codes by chance: the hash, laws on both CPU backends, means and spreads over seeds, pitfalls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from codec_cases import (
    BACKENDS,
    COMPILING,
    NUMBA,
    NUMPY,
    OVERFLOWS,
    SIZES,
    bits_of,
    blocks,
    decoded,
    encoded,
    everything,
    f4,
    normal,
    sizes_are_right,
)
from hypothesis import given
from hypothesis import strategies as st
from strategies_codecs import float_arrays

from zkv.dtypes import Array
from zkv_codecs import spec
from zkv_codecs.backend import Backend
from zkv_codecs.deltas import down_plan
from zkv_codecs.kernels.numpy_random import folded
from zkv_codecs.packed import Packed, Stage, State, dense
from zkv_codecs.stochastic import Natural, Qsgd, Ternary

ALL: list[Stage] = [
    Qsgd(127),
    Qsgd(1),
    Qsgd(4, 64),
    Qsgd(100, 4096),
    Natural(),
    Ternary(),
    Ternary(64),
    Ternary(2048),
]
SEEDS = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1]) | st.integers(0, 2**63 - 1)

pytestmark = COMPILING

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_stage = pytest.mark.parametrize("stage", ALL, ids=lambda one: one.text)


# --- chance -------------------------------------------------------------------------------------


def fmix32(h: int) -> int:
    """MurmurHash3's finalizer in Python's integers."""
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


@each_backend
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from(SIZES))
def test_draws_are_a_hash_of_the_element_and_the_seed(
    backend: Backend, seed: int, size: int
) -> None:
    out = np.empty(size, np.uint32)
    backend.family("random").draws(seed, out)
    for at in {*range(min(size, 5)), *range(max(size - 5, 0), size)}:
        assert out[at] == fmix32((at * 0x9E3779B1 & 0xFFFFFFFF) ^ seed) >> 8


def test_the_finalizer_is_murmurs() -> None:
    """As in SMHasher's MurmurHash3.cpp: fmix32(1) = 0x514E28B7, of 0 it is 0."""
    assert (fmix32(0), fmix32(1)) == (0, 0x514E28B7)


@given(SEEDS)
def test_a_seed_is_folded_to_32_bits_of_both_its_halves(seed: int) -> None:
    assert folded(seed) == fmix32(fmix32(seed >> 32) ^ (seed & 0xFFFFFFFF))
    assert folded(seed) != folded(seed ^ 1)
    assert folded(seed) != folded(seed ^ 1 << 62)


def test_draws_are_even_and_unrelated() -> None:
    """Mean, spread and correlation of neighbours and of seeds that follow, within 4 sigma."""
    count = 1_000_000
    found = []
    for seed in (0, 1):
        out = np.empty(count, np.uint32)
        NUMPY.family("random").draws(folded(seed), out)
        assert out.max() < 2**24
        found.append(out / 2.0**24 - 0.5)
    sigma = 1 / np.sqrt(12)
    for one in found:
        assert abs(one.mean()) < 4 * sigma / np.sqrt(count)
        assert one.std() == pytest.approx(sigma, rel=4 / np.sqrt(count))
        assert abs((one[1:] * one[:-1]).mean()) < 4 * sigma**2 / np.sqrt(count)
    assert abs((found[0] * found[1]).mean()) < 4 * sigma**2 / np.sqrt(count)


# --- laws ---------------------------------------------------------------------------------------


@BACKENDS[1].marks[0]
@OVERFLOWS
@given(st.sampled_from(ALL), float_arrays(2), SEEDS)
def test_numba_gives_the_bits_of_numpy(
    stage: Stage, arrays: tuple[Array, Array], seed: int
) -> None:
    x, e = arrays
    assert everything(stage, x, e, seed, NUMBA) == everything(stage, x, e, seed, NUMPY)


@BACKENDS[1].marks[0]
@each_stage
@pytest.mark.parametrize("size", SIZES)
def test_numba_gives_the_bits_of_numpy_at_every_border(stage: Stage, size: int) -> None:
    x, e = normal(size, 1), normal(size, 2)
    assert everything(stage, x, e, size, NUMBA) == everything(stage, x, e, size, NUMPY)


@each_backend
@given(stage=st.sampled_from(ALL), x=float_arrays(1).map(lambda arrays: arrays[0]), seed=SEEDS)
def test_sizes_are_what_is_sent_to_the_byte(
    backend: Backend, stage: Stage, x: Array, seed: int
) -> None:
    assert sizes_are_right(stage, encoded(stage, x, backend, seed), x.size)


@each_stage
def test_the_seed_decides(stage: Stage) -> None:
    x = normal(3000)
    one, same, other = (encoded(stage, x, NUMPY, seed) for seed in (5, 5, 6))
    assert bits_of(one.values, one.scales) == bits_of(same.values, same.scales)
    assert (one.values != other.values).mean() > 0.01
    assert bits_of(one.scales) == bits_of(other.scales)


@given(st.sampled_from([Qsgd(127), Qsgd(1), Qsgd(4, 64)]), float_arrays(1), SEEDS)
def test_qsgd_is_off_by_less_than_a_level(stage: Qsgd, arrays: tuple[Array], seed: int) -> None:
    (x,) = arrays
    sent = encoded(stage, x, NUMPY, seed)
    assert sent.scales is not None
    assert np.abs(sent.values.astype(int)).max(initial=0) <= stage.levels
    values = stage.decode(sent, NUMPY).values.astype(np.float64)
    for one, found, scale in zip(
        blocks(x.astype(np.float64), stage.block),
        blocks(values, stage.block),
        sent.scales.tolist(),
        strict=True,
    ):
        if np.abs(one).max() < np.float32(1.5e-36):
            assert scale == 0
            assert not found.any()
        else:
            assert scale == pytest.approx(np.sqrt(one @ one) / stage.levels, rel=1e-6)
            assert (np.abs(found - one) <= scale * (1 + 1e-6) + 1e-6 * np.abs(one)).all()
            assert ((found == 0) | (np.sign(found) == np.sign(one))).all()


@given(float_arrays(1), SEEDS)
def test_natural_is_one_of_the_powers_of_two_around(arrays: tuple[Array], seed: int) -> None:
    x = np.clip(arrays[0], -(2.0**18), 2.0**18).astype(np.float32)
    x[np.abs(x) < 2.0**-108] = 0
    values = decoded(Natural(), x, NUMPY, seed)
    assert not values[x == 0].any()
    x, values = x[x != 0], values[x != 0]
    assert (np.signbit(x) == np.signbit(values)).all()
    down = 2.0 ** np.floor(np.log2(np.abs(x).astype(np.float64)))
    exact = np.frexp(np.abs(x))[0] == 0.5
    assert (np.abs(values)[exact] == np.abs(x)[exact]).all()
    assert ((np.abs(values) == down) | (np.abs(values) == 2 * down)).all()


@given(st.sampled_from([Ternary(), Ternary(64)]), float_arrays(1), SEEDS)
def test_ternary_is_nothing_or_the_largest(stage: Ternary, arrays: tuple[Array], seed: int) -> None:
    (x,) = arrays
    values = decoded(stage, x, NUMPY, seed)
    for one, found in zip(blocks(x, stage.block), blocks(values, stage.block), strict=True):
        top = np.abs(one).max()
        top = top if top >= np.float32(1.5e-36) else np.float32(0)
        assert ((found == 0) | (found == np.copysign(top, one))).all()
        assert not found[one == 0].any()
        assert (np.abs(found[np.abs(one) == top]) == top).all()


@each_backend
@each_stage
def test_what_is_left_is_what_was_given_less_what_is_decoded(
    stage: Stage, backend: Backend
) -> None:
    x, e = normal(1000, 1), normal(1000, 2)
    sent, left, _ = stage.encode_residual(dense(x), e, (), 9, backend)
    assert bits_of(left) == bits_of(x + e - stage.decode(sent, backend).values)


@each_backend
@each_stage
def test_what_is_given_stays_as_it_is(stage: Stage, backend: Backend) -> None:
    x = normal(1500)
    x.setflags(write=False)
    before = bits_of(x)
    sent = encoded(stage, x, backend)
    for one in (sent.values, sent.scales):
        if one is not None:
            one.setflags(write=False)
    stage.decode(sent, backend)
    stage.add(sent, 1.0, np.zeros(1500, np.float32), backend)
    assert bits_of(x) == before


# --- ternary with error feedback ----------------------------------------------------------------


@each_backend
@given(stage=st.sampled_from([Ternary(), Ternary(64)]), arrays=float_arrays(2))
@OVERFLOWS
def test_ternary_with_a_residual_is_what_is_nearest_and_contracts(
    backend: Backend, stage: Ternary, arrays: tuple[Array, Array]
) -> None:
    """‖t − C(t)‖² ≤ ‖t‖² − s² in each block, as |t| − s is no more than |t| where |t| > s / 2."""
    x, e = arrays
    sent, left, _ = stage.encode_residual(dense(x), e, (), 0, backend)
    assert sent.scales is not None
    with np.errstate(over="ignore"):
        t = x + e
    for one, found, rest, scale in zip(
        blocks(t.astype(np.float64), stage.block),
        blocks(stage.decode(sent, backend).values.astype(np.float64), stage.block),
        blocks(left.astype(np.float64), stage.block),
        sent.scales.astype(np.float64),
        strict=True,
    ):
        if not np.isfinite(one).all():
            continue
        assert scale == (np.abs(one).max() if np.abs(one).max() >= np.float32(1.5e-36) else 0)
        nearest = np.where(np.abs(one) > scale / 2, np.copysign(scale, one), 0)
        assert found.tolist() == nearest.tolist()
        assert rest @ rest <= (one @ one - scale**2) * (1 + 1e-5) + 1e-12 * scale**2


def owed(stage: Ternary, rule: Callable[..., tuple[Packed, Array, State]]) -> Array:
    """The residual's largest element and its norm, the most in 200 steps, in units of the largest
    element that any gradient had so far."""
    residual: Array | None = None
    largest = 0.0
    found = []
    for step in range(200):
        x = normal(2048, step)
        largest = max(largest, float(np.abs(x).max()))
        _, residual, _ = rule(stage, dense(x), residual, (), step, NUMPY)
        found.append((np.abs(residual).max() / largest, np.linalg.norm(residual) / largest))
    return np.array(found).max(axis=0)


@pytest.mark.parametrize("stage", [Ternary(), Ternary(64), Ternary(2048)], ids=lambda o: o.text)
def test_ternary_owes_no_more_than_one_gradient(stage: Ternary) -> None:
    """With |e| ≤ M and |g| ≤ M, s ≤ 2M, and what is left is s / 2 at most, which is M again: so the
    norm is √n · M at most. By chance what is left may be nearly s, and grows from step to step."""
    nearest, by_chance = owed(stage, Ternary.encode_residual), owed(stage, Stage.encode_residual)
    assert nearest[0] <= 1 + 1e-5
    assert nearest[1] <= np.sqrt(2048)
    assert by_chance[0] > 2
    assert (by_chance > 2 * nearest).all()


@each_backend
def test_ternary_by_hand(backend: Backend) -> None:
    """s = 4: 2 is no more than half of it, so it stays; 2.5 is, and −1.5 is owed."""
    stage = Ternary()
    sent, left, _ = stage.encode_residual(
        dense(f4(3, 2, -2, 1, -3)), f4(1, 0, 0, 1.5, 0), (), 0, backend
    )
    assert stage.decode(sent, backend).values.tolist() == [4, 0, 0, 4, -4]
    assert left.tolist() == [0, 2, -2, -1.5, 1]


# --- means and spreads over seeds ---------------------------------------------------------------

ROUNDS = 2000
GIVEN = f4(1, -0.5, 0.3, 1e-3, 0, -0.99, 1.0 / 3, 0.7071, -0.1, 2.5e-2, 0.6, -0.03)


def over_seeds(stage: Stage, x: Array) -> Array:
    """What is decoded for many seeds, one row for each."""
    rows = [decoded(stage, x, NUMPY, seed) for seed in range(ROUNDS)]
    return np.array(rows, np.float64)


@pytest.mark.parametrize("stage", [Qsgd(4), Qsgd(127), Natural(), Ternary()], ids=lambda o: o.text)
def test_the_mean_over_seeds_is_what_was_given(stage: Stage) -> None:
    """Within 4 sigma for each element, where sigma is known: of a choice between two neighbours."""
    found = over_seeds(stage, GIVEN)
    for at, x in enumerate(GIVEN.astype(np.float64)):
        low, high = found[:, at].min(), found[:, at].max()
        if low == high:
            assert low == pytest.approx(x, rel=1e-6, abs=1e-12)
        sigma = np.sqrt(max((x - low) * (high - x), 0) / ROUNDS)
        assert abs(found[:, at].mean() - x) <= 4 * sigma + 1e-6 * abs(x)


@pytest.mark.parametrize(("levels", "size"), [(1, 12), (4, 12), (4, 512), (127, 512)])
def test_qsgd_spreads_no_more_than_its_bound(levels: int, size: int) -> None:
    """Alistarh et al., lemma 3.1: E‖Q(x) − x‖² ≤ min(n / s², √n / s) ‖x‖²."""
    x = normal(size, 4)
    lost = [decoded(Qsgd(levels), x, NUMPY, seed) - x for seed in range(300)]
    bound = min(size / levels**2, np.sqrt(size) / levels) * float(x @ x)
    assert np.mean([float(one @ one) for one in lost]) <= bound


def test_natural_has_nine_eighths_of_the_square_at_most() -> None:
    """Horváth et al.: E C(x)² = 9/8 x² for x = 4/3, the worst case, within 4 sigma."""
    count = 500_000
    for x, expected in ((4 / 3, 9 / 8), (1.0, 1.0), (1.9, (0.1 + 4 * 0.9) / 1.9**2)):
        values = decoded(Natural(), np.full(count, x, np.float32)).astype(np.float64)
        squares = values**2 / np.float64(np.float32(x)) ** 2
        sigma = 3 / x**2 / 2 / np.sqrt(count)
        assert squares.mean() == pytest.approx(expected, abs=4 * sigma)


def test_ternary_sends_the_expected_share() -> None:
    """Of 256 Gaussian elements Σ|x| / max|x| are not zero, on average, within 4 sigma."""
    x = normal(256)
    chances = np.abs(x.astype(np.float64)) / np.abs(x).max()
    sent = [int((decoded(Ternary(), x, NUMPY, seed) != 0).sum()) for seed in range(500)]
    sigma = np.sqrt((chances * (1 - chances)).sum() / 500)
    assert np.mean(sent) == pytest.approx(chances.sum(), abs=4 * sigma)


# --- worked numbers -----------------------------------------------------------------------------


@each_backend
def test_codes_of_natural_numbers(backend: Backend) -> None:
    """Sign · 128 + exponent − 18: powers of two need no chance."""
    x = f4(1, -1, 2, 0.5, 0, -0.0, 2**18, -(2**18), 2.0**-108, -(2.0**-108), 2.0**-109)
    codes = [109, 237, 110, 108, 0, 0, 127, 255, 1, 129, 0]
    assert encoded(Natural(), x, backend, 3).values.tolist() == codes
    back = decoded(Natural(), x, backend, 3)
    assert back.tolist() == [*x[:10].tolist(), 0]
    assert not np.signbit(back[x == 0]).any()


@each_backend
def test_natural_stops_at_two_to_the_eighteenth(backend: Backend) -> None:
    x = f4(262145, -1e6, 3e38, 3.4028235e38, -3.4028235e38, 1e-40, 1e-45)
    top = 2.0**18
    assert decoded(Natural(), x, backend, 3).tolist() == [top, -top, top, top, -top, 0, 0]


@each_backend
def test_codes_of_ternary_numbers(backend: Backend) -> None:
    """The largest magnitude needs no chance: codes 1, 3 and 0, from the lowest bits on."""
    sent = encoded(Ternary(), f4(2, -2, 0, 2, -2), backend)
    assert sent.values.tolist() == [0b01_00_11_01, 0b11]
    assert sent.scales is not None
    assert sent.scales.tolist() == [2]


@each_backend
def test_ternary_nothing_is_plus_zero_whatever_scale_a_peer_sends(backend: Backend) -> None:
    """Codes 0 and 2; no encoder makes a negative scale."""
    codes, scales, out = np.array([0b10_00_11_01], np.uint8), f4(-2), f4(9, 9, 9, 9)
    backend.family("random").ternary_decode(codes, scales, 64, out)
    assert out.tobytes() == f4(-2, 2, 0, 0).tobytes()


@each_backend
def test_qsgd_counts_in_parts_of_the_length(backend: Backend) -> None:
    """‖(3, −4)‖ = 5, so with 5 levels both are whole; −4 alone is the whole length."""
    sent = encoded(Qsgd(5), f4(3, -4, 0), backend, 8)
    assert sent.scales is not None
    assert (sent.values.tolist(), sent.scales.tolist()) == ([3, -4, 0], [1])
    for seed in range(50):
        assert decoded(Qsgd(127), f4(0, -4, 0), backend, seed).tolist() == [0, -4, 0]


# --- pitfalls -----------------------------------------------------------------------------------


@each_backend
@each_stage
@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_stay_zeros(stage: Stage, backend: Backend, size: int, zero: float) -> None:
    """D12: an all-zero tensor, three rounds, with and without error feedback."""
    x = np.full(size, zero, np.float32)
    residual: Array | None = None
    for seed in range(3):
        assert not decoded(stage, x, backend, seed).any()
        sent, residual, _ = stage.encode_residual(dense(x), residual, (), seed, backend)
        assert not stage.decode(sent, backend).values.any()
        assert not residual.any()


@each_backend
@each_stage
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (1,), (2, 3)])
def test_any_shape_goes_there_and_back(
    stage: Stage, backend: Backend, shape: tuple[int, ...]
) -> None:
    """D04, D05: 0-d arrays and arrays without elements keep their shape."""
    x = np.full(shape, 0.5, np.float32)
    back = stage.decode(encoded(stage, x, backend), backend)
    assert (back.shape, back.values.size, back.values.dtype) == (shape, x.size, np.float32)
    if x.size == 1:
        assert back.values.tolist() == pytest.approx([0.5])


@each_stage
@pytest.mark.parametrize("dtype", ["f2", ">f4", "f8"])
def test_other_floats_are_float32_in_a_codec(stage: Stage, dtype: str) -> None:
    """D15: halves and doubles are encoded as the float32 they become."""
    x = normal(300).astype(dtype)
    assert bits_of(decoded(stage, x)) == bits_of(decoded(stage, x.astype(np.float32)))


@each_backend
@pytest.mark.parametrize("value", [0.1, -3.3, 1e-30, 3e38, -3.4028235e38])
def test_equal_numbers_are_sent_as_they_are(backend: Backend, value: float) -> None:
    """Reference §4.4: clipping at 2.5 sigma would send a constant tensor as zeros for ever."""
    x = np.full(700, value, np.float32)
    for seed in range(5):
        assert decoded(Ternary(), x, backend, seed).tolist() == x.tolist()


@OVERFLOWS
@each_backend
@each_stage
def test_numbers_near_the_largest_stay_finite(stage: Stage, backend: Backend) -> None:
    x = np.where(np.arange(2000) % 3 == 0, -3.4028235e38, 3.3e38).astype(np.float32)
    x[1000:1010] = 1
    for seed in range(20):
        sent = encoded(stage, x, backend, seed)
        assert sent.scales is None or np.isfinite(sent.scales).all()
        assert np.isfinite(stage.decode(sent, backend).values).all()


@each_backend
@each_stage
@pytest.mark.parametrize("magnitude", [1e-30, 1e-35, 1e-37, 1e-40, 1e-44])
def test_subnormal_residuals_do_no_harm(stage: Stage, backend: Backend, magnitude: float) -> None:
    """Reference §4.1: residuals may shrink to float32's smallest numbers; what is too small to be
    sent stays as it is."""
    residual = (normal(700) * magnitude).astype(np.float32)
    nothing = dense(np.zeros(700, np.float32))
    for seed in range(20):
        before = residual
        sent, residual, _ = stage.encode_residual(nothing, before, (), seed, backend)
        assert np.isfinite(residual).all()
        if not sent.values.any():
            np.testing.assert_array_equal(residual, before)
    if magnitude <= 1e-37:
        assert not sent.values.any()


@OVERFLOWS
@each_backend
@each_stage
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_what_is_no_number_breaks_nothing(stage: Stage, backend: Backend) -> None:
    """D17: NaN and Inf are refused before a codec; here they must only not crash."""
    x = normal(600)
    x[3], x[300], x[301] = np.nan, np.inf, -np.inf
    sent = encoded(stage, x, backend)
    assert sizes_are_right(stage, sent, 600)
    assert stage.decode(sent, backend).values.size == 600


@each_backend
@pytest.mark.parametrize("size", [1, 2, 3, 261])
def test_codes_behind_the_last_element_are_zero_and_are_ignored(
    backend: Backend, size: int
) -> None:
    sent = encoded(Ternary(), np.full(size, -7, np.float32), backend)
    before = Ternary().decode(sent, backend).values.tolist()
    assert before == [-7] * size
    assert sent.values[-1] >> 2 * (size % 4) == 0
    sent.values[-1] |= 0xFF << 2 * (size % 4) & 0xFF
    assert Ternary().decode(sent, backend).values.tolist() == before


# --- counts, errors, texts ----------------------------------------------------------------------


@each_backend
@each_stage
def test_the_values_of_a_sparsifier_are_counted(stage: Stage, backend: Backend) -> None:
    indices = np.arange(0, 3000, 10, dtype=np.uint32)[:13]
    chosen = Packed(normal(13), (60, 50), indices, None, 77, 13)
    sent, _ = stage.encode(chosen, (), 5, backend)
    assert sizes_are_right(stage, sent, 13)
    back = stage.decode(sent, backend)
    assert bits_of(back.values) == bits_of(decoded(stage, chosen.values, NUMPY, 5))
    assert (back.shape, back.indices is indices, back.seed, back.kept) == ((60, 50), True, 77, 13)


@each_backend
@pytest.mark.parametrize("stage", [Qsgd(4), Ternary()], ids=lambda one: one.text)
def test_kernels_are_not_given_less_than_they_read(stage: Stage, backend: Backend) -> None:
    sent = encoded(stage, normal(600), backend)
    assert sent.scales is not None
    with pytest.raises(ValueError, match=r"codes and 1 scales for 600 values"):
        stage.decode(replace(sent, scales=sent.scales[:1]), backend)
    with pytest.raises(ValueError, match=r"codes and \d+ scales for (599|500) values"):
        stage.add(sent, 1.0, np.zeros(500, np.float32), backend)


@pytest.mark.parametrize("levels", [0, -1, 128, 4.0])
def test_levels_that_cannot_be_are_refused(levels: int) -> None:
    with pytest.raises(ValueError, match=f"qsgd: {levels} levels; give 1 to 127"):
        Qsgd(levels)


@pytest.mark.parametrize("block", [0, 32, 100, 8192])
def test_blocks_that_cannot_be_are_refused(block: int) -> None:
    with pytest.raises(ValueError, match=f"qsgd: block {block}; .* from 64 to 4096"):
        Qsgd(127, block)
    with pytest.raises(ValueError, match=f"ternary: block {block}; .* from 64 to 4096"):
        Ternary(block)


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (Qsgd(127), "qsgd:127"),
        (Qsgd(7, 1024), "qsgd:7:1024"),
        (Natural(), "natural"),
        (Ternary(), "ternary"),
        (Ternary(64), "ternary:64"),
    ],
)
def test_texts_have_what_is_not_usual(stage: Stage, text: str) -> None:
    assert stage.text == text


@each_backend
def test_ternary_rounds_its_bars_to_float32(backend: Backend) -> None:
    """A draw of 24 bits times a scale is a float32, not a float64 that is nearer to the truth."""
    x = np.array([float.fromhex("0x1.a30fecp+0"), float.fromhex("0x1.7e6746p-1")], np.float32)
    codes, scales = np.empty(1, np.uint8), np.empty(1, np.float32)
    backend.family("random").ternary_encode(x, 64, 5, codes, scales)
    assert codes.tolist() == [1]


@pytest.mark.parametrize(
    ("text", "least"), [("qsgd:4", 23), ("qsgd:22", 23), ("qsgd:15:256", 16), ("qsgd:4:64", 8)]
)
def test_a_residual_around_too_few_levels_is_refused(text: str, least: int) -> None:
    """4 levels of blocks of 512: after 200 steps it was millions of gradients long."""
    said = rf"{text}\+ef: the residual would grow: .* at least {least},"
    with pytest.raises(ValueError, match=said):
        spec.codec(f"{text}+ef")
    with pytest.raises(ValueError, match="the residual would grow"):
        down_plan(text)
    assert spec.codec(text).text == text


@pytest.mark.parametrize("text", ["qsgd:23+ef", "qsgd:16:256+ef", "qsgd:127+ef", "qsgd:8:64+ef"])
def test_with_enough_levels_a_residual_stays_bounded(text: str) -> None:
    """In norms of a gradient, over 200 steps of chance."""
    codec = spec.codec(text)
    state = codec.start((2048,))
    chance = np.random.default_rng(0)
    longest = 0.0
    for step in range(200):
        gradient = chance.standard_normal(2048).astype(np.float32)
        _, state = codec.encode(dense(gradient), state, step, NUMPY)
        longest = max(longest, float(np.linalg.norm(state[0]) / np.linalg.norm(gradient)))
    assert longest < 3.0
