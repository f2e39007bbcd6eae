"""How fast this worker's way to a server is, measured before any key is cut into blocks.

Two kinds of probe go there and back alone, one small and one larger; what they differ by is the
link's. Part of the session. Pure: time comes in as `now`, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from zkv import control as c
from zkv import data_messages as d
from zkv_workers.signals import SendData

SMALL_BYTES, LARGE_BYTES = 4 * 1024, 256 * 1024
ROUNDS = 3
"""Probes of each size: the shortest trip counts, as a peer may be busy with other things."""
SLOW_S = 0.5
"""If a small one takes so long, a large one is not sent: it says enough."""
PATIENCE_S = 2.0
"""After so long a probe is lost."""


class LinkProbe:
    """Probes to one server. `done(rate)` is called once, with bytes per second; 0.0: not known.

    `wanted`: else nothing is measured, and nothing is called.
    """

    def __init__(self, wanted: bool, done: Callable[[float], None]) -> None:
        self._busy = wanted
        self._done = done
        self._server = self._incarnation = 0
        self._number = 0
        """Of the probe that is under way; 0: none."""
        self._sent_at = 0.0
        self._took_s: list[tuple[float, ...]] = [(), ()]
        """Of the small ones, and of the large ones."""

    def begin(self, member: c.Welcome, now: float) -> list[SendData]:
        """The servers are known: return what to send."""
        if not self._busy or not member.servers:
            return []
        self._server = member.servers[member.rank % len(member.servers)].index
        self._incarnation, self._took_s = member.incarnation, [(), ()]
        return self._next(now)

    def answered(self, message: d.Probed, now: float) -> list[SendData]:
        """The server has a probe: return what to send now."""
        if not self._busy or message.number != self._number:
            return []
        self._took_s[self._is_large] += (now - self._sent_at,)
        small, large = self._took_s
        if len(large) < ROUNDS and min(small) < SLOW_S:
            return self._next(now)
        if not large:
            self._conclude(SMALL_BYTES / min(small))
        else:
            # Noise may leave no difference: then the link is as good as none.
            differ_s = max(min(large) - min(small), 1e-6)
            self._conclude((LARGE_BYTES - SMALL_BYTES) / differ_s)
        return []

    def tick(self, now: float) -> None:
        """Time has passed: an answer that does not come is not waited for any longer."""
        if self._busy and self._number and now - self._sent_at > PATIENCE_S:
            self._conclude(0.0)

    @property
    def _is_large(self) -> bool:
        small, large = self._took_s
        return len(small) > len(large)

    def _next(self, now: float) -> list[SendData]:
        self._number += 1
        self._sent_at = now
        payload = np.zeros(LARGE_BYTES if self._is_large else SMALL_BYTES, np.uint8)
        return [SendData(self._server, d.Probe(self._incarnation, self._number), payload)]

    def _conclude(self, rate: float) -> None:
        self._busy = False
        self._done(rate)
