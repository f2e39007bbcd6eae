"""Byte credits: how much a sender may have unacknowledged at one peer.

ZeroMQ's own high-water mark counts messages, so it bounds nothing when messages differ in size. A
window holds what exceeds the credit back, and gives it out as acknowledgements come in: what is
most urgent first, and among equals what was offered first. Pure: time comes in as `now`, in seconds
of a monotonic clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from zkv.pace import Pace

Item = TypeVar("Item")
SLOWEST_BYTES_PER_S = 125_000
"""1 Mbit/s: on such a link a block of 1 MiB takes 8.4 s, and nothing is wrong."""
PAUSES_MAX = 8
Order = tuple[int, ...]
"""What goes first: the lowest."""


class Window(Generic[Item]):
    """A queue toward one peer, at most `bytes_max` unacknowledged (one item may exceed it alone).

    With a `pace`, which windows toward several peers may share, no more either than the link holds,
    so that what is urgent overtakes the rest; but each peer has one item, however slow others are.

    With `resend_s`, what is lost is given out again. Connections keep order, so an acknowledgement
    of an item shows that older ones which are still not acknowledged were lost. If nothing at all
    is heard, the oldest item goes out again as a probe: after `resend_s` and the time that it may
    take on the slowest link, then after twice that pause, up to eight times. A slow link is not a
    lossy one: repeating a whole window there would only make it slower.
    """

    def __init__(self, bytes_max: int, *, resend_s: float = 0.0, pace: Pace | None = None) -> None:
        self.bytes_max = bytes_max
        self.pace = pace
        self.in_flight = 0
        self._resend_s = resend_s
        self._pauses = 1
        self._quiet_since = 0.0
        self._queue: list[tuple[Order, int, Hashable, int, Item]] = []
        """A heap; the second number counts what was offered."""
        self._offered = 0
        self._token = object()
        """Tells this peer's items from those of others with the same names."""
        self._sent: dict[Hashable, tuple[int, Item]] = {}
        """In the order in which they were last given out."""
        self._lost: list[Hashable] = []

    def __len__(self) -> int:
        return len(self._queue) + len(self._sent)

    def offer(self, name: Hashable, size: int, item: Item, order: Order = ()) -> None:
        """Queue an item of `size` bytes; `name` is what its acknowledgement will say.

        Of two that wait, the one with the lower `order` goes first.
        """
        self._offered += 1
        heapq.heappush(self._queue, (order, self._offered, name, size, item))

    def ready(self, now: float) -> list[Item]:
        """Return the items to send now: what the credit admits, and what is overdue."""
        return ready((self,), now)

    def repeats(self, now: float) -> list[Item]:
        """Return what has to be sent again."""
        out: list[Item] = []
        if not self._lost and self._overdue(now):
            self._lost.append(next(iter(self._sent)))
            self._pauses = min(2 * self._pauses, PAUSES_MAX)
            if self.pace is not None:
                # Who does not answer must not use up what others could be sent.
                for name in self._sent:
                    self.pace.gone((self._token, name))
        for name in self._lost:
            if name in self._sent:
                self._give_out(name, *self._sent[name], now, out)
        self._lost.clear()
        return out

    @property
    def first(self) -> Order | None:
        """How urgent the most urgent of what waits is; None: nothing waits."""
        return self._queue[0][0] if self._queue else None

    @property
    def admits(self) -> bool:
        """Whether the first of what waits may go out."""
        size = self._queue[0][3]
        if self.in_flight == 0:
            return True
        pace = self.pace
        if self.in_flight + size > self.bytes_max or pace is None:
            return self.in_flight + size <= self.bytes_max
        # Who does not answer is sent nothing more.
        return self._pauses == 1 and pace.in_flight + size <= pace.credit_bytes

    def take(self, now: float) -> Item:
        """Give out the first of what waits."""
        _, _, name, size, item = heapq.heappop(self._queue)
        self._give_out(name, size, item, now, [])
        return item

    def _give_out(self, name: Hashable, size: int, item: Item, now: float, out: list[Item]) -> None:
        before = self._sent.pop(name, None)
        if before is not None:
            self.in_flight -= before[0]
        self._sent[name] = (size, item)
        self.in_flight += size
        self._quiet_since = now
        if self.pace is not None:
            self.pace.sent((self._token, name), size, now, again=before is not None)
        out.append(item)

    def _overdue(self, now: float) -> bool:
        due = self.deadline()
        return due is not None and now >= due

    def acknowledge(self, name: Hashable, now: float) -> bool:
        """Note that an item has arrived; return whether it was outstanding."""
        if name not in self._sent:
            return False
        if self._resend_s > 0:
            for older in self._sent:
                if older == name:
                    break
                if older not in self._lost:
                    self._lost.append(older)
        self.in_flight -= self._sent.pop(name)[0]
        if self.pace is not None:
            self.pace.arrived((self._token, name), now)
        self._quiet_since, self._pauses = now, 1
        return True

    def forget(self, names: set[Hashable]) -> None:
        """Drop queued and sent items of these names: nobody wants them any more."""
        self._queue = [entry for entry in self._queue if entry[2] not in names]
        heapq.heapify(self._queue)
        for name in names & self._sent.keys():
            self.in_flight -= self._sent.pop(name)[0]
            if self.pace is not None:
                self.pace.gone((self._token, name))

    @property
    def queued(self) -> int:
        """How many items wait for credit."""
        return len(self._queue)

    def is_sent(self, name: Hashable) -> bool:
        """Return whether the item was given out and is not acknowledged."""
        return name in self._sent

    def names(self) -> set[Hashable]:
        """Return the names of all items that are queued or unacknowledged."""
        return {entry[2] for entry in self._queue} | self._sent.keys()

    def deadline(self) -> float | None:
        """Return when `ready` has to be asked again for what is overdue."""
        if self._resend_s <= 0 or not self._sent:
            return None
        size, _ = next(iter(self._sent.values()))
        return self._quiet_since + self._pauses * (self._resend_s + size / SLOWEST_BYTES_PER_S)


def ready(windows: Iterable[Window[Item]], now: float) -> list[Item]:
    """Return the items to send now to several peers, the most urgent of all first."""
    out: list[Item] = []
    heads: list[tuple[Order, int, Window[Item]]] = []
    for at, window in enumerate(windows):
        out += window.repeats(now)
        if (first := window.first) is not None:
            heads.append((first, at, window))
    heapq.heapify(heads)
    while heads:
        _, at, window = heapq.heappop(heads)
        if window.admits:
            out.append(window.take(now))
            if (first := window.first) is not None:
                heapq.heappush(heads, (first, at, window))
    return out
