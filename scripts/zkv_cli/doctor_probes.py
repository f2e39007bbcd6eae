"""What `zkv doctor` does to find out: names, connections, first bytes, and this machine's settings.

Decides nothing (`doctor_way` does), and waits for nothing without a limit.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
import time
from pathlib import Path

from zkv.zmtp import GREETING_BYTES, OPENING
from zkv_cli.doctor_way import Dialled, Greeted, Resolved

NAME_S, CONNECT_S, GREETING_S = 5.0, 3.0, 2.0
ASK = b"HEAD / HTTP/1.0\r\n\r\n"
CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def resolve(host: str) -> Resolved:
    """Look a host up, for NAME_S at most, as ZeroMQ would: names by IPv4, addresses as they are."""
    try:
        return Resolved((str(ipaddress.ip_address(host)),))
    except ValueError:
        pass
    found: list[Resolved] = []

    def look() -> None:
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            found.append(Resolved((), error=str(error)))
            return
        by_family = {
            family: tuple(dict.fromkeys(str(i[4][0]) for i in infos if i[0] == family))
            for family in (socket.AF_INET, socket.AF_INET6)
        }
        found.append(Resolved(by_family[socket.AF_INET], by_family[socket.AF_INET6]))

    # The system's resolver has no time-out that a program could set.
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(NAME_S)
    return found[0] if found else Resolved((), timed_out_s=NAME_S)


def dial(host: str, port: int) -> Dialled:
    """Open a TCP connection to an address, for CONNECT_S at most, and close it."""
    began = time.monotonic()
    try:
        with socket.create_connection((host, port), CONNECT_S) as made:
            took_s = time.monotonic() - began
            return Dialled(host, "open", took_s, own=str(made.getsockname()[0]))
    except ConnectionRefusedError as error:
        return Dialled(host, "refused", time.monotonic() - began, error.strerror or "")
    except TimeoutError as error:
        return Dialled(host, "timeout", time.monotonic() - began, error.strerror or "")
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "?")
        text = f"{error.strerror or error} ({code})"
        return Dialled(host, "unreachable", time.monotonic() - began, text)


def greet(host: str, port: int) -> Greeted:
    """Say what ZeroMQ says first, and return what comes back within GREETING_S; if nothing does,
    ask as a browser would, which makes web servers speak."""
    began = time.monotonic()
    heard, closed = _said(host, port, OPENING, GREETING_BYTES, GREETING_S)
    asked = b""
    if not heard and not closed:
        asked, _ = _said(host, port, ASK, GREETING_BYTES, GREETING_S / 2)
    return Greeted(heard, closed, time.monotonic() - began, asked)


def _said(host: str, port: int, words: bytes, size: int, timeout_s: float) -> tuple[bytes, bool]:
    """Say something over a connection of its own; return what came back, and whether the peer
    closed it."""
    deadline, heard = time.monotonic() + timeout_s, b""
    try:
        with socket.create_connection((host, port), timeout_s) as made:
            made.sendall(words)
            while len(heard) < size and (left := deadline - time.monotonic()) > 0:
                made.settimeout(left)
                part = made.recv(size - len(heard))
                if not part:
                    return heard, True
                heard += part
    except TimeoutError:
        pass
    except OSError:
        return heard, True
    return heard, False


def congestion_control() -> str:
    """Return the kernel's way to pace TCP; "": it does not tell."""
    try:
        return CONTROL.read_text().strip()
    except OSError:
        return ""
