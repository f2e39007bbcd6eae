"""Sparsifiers in NumPy: the specification that the other backends match bit for bit.

Elements are ordered by magnitude: by the 31 bits of |x| as an unsigned integer, the order of the
numbers themselves (Inf above them, a NaN above Inf; neither comes here from a checked gradient).
Among equal magnitudes the lower index is the larger. Positions come out ascending, as uint32.

Positions that are drawn are the first k values of a keyed permutation of [0, n), sorted: a Feistel
network over [0, rows) × [0, columns) with rows = ⌈√n⌉ and columns = ⌈n / rows⌉, where a result that
is not below n is permuted again until it is (Black, Rogaway: Ciphers with Arbitrary Finite Domains,
CT-RSA 2002). Twelve rounds, each with its own key: fewer leave some subsets of ten elements visibly
more frequent than others. Any part of the sequence can be computed alone, in no memory.
"""

from __future__ import annotations

import math

import numpy as np

from zkv.dtypes import Array

SIGNLESS = np.uint32(0x7FFFFFFF)
ROUNDS = 12
UNSAMPLED = 8192
"""Arrays of at most this many elements are looked at as a whole instead of being sampled."""
SAMPLE_MIN, SAMPLE_MAX = 4096, 65536
"""About how many elements of a larger array are sampled: one in 64 between these limits."""

_GOLDEN = 0x9E3779B1
_LOW = 0xFFFFFFFF


def magnitudes(x: Array) -> Array:
    """Return the bits of |x|, uint32, for the float32 array x."""
    signless: Array = x.view(np.uint32) & SIGNLESS
    return signless


def stride_of(n: int) -> int:
    """Return the distance of sampled elements, an odd number, as lengths of rows rarely are."""
    return 1 if n <= UNSAMPLED else n // min(max(n // 64, SAMPLE_MIN), SAMPLE_MAX) | 1


def topk_encode(x: Array, values: Array, indices: Array) -> None:
    """Write the `values.size` largest elements of x and their positions."""
    _take(x, _largest(magnitudes(x), values.size), values, indices)


def topk_encode_residual(x: Array, e: Array, values: Array, indices: Array, out: Array) -> None:
    """Encode t = x + e, and write t to `out`, with zeros where something is sent."""
    _sum(x, e, out)
    topk_encode(out, values, indices)
    clear(indices, out)


def sampled_encode(x: Array, start: int, values: Array, indices: Array) -> int:
    """Write the largest elements that reach the sample's threshold, and return how many.

    The sample is every `stride_of(n)`-th element from `start`, m in all; the threshold is its
    ⌈k·m / n⌉-th largest, or the least magnitude above 0 if that is 0. At most k = `values.size`
    are taken; `start` is below the stride.
    """
    n, k = x.size, values.size
    if n == 0:
        return 0
    bits = magnitudes(x)
    sample = bits[start :: stride_of(n)]
    rank = -(-k * sample.size // n)
    least = max(np.partition(sample, sample.size - rank)[sample.size - rank], np.uint32(1))
    chosen = np.flatnonzero(bits >= least)
    if chosen.size > k:
        chosen = chosen[_largest(bits[chosen], k)]
    _take(x, chosen, values[: chosen.size], indices[: chosen.size])
    return int(chosen.size)


def sampled_encode_residual(
    x: Array, e: Array, start: int, values: Array, indices: Array, out: Array
) -> int:
    """Do with t = x + e what `sampled_encode` does, and write t to `out` with what is left."""
    _sum(x, e, out)
    count = sampled_encode(out, start, values, indices)
    clear(indices[:count], out)
    return count


def reaching(x: Array, least: float) -> int:
    """Return how many elements reach the float32 `least`: |x| ≥ least > 0."""
    return int(np.count_nonzero(magnitudes(x) >= _bits(least)))


def reaching_sum(x: Array, e: Array, least: float, out: Array) -> int:
    """Write x + e to `out`, and return how many of these reach `least`."""
    _sum(x, e, out)
    return reaching(out, least)


def reaching_encode(x: Array, least: float, values: Array, indices: Array) -> None:
    """Write the elements that reach `least`, as many as `reaching` has counted."""
    _take(x, np.flatnonzero(magnitudes(x) >= _bits(least)), values, indices)


def clear(indices: Array, out: Array) -> None:
    """Set `out` to 0 at these positions."""
    out[indices] = 0


def draw(n: int, keys: Array, indices: Array) -> None:
    """Write k = `indices.size` distinct positions below n, ascending: see this module's head.

    `keys` are those of `round_keys`. In every round one half moves: (half + F(other)) mod its
    range, F(v) = fmix32((v · 0x9E3779B1) ^ key) · range / 2**32, rounded down; the row moves first.
    """
    if n == 0:
        return
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    drawn = _permuted(np.arange(indices.size, dtype=np.uint32), rows, columns, keys)
    outside = np.flatnonzero(drawn >= n)
    while outside.size:
        again = _permuted(drawn[outside], rows, columns, keys)
        drawn[outside] = again
        outside = outside[again >= n]
    drawn.sort()
    indices[...] = drawn


def round_keys(seed: int) -> Array:
    """Return the keys of `draw` for a seed in [0, 2**63): uint32, one per round.

    Key j is fmix32(fmix32(low ^ (j + 1) · 0x9E3779B1) ^ high), with the halves of the seed.
    """
    steps = np.arange(1, ROUNDS + 1, dtype=np.uint32) * np.uint32(_GOLDEN)
    return fmix32(fmix32(steps ^ np.uint32(seed & _LOW)) ^ np.uint32(seed >> 32))


def fmix32(h: Array) -> Array:
    """Return the finalizer of MurmurHash3 of a fresh uint32 array, in place."""
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return h


def gather(x: Array, indices: Array, factor: float, values: Array) -> None:
    """Write x · factor at these positions, in float32."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        np.multiply(x[indices], np.float32(factor), out=values)


def gather_residual(x: Array, e: Array, indices: Array, values: Array, out: Array) -> None:
    """Write t = x + e at these positions to `values`, and t with zeros there to `out`."""
    _sum(x, e, out)
    values[...] = out[indices]
    clear(indices, out)


def scatter(values: Array, indices: Array, out: Array) -> None:
    """Write the values at their positions in `out`, and 0 elsewhere."""
    out[...] = 0
    out[indices] = values


def add(values: Array, indices: Array, weight: float, total: Array) -> None:
    """Add weight · values to the float32 array `total` at their positions, each product rounded."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        total[indices] += values * np.float32(weight)


def add_wide(values: Array, indices: Array, weight: float, total: Array) -> None:
    """Do what `add` does to a float64 array, in float64."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        total[indices] += values.astype(np.float64) * weight


def merge(indices: Array, size: int, positions: Array, slots: Array) -> int:
    """Write each of `indices` once, ascending, to `positions`, and return how many these are.

    `indices` are those of several arrays of `size` elements, one after the other: uint32. Where
    each of them stands among the positions is written to `slots`, uint32; both outputs are of the
    size of `indices`.
    """
    found, where = np.unique(indices, return_inverse=True)
    positions[: found.size] = found
    slots[...] = where
    return int(found.size)


def _bits(least: float) -> np.uint32:
    return np.float32(least).view(np.uint32)


def _sum(x: Array, e: Array, out: Array) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(x, e, out=out)


def _take(x: Array, chosen: Array, values: Array, indices: Array) -> None:
    values[...] = x[chosen]
    indices[...] = chosen


def _largest(bits: Array, k: int) -> Array:
    """Return the positions of the k largest, ascending; ties go to the lowest index."""
    if k == 0:
        return np.empty(0, np.intp)
    kth = np.partition(bits, bits.size - k)[bits.size - k]
    above = np.flatnonzero(bits > kth)
    level = np.flatnonzero(bits == kth)[: k - above.size]
    return np.sort(np.concatenate((above, level)))


def _permuted(values: Array, rows: int, columns: int, keys: Array) -> Array:
    """Return each value below rows · columns moved by the Feistel network, uint32."""
    row, column = values // np.uint32(columns), values % np.uint32(columns)
    for at, key in enumerate(keys):
        if at % 2 == 0:
            row = _moved(row, column, rows, key)
        else:
            column = _moved(column, row, columns, key)
    return row * np.uint32(columns) + column


def _moved(half: Array, other: Array, extent: int, key: np.uint32) -> Array:
    hashed = fmix32(other * np.uint32(_GOLDEN) ^ key).astype(np.uint64)
    by = (hashed * np.uint64(extent) >> np.uint64(32)).astype(np.uint32)
    moved = half + by
    # A value below the range wraps to one far above it, so the smaller one is the remainder.
    remainder: Array = np.minimum(moved, moved - np.uint32(extent))
    return remainder
