"""Sums in a fixed order (rule 15): the same contributions give the same bits, whatever came first.

The terms of a sum are the leaves of a fixed binary tree: n terms split at the largest power of two
below n, and so on. For two and three terms that is plain left-to-right addition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from zkv.dtypes import Array


def tree_sum(
    term: Callable[[int], Array | None],
    count: int,
    add: Callable[[int, Array], bool] = lambda at, total: False,
) -> Array | None:
    """Return the sum of `term(0) … term(count-1)` over the fixed tree.

    `term` must return a fresh array, which is added into in place, or None for a term that is zero
    everywhere. `add(at, total)` may add a term to a total in place, to the same bits, and return
    True; it saves the term an array. The result is None if all terms are. Overflow follows
    IEEE 754 without a warning, as guards against Inf and NaN stand elsewhere.
    """
    with np.errstate(all="ignore"):
        return _subtree(term, add, 0, count)


def _subtree(
    term: Callable[[int], Array | None],
    add: Callable[[int, Array], bool],
    start: int,
    stop: int,
) -> Array | None:
    if stop - start == 0:
        return None
    if stop - start == 1:
        return term(start)
    middle = start + (1 << ((stop - start - 1).bit_length() - 1))
    left = _subtree(term, add, start, middle)
    if left is not None and stop - middle == 1 and add(middle, left):
        return left
    right = _subtree(term, add, middle, stop)
    if left is None or right is None:
        return right if left is None else left
    left += right
    return left


def weighted_mean(gradients: Sequence[Array], weights: Sequence[float]) -> Array:
    """Return Σ wᵢgᵢ / Σ wᵢ exactly as a server computes it; the reference for tests and users.

    Gradients are float32 or float64 arrays of one shape, in worker order; weights are samples. The
    products and the sum are in the gradients' dtype, the one division is in float64 and rounded
    once.
    Batches of 32, 32, 32 and 16 samples with mean gradients 1, 2, 3 and 8 give 2.857143.
    """
    total = tree_sum(lambda at: weighted(gradients[at], weights[at]), len(gradients))
    if total is None:
        raise ValueError("a mean needs at least one gradient")
    return divided(total, float(np.sum(np.asarray(weights, dtype=np.float64))))


def weighted(gradient: Array, weight: float) -> Array:
    """Return a fresh array of weight · gradient, in the gradient's dtype."""
    if weight == 1.0:
        return gradient.copy()
    product: Array = gradient * gradient.dtype.type(weight)
    return product


def divided(total: Array, by: float) -> Array:
    """Return total / by as if divided in float64 and rounded once to the dtype of `total`.

    Where float32 holds the divisor exactly (any count of samples below 2**24), one float32 division
    gives the same bits: the quotient of two 24-bit numbers, rounded first to 53 bits and then to
    24, is never rounded wrongly, as 53 >= 2 * 24 + 2 (Figueroa, "When is double rounding
    innocuous?", 1995).
    """
    if by == 1.0:
        return total
    with np.errstate(all="ignore"):
        exact = total.dtype.type(by)
        if float(exact) == by:
            same: Array = total / exact
            return same
        quotient: Array = (total.astype(np.float64) / np.float64(by)).astype(total.dtype)
    return quotient
