"""Arrays that gradients are made in and sent from, without a copy.

They lie in memory that servers of this machine read (`zkv_net.nearby`), if there are such. From its
push on, an array is lent: whoever is to read it reads it where it lies, as often as the update has
to be made. It is the caller's again when the batch is settled and the last reader has let go, which
the next batch waits for. Who writes to it before that is found out by a few words of each array,
and told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zkv.dtypes import Array

STRIDE_BYTES = 16 * 1024
"""Of so many bytes one word is looked at to see whether an array has changed: who fills it anew
changes all of them, and to read it whole would take as long as to copy it."""
WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Lent:
    """An array that was pushed, and what some of its words were then."""

    key: str | int
    array: Array
    words: bytes

    @property
    def changed(self) -> bool:
        return words_of(self.array) != self.words


class Buffers:
    """One worker's. `empty(size, dtype)` makes flat arrays, of which `is_lent` tells whether a
    peer still looks at a part of one."""

    def __init__(
        self, empty: Callable[[int, Any], Array], is_lent: Callable[[Array], bool]
    ) -> None:
        self._empty, self._is_lent = empty, is_lent
        self._made: dict[int, Array] = {}
        """By address."""
        self._lent: dict[int, list[_Lent]] = {}
        """By batch."""
        self._fates: dict[int, Any] = {}

    def make(self, arrays: Mapping[str | int, Array]) -> dict[str | int, Array]:
        """Return writable arrays of these shapes and dtypes, by the same keys, all zeros."""
        made = {}
        for key, array in arrays.items():
            flat = self._empty(array.size, array.dtype)
            flat[:] = 0
            self._made[flat.ctypes.data] = flat
            made[key] = flat.reshape(array.shape)
        return made

    def holds(self, array: Any) -> bool:
        """Return whether this is one of these arrays, whole."""
        if not self._made or not isinstance(array, np.ndarray):
            return False
        flat = self._made.get(array.ctypes.data)
        return flat is not None and flat.nbytes == array.nbytes and array.flags.c_contiguous

    def lend(self, batch: int, key: str | int, array: Array) -> None:
        """An array was pushed."""
        self._lent.setdefault(batch, []).append(_Lent(key, array, words_of(array)))

    def left(self, batch: int, fate: Any) -> None:
        """A batch's block is left; `fate`: the future of what becomes of it, None: nothing counts
        of it."""
        if batch in self._lent:
            self._fates[batch] = fate

    @property
    def lent(self) -> list[tuple[int, Any]]:
        """The batches that were left and have arrays lent, with their fates."""
        return list(self._fates.items())

    def free(self, batch: int) -> bool:
        """A batch is settled: return whether its arrays are the caller's again.

        Raises:
            BufferError: one was changed while it was lent.
        """
        lent = self._lent.get(batch, [])
        if any(self._is_lent(one.array) for one in lent):
            return False
        self._lent.pop(batch, None)
        self._fates.pop(batch, None)
        for one in lent:
            if one.changed:
                raise BufferError(
                    f"key {one.key!r}: the gradient was changed while it was lent, so what was "
                    "sent of it is not known; an array of `worker.buffers` is yours again when the "
                    "next batch is entered, or when `batch.wait()` has returned"
                )
        return True


def words_of(array: Array) -> bytes:
    """Return some of an array's words."""
    raw = array.reshape(-1).view(np.uint8)
    if raw.size < WORD_BYTES:
        return raw.tobytes()
    words = raw[: raw.size - raw.size % WORD_BYTES].view(np.uint64)
    return words[:: STRIDE_BYTES // WORD_BYTES].tobytes() + words[-1:].tobytes()
