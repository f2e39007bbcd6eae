"""One and two bits per element in NumPy: the specification that the other backends match.

Signs are NumPy's `signbit`: −0.0 is negative. A bit is 1 for a negative element, and the first of
eight elements is bit 0 of a byte, except in MXNet's layouts, which begin with the highest bits.
Bits after the last element are written as 0 and ignored when read. Means of blocks are sums by
halving (see `numpy_blocks`) of |x| / (2 · block), which cannot overflow, divided once by the count
of elements / (2 · block), both of which are exact.
"""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.numpy_blocks import LARGEST, SCALE_MIN, down, halved, quiet, rows, spread


def _signs(bits: Array, count: int) -> Array:
    """Return 0 or 1 for each element."""
    return np.unpackbits(bits, count=count, bitorder="little")


def _means(sums: Array, counts: Array, block: int) -> Array:
    """Return sums / counts, both in units of `down(block)`: 0 if too small, and never infinite."""
    with np.errstate(over="ignore"):
        means = sums / np.maximum(counts.astype(np.float32) * down(block), down(block))
    means = np.minimum(means, LARGEST)
    kept: Array = np.where(means >= SCALE_MIN, means, np.float32(0))
    return kept


def _counts(flags: Array, block: int) -> Array:
    """Return how many flags of each block are set."""
    counts: Array = rows(flags, block).sum(axis=1, dtype=np.int32)
    return counts


# --- signs alone -----------------------------------------------------------------------------


def signs_encode(x: Array, bits: Array) -> None:
    """Write the sign bits of the float32 array x: ceil(x.size / 8) bytes."""
    bits[...] = np.packbits(np.signbit(x), bitorder="little")


def signs_decode(bits: Array, out: Array) -> None:
    """Write −1 where the bit is set and 1 elsewhere, float32."""
    out[...] = np.where(_signs(bits, out.size), np.float32(-1), np.float32(1))


@quiet
def signs_add(bits: Array, weight: float, total: Array) -> None:
    """Add weight or −weight to each element of the float32 array `total`."""
    by = np.float32(weight)
    total += np.where(_signs(bits, total.size), -by, by)


def signs_settle(votes: Array, out: Array) -> None:
    """Write the sign of each sum of votes, float32: −1, 1, or 0 for a tie."""
    np.sign(votes, out=out)


# --- the mean of |x| ---------------------------------------------------------------------------


def onebit_encode(x: Array, block: int, bits: Array, scales: Array) -> None:
    """Write sign bits and the mean |x| of each block, float32."""
    signs_encode(x, bits)
    sums = halved(rows(np.abs(x) * down(block), block))
    scales[...] = _means(sums, _counts(np.ones(x.size, np.bool_), block), block)


@quiet
def onebit_encode_residual(
    x: Array, e: Array, block: int, bits: Array, scales: Array, out: Array
) -> None:
    """Encode t = x + e, and write t − decode(bits, scales) to `out`."""
    t = x + e
    onebit_encode(t, block, bits, scales)
    onebit_decode(bits, scales, block, out)
    np.subtract(t, out, out=out)


def onebit_decode(bits: Array, scales: Array, block: int, out: Array) -> None:
    """Write −scale where the bit is set and scale elsewhere, float32."""
    each = spread(scales, block, out.size)
    out[...] = np.where(_signs(bits, out.size), -each, each)


@quiet
def onebit_add(bits: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """Add weight · decoded to the float32 array `total`, each product rounded."""
    decoded = np.empty_like(total)
    onebit_decode(bits, scales, block, decoded)
    total += decoded * np.float32(weight)


# --- the means of both signs -------------------------------------------------------------------


def twomeans_encode(x: Array, block: int, bits: Array, scales: Array) -> None:
    """Write sign bits and two float32 per block: the mean of its negatives, then of the rest."""
    signs_encode(x, bits)
    negative = np.signbit(x)
    small = np.abs(x) * down(block)
    for at, chosen in enumerate((negative, ~negative)):
        sums = halved(rows(np.where(chosen, small, np.float32(0)), block))
        means = _means(sums, _counts(chosen, block), block)
        scales[at::2] = means if at else np.float32(0) - means


@quiet
def twomeans_encode_residual(
    x: Array, e: Array, block: int, bits: Array, scales: Array, out: Array
) -> None:
    """Encode t = x + e, and write t − decode(bits, scales) to `out`."""
    t = x + e
    twomeans_encode(t, block, bits, scales)
    twomeans_decode(bits, scales, block, out)
    np.subtract(t, out, out=out)


def twomeans_decode(bits: Array, scales: Array, block: int, out: Array) -> None:
    """Write the block's first mean where the bit is set and its second elsewhere, float32."""
    negative = spread(scales[0::2], block, out.size)
    rest = spread(scales[1::2], block, out.size)
    out[...] = np.where(_signs(bits, out.size), negative, rest)


@quiet
def twomeans_add(bits: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """Add weight · decoded to the float32 array `total`, each product rounded."""
    decoded = np.empty_like(total)
    twomeans_decode(bits, scales, block, decoded)
    total += decoded * np.float32(weight)


# --- MXNet's thresholds ------------------------------------------------------------------------


@quiet
def mx1bit_encode(x: Array, e: Array, threshold: float, bits: Array, out: Array) -> None:
    """Write, for t = x + e: bit 1 and the residual t − 1 where t > threshold, else 0 and t + 1."""
    t = x + e
    above = t > np.float32(threshold)
    bits[...] = np.packbits(above)
    out[...] = np.where(above, t - np.float32(1), t + np.float32(1))


def mx1bit_decode(bits: Array, out: Array) -> None:
    """Write 1 where the bit is set and −1 elsewhere, float32."""
    out[...] = np.where(np.unpackbits(bits, count=out.size), np.float32(1), np.float32(-1))


@quiet
def mx1bit_add(bits: Array, weight: float, total: Array) -> None:
    """Add weight or −weight to each element of the float32 array `total`."""
    by = np.float32(weight)
    total += np.where(np.unpackbits(bits, count=total.size), by, -by)


@quiet
def mx2bit_encode(x: Array, e: Array, threshold: float, codes: Array, out: Array) -> None:
    """Write, for t = x + e: code 3 and the residual t − T where t ≥ T, code 2 and t + T where
    t ≤ −T, else code 0 and t; four codes to a byte, the first in its highest bits."""
    t = x + e
    top = np.float32(threshold)
    above, below = t >= top, t <= -top
    each = rows(np.uint8(3) * above + np.uint8(2) * below, 4)
    codes[...] = (each[:, 0] << 6) | (each[:, 1] << 4) | (each[:, 2] << 2) | each[:, 3]
    out[...] = np.where(above, t - top, np.where(below, t + top, t))


def mx2bit_decode(codes: Array, threshold: float, out: Array) -> None:
    """Write T for code 3, −T for code 2 and 0 for any other, float32."""
    top = np.float32(threshold)
    each = np.stack([(codes >> shift) & 3 for shift in (6, 4, 2, 0)], axis=1).reshape(-1)
    out[...] = np.array([0, 0, -top, top], np.float32)[each[: out.size]]


@quiet
def mx2bit_add(codes: Array, threshold: float, weight: float, total: Array) -> None:
    """Add weight · decoded to the float32 array `total`, each product rounded."""
    decoded = np.empty_like(total)
    mx2bit_decode(codes, threshold, decoded)
    total += decoded * np.float32(weight)
