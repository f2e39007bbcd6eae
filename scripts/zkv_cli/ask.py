"""One request to a broker and its answer, without becoming a member: status and live changes.

Blocking and bounded; the broker answers such requests before any hello.
"""

from __future__ import annotations

import time
from typing import Any

import zmq

from zkv import control as c
from zkv.errors import ClusterNotReady, from_code
from zkv.link import Link
from zkv.wire import open_envelope
from zkv_net import loop as net
from zkv_net.sockets import connect, new_socket

TOKEN = 1


def ask(address: str, message: c.Message, timeout_s: float) -> Any:
    """Send one request with the token `TOKEN` to a broker and return the value of its reply.

    Raises:
        ConfigError: the address has a wrong form, or its host cannot be resolved.
        ClusterNotReady: nothing answered within `timeout_s`.
        ZkvError: the broker refused.
    """
    net.resolvable(address)
    context: zmq.Context[Any] = zmq.Context()
    socket = new_socket(context, zmq.DEALER, data=False)
    try:
        connect(socket, address)
        link = Link(net.instance_number())
        link.send(message)
        return _answer(socket, link, address, time.monotonic() + timeout_s, timeout_s)
    finally:
        socket.close(linger=0)
        context.destroy(linger=0)


def _answer(
    socket: zmq.Socket[bytes], link: Link, address: str, deadline: float, timeout_s: float
) -> Any:
    while True:
        now = time.monotonic()
        for packet in link.outgoing(now):
            socket.send(c.encode_packet(packet), zmq.NOBLOCK)
        if now >= deadline:
            raise ClusterNotReady(
                f"no broker has answered at {address} within {timeout_s:g} s; "
                "is it running, and is this the broker's address?"
            )
        until = min(deadline, link.deadline() or deadline)
        if not socket.poll(max(1, int(1000 * (until - now)))):
            continue
        _, messages = link.receive(_opened(socket), time.monotonic())
        for reply in messages:
            match reply:
                case c.Reply(token=token, value=value) if token == TOKEN:
                    return value
                case c.Refusal(token=token, code=code, reason=reason) if token in (0, TOKEN):
                    raise from_code(code, reason)


def ask_status(address: str, timeout_s: float) -> dict[str, Any]:
    """Return how a cluster stands; raises as `ask` does."""
    return dict(ask(address, c.Status(TOKEN), timeout_s))


def ask_change(address: str, setting: str, value: str, timeout_s: float) -> int:
    """Change a live setting; return the model version from which it holds; raises as `ask` does."""
    return int(ask(address, c.Change(TOKEN, setting, value), timeout_s)["version"])


def _opened(socket: zmq.Socket[bytes]) -> c.Packet:
    return c.decode_messages(open_envelope(socket.recv_multipart()[-1]))
