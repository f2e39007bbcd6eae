"""Limits on what peers may ask of a process, whoever they are. Defaults are far above what honest
use comes to; each is a setting."""

from __future__ import annotations

from dataclasses import dataclass

MEMBERS_MAX = 4096
"""Workers (observers included) and servers of one broker."""
KEYS_MAX = 1_000_000
"""Keys and tables of one model."""
CONNECTIONS_MAX = 16_384
"""Of one listening port."""
MESSAGES_PER_S = 20_000
"""Of one connection to a listening port; twice as many may come at once."""
STRIKES_MAX = 20
STRIKES_S = 60.0
"""So many messages that are none, in so many seconds, end a connection."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one listening port bears."""

    connections: int = CONNECTIONS_MAX
    messages_per_s: int = MESSAGES_PER_S
    strikes: int = STRIKES_MAX


LIMITS = Limits()


class Bucket:
    """Says whether one more message may come now: `rate` a second, and twice that at once."""

    __slots__ = ("_at", "_left", "_rate")

    def __init__(self, rate: float, now: float) -> None:
        self._rate, self._left, self._at = rate, 2.0 * rate, now

    def takes(self, now: float) -> bool:
        """Return whether one fits, and count it if it does; `now` in seconds."""
        self._left = min(2.0 * self._rate, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
