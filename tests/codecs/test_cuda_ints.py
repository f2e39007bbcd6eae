"""CUDA's block integers, on the CPU and on a device: the bits of NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_on_cpu import family
from hypothesis import given
from hypothesis import strategies as st
from strategies_codecs import float_arrays, orders

from zkv.dtypes import Array

ints = family("ints")
codecs = pytest.mark.parametrize("codec", ["int8", "int4", "uint8"])
blocks = st.sampled_from([2, 32, 34, 100, 256, 258, 1024])
weights = st.sampled_from([1.0, 0.5, -3.0, 1 / 3])


def room(codec: str, x: Array, block: int) -> tuple[Array, Array]:
    """Room for codes and scales, full of what must not be left."""
    count = -(-x.size // 2) if codec == "int4" else x.size
    scales = -(-x.size // block) * (2 if codec == "uint8" else 1)
    dtype = np.int8 if codec == "int8" else np.uint8
    return np.full(count, 77, dtype), np.full(scales, np.nan, np.float32)


@codecs
@given(order=orders, drawn=float_arrays(1), block=blocks, weight=weights)
def test_codes_and_what_they_stand_for(ints, codec, order, drawn, block, weight):
    x, total = drawn[0], drawn[0][::-1].copy()
    made = ints.same(f"{codec}_encode", x, block, *room(codec, x, block), order=order)
    codes, scales = made[2:]
    for array in codes, scales:
        array.setflags(write=False)
    ints.same(f"{codec}_decode", codes, scales, block, np.empty_like(x), order=order)
    ints.same(f"{codec}_add", codes, scales, block, weight, total, order=order)


@codecs
@given(order=orders, drawn=float_arrays(2), block=blocks)
def test_codes_with_a_residual(ints, codec, order, drawn, block):
    x, e = drawn
    out = np.empty_like(x)
    ints.same(f"{codec}_encode_residual", x, e, block, *room(codec, x, block), out, order=order)


@codecs
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_numbers(ints, codec, sign):
    x = np.float32(sign * np.finfo(np.float32).max) * np.linspace(1, 0.9, 300, dtype=np.float32)
    codes, scales = ints.same(f"{codec}_encode", x, 256, *room(codec, x, 256))[2:]
    ints.same(f"{codec}_decode", codes, scales, 256, np.empty_like(x))
