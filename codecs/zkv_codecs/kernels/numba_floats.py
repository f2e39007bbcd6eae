"""Narrow floats in Numba: the functions of `numpy_floats`, bit for bit, in one pass over memory.

Floats are narrowed with integer arithmetic, which is exact, the same on every CPU, and vectorises.
Where the CPU has an instruction for float16 that is used; LLVM's conversion crashes where it has
none. In all of them
`u` are the bits of a magnitude; what is a normal number in the narrow format is rounded by adding
to its bits, and the others by an addition that moves them to the end of a float32.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.extending import intrinsic

from zkv.dtypes import Array
from zkv_codecs.kernels.numba_types import F4, F4_IN, INT, U2, U2_IN, helper, kernel, part
from zkv_codecs.kernels.numpy_floats import DEVIATION_MIN, HALF_MAX, HUGE, LANES, SHRINK
from zkv_codecs.kernels.numpy_ints import ABSMAX_MIN

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
ONE_HALF = np.float32(0.5)
ONE_HALF_BITS = ONE_HALF.view(np.uint32)
REBIAS = np.uint32((127 - 15) << 23)
"""Between the exponents of float32 and float16, where they stand in a float32."""
HALF_TOP, HALF_MIN = HALF_MAX.view(np.uint32), np.float32(2.0**-14).view(np.uint32)
"""The bits of float16's largest and smallest normal number."""


@helper
def half_bits_by_integers(value: np.float32) -> np.uint16:
    """Return float16 bits, clipped to ±65504."""
    bits = np.float32(value).view(np.uint32)
    u = np.uint32(bits & MAGNITUDE)
    clipped = min(u, HALF_TOP)
    odd = np.uint32((clipped >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(np.uint32(clipped + odd + np.uint32(0xFFF) - REBIAS) >> np.uint32(13))
    aligned = np.float32(np.uint32(clipped).view(np.float32) + ONE_HALF)
    code = np.uint32(np.float32(aligned).view(np.uint32) - ONE_HALF_BITS)
    if clipped >= HALF_MIN:
        code = normal
    if u > INFINITY:
        code = np.uint32(0x7E00)
    return np.uint16(code | (np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000)))


@helper
def half_value_by_integers(half: np.uint16) -> np.float32:
    """Return the value of float16 bits."""
    code = np.uint32(half)
    u = np.uint32(code & np.uint32(0x7FFF))
    bits = np.uint32(np.uint32(u << np.uint32(13)) + REBIAS)
    small = np.float32(np.int32(u)) * np.float32(2.0**-24)
    if u < np.uint32(0x400):
        bits = np.float32(small).view(np.uint32)
    if u >= np.uint32(0x7C00):
        bits = np.uint32(bits + REBIAS)
    sign = np.uint32(np.uint32(code & np.uint32(0x8000)) << np.uint32(16))
    return np.uint32(bits | sign).view(np.float32)


@intrinsic  # type: ignore[untyped-decorator]
def _narrowed(context: Any, value: Any) -> Any:
    """Return the bits of a float32 that is rounded to float16."""
    del context, value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _widened(context: Any, half: Any) -> Any:
    """Return the value of float16 bits."""
    del context, half

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@helper
def half_bits_by_instruction(value: np.float32) -> np.uint16:
    """Return float16 bits, clipped to ±65504."""
    bits = np.float32(value).view(np.uint32)
    u = np.uint32(bits & MAGNITUDE)
    code = np.uint16(_narrowed(np.uint32(min(u, HALF_TOP)).view(np.float32)))
    if u > INFINITY:
        code = np.uint16(0x7E00)
    return np.uint16(code | np.uint16(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000)))


@helper
def half_value_by_instruction(half: np.uint16) -> np.float32:
    """Return the value of float16 bits."""
    value: np.float32 = _widened(half)
    return value


def has_instruction() -> bool:
    """Return whether the CPU that is compiled for converts float16 (F16C), and LLVM compiles."""
    if numba.config.DISABLE_JIT or numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        return False
    return bool(get_host_cpu_features().get("f16c", False))


half_bits = half_bits_by_instruction if has_instruction() else half_bits_by_integers
half_value = half_value_by_instruction if has_instruction() else half_value_by_integers


@kernel(F4_IN, U2)
def fp16_encode(x: Array, codes: Array) -> None:
    """See `numpy_floats.fp16_encode`."""
    for i in range(x.size):
        codes[i] = half_bits(x[i])


@kernel(U2_IN, F4)
def fp16_decode(codes: Array, out: Array) -> None:
    """See `numpy_floats.fp16_decode`."""
    for i in range(codes.size):
        out[i] = half_value(codes[i])


@kernel(U2_IN, "f8", F4)
def fp16_add(codes: Array, weight: float, total: Array) -> None:
    """See `numpy_floats.fp16_add`."""
    by = np.float32(weight)
    for i in range(codes.size):
        total[i] = total[i] + half_value(codes[i]) * by


@helper
def brain_value(code: np.uint16) -> np.float32:
    """Return the value of bfloat16 bits."""
    return np.uint32(np.uint32(code) << np.uint32(16)).view(np.float32)


@kernel(F4_IN, U2)
def bf16_encode(x: Array, codes: Array) -> None:
    """See `numpy_floats.bf16_encode`."""
    bits = x.view(np.uint32)
    for i in range(bits.size):
        u = bits[i]
        top = np.uint32(u >> np.uint32(16))
        code = np.uint32(np.uint32(u + np.uint32(0x7FFF) + (top & np.uint32(1))) >> np.uint32(16))
        if np.uint32(u & MAGNITUDE) > INFINITY:
            code = np.uint32(top | np.uint32(0x40))
        codes[i] = np.uint16(code)


@kernel(U2_IN, F4)
def bf16_decode(codes: Array, out: Array) -> None:
    """See `numpy_floats.bf16_decode`."""
    for i in range(codes.size):
        out[i] = brain_value(codes[i])


@kernel(U2_IN, "f8", F4)
def bf16_add(codes: Array, weight: float, total: Array) -> None:
    """See `numpy_floats.bf16_add`."""
    by = np.float32(weight)
    for i in range(codes.size):
        total[i] = total[i] + brain_value(codes[i]) * by


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
def folded(lanes: Array) -> np.float32:
    """Return the sum of the lanes: the upper half is added to the lower until one is left."""
    width = LANES // 2
    while width:
        for j in range(width):
            lanes[j] += lanes[j + width]
        width //= 2
    return np.float32(lanes[0])


@part
def lane_sum(y: Array, lanes: Array) -> np.float32:
    """Return Σy in the order that `numpy_floats` states; `lanes` is overwritten."""
    lanes[:] = 0
    whole = y.size // LANES * LANES
    for at in range(0, whole, LANES):
        row = y[at : at + LANES]
        for j in range(LANES):
            lanes[j] += row[j]
    for j in range(y.size - whole):
        lanes[j] += y[whole + j]
    return folded(lanes)


@part
def centered_squares(y: Array, mean: np.float32, lanes: Array) -> np.float32:
    """Write y − mean to y, and return the sum of its squares in the same order."""
    lanes[:] = 0
    whole = y.size // LANES * LANES
    for at in range(0, whole, LANES):
        row = y[at : at + LANES]
        for j in range(LANES):
            d = np.float32(row[j] - mean)
            row[j] = d
            lanes[j] += d * d
    for j in range(y.size - whole):
        d = np.float32(y[whole + j] - mean)
        y[whole + j] = d
        lanes[j] += d * d
    return folded(lanes)


@helper
def units(absmax: np.float32) -> tuple[np.float32, np.float32]:
    """Return the powers of two that bring `absmax` to [2, 4), and back; 0 if there is nothing."""
    exponent = np.uint32(np.float32(absmax).view(np.uint32) >> np.uint32(23))
    up = np.uint32((np.uint32(255) - exponent) << np.uint32(23)).view(np.float32)
    down = np.uint32((exponent - np.uint32(1)) << np.uint32(23)).view(np.float32)
    if absmax > HUGE:
        down = down * SHRINK
    if absmax < ABSMAX_MIN:
        up, down = np.float32(0), np.float32(0)
    return up, down


@kernel(F4_IN, INT, U2, F4)
def sfp16_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """See `numpy_floats.sfp16_encode`."""
    lanes, work = np.empty(LANES, np.float32), np.empty(min(block, x.size), np.float32)
    for at in range(scales.size // 2):
        xs = x[at * block : (at + 1) * block]
        qs = codes[at * block : (at + 1) * block]
        ys = work[: xs.size]
        count = np.float32(xs.size)
        up, down = units(absmax_of(xs))
        for i in range(xs.size):
            ys[i] = xs[i] * up
        mean = lane_sum(ys, lanes) / count
        deviation = max(np.sqrt(centered_squares(ys, mean, lanes) / count), DEVIATION_MIN)
        scales[2 * at], scales[2 * at + 1] = mean * down, deviation * down
        inverse = np.float32(1) / deviation
        for i in range(xs.size):
            qs[i] = half_bits(ys[i] * inverse)


@kernel(U2_IN, F4_IN, INT, F4)
def sfp16_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_floats.sfp16_decode`."""
    for at in range(scales.size // 2):
        qs = codes[at * block : (at + 1) * block]
        ys = out[at * block : (at + 1) * block]
        a, b = scales[2 * at] * ONE_HALF, scales[2 * at + 1] * ONE_HALF
        for i in range(qs.size):
            y = half_value(qs[i]) * b + a
            ys[i] = y + y


@kernel(U2_IN, F4_IN, INT, "f8", F4)
def sfp16_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_floats.sfp16_add`."""
    by = np.float32(weight)
    for at in range(scales.size // 2):
        qs = codes[at * block : (at + 1) * block]
        ys = total[at * block : (at + 1) * block]
        a, b = scales[2 * at] * ONE_HALF, scales[2 * at + 1] * ONE_HALF
        for i in range(qs.size):
            y = half_value(qs[i]) * b + a
            ys[i] = ys[i] + (y + y) * by
