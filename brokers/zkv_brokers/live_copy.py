"""A block of another server whose gradients come to this one too, and what is done to it there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from zkv import control as c
from zkv.dtypes import Array
from zkv.wire import BlockSpec
from zkv_brokers.bases import Bases
from zkv_brokers.commits import shares_in
from zkv_brokers.contributions import Open
from zkv_brokers.store import Store


@dataclass(slots=True)
class LiveCopy:
    """A block of another server whose gradients come here too."""

    block: BlockSpec
    since: int
    """The placement from which on gradients come here too."""
    placement: int = 0
    """What names the copy."""
    store: Store | None = None
    """What the copy is made in; None: the log has not said `Copy` yet."""
    bases: Bases = field(default_factory=Bases)
    source: c.ServerAt | None = None
    relay: str = ""
    index: int = 0
    asked_at: float | None = None
    asked: int = 0
    head: int = 0
    parts: dict[int, Array] = field(default_factory=dict)
    of: int = 0
    live: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """What the log has done to the block since, while its state is on its way."""

    def do(self, act: Callable[[], None]) -> None:
        """Do to the copy what the log does to its block, now or when its state is here."""
        if self.live:
            act()
        else:
            self.waiting.append(act)

    def clear(self) -> None:
        """Forget the copy; gradients go on coming here."""
        self.store, self.bases, self.live, self.of, self.head = None, Bases(), False, 0, 0
        self.parts.clear()
        self.waiting.clear()


def granted(store: Store, bases: Bases, block: BlockSpec, entry: c.Grant) -> None:
    """The owner is granted to send a block: do to the copy what that does to the block."""
    pinned = store.granted(block, entry.version)
    if store.settings.staleness.compensation:
        bases.add(entry.incarnation, entry.grant, {block.bid: pinned})


def squares_of(copy: LiveCopy, entry: c.Sum, made: Open) -> float:
    """Return the square sum of one contribution's part of a block."""
    assert copy.store is not None
    shares = shares_in(copy.block.bid, entry, [of_block(made, copy.block.bid)], copy.bases)
    return copy.store.square_sums(copy.block, shares, 0)


def of_block(held: Open, bid: int) -> Open:
    """Return what a contribution says of one block; the others' payloads may go."""
    payload = held.dense(bid)
    return Open(
        held.grant, held.weight, {} if payload is None else {bid: payload}, skipped=held.skipped
    )
