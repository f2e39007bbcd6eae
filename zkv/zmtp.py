"""The first bytes of a ZMTP connection: what to say, and who has answered. Pure.

ZMTP 3 (rfc.zeromq.org/spec/23) begins with 64 bytes: a signature of 10, the version in 2, the name
of the security mechanism in 20, and 32 of which nothing is needed here (libzmq does not say in them
whether it is the server of that mechanism). A peer says all of it once it has heard signature and
version.
"""

from __future__ import annotations

from dataclasses import dataclass

GREETING_BYTES = 64
OPENING = b"\xff" + bytes(8) + b"\x7f" + b"\x03"
"""Signature and major version: enough to be answered, and too little for a handshake."""
_STRANGERS = (
    (b"HTTP/", "a web server (HTTP)"),
    (b"SSH-", "an SSH server"),
    (b"220 ", "a mail or FTP server"),
    (b"+OK", "a mail server (POP3)"),
    (b"\x15\x03", "a TLS server (HTTPS, say)"),
    (b"-ERR", "a Redis server"),
)


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a peer has said of itself."""

    major: int
    minor: int
    mechanism: str
    """"NULL" (no encryption), "PLAIN" or "CURVE"."""


def read_greeting(heard: bytes) -> Greeting | None:
    """Return what a peer's first bytes say; None if they are no (whole) greeting of ZMTP 3."""
    if len(heard) < GREETING_BYTES or heard[:1] != b"\xff" or heard[9:10] != b"\x7f":
        return None
    name = heard[12:32].rstrip(b"\0")
    if heard[10] < 3 or not name.isascii() or not name.decode("ascii").isprintable():
        return None
    return Greeting(heard[10], heard[11], name.decode("ascii"))


def stranger(heard: bytes) -> str:
    """Return in words who speaks if it is no ZMTP."""
    for beginning, words in _STRANGERS:
        if heard.startswith(beginning):
            return words
    return "something that is no ZeroMQ"
