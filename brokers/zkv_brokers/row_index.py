"""Which place in memory each row of a table has: a hash table of row numbers, looked up by arrays.

Open addressing with linear steps, at most half full. All rows of a call take their steps together,
so that a call costs a few operations on arrays, as many as the longest chain, and none for each
row. Pure.
"""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv.tables import mixed_ids

LEAST = 64
"""Places in the smallest table."""
FREE = -1


class RowIndex:
    """Row numbers (uint64), and the slot of each: 0, 1, 2, … in the order in which they came."""

    def __init__(self) -> None:
        self._slots: Array = np.full(LEAST, FREE, np.int64)
        self._ids: Array = np.empty(LEAST // 2, np.uint64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> Array:
        """The row numbers, by slot."""
        return self._ids[: self._count]

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return int(self._slots.nbytes + self._ids.nbytes)

    def find(self, ids: Array) -> Array:
        """Return the slot of each row (int64); −1 for one that has none."""
        found: Array = np.full(ids.size, FREE, np.int64)
        mask = self._slots.size - 1
        open_, places = np.arange(ids.size), self._first(ids)
        while open_.size:
            slots = self._slots[places]
            here = slots != FREE
            hit = here.copy()
            hit[here] = self._ids[slots[here]] == ids[open_[here]]
            found[open_[hit]] = slots[hit]
            on = here & ~hit
            open_, places = open_[on], (places[on] + 1) & mask
        return found

    def add(self, ids: Array) -> Array:
        """Give slots to rows that have none yet, each named once; return them: they follow those
        that were there."""
        fresh: Array = np.arange(self._count, self._count + ids.size)
        self._reserve(self._count + ids.size)
        self._ids[fresh] = ids
        self._count += ids.size
        self._enter(ids, fresh)
        return fresh

    def _first(self, ids: Array) -> Array:
        """Return where the search for each row begins: by other bits than its part."""
        mask = np.uint64(self._slots.size - 1)
        places: Array = (mixed_ids(ids) & mask).astype(np.int64)
        return places

    def _reserve(self, count: int) -> None:
        if count > self._ids.size:
            grown: Array = np.empty(max(count, 2 * self._ids.size), np.uint64)
            grown[: self._count] = self.ids
            self._ids = grown
        if 2 * count > self._slots.size:
            self._slots = np.full(1 << (2 * count - 1).bit_length(), FREE, np.int64)
            self._enter(self.ids, np.arange(self._count))

    def _enter(self, ids: Array, slots: Array) -> None:
        mask = self._slots.size - 1
        places = self._first(ids)
        while slots.size:
            free = self._slots[places] == FREE
            self._slots[places[free]] = slots[free]
            # Of several that wanted one place one has it; the others go on with the next place.
            on = self._slots[places] != slots
            slots, places = slots[on], (places[on] + 1) & mask
