"""Snapshots: what their manifest says, how it is written down, and which of several is which.

A snapshot is a folder of files, one for each server, and a manifest that names them all; it exists
when its manifest does. The manifest is JSON in one form only, and has a digest of itself, so that
whatever was torn, cut off or flipped is found. Pure: knows no files, no clock and no chance.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, structs

from zkv.errors import BadSnapshot, ProtocolError
from zkv.layout import Layout, size_of
from zkv.wire import MODEL, BlockSpec, KeyEntry, TableEntry

FORMAT = 1
MANIFEST = "manifest.json"
KEPT = 2
"""Whole snapshots that stay in a folder: while one is read, or turns out to be broken, there is
another."""
NAME = re.compile(r"zkv-(?P<term>[0-9a-f]{16})-(?P<number>[0-9]{8})")

UInt = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a snapshot, as it was written."""

    file: Annotated[str, Meta(pattern=r"^(server|worker)-[0-9]{1,9}\.safetensors$")]
    nbytes: UInt
    sha256: Digest


class Init(Struct, frozen=True, forbid_unknown_fields=True):
    """Keys and tables that were initialised together."""

    init: UInt
    keys: list[KeyEntry]
    tables: list[TableEntry] = []


class GroupState(Struct, frozen=True, forbid_unknown_fields=True):
    """A group of keys with its version: the model (0), or a plain key; and its workers' clocks."""

    group: UInt
    kids: list[UInt]
    version: UInt
    clocks: list[tuple[UInt, UInt]]
    """(worker number, finished batches)."""


class PoolState(Struct, frozen=True, forbid_unknown_fields=True):
    """The pool of samples: what is dealt out, and what has counted up to the snapshot."""

    n: UInt
    seed: UInt
    size: UInt
    passes: UInt
    """0: without end."""
    retry: bool
    pass_number: UInt
    fresh: UInt
    """Where the positions of that pass begin that were never dealt out."""
    back: list[tuple[UInt, UInt, UInt]]
    """(pass, start, stop) of what was dealt out and has not counted: it is dealt first."""
    settled: list[tuple[UInt, UInt]]
    """(pass, positions) of passes that are not complete."""
    shares: list[tuple[UInt, UInt, UInt, UInt]]
    """(worker, counted, skipped, returned)."""


class WorkerState(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker that was a member, and where its own state is: codecs' memories, clock, blob."""

    number: UInt
    name: str
    clock: UInt
    part: Part | None = None
    lost: str = ""
    """Why there is none."""


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """What was in force: texts as the command line takes them, and optimizers as plain data."""

    policy: str
    optimizer: dict[str, Any]
    plain: dict[str, Any]
    staleness: str
    codec: str
    codec_down: str
    topology: str


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """All that a snapshot says but for the arrays, which lie in its files."""

    format: int
    zkv: str
    name: Annotated[str, Meta(pattern=f"^{NAME.pattern}$")]
    at: float
    """When it was complete: seconds since 1970."""
    version: UInt
    """Of the model."""
    term: UInt
    index: UInt
    """Entries of the log that lead to it."""
    settings: Settings
    inits: list[Init]
    blocks: list[BlockSpec]
    """Each with the server whose file it is in."""
    groups: list[GroupState]
    pool: PoolState | None
    next_numbers: tuple[UInt, UInt, UInt]
    """Of inits, keys and blocks: those from here on were never given."""
    workers: list[WorkerState]
    servers: list[Part]
    checksum: str = ""
    """SHA-256 of the manifest with this field empty."""

    @property
    def nbytes(self) -> int:
        """Of all files but the manifest."""
        own = (one.part.nbytes for one in self.workers if one.part is not None)
        return sum(part.nbytes for part in self.servers) + sum(own)

    @property
    def parts(self) -> list[Part]:
        """All files but the manifest."""
        own = [one.part for one in self.workers if one.part is not None]
        return [*self.servers, *own]

    def part_of(self, block: BlockSpec) -> Part:
        """Return the file that a block is in."""
        return next(one for one in self.servers if one.file == server_file(block.server))


_decoder = msgspec.json.Decoder(Manifest)


def server_file(number: int) -> str:
    """Return the name of a server's file."""
    return f"server-{number}.safetensors"


def worker_file(number: int) -> str:
    """Return the name of a worker's file."""
    return f"worker-{number}.safetensors"


def name_of(term: int, number: int) -> str:
    """Return the name of a broker's `number`-th snapshot: later ones sort behind earlier ones."""
    return f"zkv-{term:016x}-{number:08d}"


def digest_of(data: bytes) -> str:
    """Return the digest that a manifest names."""
    return hashlib.sha256(data).hexdigest()


def encode(manifest: Manifest) -> bytes:
    """Return a manifest as it is written, its checksum filled in."""
    plain = structs.replace(manifest, checksum="")
    return _text(structs.replace(plain, checksum=digest_of(_text(plain))))


def _text(manifest: Manifest) -> bytes:
    # A line for each thing that a person looks for; the long lists of keys and blocks in one each.
    fields = msgspec.to_builtins(manifest)
    lines = [f"{msgspec.json.encode(n).decode()}: " for n in fields]
    values = [msgspec.json.encode(value).decode() for value in fields.values()]
    body = ",\n".join(name + value for name, value in zip(lines, values, strict=True))
    return f"{{\n{body}\n}}\n".encode()


def decode(data: bytes, where: str) -> Manifest:
    """Return the manifest that these bytes are; `where` is its place, for words.

    Raises:
        BadSnapshot: they are none, or not the ones that were written; or of another format.
    """
    try:
        found = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        _compare_formats(data, where)
        raise BadSnapshot(f"{where} is no manifest of a snapshot: {error}; {_TRY}") from error
    _compare_formats(data, where)
    if encode(found) != data:
        wanted = digest_of(_text(structs.replace(found, checksum="")))
        raise BadSnapshot(
            f"{where} is not as it was written: it names checksum {found.checksum[:12]}…, and its "
            f"content has {wanted[:12]}…; {_TRY}"
        )
    _check(found, where)
    return found


def decode_checksum(data: bytes) -> str:
    """Return the checksum of a manifest that `encode` has given."""
    return _decoder.decode(data).checksum


_TRY = "restore an older one (zkv snapshot list FOLDER), or the newest whole one: --restore-whole"


class _Format(Struct):
    format: int
    zkv: str = "?"


def _compare_formats(data: bytes, where: str) -> None:
    try:
        found = msgspec.json.decode(data, type=_Format)
    except (msgspec.DecodeError, RecursionError):
        return
    if found.format != FORMAT:
        raise BadSnapshot(
            f"{where} is of format {found.format}, written by zkv {found.zkv}; this zkv reads "
            f"format {FORMAT}: install that version to restore it"
        )


def _check(manifest: Manifest, where: str) -> None:
    """Check that what a manifest says fits together."""
    layout = Layout()
    try:
        entries = [entry for init in manifest.inits for entry in init.keys]
        tables = [entry for init in manifest.inits for entry in init.tables]
        layout.add(entries, manifest.blocks, MODEL, tables)
    except ProtocolError as error:
        raise BadSnapshot(f"{where} contradicts itself: {error}") from error
    held: dict[int, int] = dict.fromkeys(layout.entries, 0)
    for segment in (one for block in manifest.blocks for one in block.segments):
        held[segment.kid] += segment.stop - segment.start
    for kid, entry in layout.entries.items():
        if held[kid] != size_of(entry.spec):
            raise BadSnapshot(
                f"{where} has {held[kid]} of the {size_of(entry.spec)} elements of key "
                f"{entry.spec.key!r}"
            )
    files = {one.file for one in manifest.servers}
    lost = {server_file(block.server) for block in manifest.blocks} - files
    if lost:
        raise BadSnapshot(f"{where} has blocks in {min(lost)}, which it does not name")


def check_part(part: Part, nbytes: int, sha256: str | None, where: str) -> None:
    """Compare a file with what the manifest says of it; `sha256` None: only its size.

    Raises:
        BadSnapshot: it is another one; what was expected and found is named.
    """
    if nbytes != part.nbytes:
        raise BadSnapshot(
            f"{where} has {nbytes} bytes, and the manifest says {part.nbytes}: it was cut off, or "
            f"is of another snapshot; {_TRY}"
        )
    if sha256 is not None and sha256 != part.sha256:
        raise BadSnapshot(
            f"{where} has SHA-256 {sha256[:12]}…, and the manifest says {part.sha256[:12]}…: its "
            f"bytes have changed since; {_TRY}"
        )


class Every(Struct, frozen=True):
    """How often snapshots are taken: after so many seconds, or updates of the model; 0: not so."""

    seconds: float = 0.0
    updates: int = 0

    def __str__(self) -> str:
        if self.updates:
            return f"{self.updates}updates"
        return f"{self.seconds!r}s" if self.seconds else ""


_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def every(text: str) -> Every:
    """Return what a text such as "300s", "5min", "1h" or "1000updates" says; "": never.

    >>> every("5min"), every("1000updates")
    (Every(seconds=300.0, updates=0), Every(seconds=0.0, updates=1000))

    Raises:
        ValueError: nothing such, or not above 0.
    """
    if not text:
        return Every()
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(s|min|h|updates?)\s*", text)
    number = float(match[1]) if match is not None else 0.0
    if match is None or number <= 0:
        raise ValueError(f"{text!r} is no interval; write 300s, 5min, 1h or 1000updates")
    if match[2] in _UNITS:
        return Every(number * _UNITS[match[2]])
    if not number.is_integer():
        raise ValueError(f"{text!r}: updates come whole")
    return Every(0.0, int(number))


def in_order(names: Iterable[str]) -> list[str]:
    """Return those names that are of snapshots, the newest first; others are none of ours."""
    return sorted((name for name in names if NAME.fullmatch(name)), reverse=True)


def to_remove(names: Iterable[str], whole: Iterable[str], kept: int = KEPT) -> list[str]:
    """Return which snapshots go when a new one is complete, the oldest first.

    `whole` are those that have a manifest: `kept` of them stay. What has none is the rest of one
    that failed, if a whole one is newer; else it may be on its way.
    """
    there = in_order(names)
    stay: Sequence[str] = in_order(whole)[:kept]
    newest = stay[0] if stay else ""
    return [name for name in reversed(there) if name not in stay and name < newest]
