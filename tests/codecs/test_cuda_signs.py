"""CUDA's codes of one and two bits, on the CPU and on a device: the bits of NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_on_cpu import family
from hypothesis import given
from hypothesis import strategies as st
from strategies_codecs import float_arrays, orders

from zkv.dtypes import Array

signs = family("signs")
codecs = pytest.mark.parametrize("codec", ["onebit", "twomeans"])
blocks = st.sampled_from([64, 128, 256, 1024, 4096])
weights = st.sampled_from([1.0, 0.5, -3.0, 1 / 3])
thresholds = st.sampled_from([0.5, 1e-4, 3.0, 1e-45])


def room(codec: str, x: Array, block: int) -> tuple[Array, Array]:
    """Room for bits and scales, full of what must not be left."""
    scales = -(-x.size // block) * (2 if codec == "twomeans" else 1)
    return bytes_for(x, 8), np.full(scales, np.nan, np.float32)


def bytes_for(x: Array, to_a_byte: int) -> Array:
    return np.full(-(-x.size // to_a_byte), 0x55, np.uint8)


def sealed(*arrays: Array) -> tuple[Array, ...]:
    for array in arrays:
        array.setflags(write=False)
    return arrays


@given(order=orders, drawn=float_arrays(1), weight=weights)
def test_signs(signs, order, drawn, weight):
    x, total = drawn[0], drawn[0][::-1].copy()
    bits = sealed(*signs.same("signs_encode", x, bytes_for(x, 8), order=order)[1:])
    signs.same("signs_decode", *bits, np.empty_like(x), order=order)
    signs.same("signs_add", *bits, weight, total, order=order)
    signs.same("signs_settle", x, np.empty_like(x), order=order)


@codecs
@given(order=orders, drawn=float_arrays(1), block=blocks, weight=weights)
def test_means(signs, codec, order, drawn, block, weight):
    x, total = drawn[0], drawn[0][::-1].copy()
    made = signs.same(f"{codec}_encode", x, block, *room(codec, x, block), order=order)
    bits, scales = sealed(*made[2:])
    signs.same(f"{codec}_decode", bits, scales, block, np.empty_like(x), order=order)
    signs.same(f"{codec}_add", bits, scales, block, weight, total, order=order)


@codecs
@given(order=orders, drawn=float_arrays(2), block=blocks)
def test_means_with_a_residual(signs, codec, order, drawn, block):
    x, e = drawn
    out = np.empty_like(x)
    signs.same(f"{codec}_encode_residual", x, e, block, *room(codec, x, block), out, order=order)


@codecs
@pytest.mark.parametrize("block", [64, 256, 4096])
@pytest.mark.parametrize("count", [9000, 4096, 63])
def test_means_of_the_largest_numbers(signs, codec, block, count):
    x = np.full(count, np.finfo(np.float32).max)
    x[::3] *= -1
    signs.same(f"{codec}_encode", x, block, *room(codec, x, block))


@given(order=orders, drawn=float_arrays(2), threshold=thresholds, weight=weights)
def test_mxnets_thresholds(signs, order, drawn, threshold, weight):
    x, e = drawn
    out, total = np.empty_like(x), x[::-1].copy()
    encoded = signs.same("mx1bit_encode", x, e, threshold, bytes_for(x, 8), out, order=order)
    bits = sealed(encoded[3])
    signs.same("mx1bit_decode", *bits, out, order=order)
    signs.same("mx1bit_add", *bits, weight, total, order=order)
    encoded = signs.same("mx2bit_encode", x, e, threshold, bytes_for(x, 4), out, order=order)
    codes = sealed(encoded[3])
    signs.same("mx2bit_decode", *codes, threshold, out, order=order)
    signs.same("mx2bit_add", *codes, threshold, weight, total, order=order)
