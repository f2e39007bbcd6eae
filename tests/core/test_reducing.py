"""Local reduction carried out, on NumPy's arrays as stand-ins for devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zkv.reduction import InParts, OnCpu, OneDevice, Ring
from zkv.sums import weighted_mean
from zkv_workers.reducing import (
    HOST_SITE,
    Reduced,
    all_reduced,
    broadcast,
    owned,
    reduced,
    weights_of,
)

Array = np.ndarray[Any, Any]

STRATEGIES = [OneDevice(), OneDevice(1), OnCpu(), InParts(), Ring()]


def strategies_for(devices: int) -> list[Any]:
    usable = [one for one in STRATEGIES if one != OneDevice(1) or devices > 1]
    return [*usable, Ring(tuple(range(devices))[::-1])]


@st.composite
def gradients(draw: Any, kinds: tuple[str, ...] = ("f4", "f8")) -> list[Array]:
    """The same shape on one to six devices, small, empty and not divisible sizes included."""
    devices, dtype = draw(st.integers(1, 6)), np.dtype(draw(st.sampled_from(kinds)))
    shape = draw(st.sampled_from([(), (0,), (1,), (3,), (2, 5), (0, 4), (37,)]))
    numbers = st.floats(-1e6, 1e6, width=32 if dtype.itemsize > 2 else 16)
    if dtype.itemsize == 2:
        numbers = st.floats(-100, 100, width=16)
    return [draw(hnp.arrays(dtype, shape, elements=numbers)) for _ in range(devices)]


def total_of(arrays: list[Array], samples: list[float] | None = None) -> tuple[Array, Array]:
    """The float64 sum, and the bound of a sum in the arrays' dtype: n·eps·Σ|x|."""
    weights = [1.0] * len(arrays) if samples is None else samples
    terms = np.stack([w * a.astype(np.float64) for w, a in zip(weights, arrays, strict=True)])
    # A product that is rounded counts as one more term.
    count = len(arrays) + (samples is not None)
    bound = count * np.finfo(arrays[0].dtype).eps * np.abs(terms).sum(axis=0)
    return terms.sum(axis=0), bound


@given(gradients(), st.data())
def test_every_strategy_gives_the_sum_to_rounding_on_every_device(
    arrays: list[Array], data: Any
) -> None:
    strategy = data.draw(st.sampled_from(strategies_for(len(arrays))))
    before = [one.copy() for one in arrays]
    sums = all_reduced(arrays, strategy)
    exact, bound = total_of(arrays)
    for one, array, was in zip(sums, arrays, before, strict=True):
        assert (one.shape, one.dtype) == (array.shape, array.dtype)
        assert (np.abs(one.astype(np.float64) - exact) <= bound).all()
        assert one.tobytes() == sums[0].tobytes()
        assert array.tobytes() == was.tobytes()
        assert not np.may_share_memory(one, array)


@given(gradients(), st.data())
def test_the_bits_are_those_of_the_sum_from_the_left_in_the_plans_order(
    arrays: list[Array], data: Any
) -> None:
    strategy = data.draw(st.sampled_from(strategies_for(len(arrays))))
    done = reduced([owned(one, 1.0, HOST_SITE) for one in arrays], strategy)
    flat = [one.reshape(-1) for one in arrays]
    for number, part in enumerate(done.parts):
        order = done.plan.order(number)
        expected = flat[order[0]][part.start : part.stop].copy()
        for device in order[1:]:
            expected = expected + flat[device][part.start : part.stop]
        assert np.asarray(part.values).tobytes() == expected.tobytes()


@given(gradients())
def test_a_ring_and_parts_give_the_same_bits(arrays: list[Array]) -> None:
    ring, parts = all_reduced(arrays, Ring()), all_reduced(arrays, InParts())
    assert ring[0].tobytes() == parts[0].tobytes()


@given(gradients(("f4", "f8", "f2")), st.data())
def test_means_are_weighted_by_samples(arrays: list[Array], data: Any) -> None:
    strategy = data.draw(st.sampled_from(strategies_for(len(arrays))))
    count = len(arrays)
    samples = data.draw(
        st.lists(st.integers(0, 64), min_size=count, max_size=count).filter(any)
        | st.lists(st.just(32), min_size=count, max_size=count)
    )
    (mean, *_) = all_reduced(arrays, strategy, samples=samples, mean=True)
    exact, bound = total_of(arrays, samples)
    slack = 4 * np.finfo(arrays[0].dtype).eps * np.abs(exact) / sum(samples)
    tiny = np.finfo(arrays[0].dtype).smallest_subnormal
    assert (
        np.abs(mean.astype(np.float64) - exact / sum(samples))
        <= bound / sum(samples) + slack + tiny
    ).all()


def test_unequal_batches_are_weighted_as_the_overview_page_says() -> None:
    """32, 32, 32 and 16 samples with means 1, 2, 3 and 8: 2.857143, where the plain mean is 3.5."""
    arrays = [np.full(5, mean, np.float32) for mean in (1, 2, 3, 8)]
    samples = (32, 32, 32, 16)
    for strategy in strategies_for(4):
        for one in all_reduced(arrays, strategy, samples=samples, mean=True):
            assert np.array_equal(one, weighted_mean(arrays, samples))
            assert one[0] == pytest.approx(2.857143)


def test_equal_numbers_of_samples_are_a_plain_mean() -> None:
    assert weights_of(3, None) == weights_of(3, [7, 7, 7]) == ((1.0, 1.0, 1.0), 3.0)


@pytest.mark.parametrize("strategy", strategies_for(3))
def test_nan_and_inf_pass_through(strategy: Any) -> None:
    arrays = [np.ones(7, np.float32) for _ in range(3)]
    arrays[2][1], arrays[1][5], arrays[0][6], arrays[2][6] = np.nan, np.inf, np.inf, -np.inf
    for one in all_reduced(arrays, strategy):
        assert np.isnan(one[[1, 6]]).all()
        assert one[5] == np.inf
        assert (one[[0, 2, 3, 4]] == 3).all()


def test_float16_is_summed_in_float32_and_rounded_once() -> None:
    """Each step in float16 would lose the ones."""
    arrays = [np.full(3, value, np.float16) for value in (2048, 1, 1, 1, 1)]
    for strategy in strategies_for(5):
        assert (all_reduced(arrays, strategy)[0] == np.float16(2052)).all()


@given(gradients(), st.data())
def test_values_reach_every_device(arrays: list[Array], data: Any) -> None:
    strategy = data.draw(st.sampled_from(strategies_for(len(arrays))))
    values, into = arrays[0].copy(), [np.full_like(one, 7) for one in arrays]
    broadcast(values, into, strategy)
    assert all(one.tobytes() == values.tobytes() for one in into)


def test_parts_begin_at_cuts() -> None:
    """So that a block of 4 elements is encoded where it lies."""
    arrays = [np.arange(12, dtype=np.float32) for _ in range(2)]
    done: Reduced = reduced(
        [owned(one, 1.0, HOST_SITE) for one in arrays], InParts(), cuts=[0, 4, 8, 12]
    )
    assert [(part.start, part.stop) for part in done.parts] == [(0, 4), (4, 12)]
    assert np.concatenate([part.values for part in done.parts]).tolist() == [
        2 * x for x in range(12)
    ]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([], "there is no array to reduce"),
        (
            [np.zeros(2, "f4"), np.zeros(2, "f8")],
            "array 1 has dtype float64, and array 0 has float32",
        ),
        (
            [np.zeros(2, "f4"), np.zeros(3, "f4")],
            r"array 1 has shape \(3,\), and array 0 has \(2,\)",
        ),
        ([np.zeros(2, "i4")], "array 0 is of int32, and only float16, float32, float64 are summed"),
    ],
)
def test_arrays_that_do_not_fit_are_named(arrays: list[Array], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        all_reduced(arrays)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([1], "1 numbers of samples for 2 arrays"),
        ([1, -1], r"samples \[1.0, -1.0\]: they count"),
        ([0, 0], "not all are 0"),
        ([1, float("nan")], "they count"),
    ],
)
def test_samples_that_do_not_count_are_refused(samples: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        all_reduced([np.zeros(2, "f4")] * 2, samples=samples, mean=True)


@pytest.mark.parametrize(
    ("into", "message"),
    [
        (np.zeros((4, 2), "f4"), r"array 1 has shape \(4, 2\) and dtype float32, and the values"),
        (np.zeros((2, 4), "f8"), "and dtype float64, and the values have"),
        (np.zeros((4, 2), "f4").T, "array 1 is not C-contiguous"),
    ],
)
def test_values_go_into_arrays_like_themselves_only(into: Array, message: str) -> None:
    values = np.ones((2, 4), np.float32)
    with pytest.raises(ValueError, match=message):
        broadcast(values, [values.copy(), into])
