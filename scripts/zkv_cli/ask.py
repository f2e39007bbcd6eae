"""Requests to a broker and their answers, without becoming a member: status and live changes.

Blocking and bounded; the broker answers such requests before any hello.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from zkv import control as c
from zkv.errors import ClusterNotReady, NotAuthorised, doctor_hint, from_code
from zkv.heartbeat import BEAT_S
from zkv.link import Link
from zkv.wire import open_envelope
from zkv_net import loop as net
from zkv_net.dialling import FAILED, FINAL, UNEXPLAINED
from zkv_net.keys import VARIABLE, KeyFolder, named_folder
from zkv_net.safety import choose, said_insecure
from zkv_net.sockets import connect, new_socket

TOKEN = 1
Request = c.Status | c.Change | c.Rearrange | c.TakeSnapshot | c.GoBack
Heard = TypeVar("Heard")


class KeysAsked(ClusterNotReady):
    """The broker asks for keys, and none are in use."""


class Line:
    """A connection to a broker of one who only asks. Close it at the end.

    Keys are those of the folder `keys`, or as `zkv_net.safety.choose` finds them.

    Raises:
        ConfigError: the address has a wrong form, its host cannot be resolved, or keys are needed.
    """

    def __init__(self, address: str, *, keys: str = "") -> None:
        net.resolvable(address)
        self._address = address
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = new_socket(self._context, zmq.DEALER, data=False)
        self._monitor = self._socket.get_monitor_socket(FAILED)
        self._unexplained = 0
        try:
            self._safety = choose(
                self._context, dials=[address], insecure=said_insecure(), keys=keys
            )
            self._safety.dial(self._socket, address)
            connect(self._socket, address)
        except BaseException:
            self.close()
            raise
        self._link = Link(net.instance_number())
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def answer(self, message: Request, timeout_s: float) -> Any:
        """Send a request, with a token that none before it had, and return the value of its reply.

        Raises:
            ClusterNotReady: nothing answered within `timeout_s`, or no handshake can succeed.
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
        now = time.monotonic()
        deadline, beat_at = now + timeout_s, now + BEAT_S
        while True:
            now = time.monotonic()
            if now >= beat_at:
                # Who is silent is forgotten, and a broker that was restarted has to be spoken to.
                self._link.send(c.Beat(now))
                beat_at = now + BEAT_S
            for packet in self._link.outgoing(now):
                self._socket.send(c.encode_packet(packet), zmq.NOBLOCK)
            if now >= deadline:
                raise ClusterNotReady(
                    f"no broker has answered at {self._address} within {timeout_s:g} s; "
                    "is it running, and is this the broker's address? " + doctor_hint(self._address)
                )
            until = min(deadline, beat_at, self._link.deadline() or deadline)
            ready = dict(self._poller.poll(max(1, int(1000 * (until - now)))))
            if self._monitor in ready:
                self._failed(self._monitor.recv_multipart())
            if self._socket not in ready:
                continue
            _, messages = self._link.receive(_opened(self._socket), time.monotonic())
            for heard in messages:
                found = wanted(heard)
                if found is not None:
                    return found

    def _failed(self, frames: list[bytes]) -> None:
        """A handshake has failed: the next one would too, unless that was a moment's trouble."""
        event = int(parse_monitor_message(frames)["event"])
        self._unexplained += 1
        if not event & FINAL and self._unexplained < UNEXPLAINED:
            return
        why = self._safety.why_refused(self._address, event)
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise NotAuthorised(why)
        raise (ClusterNotReady if self._safety.encrypts else KeysAsked)(why)

    def close(self) -> None:
        """Close the connection."""
        self._socket.disable_monitor()
        self._socket.close(linger=0)
        self._context.destroy(linger=0)


def ask(address: str, message: Request, timeout_s: float, *, keys: str = "") -> Any:
    """Send one request to a broker and return the value of its reply.

    Keys are those of the folder `keys`, or as `zkv_net.safety.choose` finds them; where a broker on
    loopback asks for keys, those of the default folder are tried.

    Raises:
        as `Line` and its `answer`.
    """
    try:
        return _ask(address, message, timeout_s, keys)
    except KeysAsked:
        if keys or not use_default_keys():
            raise
    return _ask(address, message, timeout_s, keys)


def use_default_keys() -> bool:
    """From here on this process uses the keys of the default folder; return False if it has none,
    or another folder was named."""
    if named_folder() is not None or not KeyFolder().exists:
        return False
    os.environ[VARIABLE] = str(KeyFolder().path)
    return True


def _ask(address: str, message: Request, timeout_s: float, keys: str) -> Any:
    line = Line(address, keys=keys)
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
