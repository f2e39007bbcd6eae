"""Selecting by magnitude in Numba: the functions of `numpy_sparse` that do, bit for bit.

What reaches a threshold is collected in one pass, blockwise: comparing writes a byte for each
element, which vectorises, and only groups of eight with a byte set are looked at again. The exact
top-k is such a pass, too: a threshold a little below the k-th largest is estimated from a sample,
and the choice is made among what was collected, by a radix select over the 31 bits of the
magnitude. Only where the sample misled (fewer than k reach it, or far more) the whole array is
looked at again.

Arrays of bits are those of float32 values, signs included. Parts have signatures of their own, so
that the kernels share one copy of each, and stand in this file, as Numba's cache notices changes of
a kernel's own file only. No slices in inner loops: each counts a reference.
"""

from __future__ import annotations

import numpy as np
from numba import types

from zkv.dtypes import Array
from zkv_codecs.kernels.numba_blocks import plus
from zkv_codecs.kernels.numba_types import F4, F4_IN, INT, U1, U2, U4, U4_IN, helper, kernel
from zkv_codecs.kernels.numpy_sparse import SAMPLE_MAX, SAMPLE_MIN, SIGNLESS, UNSAMPLED

BLOCK = 4096
"""Elements whose flags, sums and bits stay in the first level of cache; a multiple of 8."""

BINS = 2048
"""Of the histogram of the upper 11 bits of a magnitude; the other two digits have 10."""

TWO = types.UniTuple(types.int64, 2)
THREE = types.UniTuple(types.int64, 3)
LEVEL = types.Tuple((types.uint32, types.int64))


@kernel(U4_IN, F4)
def clear(indices: Array, out: Array) -> None:
    """See `numpy_sparse.clear`."""
    for i in range(indices.size):
        out[indices[i]] = 0


@kernel(U4_IN, U4_IN, F4)
def restore(indices: Array, bits: Array, out: Array) -> None:
    """Write values back to their positions."""
    values = out.view(np.uint32)
    for i in range(indices.size):
        values[indices[i]] = bits[i]


@kernel(F4_IN, INT, INT, U4)
def sample(x: Array, start: int, stride: int, bits: Array) -> None:
    """Write every `stride`-th element from `start` on."""
    every = x.view(np.uint32)
    for i in range(bits.size):
        bits[i] = every[start + i * stride]


@kernel(F4_IN, F4_IN, INT, INT, U4)
def sample_sum(x: Array, e: Array, start: int, stride: int, bits: Array) -> None:
    """Write every `stride`-th element of x + e from `start` on."""
    sums = bits.view(np.float32)
    for i in range(bits.size):
        sums[i] = x[start + i * stride] + e[start + i * stride]


@kernel(U4_IN, INT, "u4", U1, U2, U4, U4, INT, returns=INT)
def reach(
    bits: Array,
    first: int,
    least: np.uint32,
    flags: Array,
    groups: Array,
    at: Array,
    found: Array,
    count: int,
) -> int:
    """Append positions, from `first` on, and bits of what reaches `least`; return the new count.

    At most `BLOCK` bits, for which `at` and `found` must have room behind `count`; `flags` and
    `groups` are scratch. No branch here is one that chance decides.
    """
    for i in range(bits.size):
        flags[i] = np.uint32(bits[i] & SIGNLESS) >= least
    total = (bits.size + 7) >> 3
    for i in range(bits.size, 8 * total):
        flags[i] = 0
    words = flags.view(np.uint64)
    hits = 0
    for group in range(total):
        groups[hits] = group
        hits += words[group] != 0
    before = count
    for hit in range(hits):
        start = 8 * np.int64(groups[hit])
        for i in range(start, start + 8):
            at[count] = i
            count += int(flags[i])
    for i in range(before, count):
        found[i] = bits[at[i]]
        at[i] += np.uint32(first)
    return count


@kernel(F4_IN, "u4", INT, U4, U4, returns=INT)
def collect(x: Array, least: np.uint32, room: int, at: Array, found: Array) -> int:
    """Collect what reaches `least`; return how many, or more than `room` if they are too many.

    `at` and `found` have `room` + `BLOCK` elements.
    """
    flags, groups = np.empty(BLOCK, np.uint8), np.empty(BLOCK // 8, np.uint16)
    bits = x.view(np.uint32)
    count = 0
    for first in range(0, x.size, BLOCK):
        count = reach(bits[first : first + BLOCK], first, least, flags, groups, at, found, count)
        if count > room:
            break
    return count


@kernel(F4_IN, F4_IN, F4, "u4", INT, U4, U4, returns=INT)
def collect_sum(
    x: Array, e: Array, out: Array, least: np.uint32, room: int, at: Array, found: Array
) -> int:
    """Write x + e to `out`, all of it, and do with it what `collect` does.

    What is collected is replaced by 0 in `out` while it is in cache.
    """
    flags, groups = np.empty(BLOCK, np.uint8), np.empty(BLOCK // 8, np.uint16)
    count = 0
    for first in range(0, x.size, BLOCK):
        xs = x[first : first + BLOCK]
        es = e[first : first + BLOCK]
        ts = out[first : first + BLOCK]
        plus(xs, es, ts)
        if count <= room:
            before = count
            bits = ts.view(np.uint32)
            count = reach(bits, first, least, flags, groups, at, found, count)
            clear(at[before:count], out)
    return count


@kernel(U4_IN, U4, INT, "u4", INT, returns=TWO)
def digit(bits: Array, bins: Array, shift: int, upper: np.uint32, k: int) -> tuple[int, int]:
    """Return a digit of the k-th largest magnitude, and its rank among those that share it.

    Only magnitudes whose bits above the digit are `upper` are counted. The digit is as wide as
    `bins`, a power of two, and starts at bit `shift`.
    """
    bins[:] = 0
    mask = np.uint32(bins.size - 1)
    above = np.uint32(shift + (11 if bins.size == BINS else 10))
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & SIGNLESS)
        if magnitude >> above == upper:
            bins[(magnitude >> np.uint32(shift)) & mask] += np.uint32(1)
    at = bins.size - 1
    while k > bins[at]:
        k -= int(bins[at])
        at -= 1
    return at, k


@kernel(U4_IN, INT, returns=LEVEL)
def kth(bits: Array, k: int) -> tuple[np.uint32, int]:
    """Return the k-th largest magnitude, and how many of its equals are among the k largest."""
    bins = np.empty(BINS, np.uint32)
    high, k = digit(bits, bins, 20, np.uint32(0), k)
    upper = np.uint32(high)
    middle, k = digit(bits, bins[:1024], 10, upper, k)
    upper = np.uint32((upper << np.uint32(10)) | np.uint32(middle))
    low, k = digit(bits, bins[:1024], 0, upper, k)
    return np.uint32((upper << np.uint32(10)) | np.uint32(low)), k


@kernel(U4, U4, "u4", INT, U4, U4, INT, returns=THREE)
def choose(
    at: Array, found: Array, level: np.uint32, ties: int, indices: Array, bits: Array, count: int
) -> tuple[int, int, int]:
    """Append what is above `level` and the first `ties` on it, until `indices` is full.

    What is not chosen moves to the front of `at` and `found`. Returns the new count, how many ties
    are still to come, and how many were not chosen.
    """
    left = 0
    stop = 0
    while stop < at.size and count < indices.size:
        magnitude = np.uint32(found[stop] & SIGNLESS)
        tie = (magnitude == level) & (ties > 0)
        taken = (magnitude > level) | tie
        indices[count] = at[stop]
        bits[count] = found[stop]
        at[left] = at[stop]
        found[left] = found[stop]
        count += taken
        ties -= tie
        left += not taken
        stop += 1
    for i in range(stop, at.size):
        at[left] = at[i]
        found[left] = found[i]
        left += 1
    return count, ties, left


@kernel(U4, U4, U4, U4, returns=TWO)
def settle(at: Array, found: Array, indices: Array, bits: Array) -> tuple[int, int]:
    """Choose the largest of what was collected; return how many were, and how many were not.

    The latter move to the front of `at` and `found`.
    """
    k = indices.size
    if at.size > k:
        level, ties = kth(found, k)
        return k, choose(at, found, level, ties, indices, bits, 0)[2]
    for i in range(at.size):
        indices[i] = at[i]
        bits[i] = found[i]
    return at.size, 0


@kernel(U4_IN, "u4", INT, U4, U4)
def choose_all(bits: Array, level: np.uint32, ties: int, indices: Array, values: Array) -> None:
    """Choose from all of an array, block by block, so that its ties need no room."""
    flags, groups = np.empty(BLOCK, np.uint8), np.empty(BLOCK // 8, np.uint16)
    at, found = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)
    count = 0
    for first in range(0, bits.size, BLOCK):
        least = level if ties else level + np.uint32(1)
        size = reach(bits[first : first + BLOCK], first, least, flags, groups, at, found, 0)
        count, ties, _ = choose(at[:size], found[:size], level, ties, indices, values, count)


@kernel(F4_IN, INT, U4, U4)
def choose_exact(x: Array, zeros: int, indices: Array, values: Array) -> None:
    """Choose the largest of x: a histogram of their upper bits, then one pass that collects.

    Where ties make that too many, all bits are counted, in three passes. `zeros`, if not 0, is how
    many of the largest are known to be zeros; all others are known not to be.
    """
    k = indices.size
    bits = x.view(np.uint32)
    if zeros:
        choose_all(bits, np.uint32(0), zeros, indices, values)
        return
    bins = np.empty(BINS, np.uint32)
    high, rank = digit(bits, bins, 20, np.uint32(0), k)
    size = k - rank + int(bins[high])
    if size <= 4 * k + BLOCK:
        at, found = np.empty(size + BLOCK, np.uint32), np.empty(size + BLOCK, np.uint32)
        collect(x, np.uint32(high << 20), size, at, found)
        settle(at[:size], found[:size], indices, values)
    else:
        level, ties = kth(bits, k)
        choose_all(bits, level, ties, indices, values)


@helper
def _stride_of(n: int) -> int:
    """See `numpy_sparse.stride_of`."""
    return 1 if n <= UNSAMPLED else n // min(max(n // 64, SAMPLE_MIN), SAMPLE_MAX) | 1


@helper
def _rank_below(k: int, size: int, n: int) -> int:
    """Return a rank in a sample that almost surely is at or below the k-th largest of n elements.

    Four standard deviations below what is expected, as if the sample were drawn by chance.
    """
    rank = k * size / n
    return min(size, int(rank + 4 * np.sqrt(rank) + 4))


@kernel(U4_IN, INT, INT, INT, returns=LEVEL)
def threshold(sampled: Array, rank: int, stride: int, n: int) -> tuple[np.uint32, int]:
    """Return the rank-th largest magnitude of a sample, and room for the elements that reach it.

    Room for eight standard deviations more than expected: only a misleading sample needs more. It
    is at least rank · stride. Zeros never reach the threshold.
    """
    least = max(kth(sampled, rank)[0], np.uint32(1))
    return least, min(n, int((rank + 8 * np.sqrt(rank) + 8) * stride))


@helper
def _zeros(least: np.uint32, count: int, k: int) -> int:
    """Return how many zeros are wanted, where all that is not 0 was found to be `count` < k."""
    return max(k - count, 0) if least == 1 else 0


@kernel(F4_IN, F4, U4)
def topk_encode(x: Array, values: Array, indices: Array) -> None:
    """See `numpy_sparse.topk_encode`."""
    n, k = x.size, values.size
    bits = values.view(np.uint32)
    if k == n:
        for i in range(n):
            values[i] = x[i]
            indices[i] = i
    elif n <= UNSAMPLED:
        choose_exact(x, 0, indices, bits)
    else:
        stride = _stride_of(n)
        sampled = np.empty((n - 1) // stride + 1, np.uint32)
        sample(x, 0, stride, sampled)
        least, room = threshold(sampled, _rank_below(k, sampled.size, n), stride, n)
        at, found = np.empty(room + BLOCK, np.uint32), np.empty(room + BLOCK, np.uint32)
        count = collect(x, least, room, at, found)
        if k <= count <= room:
            settle(at[:count], found[:count], indices, bits)
        else:
            choose_exact(x, _zeros(least, count, k), indices, bits)


@kernel(F4_IN, F4_IN, F4, U4, F4)
def topk_encode_residual(x: Array, e: Array, values: Array, indices: Array, out: Array) -> None:
    """See `numpy_sparse.topk_encode_residual`."""
    n, k = x.size, values.size
    bits = values.view(np.uint32)
    if k == n or n <= UNSAMPLED:
        plus(x, e, out)
        topk_encode(out, values, indices)
        clear(indices, out)
    else:
        stride = _stride_of(n)
        sampled = np.empty((n - 1) // stride + 1, np.uint32)
        sample_sum(x, e, 0, stride, sampled)
        least, room = threshold(sampled, _rank_below(k, sampled.size, n), stride, n)
        at, found = np.empty(room + BLOCK, np.uint32), np.empty(room + BLOCK, np.uint32)
        count = collect_sum(x, e, out, least, room, at, found)
        if k <= count <= room:
            rest = settle(at[:count], found[:count], indices, bits)[1]
            restore(at[:rest], found[:rest], out)
        else:
            restore(at[:count], found[:count], out)
            choose_exact(out, _zeros(least, count, k), indices, bits)
            clear(indices, out)


@kernel(F4_IN, INT, F4, U4, returns=INT)
def sampled_encode(x: Array, start: int, values: Array, indices: Array) -> int:
    """See `numpy_sparse.sampled_encode`."""
    n, k = x.size, values.size
    if n == 0:
        return 0
    bits = values.view(np.uint32)
    stride = _stride_of(n)
    sampled = np.empty((n - start - 1) // stride + 1, np.uint32)
    sample(x, start, stride, sampled)
    least, room = threshold(sampled, (k * sampled.size + n - 1) // n, stride, n)
    at, found = np.empty(room + BLOCK, np.uint32), np.empty(room + BLOCK, np.uint32)
    count = collect(x, least, room, at, found)
    if count > room:
        choose_exact(x, 0, indices, bits)
        return k
    return settle(at[:count], found[:count], indices, bits)[0]


@kernel(F4_IN, F4_IN, INT, F4, U4, F4, returns=INT)
def sampled_encode_residual(
    x: Array, e: Array, start: int, values: Array, indices: Array, out: Array
) -> int:
    """See `numpy_sparse.sampled_encode_residual`."""
    n, k = x.size, values.size
    if n == 0:
        return 0
    bits = values.view(np.uint32)
    stride = _stride_of(n)
    sampled = np.empty((n - start - 1) // stride + 1, np.uint32)
    sample_sum(x, e, start, stride, sampled)
    least, room = threshold(sampled, (k * sampled.size + n - 1) // n, stride, n)
    at, found = np.empty(room + BLOCK, np.uint32), np.empty(room + BLOCK, np.uint32)
    count = collect_sum(x, e, out, least, room, at, found)
    if count > room:
        restore(at[:count], found[:count], out)
        choose_exact(out, 0, indices, bits)
        clear(indices, out)
        return k
    taken, rest = settle(at[:count], found[:count], indices, bits)
    restore(at[:rest], found[:rest], out)
    return taken


@kernel(F4_IN, "f8", F4, U4)
def reaching_encode(x: Array, least: float, values: Array, indices: Array) -> None:
    """See `numpy_sparse.reaching_encode`."""
    flags, groups = np.empty(BLOCK, np.uint8), np.empty(BLOCK // 8, np.uint16)
    at, found = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)
    every, bits = x.view(np.uint32), values.view(np.uint32)
    level = np.float32(least).view(np.uint32)
    count = 0
    for first in range(0, x.size, BLOCK):
        block = every[first : first + BLOCK]
        size = reach(block, first, level, flags, groups, at, found, 0)
        for i in range(size):
            indices[count + i] = at[i]
            bits[count + i] = found[i]
        count += size
