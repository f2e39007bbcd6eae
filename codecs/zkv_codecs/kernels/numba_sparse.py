"""Sparsifiers in Numba: the functions of `numpy_sparse`, bit for bit, out of four files."""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.numba_blocks import plus
from zkv_codecs.kernels.numba_draw import draw
from zkv_codecs.kernels.numba_merge import merge
from zkv_codecs.kernels.numba_select import (
    BLOCK,
    clear,
    reaching_encode,
    sampled_encode,
    sampled_encode_residual,
    topk_encode,
    topk_encode_residual,
)
from zkv_codecs.kernels.numba_types import F4, F4_IN, F8, INT, U4_IN, kernel
from zkv_codecs.kernels.numpy_sparse import SIGNLESS

__all__ = [
    "add",
    "add_wide",
    "clear",
    "draw",
    "gather",
    "gather_residual",
    "merge",
    "reaching",
    "reaching_encode",
    "reaching_sum",
    "sampled_encode",
    "sampled_encode_residual",
    "scatter",
    "topk_encode",
    "topk_encode_residual",
]


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
        plus(xs, es, ts)
        count += reaching(ts, least)
    return count


@kernel(F4_IN, U4_IN, "f8", F4)
def gather(x: Array, indices: Array, factor: float, values: Array) -> None:
    """See `numpy_sparse.gather`."""
    by = np.float32(factor)
    for i in range(indices.size):
        values[i] = x[indices[i]] * by


@kernel(F4_IN, F4_IN, U4_IN, F4, F4)
def gather_residual(x: Array, e: Array, indices: Array, values: Array, out: Array) -> None:
    """See `numpy_sparse.gather_residual`."""
    plus(x, e, out)
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
