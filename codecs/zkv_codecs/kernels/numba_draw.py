"""Drawing positions in Numba: `numpy_sparse.draw`, bit for bit."""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.numba_types import INT, U4, U4_IN, kernel

CHUNK = 1024
"""Positions that are permuted together, so that each round is a loop that vectorises."""

DIGIT = 11
"""Bits that one pass of the sort looks at."""


@kernel(U4, U4, "u4", "u4")
def move(half: Array, other: Array, extent: np.uint32, key: np.uint32) -> None:
    """Move one half of each value by a hash of the other: one round."""
    for i in range(half.size):
        h = np.uint32(other[i] * np.uint32(0x9E3779B1)) ^ key
        h = np.uint32(h ^ (h >> np.uint32(16)))
        h = np.uint32(h * np.uint32(0x85EBCA6B))
        h = np.uint32(h ^ (h >> np.uint32(13)))
        h = np.uint32(h * np.uint32(0xC2B2AE35))
        h = np.uint32(h ^ (h >> np.uint32(16)))
        by = np.uint32(np.uint64(h) * np.uint64(extent) >> np.uint64(32))
        moved = np.uint32(half[i] + by)
        half[i] = min(moved, np.uint32(moved - extent))


@kernel(U4, "u4", "u4", U4_IN, U4, U4)
def permute(
    values: Array, rows: np.uint32, columns: np.uint32, keys: Array, row: Array, column: Array
) -> None:
    """Replace values below rows · columns by their images; `row` and `column` are scratch."""
    for i in range(values.size):
        row[i] = values[i] // columns
        column[i] = values[i] % columns
    for at in range(keys.size):
        if at % 2 == 0:
            move(row, column, rows, keys[at])
        else:
            move(column, row, columns, keys[at])
    for i in range(values.size):
        values[i] = np.uint32(row[i] * columns) + column[i]


@kernel(U4, U4, INT)
def sort(values: Array, other: Array, below: int) -> None:
    """Sort values that are less than `below`; `other` is scratch of the same size."""
    starts = np.empty((1 << DIGIT) + 1, np.int64)
    mask = np.uint32((1 << DIGIT) - 1)
    shift = 0
    while below - 1 >> shift:
        by = np.uint32(shift)
        starts[:] = 0
        for i in range(values.size):
            starts[((values[i] >> by) & mask) + 1] += 1
        for i in range(1, starts.size):
            starts[i] += starts[i - 1]
        for i in range(values.size):
            digit = (values[i] >> by) & mask
            other[starts[digit]] = values[i]
            starts[digit] += 1
        for i in range(values.size):
            values[i] = other[i]
        shift += DIGIT


@kernel(INT, U4_IN, U4)
def draw(n: int, keys: Array, indices: Array) -> None:
    """See `numpy_sparse.draw`."""
    if indices.size == n:
        for i in range(n):
            indices[i] = i
        return
    rows = np.uint32(np.sqrt(np.float64(n - 1))) + np.uint32(1)
    columns = np.uint32((n - 1) // rows + 1)
    row, column = np.empty(CHUNK, np.uint32), np.empty(CHUNK, np.uint32)
    for first in range(0, indices.size, CHUNK):
        values = indices[first : first + CHUNK]
        for i in range(values.size):
            values[i] = first + i
        permute(values, rows, columns, keys, row[: values.size], column[: values.size])
        for i in range(values.size):
            while values[i] >= n:
                permute(values[i : i + 1], rows, columns, keys, row[:1], column[:1])
    sort(indices, np.empty_like(indices), n)
