"""Element types: bits on the wire and back, against ml_dtypes and NumPy for every pattern."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zkv.dtypes import DTYPES, Array, all_finite, dtype_of, narrow, stored_view, user_view, widen

ml_dtypes = pytest.importorskip("ml_dtypes")
BF16 = DTYPES["bfloat16"]
INTEGERS = [name for name, dtype in DTYPES.items() if not dtype.floating]


def same(one: Array, two: Array) -> bool:
    return one.dtype == two.dtype and one.tobytes() == two.tobytes()


def test_bfloat16_widens_as_ml_dtypes_does_for_all_65536_patterns() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    assert same(widen(bits, BF16), bits.view(ml_dtypes.bfloat16).astype(np.float32))


def test_bfloat16_narrows_back_to_itself_for_all_65536_patterns() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    back = narrow(widen(bits, BF16), BF16)
    nan = np.isnan(widen(bits, BF16))
    assert np.array_equal(back[~nan], bits[~nan])
    assert np.isnan(widen(back[nan], BF16)).all()
    # A NaN stays one of the same sign.
    assert np.array_equal(back[nan] >> 15, bits[nan] >> 15)


@given(st.integers(0, 2**32 - 1))
def test_bfloat16_rounds_to_nearest_even_as_ml_dtypes_does(seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 2**32, 4096, dtype=np.uint32)
    # Half of them near the middle between two values, where ties and carries are.
    bits[::2] = (bits[::2] & np.uint32(0xFFFF0000)) | np.uint32(0x7FFE) + bits[::2] % 5
    floats = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = floats.astype(ml_dtypes.bfloat16).view(np.uint16)
    found = narrow(floats, BF16)
    nan = np.isnan(floats)
    assert np.array_equal(found[~nan], expected[~nan])
    assert np.isnan(widen(found[nan], BF16)).all()


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x3F808000, 0x3F80),  # a tie goes to the even neighbour below
        (0x3F818000, 0x3F82),  # and above
        (0x3F808001, 0x3F81),
        (0x7F7FFFFF, 0x7F80),  # the largest float32 becomes an infinity
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
        (0x7F800001, 0x7FC0),  # a NaN whose payload would be cut off stays a NaN
        (0x7FFFFFFF, 0x7FFF),  # a NaN that would round over the sign bit
        (0x80000000, 0x8000),  # minus zero
        (0x00000001, 0x0000),
    ],
    ids=hex,
)
def test_bfloat16_cases_in_bits(bits: int, expected: int) -> None:
    assert int(narrow(np.array([bits], np.uint32).view(np.float32), BF16)[0]) == expected


def test_float16_widens_and_narrows_for_all_65536_patterns() -> None:
    row = DTYPES["float16"]
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    wide = widen(halves, row)
    assert wide.dtype == np.float32
    back = narrow(wide, row)
    assert np.array_equal(np.isnan(back), np.isnan(halves))
    assert same(back[~np.isnan(halves)], halves[~np.isnan(halves)])
    assert np.isinf(narrow(np.array([1e6], np.float32), row)[0])


@given(name=st.sampled_from(INTEGERS), seed=st.integers(0, 2**32 - 1))
def test_integers_are_summed_wide_and_wrap_as_numpy_does(name: str, seed: int) -> None:
    row = DTYPES[name]
    raw = np.random.default_rng(seed).integers(0, 256, 64 * row.itemsize, dtype=np.uint8)
    stored = raw.view(row.stored)
    wide = widen(stored, row)
    assert wide.dtype == row.wide
    assert np.array_equal(wide, stored)
    assert same(narrow(wide, row), stored)
    # Two terms whose sum does not fit wrap around, as they would in the narrow type.
    assert same(narrow(wide + wide, row), stored + stored)


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_what_is_wide_already_is_not_copied(name: str) -> None:
    array = np.ones(3, name)
    assert widen(array, DTYPES[name]) is array
    assert narrow(array, DTYPES[name]) is array


@given(
    array=hnp.arrays(
        st.sampled_from([np.float16, np.float32, np.float64]),
        hnp.array_shapes(min_dims=1, max_dims=1, min_side=0, max_side=50),
        elements={"allow_nan": True, "allow_infinity": True},
    )
)
def test_finite_is_what_numpy_calls_finite(array: Array) -> None:
    assert all_finite(array, dtype_of(array)) == bool(np.isfinite(array).all())


@given(st.integers(0, 2**32 - 1), st.integers(0, 40))
def test_finite_bfloat16_is_what_numpy_calls_finite(seed: int, size: int) -> None:
    chance = np.random.default_rng(seed)
    bits = chance.integers(0, 65536, size, dtype=np.uint16)
    if chance.random() < 0.5:
        bits = bits[np.isfinite(widen(bits, BF16))]
    assert all_finite(bits, BF16) == bool(np.isfinite(widen(bits, BF16)).all())


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16"])
def test_large_numbers_whose_squares_overflow_are_finite(name: str) -> None:
    row = DTYPES[name]
    largest = np.array([np.finfo(row.wide).max / 2] * 3, row.wide)
    stored = narrow(largest, row)
    assert all_finite(stored, row)
    assert not all_finite(narrow(np.array([1, np.inf, 1], row.wide), row), row)
    assert not all_finite(narrow(np.array([1, np.nan, 1], row.wide), row), row)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_always_finite(name: str) -> None:
    assert all_finite(np.full(3, np.iinfo(name).max, name), DTYPES[name])


@given(
    name=st.sampled_from(list(DTYPES)),
    shape=hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_users_view_has_the_stored_bits(name: str, shape: tuple[int, ...], seed: int) -> None:
    row = DTYPES[name]
    size = int(np.prod(shape))
    raw = np.random.default_rng(seed).integers(0, 256, size * row.itemsize, dtype=np.uint8)
    array = user_view(raw.view(row.stored), row).reshape(shape)
    assert dtype_of(array) is row
    assert array.dtype.name == name
    flat = stored_view(array, row)
    assert (flat.ndim, flat.dtype) == (1, row.stored)
    assert flat.tobytes() == raw.tobytes() == array.tobytes()


def test_another_byte_order_is_turned_around() -> None:
    array = np.array([1.5, -2.0], ">f4")
    row = dtype_of(array)
    assert row is DTYPES["float32"]
    assert stored_view(array, row).tolist() == [1.5, -2.0]
    assert stored_view(array, row).dtype.isnative


@pytest.mark.parametrize(
    "dtype", [object, bool, complex, "U3", "S3", "M8[s]", "m8[s]", "f4,f4", np.longdouble], ids=str
)
def test_other_dtypes_do_not_travel(dtype: Any) -> None:
    with pytest.raises(TypeError, match="does not travel; use one of float16, bfloat16, float32"):
        dtype_of(np.zeros(1, dtype))


def test_the_table_says_how_sums_are_computed() -> None:
    wide = {name: row.wide.name for name, row in DTYPES.items()}
    assert wide == {
        "float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64",
        "int8": "int64", "int16": "int64", "int32": "int64", "int64": "int64",
        "uint8": "uint64", "uint16": "uint64", "uint32": "uint64", "uint64": "uint64",
    }  # fmt: skip
    assert [name for name, row in DTYPES.items() if row.half] == ["float16", "bfloat16"]
