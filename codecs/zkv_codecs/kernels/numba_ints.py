"""Block integers in Numba: the functions of `numpy_ints`, bit for bit, in one pass over memory.

Slices instead of index ranges, so that the loops vectorise; read-only inputs in the signatures, so
that an array over a received frame does not compile a kernel again. What Numba would widen to 64
bits is cut back to 32 at once, or half of each vector would go unused. Where an index is computed,
it is unsigned: a signed one may count from the end, and the check for that keeps a loop scalar.
What is left may be written over x (`packed.left_over`), and a loop over two arrays that are one
stays scalar too: sums stand in an array of their own, which is small enough to stay near.
"""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.numba_types import (
    F4,
    F4_IN,
    I1,
    I1_IN,
    INT,
    U1,
    U1_IN,
    helper,
    kernel,
    part,
)
from zkv_codecs.kernels.numpy_ints import ABSMAX_MIN, FINITE, RANGE_MIN

TOP8, TOP4 = np.float32(127), np.float32(7)
MAGNITUDE = np.int32(0x7FFFFFFF)
TO_INT = np.float32(1.5 * 2**23)
"""Adding this to a float32 below 2**22 rounds it to an integer, ties to even, which then stands in
the last bits of the sum."""
TO_INT_BITS = TO_INT.view(np.int32)
ONE, TWO = np.uint64(1), np.uint64(2)
HALF, LEVELS, HALF_LEVELS = np.float32(0.5), np.float32(255), np.float32(127.5)


@part
def absmax_bits(x: Array) -> np.int32:
    """Return the bits of the largest magnitude: maxima of floats do not vectorise (NaN)."""
    bits = x.view(np.int32)
    largest = np.int32(0)
    for i in range(bits.size):
        magnitude = np.int32(bits[i] & MAGNITUDE)
        if magnitude > largest:
            largest = magnitude
    return largest


@part
def added(x: Array, e: Array, t: Array) -> np.int32:
    """Write x + e to `t`, and return the bits of its largest magnitude."""
    largest = np.int32(0)
    for i in range(x.size):
        total = np.float32(x[i] + e[i])
        t[i] = total
        magnitude = np.int32(np.float32(total).view(np.int32) & MAGNITUDE)
        if magnitude > largest:
            largest = magnitude
    return largest


@helper
def factor_and_scale(absmax: np.float32, top: np.float32) -> tuple[np.float32, np.float32]:
    """Return what a block's elements are multiplied by to be coded, and to be decoded."""
    if absmax >= ABSMAX_MIN:
        return top / absmax, min(absmax, FINITE) / top
    return np.float32(0), np.float32(0)


@kernel(F4_IN, INT, I1, F4)
def int8_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """See `numpy_ints.int8_encode`."""
    scale_bits = scales.view(np.int32)
    for at in range(scales.size):
        xs = x[at * block : (at + 1) * block]
        qs = codes[at * block : (at + 1) * block]
        scale_bits[at] = absmax_bits(xs)
        factor, scale = factor_and_scale(scales[at], TOP8)
        scales[at] = scale
        for i in range(xs.size):
            shifted = np.float32(xs[i] * factor) + TO_INT
            qs[i] = np.int8(np.float32(shifted).view(np.int32))


@kernel(F4_IN, F4_IN, INT, I1, F4, F4)
def int8_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """See `numpy_ints.int8_encode_residual`."""
    scale_bits = scales.view(np.int32)
    sums = np.empty(min(block, x.size), np.float32)
    for at in range(scales.size):
        rs = out[at * block : (at + 1) * block]
        ts = sums[: rs.size]
        qs = codes[at * block : (at + 1) * block]
        scale_bits[at] = added(x[at * block : (at + 1) * block], e[at * block :], ts)
        factor, scale = factor_and_scale(scales[at], TOP8)
        scales[at] = scale
        for i in range(ts.size):
            shifted = np.float32(ts[i] * factor) + TO_INT
            qs[i] = np.int8(np.float32(shifted).view(np.int32))
            rs[i] = ts[i] - (shifted - TO_INT) * scale


@kernel(I1_IN, F4_IN, INT, F4)
def int8_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_ints.int8_decode`."""
    for at in range(scales.size):
        qs = codes[at * block : (at + 1) * block]
        ys = out[at * block : (at + 1) * block]
        scale = scales[at]
        for i in range(qs.size):
            ys[i] = np.float32(qs[i]) * scale


@kernel(I1_IN, F4_IN, INT, "f8", F4)
def int8_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_ints.int8_add`."""
    by = np.float32(weight)
    for at in range(scales.size):
        qs = codes[at * block : (at + 1) * block]
        ys = total[at * block : (at + 1) * block]
        scale = scales[at]
        for i in range(qs.size):
            ys[i] = ys[i] + (np.float32(qs[i]) * scale) * by


@helper
def nibble(shifted: np.float32) -> np.uint8:
    """Return code + 8 of a code that stands in the last bits of a float32."""
    return np.uint8((np.float32(shifted).view(np.int32) + np.int32(8)) & np.int32(15))


@helper
def low(byte: np.uint8) -> np.float32:
    """Return the code in the low nibble."""
    return np.float32(np.int32(byte & np.uint8(15)) - np.int32(8))


@helper
def high(byte: np.uint8) -> np.float32:
    """Return the code in the high nibble."""
    return np.float32(np.int32(byte >> np.uint8(4)) - np.int32(8))


@kernel(F4_IN, INT, U1, F4)
def int4_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """See `numpy_ints.int4_encode`."""
    scale_bits = scales.view(np.int32)
    for at in range(scales.size):
        xs = x[at * block : (at + 1) * block]
        qs = codes[at * (block // 2) : (at + 1) * (block // 2)]
        scale_bits[at] = absmax_bits(xs)
        factor, scale = factor_and_scale(scales[at], TOP4)
        scales[at] = scale
        for i in range(np.uint64(xs.size // 2)):
            first = np.uint64(i * TWO)
            a = np.float32(xs[first] * factor) + TO_INT
            b = np.float32(xs[first + ONE] * factor) + TO_INT
            qs[i] = nibble(a) | np.uint8(nibble(b) << np.uint8(4))
        if xs.size % 2:
            qs[-1] = nibble(np.float32(xs[-1] * factor) + TO_INT)


@kernel(F4_IN, F4_IN, INT, U1, F4, F4)
def int4_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """See `numpy_ints.int4_encode_residual`."""
    scale_bits = scales.view(np.int32)
    sums = np.empty(min(block, x.size), np.float32)
    for at in range(scales.size):
        rs = out[at * block : (at + 1) * block]
        ts = sums[: rs.size]
        qs = codes[at * (block // 2) : (at + 1) * (block // 2)]
        scale_bits[at] = added(x[at * block : (at + 1) * block], e[at * block :], ts)
        factor, scale = factor_and_scale(scales[at], TOP4)
        scales[at] = scale
        for i in range(np.uint64(ts.size // 2)):
            first = np.uint64(i * TWO)
            a = np.float32(ts[first] * factor) + TO_INT
            b = np.float32(ts[first + ONE] * factor) + TO_INT
            qs[i] = nibble(a) | np.uint8(nibble(b) << np.uint8(4))
            rs[first] = ts[first] - (a - TO_INT) * scale
            rs[first + ONE] = ts[first + ONE] - (b - TO_INT) * scale
        if ts.size % 2:
            a = np.float32(ts[-1] * factor) + TO_INT
            qs[-1] = nibble(a)
            rs[-1] = ts[-1] - (a - TO_INT) * scale


@kernel(U1_IN, F4_IN, INT, F4)
def int4_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_ints.int4_decode`."""
    for at in range(scales.size):
        qs = codes[at * (block // 2) : (at + 1) * (block // 2)]
        ys = out[at * block : (at + 1) * block]
        scale = scales[at]
        for i in range(np.uint64(ys.size // 2)):
            first = np.uint64(i * TWO)
            ys[first] = low(qs[i]) * scale
            ys[first + ONE] = high(qs[i]) * scale
        if ys.size % 2:
            ys[-1] = low(qs[-1]) * scale


@kernel(U1_IN, F4_IN, INT, "f8", F4)
def int4_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_ints.int4_add`."""
    by = np.float32(weight)
    for at in range(scales.size):
        qs = codes[at * (block // 2) : (at + 1) * (block // 2)]
        ys = total[at * block : (at + 1) * block]
        scale = scales[at]
        for i in range(np.uint64(ys.size // 2)):
            first = np.uint64(i * TWO)
            ys[first] = ys[first] + (low(qs[i]) * scale) * by
            ys[first + ONE] = ys[first + ONE] + (high(qs[i]) * scale) * by
        if ys.size % 2:
            ys[-1] = ys[-1] + (low(qs[-1]) * scale) * by


@helper
def ordered(bits: np.int32) -> np.int32:
    """Return an integer that compares as the float with these bits; the way back is the same."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & MAGNITUDE))


@part
def extremes(x: Array) -> tuple[np.float32, np.float32]:
    """Return the lowest and the highest element of x, which is not empty."""
    bits = x.view(np.int32)
    low_bits = high_bits = ordered(bits[0])
    for i in range(bits.size):
        value = ordered(bits[i])
        if value < low_bits:
            low_bits = value
        if value > high_bits:
            high_bits = value
    return (
        np.int32(ordered(low_bits)).view(np.float32),
        np.int32(ordered(high_bits)).view(np.float32),
    )


@helper
def grid(low: np.float32, high: np.float32) -> tuple[np.float32, np.float32, np.float32]:
    """Return a block's factor, step and lowest level."""
    half = high * HALF - low * HALF
    half = max(max(half, max(abs(low), abs(high)) * RANGE_MIN), ABSMAX_MIN)
    factor = HALF_LEVELS / half
    upper = np.rint(high * factor)
    lower = upper - LEVELS
    outermost = max(max(upper, -max(np.rint(low * factor), lower)), np.float32(1))
    step = min(half / HALF_LEVELS, FINITE / outermost)
    return factor, step, lower


@part
def uint8_codes(x: Array, factor: np.float32, lower: np.float32, codes: Array) -> None:
    """Write the codes of one block."""
    base = np.int32(lower)
    for i in range(x.size):
        shifted = np.float32(x[i] * factor) + TO_INT
        level = np.int32(np.float32(shifted).view(np.int32) - TO_INT_BITS)
        codes[i] = np.uint8(min(max(np.int32(level - base), np.int32(0)), np.int32(255)))


@kernel(F4_IN, INT, U1, F4)
def uint8_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """See `numpy_ints.uint8_encode`."""
    for at in range(scales.size // 2):
        xs = x[at * block : (at + 1) * block]
        low, high = extremes(xs)
        factor, step, lower = grid(low, high)
        scales[2 * at], scales[2 * at + 1] = step, lower
        uint8_codes(xs, factor, lower, codes[at * block : (at + 1) * block])


@kernel(F4_IN, F4_IN, INT, U1, F4, F4)
def uint8_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """See `numpy_ints.uint8_encode_residual`."""
    sums = np.empty(min(block, x.size), np.float32)
    for at in range(scales.size // 2):
        rs = out[at * block : (at + 1) * block]
        ts = sums[: rs.size]
        qs = codes[at * block : (at + 1) * block]
        added(x[at * block : (at + 1) * block], e[at * block :], ts)
        low, high = extremes(ts)
        factor, step, lower = grid(low, high)
        scales[2 * at], scales[2 * at + 1] = step, lower
        uint8_codes(ts, factor, lower, qs)
        for i in range(ts.size):
            rs[i] = ts[i] - (np.float32(qs[i]) + lower) * step


@kernel(U1_IN, F4_IN, INT, F4)
def uint8_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_ints.uint8_decode`."""
    for at in range(scales.size // 2):
        qs = codes[at * block : (at + 1) * block]
        ys = out[at * block : (at + 1) * block]
        step, lower = scales[2 * at], scales[2 * at + 1]
        for i in range(qs.size):
            ys[i] = (np.float32(qs[i]) + lower) * step


@kernel(U1_IN, F4_IN, INT, "f8", F4)
def uint8_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_ints.uint8_add`."""
    by = np.float32(weight)
    for at in range(scales.size // 2):
        qs = codes[at * block : (at + 1) * block]
        ys = total[at * block : (at + 1) * block]
        step, lower = scales[2 * at], scales[2 * at + 1]
        for i in range(qs.size):
            ys[i] = ys[i] + ((np.float32(qs[i]) + lower) * step) * by
