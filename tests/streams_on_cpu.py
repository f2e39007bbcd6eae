"""Which operations of streams come before which, for the stand-in for CuPy: a detector of races.

Operations are done as soon as they are given, so a result never shows that nobody has waited. So
each stream, each event and each thread of the host has a vector clock (Mattern, "Virtual Time and
Global States of Distributed Systems", 1989): how many operations of each stream are before what it
does next. Who reads what another stream has written, or writes what another stream reads, has to
come behind that: by an event that it waits for, or as the thread that gives the order has waited.

No stream waits for another on its own, not even for the default one: so are CUDA's non-blocking
streams. Memory belongs to the stream on which it was made, as in CuPy's pool: whoever drops the
last reference to what another stream still reads has given it away too early.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

StreamId = tuple[int, int]
"""Device and number."""
Clock = dict[StreamId, int]
"""How many operations of each stream have been done."""


class Race(AssertionError):
    """Two operations on the same memory of which neither comes before the other."""


def merge(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count


@dataclass
class Order:
    """The clocks of all streams and of the host's threads."""

    clocks: dict[StreamId, Clock] = field(default_factory=dict)
    hosts: dict[int, Clock] = field(default_factory=dict)
    seen: Clock = field(default_factory=dict)
    """What any thread has waited for."""
    waiters: set[str] = field(default_factory=set)
    """Names of the threads that have waited."""
    deliveries: list[tuple[StreamId, int, Callable[[], None]]] = field(default_factory=list)
    """Copies to the host: they arrive when somebody has waited for them."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    def host(self) -> Clock:
        """The clock of this thread."""
        return self.hosts.setdefault(threading.get_ident(), {})

    def of(self, stream: StreamId) -> Clock:
        return self.clocks.setdefault(stream, {})

    def operation(self, stream: StreamId) -> Clock:
        """This thread gives a stream something to do; return what comes before it, and itself."""
        with self.lock:
            clock = self.of(stream)
            merge(clock, self.host())
            clock[stream] = clock.get(stream, 0) + 1
            return clock

    def now(self, stream: StreamId) -> Clock:
        """All that was given to a stream, for an event."""
        with self.lock:
            return dict(self.of(stream))

    def waits(self, stream: StreamId, clock: Clock) -> None:
        """A stream waits for an event."""
        with self.lock:
            merge(self.of(stream), clock)

    def host_waits(self, clock: Clock) -> None:
        """This thread waits: what was copied until then has arrived."""
        with self.lock:
            self.waiters.add(threading.current_thread().name)
            merge(self.host(), clock)
            merge(self.seen, clock)
            due = [one for one in self.deliveries if clock.get(one[0], 0) >= one[1]]
            self.deliveries = [one for one in self.deliveries if one not in due]
            for _, _, deliver in due:
                deliver()

    def deliver(self, stream: StreamId, copy: Callable[[], None]) -> None:
        """Something is copied to the host once what a stream has done is waited for."""
        with self.lock:
            self.deliveries.append((stream, self.of(stream)[stream], copy))


@dataclass(frozen=True)
class Use:
    """Bytes from `low` to `high` that an operation of a stream has touched."""

    low: int
    high: int
    stream: StreamId
    count: int
    writes: bool


class Memory:
    """What was done to one array's memory."""

    def __init__(self, order: Order, stream: StreamId, races: list[str]) -> None:
        self.order, self.stream, self.races = order, stream, races
        self.uses: list[Use] = []

    def use(self, low: int, high: int, stream: StreamId, *, writes: bool) -> None:
        """An operation touches these bytes: it must come behind those that it would disturb.

        Raises:
            Race: it does not.
        """
        with self.order.lock:
            clock = self.order.operation(stream)
            kept = []
            for one in self.uses:
                apart = one.high <= low or high <= one.low
                after = clock.get(one.stream, 0) >= one.count
                if not apart and not after and (writes or one.writes):
                    raise Race(
                        f"stream {stream} {'writes' if writes else 'reads'} what stream "
                        f"{one.stream} {'writes' if one.writes else 'reads'}, and waits for "
                        "nothing in between"
                    )
                covered = low <= one.low and one.high <= high and after
                # Who comes behind this operation comes behind those, too.
                if not covered or not (writes or (one.stream == stream and not one.writes)):
                    kept.append(one)
            self.uses = [*kept, Use(low, high, stream, clock[stream], writes)]

    def __del__(self) -> None:
        before = dict(self.order.of(self.stream))
        merge(before, self.order.seen)
        for one in self.uses:
            if before.get(one.stream, 0) < one.count:
                self.races.append(
                    f"memory of stream {self.stream} was given away while stream {one.stream} "
                    f"still {'writes' if one.writes else 'reads'} it"
                )
