"""The messages and their frames: the one border where bytes from a peer become values.

Two kinds of traffic, on separate sockets, so that control never queues behind megabytes::

    control   [route..., packet]                 one msgpack frame: a `Packet` of control messages
    data      [route..., "", header, payload?, place?]   one msgpack frame, then at most one raw
              frame, which is empty where the payload lies in memory (`zkv_net.segment`)

Route frames are written and read by ROUTER sockets only. A payload is never packed into msgpack:
it travels beside its header without a copy, and the header says what it is. All structs are
msgpack arrays whose first element is the type's number; msgspec checks every field's type and
bound while it decodes, so that any bytes are either a message or a `ProtocolError`.

Control messages live in `zkv.control`, data headers in `zkv.data_messages`; this file has what
both share: identifiers, limits, packets, and the way in and out of frames.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from zkv.errors import ProtocolError, VersionMismatch

PROTOCOL_VERSION = 1
CONTROL_BYTES_MAX = 16 * 1024 * 1024
"""A packet with the manifest of 100,000 keys is about 6 MB; nothing legal comes near this."""
HEADER_BYTES_MAX = 256 * 1024
"""A data header lists at most the keys of one block, 5 bytes each, and a few numbers."""
PAYLOAD_BYTES_MAX = 64 * 1024 * 1024
SHARED_BYTES = 2**32
"""What a process offers at most to peers of its machine to read payloads from
(`zkv_net.nearby`); of it, what was never used takes no memory."""
SHARED_BYTES_MAX = 2**40
IO_THREADS_MAX = 64
"""Of one process; each moves bytes between ZeroMQ's queues and the kernel."""
SOCKET_BYTES_MAX = 2**30
"""What is asked of the system for a data connection's buffer, each way; it may give less."""
KEY_BYTES_MAX = 255
NAME_BYTES_MAX = 255
DIMENSIONS_MAX = 32
MESSAGES_PER_PACKET_MAX = 512
WEIGHT_MAX = 2.0**53
"""Samples in one contribution: all whole numbers up to here are exact, and none is an infinity."""

INT_MAX = 2**63 - 1
UInt = Annotated[int, Meta(ge=0, le=INT_MAX)]
Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Weight = Annotated[float, Meta(ge=0, le=WEIGHT_MAX)]
Text = Annotated[str, Meta(max_length=4096)]
Name = Annotated[str, Meta(max_length=NAME_BYTES_MAX)]
Key = Annotated[str, Meta(max_length=KEY_BYTES_MAX)] | Annotated[int, Meta(ge=0, le=2**63 - 1)]

STRANGERS = 2**62
"""Numbers from here on stand for who only measures the way to a server, where a worker has its
incarnation: those begin with milliseconds since 1970, and are lower until the year 2109."""
INCARNATIONS_PER_TERM = 1 << 20
"""Incarnations are a broker's term and a count: those of a later term are higher."""
Origin = Annotated[bytes, Meta(max_length=16)]
"""The mark of a broker's run, alike in all processes that it goes on in; b"": it is in one."""

NO_BATCH = -1
"""In a Discard: every batch of that grant."""
MODEL = 0
"""The group of all keys that train together in batches; plain keys have groups of their own."""
PULLS = -1
"""The pseudo-group of read-only grants."""
SEEDS = -2
"""The pseudo-group of initial values: `batch` is the number of the initialisation."""


class Frozen(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of everything that travels: an immutable msgpack array."""


class ContributionId(Frozen, frozen=True):
    """Who contributed what: unique for all time, since an incarnation never comes back."""

    incarnation: UInt
    group: Int
    batch: UInt


class KeySpec(Frozen, frozen=True):
    """What a worker says of one key when it initialises it."""

    key: Key
    dtype: Name
    shape: Annotated[tuple[UInt, ...], Meta(max_length=DIMENSIONS_MAX)]
    reduce: Name = ""
    """"sum", "mean", or "" for what fits the use: mean inside batches, sum for plain pushes and
    for integers, whose mean would lose fractions."""
    rule: Annotated[str, Meta(max_length=1024)] = ""
    """An optimizer of its own (text form), or "" for the broker's."""
    allow_nan: bool = False
    absent: Name = "zero"
    """What a batch without a gradient for this key means: "zero" (it counts as zero, with full
    weight) or "out" (it is left out of numerator and denominator)."""
    same_as: Key | None = None
    """The key whose value this one is another name for (tied weights)."""


class TableSpec(Frozen, frozen=True):
    """What a worker says of one table when it initialises it (`zkv.tables.Table` has the words)."""

    key: Key
    dim: UInt
    dtype: Name
    initial: Name
    seed: UInt
    rows: UInt = 0
    """Row numbers are below this; 0: any number is one."""
    rule: Annotated[str, Meta(max_length=1024)] = ""
    reduce: Name = "mean"
    allow_nan: bool = False


class Segment(Frozen, frozen=True):
    """A run of one key's elements inside a block: `[start, stop)` of the flattened key."""

    kid: UInt
    start: UInt
    stop: UInt


class BlockSpec(Frozen, frozen=True):
    """One block: where it lives, and the runs of keys that lie in it back to back."""

    bid: UInt
    server: UInt
    segments: list[Segment]

    @property
    def size(self) -> int:
        """Elements in the block."""
        return sum(segment.stop - segment.start for segment in self.segments)

    @property
    def kids(self) -> list[int]:
        """The numbers of the keys in the block, in their order."""
        return [segment.kid for segment in self.segments]


class KeyEntry(Frozen, frozen=True):
    """A key as the broker has numbered it."""

    kid: UInt
    spec: KeySpec


class TableEntry(Frozen, frozen=True):
    """A table as the broker has numbered it: part p of its rows lies in block `bids[p]`, which has
    no segments."""

    kid: UInt
    spec: TableSpec
    bids: list[UInt]


class Envelope(Frozen, frozen=True):
    """The part of a packet that is read before anything else, so that versions can be compared."""

    protocol: UInt
    source: UInt
    target: UInt
    number: UInt
    received: UInt
    messages: msgspec.Raw
    origin: Origin = b""


_envelope = msgspec.msgpack.Decoder(Envelope)
_encoder = msgspec.msgpack.Encoder()


def encode(message: object) -> bytes:
    """Return the msgpack bytes of a message."""
    return _encoder.encode(message)


def split_route(frames: list[Any]) -> tuple[list[Any], list[Any]]:
    """Split received data frames at the empty delimiter into (route, header and payload).

    Raises:
        ProtocolError: no delimiter among the first three frames, or not one to three frames after
            it (see `zkv_net.nearby` for three).
    """
    for at, frame in enumerate(frames[:3]):
        if len(frame) == 0:
            rest = frames[at + 1 :]
            if not 1 <= len(rest) <= 3:
                raise ProtocolError(
                    "a data message has a header, at most one payload, and at most one place of it "
                    f"in memory, not {len(rest)} frames"
                )
            return frames[:at], rest
    raise ProtocolError(f"no empty delimiter among the first frames of {len(frames)}")


def open_envelope(frame: bytes | memoryview, *, whole: bool = False) -> Envelope:
    """Decode a packet's outer part and compare protocol versions.

    `whole`: a frame that begins with another version's number, and is no envelope that holds
    messages, is no packet. For who ends by a mismatch: any bytes may begin with a number. A broker,
    which only answers, takes the number alone for a version, whatever form that one has.

    Raises:
        ProtocolError: too large, or not an envelope.
        VersionMismatch: the peer speaks another version.
    """
    if len(frame) > CONTROL_BYTES_MAX:
        raise ProtocolError(f"a packet of {len(frame)} bytes; the limit is {CONTROL_BYTES_MAX}")
    try:
        envelope = _envelope.decode(frame)
    except Exception as error:
        if not whole:
            compare_versions(frame)
        raise ProtocolError(f"not a packet: {error}") from error
    if whole and envelope.protocol != PROTOCOL_VERSION and not _is_array(envelope.messages):
        raise ProtocolError("not a packet: what it should hold is no list of messages")
    compare_versions(frame)
    return envelope


def _is_array(raw: msgspec.Raw) -> bool:
    """Return whether a msgpack value is an array, without reading it: it may be large."""
    first = memoryview(raw)[0]
    return first in (0xDC, 0xDD) or 0x90 <= first <= 0x9F


class _JustVersion(Struct, array_like=True):
    """The first element alone: every version of the protocol keeps it there."""

    protocol: UInt


_just_version = msgspec.msgpack.Decoder(_JustVersion)


def compare_versions(frame: bytes | memoryview) -> None:
    """Compare a frame's protocol version, if it begins with one, with ours.

    Raises:
        VersionMismatch: the peer speaks another version; both numbers are named.
    """
    try:
        theirs = _just_version.decode(frame).protocol
    except Exception:
        return
    if theirs != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the peer speaks protocol {theirs}, this process speaks {PROTOCOL_VERSION}; "
            "install the same zkv version on both machines"
        )
