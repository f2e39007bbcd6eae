"""What to add to old values so that new ones come out. NumPy alone: callbacks of JAX use it."""

from __future__ import annotations

from typing import Any

import numpy as np

from zkv.dtypes import Array


def update_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of updates to values of `dtype`: float32 for those of half its width."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def difference(old: Array, new: Array) -> tuple[Array, float]:
    """Return u, and the largest error of what it leads to, so that with an error of 0
    `(old + u).astype(old.dtype)` is `new`, as `optax.apply_updates` adds.

    `old` and `new` are of one shape and floating dtype; u is of `update_dtype`. Such a number
    exists for every element whose new value came from one rounded addition to the old one, and for
    every one whose new value is between half and twice the old one, as their difference is exact
    (Sterbenz, Floating-Point Computation, 1974). It is the rounded difference, or its neighbour
    away from zero if `new` is a power of two. Where there is none the sum is off by at most one
    unit in the last place of the larger of the two. A zero may have the other sign; what is
    infinite or NaN in `old` stays so.
    """
    wide = update_dtype(old.dtype)
    start = old.astype(wide)
    with np.errstate(all="ignore"):
        found = np.asarray(new.astype(wide) - start)
        wrong = _misses(start, found, new)
        if not wrong.any():
            return found, 0.0
        beyond = np.nextafter(found, np.copysign(wide.type(np.inf), found))
        found = np.where(wrong & ~_misses(start, beyond, new), beyond, found)
        error = np.abs((start + found).astype(new.dtype).astype(wide) - new.astype(wide))
        # NaN: infinite or unknown on one side, or alike on both.
        return found, float(np.nan_to_num(error, nan=np.inf).max())


def strays(given: Array, values: Array, error: float) -> bool:
    """Return whether some of `given` are not `values`, by more than `error`.

    What is no normal number counts as zero, as it does in what XLA compiles for a CPU.
    """
    differ = (given != values) & ~(np.isnan(given) & np.isnan(values))
    if not differ.any():
        return False
    wide = update_dtype(given.dtype)
    with np.errstate(all="ignore"):
        gap = np.abs(given.astype(wide) - values.astype(wide))
        return bool((differ & ~(gap <= max(error, float(np.finfo(wide).tiny)))).any())


def _misses(start: Array, update: Array, new: Array) -> Array:
    got = (start + update).astype(new.dtype)
    missed: Array = np.asarray((got != new) & ~(np.isnan(got) & np.isnan(new)))
    return missed
