"""What a session is told about rows of tables, as plain values (see `zkv_workers.signals`)."""

from __future__ import annotations

from dataclasses import dataclass

from zkv.dtypes import Array


@dataclass(frozen=True, slots=True)
class AskRows:
    """Read rows of a table; answered with their values, (rows, dim), or None if the batch was
    cancelled."""

    token: int
    kid: int
    ids: Array | None
    """uint64, ascending, each once. None: all that updates have changed; the answer is then their
    numbers, ascending, and their values."""
    batch: int
    """The version is that of this batch; 0: that of `pull`."""
    pull: int = 0
    """The token of a `Pull` of rows that is answered."""


@dataclass(frozen=True, slots=True)
class ReleaseRows:
    """No more rows will be asked for under this pull."""

    pull: int


@dataclass(frozen=True, slots=True)
class PushRows:
    """One piece of what the current batch pushes to a table: row numbers and gradients, as they
    travel; never changed afterwards."""

    batch: int
    bid: int
    payload: Array


RowInput = AskRows | ReleaseRows | PushRows
