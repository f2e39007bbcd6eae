"""Memory that one process writes payloads to and others of its machine and user read them from.

An `Outbox` is a memory file without a name: nothing of it is left when the last process that has it
open is gone, however that ended. It cannot change its size, so that nobody who has it open can be
hurt by whoever made it. A few slots hold a payload each; a message says where one lies (`Place`),
and each reader has a column of words in which it says that it has taken what was there.

A slot may be written again although its reader has not taken it (it was too slow, or the message
was lost), so every payload has a number, which is looked at before and after it is copied: what was
written over in between is not taken, as if the message had been lost.

Layout, little-endian: 16 bytes of token; at 64, a word for each slot, the number of its payload;
then `COLUMNS` rows of a word for each slot, 0 or the number of a payload that the reader has not
taken; at the next page, the slots.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import sys
import threading
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv_net.spares import Spares

COLUMNS = 64
"""Readers of one outbox; who comes later gets its payloads through its socket."""
SLOTS_MAX = 4096
TOKEN_BYTES = 16
RECLAIM_S = 10.0
"""A payload that was not taken for so long is written over."""
_NAME = "zkv-payloads"
_WORDS_AT = 64
_PAGE = 4096
_place = struct.Struct("<QQQ")


class NotHere(Exception):
    """A peer's memory cannot be opened; the text says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a payload lies: the frame that travels instead of it."""

    slot: int
    number: int
    nbytes: int

    def encode(self) -> bytes:
        """Return the frame."""
        return _place.pack(self.slot, self.number, self.nbytes)

    @staticmethod
    def decode(frame: bytes | memoryview) -> Place:
        """Return the place that a frame tells.

        Raises:
            ProtocolError: it tells none.
        """
        if len(frame) != _place.size:
            raise ProtocolError(f"a place in shared memory has {_place.size} bytes")
        return Place(*_place.unpack(frame))


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a segment is."""

    slots: int
    slot_bytes: int

    @property
    def first(self) -> int:
        """Where the slots begin."""
        words = _WORDS_AT + 8 * self.slots * (1 + COLUMNS)
        return -(-words // _PAGE) * _PAGE

    @property
    def nbytes(self) -> int:
        """Bytes of the whole segment."""
        return self.first + self.slots * self.slot_bytes


class _Mapped:
    """A segment that is mapped here."""

    def __init__(self, fd: int, shape: Shape) -> None:
        self.shape = shape
        self._memory = mmap.mmap(fd, shape.nbytes)
        whole = np.frombuffer(self._memory, np.uint8)
        words = whole[_WORDS_AT : _WORDS_AT + 8 * shape.slots * (1 + COLUMNS)].view("<u8")
        self.token_bytes = whole[:TOKEN_BYTES]
        self.numbers = words[: shape.slots]
        self.waiting = words[shape.slots :].reshape(COLUMNS, shape.slots)
        self.payloads = whole[shape.first :].reshape(shape.slots, shape.slot_bytes)
        self._fence = threading.Lock()

    def fence(self) -> None:
        """Let what was read and written before be done before what comes after.

        Python has no fence. Taking a lock twice is one: nothing moves from before its first release
        to behind its second acquisition.
        """
        for _ in range(2):
            with self._fence:
                pass


class Outbox:
    """The segment of a process that sends. `token`: 16 random bytes, by which readers know it.

    Raises:
        OSError: this system has no such memory, or no room for it.
    """

    def __init__(self, shape: Shape, token: bytes) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError(f"{sys.platform} has no memory files")
        import fcntl

        self.shape, self.token = shape, token
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self.fd, 0o600)
            os.ftruncate(self.fd, shape.nbytes)
            fixed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fixed)
            self._mapped = _Mapped(self.fd, shape)
        except BaseException:
            os.close(self.fd)
            raise
        self._mapped.token_bytes[:] = np.frombuffer(token, np.uint8)
        self._number = 0
        self._since = [0.0] * shape.slots
        self._held: list[tuple[Hashable, Array] | None] = [None] * shape.slots
        """What lies in a slot, if it may be told again: its array stays as long, so that no other
        one can have its key."""
        self._shown: dict[Hashable, int] = {}

    def put(self, column: int, payload: Array, key: Hashable, now: float) -> Place | None:
        """Write a payload (flat, uint8) for a reader; return None while there is no room.

        `key` is the same only for the same bytes of the same array: what lies here for one reader
        is told to the next, and not written again. None: it is never the same.
        """
        slot = None if key is None else self._shown.get(key)
        if slot is None:
            slot = self._free(now)
            if slot is None:
                return None
            self._write(slot, payload, key)
        self._since[slot] = now
        number = int(self._mapped.numbers[slot])
        self._mapped.waiting[column, slot] = number
        return Place(slot, number, payload.nbytes)

    def _write(self, slot: int, payload: Array, key: Hashable) -> None:
        held = self._held[slot]
        if held is not None:
            self._shown.pop(held[0], None)
        self._held[slot] = None if key is None else (key, payload)
        if key is not None:
            self._shown[key] = slot
        self._number += 1
        self._mapped.numbers[slot] = self._number
        # Whoever reads what was here before must see that it is gone before it changes.
        self._mapped.fence()
        self._mapped.payloads[slot, : payload.nbytes] = payload

    def _free(self, now: float) -> int | None:
        """Return the first slot that nobody waits for: the one that caches hold most likely."""
        waiting = self._mapped.waiting
        free = np.flatnonzero(~waiting.any(axis=0))
        if free.size:
            return int(free[0])
        slot = min(range(self.shape.slots), key=self._since.__getitem__)
        if now - self._since[slot] < RECLAIM_S:
            return None
        waiting[:, slot] = 0
        return slot

    def forget(self, column: int) -> None:
        """A reader is gone: nobody waits in its column any more."""
        self._mapped.waiting[column] = 0

    def close(self) -> None:
        """Give the memory back, once no reader has it open."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Inbox:
    """A peer's outbox, opened here to read from one of its columns, into `spares`.

    Raises:
        NotHere: there is no such memory here, it is another user's, or not what was told.
    """

    def __init__(
        self,
        pid: int,
        fd: int,
        shape: Shape,
        token: bytes,
        column: int,
        spares: Spares | None = None,
    ) -> None:
        self.column = column
        self._spares = Spares(0) if spares is None else spares
        opened = _opened(pid, fd, shape)
        try:
            self._mapped = _Mapped(opened, shape)
        except (OSError, ValueError) as error:
            raise NotHere(f"its memory cannot be mapped: {error}") from error
        finally:
            os.close(opened)
        if self._mapped.token_bytes.tobytes() != token:
            raise NotHere("the memory that was told is another process's: not the same machine")

    def take(self, place: Place) -> Array | None:
        """Return a copy of a payload (flat, uint8), and make room; None: it was written over.

        Raises:
            ProtocolError: there is no such place.
        """
        mapped = self._mapped
        if place.slot >= mapped.shape.slots or place.nbytes > mapped.shape.slot_bytes:
            raise ProtocolError(f"{place} is outside of the shared memory that was told")
        if mapped.numbers[place.slot] != place.number:
            return None
        payload = self._spares.copy_of(mapped.payloads[place.slot, : place.nbytes])
        mapped.fence()
        if mapped.numbers[place.slot] != place.number:
            return None
        if mapped.waiting[self.column, place.slot] == place.number:
            mapped.waiting[self.column, place.slot] = 0
        return payload


def _opened(pid: int, fd: int, shape: Shape) -> int:
    """Open a process's memory file.

    A peer may tell anything, so nothing else is opened: not a device, not a pipe that would block,
    no other user's file, and none that could shrink while it is read.
    """
    path = f"/proc/{pid}/fd/{fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise NotHere("the memory that was told is something else: not the same machine")
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NotHere(f"process {pid} is not here, or another user's: {error.strerror}") from error
    try:
        import fcntl

        found, seals = os.fstat(opened), fcntl.fcntl(opened, fcntl.F_GET_SEALS)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise NotHere("its memory belongs to another user")
        if found.st_size != shape.nbytes or not seals & fcntl.F_SEAL_SHRINK:
            raise NotHere(f"its memory has {found.st_size} bytes, {shape.nbytes} were told")
    except OSError as error:
        os.close(opened)
        raise NotHere(f"its memory is none: {error}") from error
    except BaseException:
        os.close(opened)
        raise
    return opened
