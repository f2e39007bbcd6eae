"""Chance, and codes that are rounded by chance, in NumPy: the specification.

The chance of element i of an array is a hash of i and a seed and nothing else, so that neither
threads nor pieces nor devices matter:

    draw(i) = fmix32((i · 0x9E3779B1) ^ seed) >> 8,  in uint32 arithmetic,

a number below 2**24, where fmix32 is the finalizer of MurmurHash3 (Appleby, public domain) and the
factor is 2**32 / golden ratio, made odd. draw / 2**24 is uniform in [0, 1) and exact in float32.

Lengths of blocks are roots of sums by halving (see `numpy_blocks`) of (x · p)², with p the power of
two that brings the block's largest magnitude into [1, 2), so that no square is lost or infinite.
"""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.numpy_blocks import LARGEST, SCALE_MIN, halved, quiet, rows, spread

GOLDEN, FIRST, SECOND = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
DRAW = np.float32(2.0**-24)
"""What a draw times this is: uniform in [0, 1)."""

NEARLY_LARGEST = np.float32(3.4e38)
"""Multiples of a scale up to here are finite, however they are rounded."""

EXPONENT_ZERO, EXPONENT_TOP = np.uint32(18), np.uint32(145)
"""Biased exponents of float32: what natural codes take for zero, and the largest of them, 2**18."""


def folded(seed: int) -> int:
    """Return 32 bits of seed out of 64: fmix32(fmix32(high half) ^ low half)."""
    halves = np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
    return int(_fmix32(_fmix32(halves[:1]) ^ halves[1:])[0])


def draws(seed: int, out: Array) -> None:
    """Write the draw of each element, uint32; `seed` is 32 bits, as of all kernels here."""
    numbers = np.arange(out.size, dtype=np.uint32) * GOLDEN
    out[...] = _fmix32(numbers ^ np.uint32(seed)) >> np.uint32(8)


def _fmix32(h: Array) -> Array:
    h = (h ^ (h >> np.uint32(16))) * FIRST
    h = (h ^ (h >> np.uint32(13))) * SECOND
    h = h ^ (h >> np.uint32(16))
    return h


def _drawn(seed: int, count: int) -> Array:
    out = np.empty(count, np.uint32)
    draws(seed, out)
    return out


def _absmax(x: Array, block: int) -> Array:
    """Return the largest magnitude of each block; 0 for one that is too small to be sent."""
    largest: Array = rows(np.abs(x), block).max(axis=1, initial=0)
    return np.where(largest >= SCALE_MIN, largest, np.float32(0))


# --- QSGD --------------------------------------------------------------------------------------


def qsgd_scales(x: Array, levels: int, block: int, scales: Array) -> None:
    """Write length / levels of each block, float32: 0 for a block that is sent as zeros."""
    absmax = _absmax(x, block)
    exponents = absmax.view(np.uint32) >> np.uint32(23)
    # float32 has no 2**-127: the largest numbers come into [2, 4).
    p = np.maximum(np.uint32(254) - exponents, np.uint32(1))
    back = ((np.uint32(254) - p) << np.uint32(23)).view(np.float32)
    p = (p << np.uint32(23)).view(np.float32)
    alive = absmax > 0
    small = rows(x, block) * np.where(alive, p, np.float32(0))[:, np.newaxis]
    lengths = np.sqrt(halved(small * small))
    with np.errstate(over="ignore"):
        each = lengths / np.float32(levels) * back
    scales[...] = np.where(alive, np.minimum(each, LARGEST), np.float32(0))


def qsgd_encode(x: Array, levels: int, block: int, seed: int, codes: Array, scales: Array) -> None:
    """Write scales and int8 codes: x · (1 / scale) rounded down, or up if draw / 2**24 is less than
    what rounding down cuts off; at most `levels`, and no more than float32 can decode."""
    qsgd_scales(x, levels, block, scales)
    alive = np.where(scales > 0, scales, np.float32(1))
    factors = np.where(scales > 0, np.float32(1) / alive, np.float32(0))
    tops = np.floor(np.minimum(np.float32(levels), NEARLY_LARGEST / np.maximum(alive, 1)))
    tops = spread(np.maximum(tops, np.float32(1)), block, x.size)
    scaled = x * spread(factors, block, x.size)
    low = np.floor(scaled)
    up = _drawn(seed, x.size) * DRAW < scaled - low
    codes[...] = np.clip(low + up, -tops, tops).astype(np.int8)


# --- natural compression -----------------------------------------------------------------------


def natural_encode(x: Array, seed: int, codes: Array) -> None:
    """Write sign · 128 + exponent − 18, uint8, of x rounded to a power of two by chance.

    A mantissa of m / 2**23 makes it the upper one with just that probability: when m + draw // 2
    carries. Exponents are float32's biased ones; above 145 they stop, 18 and less are code 0.
    """
    bits = x.view(np.uint32)
    magnitudes = bits & np.uint32(0x7FFFFFFF)
    exponents = (magnitudes + (_drawn(seed, x.size) >> np.uint32(1))) >> np.uint32(23)
    kept = np.clip(exponents, EXPONENT_ZERO, EXPONENT_TOP) - EXPONENT_ZERO
    signs = (bits >> np.uint32(31)) << np.uint32(7)
    codes[...] = np.where(kept > 0, kept | signs, np.uint32(0))


def natural_decode(codes: Array, out: Array) -> None:
    """Write ±2**(exponent − 127), float32."""
    wide = codes.astype(np.uint32)
    kept = wide & np.uint32(127)
    bits = ((kept + EXPONENT_ZERO) << np.uint32(23)) | ((wide >> np.uint32(7)) << np.uint32(31))
    out.view(np.uint32)[...] = np.where(kept > 0, bits, np.uint32(0))


@quiet
def natural_add(codes: Array, weight: float, total: Array) -> None:
    """Add weight · decoded to the float32 array `total`, each product rounded."""
    decoded = np.empty_like(total)
    natural_decode(codes, decoded)
    total += decoded * np.float32(weight)


# --- ternary -----------------------------------------------------------------------------------


def ternary_encode(x: Array, block: int, seed: int, codes: Array, scales: Array) -> None:
    """Write the largest magnitude of each block, and the sign of x (code 1, or 3 for −1) with
    probability |x| / scale: where (draw / 2**24) · scale < |x|; else code 0. Four codes to a byte,
    the first in its lowest bits."""
    scales[...] = _absmax(x, block)
    each = spread(scales, block, x.size)
    _ternary_codes(x, _drawn(seed, x.size).astype(np.float32) * DRAW * each, each, codes)


@quiet
def ternary_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """Encode t = x + e, each element as what is nearest of scale, −scale and 0, halves as 0; and
    write t − decode(codes, scales) to `out`. Nothing is left to chance."""
    t = x + e
    scales[...] = _absmax(t, block)
    each = spread(scales, block, x.size)
    _ternary_codes(t, np.float32(0.5) * each, each, codes)
    ternary_decode(codes, scales, block, out)
    np.subtract(t, out, out=out)


def _ternary_codes(x: Array, bars: Array, scales: Array, codes: Array) -> None:
    """Write the signs of what exceeds its bar, where scales are above 0."""
    signs = np.where(x > bars, np.uint8(1), np.where(x < -bars, np.uint8(3), np.uint8(0)))
    kept = rows(np.where(scales > 0, signs, np.uint8(0)), 4)
    codes[...] = kept[:, 0] | (kept[:, 1] << 2) | (kept[:, 2] << 4) | (kept[:, 3] << 6)


def ternary_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """Write scale for code 1, −scale for code 3 and 0 for the others, float32."""
    each = np.stack([(codes >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1).reshape(-1)
    each = each[: out.size]
    signs = np.array([0, 1, 0, -1], np.float32)[each]
    np.multiply(signs, spread(scales, block, out.size), out=out)
    # A negative scale, which no encoder makes, would leave -0.0 there.
    out[(each & 1) == 0] = 0


@quiet
def ternary_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """Add weight · decoded to the float32 array `total`, each product rounded."""
    decoded = np.empty_like(total)
    ternary_decode(codes, scales, block, decoded)
    total += decoded * np.float32(weight)
