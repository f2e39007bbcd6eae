"""Loops of dense updates in Numba, to the bits of `zkv.sums` and `zkv.update_pieces`."""

from __future__ import annotations

import numpy as np
from numba import types

from zkv.dtypes import Array
from zkv_codecs.kernels.numba_types import F4, F4_IN, kernel, part

_F = types.float32
PIECE = 8192
"""Elements of a sum at a time: they stay in the first cache."""


@kernel(F4_IN, _F, F4)
def term(g: Array, w: float, out: Array) -> None:
    """Write w g."""
    for i in range(out.size):
        out[i] = g[i] * w


@kernel(F4_IN, _F, F4_IN, _F, F4)
def two_terms(g: Array, w: float, h: Array, v: float, out: Array) -> None:
    """Write w g + v h."""
    for i in range(out.size):
        out[i] = g[i] * w + h[i] * v


@kernel(F4, F4_IN, _F)
def add_term(out: Array, h: Array, v: float) -> None:
    """Add v h."""
    for i in range(out.size):
        out[i] = out[i] + h[i] * v


@part
def _two(g: Array, w: float, h: Array, v: float, out: Array) -> None:
    for i in range(out.size):
        out[i] = g[i] * w + h[i] * v


@part
def _step(x: Array, total: Array, by: float, factor: float, rate: float, out: Array) -> None:
    """Write x + total / by factor rate. Loops over two arrays that are one do not vectorise."""
    if out.ctypes.data == x.ctypes.data:
        for i in range(out.size):
            out[i] = out[i] + ((total[i] / by) * factor) * rate
    else:
        for i in range(out.size):
            out[i] = x[i] + ((total[i] / by) * factor) * rate


@kernel(F4_IN, F4_IN, _F, _F, _F, F4)
def sgd(x: Array, total: Array, by: float, factor: float, rate: float, out: Array) -> None:
    """Write x + total / by factor rate; `out` may be x."""
    _step(x, total, by, factor, rate, out)


@kernel(F4_IN, F4_IN, _F, F4_IN, _F, _F, _F, _F, F4)
def sgd_of_two(
    x: Array,
    g: Array,
    w: float,
    h: Array,
    v: float,
    by: float,
    factor: float,
    rate: float,
    out: Array,
) -> None:
    """Write x + (w g + v h) / by factor rate; `out` may be x."""
    scratch = np.empty(PIECE, np.float32)
    for start in range(0, out.size, PIECE):
        stop = min(start + PIECE, out.size)
        total = scratch[: stop - start]
        _two(g[start:stop], w, h[start:stop], v, total)
        _step(x[start:stop], total, by, factor, rate, out[start:stop])
