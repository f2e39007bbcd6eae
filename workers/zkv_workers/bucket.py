"""A block that several keys share, while their gradients come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zkv.dtypes import Array
from zkv.wire import BlockSpec
from zkv_workers import staging


class Bucket:
    """The values of a block (flat, stored dtype), zero where a key is missing.

    `home`: memory of the size of the block, where some keys' gradients may lie as they do in it.
    If all of them do, nothing is copied. It is the caller's, and nothing is written to it.
    """

    def __init__(
        self,
        block: BlockSpec,
        dtype: Any,
        empty: Callable[[int, Any], Array],
        home: Array | None = None,
    ) -> None:
        self.missing = set(block.kids)
        self.staged: list[staging.Staged] = []
        self.spans = ranges(block)
        self._size, self._dtype, self._empty = block.size, dtype, empty
        self._home = home
        self.values = self._zeros() if home is None else home

    def _zeros(self) -> Array:
        values = self._empty(self._size, self._dtype)
        values[:] = 0
        return values

    @property
    def lent(self) -> bool:
        """Whether the values are the caller's own memory."""
        return self.values is self._home

    def take(self, kid: int, flat: Array | staging.Staged) -> None:
        """Take a key's gradient in."""
        start, stop = self.spans[kid]
        if isinstance(flat, staging.Staged):
            self.copy()
            self.staged.append(flat)
        elif not self.lent or flat.ctypes.data != self.values[start:stop].ctypes.data:
            self.copy()
            self.values[start:stop] = flat
        self.missing.discard(kid)

    def copy(self) -> None:
        """From here on the values are ours: what has come is copied."""
        if self._home is None or not self.lent:
            return
        self.values = self._zeros()
        for kid, (start, stop) in self.spans.items():
            if kid not in self.missing:
                self.values[start:stop] = self._home[start:stop]


def ranges(block: BlockSpec) -> dict[int, tuple[int, int]]:
    """Return each key's element range inside a bucket."""
    found = {}
    start = 0
    for segment in block.segments:
        stop = start + segment.stop - segment.start
        found[segment.kid] = (start, stop)
        start = stop
    return found
