"""How much to have in flight on one link: what it holds, and little more.

What is sent beyond that stands in queues on the way, where nothing urgent can overtake it, and
where it holds up what comes the other way on the same link. A link holds its rate times its round
trip; both are measured, as BBR does it (Cardwell et al., "BBR: Congestion-Based Congestion
Control", ACM Queue 14(5), 2016): the highest rate and the shortest round trip of late. Pure: time
comes in as `now`, in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

FIRST_BYTES = 4 * 1024 * 1024
"""In flight before anything is known of the link."""
SAMPLES_MAX = 256
HORIZON_S = 10.0
"""Older samples say nothing of the link as it is now."""
GAIN = 2.0
"""Twice what the link holds: acknowledgements come in groups."""
SLACK_S = 0.002
"""What a peer may be busy with other things before it acknowledges, without the link idling."""


@dataclass(slots=True)
class Pace:
    """The credit of one machine's way out, whichever peers it leads to."""

    first_bytes: int = FIRST_BYTES
    in_flight: int = 0
    _delivered: int = 0
    _delivered_at: float = 0.0
    _sent: dict[Hashable, tuple[int, float, int, float]] = field(default_factory=dict)
    """An item's size, when it was sent, what was delivered by then, and when that was."""
    _largest: int = 0
    _samples: deque[tuple[float, float, float]] = field(
        default_factory=lambda: deque(maxlen=SAMPLES_MAX)
    )
    """(now, bytes per second, round trip in seconds)"""

    def sent(self, name: Hashable, size: int, now: float) -> None:
        """An item goes out."""
        self.gone(name)
        if not self._sent:
            # Nothing was on its way: what the link delivers is counted from here.
            self._delivered_at = now
        self._largest = max(self._largest, size)
        self._sent[name] = (size, now, self._delivered, self._delivered_at)
        self.in_flight += size

    def arrived(self, name: Hashable, now: float) -> None:
        """An item is acknowledged."""
        found = self._sent.pop(name, None)
        if found is None:
            return
        size, sent_at, delivered, delivered_at = found
        self.in_flight -= size
        self._delivered += size
        self._delivered_at = now
        # Two items may be acknowledged in one instant; the clock's own step bounds the rate.
        elapsed = max(now - delivered_at, 1e-6)
        if size:
            self._samples.append((now, (self._delivered - delivered) / elapsed, now - sent_at))
        while self._samples and now - self._samples[0][0] > HORIZON_S:
            self._samples.popleft()

    def gone(self, name: Hashable) -> None:
        """An item is not wanted any more, or not on its way."""
        found = self._sent.pop(name, None)
        if found is not None:
            self.in_flight -= found[0]

    @property
    def rate(self) -> float:
        """The highest rate of late, in bytes per second; 0.0: nothing is known."""
        return max((rate for _, rate, _ in self._samples), default=0.0)

    @property
    def round_trip_s(self) -> float:
        """The shortest time of late from sending to acknowledgement; 0.0: nothing is known."""
        return min((trip for _, _, trip in self._samples), default=0.0)

    @property
    def credit_bytes(self) -> int:
        """How much may be in flight: two of the largest items at least."""
        if not self._samples:
            return self.first_bytes
        holds = self.rate * (GAIN * self.round_trip_s + SLACK_S)
        return max(int(holds), 2 * self._largest)
