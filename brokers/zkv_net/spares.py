"""Large arrays that are used again: fresh memory costs more than what is copied into it.

An allocator gives large arrays back to the system, and each page of the next one is a fault: for
100 MB some 50 ms, where copying takes 5. What is handed out here is remembered, and handed out
again once nobody else refers to it: no array, view, buffer or message.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from zkv.dtypes import Array

LEAST_BYTES = 64 * 1024
"""Smaller ones are kept by the allocator itself."""
BYTES_MAX = 256 * 1024 * 1024
SIXTEENTH = 4
"""Sizes are rounded up, by a sixteenth at most, so that an array serves others of about its
size."""


class Spares:
    """Hands out arrays; remembers `bytes_max` of them at most. Any thread may ask.

    `make(nbytes)` gives memory of a better kind for good (flat, uint8), as long as it has some; all
    of that is remembered. `look` is called before anything is made: it may let go of arrays.
    """

    def __init__(
        self,
        bytes_max: int = BYTES_MAX,
        make: Callable[[int], Array | None] = lambda nbytes: None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self.bytes_max = bytes_max
        self.nbytes = 0
        """Of all that is remembered, in use or not, but for what `make` has made."""
        self._make, self._look = make, look
        self._kept: dict[int, list[Array]] = {}
        self._lock = threading.Lock()

    def empty(self, size: int, dtype: Any) -> Array:
        """Return a flat array of `size` elements, with any values."""
        dtype = np.dtype(dtype)
        nbytes = size * dtype.itemsize
        if nbytes < LEAST_BYTES:
            return np.empty(size, dtype)
        with self._lock:
            kept = self._kept.setdefault(_rounded(nbytes), [])
            found = _unused(kept)
            if found is None:
                self._look()
                found = _unused(kept)
            if found is None:
                found = self._made(_rounded(nbytes), kept)
            array: Array = found[:nbytes].view(dtype)
            return array

    def _made(self, nbytes: int, kept: list[Array]) -> Array:
        made = self._make(nbytes)
        if made is not None:
            kept.append(made)
            return made
        made = np.empty(nbytes, np.uint8)
        if self.nbytes + nbytes <= self.bytes_max:
            kept.append(made)
            self.nbytes += nbytes
        return made

    def copy_of(self, values: Array) -> Array:
        """Return a copy of a flat array."""
        copied = self.empty(values.size, values.dtype)
        copied[:] = values
        return copied

    def clear(self) -> None:
        """Remember nothing any more."""
        with self._lock:
            self._kept.clear()
            self.nbytes = 0


def _rounded(nbytes: int) -> int:
    step = 1 << max(0, nbytes.bit_length() - 1 - SIXTEENTH)
    return -(-nbytes // step) * step


def _unused(kept: list[Array]) -> Array | None:
    """Return an array that nobody has, and put it last: the next one is looked for among those
    that were handed out longest ago."""
    for at in range(len(kept)):
        if _references(kept, at) == _ALONE:
            found = kept.pop(at)
            kept.append(found)
            return found
    return None


def _references(kept: list[Array], at: int) -> int:
    return sys.getrefcount(kept[at])


_ALONE = _references([np.empty(0)], 0)
"""What is counted for an array that only the list has: versions of Python differ."""
