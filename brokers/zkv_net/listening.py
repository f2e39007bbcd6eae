"""Sockets that listen: who may speak there, how much, and who is turned away or cut off.

Where a process has keys, only those of some roles may speak. Whether it has or not, connections,
messages in a second and messages that are none are limited.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from zkv.limits import STRIKES_S, Bucket, Limits
from zkv_net.dialling import FAILED
from zkv_net.links import cut, far_end, host_of
from zkv_net.safety import Safety
from zkv_net.sockets import FdSocket, monitored, tries_often
from zkv_net.sparing import Sparing

log = logging.getLogger("zkv.net")
LINKS_MAX = 65_536
ACCEPTED, GONE = zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class _Link:
    """One connection that messages came over."""

    __slots__ = ("bucket", "fd", "strikes", "where")

    def __init__(self, frame: zmq.Frame, rate: float, now: float) -> None:
        self.fd = int(frame.get(zmq.SRCFD))
        self.where = far_end(self.fd)
        self.bucket = Bucket(rate, now)
        self.strikes: deque[float] = deque()


class Listening(FdSocket):
    """A bound socket over which keys of these roles may speak; `where` says what it is."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        receive: Callable[[list[zmq.Frame]], None],
        safety: Safety,
        roles: Iterable[str],
        where: str,
        *,
        turn_over: Callable[[], None] | None = None,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(socket, self._limited, turn_over=turn_over, vet=safety.vet(roles, where))
        self._handle = receive
        self._where, self._limits = where, limits or Limits()
        self._links: dict[bytes, _Link] = {}
        self._open: dict[int, Any] = {}
        """Connections by their descriptors, and their far ends."""
        self._newest, self._words = "?", Sparing()
        watched = ACCEPTED | GONE | (FAILED & ~zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self._monitor = FdSocket(monitored(socket, watched), self._event)

    # --- messages ----------------------------------------------------------------------------

    def _limited(self, frames: list[zmq.Frame]) -> None:
        now, route = monotonic(), frames[0].bytes
        link = self._links.get(route)
        if link is None:
            if len(self._links) >= LINKS_MAX:
                # Those that were noted first are most likely gone.
                del self._links[next(iter(self._links))]
            link = self._links[route] = _Link(frames[-1], self._limits.messages_per_s, now)
        if link.bucket.takes(now):
            self._handle(frames)
        elif self._words.may(("rate", host_of(link.where))):
            # Links and pushes are sent again, so that what is too fast only becomes slower.
            log.warning(
                "%s: more than %d messages a second from %s; those above that are dropped",
                *(self._where, self._limits.messages_per_s, host_of(link.where)),
            )

    def strike(self, route: bytes, why: object) -> None:
        """A message that came over this route was none. Too many of them end the connection."""
        link, now = self._links.get(route), monotonic()
        host = host_of(link.where) if link is not None else "somebody"
        if self._words.may(("strike", host)):
            log.warning(
                "%s: dropped a message from %s: %s%s",
                *(self._where, host, why, self._words.more()),
            )
        if link is None:
            return
        link.strikes.append(now)
        while link.strikes[0] <= now - STRIKES_S:
            link.strikes.popleft()
        if len(link.strikes) >= self._limits.strikes:
            log.warning(
                "%s: %d messages from %s were none of zkv's; its connection is cut",
                *(self._where, len(link.strikes), host),
            )
            self._links.pop(route, None)
            cut(link.fd, link.where)

    # --- connections -------------------------------------------------------------------------

    def _event(self, frames: list[zmq.Frame]) -> None:
        said = parse_monitor_message([frame.bytes for frame in frames])
        event, value = int(said["event"]), int(said["value"])
        if event == ACCEPTED:
            tries_often(value)
            far = far_end(value)
            self._newest, self._open[value] = host_of(far), far
            if len(self._open) > self._limits.connections:
                self._too_many(value, far)
        elif event & GONE:
            self._open.pop(value, None)
        elif self._words.may(self._newest):
            keys = "it uses no keys, or expects another key than this process has (zkv keys list)"
            why = keys if self._socket_asks else "it is no zkv process, or uses keys"
            log.warning(
                "%s: a handshake has failed, probably of a process on %s: %s%s",
                *(self._where, self._newest, why, self._words.more()),
            )

    @property
    def _socket_asks(self) -> bool:
        return self._vet is not None

    def _too_many(self, descriptor: int, far: Any) -> None:
        if self._words.may("connections"):
            log.warning(
                "%s has %d connections, its most; refused one more from %s%s",
                *(self._where, self._limits.connections, host_of(far), self._words.more()),
            )
        if cut(descriptor, far):
            self._open.pop(descriptor, None)

    def close(self, linger_ms: int = 0) -> None:
        """Stop watching and close; unsent messages are kept for at most `linger_ms`."""
        if self._closed:
            return
        if not self.socket.closed:
            self.socket.disable_monitor()
        super().close(linger_ms)
        # Only now: see `monitored`.
        self._monitor.close()
