"""Sockets that listen, and ask for keys if their process has some: they tell who is turned away."""

from __future__ import annotations

import logging
import os
import socket as sockets
from collections.abc import Callable, Iterable

import zmq
from zmq.utils.monitor import parse_monitor_message

from zkv_net.dialling import FAILED
from zkv_net.safety import Safety
from zkv_net.sockets import FdSocket
from zkv_net.sparing import Sparing

log = logging.getLogger("zkv.net")


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
    ) -> None:
        super().__init__(socket, receive, turn_over=turn_over, vet=safety.vet(roles, where))
        self._where = where
        self._newest, self._words = "?", Sparing()
        self._monitor: FdSocket | None = None
        if safety.encrypts:
            watched = zmq.EVENT_ACCEPTED | (FAILED & ~zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            self._monitor = FdSocket(socket.get_monitor_socket(watched), self._event)

    def _event(self, frames: list[zmq.Frame]) -> None:
        event = parse_monitor_message([frame.bytes for frame in frames])
        if event["event"] == zmq.EVENT_ACCEPTED:
            self._newest = _far_end(int(event["value"]))
        elif self._words.may(self._newest):
            log.warning(
                "%s: a handshake has failed, probably of a process on %s: it uses no keys, or "
                "expects another key than this process has (zkv keys list shows that)%s",
                *(self._where, self._newest, self._words.more()),
            )

    def close(self, linger_ms: int = 0) -> None:
        """Stop watching and close; unsent messages are kept for at most `linger_ms`."""
        if not self._closed and self._monitor is not None:
            if not self.socket.closed:
                self.socket.disable_monitor()
            super().close(linger_ms)
            # Only now: see `Dialled`.
            self._monitor.close()
        super().close(linger_ms)


def _far_end(descriptor: int) -> str:
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as copy:
            return str(copy.getpeername()[0])
    except OSError:
        return "a machine that is gone already"
