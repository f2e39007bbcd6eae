"""8-bit floats in NumPy: the specification that the other backends match bit for bit.

The formats are E4M3 and E5M2 of the OCP 8-bit Floating Point Specification (2023), written as
their bits, uint8; rounding is to nearest, ties to even, and saturates. A block is `block`
neighbouring elements, the last one maybe fewer. Its scale is absmax / top, where top is the
format's largest value; what is coded is x · (top / absmax), where the factor is rounded first.
Blocks below top · 2**-126, whose scale would be a subnormal, are sent as zeros (of either sign).
What a NaN becomes is not specified.
"""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.numpy_ints import FINITE, absmax_of, spread


class Format:
    """An 8-bit float: sign, exponent, `mantissa` bits; no infinity among the codes written."""

    def __init__(self, mantissa: int, bias: int, top: float) -> None:
        self.mantissa, self.bias = mantissa, bias
        self.top = np.float32(top)
        self.absmax_min = np.float32(top * 2.0**-126)
        self.normal_min = np.float32(2.0 ** (1 - bias))
        # Adding this to a value below `normal_min` leaves its multiple of the format's smallest
        # step, rounded to even, in the last bits of the sum.
        self.align = np.float32(2.0 ** (23 + 1 - bias - mantissa))

    def bits(self, v: Array) -> Array:
        """Return the codes of float32 values, saturating; uint8."""
        sign = (v.view(np.uint32) >> np.uint32(24)) & np.uint32(0x80)
        magnitude = np.minimum(np.abs(v), self.top)
        bits = magnitude.view(np.uint32)
        cut = np.uint32(23 - self.mantissa)
        half = np.uint32((1 << (22 - self.mantissa)) - 1)
        rebias = np.uint32((127 - self.bias) << self.mantissa)
        rounded = ((bits + half + ((bits >> cut) & np.uint32(1))) >> cut) - rebias
        aligned = (magnitude + self.align).view(np.uint32) - self.align.view(np.uint32)
        code = np.where(magnitude >= self.normal_min, rounded, aligned) | sign
        codes: Array = code.astype(np.uint8)
        return codes

    def values(self) -> Array:
        """Return the float32 values of all 256 codes."""
        codes = np.arange(128)
        exponents, fractions = codes >> self.mantissa, codes & ((1 << self.mantissa) - 1)
        units = np.where(exponents == 0, fractions, fractions + (1 << self.mantissa))
        steps = np.maximum(exponents, 1) - self.bias - self.mantissa
        values = np.ldexp(units.astype(np.float32), steps)
        return np.concatenate([values, -values])


E4M3 = Format(3, 7, 448)
E5M2 = Format(2, 15, 57344)
E4M3_VALUES = E4M3.values()
E4M3_VALUES[[0x7F, 0xFF]] = np.nan
E5M2_VALUES = E5M2.values()
E5M2_VALUES[[0x7C, 0xFC]] = np.inf, -np.inf
E5M2_VALUES[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan


def _fp8_encode(x: Array, block: int, form: Format, codes: Array, scales: Array) -> None:
    if x.size == 0:
        return
    absmax = absmax_of(x, block)
    alive = absmax >= form.absmax_min
    factors = form.top / np.where(alive, absmax, np.float32(1))
    factors[~alive] = 0
    codes[...] = form.bits(x * spread(factors, block, x.size))
    scales[...] = np.where(alive, np.minimum(absmax, FINITE) / form.top, np.float32(0))


def _fp8_decode(codes: Array, scales: Array, block: int, values: Array, out: Array) -> None:
    np.multiply(values[codes], spread(scales, block, codes.size), out=out)


def fp8_e4m3_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """Write E4M3 codes (±448 at most) and one float32 scale per block of the float32 array x."""
    _fp8_encode(x, block, E4M3, codes, scales)


def fp8_e4m3_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """Encode t = x + e, and write t − decode(codes) to `out`."""
    t = x + e
    fp8_e4m3_encode(t, block, codes, scales)
    fp8_e4m3_decode(codes, scales, block, out)
    np.subtract(t, out, out=out)


def fp8_e4m3_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """Write value · scale, float32."""
    _fp8_decode(codes, scales, block, E4M3_VALUES, out)


def fp8_e4m3_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """Add weight · (value · scale) to the float32 array `total`, each product rounded."""
    decoded = np.empty(codes.size, np.float32)
    fp8_e4m3_decode(codes, scales, block, decoded)
    total += decoded * np.float32(weight)


def fp8_e5m2_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """Write E5M2 codes (±57344 at most) and one float32 scale per block of the float32 array x."""
    _fp8_encode(x, block, E5M2, codes, scales)


def fp8_e5m2_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """Encode t = x + e, and write t − decode(codes) to `out`."""
    t = x + e
    fp8_e5m2_encode(t, block, codes, scales)
    fp8_e5m2_decode(codes, scales, block, out)
    np.subtract(t, out, out=out)


def fp8_e5m2_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """Write value · scale, float32."""
    _fp8_decode(codes, scales, block, E5M2_VALUES, out)


def fp8_e5m2_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """Add weight · (value · scale) to the float32 array `total`, each product rounded."""
    decoded = np.empty(codes.size, np.float32)
    fp8_e5m2_decode(codes, scales, block, decoded)
    total += decoded * np.float32(weight)
