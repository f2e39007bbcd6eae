"""ZeroMQ sockets on an event loop: one owner each, drained in bounded turns.

`zmq.asyncio` is correct, but it starves the loop under load and costs several calls for each
message. Here the loop watches the socket's file descriptor and reads without blocking. Two traps,
measured on pyzmq 27 with libzmq 4.3.5:

- the descriptor is edge-triggered, and a send may swallow its wake-up: after each send the socket
  is looked at again, once per loop turn;
- a receive that is cancelled may lose a message: nothing here awaits a receive.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import socket as sockets
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import zmq

# pyzmq imports it within the first send without a copy. That import evaluates text, after which
# CPython forgets that an interrupt has ended the program: it exits with 1, not by SIGINT.
import zmq.utils.garbage

from zkv.errors import ConfigError
from zkv.wire import CONTROL_BYTES_MAX, PAYLOAD_BYTES_MAX

log = logging.getLogger("zkv.net")

MESSAGES_PER_TURN = 64
COPY_BYTES_MAX = 64 * 1024
"""Below this a copy is cheaper than the bookkeeping of sending without one."""
FRAMES_MAX = 8
HANDSHAKE_MS = 5_000
"""What a peer gets to prove itself; then its connection is ended."""
TCP_RTO_MAX_MS = 44
"""The number of that option in Linux; Python has no name for it yet."""
RESEND_MOST_MS = 1_000
"""The least that it allows."""
RECONNECT_MS = 100
"""A process that was started again is dialled within three times this: a whole cluster waits."""


class FdSocket:
    """A ZeroMQ socket whose messages are handed to `receive`, at most 64 in one turn of the loop.

    `receive` gets a list of `zmq.Frame`. A message of too many frames is dropped, and one that
    `vet` does not let pass, before anything of it is read. What `receive` raises is logged and
    costs only that message.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        receive: Callable[[list[zmq.Frame]], None],
        *,
        turn_over: Callable[[], None] | None = None,
        vet: Callable[[Sequence[zmq.Frame]], bool] | None = None,
    ) -> None:
        self.socket = socket
        self._receive = receive
        self._vet = vet
        self._turn_over = turn_over
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._looking = False
        self._closed = False
        try:
            self._loop.add_reader(self._fd, self._drain)
        except RuntimeError as error:
            # That of Windows' default loop says that it has no such method, and nothing else.
            raise ConfigError(
                f"the event loop {type(self._loop).__name__} cannot watch sockets of ZeroMQ: run "
                "on another one, as with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)"
            ) from error
        self.look()

    def look(self) -> None:
        """Look for messages once more, at the end of this turn."""
        if not self._looking and not self._closed:
            self._looking = True
            self._loop.call_soon(self._look_now)

    def _look_now(self) -> None:
        self._looking = False
        self._drain()

    def _drain(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            if self._closed:
                return
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            except zmq.ZMQError as error:
                if error.errno in (zmq.ETERM, zmq.ENOTSOCK):
                    return
                raise
            if len(frames) > FRAMES_MAX:
                log.warning(
                    "dropped a message of %d frames; at most %d are allowed",
                    len(frames),
                    FRAMES_MAX,
                )
                continue
            try:
                if self._vet is not None and not self._vet(frames):
                    continue
                self._receive(frames)
            except Exception:
                log.exception("a message could not be handled; it was dropped")
        else:
            self.look()
        if self._turn_over is not None and not self._closed:
            self._turn_over()

    def send(self, frames: Sequence[Any]) -> bool:
        """Send a message without waiting; return False if the peer is unknown, gone or full.

        Frames above 64 KiB are not copied: they must not change any more.
        """
        if self._closed:
            return False
        try:
            copy = all(len(memoryview(frame).cast("B")) <= COPY_BYTES_MAX for frame in frames[-1:])
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH, zmq.ENOTSOCK, zmq.ETERM):
                return False
            raise
        finally:
            self.look()
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Stop watching and close; unsent messages are kept for at most `linger_ms`."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self.socket.close(linger=linger_ms)


def new_socket(
    context: zmq.Context[Any], kind: int, *, data: bool, buffer_bytes: int = 0
) -> zmq.Socket[bytes]:
    """Return a socket with the project's settings.

    Control sockets have a high-water mark, as links send again what is dropped; data sockets have
    none, as byte credits bound what is under way. Routing ids are libzmq's own. `buffer_bytes` is
    what its connections ask of the system for each way's buffer; 0: the system decides, and goes
    on doing so, which a number of ours would end.
    """
    socket: zmq.Socket[bytes] = context.socket(kind)
    frame_max = PAYLOAD_BYTES_MAX + 64 * 1024 if data else CONTROL_BYTES_MAX
    for option, value in (
        (zmq.SNDHWM, 0 if data else 10_000),
        (zmq.RCVHWM, 0 if data else 10_000),
        (zmq.MAXMSGSIZE, frame_max),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
        (zmq.HEARTBEAT_IVL, 2_000),
        (zmq.HEARTBEAT_TIMEOUT, 10_000),
        (zmq.HEARTBEAT_TTL, 10_000),
        (zmq.RECONNECT_IVL, RECONNECT_MS),
        (zmq.RECONNECT_IVL_MAX, 2 * RECONNECT_MS),
        (zmq.BACKLOG, 1_024),
        (zmq.TCP_MAXRT, 15_000),
        (zmq.LINGER, 0),
    ):
        socket.setsockopt(option, value)
    if buffer_bytes:
        # Before it is bound: connections that are let in take them from the socket that listens.
        socket.setsockopt(zmq.SNDBUF, buffer_bytes)
        socket.setsockopt(zmq.RCVBUF, buffer_bytes)
    if kind == zmq.ROUTER:
        # Without it, messages to unknown or full peers vanish without a word.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return socket


def tries_often(descriptor: int) -> None:
    """Have a connection's kernel send again at least every second what nobody has acknowledged.

    Otherwise its pauses double, and after a cut of ten seconds nothing moves for three more. Linux
    can since 6.15; elsewhere, and where the connection has ended meanwhile, nothing is done.
    """
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError), sockets.socket(fileno=os.dup(descriptor)) as connection:
        connection.setsockopt(sockets.IPPROTO_TCP, TCP_RTO_MAX_MS, RESEND_MOST_MS)


def monitored(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Return a socket that tells these events of another one. It is closed after
    `disable_monitor`: with nobody to read an event, libzmq's I/O thread would wait for ever to
    write it, and `disable_monitor` for that thread."""
    endpoint = f"inproc://monitor.{socket.underlying:x}"
    socket.monitor(endpoint, events)
    reader: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    # A burst of connections while the loop is busy must not stop that thread either.
    reader.setsockopt(zmq.RCVHWM, 0)
    reader.setsockopt(zmq.LINGER, 0)
    reader.connect(endpoint)
    return reader


def split_address(address: str) -> tuple[str, str]:
    """Return host (without brackets) and port of `tcp://host:port`.

    Raises:
        ConfigError: not of that form; the text that was given is named.
    """
    if not address.startswith("tcp://"):
        raise ConfigError(
            f"address {address!r} does not begin with tcp://, as in tcp://10.0.0.2:5555"
        )
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not colon or not host or not (port == "*" or (port.isdecimal() and int(port) < 65536)):
        raise ConfigError(f"address {address!r} has no host and port, as in tcp://10.0.0.2:5555")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ConfigError(
            f"address {address!r}: an IPv6 host needs brackets, as in tcp://[::1]:5555"
        )
    return host.strip("[]"), port


def join_address(host: str, port: int | str) -> str:
    """Return `tcp://host:port`, IPv6 in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine can reach a socket bound to this host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(socket: zmq.Socket[bytes], address: str, *, insecure: bool) -> str:
    """Bind and return the address with the real port; IPv6 is switched on only for an IPv6 host.

    Raises:
        ConfigError: the port is in use, the address is not of this machine or cannot be resolved,
            or it is not loopback, keys are not asked for there, and `insecure` was not given.
    """
    host, port = split_address(address)
    asks = socket.getsockopt(zmq.MECHANISM) == zmq.CURVE
    if not (is_loopback(host) or asks or insecure):
        raise ConfigError(
            f"{address} can be reached from other machines, and traffic is neither encrypted nor "
            "authenticated: bind to 127.0.0.1, make keys (zkv keys new), or say --insecure if "
            "everybody in that network is trusted"
        )
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
    if port == "0":
        address = join_address(host, "*")
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            why = "the port is in use; choose another, or 0 for any free one"
        elif error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
            why = "no interface of this machine has this address"
        else:
            why = str(error)
        raise ConfigError(f"cannot bind {address}: {why}") from error
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    text = endpoint.decode().rstrip("\0") if isinstance(endpoint, bytes) else str(endpoint)
    return join_address(host, split_address(text)[1])


def connect(socket: zmq.Socket[bytes], address: str) -> str:
    """Connect, and return the address as ZeroMQ knows it; the peer need not be there yet.

    Raises:
        ConfigError: the address is not of the form `tcp://host:port`.
    """
    host, port = split_address(address)
    if port == "*" or int(port) == 0:
        raise ConfigError(
            f"address {address!r}: port {port} cannot be connected to; use the real one"
        )
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
    known_as = join_address(host, port)
    socket.connect(known_as)
    return known_as
