"""How much to have in flight on one link: what keeps it busy, and little more.

What is sent beyond that stands in queues on the way, where nothing urgent can overtake it, and
where it holds up what comes the other way on the same link. A link holds its rate times its round
trip; both are measured, much as BBR does it (Cardwell et al., "BBR: Congestion-Based Congestion
Control", ACM Queue 14(5), 2016): the highest rate and the shortest round trip of late. But where
data go both ways, answers stand in the queue of the way back and come in groups, and BBR's samples
of the rate exceed it; here a sample is what was delivered since a moment at which it is known how
much was under way, which the link bounds. Pure: time comes in as `now`, in seconds of a monotonic
clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

FIRST_BYTES = 4 * 1024 * 1024
"""In flight before anything is known of the link."""
HORIZON_S = 10.0
"""Older samples say nothing of the link as it is now."""
PERIOD_S = 0.5
"""For how long what is delivered is counted together at least, if the link never idles; and until
it is `COUNTED` times what was under way at the begin, for which nothing is counted."""
COUNTED = 8
SUSTAINED = 8
"""Of so many of the largest items a rate is made, if there ever are so many: fewer may pass at
once what holds a link to its rate (a token bucket)."""
GAIN = 2.0
"""Twice what the link holds: one that was used too little must show a higher rate."""
SLACK_S = 0.0018
"""How much longer than the shortest one a round trip may be without the link idling: a peer is
busy with other things, or an answer stands behind what comes the other way. Blocks are cut so that
one takes about as long (`placement.BLOCK_S`): two or three are in flight. Where more were, what is
urgent waited for them at both ends, and batches took longer (`scripts/bench_overlap`)."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """An item on its way."""

    size: int
    at: float
    alone: bool
    """Whether nothing else was on its way when it was sent."""
    again: bool
    """Its answer may be that to an earlier sending, and says nothing of the link (Karn's rule)."""


Sample = tuple[float, ...]


@dataclass(slots=True)
class _Lowest:
    """The lowest sample of late."""

    kept: deque[tuple[float, Sample]] = field(default_factory=deque)
    """(now, sample): each is higher than those before it, which are older."""

    def note(self, now: float, *sample: float, only_lower: bool = False) -> None:
        """Take one in; `only_lower`: it is no reason to forget an older one that is lower."""
        while self.kept and self.kept[-1][1] >= sample:
            self.kept.pop()
        if only_lower and self.kept:
            return
        self.kept.append((now, sample))
        while now - self.kept[0][0] > HORIZON_S:
            self.kept.popleft()

    def __bool__(self) -> bool:
        return bool(self.kept)

    @property
    def value(self) -> Sample:
        """The lowest of late."""
        return self.kept[0][1]


@dataclass(slots=True)
class Pace:
    """The credit of one machine's way out, whichever peers it leads to."""

    first_bytes: int = FIRST_BYTES
    in_flight: int = 0
    _sent: dict[Hashable, _Sent] = field(default_factory=dict)
    _largest: int = 0
    _since: float = 0.0
    """Since when `_delivered` is counted."""
    _delivered: int = 0
    """Less what was on its way then."""
    _per_byte_s: _Lowest = field(default_factory=_Lowest)
    _per_byte_of_few_s: _Lowest = field(default_factory=_Lowest)
    _trips: _Lowest = field(default_factory=_Lowest)
    """(seconds, bytes) of items"""

    def sent(self, name: Hashable, size: int, now: float, again: bool = False) -> None:
        """An item goes out; `again`: not for the first time."""
        self.gone(name)
        late = now - self._since > PERIOD_S and self._delivered > COUNTED * self.in_flight
        if late or not (self.in_flight or again):
            self._since, self._delivered = now, -self.in_flight
        self._largest = max(self._largest, size)
        self._sent[name] = _Sent(size, now, not self.in_flight, again)
        self.in_flight += size

    def arrived(self, name: Hashable, now: float) -> None:
        """An item is acknowledged."""
        found = self._sent.pop(name, None)
        if found is None:
            return
        self.in_flight -= found.size
        self._delivered += found.size
        if not found.size:
            return
        if self._delivered > 0:
            self._note_rate(self._delivered, now - self._since, now)
        if not found.again:
            self._note_rate(found.size, now - found.at, now)
            # A link that is busy for long would forget how short its trip is, and hold ever more.
            self._trips.note(now, now - found.at, found.size, only_lower=not found.alone)

    def _note_rate(self, nbytes: int, took_s: float, now: float) -> None:
        few = nbytes < SUSTAINED * self._largest
        # An item may be there in the instant that it was sent; the clock's own step bounds it.
        per_byte_s = max(took_s, 1e-6) / nbytes
        (self._per_byte_of_few_s if few else self._per_byte_s).note(now, per_byte_s)

    def gone(self, name: Hashable) -> None:
        """An item is not wanted any more, or not on its way."""
        found = self._sent.pop(name, None)
        if found is not None:
            self.in_flight -= found.size
            self._delivered += found.size if self._delivered < 0 else 0

    @property
    def rate(self) -> float:
        """The highest rate of late, in bytes per second; 0.0: nothing is known."""
        known = self._per_byte_s or self._per_byte_of_few_s
        return 1.0 / known.value[0] if known else 0.0

    @property
    def trip_s(self) -> float:
        """The shortest round trip of late, less the time that its item took by its size."""
        if not self._trips:
            return 0.0
        took_s, nbytes = self._trips.value
        return max(0.0, took_s - nbytes / self.rate)

    @property
    def credit_bytes(self) -> int:
        """How much may be in flight: whole items, two at least."""
        if not self.rate:
            return self.first_bytes
        holds = self.rate * max(SLACK_S, GAIN * self.trip_s)
        # And one that is on the link's near end while what it holds is further on.
        return self._largest * max(2, round(1 + holds / self._largest))
