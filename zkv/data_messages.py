"""Headers of data messages: worker to server and back. A payload frame follows where it says so.

Every header names the worker by its incarnation, and what a worker sends carries the log index at
which it learnt of the blocks: data that is ahead of the server's log is parked there.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from zkv.errors import ProtocolError
from zkv.wire import (
    HEADER_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    PROTOCOL_VERSION,
    SHARED_BYTES_MAX,
    ContributionId,
    Frozen,
    Int,
    Name,
    Text,
    UInt,
    Weight,
    compare_versions,
    encode,
)

DELTAS_MAX = 64
"""Deltas in one message: more than any server keeps."""


class Greet(Frozen, frozen=True, tag=1):
    """Worker to server: this is the route to me. `near`: it does not leave this machine."""

    incarnation: UInt
    term: UInt
    near: bool = False


class Form(Frozen, frozen=True):
    """What a codec's payload cannot tell by its length."""

    count: UInt
    """Values that the codec's first stage has left."""
    coding: Name
    """How their positions are written; "" if they are not."""
    coded: UInt
    """Bytes of the written positions, at the end of the payload."""
    seed: UInt
    """What positions are drawn from that are not written."""


class Addend(Frozen, frozen=True):
    """A contribution that is in a sum."""

    contribution: ContributionId
    grant: UInt
    weight: Weight


ADDENDS_MAX = 4096


class Push(Frozen, frozen=True, tag=2):
    """Worker to server, with payload: one block of a contribution (or of initial values).

    Also to another worker, as far as it has been added up.

    Of a table, one piece of what is pushed to it: `bid` is then a place (`zkv.layout`), and the
    payload row numbers (uint64, ascending, each once), then as many rows of values.
    """

    contribution: ContributionId
    grant: UInt
    bid: UInt
    codec: Name
    """The text of a chain of codecs, or "none": stored values as they are."""
    index: UInt
    form: Form | None = None
    """Of a payload that a codec has made."""
    weight: Weight | None = None
    """Of the contribution, if it is known already, and no key of the block is skipped."""
    placement: UInt = 0
    """That the contribution goes by."""
    of: Annotated[tuple[Addend, ...], Meta(max_length=ADDENDS_MAX)] | None = None
    """What the payload is the weighted sum of, in the dtype of sums (nothing: it is empty); None:
    it is of this contribution alone. Its receipt names block -2 - bid."""


class Done(Frozen, frozen=True, tag=3):
    """Worker to server: the contribution has these blocks here, and skips these keys (rule 8)."""

    contribution: ContributionId
    grant: UInt
    weight: Weight
    bids: list[UInt]
    skipped: list[UInt]
    index: UInt
    keeps: bool = False
    """Whether the next batch may still look at rows of the version that this one was granted."""
    placement: UInt = 0
    """That the contribution goes by."""


class Got(Frozen, frozen=True, tag=4):
    """Worker to server: these blocks of the grant have arrived; all of them unpin the version,
    unless it was granted on demand."""

    incarnation: UInt
    group: Int
    grant: UInt
    bids: list[UInt]


class Ask(Frozen, frozen=True, tag=5):
    """Worker to server: these blocks of the grant have not arrived; send them again.

    Under a grant on demand: send them now.
    """

    incarnation: UInt
    group: Int
    grant: UInt
    bids: list[UInt]
    whole: tuple[UInt, ...] = ()
    """Those of them whose deltas or codec were of no use here: send these as plain values."""
    index: UInt = 0
    """Under a grant on demand, the log index at which the server knows it."""


class Delta(Frozen, frozen=True):
    """What leads from one version of a block to the next, as a codec has made it."""

    codec: Name
    form: Form
    size: UInt
    """Bytes of its payload, which begins at a multiple of 8."""


class Block(Frozen, frozen=True, tag=6):
    """Server to worker, with payload: one block of a grant, or just some keys of it."""

    server: UInt
    incarnation: UInt
    group: Int
    grant: UInt
    version: UInt
    bid: UInt
    codec: Name
    """The text of a chain of codecs, or "none": stored values as they are."""
    kids: list[UInt]
    """The keys in the payload, in block order; empty: all of the block."""
    form: Form | None = None
    """Of values that a codec has made."""
    base: Int = -1
    """The version that the deltas begin at; -1: the payload is values."""
    deltas: Annotated[tuple[Delta, ...], Meta(max_length=DELTAS_MAX)] = ()
    """One for each version after `base`, in order; their payloads are back to back."""
    like: Int = -1
    """The grant under which this worker was, or is, sent the same values; -1: see the payload."""


class Ack(Frozen, frozen=True, tag=7):
    """Server to worker: these have arrived: (contribution, block), or -1 for its `Done`, or -2 -
    block for a sum that was sent in its name."""

    server: UInt
    incarnation: UInt
    items: list[tuple[ContributionId, Int]]


class Fenced(Frozen, frozen=True, tag=8):
    """Server to worker: your frames are refused, and why."""

    server: UInt
    incarnation: UInt
    reason: Text


class Probe(Frozen, frozen=True, tag=9):
    """Worker to server, with payload: answer at once; the payload is of no use but to take time."""

    incarnation: UInt
    number: UInt


class Probed(Frozen, frozen=True, tag=10):
    """Server to worker: this probe is here."""

    server: UInt
    incarnation: UInt
    number: UInt


class Share(Frozen, frozen=True, tag=11):
    """Either way: memory that payloads to you are written to, if you are on my machine."""

    server: UInt
    incarnation: UInt
    machine: Name
    """Alike for processes that see each other on loopback."""
    pid: UInt
    fd: UInt
    """The memory is that process's open file of this number."""
    entries: Annotated[int, Meta(ge=1, le=65_536)]
    """For payloads that may be under way."""
    data_bytes: Annotated[int, Meta(ge=4096, le=SHARED_BYTES_MAX)]
    token: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """What the memory begins with."""


class Shared(Frozen, frozen=True, tag=12):
    """Either way: the memory with this token can be read here, or why not."""

    server: UInt
    incarnation: UInt
    token: Annotated[bytes, Meta(min_length=16, max_length=16)]
    why: Text


class Pass(Frozen, frozen=True, tag=18):
    """Worker to worker, with payload: a block of this version, as a server has sent it."""

    incarnation: UInt
    version: UInt
    bid: UInt


class Took(Frozen, frozen=True, tag=19):
    """Worker to worker: these have arrived: sums (contribution, block), and blocks of versions."""

    incarnation: UInt
    sums: list[tuple[ContributionId, UInt]]
    passed: list[tuple[UInt, UInt]]


class Fetch(Frozen, frozen=True, tag=13):
    """Server to server: send me these parts (none named: all) of a block's state, as it was when
    its copy began."""

    asker: UInt
    """The number of the server that asks."""
    placement: UInt
    bid: UInt
    index: UInt
    """The log index at which the owner knows of the copy."""
    parts: list[UInt]


class Part(Frozen, frozen=True, tag=14):
    """Server to server, with payload: one part of a block's state."""

    server: UInt
    asker: UInt
    placement: UInt
    bid: UInt
    at: UInt
    """Which part, from 0, of `of` parts."""
    of: UInt
    head: UInt
    """How many bytes of the whole come before the arrays, and say what they are."""


class AskRows(Frozen, frozen=True, tag=22):
    """Worker to server, with payload: send me these rows (uint64, ascending, each once) as they are
    in the version of this grant."""

    incarnation: UInt
    group: Int
    grant: UInt
    bid: UInt
    """A block of the table."""
    number: UInt
    """What the answer is to say."""
    index: UInt
    """The log index at which the server knows the grant."""
    start: Int = -1
    """Not -1: the payload is empty; send what rows there are, in the server's order, from this
    place on."""


class Rows(Frozen, frozen=True, tag=23):
    """Server to worker, with payload: the values of the rows that were asked for under this number,
    in that order."""

    server: UInt
    incarnation: UInt
    number: UInt
    refused: Text = ""
    """Why there are none."""
    count: UInt = 0
    """How many row numbers stand before the values: they were not asked for by number."""
    following: Int = -1
    """The place to go on from; -1: that was all."""


Data = (
    Greet
    | Push
    | Done
    | Got
    | Ask
    | Block
    | Ack
    | Fenced
    | Probe
    | Probed
    | Share
    | Shared
    | Pass
    | Took
    | Fetch
    | Part
    | AskRows
    | Rows
)


class _Envelope(Frozen, frozen=True):
    protocol: UInt
    data: Data


_decoder = msgspec.msgpack.Decoder(_Envelope)


def encode_data(message: Data) -> bytes:
    """Return the header frame of a data message."""
    return encode((PROTOCOL_VERSION, message))


def decode_data(header: bytes | memoryview, payload_bytes: int | None) -> Data:
    """Return the data message with this header; its payload's size is checked, not its content.

    Raises:
        ProtocolError: not a header, too large, or a payload where none belongs (or the reverse).
        VersionMismatch: the peer speaks another version.
    """
    if len(header) > HEADER_BYTES_MAX:
        raise ProtocolError(
            f"a data header of {len(header)} bytes; the limit is {HEADER_BYTES_MAX}"
        )
    try:
        envelope = _decoder.decode(header)
    except Exception as error:
        compare_versions(header)
        raise ProtocolError(f"not a data header: {error}") from error
    compare_versions(header)
    message = envelope.data
    wants_payload = isinstance(message, Push | Block | Probe | AskRows | Rows | Part | Pass)
    if wants_payload != (payload_bytes is not None):
        raise ProtocolError(
            f"{type(message).__name__} {'needs' if wants_payload else 'has no'} payload frame"
        )
    if payload_bytes is not None and payload_bytes > PAYLOAD_BYTES_MAX:
        raise ProtocolError(f"a payload of {payload_bytes} bytes; the limit is {PAYLOAD_BYTES_MAX}")
    return message


def sender(message: Data) -> int:
    """Return the incarnation of the worker that a data message is from (or for).

    Raises:
        ProtocolError: it is from a server, to another one.
    """
    if isinstance(message, Push | Done):
        return message.contribution.incarnation
    if isinstance(message, Fetch | Part):
        raise ProtocolError(f"a {type(message).__name__} is not from a worker")
    return message.incarnation
