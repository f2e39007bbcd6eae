"""Byte credits: how much a sender may have unacknowledged at one peer.

ZeroMQ's own high-water mark counts messages, so it bounds nothing when messages differ in size. A
window holds what exceeds the credit back, in order, and gives it out as acknowledgements come in.
Pure: time comes in as `now`, in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Window(Generic[Item]):
    """A queue toward one peer, at most `bytes_max` unacknowledged (one item may exceed it alone).

    With `resend_s`, what is not acknowledged is given out again once nothing was sent or
    acknowledged for so long; each time after twice the pause before, up to eight times the first.
    """

    def __init__(self, bytes_max: int, *, resend_s: float = 0.0) -> None:
        self.bytes_max = bytes_max
        self.in_flight = 0
        self._resend_s = resend_s
        self._pause_s = resend_s
        self._quiet_since = 0.0
        self._queue: deque[tuple[Hashable, int, Item]] = deque()
        self._sent: dict[Hashable, tuple[int, Item]] = {}

    def __len__(self) -> int:
        return len(self._queue) + len(self._sent)

    def offer(self, name: Hashable, size: int, item: Item) -> None:
        """Queue an item of `size` bytes; `name` is what its acknowledgement will say."""
        self._queue.append((name, size, item))

    def ready(self, now: float) -> list[Item]:
        """Return the items to send now: what the credit admits, and what is overdue."""
        out = []
        if self._overdue(now):
            out += [item for _, item in self._sent.values()]
            self._pause_s = min(2 * self._pause_s, 8 * self._resend_s)
            self._quiet_since = now
        while self._queue and (
            self.in_flight == 0 or self.in_flight + self._queue[0][1] <= self.bytes_max
        ):
            name, size, item = self._queue.popleft()
            before = self._sent.get(name)
            if before is not None:
                self.in_flight -= before[0]
            self._sent[name] = (size, item)
            self.in_flight += size
            self._quiet_since = now
            out.append(item)
        return out

    def _overdue(self, now: float) -> bool:
        """Whether nothing was sent or acknowledged for so long that something must be lost.

        While acknowledgements come in, nothing is sent again: a slow link is not a lossy one.
        """
        return self._resend_s > 0 and bool(self._sent) and now >= self._quiet_since + self._pause_s

    def acknowledge(self, name: Hashable, now: float) -> bool:
        """Note that an item has arrived; return whether it was outstanding."""
        sent = self._sent.pop(name, None)
        if sent is None:
            return False
        self.in_flight -= sent[0]
        self._quiet_since, self._pause_s = now, self._resend_s
        return True

    def forget(self, names: set[Hashable]) -> None:
        """Drop queued and sent items of these names: nobody wants them any more."""
        self._queue = deque(entry for entry in self._queue if entry[0] not in names)
        for name in names & self._sent.keys():
            self.in_flight -= self._sent.pop(name)[0]

    @property
    def queued(self) -> int:
        """How many items wait for credit."""
        return len(self._queue)

    def is_sent(self, name: Hashable) -> bool:
        """Return whether the item was given out and is not acknowledged."""
        return name in self._sent

    def names(self) -> set[Hashable]:
        """Return the names of all items that are queued or unacknowledged."""
        return {name for name, _, _ in self._queue} | self._sent.keys()

    def deadline(self) -> float | None:
        """Return when `ready` has to be asked again for what is overdue."""
        if self._resend_s <= 0 or not self._sent:
            return None
        return self._quiet_since + self._pause_s
