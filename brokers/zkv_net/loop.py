"""Event loops: uvloop where there is one, plain asyncio elsewhere; never through loop policies."""

from __future__ import annotations

import asyncio
import importlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from zkv.errors import ConfigError
from zkv_net.sockets import is_loopback, split_address

Result = TypeVar("Result")
LOOPS = ("auto", "asyncio", "uvloop")


def loop_factory(kind: str = "auto") -> Callable[[], asyncio.AbstractEventLoop]:
    """Return what makes an event loop: "uvloop", "asyncio", or "auto" for the first that is there.

    The environment variable ZKV_LOOP stands for "auto".
    """
    if kind == "auto":
        kind = os.environ.get("ZKV_LOOP", "auto")
    if kind not in LOOPS:
        raise ConfigError(f"loop {kind!r} is none of {', '.join(LOOPS)}")
    if kind != "asyncio":
        try:
            made: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module(
                "uvloop"
            ).new_event_loop
            return made
        except ImportError:
            if kind == "uvloop":
                raise ConfigError(
                    "loop 'uvloop' is not installed: pip install uvloop, or use asyncio"
                ) from None
    # The default loop of Windows cannot watch descriptors; the selector one can.
    return asyncio.SelectorEventLoop


def run(main: Callable[[], Coroutine[Any, Any, Result]], kind: str = "auto") -> Result:
    """Run a coroutine to its end on a new event loop."""
    with asyncio.Runner(loop_factory=loop_factory(kind)) as runner:
        return runner.run(main())


def on_stop_signals(stop: Callable[[str], None]) -> None:
    """Call `stop(name)` on SIGINT and SIGTERM (where the loop can); the second one ends at once."""
    loop = asyncio.get_running_loop()
    seen: list[str] = []

    def received(name: str) -> None:
        if seen:
            os._exit(130 if name == "SIGINT" else 143)
        seen.append(name)
        stop(name)

    for which in (signal.SIGINT, signal.SIGTERM):
        if sys.platform != "win32":
            loop.add_signal_handler(which, received, which.name)


def instance_number() -> int:
    """Return a number that no other process has: 62 random bits, never 0."""
    return secrets.randbits(62) | 1


def broker_instance() -> int:
    """Return a broker's instance number: milliseconds and 21 random bits; a later one is higher."""
    return (time.time_ns() // 1_000_000 << 21) | secrets.randbits(21)


def term_number() -> int:
    """Return the term of a broker that starts now: milliseconds, so that a later one has a
    higher, also when it follows within a second."""
    return int(time.time() * 1000)


def host_name() -> str:
    """Return this machine's name, for messages only: it need not be an address of anything."""
    return socket.gethostname()[:255] or "?"


def address_toward(peer: str) -> str:
    """Return the own address that traffic to `tcp://peer:port` leaves from (nothing is sent).

    Raises:
        ConfigError: the host cannot be resolved, or there is no route to it.
    """
    host, port = split_address(peer)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"address {peer}: {host!r} cannot be resolved or reached: {error}"
        ) from error


def is_own(address: str) -> bool:
    """Return whether an address is one of this machine's own (traffic to it leaves from it)."""
    host, _ = split_address(address)
    try:
        own = address_toward(address)
        return any(own == info[4][0] for info in socket.getaddrinfo(host, None))
    except (ConfigError, OSError):
        return False


def advertised(bound: str, peer: str, chosen: str | None) -> str:
    """Return the address to announce for a socket that is bound to `bound`.

    `chosen` (--advertise) wins; a wildcard bind announces the interface that leads to `peer`. Never
    0.0.0.0, ::, a host name that was guessed, or loopback to a peer that is not.

    Raises:
        ConfigError: the result could not be reached by others.
    """
    host, port = split_address(bound)
    if chosen:
        host = split_address(chosen)[0] if chosen.startswith("tcp://") else chosen
        if host in ("0.0.0.0", "::", "*"):
            raise ConfigError(f"--advertise {chosen}: nobody can connect to a wildcard address")
    elif host in ("0.0.0.0", "::", "*"):
        host = address_toward(peer)
    if is_loopback(host) and not is_loopback(split_address(peer)[0]):
        raise ConfigError(
            f"{host} is loopback, but the broker at {peer} is another machine: "
            "bind to 0.0.0.0 or choose the address that others reach with --advertise"
        )
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def resolvable(address: str) -> None:
    """Check that the host of an address has an address at all.

    Raises:
        ConfigError: it cannot be resolved; ZeroMQ would only wait for ever.
    """
    host, port = split_address(address)
    try:
        socket.getaddrinfo(host, None if port == "*" else int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"address {address}: the host {host!r} cannot be resolved: {error}"
        ) from error
