"""8-bit floats in Numba: the functions of `numpy_fp8`, bit for bit, in one pass over memory.

`u` are the bits of a magnitude. What is a normal number in the 8-bit format is rounded by adding to
its bits, and the others by an addition that moves them to the end of a float32.
"""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.numba_types import F4, F4_IN, INT, U1, U1_IN, helper, kernel, part
from zkv_codecs.kernels.numpy_fp8 import E4M3, E5M2
from zkv_codecs.kernels.numpy_ints import FINITE

MAGNITUDE = np.uint32(0x7FFFFFFF)
E4M3_TOP, E4M3_MIN, E4M3_ALIGN = E4M3.top, E4M3.absmax_min, E4M3.align
E5M2_TOP, E5M2_MIN, E5M2_ALIGN = E5M2.top, E5M2.absmax_min, E5M2.align
E4M3_TOP_BITS, E4M3_ALIGN_BITS = E4M3_TOP.view(np.uint32), E4M3_ALIGN.view(np.uint32)
E5M2_TOP_BITS, E5M2_ALIGN_BITS = E5M2_TOP.view(np.uint32), E5M2_ALIGN.view(np.uint32)
E4M3_NORMAL, E5M2_NORMAL = E4M3.normal_min.view(np.uint32), E5M2.normal_min.view(np.uint32)
E4M3_REBIAS, E5M2_REBIAS = np.uint32((127 - 7) << 23), np.uint32((127 - 15) << 23)
"""Between the exponents of float32 and the format, where they stand in a float32."""


@part
def absmax_of(x: Array) -> np.float32:
    """Return the largest magnitude: maxima of floats do not vectorise (NaN), those of bits do."""
    bits = x.view(np.uint32)
    largest = np.uint32(0)
    for i in range(bits.size):
        u = np.uint32(bits[i] & MAGNITUDE)
        if u > largest:
            largest = u
    return np.uint32(largest).view(np.float32)


@part
def added(x: Array, e: Array, t: Array) -> np.float32:
    """Write x + e to `t`, and return its largest magnitude."""
    largest = np.uint32(0)
    for i in range(x.size):
        total = np.float32(x[i] + e[i])
        t[i] = total
        u = np.uint32(np.float32(total).view(np.uint32) & MAGNITUDE)
        if u > largest:
            largest = u
    return np.uint32(largest).view(np.float32)


@helper
def factor_and_scale(
    absmax: np.float32, absmax_min: np.float32, top: np.float32
) -> tuple[np.float32, np.float32]:
    """Return what a block's elements are multiplied by to be coded, and to be decoded."""
    if absmax >= absmax_min:
        return top / absmax, min(absmax, FINITE) / top
    return np.float32(0), np.float32(0)


@helper
def e4m3_bits(value: np.float32) -> np.uint8:
    """Return an E4M3 code, saturating."""
    bits = np.float32(value).view(np.uint32)
    u = min(np.uint32(bits & MAGNITUDE), E4M3_TOP_BITS)
    odd = np.uint32((u >> np.uint32(20)) & np.uint32(1))
    normal = np.uint32(np.uint32(u + odd + np.uint32(0x7FFFF) - E4M3_REBIAS) >> np.uint32(20))
    aligned = np.float32(np.uint32(u).view(np.float32) + E4M3_ALIGN)
    code = np.uint32(np.float32(aligned).view(np.uint32) - E4M3_ALIGN_BITS)
    if u >= E4M3_NORMAL:
        code = normal
    return np.uint8(code | (np.uint32(bits >> np.uint32(24)) & np.uint32(0x80)))


@helper
def e4m3_value(code: np.uint8) -> np.float32:
    """Return the value of an E4M3 code."""
    u = np.uint32(np.uint32(code) & np.uint32(0x7F))
    bits = np.uint32(np.uint32(u << np.uint32(20)) + E4M3_REBIAS)
    small = np.float32(np.int32(u)) * np.float32(2.0**-9)
    if u < np.uint32(8):
        bits = np.float32(small).view(np.uint32)
    if u == np.uint32(0x7F):
        bits = np.uint32(0x7FC00000)
    sign = np.uint32(np.uint32(np.uint32(code) & np.uint32(0x80)) << np.uint32(24))
    return np.uint32(bits | sign).view(np.float32)


@kernel(F4_IN, INT, U1, F4)
def fp8_e4m3_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """See `numpy_fp8.fp8_e4m3_encode`."""
    for at in range(scales.size):
        xs = x[at * block : (at + 1) * block]
        qs = codes[at * block : (at + 1) * block]
        factor, scale = factor_and_scale(absmax_of(xs), E4M3_MIN, E4M3_TOP)
        scales[at] = scale
        for i in range(xs.size):
            qs[i] = e4m3_bits(xs[i] * factor)


@kernel(F4_IN, F4_IN, INT, U1, F4, F4)
def fp8_e4m3_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """See `numpy_fp8.fp8_e4m3_encode_residual`."""
    sums = np.empty(min(block, x.size), np.float32)
    for at in range(scales.size):
        rs = out[at * block : (at + 1) * block]
        ts = sums[: rs.size]
        qs = codes[at * block : (at + 1) * block]
        absmax = added(x[at * block : (at + 1) * block], e[at * block :], ts)
        factor, scale = factor_and_scale(absmax, E4M3_MIN, E4M3_TOP)
        scales[at] = scale
        for i in range(ts.size):
            code = e4m3_bits(ts[i] * factor)
            qs[i] = code
            rs[i] = ts[i] - e4m3_value(code) * scale


@kernel(U1_IN, F4_IN, INT, F4)
def fp8_e4m3_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_fp8.fp8_e4m3_decode`."""
    for at in range(scales.size):
        qs = codes[at * block : (at + 1) * block]
        ys = out[at * block : (at + 1) * block]
        scale = scales[at]
        for i in range(qs.size):
            ys[i] = e4m3_value(qs[i]) * scale


@kernel(U1_IN, F4_IN, INT, "f8", F4)
def fp8_e4m3_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_fp8.fp8_e4m3_add`."""
    by = np.float32(weight)
    for at in range(scales.size):
        qs = codes[at * block : (at + 1) * block]
        ys = total[at * block : (at + 1) * block]
        scale = scales[at]
        for i in range(qs.size):
            ys[i] = ys[i] + (e4m3_value(qs[i]) * scale) * by


@helper
def e5m2_bits(value: np.float32) -> np.uint8:
    """Return an E5M2 code, saturating."""
    bits = np.float32(value).view(np.uint32)
    u = min(np.uint32(bits & MAGNITUDE), E5M2_TOP_BITS)
    odd = np.uint32((u >> np.uint32(21)) & np.uint32(1))
    normal = np.uint32(np.uint32(u + odd + np.uint32(0xFFFFF) - E5M2_REBIAS) >> np.uint32(21))
    aligned = np.float32(np.uint32(u).view(np.float32) + E5M2_ALIGN)
    code = np.uint32(np.float32(aligned).view(np.uint32) - E5M2_ALIGN_BITS)
    if u >= E5M2_NORMAL:
        code = normal
    return np.uint8(code | (np.uint32(bits >> np.uint32(24)) & np.uint32(0x80)))


@helper
def e5m2_value(code: np.uint8) -> np.float32:
    """Return the value of an E5M2 code."""
    u = np.uint32(np.uint32(code) & np.uint32(0x7F))
    bits = np.uint32(np.uint32(u << np.uint32(21)) + E5M2_REBIAS)
    small = np.float32(np.int32(u)) * np.float32(2.0**-16)
    if u < np.uint32(4):
        bits = np.float32(small).view(np.uint32)
    if u >= np.uint32(0x7C):
        bits = np.uint32(bits + E5M2_REBIAS)
    sign = np.uint32(np.uint32(np.uint32(code) & np.uint32(0x80)) << np.uint32(24))
    return np.uint32(bits | sign).view(np.float32)


@kernel(F4_IN, INT, U1, F4)
def fp8_e5m2_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """See `numpy_fp8.fp8_e5m2_encode`."""
    for at in range(scales.size):
        xs = x[at * block : (at + 1) * block]
        qs = codes[at * block : (at + 1) * block]
        factor, scale = factor_and_scale(absmax_of(xs), E5M2_MIN, E5M2_TOP)
        scales[at] = scale
        for i in range(xs.size):
            qs[i] = e5m2_bits(xs[i] * factor)


@kernel(F4_IN, F4_IN, INT, U1, F4, F4)
def fp8_e5m2_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """See `numpy_fp8.fp8_e5m2_encode_residual`."""
    sums = np.empty(min(block, x.size), np.float32)
    for at in range(scales.size):
        rs = out[at * block : (at + 1) * block]
        ts = sums[: rs.size]
        qs = codes[at * block : (at + 1) * block]
        absmax = added(x[at * block : (at + 1) * block], e[at * block :], ts)
        factor, scale = factor_and_scale(absmax, E5M2_MIN, E5M2_TOP)
        scales[at] = scale
        for i in range(ts.size):
            code = e5m2_bits(ts[i] * factor)
            qs[i] = code
            rs[i] = ts[i] - e5m2_value(code) * scale


@kernel(U1_IN, F4_IN, INT, F4)
def fp8_e5m2_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_fp8.fp8_e5m2_decode`."""
    for at in range(scales.size):
        qs = codes[at * block : (at + 1) * block]
        ys = out[at * block : (at + 1) * block]
        scale = scales[at]
        for i in range(qs.size):
            ys[i] = e5m2_value(qs[i]) * scale


@kernel(U1_IN, F4_IN, INT, "f8", F4)
def fp8_e5m2_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_fp8.fp8_e5m2_add`."""
    by = np.float32(weight)
    for at in range(scales.size):
        qs = codes[at * block : (at + 1) * block]
        ys = total[at * block : (at + 1) * block]
        scale = scales[at]
        for i in range(qs.size):
            ys[i] = ys[i] + (e5m2_value(qs[i]) * scale) * by
