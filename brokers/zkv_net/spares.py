"""Large arrays that are used again: fresh memory costs more than what is copied into it.

An allocator gives large arrays back to the system, and each page of the next one is a fault: for
100 MB some 50 ms, where copying takes 5. What is handed out here is remembered, and handed out
again once nobody else refers to it: no array, view, buffer or message.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

from zkv.dtypes import Array

LEAST_BYTES = 64 * 1024
"""Smaller ones are kept by the allocator itself."""
BYTES_MAX = 256 * 1024 * 1024


class Spares:
    """Hands out arrays; remembers `bytes_max` of them at most. Any thread may ask."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.nbytes = 0
        """Of all that is remembered, in use or not."""
        self._kept: dict[tuple[int, str], list[Array]] = {}
        self._lock = threading.Lock()

    def empty(self, size: int, dtype: Any) -> Array:
        """Return a flat array of `size` elements, with any values."""
        dtype = np.dtype(dtype)
        nbytes = size * dtype.itemsize
        if nbytes < LEAST_BYTES:
            return np.empty(size, dtype)
        with self._lock:
            kept = self._kept.setdefault((size, dtype.str), [])
            for at in range(len(kept)):
                if _references(kept, at) == _ALONE:
                    found = kept.pop(at)
                    # The next one is looked for among those that were handed out longest ago.
                    kept.append(found)
                    return found
            made = np.empty(size, dtype)
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


def _references(kept: list[Array], at: int) -> int:
    return sys.getrefcount(kept[at])


_ALONE = _references([np.empty(0)], 0)
"""What is counted for an array that only the list has: versions of Python differ."""
