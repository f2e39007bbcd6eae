"""What one process's clock says when another's says something, found by round trips.

A message leaves with the own time, the answer brings that back beside the other's time: the other's
clock was read between the two own times. So other − own lies within half a round trip of the middle
(Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989). Pure: all times
come in, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alignment:
    """Own time + `offset_s` is the other's time, give or take `error_s`."""

    offset_s: float
    error_s: float
    round_trips: int
    """How many were looked at; the shortest one counts."""


class RoundTrips:
    """The round trips between this process and another one."""

    def __init__(self) -> None:
        self._count = 0
        self._best: tuple[float, float] | None = None

    def note(self, sent_s: float, theirs_s: float, heard_s: float) -> None:
        """Take in a round trip: the own time when it began, the other's, the own when it ended.

        One that ends before it begins, or is not finite, is of no use and is left out.
        """
        error_s = (heard_s - sent_s) / 2
        offset_s = theirs_s - sent_s - error_s
        if not (0.0 <= error_s < float("inf") and abs(offset_s) < float("inf")):
            return
        self._count += 1
        if self._best is None or error_s < self._best[0]:
            self._best = (error_s, offset_s)

    @property
    def alignment(self) -> Alignment | None:
        """What is known of the other's clock; None: nothing."""
        if self._best is None:
            return None
        error_s, offset_s = self._best
        return Alignment(offset_s, error_s, self._count)
