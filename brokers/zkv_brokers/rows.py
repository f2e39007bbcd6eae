"""Rows that a contribution has pushed to one part of a table, and the sum of several such.

A row that a contribution does not name adds nothing there, and so changes no bit. Knows no tables'
values, no rules and no log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zkv.dtypes import Array
from zkv.sums import tree_sum, weighted
from zkv.tables import summed


@dataclass(frozen=True, slots=True)
class PushedRows:
    """Row numbers (uint64, ascending, each once), and a gradient of each: (rows, dim)."""

    ids: Array
    values: Array

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return int(self.ids.nbytes + self.values.nbytes)


def joined(pieces: Sequence[PushedRows]) -> PushedRows | None:
    """Return the pieces of one contribution as one, None if there are none.

    A row that several have (pushed by several calls) is added up in their order.
    """
    if len(pieces) < 2:
        return pieces[0] if pieces else None
    ids = np.concatenate([one.ids for one in pieces])
    values = np.concatenate([one.values for one in pieces])
    if (ids[1:] > ids[:-1]).all():
        return PushedRows(ids, values)
    return PushedRows(*summed(ids, values))


def total_rows(terms: Sequence[PushedRows | None], factors: Sequence[float]) -> PushedRows | None:
    """Return Σ factor · term over the fixed tree of rule 15; None if no term has any row.

    A term is what one contribution says, None if it says nothing.
    """
    named = [one.ids for one in terms if one is not None and one.ids.size]
    if not named:
        return None
    ids = np.unique(np.concatenate(named)) if len(named) > 1 else named[0]

    def term(at: int) -> Array | None:
        one = terms[at]
        if one is None:
            return None
        fresh = weighted(one.values, factors[at])
        if one.ids.size == ids.size:
            return fresh
        # Adding -0.0 changes no bit of a sum; +0.0 would turn -0.0 around.
        whole: Array = np.full((ids.size, fresh.shape[1]), -0.0, fresh.dtype)
        whole[np.searchsorted(ids, one.ids)] = fresh
        return whole

    def add(at: int, total: Array) -> bool:
        one = terms[at]
        if one is not None:
            total[np.searchsorted(ids, one.ids)] += weighted(one.values, factors[at])
        return True

    total = tree_sum(term, len(terms), add)
    assert total is not None
    return PushedRows(ids, total)
