"""What a byte costs on a link, from how long steps of more and of fewer bytes were on their way.

The seconds of a step are latency + bytes / speed, and on a fast link nearly all of it is latency:
bytes over seconds would make it seem slow. So the speed is the slope between steps of many and of
few bytes, where both were seen. Nothing here measures: bytes and seconds come in.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

KEPT = 9
"""Steps of about the same size: their median counts, as single ones wait for a scheduler."""
CHANGED = 2.0
"""Two steps in a row that took this many times as long as before, or as short: another link."""
SPREAD = 2.0
"""Sizes that differ by less say nothing about the slope."""
SEEN = 3
"""Steps of a size from which it is known how far chance goes; with fewer it says nothing."""

Steps = deque[tuple[float, float]]
"""(bytes, seconds), the newest last."""


def _median(steps: Steps, at: int) -> float:
    return statistics.median(step[at] for step in steps)


def _error(steps: Steps) -> float:
    """Return the standard error of the median of the seconds."""
    middle = _median(steps, 1)
    away = statistics.median(abs(step[1] - middle) for step in steps)
    # 1.48: from median deviation to standard deviation; 1.25: from mean to median; of a normal one.
    return 1.48 * 1.25 * away / math.sqrt(len(steps))


@dataclass(slots=True)
class LinkSpeed:
    """One worker's way to the servers."""

    _down: Steps = field(default_factory=lambda: deque(maxlen=KEPT))
    """What came down: taken for the way up while nothing as large went up."""
    _sizes: dict[int, Steps] = field(default_factory=dict)
    """By size, in steps of √2."""
    _newest: int = 0

    def add(self, nbytes: float, seconds: float) -> None:
        """Take in a step in which so many bytes were on their way for so long."""
        if nbytes < 1 or seconds <= 0:
            return
        size = self._newest = round(2 * math.log2(nbytes))
        steps = self._sizes.setdefault(size, deque(maxlen=KEPT))
        usual = _median(steps, 1) if len(steps) > 1 else None
        steps.append((nbytes, seconds))
        if usual is not None:
            ratios = [took / usual for _, took in (steps[-2], steps[-1])]
            if min(ratios) > CHANGED or max(ratios) < 1 / CHANGED:
                self._sizes = {size: deque((steps[-2], steps[-1]), maxlen=KEPT)}

    def add_down(self, nbytes: float, seconds: float) -> None:
        """Take in how long so many bytes took on their way down."""
        if nbytes >= 1 and seconds > 0:
            self._down.append((nbytes, seconds))

    @property
    def down(self) -> tuple[float, float]:
        """Bytes and seconds of what came down; (0, 0) if nothing did."""
        return (_median(self._down, 0), _median(self._down, 1)) if self._down else (0.0, 0.0)

    @property
    def most(self) -> float:
        """Bytes of the largest steps that are remembered; 0 of none."""
        return _median(self._sizes[max(self._sizes)], 0) if self._sizes else 0.0

    @property
    def bytes_per_s(self) -> float:
        """The speed; infinite if more bytes take no longer than chance allows.

        While all steps were about as large, or few were seen, all of their time is taken for their
        bytes', so that the link seems no faster than it is. Infinite too if nothing is known.
        """
        if not self._sizes:
            return _median(self._down, 0) / _median(self._down, 1) if self._down else math.inf
        newest = self._sizes[self._newest]
        known = [self._sizes[size] for size in sorted(self._sizes)]
        known = [steps for steps in known if len(steps) >= SEEN] or [newest]
        few, many = known[0], known[-1]
        if len(self._down) >= SEEN and _median(self._down, 0) > SPREAD * _median(many, 0):
            many = self._down
        more = _median(many, 0) - _median(few, 0)
        if len(few) < SEEN or more < (SPREAD - 1) * _median(few, 0):
            return _median(newest, 0) / _median(newest, 1)
        longer = _median(many, 1) - _median(few, 1) - math.hypot(_error(few), _error(many))
        return more / longer if longer > 0 else math.inf

    @property
    def slowest_bytes_per_s(self) -> float:
        """The speed if there were no latency at all: what a step of many bytes may cost at most."""
        found = [self._down] if self._down else []
        if self._sizes:
            found.append(self._sizes[max(self._sizes)])
        return max((_median(one, 0) / _median(one, 1) for one in found), default=math.inf)
