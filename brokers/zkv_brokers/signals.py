"""What goes into a router and what comes out of it, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from zkv_brokers.hub import Note, Send


@dataclass(frozen=True, slots=True)
class Received:
    """A control frame has come in over this route."""

    route: bytes
    frame: bytes


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class ServerLink:
    """The broker's connection to a server's data port came up, or broke."""

    index: int
    up: bool


@dataclass(frozen=True, slots=True)
class Restarted:
    """The broker goes on in another process, of these numbers: higher ones than all before."""

    term: int
    instance: int


Event = Received | Tick | ServerLink | Restarted


@dataclass(frozen=True, slots=True)
class ServersChanged:
    """The data port (route `broker`) must know these servers, by index."""

    addresses: tuple[tuple[int, str], ...]


Action = Send | Note | ServersChanged
