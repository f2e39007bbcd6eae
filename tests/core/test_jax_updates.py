"""What is added to old values gives the new ones, as far as that can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from zkv_workers.jax_updates import difference, strays, update_dtype

ml_dtypes = pytest.importorskip("ml_dtypes")

DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype("f4"), np.dtype("f8")]
HALVES = DTYPES[:2]
BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}

dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**32)


def drawn(dtype, chance, size=400):
    """Finite values of all magnitudes that are normal numbers, and zeros."""
    most = {2: 4, 4: 30, 8: 300}[dtype.itemsize]
    values = chance.standard_normal(size) * 10.0 ** chance.uniform(-most, most, size)
    values[:20] = 0
    return values.astype(dtype)


def near(dtype, chance):
    """Values of about the size that parameters have."""
    return (chance.standard_normal(400) * 2.0 ** chance.integers(-6, 4, 400)).astype(dtype)


def applied(old, update):
    """What `optax.apply_updates` does."""
    return (old.astype(update.dtype) + update).astype(old.dtype)


@given(dtypes, seeds)
def test_what_one_rounded_addition_gave_is_given_again(dtype, seed):
    chance = np.random.default_rng(seed)
    old, step = near(dtype, chance), near(dtype, chance)
    new = (old.astype(update_dtype(dtype)) + step.astype(update_dtype(dtype))).astype(dtype)
    np.testing.assert_array_equal(applied(old, difference(old, new)[0]), new)


@given(dtypes, seeds)
def test_values_between_half_and_twice_the_old_ones_are_exact(dtype, seed):
    chance = np.random.default_rng(seed)
    old = near(dtype, chance)
    new = (old.astype("f8") * chance.uniform(0.51, 1.99, old.size)).astype(dtype)
    assume(np.all(new != 0))  # float16 rounds one in some ten million to zero.
    np.testing.assert_array_equal(applied(old, difference(old, new)[0]), new)


@given(st.sampled_from(HALVES), seeds)
def test_narrow_values_are_exact_down_to_a_thousandth_and_across_zero(dtype, seed):
    chance = np.random.default_rng(seed)
    old = near(dtype, chance)
    new = (old.astype("f8") * chance.uniform(1e-3, 1e3, old.size)).astype(dtype)
    new = np.where(chance.random(old.size) < 0.5, new, -new)
    kept = np.isfinite(new.astype("f8"))
    got = applied(old, difference(old, new)[0])
    np.testing.assert_array_equal(got[kept], new[kept])


@given(dtypes, seeds)
def test_all_others_are_off_by_one_unit_of_the_larger_at_most(dtype, seed):
    chance = np.random.default_rng(seed)
    old, new = drawn(dtype, chance), drawn(dtype, chance)
    got = applied(old, difference(old, new)[0]).astype("f8")
    larger = np.maximum(np.abs(old), np.abs(new)).astype(dtype)
    above = (larger.view(BITS[dtype.itemsize]) + BITS[dtype.itemsize](1)).view(dtype)
    unit = above.astype("f8") - larger.astype("f8")
    finite = np.isfinite(unit)
    assert np.all(np.abs(got - new.astype("f8"))[finite] <= unit[finite])


@given(dtypes, seeds)
def test_what_was_applied_strays_by_no_more_than_the_error_and_anything_else_does(dtype, seed):
    chance = np.random.default_rng(seed)
    old, new = drawn(dtype, chance), drawn(dtype, chance)
    update, error = difference(old, new)
    got = applied(old, update)
    assert not strays(got, new, error)
    assert (error == 0) == np.array_equal(got, new)
    assert strays(np.where(np.arange(400) == 7, dtype.type(1), got), new * 0, error=0.5)


def test_a_value_that_lost_its_low_bits_cannot_be_had_and_the_nearest_is():
    old, new = np.float32([1]), np.float32([1e-10])
    assert difference(old, new)[0] == np.float32([-1])


@pytest.mark.parametrize("sign", [1, -1])
def test_a_power_of_two_that_the_rounded_difference_misses_is_found_beside_it(sign):
    old, new = np.float32([-sign * 2.0**-24]), np.float32([sign])
    assert old + (new - old) != new
    assert old + difference(old, new)[0] == new


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_and_unknown_values_are_reached(dtype):
    old = np.array([1, 1, 1], dtype)
    new = np.array([np.inf, -np.inf, np.nan], dtype)
    got = applied(old, difference(old, new)[0])
    np.testing.assert_array_equal(got.astype("f8"), new.astype("f8"))


def test_a_number_too_small_to_be_normal_counts_as_zero_and_nan_as_nan():
    given = np.array([1e-40, np.nan, np.inf], np.float32)
    assert not strays(given, np.array([0, np.nan, np.inf], np.float32), 0.0)
    assert strays(given, np.array([0, 0, np.inf], np.float32), 0.0)
    assert strays(given, np.array([0, np.nan, 0], np.float32), 1.0)


def test_shapes_are_kept():
    for shape in ((), (0,), (2, 3)):
        old = np.zeros(shape, np.float32)
        assert difference(old, old + 1)[0].shape == shape
