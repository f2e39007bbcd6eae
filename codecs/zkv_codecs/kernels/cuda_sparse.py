"""Sparsifiers on a CUDA device: the functions of `numpy_sparse`, bit for bit, over CuPy arrays.

Functions that return a count wait for the device; no other does.
"""

from __future__ import annotations

import math

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.cuda_module import array, empty, launch, per_chunk, per_element
from zkv_codecs.kernels.numpy_sparse import stride_of

FAMILY = "sparse"
BINS = 2048
CHUNK = 1024
"""As in the text: elements that a warp goes through in order."""

DIGITS = ((0, 20), (0x7FF00000, 10), (0x7FFFFC00, 0))
"""Passes over the 31 bits of a magnitude: those found before, and where the next ones are."""

COUNT_BLOCKS_MAX = 1024
"""More blocks than run at once would only make more histograms."""


def topk_encode(x: Array, values: Array, indices: Array) -> None:
    """See `numpy_sparse.topk_encode`."""
    if values.size:
        state = _select(x, 0, 1, values.size)
        _write(x, state, *_count(x, state)[:2], values, indices)


def topk_encode_residual(x: Array, e: Array, values: Array, indices: Array, out: Array) -> None:
    """See `numpy_sparse.topk_encode_residual`."""
    _sum(x, e, out)
    topk_encode(out, values, indices)
    clear(indices, out)


def sampled_encode(x: Array, start: int, values: Array, indices: Array) -> int:
    """See `numpy_sparse.sampled_encode`."""
    n, k = x.size, values.size
    if n == 0:
        return 0
    stride = stride_of(n)
    sampled = -(-(n - start) // stride)
    state = _select(x, start, stride, -(-k * sampled // n))
    launch(FAMILY, "reach_all", 1, state)
    above, level, total = _count(x, state)
    count = int(total[0])
    if count > k:
        # The k largest of those that reach the threshold are the k largest of all.
        topk_encode(x, values, indices)
        return k
    _write(x, state, above, level, values, indices)
    return count


def sampled_encode_residual(
    x: Array, e: Array, start: int, values: Array, indices: Array, out: Array
) -> int:
    """See `numpy_sparse.sampled_encode_residual`."""
    _sum(x, e, out)
    count = sampled_encode(out, start, values, indices)
    clear(indices[:count], out)
    return count


def reaching(x: Array, least: float) -> int:
    """See `numpy_sparse.reaching`."""
    return int(_count(x, _reach(least))[2][0]) if x.size else 0


def reaching_sum(x: Array, e: Array, least: float, out: Array) -> int:
    """See `numpy_sparse.reaching_sum`."""
    _sum(x, e, out)
    return reaching(out, least)


def reaching_encode(x: Array, least: float, values: Array, indices: Array) -> None:
    """See `numpy_sparse.reaching_encode`."""
    if values.size:
        state = _reach(least)
        _write(x, state, *_count(x, state)[:2], values, indices)


def clear(indices: Array, out: Array) -> None:
    """See `numpy_sparse.clear`."""
    per_element(FAMILY, "clear", indices.size, (indices,), out)


def draw(n: int, keys: Array, indices: Array) -> None:
    """See `numpy_sparse.draw`; `keys` are in the host's memory."""
    if n == 0 or indices.size == 0:
        return
    rows = math.isqrt(n - 1) + 1
    extents = np.uint32(n), np.uint32(rows), np.uint32(-(-n // rows))
    per_element(FAMILY, "draw", indices.size, (*extents, array(keys)), indices)
    indices.sort()


def gather(x: Array, indices: Array, factor: float, values: Array) -> None:
    """See `numpy_sparse.gather`."""
    per_element(FAMILY, "gather", indices.size, (x, indices), np.float32(factor), values)


def gather_residual(x: Array, e: Array, indices: Array, values: Array, out: Array) -> None:
    """See `numpy_sparse.gather_residual`."""
    _sum(x, e, out)
    per_element(FAMILY, "take_out", indices.size, (indices,), values, out)


def scatter(values: Array, indices: Array, out: Array) -> None:
    """See `numpy_sparse.scatter`."""
    out.fill(0)
    per_element(FAMILY, "scatter", indices.size, (values, indices), out)


def add(values: Array, indices: Array, weight: float, total: Array) -> None:
    """See `numpy_sparse.add`."""
    per_element(FAMILY, "add", indices.size, (values, indices), np.float32(weight), total)


def add_wide(values: Array, indices: Array, weight: float, total: Array) -> None:
    """See `numpy_sparse.add_wide`."""
    by = np.float64(weight)
    per_element(FAMILY, "add_wide", indices.size, (values, indices), by, total)


def _sum(x: Array, e: Array, out: Array) -> None:
    per_element(FAMILY, "sum", x.size, (x, e), out)


def _select(x: Array, start: int, stride: int, rank: int) -> Array:
    """Return the rank-th largest magnitude of x[start::stride], and how many of those that are
    equal to it are among the `rank` largest."""
    histogram, state = empty(BINS, np.uint32), empty(2, np.uint32)
    launch(FAMILY, "select_start", 1, np.uint32(rank), histogram, state)
    blocks = min(-(-x.size // (stride * CHUNK)), COUNT_BLOCKS_MAX)
    strided = x, np.int64(x.size), np.int64(start), np.int64(stride)
    for found, shift in DIGITS:
        digit = np.uint32(found), np.uint32(shift)
        launch(FAMILY, "select_count", blocks, *strided, *digit, state, histogram)
        launch(FAMILY, "select_pick", 1, np.uint32(shift), histogram, state)
    return state


def _reach(least: float) -> Array:
    """Return the state that takes all that reach `least`."""
    return array(np.array([np.float32(least).view(np.uint32) - np.uint32(1), 0], np.uint32))


def _count(x: Array, state: Array) -> tuple[Array, Array, Array]:
    """Return how many elements are above the state's magnitude, and how many equal to it: in all
    chunks before each, twice, and altogether."""
    chunks = -(-x.size // CHUNK)
    above, level = empty(chunks, np.uint32), empty(chunks, np.uint32)
    total = empty(2, np.uint32)
    per_chunk(FAMILY, "taken_count", x.size, CHUNK, (x,), state, above, level)
    launch(FAMILY, "taken_scan", 1, np.int64(chunks), above, level, total)
    return above, level, total


def _write(
    x: Array, state: Array, above: Array, level: Array, values: Array, indices: Array
) -> None:
    given = state, above, level
    per_chunk(FAMILY, "taken_write", x.size, CHUNK, (x,), *given, values, indices)
