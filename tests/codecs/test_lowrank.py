"""PowerSGD: what is sent is a projection of the gradient, and no gradient spoils the next start."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv.dtypes import Array
from zkv_codecs.backend import NUMPY
from zkv_codecs.lowrank import PowerSgd
from zkv_codecs.packed import Packed, Sizes, State, dense

FLOAT = np.dtype(np.float32)

seeds = st.integers(0, 2**32 - 1)
extents = st.integers(0, 40)
shapes = st.lists(st.integers(0, 14), max_size=4).map(tuple) | st.tuples(extents, extents)
ranks = st.integers(1, 5)


def matrix(shape: tuple[int, ...], seed: int, rank: int | None = None) -> Array:
    """Normal entries, or a product of normal factors of this rank."""
    chance = np.random.default_rng(seed)
    if rank is None:
        return chance.normal(size=shape).astype(np.float32)
    left, right = chance.normal(size=(shape[0], rank)), chance.normal(size=(rank, shape[1]))
    return (left @ right).astype(np.float32)


def sent(codec: PowerSgd, array: Array, state: State | None = None) -> tuple[Packed, State]:
    state = codec.start(array.shape) if state is None else state
    return codec.encode(dense(array), state, 0, NUMPY)


def decoded(codec: PowerSgd, packed: Packed) -> Array:
    return codec.decode(packed, NUMPY).values.reshape(packed.shape)


def norm(array: Array) -> float:
    return float(np.linalg.norm(array.astype(np.float64)))


@given(shapes, ranks, seeds)
def test_sizes_are_what_encode_gives(shape, rank, seed):
    codec = PowerSgd(rank)
    packed, _ = sent(codec, matrix(shape, seed))
    given_sizes = Sizes(FLOAT, dense(np.zeros(shape, np.float32)).size)
    expected = codec.sizes_after(given_sizes, shape)
    assert (packed.values.dtype, packed.values.size) == (expected.dtype, expected.values)
    assert packed.scales is None
    assert expected.scales == 0
    assert expected.values <= given_sizes.values


def test_a_matrix_is_sent_as_factors_where_they_are_less_than_half():
    # 2 · (8 + 8) · 1 = 32 < 64, 2 · (8 + 8) · 2 = 64.
    assert PowerSgd(1).compresses((8, 8))
    assert not PowerSgd(2).compresses((8, 8))
    assert PowerSgd(1).sizes_after(Sizes(FLOAT, 64), (8, 8)) == Sizes(FLOAT, 16)
    assert PowerSgd(2).sizes_after(Sizes(FLOAT, 64), (8, 8)) == Sizes(FLOAT, 64)


def test_the_first_axis_is_rows_and_all_others_are_columns():
    """A layer of 64 filters of 32 × 3 × 3 is a matrix of 64 rows and 288 columns."""
    codec = PowerSgd(2)
    weights = matrix((64, 32 * 9), 1, rank=2).reshape(64, 32, 3, 3)
    packed, state = sent(codec, weights)
    assert packed.values.size == 2 * (64 + 288)
    assert state[0].shape == (288, 2)
    np.testing.assert_allclose(decoded(codec, packed), weights, atol=1e-4)


@pytest.mark.parametrize("shape", [(), (1,), (1000,), (1, 1000), (1000, 1), (0,), (3, 0), (0, 3)])
def test_what_is_no_matrix_arrives_bit_for_bit(shape):
    """D04, D05: arrays without axes or elements keep their shape."""
    codec = PowerSgd(1)
    array = matrix(shape, 3)
    packed, state = sent(codec, array)
    assert state == ()
    assert decoded(codec, packed).tobytes() == array.tobytes()
    assert codec.decode(packed, NUMPY).shape == shape


@given(st.integers(12, 60), st.integers(12, 60), st.integers(1, 3), st.integers(-25, 25), seeds)
def test_what_is_decoded_is_a_projection(rows, columns, rank, exponent, seed):
    """‖M − D‖² = ‖M‖² − ‖D‖²: never farther from M than nothing at all."""
    codec = PowerSgd(rank)
    array = matrix((rows, columns), seed) * np.float32(10.0**exponent)
    packed, _ = sent(codec, array)
    left = norm(array - decoded(codec, packed)) ** 2
    given_, kept = norm(array) ** 2, norm(decoded(codec, packed)) ** 2
    assert left == pytest.approx(given_ - kept, rel=1e-4)
    assert 0 < kept <= given_ * (1 + 1e-5)


@given(st.integers(20, 50), st.integers(20, 50), st.integers(0, 3), seeds)
def test_a_matrix_of_no_higher_rank_survives(rows, columns, rank, seed):
    array = matrix((rows, columns), seed, rank)
    packed, _ = sent(PowerSgd(3), array)
    # Columns that the first Q makes nearly parallel cost as many digits as their condition has.
    made = array.astype(np.float64) @ PowerSgd(3).start(array.shape)[0]
    sizes = np.linalg.svd(made, compute_uv=False)[: max(rank, 1)]
    condition = float(sizes[0] / sizes[-1]) if sizes[-1] else 1.0
    bound = 1e-6 * max(100.0, condition) * float(np.abs(array).max(initial=1.0))
    np.testing.assert_allclose(decoded(PowerSgd(3), packed), array, atol=bound)


def test_a_product_of_two_vectors_worked_out():
    """M = u vᵀ with |u| = 3: P = ±u / 3, Q = Mᵀ P = ±3 v; sent as 4 P and Q / 4, alike in size."""
    u = np.array([1, 2, 2, 0, 0, 0], np.float32)
    v = np.arange(1, 8, dtype=np.float32)
    codec = PowerSgd(1)
    packed, _ = sent(codec, np.outer(u, v))
    sign = np.sign(packed.values[0])
    np.testing.assert_allclose(packed.values[:6] * sign, 4 * u / 3, atol=1e-6)
    np.testing.assert_allclose(packed.values[6:] * sign, 3 * v / 4, rtol=1e-6)
    np.testing.assert_allclose(decoded(codec, packed), np.outer(u, v), atol=1e-5)


def test_steps_on_one_matrix_approach_the_best_approximation():
    """The paper's reason for the warm start: without it the error stays that of a random start."""
    chance = np.random.default_rng(5)
    left, _ = np.linalg.qr(chance.normal(size=(60, 40)))
    right, _ = np.linalg.qr(chance.normal(size=(40, 40)))
    spectrum = 0.8 ** np.arange(40)
    array = (left * spectrum @ right.T).astype(np.float32)
    best = float(np.sqrt((spectrum[4:] ** 2).sum()))
    codec = PowerSgd(4)
    state = codec.start(array.shape)
    errors = []
    for _ in range(30):
        packed, state = sent(codec, array, state)
        errors.append(norm(array - decoded(codec, packed)))
    assert errors[0] > 1.2 * best
    assert errors[-1] == pytest.approx(best, rel=1e-3)
    assert all(later <= earlier * (1 + 1e-5) for earlier, later in pairwise(errors))


@given(st.integers(10, 30), st.integers(10, 30), st.integers(1, 6), seeds)
def test_all_that_is_given_is_sent_sooner_or_later(rows, columns, steps, seed):
    """Σ decode(sent) + residual = Σ given, to rounding."""
    codec = PowerSgd(1)
    state, residual = codec.start((rows, columns)), None
    total_given = np.zeros(rows * columns)
    total_sent = np.zeros(rows * columns)
    for step in range(steps):
        gradient = dense(matrix((rows, columns), seed + step))
        packed, residual, state = codec.encode_residual(gradient, residual, state, 0, NUMPY)
        total_given += gradient.values
        total_sent += codec.decode(packed, NUMPY).values
    assert residual is not None
    np.testing.assert_allclose(total_sent + residual, total_given, atol=1e-5 * steps)


@pytest.mark.parametrize("spoiler", ["zeros", "rank one", "not a number", "infinite"])
def test_no_gradient_costs_a_direction(spoiler):
    """D12, D17: M · 0 = 0, so a start that vanished or is no number would stay so for ever."""
    shape = (30, 40)
    spoilers: dict[str, Any] = {
        "zeros": np.zeros(shape, np.float32),
        "rank one": matrix(shape, 7, rank=1),
        "not a number": np.full(shape, np.nan, np.float32),
        "infinite": np.where(matrix(shape, 7) > 2, np.inf, 1).astype(np.float32),
    }
    codec = PowerSgd(2)
    state = codec.start(shape)
    for _ in range(3):
        packed, state = sent(codec, spoilers[spoiler], state)
    if spoiler == "zeros":
        assert not decoded(codec, packed).any()
    wanted = matrix(shape, 8, rank=2)
    for _ in range(2):
        packed, state = sent(codec, wanted, state)
    np.testing.assert_allclose(decoded(codec, packed), wanted, atol=1e-4)


@given(seeds, st.sampled_from([1e-45, 1e-42, 1e-38, 1e-30, 1e30, 1e36, 1e37]))
def test_tiny_and_huge_entries_are_no_trouble(seed, magnitude):
    array = np.clip(matrix((30, 20), seed), -3, 3) * np.float32(magnitude)
    codec = PowerSgd(2)
    packed, state = sent(codec, array)
    assert np.isfinite(packed.values).all()
    assert np.isfinite(state[0]).all()
    # Each entry is rounded to a multiple of the smallest float32.
    rounded = np.sqrt(array.size) * 2.0**-149
    assert norm(array - decoded(codec, packed)) <= norm(array) * 1.001 + rounded


def test_the_largest_numbers_survive():
    largest = np.full((30, 40), np.float32(3e38))
    packed, _ = sent(PowerSgd(1), largest)
    np.testing.assert_allclose(decoded(PowerSgd(1), packed), largest, rtol=1e-5)


def test_neither_the_array_nor_the_state_is_written_to():
    array = matrix((30, 40), 2)
    codec = PowerSgd(2)
    state = codec.start(array.shape)
    before = state[0].copy()
    array.setflags(write=False)
    state[0].setflags(write=False)
    _, following = sent(codec, array, state)
    assert np.array_equal(state[0], before)
    assert not np.array_equal(following[0], before)


def test_all_starts_are_alike_and_their_columns_are_not():
    first, again = PowerSgd(2).start((90, 90))[0], PowerSgd(2).start((90, 90))[0]
    assert np.array_equal(first, again)
    assert abs(np.corrcoef(first.T)[0, 1]) < 0.5


def test_a_step_is_not_undone():
    codec = PowerSgd(1)
    old = codec.start((9, 9))
    _, new = sent(codec, matrix((9, 9), 1), old)
    assert codec.restore(new, old, new) is new


@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_below_one_is_refused(rank):
    with pytest.raises(ValueError, match=rf"powersgd: rank {rank}"):
        PowerSgd(rank)


def test_the_text_says_the_rank():
    assert PowerSgd(4).text == "powersgd:4"
    assert PowerSgd(4) == PowerSgd(4)
