"""One grant whose blocks are coming in. Part of the session."""

from __future__ import annotations

from dataclasses import dataclass, field

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array


@dataclass(slots=True)
class Assembly:
    """A grant whose blocks are coming in."""

    granted: c.Granted
    missing: set[int]
    touched: float
    since: float
    """When it was granted."""
    homes: dict[int, int]
    """The servers that send it, by block: those that owned them when it was granted, or have taken
    over from them since."""
    index: int = 0
    """That of the log at which those know that they have to send it."""
    blocks: dict[int, Array] = field(default_factory=dict)
    parts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    useless: set[int] = field(default_factory=set)
    """Blocks that came in a form that is of no use here: they are asked for as plain values."""
    refused: set[int] = field(default_factory=set)
    """Those that were not asked for since."""
    alike: dict[int, d.Block] = field(default_factory=dict)
    """What says that a block is that of an earlier grant, which is on its way itself."""

    @property
    def complete(self) -> bool:
        """Whether every block is here; of a grant on demand never: a part of it is wanted."""
        return not (self.missing or self.granted.on_demand)

    def put(self, bid: int, values: Array, now: float) -> None:
        """A block is here."""
        self.blocks[bid] = values
        self.missing.discard(bid)
        self.alike.pop(bid, None)
        self.touched = now

    def refuse(self, bid: int) -> bool:
        """A block has come in a form that is of no use; return whether it is the first time."""
        first = bid not in self.useless
        if first:
            self.useless.add(bid)
            self.refused.add(bid)
        return first

    def put_alike(self, message: d.Block, earlier: Assembly | None, now: float) -> bool:
        """A block is that of an earlier grant (None: it is not known any more); return whether it
        is here now."""
        bid = message.bid
        if earlier is not None and bid in earlier.blocks:
            self.put(bid, earlier.blocks[bid], now)
            return True
        if earlier is not None and bid in earlier.missing:
            self.alike[bid], self.touched = message, now
        else:
            self.refuse(bid)
        return False

    def lose(self, group: int, grant: int) -> None:
        """An earlier grant no longer counts: what waits for its blocks has to be asked for."""
        for bid, message in list(self.alike.items()):
            if (message.group, message.like) == (group, grant):
                self.refuse(bid)


def coded(message: d.Block) -> bool:
    """Return whether a block is not its stored values as they are."""
    there = message.codec != "none" or message.form is not None
    return there or message.base >= 0 or message.like >= 0
