"""Codings of ascending positions in NumPy: the specification that the other backends match.

All is little-endian, in bytes and in bits: bit i of an array of words is bit i % 32 of word
i // 32. Indices are uint32 and strictly ascending. Decoders stay within their arrays if lengths,
counts and widths were checked; whether what they give is ascending and in range is looked at
afterwards.
"""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array

GAPS = 128
"""Gaps that share a width."""


def ascending(indices: Array, n: int) -> bool:
    """Return whether the uint32 indices are strictly ascending and below n."""
    if indices.size == 0:
        return True
    return bool(indices[-1] < n and np.all(indices[1:] > indices[:-1]))


def u16_encode(indices: Array, counts: Array, offsets: Array) -> None:
    """Write how many indices each block of 65,536 has, uint32, and their offsets in it, uint16."""
    counts[...] = np.bincount(indices >> np.uint32(16), minlength=counts.size)
    offsets[...] = indices & np.uint32(0xFFFF)


def u16_decode(counts: Array, offsets: Array, out: Array) -> None:
    """Write the indices; the counts add up to as many as there are offsets."""
    blocks = np.arange(counts.size, dtype=np.uint32) << np.uint32(16)
    np.bitwise_or(np.repeat(blocks, counts), offsets, out=out)


def bitmap_encode(indices: Array, bits: Array) -> None:
    """Set bit i for each index i, and no other, in an array of bytes."""
    bits[...] = 0
    ones = np.left_shift(1, indices & np.uint32(7), dtype=np.uint32).astype(np.uint8)
    np.bitwise_or.at(bits, indices >> np.uint32(3), ones)


def bitmap_ones(bits: Array) -> int:
    """Return how many bits are set in an array of bytes."""
    return int(np.unpackbits(bits[bits != 0]).sum(dtype=np.int64))


def bitmap_decode(bits: Array, out: Array) -> None:
    """Write the positions of the bits that are set: as many as `out` has room for."""
    at = np.flatnonzero(bits)
    row, bit = np.nonzero(np.unpackbits(bits[at], bitorder="little").reshape(-1, 8))
    out[...] = at[row] * 8 + bit


def gaps_widths(indices: Array, widths: Array) -> None:
    """Write how many bits the largest gap of each block of `GAPS` takes, uint8.

    A gap is the number of positions left out since the index before, or since −1 for the first.
    """
    if indices.size:
        largest = np.maximum.reduceat(_gaps(indices), np.arange(0, indices.size, GAPS))
        widths[...] = np.frexp(largest.astype(np.float64))[1]


def gaps_encode(indices: Array, widths: Array, words: Array) -> None:
    """Pack the gaps one behind the other, each as wide as its block says, into uint32 words.

    `words` has at least one more word than that takes.
    """
    _pack(_gaps(indices), _starts(widths, indices.size)[0], words)


def gaps_decode(words: Array, widths: Array, out: Array) -> int:
    """Write the indices modulo 2**32, and return the last one as it is, or −1 for none."""
    starts, wide = _starts(widths, out.size)
    steps = _unpack(words, starts, wide).astype(np.int64) + 1
    indices = np.cumsum(steps) - 1
    out[...] = indices & 0xFFFFFFFF
    return int(indices[-1]) if out.size else -1


def elias_fano_encode(indices: Array, low: int, words: Array, bits: Array) -> None:
    """Pack the `low` lower bits of each index into words, and the rest in unary into bytes.

    Bit (index >> low) + j is set for the j-th index, from 0. `words` has at least one more word
    than it takes. (Elias: Efficient Storage and Retrieval by Content and Address of Static Files,
    J. ACM 1974.)
    """
    order = np.arange(indices.size, dtype=np.uint32)
    lower = indices & np.uint32((1 << low) - 1)
    _pack(lower, order.astype(np.int64) * low, words)
    bitmap_encode((indices >> np.uint32(low)) + order, bits)


def elias_fano_decode(words: Array, low: int, bits: Array, out: Array) -> None:
    """Write the indices modulo 2**32; as many bits are set as `out` has room for."""
    bitmap_decode(bits, out)
    order = np.arange(out.size, dtype=np.uint32)
    lower = _unpack(words, order.astype(np.int64) * low, np.full(out.size, low, np.uint64))
    out -= order
    out <<= np.uint32(low)
    out |= lower.astype(np.uint32)


def _gaps(indices: Array) -> Array:
    gaps = indices.copy()
    gaps[1:] -= indices[:-1] + np.uint32(1)
    return gaps


def _starts(widths: Array, count: int) -> tuple[Array, Array]:
    """Return the first bit of each value (int64) and its width (uint64)."""
    wide = np.repeat(widths, GAPS)[:count].astype(np.int64)
    return np.cumsum(wide) - wide, wide.astype(np.uint64)


def _pack(values: Array, starts: Array, words: Array) -> None:
    words[...] = 0
    shifted = values.astype(np.uint64) << (starts & 31).astype(np.uint64)
    np.bitwise_or.at(words, starts >> 5, (shifted & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    np.bitwise_or.at(words, (starts >> 5) + 1, (shifted >> np.uint64(32)).astype(np.uint32))


def _unpack(words: Array, starts: Array, widths: Array) -> Array:
    """Return values of at most 32 bits, uint64."""
    pair = words[starts >> 5] | words[(starts >> 5) + 1].astype(np.uint64) << np.uint64(32)
    mask = (np.uint64(1) << widths) - np.uint64(1)
    values: Array = pair >> (starts & 31).astype(np.uint64) & mask
    return values
