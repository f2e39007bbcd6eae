"""What to add to old values so that new ones come out. NumPy alone: callbacks of JAX use it."""

from __future__ import annotations

from typing import Any

import numpy as np

from zkv.dtypes import Array


def update_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of updates to values of `dtype`: float32 for those of half its width."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def difference(old: Array, new: Array) -> Array:
    """Return u for which `(old + u).astype(old.dtype)` is `new`, as `optax.apply_updates` adds.

    `old` and `new` are of one shape and floating dtype; u is of `update_dtype`. Such a number
    exists for every element whose new value came from one rounded addition to the old one, and for
    every one whose new value is between half and twice the old one, as their difference is exact
    (Sterbenz, Floating-Point Computation, 1974). It is the rounded difference, or a neighbour of it
    if `new` is a power of two. Where there is none the sum is off by at most one unit in the last
    place of the larger of the two. A zero may have the other sign; what is infinite or NaN in `old`
    stays so.
    """
    wide = update_dtype(old.dtype)
    start = old.astype(wide)
    with np.errstate(all="ignore"):
        found = np.asarray(new.astype(wide) - start)
        wrong = _misses(start, found, new)
        if wrong.any():
            for towards in (-np.inf, np.inf):
                near = np.nextafter(found, wide.type(towards))
                found = np.where(wrong & ~_misses(start, near, new), near, found)
    return found


def _misses(start: Array, update: Array, new: Array) -> Array:
    got = (start + update).astype(new.dtype)
    missed: Array = np.asarray((got != new) & ~(np.isnan(got) & np.isnan(new)))
    return missed
