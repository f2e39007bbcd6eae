"""What goes into a router and what comes out of it, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from zkv.roles import Holder
from zkv.snapshot import Manifest
from zkv_brokers.hub import Note, Send, Strike


@dataclass(frozen=True, slots=True)
class Received:
    """A control frame has come in over this route."""

    route: bytes
    frame: bytes
    key: str = ""
    """Whose key the connection has; "" where there are no keys."""


@dataclass(frozen=True, slots=True)
class Keys:
    """These keys are let in from here on, and no others."""

    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class ServerLink:
    """The broker's connection to a server's data port came up, or broke."""

    index: int
    up: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """A snapshot is wanted by whoever runs this broker."""


@dataclass(frozen=True, slots=True)
class Written:
    """The manifest of a snapshot is written; or, with `why`, it could not be."""

    number: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The broker goes on in another process, of these numbers: higher ones than all before."""

    term: int
    instance: int


@dataclass(frozen=True, slots=True)
class Found:
    """A snapshot that was looked for (`Find`): its folder, and its manifest as text; or "", as none
    can be used, and `why`. `term` is higher than that of any broker before."""

    url: str
    manifest: str
    term: int
    why: str = ""


Event = Received | Tick | ServerLink | Keys | Ask | Written | Restarted | Found


@dataclass(frozen=True, slots=True)
class ServersChanged:
    """The data port (route `broker`) must know these servers, by index."""

    addresses: tuple[tuple[int, str], ...]
    keys: tuple[tuple[str, str], ...] = ()
    """Their addresses, and the keys that answer there."""


@dataclass(frozen=True, slots=True)
class Complete:
    """All files of a snapshot are written: write its manifest, with the time, and say `Written`."""

    number: int
    url: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Remove what was written of a snapshot that will not be."""

    url: str
    name: str


@dataclass(frozen=True, slots=True)
class Find:
    """Look for the first of these snapshots (folder, name; "": the newest one) of which every byte
    is as it was written, and say `Found`."""

    places: tuple[tuple[str, str], ...]


Action = Send | Note | Strike | ServersChanged | Complete | GiveUp | Find
