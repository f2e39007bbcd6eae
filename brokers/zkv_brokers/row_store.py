"""One part of a table on its server: the rows that updates have changed, and versions of them.

Values and optimizer state lie in flat arrays that grow, so that an update of n rows is a few
operations on arrays. What an update overwrites is kept as long as somebody may still look at the
version before it (rule 3): per pinned version, the rows that were other ones there. A row that no
update has changed takes no memory. Knows no messages, no log and no workers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from zkv.dtypes import Array
from zkv.optim import Rule
from zkv.row_rules import init_rows, update_rows
from zkv.tables import initial_of, state_of
from zkv.wire import TableSpec
from zkv_brokers.row_index import RowIndex

LEAST = 16
"""Rows that there is room for at first."""
PIECES_MAX = 8
"""Of one pinned version; then they become one, as each costs a look."""


@dataclass(slots=True)
class Kept:
    """Rows as they were: numbers (ascending), values, and since which version they were so."""

    ids: Array
    values: Array
    since: Array

    def part(self, chosen: Array) -> Kept:
        """Return some of the rows."""
        return Kept(self.ids[chosen], self.values[chosen], self.since[chosen])


@dataclass(slots=True)
class History:
    """What pinned versions have of rows that are other ones by now.

    What an update overwrites was so from some version up to the one before the update: it belongs
    to the newest pinned version of these, and to no other; if there is none, nobody needs it. So
    there are at most as many as versions are pinned, and each row at most once in each.
    """

    by_version: dict[int, list[Kept]] = field(default_factory=dict)

    def keep(self, version: int, kept: Kept) -> None:
        """Keep rows for a pinned version."""
        pieces = self.by_version.setdefault(version, [])
        pieces.append(kept)
        if len(pieces) > PIECES_MAX:
            order = np.argsort(np.concatenate([one.ids for one in pieces]), kind="stable")
            whole = Kept(
                *(
                    np.concatenate([getattr(one, name) for one in pieces])
                    for name in ("ids", "values", "since")
                )
            )
            self.by_version[version] = [whole.part(order)]

    def release(self, version: int, pins: Sequence[int]) -> None:
        """Nobody looks at a version any more; `pins` (ascending) are those that are looked at."""
        at = bisect_left(pins, version)
        for kept in self.by_version.pop(version, ()):
            older = pins[at - 1] if at else -1
            chosen = kept.since <= older
            if chosen.any():
                self.keep(older, kept.part(chosen))

    def read(self, ids: Array, version: int, out: Array) -> Array:
        """Write rows as they were at a pinned version into `out`; return which of them (bool) are
        not known here."""
        missing: Array = np.ones(ids.size, bool)
        for pinned in sorted(one for one in self.by_version if one >= version):
            for kept in self.by_version[pinned]:
                places = np.searchsorted(kept.ids, ids)
                places[places == kept.ids.size] = 0
                # What a row begins with is not kept: a later piece is not it.
                hit = missing & (kept.ids[places] == ids) & (kept.since[places] <= version)
                out[hit] = kept.values[places[hit]]
                missing &= ~hit
        return missing

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        kept = [one for pieces in self.by_version.values() for one in pieces]
        return sum(int(one.ids.nbytes + one.values.nbytes + one.since.nbytes) for one in kept)


class RowStore:
    """The rows of one part of a table, at the newest version and at those that are pinned."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.index = RowIndex()
        self.history = History()
        self.rule = ""
        """The name of the one that the state belongs to."""
        self._initial, self._state = initial_of(spec.initial), state_of(spec)
        self._dtype: np.dtype[np.float64] = np.dtype(spec.dtype)
        self._values: Array = np.empty((LEAST, spec.dim), self._dtype)
        self._slots: tuple[Array, ...] = ()
        self._counts: Array = np.zeros(LEAST, np.int64)
        """How many updates each row has had."""
        self._changed: Array = np.zeros(LEAST, np.int64)
        """The version in which each row became what it is; 0: none has changed it."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def nbytes(self) -> int:
        """Bytes of values and state of the rows that there are."""
        arrays = (self._values, *self._slots)
        return sum(int(one[: len(self)].nbytes) for one in arrays)

    def arrays(self) -> tuple[Array, ...]:
        """Return row numbers, values, counts and state, in the order in which rows came."""
        count = len(self)
        state = (slot[:count] for slot in self._slots)
        return (self.index.ids, self._values[:count], self._counts[:count], *state)

    def changed(self) -> Array:
        """Return in which version each row became what it is, in the same order (int64)."""
        return self._changed[: len(self)]

    def put_back(
        self,
        rule: str,
        ids: Array,
        values: Array,
        counts: Array,
        changed: Array,
        slots: tuple[Array, ...],
    ) -> None:
        """Hold these rows and no others: what `arrays` and `changed` have returned.

        Raises:
            ValueError: they do not fit together, or the table.
        """
        count = ids.size
        shape = (count, self.spec.dim)
        if values.shape != shape or values.dtype != self._dtype or ids.dtype != np.uint64:
            raise ValueError(f"{values.dtype} {values.shape}, where {self._dtype} {shape} fits")
        lengths = {len(array) for array in (ids, counts, changed, *slots)}
        if lengths != {count} or np.unique(ids).size != count:
            raise ValueError(f"{count} row numbers, not each once, and arrays of {lengths}")
        self.index, self.history, self.rule = RowIndex(), History(), rule
        self.index.add(ids)
        room = max(LEAST, count)
        self._values, self._counts, self._changed = (
            _grown(array, room) for array in (values, counts, changed)
        )
        self._slots = tuple(_grown(slot, room) for slot in slots)

    def first(self, ids: Array) -> Array:
        """Return the first values of rows, fresh: (rows, dim)."""
        return self._initial.rows(self._state, ids, self.spec.dim, self.spec.dtype)

    def read(self, ids: Array, version: int) -> Array:
        """Return rows as they are in a version that is pinned, or the newest: (rows, dim),
        fresh."""
        out, missing = self._changed_rows(ids, self.index.find(ids), version)
        if missing.any():
            out[missing] = self.first(ids[missing])
        return out

    def part(self, start: int, count: int, version: int) -> tuple[Array, Array, int]:
        """Return numbers and values of at most so many rows that updates up to a version have
        changed, from place `start` on in the order in which rows came, and the place to go on from;
        −1 if these are the last."""
        stop = min(start + count, len(self))
        slots = np.arange(min(start, stop), stop)
        ids = self.index.ids[slots]
        rows, missing = self._changed_rows(ids, slots, version)
        return ids[~missing], rows[~missing], stop if stop < len(self) else -1

    def _changed_rows(self, ids: Array, slots: Array, version: int) -> tuple[Array, Array]:
        """Return rows as they are in a version, and which of them (bool) no update had changed
        then: these are not filled."""
        out: Array = np.empty((ids.size, self.spec.dim), self._dtype)
        there = slots >= 0
        missing = ~there
        now = there.copy()
        now[there] = self._changed[slots[there]] <= version
        out[now] = self._values[slots[now]]
        old = np.flatnonzero(there & ~now)
        if old.size:
            then = out[old]
            missing[old] = self.history.read(ids[old], version, then)
            out[old] = then
        return out, missing

    def update(
        self, ids: Array, gradients: Array, rule: Rule, lr: float, version: int, pins: Sequence[int]
    ) -> None:
        """Update rows (numbers ascending, each once) to `version`; `pins` (ascending) are versions
        that are looked at still, `gradients` is (rows, dim) of the table's dtype."""
        self._use(rule)
        slots = self.index.find(ids)
        new = slots < 0
        if new.any():
            slots[new] = self._add(ids[new], rule)
        self._keep(ids, slots, version, pins)
        values, state = self._values[slots], tuple(slot[slots] for slot in self._slots)
        self._counts[slots] += 1
        update_rows(rule, values, state, gradients, lr=lr, counts=self._counts[slots])
        self._values[slots] = values
        for slot, fresh in zip(self._slots, state, strict=True):
            slot[slots] = fresh
        self._changed[slots] = version

    def _use(self, rule: Rule) -> None:
        """Make fresh state where the rule is not the one that the state belongs to."""
        if rule.name != self.rule:
            self.rule = rule.name
            self._counts[:] = 0
            self._slots = init_rows(rule, len(self._counts), self.spec.dim, self._dtype)

    def _add(self, ids: Array, rule: Rule) -> Array:
        slots = self.index.add(ids)
        capacity = len(self._counts)
        if len(self) > capacity:
            capacity = max(len(self), 2 * capacity)
            self._values = _grown(self._values, capacity)
            self._slots = tuple(_grown(slot, capacity) for slot in self._slots)
            self._counts, self._changed = (
                _grown(self._counts, capacity),
                _grown(self._changed, capacity),
            )
        self._values[slots] = self.first(ids)
        fresh = init_rows(rule, ids.size, self.spec.dim, self._dtype)
        for slot, state in zip(self._slots, fresh, strict=True):
            slot[slots] = state
        self._counts[slots] = self._changed[slots] = 0
        return slots

    def _keep(self, ids: Array, slots: Array, version: int, pins: Sequence[int]) -> None:
        """Keep what an update to `version` overwrites, if somebody looks at it."""
        at = bisect_right(pins, version - 1)
        if not at:
            return
        since = self._changed[slots]
        # What a row begins with can be made again.
        needed = (since > 0) & (since <= pins[at - 1])
        if needed.any():
            kept = Kept(ids[needed], self._values[slots[needed]], since[needed])
            self.history.keep(pins[at - 1], kept)


def _grown(array: Array, capacity: int) -> Array:
    """Return a longer array that begins with the same; memory that is not used costs none."""
    fresh: Array = np.empty((capacity, *array.shape[1:]), array.dtype)
    fresh[: len(array)] = array
    return fresh
