"""Loops of dense updates in Numba, to the bits of `zkv.sums` and `zkv.update_pieces`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from zkv.dtypes import Array
from zkv_codecs.kernels.numba_types import F4, F4_IN, helper, kernel

_F, _B = types.float32, types.boolean
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


@kernel(F4_IN, F4_IN, _F, _F, _F, F4)
def sgd(x: Array, total: Array, by: float, factor: float, rate: float, out: Array) -> None:
    """Write x + total / by factor rate; `out` may be x, which would not be a loop of vectors."""
    if out.ctypes.data == x.ctypes.data:
        for i in range(out.size):
            out[i] = out[i] + ((total[i] / by) * factor) * rate
    else:
        for i in range(out.size):
            out[i] = x[i] + ((total[i] / by) * factor) * rate


_TERM = (F4_IN, _F)
_REST = (_F, _F, _F, F4)


# All in one loop: memory answers several arrays at a time, and the processor asks ahead in each.
# `out` is another array than `x`, or the loop would not be one of vectors.


@kernel(F4_IN, *_TERM * 2, *_REST, returns=_B)
def sgd_of_two(
    x: Array,
    a: Array,
    u: float,
    b: Array,
    v: float,
    by: float,
    factor: float,
    rate: float,
    out: Array,
) -> bool:
    """Write x + (u a + v b) / by factor rate to another array. Return whether all of it is finite,
    and so a and b."""
    most = np.uint32(0)
    for i in range(out.size):
        value = x[i] + (((a[i] * u + b[i] * v) / by) * factor) * rate
        out[i] = value
        most = max(most, _exponent(value))
    return bool(most < INFINITY)


@kernel(F4_IN, *_TERM * 3, *_REST, returns=_B)
def sgd_of_three(
    x: Array,
    a: Array,
    u: float,
    b: Array,
    v: float,
    c: Array,
    w: float,
    by: float,
    factor: float,
    rate: float,
    out: Array,
) -> bool:
    """As `sgd_of_two`: (u a + v b) + w c."""
    most = np.uint32(0)
    for i in range(out.size):
        value = x[i] + ((((a[i] * u + b[i] * v) + c[i] * w) / by) * factor) * rate
        out[i] = value
        most = max(most, _exponent(value))
    return bool(most < INFINITY)


@kernel(F4_IN, *_TERM * 4, *_REST, returns=_B)
def sgd_of_four(
    x: Array,
    a: Array,
    u: float,
    b: Array,
    v: float,
    c: Array,
    w: float,
    d: Array,
    z: float,
    by: float,
    factor: float,
    rate: float,
    out: Array,
) -> bool:
    """As `sgd_of_two`: (u a + v b) + (w c + z d)."""
    most = np.uint32(0)
    for i in range(out.size):
        total = (a[i] * u + b[i] * v) + (c[i] * w + d[i] * z)
        value = x[i] + ((total / by) * factor) * rate
        out[i] = value
        most = max(most, _exponent(value))
    return bool(most < INFINITY)


SGD_OF: dict[int, Any] = {2: sgd_of_two, 3: sgd_of_three, 4: sgd_of_four}
"""By the number of terms."""
