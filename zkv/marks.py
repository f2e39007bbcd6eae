"""High-water marks: a set of numbers that fills up from 1, in little memory."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Marks:
    """The numbers that are settled: all up to `high`, and the few in `above`."""

    high: int = 0
    above: set[int] = field(default_factory=set)

    def settle(self, number: int) -> None:
        """Add a number."""
        if number <= self.high:
            return
        self.above.add(number)
        while self.high + 1 in self.above:
            self.high += 1
            self.above.discard(self.high)

    def join(self, other: Marks) -> None:
        """Add all numbers of another set."""
        self.high = max(self.high, other.high)
        above, self.above = self.above | other.above, set()
        for number in above:
            self.settle(number)

    def __contains__(self, number: int) -> bool:
        return number <= self.high or number in self.above
