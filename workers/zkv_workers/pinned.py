"""Pinned memory that is used again and again: what devices copy into, and what is sent from.

It is bounded: 64 MiB for a process, made in pieces as it is needed. A slot is free again when
nothing refers to its array any more: not the queue of what may have to be sent again, not ZeroMQ,
which sends it without a copy. Where no slot is free, ordinary memory takes its place: the copy is
slower then, and nobody waits for a server.
"""

from __future__ import annotations

import threading
import weakref
from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zkv.dtypes import Array
from zkv_workers import cuda

BYTES_MAX = 64 * 2**20
PIECE_BYTES = 4 * 2**20
ALIGNMENT = 256
"""Bytes: slots begin at multiples of it, and none shares a line of a cache with another."""


@dataclass(slots=True)
class Slots:
    """Which bytes of a piece of memory are free. Pure: knows numbers only."""

    size: int
    holes: list[tuple[int, int]] = field(init=False)
    """Free stretches, in order, apart from each other."""
    _from: int = 0
    """Where to look first: memory is used in turn."""

    def __post_init__(self) -> None:
        self.holes = [(0, self.size)]

    def take(self, nbytes: int) -> int | None:
        """Return where so many bytes are free, and take them; None: nowhere."""
        for first in (self._from, 0):
            for low, high in self.holes:
                begin = max(low, first)
                if high - begin >= nbytes:
                    return self._cut(low, high, begin, begin + nbytes)
        return None

    def _cut(self, low: int, high: int, begin: int, end: int) -> int:
        self.holes.remove((low, high))
        for rest in ((low, begin), (end, high)):
            if rest[0] < rest[1]:
                insort(self.holes, rest)
        self._from = end
        return begin

    def give_back(self, start: int, nbytes: int) -> None:
        """Make bytes free that were taken."""
        low, high = start, start + nbytes
        kept = []
        for hole in self.holes:
            if hole[1] == low:
                low = hole[0]
            elif hole[0] == high:
                high = hole[1]
            else:
                kept.append(hole)
        insort(kept, (low, high))
        self.holes = kept

    @property
    def taken(self) -> int:
        """Bytes that are not free."""
        return self.size - sum(high - low for low, high in self.holes)


@dataclass(slots=True)
class _Piece:
    memory: Any
    slots: Slots


class Ring:
    """A process's pinned memory."""

    def __init__(self, bytes_max: int = BYTES_MAX, piece_bytes: int = PIECE_BYTES) -> None:
        self._bytes_max = bytes_max
        self._piece_bytes = piece_bytes
        self._pieces: list[_Piece] = []
        self._returned: deque[tuple[_Piece, int, int]] = deque()
        """By whoever drops an array, on any thread and in the midst of anything."""
        self._lock = threading.Lock()
        self.short = 0
        """How often there was no slot."""

    def room(self, nbytes: int) -> Array | None:
        """Return so many bytes of pinned memory, free again once nothing refers to them.

        None: there are not so many.
        """
        wanted = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            while self._returned:
                piece, start, size = self._returned.popleft()
                piece.slots.give_back(start, size)
            found = self._take(wanted)
            if found is None:
                self.short += 1
                return None
        piece, start = found
        array: Array = np.frombuffer(piece.memory, np.uint8, nbytes, start)
        weakref.finalize(array, self._returned.append, (piece, start, wanted)).atexit = False
        return array

    def _take(self, wanted: int) -> tuple[_Piece, int] | None:
        for piece in self._pieces:
            start = piece.slots.take(wanted)
            if start is not None:
                return piece, start
        size = max(wanted, self._piece_bytes)
        if self.nbytes + size > self._bytes_max:
            return None
        piece = _Piece(cuda.cupy().cuda.alloc_pinned_memory(size), Slots(size))
        self._pieces.append(piece)
        piece.slots.take(wanted)
        return piece, 0

    @property
    def nbytes(self) -> int:
        """Bytes of pinned memory that were made."""
        return sum(piece.slots.size for piece in self._pieces)

    @property
    def taken(self) -> int:
        """Bytes of slots that are not known to be free."""
        return sum(piece.slots.taken for piece in self._pieces)

    def holds(self, array: Array) -> bool:
        """Return whether an array lies in this memory."""
        at = array.ctypes.data
        for piece in self._pieces:
            first = np.frombuffer(piece.memory, np.uint8, 1).ctypes.data
            if first <= at < first + piece.slots.size:
                return True
        return False


_ring = Ring()


def ring() -> Ring:
    """Return this process's."""
    return _ring


def room(nbytes: int) -> Array:
    """Return so many bytes of the host's memory: pinned, or ordinary where none is free."""
    found = _ring.room(nbytes) if nbytes else None
    return np.empty(nbytes, np.uint8) if found is None else found


def is_pinned(array: Array) -> bool:
    """Return whether an array lies in pinned memory of ours."""
    return _ring.holds(array)


def forget() -> None:
    """Begin anew (for tests: devices are new)."""
    global _ring
    _ring = Ring()
