"""Arrays that gradients are made in and sent from, without a copy.

They lie in memory that servers of this machine read (`zkv_net.nearby`), if there are such. From its
push on, an array is lent: whoever is to read it reads it where it lies, as often as the update has
to be made. It is the caller's again when the batch is settled and the last reader has let go, which
the next batch waits for. Who writes to it before that is found out by a few words of each array,
and told. Arrays of keys that share a block lie as they do in it, so that it is sent from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
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
    home: Array
    """What is read as a whole: the array, or all of the block that it is a part of."""

    def changed(self) -> str | int | None:
        """Return the key, if the array is another one by now."""
        return self.key if words_of(self.array) != self.words else None


class _Shared:
    """Memory for a block of several keys; `parts`: each with where it begins and ends."""

    def __init__(self, array: Array, parts: Sequence[tuple[str | int, int, int]]) -> None:
        self.array = array
        stride = STRIDE_BYTES // array.itemsize
        looked = [(key, at) for key, a, b in parts for at in {*range(a, b, stride), b - 1} if b > a]
        self._keys = [key for key, _ in looked]
        self._at = np.array([at for _, at in looked], np.intp)

    def words(self) -> bytes:
        """Return some elements of each key."""
        return self.array[self._at].tobytes()

    def differs(self, words: bytes) -> str | int | None:
        """Return a key whose elements are others than these."""
        now, size = self.words(), self.array.itemsize
        if now == words:
            return None
        at = next(
            at for at in range(0, len(now), size) if now[at : at + size] != words[at : at + size]
        )
        return self._keys[at // size]


@dataclass(frozen=True, slots=True)
class _LentWhole:
    """All arrays of a block, which were pushed together, and some of their elements then."""

    shared: _Shared
    words: bytes

    @property
    def home(self) -> Array:
        return self.shared.array

    def changed(self) -> str | int | None:
        """Return a key whose array is another one by now."""
        return self.shared.differs(self.words)


class Buffers:
    """One worker's. `empty(size, dtype)` makes flat arrays, of which `is_lent` tells whether a
    peer still looks at a part of one."""

    def __init__(
        self, empty: Callable[[int, Any], Array], is_lent: Callable[[Array], bool]
    ) -> None:
        self._empty, self._is_lent = empty, is_lent
        self._made: dict[int, Array] = {}
        """By address."""
        self._given: dict[int, tuple[Array, _Shared, int]] = {}
        """Arrays of keys that share a block, as they were given out, by their `id`: with the memory
        for all of it, and where they begin there."""
        self._lent: dict[int, list[_Lent | _LentWhole]] = {}
        """By batch."""
        self._fates: dict[int, Any] = {}

    def make(
        self, arrays: Mapping[str | int, Array], blocks: Iterable[Sequence[str | int]] = ()
    ) -> dict[str | int, Array]:
        """Return writable arrays of these shapes and dtypes, by the same keys, all zeros.

        `blocks`: of these keys those of each block that several share, in its order.
        """
        made: dict[str | int, Array] = {}
        for keys in blocks:
            parts = [arrays[key] for key in keys]
            if len({part.dtype for part in parts}) > 1:
                continue
            home = self._flat(sum(part.size for part in parts), parts[0].dtype)
            edges = [0, *accumulate(part.size for part in parts)]
            shared = _Shared(home, list(zip(keys, edges, edges[1:], strict=False)))
            for key, part, start in zip(keys, parts, edges, strict=False):
                made[key] = self._new(home[start : start + part.size], part)
                self._given[id(made[key])] = (made[key], shared, start)
        rest = {key: array for key, array in arrays.items() if key not in made}
        made |= {key: self._new(self._flat(one.size, one.dtype), one) for key, one in rest.items()}
        return {key: made[key] for key in arrays}

    def _flat(self, size: int, dtype: Any) -> Array:
        flat = self._empty(size, dtype)
        flat[:] = 0
        return flat

    def _new(self, flat: Array, like: Array) -> Array:
        if flat.size:
            self._made[flat.ctypes.data] = flat
        return flat.reshape(like.shape)

    def home_of(self, array: Any) -> Array | None:
        """Return the memory for all of the block that this array, as `make` returned it, is a part
        of; None: it is no such array."""
        known = self._given.get(id(array))
        return None if known is None else known[1].array

    def holds(self, array: Any) -> bool:
        """Return whether this is one of these arrays, whole."""
        if not self._made or not isinstance(array, np.ndarray):
            return False
        flat = self._made.get(array.ctypes.data)
        return flat is not None and flat.nbytes == array.nbytes and array.flags.c_contiguous

    def lend(self, batch: int, key: str | int, array: Array) -> None:
        """An array was pushed."""
        home = self.home_of(array)
        lent = _Lent(key, array, words_of(array), array if home is None else home)
        self._lent.setdefault(batch, []).append(lent)

    def lend_all(self, batch: int, arrays: Sequence[Any], size: int) -> Array | None:
        """Arrays of all keys of a block of `size` elements were pushed, in its order: return the
        memory that they fill; None: they are not all of one."""
        known = self._given.get(id(arrays[0]))
        if known is None or known[1].array.size != size:
            return None
        shared, at = known[1], 0
        for array in arrays:
            found = self._given.get(id(array))
            if found is None or found[1] is not shared or found[2] != at:
                return None
            at += array.size
        if at != size:
            return None
        self._lent.setdefault(batch, []).append(_LentWhole(shared, shared.words()))
        return shared.array

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
        homes = {id(one.home): one.home for one in lent}
        if any(self._is_lent(home) for home in homes.values()):
            return False
        self._lent.pop(batch, None)
        self._fates.pop(batch, None)
        for one in lent:
            key = one.changed()
            if key is not None:
                raise BufferError(
                    f"key {key!r}: the gradient was changed while it was lent, so what was "
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
    return words[:: STRIDE_BYTES // WORD_BYTES].tobytes() + raw[-WORD_BYTES:].tobytes()
