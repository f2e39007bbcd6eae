"""Loops of dense updates in Numba, to the bits of `zkv.sums` and `zkv.update_pieces`."""

from __future__ import annotations

from numba import types

from zkv.dtypes import Array
from zkv_codecs.kernels.numba_types import F4, F4_IN, kernel

_F = types.float32


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
    """Write x + total / by factor rate; `out` is not x."""
    for i in range(out.size):
        out[i] = x[i] + ((total[i] / by) * factor) * rate


@kernel(F4, F4_IN, _F, _F, _F)
def sgd_in_place(x: Array, total: Array, by: float, factor: float, rate: float) -> None:
    """Add total / by factor rate to x: loops over two arrays that are one do not vectorise."""
    for i in range(x.size):
        x[i] = x[i] + ((total[i] / by) * factor) * rate
