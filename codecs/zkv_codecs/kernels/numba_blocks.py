"""Blocks in Numba: sums in the order of `numpy_blocks`, and bits out of and into bytes.

Kernels work on groups of `GROUP` elements, which stay in the first cache, and in long loops, as
short ones cost more than what they do. Signs become bits by way of flags, one byte each, since
loops over those vectorise; eight of them at a time are then folded into one byte. That takes a
little-endian machine, which all of Numba's are.
"""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.numba_types import part
from zkv_codecs.kernels.numpy_blocks import BLOCK_MAX

GROUP = BLOCK_MAX
"""Elements, so that every size of a block divides it."""

_RUN = 64
"""Loops of this fixed length vectorise without a rest; blocks are no shorter."""

SPREAD_LOW, SPREAD_HIGH = np.uint64(0x8040201008040201), np.uint64(0x0102040810204080)
"""Masks that leave bit 0, or bit 7, of a byte in the first of its eight copies."""
_COPIES = np.uint64(0x0101010101010101)
GATHER_LOW, GATHER_HIGH = np.uint64(0x0102040810204080), np.uint64(0x8040201008040201)
"""Factors that bring eight flags, one in each byte, into the highest byte of the product, the first
as its bit 0 or 7. No two of the 64 bits that are added fall on one place, so nothing is carried."""


@part
def plus(x: Array, e: Array, out: Array) -> None:
    """Write x + e to `out`, which may be x: loops over two arrays that are one do not vectorise."""
    if out.ctypes.data == x.ctypes.data:
        for i in range(out.size):
            out[i] = out[i] + e[i]
    else:
        for i in range(x.size):
            out[i] = x[i] + e[i]


@part
def block_sums(terms: Array, block: int, sums: Array) -> None:
    """Write the sum of each whole block of `terms`, by halving; `terms` is written over."""
    for at in range(sums.size):
        start = at * block
        width = block
        while width > _RUN:
            width >>= 1
            for run in range(start, start + width, _RUN):
                low = terms[run : run + _RUN]
                high = terms[run + width : run + width + _RUN]
                for i in range(_RUN):
                    low[i] = low[i] + high[i]
        sums[at] = run_sum(terms[start : start + _RUN])


@part
def run_sum(t: Array) -> np.float32:
    """Return the sum of 64 terms, by halving; `t` is written over."""
    for i in range(32):
        t[i] = t[i] + t[i + 32]
    for i in range(16):
        t[i] = t[i] + t[i + 16]
    for i in range(8):
        t[i] = t[i] + t[i + 8]
    for i in range(4):
        t[i] = t[i] + t[i + 4]
    total: np.float32 = (t[0] + t[2]) + (t[1] + t[3])
    return total


@part
def largest_bits(x: Array) -> np.int32:
    """Return the bits of the largest magnitude: maxima of floats do not vectorise (NaN)."""
    words = x.view(np.int32)
    largest = np.int32(0)
    for i in range(words.size):
        largest = np.int32(max(largest, np.int32(words[i] & np.int32(0x7FFFFFFF))))
    return largest


@part
def gather(eights: Array, factor: np.uint64, bits: Array) -> None:
    """Write a byte for each eight flags, which are 0 or 1; `eights` has eight of them in each."""
    for k in range(bits.size):
        bits[k] = np.uint8((eights[k] * factor) >> np.uint64(56))


@part
def signs(x: Array, flags: Array, bits: Array) -> None:
    """Write a flag, 1 for negative, and a bit for each element of a group."""
    words = x.view(np.int32)
    flags[x.size & -8 : (x.size + 7) & -8] = 0
    marks = flags[: x.size]
    for i in range(words.size):
        marks[i] = np.uint8(words[i] < 0)
    gather(flags.view(np.uint64), GATHER_LOW, bits)


@part
def spread(bits: Array, mask: np.uint64, flags: Array) -> None:
    """Write eight flags for each byte of bits: not zero where the bit is set."""
    eights = flags.view(np.uint64)
    for k in range(bits.size):
        eights[k] = (np.uint64(bits[k]) * _COPIES) & mask
