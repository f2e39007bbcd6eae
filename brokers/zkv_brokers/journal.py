"""The journal's form: records of bytes, of which each proves itself.

A file begins with `MAGIC`; then records follow, each with a head of its length and number, a
checksum of that, and one of what it holds. Writing may break off: what a last record lacks was
never answered for, so it is cut off. Anything else that does not fit is damage, and is told with
its place: what was answered for must not be forgotten in silence. Pure.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from zkv.errors import JournalError

MAGIC = b"zkv journal 1\n"
_HEAD = struct.Struct(">IQ")
_SUMS = struct.Struct(">II")
HEAD_BYTES = _HEAD.size + _SUMS.size
LATER_MAX = 16
"""Behind a record that does not fit so many later ones are looked for."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The whole records of a journal. `whole_bytes`: up to here the file is sound; a `torn` rest
    behind it, in bytes, was being written when everything ended."""

    records: list[bytes]
    whole_bytes: int
    torn: int


def written(number: int, content: bytes) -> bytes:
    """Return record `number` (from 0) of a journal as it stands in the file."""
    head = _HEAD.pack(len(content), number)
    return head + _SUMS.pack(zlib.crc32(head), zlib.crc32(content)) + content


def contents(file: bytes, name: str = "the journal") -> Contents:
    """Read a journal; `name` is for errors.

    Raises:
        JournalError: it is none, or damaged; the byte is named, and what to do.
    """
    if not file.startswith(MAGIC):
        if MAGIC.startswith(file):
            return Contents([], 0, len(file))
        raise JournalError(f"{name} does not begin as a journal of this version does: {_REMEDY}")
    found: list[bytes] = []
    at = len(MAGIC)
    while at < len(file):
        content = _record(file, at, len(found))
        if content is None:
            _check_rest(file, at, len(found), name)
            break
        found.append(content)
        at += HEAD_BYTES + len(content)
    return Contents(found, at, len(file) - at)


_REMEDY = (
    "put a sound copy in its place, or move it away and start all processes anew; a broker that "
    "went on without it would lose updates"
)


def _record(file: bytes, at: int, number: int) -> bytes | None:
    """Return what the record at a place holds; None if no whole record of this number is there."""
    head = file[at : at + _HEAD.size]
    start = at + HEAD_BYTES
    if start > len(file):
        return None
    size, its_number = _HEAD.unpack(head)
    head_sum, content_sum = _SUMS.unpack(file[at + _HEAD.size : start])
    if zlib.crc32(head) != head_sum or its_number != number or start + size > len(file):
        return None
    content = file[start : start + size]
    return content if zlib.crc32(content) == content_sum else None


def _check_rest(file: bytes, at: int, number: int, name: str) -> None:
    """Tell damage from a last record that broke off: behind that one nothing whole can be.

    A record is written when the one before it is safe, so a later one proves that this one was.
    """
    for later in range(number + 1, number + 1 + LATER_MAX):
        wanted = later.to_bytes(8, "big")
        found = file.find(wanted, at)
        while found >= 0:
            start = found - (_HEAD.size - len(wanted))
            if start > at and _record(file, start, later) is not None:
                raise JournalError(f"{name} is damaged at byte {at} (record {number}): {_REMEDY}")
            found = file.find(wanted, found + 1)
