"""Requests to a broker and their answers, without becoming a member: status and live changes.

Blocking and bounded; the broker answers such requests before any hello.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import zmq

from zkv import control as c
from zkv.errors import ClusterNotReady, doctor_hint, from_code
from zkv.link import Link
from zkv.wire import open_envelope
from zkv_net import loop as net
from zkv_net.sockets import connect, new_socket

TOKEN = 1
Request = c.Status | c.Change | c.Rearrange
Heard = TypeVar("Heard")


class Line:
    """A connection to a broker of one who only asks. Close it at the end.

    Raises:
        ConfigError: the address has a wrong form, or its host cannot be resolved.
    """

    def __init__(self, address: str) -> None:
        net.resolvable(address)
        self._address = address
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = new_socket(self._context, zmq.DEALER, data=False)
        try:
            connect(self._socket, address)
        except BaseException:
            self.close()
            raise
        self._link = Link(net.instance_number())

    def answer(self, message: Request, timeout_s: float) -> Any:
        """Send a request, with a token that none before it had, and return the value of its reply.

        Raises:
            ClusterNotReady: nothing answered within `timeout_s`.
            VersionMismatch: what answers speaks another protocol; both numbers are named.
            ProtocolError: what answers is no broker.
            ZkvError: the broker refused.
        """

        def reply(heard: c.Message) -> c.Reply | None:
            match heard:
                case c.Reply(token=token) if token == message.token:
                    return heard
                case c.Refusal(token=token, code=code, reason=reason) if token in (
                    0,
                    message.token,
                ):
                    raise from_code(code, reason)
            return None

        return self._heard(message, reply, timeout_s).value

    def beat(self, timeout_s: float) -> float:
        """Return the time that a sign of life takes to the broker and back, in seconds.

        Raises:
            as `answer`.
        """
        began = time.monotonic()

        def echo(heard: c.Message) -> c.Beat | None:
            return heard if isinstance(heard, c.Beat) and heard.echo == began else None

        self._heard(c.Beat(began, ask=True), echo, timeout_s)
        return time.monotonic() - began

    def _heard(
        self, message: c.Message, wanted: Callable[[c.Message], Heard | None], timeout_s: float
    ) -> Heard:
        """Send a message and return the first one heard that is wanted."""
        self._link.send(message)
        deadline = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            for packet in self._link.outgoing(now):
                self._socket.send(c.encode_packet(packet), zmq.NOBLOCK)
            if now >= deadline:
                raise ClusterNotReady(
                    f"no broker has answered at {self._address} within {timeout_s:g} s; "
                    "is it running, and is this the broker's address? " + doctor_hint(self._address)
                )
            until = min(deadline, self._link.deadline() or deadline)
            if not self._socket.poll(max(1, int(1000 * (until - now)))):
                continue
            _, messages = self._link.receive(_opened(self._socket), time.monotonic())
            for heard in messages:
                found = wanted(heard)
                if found is not None:
                    return found

    def close(self) -> None:
        """Close the connection."""
        self._socket.close(linger=0)
        self._context.destroy(linger=0)


def ask(address: str, message: Request, timeout_s: float) -> Any:
    """Send one request to a broker and return the value of its reply; raises as `Line` does."""
    line = Line(address)
    try:
        return line.answer(message, timeout_s)
    finally:
        line.close()


def ask_status(address: str, timeout_s: float) -> dict[str, Any]:
    """Return how a cluster stands; raises as `ask` does."""
    return dict(ask(address, c.Status(TOKEN), timeout_s))


def ask_change(address: str, setting: str, value: str, timeout_s: float) -> int:
    """Change a live setting; return the model version from which it holds; raises as `ask` does."""
    return int(ask(address, c.Change(TOKEN, setting, value), timeout_s)["version"])


def _opened(socket: zmq.Socket[bytes]) -> c.Packet:
    return c.decode_messages(open_envelope(socket.recv_multipart()[-1]))
