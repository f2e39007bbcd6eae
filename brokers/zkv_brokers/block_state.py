"""What a server keeps of one block: values, which may be pinned, and what its rule remembers."""

from __future__ import annotations

from dataclasses import dataclass, field

from zkv.dtypes import Array


@dataclass(slots=True)
class Pinned:
    """One version of a block's values, and how many receivers still need it."""

    values: Array
    pins: int = 0


@dataclass(slots=True)
class BlockState:
    """A block on its server: stored values, for halves a wide master copy, state, counts."""

    current: Pinned
    master: Array | None
    rule: str = ""
    slots: tuple[Array, ...] = ()
    counts: dict[int, int] = field(default_factory=dict)
    """How many updates each key in the block has had."""
    changed: int = 0
    """The group's version in which some values of it became what they are."""
    kept: bool = False
    """Whether its arrays are being written down: an update makes new ones."""

    def part(self) -> None:
        """Leave master copy and state to who writes them down, if somebody does; go on with
        copies."""
        if self.kept:
            self.master = None if self.master is None else self.master.copy()
            self.slots, self.kept = tuple(slot.copy() for slot in self.slots), False
