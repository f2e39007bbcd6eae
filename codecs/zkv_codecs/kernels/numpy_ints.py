"""Block integers in NumPy: the specification that the other backends match bit for bit.

A block is `block` neighbouring elements, the last one maybe fewer.

`int8` and `int4`: the scale is absmax / top. Below `ABSMAX_MIN` it would be a subnormal, and the
quotients of tiny numbers infinite: such a block is sent as zeros, and error feedback keeps what it
held. An element's code is round-to-nearest-even of x · (top / absmax), where the factor is rounded
first.

`uint8`: levels are the multiples of a step, so that 0 is one; see `uint8_encode`.
"""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array

ABSMAX_MIN = np.float32(1.5e-36)
FINITE = np.float32(np.finfo(np.float32).max * (1 - 2.0**-22))
"""Scales are made from magnitudes up to this, so that the largest code decodes to a finite value
although the scale is rounded."""
RANGE_MIN = np.float32(255 * 2.0**-22)
"""Half a block's range is taken as at least this times its absmax, which makes a step at least
absmax · 2**-21: levels stay below 2**21 + 256, where float32 counts exactly."""


def absmax_of(x: Array, block: int) -> Array:
    """Return the largest magnitude of each block of x (which has elements), float32."""
    largest: Array = np.maximum.reduceat(np.abs(x), np.arange(0, x.size, block))
    return largest


def spread(per_block: Array, block: int, count: int) -> Array:
    """Return each block's number for each of `count` elements."""
    return np.repeat(per_block, block)[:count] if block < count else per_block


def _coded(x: Array, block: int, top: int, scales: Array) -> Array:
    """Write the scales of blocks, and return the codes of elements, int8."""
    absmax = absmax_of(x, block)
    alive = absmax >= ABSMAX_MIN
    factors = np.float32(top) / np.where(alive, absmax, np.float32(1))
    factors[~alive] = 0
    scales[...] = np.where(alive, np.minimum(absmax, FINITE) / np.float32(top), np.float32(0))
    codes: Array = np.rint(x * spread(factors, block, x.size)).astype(np.int8)
    return codes


def int8_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """Write int8 codes in ±127 and one float32 scale per block of the float32 array x."""
    if x.size:
        codes[...] = _coded(x, block, 127, scales)


def int8_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """Encode t = x + e, and write t − decode(codes) to `out`."""
    t = x + e
    int8_encode(t, block, codes, scales)
    int8_decode(codes, scales, block, out)
    np.subtract(t, out, out=out)


def int8_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """Write code · scale, float32."""
    np.multiply(codes, spread(scales, block, codes.size), out=out, dtype=np.float32)


def int8_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """Add weight · (code · scale) to the float32 array `total`, each product rounded."""
    decoded = np.empty(codes.size, np.float32)
    int8_decode(codes, scales, block, decoded)
    total += decoded * np.float32(weight)


def int4_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """Write codes in ±7 as code + 8, two to a byte, the first in the low nibble, and the scales.

    `block` is even. The high nibble after an odd number of elements is 0.
    """
    if x.size == 0:
        return
    nibbles = np.zeros(2 * codes.size, np.uint8)
    nibbles[: x.size] = _coded(x, block, 7, scales) + np.int8(8)
    codes[...] = nibbles[0::2] | (nibbles[1::2] << np.uint8(4))


def int4_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """Encode t = x + e, and write t − decode(codes) to `out`."""
    t = x + e
    int4_encode(t, block, codes, scales)
    int4_decode(codes, scales, block, out)
    np.subtract(t, out, out=out)


def int4_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """Write (nibble − 8) · scale, float32, as many as `out` takes."""
    nibbles = np.empty(2 * codes.size, np.int8)
    nibbles[0::2] = codes & np.uint8(15)
    nibbles[1::2] = codes >> np.uint8(4)
    nibbles -= np.int8(8)
    np.multiply(nibbles[: out.size], spread(scales, block, out.size), out=out, dtype=np.float32)


def int4_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """Add weight · ((nibble − 8) · scale) to the float32 array `total`, each product rounded."""
    decoded = np.empty(total.size, np.float32)
    int4_decode(codes, scales, block, decoded)
    total += decoded * np.float32(weight)


def uint8_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """Write uint8 codes, and for each block in turn its step and its lowest level, float32.

    Of a block's elements, from low to high:
    half = max(high / 2 − low / 2, absmax · RANGE_MIN, ABSMAX_MIN),
    level(x) = round-to-nearest-even of x · (127.5 / half), where the factor is rounded first,
    lowest = level(high) − 255, code(x) = level(x) − lowest, kept in 0 … 255,
    step = half / 127.5, or FINITE / max(level(high), −max(level(low), lowest), 1) if that is less.

    It is the min-max quantizer of Bagua (`MinMaxUInt8`), whose range + 1e-7 costs tiny gradients
    their value; the lower bound on the range is relative to the block here.
    """
    if x.size == 0:
        return
    starts = np.arange(0, x.size, block)
    low, high = np.minimum.reduceat(x, starts), np.maximum.reduceat(x, starts)
    half = high * np.float32(0.5) - low * np.float32(0.5)
    half = np.maximum(half, np.maximum(np.abs(low), np.abs(high)) * RANGE_MIN)
    half = np.maximum(half, ABSMAX_MIN)
    factors = np.float32(127.5) / half
    upper = np.rint(high * factors)
    lower = upper - np.float32(255)
    outermost = np.maximum(upper, -np.maximum(np.rint(low * factors), lower))
    outermost = np.maximum(outermost, np.float32(1))
    scales[0::2] = np.minimum(half / np.float32(127.5), FINITE / outermost)
    scales[1::2] = lower
    levels = np.rint(x * spread(factors, block, x.size))
    codes[...] = np.clip(levels - spread(lower, block, x.size), 0, 255).astype(np.uint8)


def uint8_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """Encode t = x + e, and write t − decode(codes) to `out`."""
    t = x + e
    uint8_encode(t, block, codes, scales)
    uint8_decode(codes, scales, block, out)
    np.subtract(t, out, out=out)


def uint8_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """Write (code + lowest level) · step, float32."""
    np.add(codes, spread(scales[1::2], block, codes.size), out=out, dtype=np.float32)
    out *= spread(scales[0::2], block, codes.size)


def uint8_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """Add weight · ((code + lowest level) · step) to the float32 array `total`, each rounded."""
    decoded = np.empty(codes.size, np.float32)
    uint8_decode(codes, scales, block, decoded)
    total += decoded * np.float32(weight)
