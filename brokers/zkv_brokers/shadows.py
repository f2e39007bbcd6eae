"""What others were granted to send of blocks that have copies here, pinned until it has arrived.

If such a server is lost, its copy here sends what of it has not arrived. A worker tells those that
have copies what it has got, too (`Got`), so that no more is pinned here than where it is sent from.
Part of one server's shard; knows no sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from zkv import control as c
from zkv_brokers.store import Pinned

EARLY_MAX = 256
"""Grants whose values have arrived before the log has come to them here."""
KEPT_MAX = 4
"""Grants of one worker: it keeps values of the last two, and is granted one ahead of the log."""

Name = tuple[int, int]
"""Incarnation and grant, of the model: other values are asked for again when a server is lost."""


@dataclass(slots=True)
class _Kept:
    """A grant: the blocks whose values are pinned, and those that are made with a later update."""

    entry: c.Grant
    pinned: dict[int, tuple[int, Pinned]] = field(default_factory=dict)
    """By block: the server that was to send it, and the values."""
    to_come: dict[int, int] = field(default_factory=dict)
    """By block, that server."""


class Shadows:
    """All grants that others have not sent to the end, as far as is known here."""

    def __init__(self) -> None:
        self._kept: dict[Name, _Kept] = {}
        self._early: dict[Name, set[int]] = {}

    def keep(self, entry: c.Grant, bid: int, server: int, pinned: Pinned | None) -> None:
        """A server was granted to send a block; None: when the update to that version is made."""
        name = entry.incarnation, entry.grant
        if bid in self._early.get(name, ()):
            return
        if name not in self._kept:
            self._make_room(entry.incarnation)
        kept = self._kept.setdefault(name, _Kept(entry))
        if pinned is None:
            kept.to_come[bid] = server
        else:
            pinned.pins += 1
            kept.pinned[bid] = server, pinned

    def _make_room(self, incarnation: int) -> None:
        mine = sorted(name for name in self._kept if name[0] == incarnation)
        for name in mine[: max(0, len(mine) - KEPT_MAX + 1)]:
            self.drop(*name)

    def awaits(self, bid: int, version: int) -> bool:
        """Return whether a block was granted at this version before that was made."""
        kept = self._kept.values()
        return any(bid in one.to_come and one.entry.version == version for one in kept)

    def made(self, bid: int, version: int, pinned: Pinned) -> None:
        """A block has come to this version."""
        for kept in self._kept.values():
            if kept.entry.version == version and bid in kept.to_come:
                pinned.pins += 1
                kept.pinned[bid] = kept.to_come.pop(bid), pinned

    def got(self, incarnation: int, grant: int, bids: Iterable[int]) -> None:
        """The worker has these blocks."""
        name, kept = (incarnation, grant), self._kept.get((incarnation, grant))
        for bid in bids:
            if kept is not None and bid in kept.pinned:
                kept.pinned.pop(bid)[1].pins -= 1
            elif kept is not None and bid in kept.to_come:
                del kept.to_come[bid]
            else:
                self._early.setdefault(name, set()).add(bid)
        if len(self._early) > EARLY_MAX:
            del self._early[next(iter(self._early))]

    def done(self, incarnation: int, grant: int) -> None:
        """The worker has finished its batch: it asks for no more of a grant on demand."""
        kept = self._kept.get((incarnation, grant))
        if kept is not None and kept.entry.on_demand:
            self.drop(incarnation, grant)

    def drop(self, incarnation: int, grant: int) -> None:
        """The grant no longer counts."""
        self._early.pop((incarnation, grant), None)
        self._drop((incarnation, grant))

    def _drop(self, name: Name) -> None:
        kept = self._kept.pop(name, None)
        for _, pinned in () if kept is None else kept.pinned.values():
            pinned.pins -= 1

    def keep_only(self, members: set[int]) -> None:
        """Forget what was granted to others."""
        for name in [one for one in self._kept if one[0] not in members]:
            self._drop(name)
        self._early = {name: bids for name, bids in self._early.items() if name[0] in members}

    def forget(self, bids: Iterable[int]) -> None:
        """There are no copies of these blocks here any more."""
        gone = set(bids)
        for kept in self._kept.values():
            for bid in gone & kept.to_come.keys():
                del kept.to_come[bid]
            for bid in gone & kept.pinned.keys():
                kept.pinned.pop(bid)[1].pins -= 1

    def taken(self, server: int) -> Sequence[tuple[c.Grant, dict[int, Pinned], set[int]]]:
        """Give away what a lost server was to send, in the order of grants: what is here, still
        pinned, and the blocks that are not made yet."""
        found = []
        for _, kept in sorted(self._kept.items()):
            mine = {bid: one for bid, (of, one) in kept.pinned.items() if of == server}
            coming = {bid for bid, of in kept.to_come.items() if of == server}
            for bid in mine:
                del kept.pinned[bid]
            for bid in coming:
                del kept.to_come[bid]
            if mine or coming:
                found.append((kept.entry, mine, coming))
        return found
