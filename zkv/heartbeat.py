"""Heartbeats: how often a process says that it is alive, and what follows from that.

The broker's setting; it tells members in their welcome, so that all of a run agree. No I/O, no
clock.
"""

from __future__ import annotations

import re
from collections import deque
from statistics import median
from typing import Annotated

from msgspec import Meta

BEAT_S = 0.5
BEAT_LEAST_S, BEAT_MOST_S = 0.02, 60.0
"""Below it processes do little else; above it a member would be told of a death minutes later."""
BEATS_GONE = 3
"""Who was not heard for so many beats has ended, if anything else says so too."""
GAPS_KEPT, GAPS_LEAST = 32, 8
"""Pauses between beats that are remembered of a member, and how many of them say something."""
MADS = 8
"""Median deviations above the median that no pause has: beyond it, a member is silent."""
FLOORS_MOST = 3
TICK_MOST_S = 0.1
LINK_RESEND_LEAST_S, LINK_RESEND_MOST_S = 0.2, 1.0

Beats = Annotated[float, Meta(ge=BEAT_LEAST_S, le=BEAT_MOST_S)]
"""A pause between two beats as it travels, in seconds."""

_UNITS = {"": 1.0, "s": 1.0, "ms": 0.001, "min": 60.0}
_LIMITS = f"from {BEAT_LEAST_S:g} to {BEAT_MOST_S:g} s"


def beat(text: object) -> float:
    """Return the pause between two beats in seconds: a number of them, or text such as "50ms".

    >>> beat("50ms"), beat("0.5s"), beat(2)
    (0.05, 0.5, 2.0)

    Raises:
        ValueError: not of that form, or out of bounds.
    """
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s|min|)\s*", str(text))
    if match is None or isinstance(text, bool):
        raise ValueError(f"{text!r} is no time between heartbeats; write 0.5s or 50ms, {_LIMITS}")
    seconds = float(match[1]) * _UNITS[match[2]]
    if not BEAT_LEAST_S <= seconds <= BEAT_MOST_S:
        raise ValueError(f"{text!r}: heartbeats are {_LIMITS} apart")
    return seconds


def gone_s(beat_s: float) -> float:
    """Return after how much silence, in seconds, a process has ended, if its connection broke or a
    new one wants its place."""
    return BEATS_GONE * beat_s


def tick_s(beat_s: float, most_s: float = TICK_MOST_S) -> float:
    """Return how often a process looks at its clock, in seconds: late by half a beat at most."""
    return min(most_s, beat_s / 2)


def link_resend_s(beat_s: float) -> float:
    """Return after how long a control message without an acknowledgement goes out again, in
    seconds: two beats, in bounds that a long way and a person can bear."""
    return min(LINK_RESEND_MOST_S, max(LINK_RESEND_LEAST_S, 2 * beat_s))


class Rhythm:
    """How far apart a member's beats come, and with it what is silence for that member: machines
    that are short of time, and links that repeat much, let beats come late that were sent in
    time."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=GAPS_KEPT)
        self._last: float | None = None

    def beaten(self, now: float) -> None:
        """A beat has come."""
        if self._last is not None:
            self._gaps.append(now - self._last)
        self._last = now

    def patience_s(self, floor_s: float) -> float:
        """Return after how much silence, in seconds, the member is lost: the median gap and `MADS`
        times their median deviation from it, but `floor_s` at least, and `FLOORS_MOST` times that
        at most, as members say themselves when they beat."""
        if len(self._gaps) < GAPS_LEAST:
            return floor_s
        middle = median(self._gaps)
        spread = median(abs(gap - middle) for gap in self._gaps)
        return min(max(floor_s, middle + MADS * spread), FLOORS_MOST * floor_s)


class Pulse:
    """When a member beats next. `beat_s`: how often until the broker says how often, in seconds;
    `traced`: and no slower after that, as each of its beats measures a round trip."""

    def __init__(self, beat_s: float, *, traced: bool = False) -> None:
        self.beat_s = beat_s
        self._most_s = beat_s if traced else BEAT_MOST_S
        self._next = 0.0

    def told(self, beat_s: float, now: float) -> None:
        """The broker says how often."""
        self.beat_s = min(beat_s, self._most_s)
        self._next = min(self._next, now + self.beat_s)

    def due(self, now: float) -> bool:
        """Return whether it is time for a beat; then the next one is later."""
        if now < self._next:
            return False
        self._next = now + self.beat_s
        return True

    def patience_s(self, lost_s: float) -> float:
        """Return after how much silence the broker is lost, in seconds: `lost_s`, and three
        beats."""
        return max(lost_s, gone_s(self.beat_s))
