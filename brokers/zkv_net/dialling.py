"""Sockets that dial: they tell in words why a handshake fails, and dial again where ZeroMQ would
not.

libzmq tries again for ever after most failures without a word, and never again after a refusal,
though the key may be let in a minute later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from zkv_net.safety import Safety
from zkv_net.sockets import FdSocket, connect, monitored, tries_often
from zkv_net.sparing import Sparing

log = logging.getLogger("zkv.net")

FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
FINAL = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
"""After these libzmq does not dial again."""
LINKS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
AGAIN_S, AGAIN_MAX_S = 0.1, 2.0
UNEXPLAINED = 3
"""After so many failures without a reason, one behind the other, something is said."""


class Dialled(FdSocket):
    """A socket that is connected to `address`, its connection watched.

    `link_changed(up)` is called when it comes up, or breaks. `troubled(text)` is told why a
    handshake fails, and "" when one has succeeded; the log is told sparingly.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        address: str,
        receive: Callable[[list[zmq.Frame]], None],
        safety: Safety,
        *,
        turn_over: Callable[[], None] | None = None,
        link_changed: Callable[[bool], None] = lambda up: None,
        troubled: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._address, self._safety = address, safety
        self._link_changed, self._troubled = link_changed, troubled
        self._words = Sparing()
        self._pause_s, self._unexplained = AGAIN_S, 0
        self._again: asyncio.TimerHandle | None = None
        safety.dial(socket, address)
        monitor = monitored(socket, FAILED | LINKS | zmq.EVENT_CONNECTED)
        try:
            self._known_as = connect(socket, address)
        except BaseException:
            socket.disable_monitor()
            monitor.close(linger=0)
            raise
        super().__init__(socket, receive, turn_over=turn_over)
        self._monitor = FdSocket(monitor, self._event)

    def _event(self, frames: list[zmq.Frame]) -> None:
        if self._closed:
            return
        told = parse_monitor_message([frame.bytes for frame in frames])
        event = int(told["event"])
        if event == zmq.EVENT_CONNECTED:
            tries_often(int(told["value"]))
            return
        if event & LINKS:
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._pause_s, self._unexplained = AGAIN_S, 0
                self._troubled("")
            self._link_changed(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
            return
        if not event & FINAL:
            # A process that ends in that moment gives the same event, once.
            self._unexplained += 1
            if self._unexplained < UNEXPLAINED:
                return
        text = self._safety.why_refused(self._address, event)
        if self._words.may(event):
            log.warning("%s", text)
        self._troubled(text)
        if event & FINAL and self._again is None:
            self._again = self._loop.call_later(self._pause_s, self._dial_again)
            self._pause_s = min(2 * self._pause_s, AGAIN_MAX_S)

    def _dial_again(self) -> None:
        self._again = None
        if not self._closed:
            self.socket.disconnect(self._known_as)
            # The key that answers there may be another one by now.
            self._safety.dial(self.socket, self._address)
            connect(self.socket, self._address)
            self.look()

    def close(self, linger_ms: int = 0) -> None:
        """Stop watching and close; unsent messages are kept for at most `linger_ms`."""
        if self._closed:
            return
        if self._again is not None:
            self._again.cancel()
        if not self.socket.closed:
            self.socket.disable_monitor()
        super().close(linger_ms)
        # Only now: see `monitored`.
        self._monitor.close()
