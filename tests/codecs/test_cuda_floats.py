"""CUDA's narrow floats, on the CPU and on a device: the bits of NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_on_cpu import family
from hypothesis import given
from hypothesis import strategies as st
from strategies_codecs import float_arrays, orders

from zkv.dtypes import Array
from zkv_codecs.kernels import numpy_fp8

floats, fp8 = family("floats"), family("fp8")
plain = pytest.mark.parametrize("codec", ["fp16", "bf16"])
formats = pytest.mark.parametrize("codec", ["fp8_e4m3", "fp8_e5m2"])
blocks = st.sampled_from([1, 2, 31, 32, 33, 100, 256, 258, 1024])
weights = st.sampled_from([1.0, 0.5, -3.0, 1 / 3])


def sealed(array: Array) -> Array:
    array.setflags(write=False)
    return array


def scales_for(x: Array, block: int, each: int = 1) -> Array:
    """Room for scales, full of what must not be left."""
    return np.full(-(-x.size // block) * each, np.nan, np.float32)


def any_floats(seed: int) -> Array:
    """Numbers of all bits and signs, without those that are none."""
    bits = np.random.default_rng(seed).integers(0, 2**32, 4000, np.uint32)
    x = bits.view(np.float32)
    return sealed(x[np.isfinite(x)])


def about(values: Array) -> Array:
    """Values of a format, what lies in the middle of two, and the float32 next to each of these."""
    finite = np.unique(values[np.isfinite(values)])
    middles = finite[:-1] + (finite[1:] - finite[:-1]) / 2
    points = np.concatenate((finite, middles)).astype(np.float32)
    inf = np.float32(np.inf)
    near = [points, np.nextafter(points, inf), np.nextafter(points, -inf)]
    return sealed(np.concatenate(near))


# --- 16 bits ------------------------------------------------------------------------------------


@plain
@given(order=orders, drawn=float_arrays(1), weight=weights)
def test_sixteen_bits(floats, codec, order, drawn, weight):
    x, total = drawn[0], drawn[0][::-1].copy()
    made = floats.same(f"{codec}_encode", x, np.full(x.size, 0x55, np.uint16), order=order)
    codes = sealed(made[1])
    floats.same(f"{codec}_decode", codes, np.empty_like(x), order=order)
    floats.same(f"{codec}_add", codes, weight, total, order=order)


@plain
@pytest.mark.parametrize("seed", range(4))
def test_all_magnitudes(floats, codec, seed):
    x = any_floats(seed)
    floats.same(f"{codec}_encode", x, np.empty(x.size, np.uint16))


def test_all_halves_and_what_lies_between_them(floats):
    halves = np.arange(0x7C00, dtype=np.uint16)
    floats.same("fp16_decode", halves, np.empty(halves.size, np.float32))
    floats.same("fp16_decode", halves | np.uint16(0x8000), np.empty(halves.size, np.float32))
    infinities = np.array([0x7C00, 0xFC00], np.uint16)
    floats.same("fp16_decode", infinities, np.empty(2, np.float32))
    x = about(halves.view(np.float16).astype(np.float64))
    floats.same("fp16_encode", x, np.empty(x.size, np.uint16))
    floats.same("fp16_encode", -x, np.empty(x.size, np.uint16))


def test_not_a_number_stays_none(floats):
    """Which one, the formats leave open. The first has a bit that bfloat16 has no room for."""
    bits = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32)
    for codec in "fp16", "bf16":
        codes, back = np.empty(3, np.uint16), np.empty(3, np.float32)
        floats.call(f"{codec}_encode", bits.view(np.float32), codes)
        floats.call(f"{codec}_decode", codes, back)
        assert np.isnan(back).all()


@given(order=orders, drawn=float_arrays(1), block=blocks, weight=weights)
def test_sixteen_bits_with_a_mean_and_a_deviation(floats, order, drawn, block, weight):
    x, total = drawn[0], drawn[0][::-1].copy()
    room = np.full(x.size, 0x55, np.uint16), scales_for(x, block, 2)
    codes, scales = map(sealed, floats.same("sfp16_encode", x, block, *room, order=order)[2:])
    floats.same("sfp16_decode", codes, scales, block, np.empty_like(x), order=order)
    floats.same("sfp16_add", codes, scales, block, weight, total, order=order)


@pytest.mark.parametrize("low", [1.0, 0.99, -1.0])
def test_a_mean_and_a_deviation_of_the_largest_numbers(floats, low):
    x = np.float32(np.finfo(np.float32).max) * np.linspace(low, 1, 300, dtype=np.float32)
    room = np.empty(x.size, np.uint16), scales_for(x, 256, 2)
    codes, scales = floats.same("sfp16_encode", x, 256, *room)[2:]
    floats.same("sfp16_decode", codes, scales, 256, np.empty_like(x))


# --- 8 bits -------------------------------------------------------------------------------------


@formats
@given(order=orders, drawn=float_arrays(1), block=blocks, weight=weights)
def test_eight_bits(fp8, codec, order, drawn, block, weight):
    x, total = drawn[0], drawn[0][::-1].copy()
    room = np.full(x.size, 0x55, np.uint8), scales_for(x, block)
    codes, scales = map(sealed, fp8.same(f"{codec}_encode", x, block, *room, order=order)[2:])
    fp8.same(f"{codec}_decode", codes, scales, block, np.empty_like(x), order=order)
    fp8.same(f"{codec}_add", codes, scales, block, weight, total, order=order)


@formats
@given(order=orders, drawn=float_arrays(2), block=blocks)
def test_eight_bits_with_a_residual(fp8, codec, order, drawn, block):
    x, e = drawn
    room = np.full(x.size, 0x55, np.uint8), scales_for(x, block), np.empty_like(x)
    fp8.same(f"{codec}_encode_residual", x, e, block, *room, order=order)


@formats
def test_all_codes_and_what_lies_between_them(fp8, codec):
    """A block whose largest element is the format's has the scale 1."""
    values = getattr(numpy_fp8, f"{codec.removeprefix('fp8_').upper()}_VALUES")
    codes = np.flatnonzero(~np.isnan(values)).astype(np.uint8)
    one = np.ones(1, np.float32)
    fp8.same(f"{codec}_decode", codes, one, 256, np.empty(codes.size, np.float32))
    x = about(values.astype(np.float64))
    top = np.nanmax(values[np.isfinite(values)])
    x = sealed(np.append(np.clip(x, -top, top), np.float32(top)))
    room = np.empty(x.size, np.uint8), np.empty(1, np.float32)
    made = fp8.same(f"{codec}_encode", x, x.size, *room)
    assert made[3].tolist() == [1.0]


@formats
def test_codes_that_are_no_numbers_decode_to_none(fp8, codec):
    """A peer may send them."""
    values = getattr(numpy_fp8, f"{codec.removeprefix('fp8_').upper()}_VALUES")
    codes = np.flatnonzero(np.isnan(values)).astype(np.uint8)
    out = np.zeros(codes.size, np.float32)
    fp8.call(f"{codec}_decode", codes, np.ones(1, np.float32), 256, out)
    assert np.isnan(out).all()


@formats
@pytest.mark.parametrize("sign", [1, -1])
def test_eight_bits_of_the_largest_numbers(fp8, codec, sign):
    x = np.float32(sign * np.finfo(np.float32).max) * np.linspace(1, 0.9, 300, dtype=np.float32)
    room = np.empty(x.size, np.uint8), scales_for(x, 256)
    codes, scales = fp8.same(f"{codec}_encode", x, 256, *room)[2:]
    fp8.same(f"{codec}_decode", codes, scales, 256, np.empty_like(x))
