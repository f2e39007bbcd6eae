"""Grants on demand: which keys of a version a worker has use for at present.

Part of the session. A worker that cannot hold the model asks servers for a layer's keys before it
uses them, and forgets them afterwards; it may want them again under the same grant. Knows no
frames.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from zkv.layout import Layout
from zkv_workers.assembly import Assembly


@dataclass(slots=True)
class Demand:
    """One grant on demand: what is wanted of it, and in `assembly` what of that is here."""

    assembly: Assembly
    layout: Layout
    _wanted: dict[int, set[int]] = field(default_factory=dict)
    """Keys that are wanted, by block: a block of several stays until none of them is."""

    def want(self, kids: Iterable[int], now: float) -> list[int]:
        """Have use for these keys, the first of them first; return the blocks that have to be
        asked for."""
        fresh: list[int] = []
        if not self.assembly.missing:
            self.assembly.touched = now
        for kid in kids:
            for block in self.layout.blocks_for([kid]):
                self._wanted.setdefault(block.bid, set()).add(kid)
                if block.bid not in self.assembly.blocks and block.bid not in self.assembly.missing:
                    fresh.append(block.bid)
                    self.assembly.missing.add(block.bid)
        return fresh

    def forget(self, kids: Iterable[int]) -> None:
        """Have no use for these keys any more."""
        gone = set(kids)
        for block in self.layout.blocks_for(gone):
            still = self._wanted.get(block.bid, set())
            still -= gone
            if not still:
                self._drop(block.bid)

    def _drop(self, bid: int) -> None:
        self._wanted.pop(bid, None)
        self.assembly.blocks.pop(bid, None)
        self.assembly.missing.discard(bid)

    def clear(self) -> None:
        """Have use for nothing any more: another batch begins under the same grant, or none."""
        for bid in list(self._wanted):
            self._drop(bid)
