"""What a simulated transfer costs: links, bytes, and a queue where workers share one link.

The model is the textbook's, and no finer. With B bits per second, latency L, and a push of u bytes
of which a codec leaves the share d (kept/total, its density):

    pull takes  L + 8 * down / B        push takes  L + 8 * u * d / B

- *Serial*: pull, then compute, then push; a batch takes their sum.
- *Overlapped*: pull, then push, beside the computation, as if both were cut into endlessly many
  pieces; a batch takes the longer of the computation and the transfers.
- *Separate links*: every transfer has the whole of B. *Shared*: all pushes pass one link of B, one
  after the other in the order in which they begin (in worker order at one time), and all pulls pass
  another, as on the two directions of a server's network card. Latency does not occupy a link.
- *Server time* U for each update: one update at a time; who starts after it waits for its end.

With all of it 0 a transfer takes no time at all. This module must not know policies or versions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from zkv.compute_times import Time

Transfer = tuple[int, int]
"""Whose it is: worker, grant."""


@dataclass(frozen=True, slots=True)
class Network:
    """The figures of the model. Raises ValueError that names the one that is out of range."""

    bits_per_s: Time | None = None
    """None: no limit."""
    latency_s: Time = 0
    bytes_up: int = 0
    """Of one push before the codec."""
    bytes_down: int = 0
    """Of one pull."""
    density: Time = 1
    """The share of a push's bytes that the codec leaves, 0 < density <= 1."""
    update_s: Time = 0
    """Server time of one update."""
    shared: bool = False
    overlap: bool = False

    def __post_init__(self) -> None:
        if self.bits_per_s is not None and not 0 < self.bits_per_s < math.inf:
            raise ValueError(f"bandwidth must be above 0 bit/s, given {self.bits_per_s}")
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, given {self.density}")
        for name in ("latency_s", "bytes_up", "bytes_down", "update_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, given {getattr(self, name)}")

    @property
    def push_bytes(self) -> Time:
        """Bytes of one push after the codec."""
        return self.bytes_up * self.density

    @property
    def push_s(self) -> Time:
        """How long one push occupies a link, in seconds."""
        return self._seconds(self.push_bytes)

    @property
    def pull_s(self) -> Time:
        """How long one pull occupies a link, in seconds."""
        return self._seconds(self.bytes_down)

    def _seconds(self, size: Time) -> Time:
        if self.bits_per_s is None:
            return 0
        bits = 8 * size
        if isinstance(bits, int) and isinstance(self.bits_per_s, int):
            return Fraction(bits, self.bits_per_s)
        return bits / self.bits_per_s


class Link:
    """One direction of the network: says when a transfer has left it, through `left(when, whose)`.

    On a shared link one transfer passes at a time. One that is stopped makes room at once; the
    notice of its end, if it was under way, must then be dropped by the caller.
    """

    def __init__(self, seconds: Time, shared: bool, left: Callable[[Time, Transfer], None]) -> None:
        self._seconds = seconds
        self._shared = shared and seconds > 0
        self._left = left
        self._queue: deque[Transfer] = deque()
        self._stopped: set[Transfer] = set()
        self._passing: Transfer | None = None

    def send(self, now: Time, transfer: Transfer) -> None:
        """Put a transfer on the link, or in its queue."""
        if not self._shared:
            self._left(now + self._seconds, transfer)
            return
        self._queue.append(transfer)
        if self._passing is None:
            self._next(now)

    def done(self, now: Time, transfer: Transfer) -> None:
        """A transfer has left the link: the next one may pass."""
        if self._passing == transfer:
            self._next(now)

    def stop(self, now: Time, transfer: Transfer) -> None:
        """Take back a transfer that has been sent and has not left the link."""
        if self._passing == transfer:
            self._next(now)
        elif self._shared:
            self._stopped.add(transfer)

    def _next(self, now: Time) -> None:
        self._passing = None
        while self._queue:
            transfer = self._queue.popleft()
            if transfer in self._stopped:
                self._stopped.discard(transfer)
                continue
            self._passing = transfer
            self._left(now + self._seconds, transfer)
            return
