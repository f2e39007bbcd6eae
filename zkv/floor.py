"""The clock of the slowest worker, kept up while clocks come, rise and go.

It knows numbers only: neither whose clock it is, nor what a lead over the slowest means.
"""

from __future__ import annotations

import heapq


class Floor:
    """The least of a changing collection of clocks, in O(log n) amortised a change."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._heap: list[int] = []

    def add(self, clock: int) -> None:
        """Put one more clock with this value in."""
        if clock not in self._counts:
            self._counts[clock] = 0
            heapq.heappush(self._heap, clock)
        self._counts[clock] += 1

    def remove(self, clock: int) -> None:
        """Take one clock with this value out; it must be in."""
        self._counts[clock] -= 1
        if not self._counts[clock]:
            del self._counts[clock]
        # One stuck worker would let the values that the others passed pile up above its own.
        if len(self._heap) > 2 * len(self._counts) + 64:
            self._heap = sorted(self._counts)

    def value(self) -> int:
        """The least clock; 0 if there is none."""
        while self._heap and self._heap[0] not in self._counts:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else 0
