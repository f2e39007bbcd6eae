"""CUDA's codes by chance, on the CPU and on a device: the bits of NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_on_cpu import family
from hypothesis import given
from hypothesis import strategies as st
from strategies_codecs import float_arrays, orders

from zkv.dtypes import Array

chance = family("random")
blocks = st.sampled_from([64, 128, 256, 1024, 4096])
levels = st.sampled_from([1, 4, 15, 127])
seeds = st.integers(0, 2**32 - 1)
weights = st.sampled_from([1.0, 0.5, -3.0, 1 / 3])


def bytes_for(x: Array, to_a_byte: int, dtype: type[np.generic] = np.uint8) -> Array:
    """Room for codes, full of what must not be left."""
    return np.full(-(-x.size // to_a_byte), 0x55, dtype)


def scales_for(x: Array, block: int) -> Array:
    return np.full(-(-x.size // block), np.nan, np.float32)


def sealed(*arrays: Array) -> tuple[Array, ...]:
    for array in arrays:
        array.setflags(write=False)
    return arrays


@given(order=orders, count=st.integers(0, 2000), seed=seeds)
def test_draws(chance, order, count, seed):
    chance.same("draws", seed, np.empty(count, np.uint32), order=order)


@given(order=orders, drawn=float_arrays(1), level=levels, block=blocks, seed=seeds)
def test_qsgd(chance, order, drawn, level, block, seed):
    (x,) = drawn
    codes, scales = bytes_for(x, 1, np.int8), scales_for(x, block)
    chance.same("qsgd_encode", x, level, block, seed, codes, scales, order=order)


@pytest.mark.parametrize("level", [1, 127])
@pytest.mark.parametrize("count", [70, 9000])
def test_qsgd_of_the_largest_numbers(chance, level, count):
    x = np.full(count, np.finfo(np.float32).max)
    x[::3] *= np.float32(-0.7)
    for block in 64, 4096:
        codes, scales = bytes_for(x, 1, np.int8), scales_for(x, block)
        chance.same("qsgd_encode", x, level, block, 1, codes, scales)


@given(order=orders, drawn=float_arrays(1), seed=seeds, weight=weights)
def test_natural(chance, order, drawn, seed, weight):
    x, total = drawn[0], drawn[0][::-1].copy()
    made = chance.same("natural_encode", x, seed, bytes_for(x, 1), order=order)
    codes = sealed(made[2])
    chance.same("natural_decode", *codes, np.empty_like(x), order=order)
    chance.same("natural_add", *codes, weight, total, order=order)


def test_natural_decodes_every_code(chance):
    codes = np.arange(256, dtype=np.uint8)
    chance.same("natural_decode", codes, np.empty(256, np.float32))


@given(order=orders, drawn=float_arrays(1), block=blocks, seed=seeds, weight=weights)
def test_ternary(chance, order, drawn, block, seed, weight):
    x, total = drawn[0], drawn[0][::-1].copy()
    room = bytes_for(x, 4), scales_for(x, block)
    codes, scales = sealed(*chance.same("ternary_encode", x, block, seed, *room, order=order)[3:])
    chance.same("ternary_decode", codes, scales, block, np.empty_like(x), order=order)
    chance.same("ternary_add", codes, scales, block, weight, total, order=order)


@given(order=orders, drawn=float_arrays(2), block=blocks)
def test_ternary_with_a_residual(chance, order, drawn, block):
    x, e = sealed(*drawn)
    room = bytes_for(x, 4), scales_for(x, block), np.full_like(x, np.nan)
    chance.same("ternary_encode_residual", x, e, block, *room, order=order)
