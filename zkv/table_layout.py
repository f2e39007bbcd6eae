"""The tables that exist, and the blocks that their parts lie in: a part of a `Layout`.

A table is no key: what handles keys, and the blocks that these lie in, knows nothing of it. Its
blocks have no segments. What is pushed to one is cut into pieces; a place is a block's number in
its low bits, and above them which piece. Of an ordinary block it is the number alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zkv.errors import ProtocolError
from zkv.tables import problem_of
from zkv.wire import BlockSpec, TableEntry

PLACE_BITS = 40


def bid_of(place: int) -> int:
    """Return the number of the block that a place is in."""
    return place & ((1 << PLACE_BITS) - 1)


def place_of(bid: int, piece: int) -> int:
    """Return the place of one piece of what is pushed to a table's block."""
    return piece << PLACE_BITS | bid


@dataclass(slots=True)
class TableLayout:
    """Tables by number, and (number, part) by the number of their blocks."""

    entries: dict[int, TableEntry] = field(default_factory=dict)
    of_block: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.entries)

    def copy(self) -> TableLayout:
        """Return one that stays as it is."""
        return TableLayout(dict(self.entries), dict(self.of_block))

    def check(self, entries: Sequence[TableEntry], blocks: Mapping[int, BlockSpec]) -> None:
        """Check what a peer says of tables; `blocks` are all that there are then, by number.

        Raises:
            ProtocolError: such a table cannot be, or not there.
        """
        for entry in entries:
            bids = set(entry.bids)
            if not bids or not bids <= blocks.keys() or len(bids) < len(entry.bids):
                raise ProtocolError(f"table {entry.spec.key!r} has no parts in blocks {entry.bids}")
            if any(blocks[bid].segments for bid in bids) or problem_of(entry.spec):
                raise ProtocolError(f"there is no such table: {entry}")

    def add(self, entries: Sequence[TableEntry]) -> None:
        """Add tables; adding them again changes nothing."""
        for entry in entries:
            self.entries[entry.kid] = entry
            self.of_block.update((bid, (entry.kid, part)) for part, bid in enumerate(entry.bids))

    def remove(self, kids: Iterable[int]) -> list[int]:
        """Forget those of these numbers that are tables; return the numbers of their blocks."""
        gone = [self.entries.pop(kid) for kid in kids if kid in self.entries]
        bids = [bid for entry in gone for bid in entry.bids]
        for bid in bids:
            del self.of_block[bid]
        return bids

    def clear(self) -> None:
        """Forget everything."""
        self.entries.clear()
        self.of_block.clear()

    def find(self, key: str | int) -> TableEntry | None:
        """Return the table of this name; None: there is none."""
        # Another thread may learn of tables meanwhile.
        return next((one for one in list(self.entries.values()) if one.spec.key == key), None)

    def names(self) -> list[str | int]:
        """Return the names of all tables."""
        return [one.spec.key for one in self.entries.values()]
