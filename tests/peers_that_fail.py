"""Listeners that are no broker, each wrong in its own way, for `zkv doctor` to find."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import zmq

LOOK_MS = 50


@contextmanager
def silent() -> Iterator[str]:
    """A port whose connections the kernel accepts, and nobody ever reads."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield f"tcp://127.0.0.1:{made.getsockname()[1]}"


@contextmanager
def closed() -> Iterator[str]:
    """A port where nobody listens: it stays bound, so that nobody else gets it."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{made.getsockname()[1]}"


@contextmanager
def hanging_up() -> Iterator[str]:
    """A port whose connections are closed at once."""
    with socket.create_server(("127.0.0.1", 0)) as made:

        def serve() -> None:
            while True:
                try:
                    made.accept()[0].close()
                except OSError:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{made.getsockname()[1]}"
        made.shutdown(socket.SHUT_RDWR)
        thread.join()


class _Page(BaseHTTPRequestHandler):
    timeout = 5

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def web() -> Iterator[str]:
    """A web server. It takes one connection after the other: others than ours do not hold it up."""
    made = ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    thread = threading.Thread(target=made.serve_forever, args=(LOOK_MS / 1000,), daemon=True)
    thread.start()
    yield f"tcp://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()
    thread.join()


@contextmanager
def zeromq(
    answer: Callable[[bytes], bytes | None], set_up: Callable[[Any], None] = lambda made: None
) -> Iterator[str]:
    """A ROUTER that answers each frame with what `answer` makes of it; None: nothing."""
    context: zmq.Context[Any] = zmq.Context()
    made = context.socket(zmq.ROUTER)
    set_up(made)
    port = made.bind_to_random_port("tcp://127.0.0.1")
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            if made.poll(LOOK_MS):
                route, frame, *_ = made.recv_multipart()
                said = answer(frame)
                if said is not None:
                    made.send_multipart([route, said])
        made.close(linger=0)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"tcp://127.0.0.1:{port}"
    ended.set()
    thread.join()
    context.term()


def of_protocol(number: int) -> Callable[[bytes], bytes]:
    """Return what a broker of another protocol answers: its number first, and then its own form."""
    return lambda frame: msgspec.msgpack.encode([number, 1, 0, 1, 1, []])
