"""Sums in a fixed order: the bits depend on the list of contributions and on nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv import weighted_mean
from zkv.dtypes import Array
from zkv.sums import divided, tree_sum, weighted

FLOATS = (np.float32, np.float64)
counts = st.integers(0, 40)
seeds = st.integers(0, 2**32 - 1)


def terms(count: int, seed: int, dtype: Any = np.float32) -> list[Array]:
    chance = np.random.default_rng(seed)
    scales = 10.0 ** chance.integers(-6, 7, (count, 1))
    return list((chance.normal(size=(count, 5)) * scales).astype(dtype))


def written_out(start: int, stop: int) -> str:
    """The tree as text, by its definition: split at the largest power of two below the size."""
    size = stop - start
    if size == 1:
        return str(start)
    half = max(2**k for k in range(size.bit_length()) if 2**k < size)
    return f"({written_out(start, start + half)}+{written_out(start + half, stop)})"


class Text(str):
    """A term that adds up to the text of the sum."""

    def __add__(self, other: str) -> Text:
        return Text(f"({self!s}+{other!s})")

    __iadd__ = __add__


@given(count=st.integers(1, 40))
def test_the_tree_splits_at_the_largest_power_of_two_below_the_count(count: int) -> None:
    assert tree_sum(lambda at: Text(at), count) == written_out(0, count)  # type: ignore[arg-type,return-value]


def test_the_tree_of_seven_terms_written_out() -> None:
    assert written_out(0, 7) == "(((0+1)+(2+3))+((4+5)+6))"
    assert tree_sum(lambda at: Text(at), 7) == "(((0+1)+(2+3))+((4+5)+6))"  # type: ignore[arg-type,return-value]


@given(count=st.integers(1, 3), seed=seeds, dtype=st.sampled_from(FLOATS))
def test_up_to_three_terms_are_added_from_left_to_right(count: int, seed: int, dtype: Any) -> None:
    given_terms = terms(count, seed, dtype)
    expected = given_terms[0].copy()
    for term in given_terms[1:]:
        expected = expected + term
    found = tree_sum(lambda at: given_terms[at].copy(), count)
    assert found is not None
    assert found.dtype == dtype
    assert found.tobytes() == expected.tobytes()


@given(count=st.integers(1, 20), seed=seeds, order=st.randoms(use_true_random=False))
def test_the_bits_do_not_depend_on_what_came_first(count: int, seed: int, order: Any) -> None:
    given_terms = terms(count, seed)
    arrived: dict[int, Array] = {}
    for at in order.sample(range(count), count):
        arrived[at] = given_terms[at].copy()
    found = tree_sum(lambda at: arrived[at].copy(), count)
    again = tree_sum(lambda at: given_terms[at].copy(), count)
    assert found is not None
    assert again is not None
    assert found.tobytes() == again.tobytes()


@given(count=counts, seed=seeds, data=st.data())
def test_an_absent_term_is_as_if_it_were_zero(count: int, seed: int, data: st.DataObject) -> None:
    given_terms = terms(count, seed)
    here = data.draw(st.sets(st.sampled_from(range(count)))) if count else set()
    found = tree_sum(lambda at: given_terms[at].copy() if at in here else None, count)
    zeros = tree_sum(
        lambda at: given_terms[at].copy() if at in here else np.full(5, -0.0, np.float32), count
    )
    if not here:
        assert found is None
        return
    assert found is not None
    assert zeros is not None
    assert found.tobytes() == zeros.tobytes()


@given(count=st.integers(1, 20), seed=seeds, dtype=st.sampled_from(FLOATS))
def test_the_sum_is_close_to_the_exact_one(count: int, seed: int, dtype: Any) -> None:
    given_terms = terms(count, seed, dtype)
    found = tree_sum(lambda at: given_terms[at].copy(), count)
    exact = np.sum(np.asarray(given_terms, np.longdouble), axis=0)
    size = np.sum(np.abs(np.asarray(given_terms, np.longdouble)), axis=0)
    # log2(n) roundings lie on the way from a leaf to the root.
    depth = count.bit_length()
    assert found is not None
    assert np.all(np.abs(found - exact) <= depth * np.finfo(dtype).eps * size)


def test_batches_of_32_32_32_and_16_samples_give_2_857143() -> None:
    gradients = [np.array([mean], np.float32) for mean in (1, 2, 3, 8)]
    mean = weighted_mean(gradients, [32, 32, 32, 16])
    assert mean.dtype == np.float32
    assert mean[0] == np.float32(320 / 112)
    assert f"{mean[0]:.6f}" == "2.857143"
    # The plain mean of the means, 3.5, is what unequal batches must not give.
    assert weighted_mean(gradients, [1, 1, 1, 1])[0] == 3.5


def test_float64_gradients_are_summed_in_float64() -> None:
    gradients = [np.array([1.0]), np.array([1e-12])]
    assert weighted_mean(gradients, [1, 1])[0] == (1.0 + 1e-12) / 2


@given(seed=seeds, weight=st.sampled_from([1.0, 3.0, 32.0, 0.1]), dtype=st.sampled_from(FLOATS))
def test_a_weighted_term_is_a_fresh_array_of_the_gradients_dtype(
    seed: int, weight: float, dtype: Any
) -> None:
    (gradient,) = terms(1, seed, dtype)
    before = gradient.copy()
    product = weighted(gradient, weight)
    assert product.dtype == dtype
    assert product.tobytes() == (gradient * dtype(weight)).tobytes()
    assert not np.shares_memory(product, gradient)
    assert gradient.tobytes() == before.tobytes()


def test_the_division_is_rounded_once() -> None:
    # In float32 the divisor 2**24 + 1 would first be rounded to 2**24.
    total, by = np.array([2.0**24 + 2], np.float32), 2.0**24 + 1
    assert divided(total, by)[0] == np.float32((2.0**24 + 2) / (2.0**24 + 1))
    assert divided(total, 1.0) is total


def test_overflow_is_an_infinity_and_no_warning() -> None:
    huge = np.array([3e38], np.float32)
    assert np.isinf(weighted_mean([huge, huge], [2.0, 2.0])[0])
    assert np.isinf(divided(huge, 1e-3)[0])


def test_a_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one gradient"):
        weighted_mean([], [])
