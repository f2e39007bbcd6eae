"""The positions of several sparse arrays as one list, in Numba: a set of bits, walked once.

A bit for each element fits in a core's own cache (32 KiB for a block of 1 MiB), and sorting the
positions, or merging them two by two, costs several times as much.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.numba_types import INT, U4, U4_IN, helper, kernel

ONE = np.uint64(1)
WORD_BITS, WORD_SHIFT = np.uint32(63), np.uint32(6)

_DE_BRUIJN = 0x03F79D71B4CB0A89
SPREAD, TOP = np.uint64(_DE_BRUIJN), np.uint64(58)
"""A power of two times a de Bruijn sequence has its exponent's own six bits on top (Leiserson,
Prokop, Randall: Using de Bruijn Sequences to Index a 1 in a Computer Word, 1998)."""
EXPONENTS = np.zeros(64, np.uint8)
for _exponent in range(64):
    EXPONENTS[(_DE_BRUIJN << _exponent & 2**64 - 1) >> 58] = _exponent

PAIRS, FOURS = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333)
BYTES, SUM = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x0101010101010101)


@helper
def _ones(word: Any) -> Any:
    """Return how many bits are set (LLVM knows this form, and makes one instruction of it)."""
    word = word - ((word >> ONE) & PAIRS)
    word = (word & FOURS) + ((word >> np.uint64(2)) & FOURS)
    word = (word + (word >> np.uint64(4))) & BYTES
    return np.uint32((word * SUM) >> np.uint64(56))


@kernel(U4_IN, INT, U4, U4, returns=INT)
def merge(indices: Array, size: int, positions: Array, slots: Array) -> int:
    """See `numpy_sparse.merge`."""
    words = np.zeros((size + 63) >> 6, np.uint64)
    before = np.empty(words.size, np.uint32)
    for i in range(indices.size):
        words[indices[i] >> WORD_SHIFT] |= ONE << np.uint64(indices[i] & WORD_BITS)
    count = 0
    for at in range(words.size):
        before[at] = count
        word = words[at]
        while word:
            lowest = word & (~word + ONE)
            positions[count] = np.uint32(at << 6) | np.uint32(EXPONENTS[(lowest * SPREAD) >> TOP])
            count += 1
            word ^= lowest
    for i in range(indices.size):
        at = indices[i] >> WORD_SHIFT
        below = words[at] & ((ONE << np.uint64(indices[i] & WORD_BITS)) - ONE)
        slots[i] = before[at] + _ones(below)
    return count
