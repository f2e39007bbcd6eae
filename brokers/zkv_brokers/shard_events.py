"""What a shard hears, and what it wants done."""

from __future__ import annotations

from dataclasses import dataclass

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array
from zkv_brokers.grants import ToWorker
from zkv_brokers.saving import Saved
from zkv_codecs.plan import Plan


@dataclass(frozen=True, slots=True)
class FromBroker:
    """A control message, in order and exactly once."""

    message: c.Message


@dataclass(frozen=True, slots=True)
class FromWorker:
    """A data message, with the payload's bytes as a flat uint8 array if there is one."""

    message: d.Data
    payload: Array | None


@dataclass(frozen=True, slots=True)
class Reset:
    """The broker is a new instance, and nothing was granted yet: start from nothing."""


@dataclass(frozen=True, slots=True)
class Wrote:
    """This server's part of a snapshot is written; or, with `why`, it could not be."""

    number: int
    nbytes: int = 0
    sha256: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What there is of this server's blocks in the snapshot that was asked for in this term; or,
    with `why`, it cannot be read."""

    term: int
    saved: Saved
    why: str = ""


Event = FromBroker | FromWorker | Reset | Wrote | Loaded


@dataclass(frozen=True, slots=True)
class ToBroker:
    """Send this control message to the broker."""

    message: c.Message


@dataclass(frozen=True, slots=True)
class Prepare:
    """Compile what these plans' codecs need, beside the loop: it may take many seconds."""

    plans: tuple[Plan, ...]


@dataclass(frozen=True, slots=True)
class ToServer:
    """Send this data message to another server: to its address, or (none is given) over the route
    on which it has asked. `relayed`: the address is that of the broker's data port."""

    server: int
    message: d.Data
    payload: Array | None
    address: str = ""
    relayed: bool = False


@dataclass(frozen=True, slots=True)
class Write:
    """Write this into a file of a snapshot, beside the loop, and say `Wrote`."""

    number: int
    url: str
    name: str
    file: str
    saved: Saved


@dataclass(frozen=True, slots=True)
class Load:
    """Read these blocks out of a snapshot's files, beside the loop, and say `Loaded`."""

    term: int
    url: str
    name: str
    checksum: str
    bids: frozenset[int]


Action = ToBroker | ToWorker | ToServer | Prepare | Write | Load
