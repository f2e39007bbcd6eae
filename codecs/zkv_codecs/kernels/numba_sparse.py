"""Sparsifiers in Numba: the functions of `numpy_sparse`, bit for bit.

The exact top-k is one pass: a threshold a little below the k-th largest is estimated from a sample,
what reaches it is collected, and the choice is made among that. Only where the sample misled (fewer
than k reach it, or far more) the whole array is looked at again.
"""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.numba_draw import draw as draw
from zkv_codecs.kernels.numba_select import (
    BLOCK,
    LEVEL,
    choose_exact,
    clear,
    collect,
    collect_sum,
    kth,
    reach,
    restore,
    sample,
    sample_sum,
    settle,
)
from zkv_codecs.kernels.numba_types import F4, F4_IN, F8, INT, U4, U4_IN, helper, kernel
from zkv_codecs.kernels.numpy_sparse import SAMPLE_MAX, SAMPLE_MIN, SIGNLESS, UNSAMPLED


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
        for i in range(n):
            out[i] = x[i] + e[i]
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


@kernel(F4_IN, "f8", returns=INT)
def reaching(x: Array, least: float) -> int:
    """See `numpy_sparse.reaching`."""
    bits = x.view(np.uint32)
    level = np.float32(least).view(np.uint32)
    count = 0
    for i in range(bits.size):
        if np.uint32(bits[i] & SIGNLESS) >= level:
            count += 1
    return count


@kernel(F4_IN, F4_IN, "f8", F4, returns=INT)
def reaching_sum(x: Array, e: Array, least: float, out: Array) -> int:
    """See `numpy_sparse.reaching_sum`."""
    count = 0
    for first in range(0, x.size, BLOCK):
        xs = x[first : first + BLOCK]
        es = e[first : first + BLOCK]
        ts = out[first : first + BLOCK]
        for i in range(xs.size):
            ts[i] = xs[i] + es[i]
        count += reaching(ts, least)
    return count


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


@kernel(F4_IN, U4_IN, "f8", F4)
def gather(x: Array, indices: Array, factor: float, values: Array) -> None:
    """See `numpy_sparse.gather`."""
    by = np.float32(factor)
    for i in range(indices.size):
        values[i] = x[indices[i]] * by


@kernel(F4_IN, F4_IN, U4_IN, F4, F4)
def gather_residual(x: Array, e: Array, indices: Array, values: Array, out: Array) -> None:
    """See `numpy_sparse.gather_residual`."""
    for i in range(x.size):
        out[i] = x[i] + e[i]
    for i in range(indices.size):
        values[i] = out[indices[i]]
        out[indices[i]] = 0


@kernel(F4_IN, U4_IN, F4)
def scatter(values: Array, indices: Array, out: Array) -> None:
    """See `numpy_sparse.scatter`."""
    out[:] = 0
    for i in range(indices.size):
        out[indices[i]] = values[i]


@kernel(F4_IN, U4_IN, "f8", F4)
def add(values: Array, indices: Array, weight: float, total: Array) -> None:
    """See `numpy_sparse.add`."""
    by = np.float32(weight)
    for i in range(indices.size):
        total[indices[i]] += values[i] * by


@kernel(F4_IN, U4_IN, "f8", F8)
def add_wide(values: Array, indices: Array, weight: float, total: Array) -> None:
    """See `numpy_sparse.add_wide`."""
    for i in range(indices.size):
        total[indices[i]] += np.float64(values[i]) * weight
