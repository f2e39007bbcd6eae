"""Loops of dense updates in Numba, to the bits of `zkv.sums` and `zkv.update_pieces`."""

from __future__ import annotations

import numpy as np
from numba import types

from zkv.dtypes import Array
from zkv_codecs.kernels.numba_types import F4, F4_IN, helper, kernel, part

_F, _B = types.float32, types.boolean
PIECE = 8192
"""Elements of a sum at a time: they stay in the first cache."""
INFINITY = np.uint32(0x7F800000)
"""All bits of the exponent, which only a NaN or an infinity has."""


@helper
def _exponent(value: np.float32) -> np.uint32:
    return np.uint32(np.float32(value).view(np.uint32) & INFINITY)


@kernel(F4_IN, returns=_B)
def finite(values: Array) -> bool:
    """Return whether no element is NaN or infinite."""
    most = np.uint32(0)
    for i in range(values.size):
        most = max(most, _exponent(values[i]))
    return bool(most < INFINITY)


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


@part
def _all_of_two(
    x: Array,
    g: Array,
    w: float,
    h: Array,
    v: float,
    by: float,
    factor: float,
    rate: float,
    out: Array,
) -> np.uint32:
    """Write x + (w g + v h) / by factor rate to another array, and return the largest exponent."""
    most = np.uint32(0)
    for i in range(out.size):
        value = x[i] + (((g[i] * w + h[i] * v) / by) * factor) * rate
        out[i] = value
        most = max(most, _exponent(value))
    return most


@kernel(F4_IN, F4_IN, _F, _F, _F, F4)
def sgd(x: Array, total: Array, by: float, factor: float, rate: float, out: Array) -> None:
    """Write x + total / by factor rate; `out` may be x."""
    _step(x, total, by, factor, rate, out)


@kernel(F4_IN, F4_IN, _F, F4_IN, _F, _F, _F, _F, F4, returns=_B)
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
) -> bool:
    """Write x + (w g + v h) / by factor rate; `out` may be x. Return whether all of it is finite,
    and so g and h."""
    if out.ctypes.data != x.ctypes.data:
        return bool(_all_of_two(x, g, w, h, v, by, factor, rate, out) < INFINITY)
    most = np.uint32(0)
    scratch = np.empty(PIECE, np.float32)
    for start in range(0, out.size, PIECE):
        stop = min(start + PIECE, out.size)
        total = scratch[: stop - start]
        _two(g[start:stop], w, h[start:stop], v, total)
        _step(x[start:stop], total, by, factor, rate, out[start:stop])
        for i in range(total.size):
            most = max(most, _exponent(total[i]))
    return bool(most < INFINITY)
