"""The first bytes of a ZMTP connection, against what libzmq itself says."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from zkv.zmtp import GREETING_BYTES, OPENING, Greeting, read_greeting, stranger


def greeting(mechanism: bytes = b"NULL", major: int = 3, minor: int = 1) -> bytes:
    head = b"\xff" + bytes(8) + b"\x7f" + bytes([major, minor])
    return head + mechanism.ljust(20, b"\0") + bytes(32)


def heard_from(peer: zmq.Socket[bytes]) -> bytes:
    port = peer.bind_to_random_port("tcp://127.0.0.1")
    with socket.create_connection(("127.0.0.1", port), 5) as made:
        made.sendall(OPENING)
        heard = b""
        while len(heard) < GREETING_BYTES:
            part = made.recv(GREETING_BYTES - len(heard))
            assert part, f"closed after {heard!r}"
            heard += part
    return heard


@pytest.fixture
def router() -> Any:
    context: zmq.Context[Any] = zmq.Context()
    made = context.socket(zmq.ROUTER)
    yield made
    made.close(linger=0)
    context.term()


def test_libzmq_answers_our_opening_with_its_whole_greeting(router):
    told = read_greeting(heard_from(router))
    assert told is not None
    assert (told.major, told.mechanism) == (3, "NULL")


def test_a_server_with_keys_says_so_before_it_knows_who_asks(router):
    _, secret = zmq.curve_keypair()
    router.setsockopt(zmq.CURVE_SERVER, 1)
    router.setsockopt(zmq.CURVE_SECRETKEY, secret)
    told = read_greeting(heard_from(router))
    assert told is not None
    assert told.mechanism == "CURVE"


def test_a_greeting_has_its_parts_where_the_specification_has_them():
    assert read_greeting(greeting(b"PLAIN")) == Greeting(3, 1, "PLAIN")
    assert read_greeting(greeting(minor=0) + b"more") == Greeting(3, 0, "NULL")


@pytest.mark.parametrize(
    "heard",
    [
        b"",
        b"HTTP/1.0 400 Bad Request\r\n" + bytes(64),
        greeting()[:63],
        greeting(major=1),
        greeting(b"NU\xffLL"),
        greeting(b"N\x01"),
        b"\xff" + bytes(63),
    ],
)
def test_anything_else_is_none(heard):
    assert read_greeting(heard) is None


@given(st.binary(max_size=80))
def test_any_bytes_are_a_greeting_or_none_and_have_words(heard):
    assert read_greeting(heard) is None or heard[:1] == b"\xff"
    assert stranger(heard)


def test_known_strangers_are_named():
    assert stranger(b"HTTP/1.1 400") == "a web server (HTTP)"
    assert stranger(b"SSH-2.0-OpenSSH") == "an SSH server"
    assert stranger(b"\x15\x03\x01\x00") == "a TLS server (HTTPS, say)"
    assert stranger(b"hello") == "something that is no ZeroMQ"
