"""Codings of ascending positions in Numba: the functions of `numpy_indices`, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from zkv.dtypes import Array
from zkv_codecs.kernels.numba_types import INT, U1, U1_IN, U2, U2_IN, U4, U4_IN, helper, kernel
from zkv_codecs.kernels.numpy_indices import GAPS


@kernel(U4_IN, INT, returns=types.boolean)
def ascending(indices: Array, n: int) -> bool:
    """See `numpy_indices.ascending`."""
    wrong = 0
    for i in range(1, indices.size):
        wrong |= indices[i] <= indices[i - 1]
    return wrong == 0 and (indices.size == 0 or int(indices[indices.size - 1]) < n)


@kernel(U4_IN, U4, U2)
def u16_encode(indices: Array, counts: Array, offsets: Array) -> None:
    """See `numpy_indices.u16_encode`."""
    counts[:] = 0
    for i in range(indices.size):
        counts[indices[i] >> np.uint32(16)] += np.uint32(1)
        offsets[i] = indices[i] & np.uint32(0xFFFF)


@kernel(U4_IN, U2_IN, U4)
def u16_decode(counts: Array, offsets: Array, out: Array) -> None:
    """See `numpy_indices.u16_decode`."""
    start = 0
    for block in range(counts.size):
        stop = start + int(counts[block])
        ins, outs = offsets[start:stop], out[start:stop]
        base = np.uint32(block << 16)
        for i in range(ins.size):
            outs[i] = base | np.uint32(ins[i])
        start = stop


@kernel(U4_IN, U1)
def bitmap_encode(indices: Array, bits: Array) -> None:
    """See `numpy_indices.bitmap_encode`."""
    bits[:] = 0
    for i in range(indices.size):
        bits[indices[i] >> np.uint32(3)] |= np.uint8(1 << (int(indices[i]) & 7))


@kernel(U1_IN, returns=INT)
def bitmap_ones(bits: Array) -> int:
    """See `numpy_indices.bitmap_ones`."""
    ones = 0
    for i in range(bits.size):
        # Bits added in pairs, in fours, in eights.
        byte = int(bits[i])
        byte = (byte & 0x55) + ((byte >> 1) & 0x55)
        byte = (byte & 0x33) + ((byte >> 2) & 0x33)
        ones += (byte & 0x0F) + (byte >> 4)
    return ones


@kernel(U1_IN, U4)
def bitmap_decode(bits: Array, out: Array) -> None:
    """See `numpy_indices.bitmap_decode`."""
    count = 0
    at = 0
    while at < bits.size and count + 8 <= out.size:
        byte = int(bits[at])
        if byte:
            for bit in range(8):
                out[count] = 8 * at + bit
                count += (byte >> bit) & 1
        at += 1
    # Where fewer than eight are to come, nothing may be written that is not kept.
    while at < bits.size and count < out.size:
        for bit in range(8):
            if (int(bits[at]) >> bit) & 1 and count < out.size:
                out[count] = 8 * at + bit
                count += 1
        at += 1


@helper
def _before(indices: Array, first: int) -> np.uint32:
    """Return the position behind the index before `first`, 0 for none."""
    return indices[first - 1] + np.uint32(1) if first else np.uint32(0)


@kernel(U4_IN, U1)
def gaps_widths(indices: Array, widths: Array) -> None:
    """See `numpy_indices.gaps_widths`."""
    for block in range(widths.size):
        first = block * GAPS
        part = indices[first : first + GAPS]
        all_ = np.uint32(part[0] - _before(indices, first))
        for i in range(1, part.size):
            all_ |= np.uint32(part[i] - part[i - 1] - np.uint32(1))
        width = 0
        while all_ >> np.uint32(width):
            width += 1
        widths[block] = width


@helper
def _put(words: Array, start: int, value: np.uint32) -> None:
    shifted = np.uint64(value) << np.uint64(start & 31)
    words[start >> 5] |= np.uint32(shifted & np.uint64(0xFFFFFFFF))
    words[(start >> 5) + 1] |= np.uint32(shifted >> np.uint64(32))


@helper
def _get(words: Array, start: int, mask: np.uint64) -> np.uint64:
    pair = np.uint64(words[start >> 5]) | np.uint64(words[(start >> 5) + 1]) << np.uint64(32)
    return pair >> np.uint64(start & 31) & mask


@kernel(U4_IN, U1_IN, U4)
def gaps_encode(indices: Array, widths: Array, words: Array) -> None:
    """See `numpy_indices.gaps_encode`."""
    words[:] = 0
    start = 0
    next_ = np.uint32(0)
    for block in range(widths.size):
        width = int(widths[block])
        for i in range(block * GAPS, min((block + 1) * GAPS, indices.size)):
            _put(words, start, np.uint32(indices[i] - next_))
            next_ = np.uint32(indices[i] + np.uint32(1))
            start += width


@kernel(U4_IN, U1_IN, U4, returns=INT)
def gaps_decode(words: Array, widths: Array, out: Array) -> int:
    """See `numpy_indices.gaps_decode`."""
    start = 0
    last = -1
    for block in range(widths.size):
        width = int(widths[block])
        mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
        for i in range(block * GAPS, min((block + 1) * GAPS, out.size)):
            gap: Any = np.int64(_get(words, start, mask))
            last += gap + 1
            out[i] = np.uint32(last & 0xFFFFFFFF)
            start += width
    return last


@kernel(U4_IN, INT, U4, U1)
def elias_fano_encode(indices: Array, low: int, words: Array, bits: Array) -> None:
    """See `numpy_indices.elias_fano_encode`."""
    words[:] = 0
    bits[:] = 0
    mask = np.uint32((1 << low) - 1)
    for i in range(indices.size):
        _put(words, i * low, np.uint32(indices[i] & mask))
        at = (int(indices[i]) >> low) + i
        bits[at >> 3] |= np.uint8(1 << (at & 7))


@kernel(U4_IN, INT, U1_IN, U4)
def elias_fano_decode(words: Array, low: int, bits: Array, out: Array) -> None:
    """See `numpy_indices.elias_fano_decode`."""
    bitmap_decode(bits, out)
    mask = (np.uint64(1) << np.uint64(low)) - np.uint64(1)
    for i in range(out.size):
        high = np.uint32(out[i] - np.uint32(i)) << np.uint32(low)
        out[i] = np.uint32(high) | np.uint32(_get(words, i * low, mask))
