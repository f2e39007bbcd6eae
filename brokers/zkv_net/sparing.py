"""Words that are said sparingly: what somebody else can cause must not fill a log."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from time import monotonic

EVERY_S = 10.0
KNOWN_MAX = 256


class Sparing:
    """Says whether something may be said about a subject: once in `every_s` seconds, and of at most
    256 subjects in that time."""

    def __init__(self, every_s: float = EVERY_S, clock: Callable[[], float] = monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._said: dict[Hashable, float] = {}
        self.kept_back = 0
        """How often it was not said, since it was last."""

    def may(self, subject: Hashable) -> bool:
        """Return whether to say it now; who asks then does."""
        now = self._clock()
        if len(self._said) >= KNOWN_MAX and subject not in self._said:
            late = now - self._every_s
            self._said = {one: at for one, at in self._said.items() if at > late}
        last = self._said.get(subject)
        full = last is None and len(self._said) >= KNOWN_MAX
        if full or (last is not None and now - last < self._every_s):
            self.kept_back += 1
            return False
        self._said[subject] = now
        return True

    def more(self) -> str:
        """Return how much was kept back, in words, and begin to count anew."""
        count, self.kept_back = self.kept_back, 0
        return f" ({count} more since the last word)" if count else ""
