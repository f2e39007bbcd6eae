"""Blocks of neighbouring elements and the one order in which their sums are taken, in NumPy.

A block is `block` elements, a power of two; the last one of an array may be shorter and is filled
up with zeros. Its sum is taken by halving: element j is added to element j + block / 2, for all j
below block / 2, then the same with the sums and block / 4, and so on down to one. So equal numbers
add up without an error in a whole block, and 32 threads of a GPU come to the same bits: each first
adds up, in this order, the elements that are 32 apart, and the rest is a butterfly of shuffles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import numpy as np

from zkv.dtypes import Array

_P = ParamSpec("_P")

BLOCK_MIN, BLOCK_MAX = 64, 4096
"""Sizes of a block: whole 32-bit words of signs; `down` leaves float32's small numbers alone."""

SCALE_MIN = np.float32(1.5e-36)
"""A block whose scale is smaller is sent as zeros, and error feedback keeps what it held: float32
has no digits left down there, and quotients of such numbers are infinite."""

LARGEST = np.finfo(np.float32).max
"""Where a scale stops: a sum of squares, or a rounding, may pass float32's largest number."""


def rows(x: Array, block: int) -> Array:
    """Return x as one row per block, zeros after its end; a view if there is nothing to fill."""
    missing = -x.size % block
    if missing:
        x = np.concatenate((x, np.zeros(missing, x.dtype)))
    return x.reshape(-1, block)


def halved(terms: Array) -> Array:
    """Return the sum of each row, by halving."""
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        terms = terms[:, :half] + terms[:, half:]
    return terms[:, 0]


def spread(scales: Array, block: int, count: int) -> Array:
    """Return the scale of each of `count` elements."""
    return np.repeat(scales, block)[:count]


def down(block: int) -> np.float32:
    """Return 1 / (2 · block): sums of a block's elements times this are always finite."""
    return np.float32(0.5 / block)


def quiet(function: Callable[_P, None]) -> Callable[_P, None]:
    """Make overflow follow IEEE 754 without a warning, as in all other kernels.

    For what adds to or multiplies a caller's numbers: guards against Inf and NaN stand elsewhere.
    Each call has an `errstate` of its own, as a shared one is not safe among threads.
    """

    @functools.wraps(function)
    def quietly(*args: _P.args, **kwargs: _P.kwargs) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            function(*args, **kwargs)

    return quietly
