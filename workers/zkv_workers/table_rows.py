"""Between a user's rows and what travels: numbers are checked and put in order, gradients of one
row are added up, and rows are handed out in the order in which they were named.

All that the caller gives is copied. Knows no session and no sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zkv.dtypes import Array
from zkv.errors import KeyMismatch
from zkv.layout import Layout
from zkv.tables import checked_ids, part_of, rows_per_piece, summed
from zkv.wire import TableEntry
from zkv_workers.devices import to_host
from zkv_workers.row_signals import AskRows, PushRows

Key = str | int


@dataclass(frozen=True, slots=True)
class WantedRows:
    """Rows that a caller has named: each once, ascending, and where it has named them."""

    entry: TableEntry
    ids: Array
    places: Array
    shape: tuple[int, ...]

    def asked(self, token: int, *, batch: int = 0, pull: int = 0) -> AskRows:
        """Return the call that reads them, of a batch's version or of a pull's."""
        return AskRows(token, self.entry.kid, self.ids, batch, pull)

    def handed(self, rows: Array) -> Array:
        """Return rows as they were named: the shape of the numbers, and then `dim`; fresh."""
        found: Array = rows[self.places].reshape(*self.shape, self.entry.spec.dim)
        return found


def wanted_rows(layout: Layout, key: Key, ids: Any) -> WantedRows:
    """Return what to ask for rows by their numbers: whole numbers, an array of any shape.

    Raises:
        UnknownKey: no table of this name.
        KeyMismatch: not whole numbers, negative, or out of range; the first such one is named.
    """
    entry = layout.table(key)
    found = checked_ids(key, to_host(ids), entry.spec.rows)
    flat, places = np.unique(found.reshape(-1), return_inverse=True)
    return WantedRows(entry, flat, places.reshape(-1), found.shape)


def pushed_rows(layout: Layout, batch: int, key: Key, ids: Any, gradients: Any) -> list[PushRows]:
    """Return what travels of rows' gradients, in pieces for the servers.

    `gradients` has the shape of `ids`, and then `dim`. Those of one row are added up, from the
    first to the last, in the table's dtype.

    Raises:
        UnknownKey: no table of this name.
        KeyMismatch: wrong numbers (see `wanted_rows`), or another shape or dtype: both are named.
    """
    entry = layout.table(key)
    spec = entry.spec
    numbers = checked_ids(key, to_host(ids), spec.rows)
    given = to_host(gradients)
    if not isinstance(given, np.ndarray):
        raise KeyMismatch(f"table {key!r}: push_rows takes arrays, not {type(given).__name__}")
    if given.dtype.name != spec.dtype:
        raise KeyMismatch(
            f"table {key!r}: dtype {spec.dtype} expected, given {given.dtype.name}; "
            f"convert it with .astype({spec.dtype!r})"
        )
    if given.shape != (*numbers.shape, spec.dim):
        raise KeyMismatch(
            f"table {key!r}: for row numbers of shape {numbers.shape} gradients of shape "
            f"{(*numbers.shape, spec.dim)} expected, given {given.shape}"
        )
    unique, rows = summed(numbers.reshape(-1), given.reshape(-1, spec.dim))
    parts, step = part_of(unique, len(entry.bids)), rows_per_piece(spec)
    found: list[PushRows] = []
    for part, bid in enumerate(entry.bids):
        places = np.flatnonzero(parts == part)
        for start in range(0, places.size, step):
            some = places[start : start + step]
            found.append(PushRows(batch, bid, _packed(unique[some], rows[some])))
    return found


def _packed(ids: Array, rows: Array) -> Array:
    """Return row numbers and values back to back, as bytes."""
    payload: Array = np.empty(ids.nbytes + rows.nbytes, np.uint8)
    payload[: ids.nbytes] = ids.view(np.uint8)
    payload[ids.nbytes :] = rows.reshape(-1).view(np.uint8)
    return payload
