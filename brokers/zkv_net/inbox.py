"""A peer's memory, opened here to read what it sends: copied, or looked at where it lies."""

from __future__ import annotations

import os
import stat
from typing import Any

import numpy as np

from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv_net.segment import LEASED, MEMORY_NAME, Mapped, Place, Shape
from zkv_net.spares import Spares


class NotHere(Exception):
    """A peer's memory cannot be opened; the text says why."""


class _Lease:
    """A payload that is looked at where it lies, until nothing refers to it any more."""

    def __init__(self, mapped: Mapped, place: Place) -> None:
        self._mapped, self._place = mapped, place
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (place.nbytes,),
            "typestr": "|u1",
            "data": (mapped.address + place.at, True),
        }

    def __del__(self) -> None:
        waiting, place = self._mapped.waiting, self._place
        if int(waiting[place.entry]) == place.number | LEASED:
            waiting[place.entry] = 0


class Inbox:
    """A peer's outbox, opened here; what is copied goes into `spares`.

    Raises:
        NotHere: there is no such memory here, it is another user's, or not what was told.
    """

    def __init__(
        self, pid: int, fd: int, shape: Shape, token: bytes, spares: Spares | None = None
    ) -> None:
        self._spares = Spares(0) if spares is None else spares
        opened = _opened(pid, fd, shape)
        try:
            self._mapped = Mapped(opened, shape, writes=False)
        except (OSError, ValueError) as error:
            raise NotHere(f"its memory cannot be mapped: {error}") from error
        finally:
            os.close(opened)
        if self._mapped.token.tobytes() != token:
            raise NotHere("the memory that was told is another process's: not the same machine")

    def take(self, place: Place, *, stay: bool = False) -> Array | None:
        """Return a payload (flat, uint8); None: it was given up.

        A copy, and its place is free. `stay`: not copied, if it may stay there; read-only, and its
        place is free when nothing refers to the array any more.

        Raises:
            ProtocolError: there is no such place.
        """
        mapped = self._mapped
        shape, end = mapped.shape, place.at + place.nbytes
        if place.entry >= shape.entries or end > shape.data_bytes:
            raise ProtocolError(f"{place} is outside of the shared memory that was told")
        if mapped.waiting[place.entry] != place.number or not place.number:
            return None
        if stay and place.stays:
            mapped.waiting[place.entry] = place.number | LEASED
            lease = _Lease(mapped, place)
            mapped.fence()
            gone = mapped.numbers[place.entry] != place.number
            return None if gone else np.asarray(lease)
        payload = self._spares.copy_of(mapped.data[place.at : end])
        mapped.fence()
        if mapped.numbers[place.entry] != place.number:
            return None
        if mapped.waiting[place.entry] == place.number:
            mapped.waiting[place.entry] = 0
        return payload


def _opened(pid: int, fd: int, shape: Shape) -> int:
    """Open a process's memory file.

    A peer may tell anything, so nothing else is opened: not a device, not a pipe that would block,
    no other user's file, and none that could shrink while it is read.
    """
    path = f"/proc/{pid}/fd/{fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{MEMORY_NAME}"):
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
