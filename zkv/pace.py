"""How much to have in flight on one link: what it holds, and little more.

What is sent beyond that stands in queues on the way, where nothing urgent can overtake it, and
where it holds up what comes the other way on the same link. A link holds its rate times its round
trip; both are measured, as BBR does it (Cardwell et al., "BBR: Congestion-Based Congestion
Control", ACM Queue 14(5), 2016): the highest rate and the shortest round trip of late. BBR empties
the link now and then to see how short that is; here every batch begins on an empty one, and only
trips of items count that found it so: the others were spent in a queue of our own making. Pure:
time comes in as `now`, in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

FIRST_BYTES = 4 * 1024 * 1024
"""In flight before anything is known of the link."""
RATES_MAX, TRIPS_MAX = 32, 8
HORIZON_S = 10.0
"""Older samples say nothing of the link as it is now."""
GAIN = 2.0
"""Twice what the link holds: acknowledgements come in groups."""
SLACK_S = 0.002
"""What a peer may be busy with other things before it acknowledges, without the link idling."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """An item on its way: its size, and how things were when it was sent."""

    size: int
    at: float
    alone: bool
    """Whether nothing else was on its way."""
    delivered: int
    delivered_at: float


@dataclass(slots=True)
class Pace:
    """The credit of one machine's way out, whichever peers it leads to."""

    first_bytes: int = FIRST_BYTES
    in_flight: int = 0
    _delivered: int = 0
    _delivered_at: float = 0.0
    _sent: dict[Hashable, _Sent] = field(default_factory=dict)
    _largest: int = 0
    _rate: float = 0.0
    _trip_s: float = 0.0
    _rates: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RATES_MAX))
    """(now, bytes per second)"""
    _trips: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=TRIPS_MAX))
    """(seconds, bytes) of items that had the link to themselves when they were sent"""

    def sent(self, name: Hashable, size: int, now: float) -> None:
        """An item goes out."""
        self.gone(name)
        if not self._sent:
            # Nothing was on its way: what the link delivers is counted from here.
            self._delivered_at = now
        self._largest = max(self._largest, size)
        self.in_flight += size
        self._sent[name] = _Sent(
            size, now, self.in_flight == size, self._delivered, self._delivered_at
        )

    def arrived(self, name: Hashable, now: float) -> None:
        """An item is acknowledged."""
        found = self._sent.pop(name, None)
        if found is None:
            return
        self.in_flight -= found.size
        self._delivered += found.size
        self._delivered_at = now
        if found.size:
            # Two items may be acknowledged in one instant; the clock's own step bounds the rate.
            rate = (self._delivered - found.delivered) / max(now - found.delivered_at, 1e-6)
            self._rates.append((now, rate))
            if found.alone:
                self._trips.append((now - found.at, found.size))
            self._learn(now)

    def _learn(self, now: float) -> None:
        while now - self._rates[0][0] > HORIZON_S:
            self._rates.popleft()
        self._rate = max(rate for _, rate in self._rates)
        if self._trips:
            self._trip_s = max(0.0, min(trip - size / self._rate for trip, size in self._trips))

    def gone(self, name: Hashable) -> None:
        """An item is not wanted any more, or not on its way."""
        found = self._sent.pop(name, None)
        if found is not None:
            self.in_flight -= found.size

    @property
    def rate(self) -> float:
        """The highest rate of late, in bytes per second; 0.0: nothing is known."""
        return self._rate

    @property
    def credit_bytes(self) -> int:
        """How much may be in flight: two of the largest items at least."""
        if not self._rates:
            return self.first_bytes
        # One item is on the link's near end while what it holds is further on.
        holds = self._rate * (GAIN * self._trip_s + SLACK_S) + self._largest
        return max(int(holds), 2 * self._largest)
