"""Codecs of one and two bits: laws on both CPU backends, worked numbers, and known pitfalls."""

from __future__ import annotations

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
from zkv_codecs.backend import Backend
from zkv_codecs.packed import Packed, Stage, State, dense
from zkv_codecs.signs import Majority, MxOneBit, MxTwoBit, OneBit, TwoMeans, majority

MEANS = [OneBit(), OneBit(64), TwoMeans(), TwoMeans(4096)]
BUILT_IN = [MxOneBit(), MxOneBit(1e-3), MxTwoBit(0.5), MxTwoBit(1e-3)]
ALL: list[Stage] = [*MEANS, Majority(), *BUILT_IN]

pytestmark = COMPILING

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_mean = pytest.mark.parametrize("stage", MEANS, ids=lambda one: one.text)
each_built_in = pytest.mark.parametrize("stage", BUILT_IN, ids=lambda one: one.text)
each_stage = pytest.mark.parametrize("stage", ALL, ids=lambda one: one.text)


# --- laws --------------------------------------------------------------------------------------


@BACKENDS[1].marks[0]
@given(st.sampled_from(ALL), float_arrays(2))
def test_numba_gives_the_bits_of_numpy(stage: Stage, arrays: tuple[Array, Array]) -> None:
    x, e = arrays
    assert everything(stage, x, e, 0, NUMBA) == everything(stage, x, e, 0, NUMPY)


@BACKENDS[1].marks[0]
@each_stage
@pytest.mark.parametrize("size", SIZES)
def test_numba_gives_the_bits_of_numpy_at_every_border(stage: Stage, size: int) -> None:
    x, e = normal(size, 1), normal(size, 2)
    assert everything(stage, x, e, 0, NUMBA) == everything(stage, x, e, 0, NUMPY)


@each_backend
@given(stage=st.sampled_from(ALL), x=float_arrays(1).map(lambda arrays: arrays[0]))
def test_sizes_are_what_is_sent_to_the_byte(backend: Backend, stage: Stage, x: Array) -> None:
    assert sizes_are_right(stage, encoded(stage, x, backend), x.size)


@each_backend
@given(stage=st.sampled_from(MEANS), arrays=float_arrays(2))
def test_what_is_left_is_what_was_given_less_what_is_decoded(
    backend: Backend, stage: Stage, arrays: tuple[Array, Array]
) -> None:
    x, e = arrays
    sent, left, _ = stage.encode_residual(dense(x), e, (), 0, backend)
    slow, by_default, _ = Stage.encode_residual(stage, dense(x), e, (), 0, backend)
    assert bits_of(sent.values, sent.scales, left) == bits_of(slow.values, slow.scales, by_default)
    first, left, _ = stage.encode_residual(dense(x), None, (), 0, backend)
    assert bits_of(left) == bits_of(x - stage.decode(first, backend).values)


@each_backend
@given(stage=st.sampled_from(MEANS), x=float_arrays(1).map(lambda arrays: arrays[0]))
def test_scales_are_the_means_of_blocks(backend: Backend, stage: Stage, x: Array) -> None:
    sent = encoded(stage, x, backend)
    assert sent.scales is not None
    found = iter(sent.scales.tolist())
    for one in blocks(x.astype(np.float64), stage.block):
        negative = np.signbit(one)
        groups = [np.abs(one)] if isinstance(stage, OneBit) else [one[negative], one[~negative]]
        for group in groups:
            mean = float(group.mean()) if group.size else 0.0
            if abs(mean) > 1.01 * 1.5e-36:
                assert next(found) == pytest.approx(mean, rel=1e-6)
            else:
                assert next(found) == pytest.approx(mean if abs(mean) > 1.5e-36 else 0, abs=1.6e-36)
    assert list(found) == []


@given(st.integers(0, 2**32 - 1), st.integers(1, 1500))
def test_onebit_loses_all_but_the_square_of_the_mean(seed: int, size: int) -> None:
    """‖x − C‖² = ‖x‖² − ‖x‖₁² / n in each block: a contraction."""
    x = normal(size, seed) * 10.0 ** (seed % 5)
    lost = x.astype(np.float64) - decoded(OneBit(), x.astype(np.float32))
    for one, left in zip(blocks(x.astype(np.float64), 256), blocks(lost, 256), strict=True):
        expected = one @ one - np.abs(one).sum() ** 2 / one.size
        assert left @ left == pytest.approx(expected, rel=1e-5, abs=1e-5 * (one @ one))


@given(st.integers(0, 2**32 - 1), st.integers(1, 1500))
def test_twomeans_loses_all_but_the_squares_of_both_means(seed: int, size: int) -> None:
    """‖x − C‖² = ‖x‖² − n₁m₁² − n₂m₂², never more than one mean of |x| loses."""
    x = normal(size, seed)
    lost = x.astype(np.float64) - decoded(TwoMeans(), x)
    for one, left in zip(blocks(x.astype(np.float64), 256), blocks(lost, 256), strict=True):
        halves = [half for half in (one[one < 0], one[one >= 0]) if half.size]
        expected = one @ one - sum(half.size * half.mean() ** 2 for half in halves)
        assert left @ left == pytest.approx(expected, rel=1e-5, abs=1e-5 * (one @ one))
        assert expected <= one @ one - np.abs(one).sum() ** 2 / one.size + 1e-9


def test_onebit_loses_the_gaussian_share() -> None:
    """Reference §1.2: a relative error of √(1 − 2/π) = 0.6028 at B = 256."""
    x = normal(1_000_000)
    lost = x - decoded(OneBit(), x)
    assert np.linalg.norm(lost) / np.linalg.norm(x) == pytest.approx(0.6028, abs=2e-3)


@each_backend
@each_mean
def test_nothing_is_lost_under_error_feedback(stage: Stage, backend: Backend) -> None:
    chance = np.random.default_rng(3)
    residual: Array | None = None
    given_, received = np.zeros(1000), np.zeros(1000)
    for _ in range(50):
        gradient = (chance.standard_normal(1000) + 0.1).astype(np.float32)
        sent, residual, _ = stage.encode_residual(dense(gradient), residual, (), 0, backend)
        given_ += gradient
        received += stage.decode(sent, backend).values
    assert residual is not None
    np.testing.assert_allclose(received + residual, given_, atol=1e-4)


@each_backend
@each_stage
def test_what_is_given_stays_as_it_is(stage: Stage, backend: Backend) -> None:
    x, e = normal(700, 1), normal(700, 2)
    x.setflags(write=False)
    e.setflags(write=False)
    before = bits_of(x, e)
    sent, _ = stage.encode(dense(x), (e,) if stage.remembers else (), 0, backend)
    for one in (sent.values, sent.scales):
        if one is not None:
            one.setflags(write=False)
    stage.decode(sent, backend)
    stage.add(sent, 1.0, np.zeros(700, np.float32), backend)
    if stage.feedback:
        stage.encode_residual(dense(x), e, (), 0, backend)
    assert bits_of(x, e) == before


# --- worked numbers ----------------------------------------------------------------------------


@each_backend
def test_sign_bits_and_mean_of_the_reference(backend: Backend) -> None:
    """Reference §3: −0.0 is negative; little order, tail bits zero."""
    x = f4(0.5, -1, 0.25, -0.25, 2, -2, 0, -0.0, 1.5)
    sent = encoded(OneBit(), x, backend)
    assert sent.values.tolist() == [0xAA, 0x00]
    assert sent.scales is not None
    assert sent.scales.tolist() == pytest.approx([0.8333333])
    assert encoded(Majority(), x, backend).values.tolist() == [0xAA, 0x00]


@each_backend
def test_two_means_of_a_block(backend: Backend) -> None:
    x = f4(1, -2, 3, -6, 5)
    sent = encoded(TwoMeans(), x, backend)
    assert (sent.values.tolist(), sent.scales.tolist()) == ([0b01010], [-4, 3])  # type: ignore[union-attr]
    assert decoded(TwoMeans(), x, backend).tolist() == [3, -4, 3, -4, 3]


@each_backend
def test_mxnet_two_bits_of_the_reference(backend: Backend) -> None:
    """Reference §3: apache/mxnet PR #7512, T = 4, in the layout of its master branch."""
    stage = MxTwoBit(4)
    gradient = f4(-6, -2, 3, 1, 10, 5, -3, 2, -8, 0)
    before = f4(-3, 1, -1, 5, -2, 2, 3, -7, -2, -100)
    sent, (left,) = stage.encode(dense(gradient), (before,), 0, backend)
    assert bytes(sent.values).hex() == "83f2a0"
    assert stage.decode(sent, backend).values.tolist() == [-4, 0, 0, 4, 4, 4, 0, -4, -4, -4]
    assert left.tolist() == [-5, -1, 2, 2, 4, 3, 0, -1, -6, -96]


@each_backend
def test_mxnet_one_bit_begins_with_the_highest(backend: Backend) -> None:
    """By hand, T = 0.5: a bit where x + residual is above it; what equals it is not."""
    stage = MxOneBit()
    gradient = f4(0.75, 0.5, -1, 0.25, 2, 0, 0, 3, 1)
    before = f4(0, 0, 0, 0.5, 0, 1, -1, -2, -0.25)
    sent, (left,) = stage.encode(dense(gradient), (before,), 0, backend)
    assert sent.values.tolist() == [0b10011101, 0b10000000]
    assert stage.decode(sent, backend).values.tolist() == [1, -1, -1, 1, 1, 1, -1, 1, 1]
    assert left.tolist() == [-0.25, 1.5, 0, -0.25, 1, 0, 0, 0, -0.25]


@each_backend
def test_majority_of_votes(backend: Backend) -> None:
    """Reference §4.14: an even number of voters may tie, which is 0."""
    stage = Majority()
    voters = [f4(3, -1, 2, -5), f4(0.1, -2, -1, 7), f4(-9, -3, 1, -1), f4(5, 4, -1, 0.5)]
    votes = np.zeros(4, np.float32)
    for voter in voters:
        stage.add(encoded(stage, voter, backend), 1.0, votes, backend)
    assert votes.tolist() == [2, -2, 0, 0]
    assert majority(votes, backend).tolist() == [1, -1, 0, 0]
    square = majority(votes.astype(np.float64).reshape(2, 2), backend)
    assert (square.tolist(), square.dtype) == ([[1, -1], [0, 0]], np.float32)
    assert majority(np.zeros((0, 3), np.float32), backend).shape == (0, 3)


@each_backend
def test_a_majority_may_go_where_the_mean_does_not(backend: Backend) -> None:
    """Reference §3, signSGD failure 1: a mean of 1/4 and a mean sign of −1/2; error feedback has
    the mean."""
    draws = f4(4, -1, -1, -1)
    signs = [float(decoded(Majority(), draws[i : i + 1], backend)[0]) for i in range(4)]
    assert (draws.mean(), np.mean(signs)) == (0.25, -0.5)
    assert majority(f4(sum(signs)), backend).tolist() == [-1]
    total, residual = 0.0, None
    for i in range(4):
        sent, residual, _ = OneBit().encode_residual(
            dense(draws[i : i + 1]), residual, (), 0, backend
        )
        total += float(OneBit().decode(sent, backend).values[0])
    assert total / 4 == 0.25


# --- MXNet's residual ---------------------------------------------------------------------------


@each_backend
@each_built_in
def test_what_mxnet_sends_and_keeps_is_what_was_given(stage: Stage, backend: Backend) -> None:
    chance = np.random.default_rng(5)
    state = stage.start((10, 70))
    given_, received = np.zeros(700), np.zeros(700)
    for _ in range(30):
        gradient = (0.5 * chance.standard_normal((10, 70))).astype(np.float32)
        sent, state = stage.encode(dense(gradient), state, 0, backend)
        given_ += gradient.reshape(-1)
        received += stage.decode(sent, backend).values
    np.testing.assert_allclose(received + state[0], given_, atol=1e-3)


@given(
    st.sampled_from(BUILT_IN),
    st.lists(st.booleans(), min_size=1, max_size=6),
    st.integers(0, 2**32 - 1),
)
def test_a_step_that_does_not_count_is_taken_back(
    stage: Stage, chosen: list[bool], seed: int
) -> None:
    """What was received and what is kept are what counted, whichever steps were dropped."""
    steps: list[tuple[State, State, Array, Array]] = []
    state = stage.start((20,))
    for at in range(len(chosen)):
        old, gradient = state, normal(20, seed + at)
        sent, state = stage.encode(dense(gradient), old, 0, NUMPY)
        steps.append((old, state, gradient, stage.decode(sent, NUMPY).values))
    for (old, new, _, _), counts in zip(steps, chosen, strict=True):
        if not counts:
            state = stage.restore(state, old, new)
    counted = [step for step, counts in zip(steps, chosen, strict=True) if counts]
    given_ = sum((step[2].astype(np.float64) for step in counted), np.zeros(20))
    received = sum((step[3].astype(np.float64) for step in counted), np.zeros(20))
    np.testing.assert_allclose(received + state[0], given_, atol=1e-4)


@each_built_in
def test_the_last_step_is_taken_back_to_the_bit(stage: Stage) -> None:
    old = (normal(20),)
    _, new = stage.encode(dense(normal(20, 1)), old, 0, NUMPY)
    assert stage.restore(new, old, new)[0] is old[0]


def test_an_mxnet_codec_refuses_values_that_are_not_the_states() -> None:
    stage = MxTwoBit(0.5)
    with pytest.raises(ValueError, match=r"mx2bit: 5 values and a residual of 9"):
        stage.encode(dense(normal(5)), stage.start((9,)), 0, NUMPY)


# --- pitfalls -----------------------------------------------------------------------------------


@each_backend
@each_mean
@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_stay_zeros(stage: Stage, backend: Backend, size: int, zero: float) -> None:
    """D12: an all-zero tensor, three rounds, with and without error feedback."""
    x = np.full(size, zero, np.float32)
    residual: Array | None = None
    for _ in range(3):
        assert not decoded(stage, x, backend).any()
        sent, residual, _ = stage.encode_residual(dense(x), residual, (), 0, backend)
        assert not stage.decode(sent, backend).values.any()
        assert not residual.any()


@each_backend
def test_two_bits_send_zeros_as_zeros(backend: Backend) -> None:
    """D12: what is below the threshold is not sent, three rounds."""
    stage, state = MxTwoBit(0.5), (np.zeros(1000, np.float32),)
    for _ in range(3):
        sent, state = stage.encode(dense(np.zeros(1000, np.float32)), state, 0, backend)
        assert not sent.values.any()
        assert not stage.decode(sent, backend).values.any()
        assert not state[0].any()


@each_backend
@each_stage
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (1,), (2, 3)])
def test_any_shape_goes_there_and_back(
    stage: Stage, backend: Backend, shape: tuple[int, ...]
) -> None:
    """D04, D05: 0-d arrays and arrays without elements keep their shape."""
    x = np.full(shape, 0.75, np.float32)
    sent = encoded(stage, x, backend)
    back = stage.decode(sent, backend)
    assert (back.shape, back.values.size, back.values.dtype) == (shape, x.size, np.float32)
    if stage in MEANS:
        assert (back.values == 0.75).all()


@each_stage
@pytest.mark.parametrize("dtype", ["f2", ">f4", "f8"])
def test_other_floats_are_float32_in_a_codec(stage: Stage, dtype: str) -> None:
    """D15: halves and doubles are encoded as the float32 they become."""
    x = normal(300).astype(dtype)
    assert bits_of(decoded(stage, x)) == bits_of(decoded(stage, x.astype(np.float32)))


@each_backend
def test_workers_scales_are_their_own(backend: Backend) -> None:
    """D14: each payload is decoded with its own scale before the average is taken."""
    total = np.zeros(2, np.float32)
    for gradient in (f4(1, -1), f4(100, 50)):
        OneBit().add(encoded(OneBit(), gradient, backend), 0.5, total, backend)
    assert total.tolist() == [38, 37]


@each_backend
@each_mean
@pytest.mark.parametrize("value", [0.1, -3.3, 1e-30, 3e38, -3.4028235e38])
def test_equal_numbers_survive(stage: Stage, backend: Backend, value: float) -> None:
    """Reference §4.4: to the bit in whole blocks, as sums by halving are exact there."""
    x = np.full(3 * stage.block, value, np.float32)
    assert decoded(stage, x, backend).tolist() == x.tolist()
    one, left, _ = stage.encode_residual(dense(x[:1]), None, (), 0, backend)
    assert stage.decode(one, backend).values.tolist() == x[:1].tolist()
    assert left.tolist() == [0]


@each_backend
@each_stage
def test_bits_behind_the_last_element_are_zero_and_are_ignored(
    stage: Stage, backend: Backend
) -> None:
    """Reference §4.6."""
    for size in (1, 3, 9, 261):
        sent = encoded(stage, np.full(size, -7, np.float32), backend)
        used = 8 * size // stage.each if isinstance(stage, (MxTwoBit,)) else size
        order = "big" if isinstance(stage, (MxOneBit, MxTwoBit)) else "little"
        every = np.unpackbits(sent.values, bitorder=order)
        assert not every[used:].any()
        before = stage.decode(sent, backend).values.tolist()
        every[used:] = 1
        sent.values[...] = np.packbits(every, bitorder=order)
        assert stage.decode(sent, backend).values.tolist() == before
        total = np.zeros(size, np.float32)
        stage.add(sent, 1.0, total, backend)
        assert total.tolist() == before


@each_backend
@each_mean
@pytest.mark.parametrize("magnitude", [1e-30, 1e-35, 2e-36, 1e-37, 1e-40, 1e-44])
def test_subnormal_residuals_do_no_harm(stage: Stage, backend: Backend, magnitude: float) -> None:
    """Reference §4.1: gradients that stop leave residuals that shrink to float32's smallest
    numbers; what is too small to be sent stays as it is."""
    residual = (normal(520) * magnitude).astype(np.float32)
    nothing = dense(np.zeros(520, np.float32))
    for _ in range(60):
        before = residual
        sent, residual, _ = stage.encode_residual(nothing, before, (), 0, backend)
        assert sent.scales is not None
        assert np.isfinite(residual).all()
        sizes = np.abs(sent.scales)
        assert ((sizes == 0) | (sizes >= np.float32(1.5e-36))).all()
        if not sizes.any():
            np.testing.assert_array_equal(residual, before)
    assert np.abs(residual).max() <= 6 * magnitude
    assert bool(sent.scales.any()) == (magnitude == 1e-30)


@each_backend
def test_tiny_gradients_have_a_tiny_mean(backend: Backend) -> None:
    """Reference §4.1: no number is added to a scale."""
    sent = encoded(OneBit(), f4(1e-9, 2e-9, -3e-9), backend)
    assert sent.scales is not None
    assert float(sent.scales[0]) == pytest.approx(2e-9, rel=1e-6)


@each_backend
@each_mean
def test_numbers_near_the_largest_have_a_finite_mean(stage: Stage, backend: Backend) -> None:
    x = np.where(np.arange(600) % 3 == 0, -3.4e38, 3.2e38).astype(np.float32)
    values = decoded(stage, x, backend)
    assert np.isfinite(values).all()
    means = {OneBit: (-3.2667e38, 3.2667e38), TwoMeans: (-3.4e38, 3.2e38)}[type(stage)]
    assert values[0] == pytest.approx(means[0], rel=1e-2)
    assert values[1] == pytest.approx(means[1], rel=1e-2)


@OVERFLOWS
@each_backend
@each_stage
def test_what_is_no_number_breaks_nothing(stage: Stage, backend: Backend) -> None:
    """D17: NaN and Inf are refused before a codec; here they must only not crash, and no scale may
    make other elements infinite."""
    x = normal(600)
    x[3], x[300], x[301] = np.nan, np.inf, -np.inf
    sent = encoded(stage, x, backend)
    assert sizes_are_right(stage, sent, 600)
    assert np.isfinite(stage.decode(sent, backend).values).all()


# --- counts, errors, texts ----------------------------------------------------------------------


@each_backend
@each_mean
def test_the_values_of_a_sparsifier_are_counted(stage: Stage, backend: Backend) -> None:
    indices = np.arange(0, 3000, 10, dtype=np.uint32)[:13]
    chosen = Packed(normal(13), (60, 50), indices, None, 77, 13)
    sent, _ = stage.encode(chosen, (), 0, backend)
    assert sizes_are_right(stage, sent, 13)
    back = stage.decode(sent, backend)
    assert bits_of(back.values) == bits_of(decoded(stage, chosen.values))
    assert (back.shape, back.indices is indices, back.seed, back.kept) == ((60, 50), True, 77, 13)


@each_backend
@each_stage
def test_kernels_are_not_given_less_than_they_read(stage: Stage, backend: Backend) -> None:
    sent = encoded(stage, normal(600), backend)
    short = Packed(sent.values[:-1], (600,), None, sent.scales)
    with pytest.raises(ValueError, match=r"codes and \d+ scales for 600 values"):
        stage.decode(short, backend)
    with pytest.raises(ValueError, match=r"codes and \d+ scales for (599|500) values"):
        stage.add(sent, 1.0, np.zeros(500, np.float32), backend)
    if sent.scales is not None:
        short = Packed(sent.values, (600,), None, sent.scales[:-1])
        with pytest.raises(ValueError, match=r"codes and \d+ scales for 600 values"):
            stage.add(short, 1.0, np.zeros(600, np.float32), backend)


@pytest.mark.parametrize("block", [0, -256, 32, 100, 8192, 256.0])
@pytest.mark.parametrize("stage", [OneBit, TwoMeans])
def test_blocks_that_cannot_be_are_refused(stage: type[OneBit | TwoMeans], block: int) -> None:
    with pytest.raises(ValueError, match=rf"{stage.name}: block {block}; .* from 64 to 4096"):
        stage(block)


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1e-31, 1e31, float("nan"), float("inf")])
@pytest.mark.parametrize("stage", [MxOneBit, MxTwoBit])
def test_thresholds_that_cannot_be_are_refused(
    stage: type[MxOneBit | MxTwoBit], threshold: float
) -> None:
    with pytest.raises(ValueError, match=rf"{stage.name}: threshold .* from 1e-30 to 1e\+30"):
        stage(threshold)


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (OneBit(), "onebit"),
        (OneBit(1024), "onebit:1024"),
        (TwoMeans(64), "twomeans:64"),
        (Majority(), "majority"),
        (MxOneBit(), "mx1bit"),
        (MxOneBit(0.1), "mx1bit:0.1"),
        (MxTwoBit(0.5), "mx2bit:0.5"),
        (MxTwoBit(4), "mx2bit:4"),
        (MxTwoBit(1 / 3), "mx2bit:0.3333333333333333"),
    ],
)
def test_texts_have_what_is_not_usual(stage: Stage, text: str) -> None:
    assert stage.text == text
