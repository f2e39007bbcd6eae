"""CUDA's block integers, on the CPU and on a device: the bits of NumPy's."""

from __future__ import annotations

import numpy as np
from cuda_arrays import float_arrays, orders
from cuda_on_cpu import family
from hypothesis import given
from hypothesis import strategies as st

from zkv.dtypes import Array

blocks = st.sampled_from([1, 2, 31, 32, 33, 100, 256, 257, 1024])
weights = st.sampled_from([1.0, 0.5, -3.0, 1 / 3])


ints = family("ints")


def outputs(x: Array, block: int) -> tuple[Array, Array]:
    """Room for codes and scales, full of what must not be left."""
    return np.full(x.size, 77, np.int8), np.full(-(-x.size // block), np.nan, np.float32)


@given(orders, float_arrays(1), blocks, weights)
def test_int8(ints, order, drawn, block, weight):
    x, total = drawn[0], drawn[0][::-1].copy()
    wanted = ints.same("int8_encode", x, block, *outputs(x, block), order=order)
    codes, scales = wanted[2:]
    for array in codes, scales:
        array.setflags(write=False)
    ints.same("int8_decode", codes, scales, block, np.empty_like(x), order=order)
    ints.same("int8_add", codes, scales, block, weight, total, order=order)


@given(orders, float_arrays(2), blocks)
def test_int8_with_a_residual(ints, order, drawn, block):
    x, e = drawn
    room = outputs(x, block)
    ints.same("int8_encode_residual", x, e, block, *room, np.empty_like(x), order=order)
