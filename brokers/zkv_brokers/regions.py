"""Where the values of a key's blocks lie: next to each other, so that who reads them from memory
has the key in one piece."""

from __future__ import annotations

from dataclasses import dataclass, field

from zkv.dtypes import Array
from zkv.layout import Layout
from zkv.wire import BlockSpec
from zkv_brokers.memory import Memory


@dataclass(slots=True)
class _Region:
    """Room for the blocks of one key at one version; `free`: where those begin that have none."""

    version: int
    memory: Array
    free: dict[int, int]


@dataclass(slots=True)
class Regions:
    """Room for blocks of a server. Knows no values."""

    layout: Layout
    memory: Memory
    _open: dict[int, _Region] = field(default_factory=dict)
    """By key, the one that was begun last, until it is full."""

    def empty(self, block: BlockSpec, version: int) -> Array:
        """Return room for a block's values (flat, stored dtype) at a version: beside those of the
        key's other blocks here, if it has a key for itself. Asked for again, it is new room."""
        dtype = self.layout.dtype(block).stored
        if len(block.segments) != 1:
            return self.memory.empty(block.size, dtype)
        kid = block.segments[0].kid
        region = self._open.get(kid)
        if region is None or region.version != version or block.bid not in region.free:
            siblings = self._siblings(block)
            if len(siblings) == 1:
                return self.memory.empty(block.size, dtype)
            region = self._open[kid] = self._begun(siblings, version)
        start = region.free.pop(block.bid)
        if not region.free:
            del self._open[kid]
        return region.memory[start : start + block.size]

    def copy_of(self, block: BlockSpec, version: int, values: Array) -> Array:
        """Return a copy of a block's values, in such room."""
        copied = self.empty(block, version)
        copied[:] = values
        return copied

    def _siblings(self, block: BlockSpec) -> list[BlockSpec]:
        """Return the blocks that this key has here for itself, in the order of its elements."""
        kid = block.segments[0].kid
        known = (self.layout.blocks.get(bid) for bid in self.layout.blocks_of_key.get(kid, ()))
        here = [
            one
            for one in known
            if one is not None and one.server == block.server and len(one.segments) == 1
        ]
        return here if block in here else [block]

    def _begun(self, siblings: list[BlockSpec], version: int) -> _Region:
        free, size = {}, 0
        for one in siblings:
            free[one.bid] = size
            size += one.size
        return _Region(
            version, self.memory.empty(size, self.layout.dtype(siblings[0]).stored), free
        )
