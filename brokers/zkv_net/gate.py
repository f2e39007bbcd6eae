"""The gate: a thread that answers ZeroMQ's question whether a key may connect (ZAP, RFC 27).

It has a thread of its own, since a handshake waits for the answer, and a loop may be busy. It is
the only answerer of its context; with `ZAP_ENFORCE_DOMAIN` nobody gets in while it is not there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import zmq

log = logging.getLogger("zkv.net")

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"zkv"
LOOK_MS = 100
CLOSE_S = 2.0


class Gate:
    """Asks `admits(key, address)` for each handshake: "" lets the key in, else it is why not.

    `admits` is called on the gate's thread.
    """

    def __init__(self, context: zmq.Context[Any], admits: Callable[[str, str], str]) -> None:
        self._admits = admits
        self._ended = Event()
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        # From here on the socket is the thread's.
        self._thread = Thread(target=self._serve, name="zkv-gate", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while not self._ended.is_set():
                if self._socket.poll(LOOK_MS):
                    self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ZMQError as error:
            if error.errno != zmq.ETERM:
                log.exception("the gate is closed: nobody new gets in")
        finally:
            self._socket.close(linger=0)

    def _answer(self, asked: list[bytes]) -> list[bytes]:
        version, request = [*asked, b"", b""][:2]
        try:
            _, _, domain, address, _, mechanism, *credentials = asked
            if domain != DOMAIN or mechanism != b"CURVE" or len(credentials) != 1:
                return [version, request, b"400", b"keys are asked for here", b"", b""]
            key = credentials[0].hex()
            why = self._admits(key, address.decode("ascii", "replace"))
        except Exception:
            log.exception("a question at the gate could not be answered")
            return [version, request, b"400", b"not understood", b"", b""]
        if why:
            return [version, request, b"400", why.encode()[:200], b"", b""]
        return [version, request, b"200", b"", key.encode(), b""]

    def close(self) -> None:
        """End the thread, in bounded time."""
        self._ended.set()
        self._thread.join(CLOSE_S)
