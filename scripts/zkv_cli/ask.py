"""One request to a broker and its answer, without becoming a member: status and live changes.

Blocking and bounded; the broker answers such requests before any hello.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from zkv import control as c
from zkv.errors import ClusterNotReady, NotAuthorised, from_code
from zkv.link import Link
from zkv.wire import open_envelope
from zkv_net import loop as net
from zkv_net.dialling import FAILED, FINAL, UNEXPLAINED
from zkv_net.keys import VARIABLE, KeyFolder, named_folder
from zkv_net.safety import Safety, choose, said_insecure
from zkv_net.sockets import connect, new_socket

TOKEN = 1


def ask(address: str, message: c.Message, timeout_s: float, *, keys: str = "") -> Any:
    """Send one request with the token `TOKEN` to a broker and return the value of its reply.

    Keys are those of the folder `keys`, or as `zkv_net.safety.choose` finds them; where a broker on
    loopback asks for keys, those of the default folder are tried.

    Raises:
        ConfigError: the address has a wrong form, its host cannot be resolved, or keys are needed.
        ClusterNotReady: nothing answered within `timeout_s`, or no handshake can succeed.
        ZkvError: the broker refused.
    """
    net.resolvable(address)
    try:
        return _ask(address, message, timeout_s, keys)
    except KeysAsked:
        if keys or named_folder() is not None or not KeyFolder().exists:
            raise
    # For the rest of this command, too.
    os.environ[VARIABLE] = str(KeyFolder().path)
    return _ask(address, message, timeout_s, keys)


class KeysAsked(ClusterNotReady):
    """The broker asks for keys, and none are in use."""


def _ask(address: str, message: c.Message, timeout_s: float, keys: str) -> Any:
    context: zmq.Context[Any] = zmq.Context()
    socket = new_socket(context, zmq.DEALER, data=False)
    try:
        safety = choose(context, dials=[address], insecure=said_insecure(), keys=keys)
        safety.dial(socket, address)
        monitor = socket.get_monitor_socket(FAILED)
        connect(socket, address)
        link = Link(net.instance_number())
        link.send(message)
        until = time.monotonic() + timeout_s
        return _Asking(socket, monitor, link, address, safety).answer(until, timeout_s)
    finally:
        socket.disable_monitor()
        socket.close(linger=0)
        context.destroy(linger=0)


@dataclass
class _Asking:
    """A request on its way."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    link: Link
    address: str
    safety: Safety
    unexplained: int = 0

    def answer(self, deadline: float, timeout_s: float) -> Any:
        """Return the value of the reply."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)
        while True:
            now = time.monotonic()
            for packet in self.link.outgoing(now):
                self.socket.send(c.encode_packet(packet), zmq.NOBLOCK)
            if now >= deadline:
                raise ClusterNotReady(
                    f"no broker has answered at {self.address} within {timeout_s:g} s; "
                    "is it running, and is this the broker's address?"
                )
            until = min(deadline, self.link.deadline() or deadline)
            ready = dict(poller.poll(max(1, int(1000 * (until - now)))))
            if self.monitor in ready:
                self._failed(self.monitor.recv_multipart())
            if self.socket not in ready:
                continue
            _, messages = self.link.receive(_opened(self.socket), time.monotonic())
            for reply in messages:
                match reply:
                    case c.Reply(token=token, value=value) if token == TOKEN:
                        return value
                    case c.Refusal(token=token, code=code, reason=reason) if token in (0, TOKEN):
                        raise from_code(code, reason)

    def _failed(self, frames: list[bytes]) -> None:
        """A handshake has failed: the next one would too, unless that was a moment's trouble."""
        event = int(parse_monitor_message(frames)["event"])
        self.unexplained += 1
        if not event & FINAL and self.unexplained < UNEXPLAINED:
            return
        why = self.safety.why_refused(self.address, event)
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise NotAuthorised(why)
        raise (ClusterNotReady if self.safety.encrypts else KeysAsked)(why)


def ask_status(address: str, timeout_s: float) -> dict[str, Any]:
    """Return how a cluster stands; raises as `ask` does."""
    return dict(ask(address, c.Status(TOKEN), timeout_s))


def ask_change(address: str, setting: str, value: str, timeout_s: float) -> int:
    """Change a live setting; return the model version from which it holds; raises as `ask` does."""
    return int(ask(address, c.Change(TOKEN, setting, value), timeout_s)["version"])


def _opened(socket: zmq.Socket[bytes]) -> c.Packet:
    return c.decode_messages(open_envelope(socket.recv_multipart()[-1]))
