"""Memory that one process writes payloads to and others of its machine and user read them from.

An `Outbox` is a memory file without a name: nothing of it is left when the last process that has it
open is gone, however that ended. It cannot change its size, so that nobody who has it open can be
hurt by whoever made it. Arrays may live in it (`allocate`): what is sent of them is not copied. Of
what lives elsewhere a copy is sent, in one of a few slots. A message says where a payload lies
(`Place`); an entry for each says whether its reader is done with it.

An entry may be given up although its reader is not (it was too slow, or the message was lost), so
every payload has a number, which is looked at before and after its reader takes it: what was given
up in between is not taken, as if the message had been lost.

Layout, little-endian: 16 bytes of token; at 64, a word for each entry, the number of its payload;
then a word for each entry: 0, or the number of a payload that its reader is not done with, with
`LEASED` if it was taken and is being looked at where it lies; at the next page, the data.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from zkv.dtypes import Array
from zkv.errors import ProtocolError

ENTRIES_MAX = 65_536
TOKEN_BYTES = 16
RECLAIM_S = 10.0
"""A payload that was not taken for so long is given up."""
LEASED = 2**63
MEMORY_NAME = "zkv-payloads"
PAGE = 4096
_WORDS_AT = 64
_place = struct.Struct("<QQQQ?")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a payload lies: the frame that travels instead of it. `at`: bytes into the data.
    `stays`: it may be looked at there for long, as nothing else waits for its room."""

    entry: int
    number: int
    at: int
    nbytes: int
    stays: bool

    def encode(self) -> bytes:
        """Return the frame."""
        return _place.pack(self.entry, self.number, self.at, self.nbytes, self.stays)

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
    """How large a segment is: payloads that may be under way, and bytes of data."""

    entries: int
    data_bytes: int

    @property
    def first(self) -> int:
        """Where the data begins."""
        return -(-(_WORDS_AT + 16 * self.entries) // PAGE) * PAGE

    @property
    def nbytes(self) -> int:
        """Bytes of the whole segment."""
        return self.first + self.data_bytes


class Mapped:
    """A segment that is mapped here. A reader must not write to its data, and cannot."""

    def __init__(self, fd: int, shape: Shape, *, writes: bool) -> None:
        self.shape = shape
        # The words are written by both sides.
        head = mmap.mmap(fd, shape.first)
        words = np.frombuffer(head, "<u8", 2 * shape.entries, _WORDS_AT)
        self.token = np.frombuffer(head, np.uint8, TOKEN_BYTES)
        self.numbers, self.waiting = words[: shape.entries], words[shape.entries :]
        access = mmap.ACCESS_WRITE if writes else mmap.ACCESS_READ
        self.memory = mmap.mmap(fd, shape.data_bytes, access=access, offset=shape.first)
        self.data = np.frombuffer(self.memory, np.uint8)
        self.address = self.data.ctypes.data
        self._fence = threading.Lock()

    def fence(self) -> None:
        """Let what was read and written before be done before what comes after.

        Python has no fence. Taking a lock twice is one: nothing moves from before its first release
        to behind its second acquisition.
        """
        for _ in range(2):
            with self._fence:
                pass


@dataclass(slots=True)
class _Slot:
    """Where copies lie. `key` and `given`: of what, if it may be told again; the array stays as
    long, so that no other one can have its key."""

    array: Array
    uses: int = 0
    key: Hashable = None
    given: Array | None = None


@dataclass(slots=True)
class _Told:
    """A payload that its reader is not done with. `array` keeps it as it is meanwhile."""

    reader: int
    number: int
    since: float
    array: Array
    slot: _Slot | None


class Outbox:
    """The segment of a process that sends. `token`: 16 random bytes, by which readers know it.
    `slot_bytes`, `slots`: of the part that copies go to. Any thread may call.

    Raises:
        OSError: this system has no such memory, or no room for it.
    """

    def __init__(self, shape: Shape, token: bytes, *, slots: int, slot_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError(f"{sys.platform} has no memory files")
        import fcntl

        self.shape, self.token = shape, token
        self.fd = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self.fd, 0o600)
            os.ftruncate(self.fd, shape.nbytes)
            fixed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fixed)
            self._mapped = Mapped(self.fd, shape, writes=True)
        except BaseException:
            os.close(self.fd)
            raise
        self._mapped.token[:] = np.frombuffer(token, np.uint8)
        self._lock = threading.RLock()
        self._number, self._used = 0, 0
        self._free = list(range(shape.entries - 1, -1, -1))
        self._told: dict[int, _Told] = {}
        self._lent: dict[int, int] = {}
        """How many readers have something that begins at this place."""
        self.slot_bytes = slot_bytes
        rows = (self.allocate(slot_bytes) for _ in range(slots))
        self._slots = [_Slot(row) for row in rows if row is not None]

    def allocate(self, nbytes: int) -> Array | None:
        """Return memory for an array (flat, uint8) that is to live here, for good; None: there is
        no more."""
        with self._lock:
            at = self._used
            if at + nbytes > self.shape.data_bytes:
                return None
            self._used += -(-nbytes // PAGE) * PAGE
        return np.frombuffer(self._mapped.memory, np.uint8, nbytes, at)

    def lives_here(self, payload: Array) -> bool:
        """Return whether an array lies in this memory."""
        at = payload.ctypes.data - self._mapped.address
        return 0 <= at <= self.shape.data_bytes - payload.nbytes

    def takes(self, payload: Array, least_bytes: int) -> bool:
        """Return whether a payload is one for `put`, if it has `least_bytes`."""
        if payload.nbytes < least_bytes:
            return False
        return payload.nbytes <= self.slot_bytes or self.lives_here(payload)

    def put(self, reader: int, payload: Array, key: Hashable, now: float) -> Place | None:
        """Tell a reader of a payload (flat, uint8); return None while there is no room.

        One that lives here stays where it is, and must not change before `is_lent` says so. Of
        another one a copy is told: `key` is the same only for the same bytes of the same array,
        whose copy for one reader is told to the next. None: it is never the same.
        """
        with self._lock:
            if not self._free:
                self._sweep(now)
            if not self._free:
                return None
            array, slot = payload, None
            if not self.lives_here(payload):
                slot = self._copied(payload, key, now)
                if slot is None:
                    return None
                slot.uses += 1
                array = slot.array
            at = array.ctypes.data - self._mapped.address
            self._number += 1
            entry = self._free.pop()
            self._told[entry] = _Told(reader, self._number, now, array, slot)
            self._lent[at] = self._lent.get(at, 0) + 1
            self._mapped.numbers[entry] = self._number
            self._mapped.waiting[entry] = self._number
            return Place(entry, self._number, at, payload.nbytes, slot is None)

    def _copied(self, payload: Array, key: Hashable, now: float) -> _Slot | None:
        if key is not None:
            for slot in self._slots:
                if slot.key == key:
                    return slot
        # The first that nobody waits for: the one that caches hold most likely.
        self._sweep(now)
        free = next((one for one in self._slots if not one.uses), None)
        if free is None:
            return None
        free.key, free.given = (None, None) if key is None else (key, payload)
        free.array[: payload.nbytes] = payload
        return free

    def sweep(self, now: float) -> None:
        """Let go of what readers are done with."""
        with self._lock:
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        if not self._told:
            return
        waiting = self._mapped.waiting
        entries = list(self._told)
        for entry, word in zip(entries, waiting[entries].tolist(), strict=True):
            told = self._told[entry]
            late = word == told.number and now - told.since >= RECLAIM_S
            if not word or (late and self._given_up(entry)):
                self._done(entry)

    def _given_up(self, entry: int) -> bool:
        """Take back what was not taken; return whether its reader has not just done so."""
        self._mapped.numbers[entry] = 0
        # Either the reader sees that, or it is seen here that it has taken it.
        self._mapped.fence()
        if int(self._mapped.waiting[entry]) & LEASED:
            return False
        self._mapped.waiting[entry] = 0
        return True

    def _done(self, entry: int) -> None:
        told = self._told.pop(entry)
        at = told.array.ctypes.data - self._mapped.address
        self._lent[at] -= 1
        if not self._lent[at]:
            del self._lent[at]
        if told.slot is not None:
            told.slot.uses -= 1
        self._free.append(entry)

    def is_lent(self, array: Array, now: float) -> bool:
        """Return whether a reader is not done with something that begins in this array."""
        with self._lock:
            start = array.ctypes.data - self._mapped.address
            stop = start + max(1, array.nbytes)
            if not any(start <= at < stop for at in self._lent):
                return False
            self._sweep(now)
            return any(start <= at < stop for at in self._lent)

    def forget(self, reader: int) -> None:
        """A reader is gone, and with it what it had."""
        with self._lock:
            for entry in [at for at, told in self._told.items() if told.reader == reader]:
                self._mapped.numbers[entry] = self._mapped.waiting[entry] = 0
                self._done(entry)

    def close(self) -> None:
        """Give the memory back, once no reader has it open and no array lives there."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
