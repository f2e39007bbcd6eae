"""Contributions that a server holds and has not settled: what has come in, and what is still
missing.

A contribution is held when its `Done` and all the blocks that it names are here. What was settled
is remembered as a high-water mark for each (incarnation, group), with the few settled grants above
it, so that repeats are answered and dropped for all time in constant memory. Knows no sockets.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from zkv.marks import Marks
from zkv.wire import NO_BATCH, ContributionId
from zkv_brokers.aggregates import Payload, Share
from zkv_brokers.rows import PushedRows


@dataclass(slots=True)
class Open:
    """One contribution on its way to being held."""

    grant: int
    weight: float = 0.0
    payloads: dict[int, Payload | PushedRows] = field(default_factory=dict)
    """By block, or by place for what is pushed to tables."""
    declared: dict[int, float] = field(default_factory=dict)
    """The weight, by block, that came with those that skip no key."""
    unseen: set[int] = field(default_factory=set)
    """Blocks whose values were not looked at yet: before they are, nothing is said of them."""
    bids: frozenset[int] | None = None
    """The blocks that `Done` names; None until it has come."""
    skipped: frozenset[int] = frozenset()
    reported: bool = False
    void: bool = False

    @property
    def complete(self) -> bool:
        """Whether all that the contribution has for this server is here."""
        return self.bids is not None and self.bids <= self.payloads.keys()

    def dense(self, bid: int) -> Payload | None:
        """Return what is here of a block that is of no table."""
        payload = self.payloads.get(bid)
        assert not isinstance(payload, PushedRows)
        return payload

    def share(self, bid: int) -> Share | None:
        """Return what is said of one block; None: that is not known yet."""
        payload = self.dense(bid)
        if self.bids is not None:
            if payload is None and bid in self.bids:
                return None
            return Share(self.weight, payload, self.skipped)
        if payload is None or bid not in self.declared:
            return None
        return Share(self.declared[bid], payload, frozenset())


class Contributions:
    """All open contributions of one server, and the marks of what was settled."""

    def __init__(self) -> None:
        self.open: dict[ContributionId, Open] = {}
        self._marks: dict[tuple[int, int], Marks] = {}
        self._dropped: dict[tuple[int, int, int], set[int]] = {}

    def is_settled(self, contribution: ContributionId, grant: int) -> bool:
        """Return whether frames of this contribution are too late to matter."""
        owner = (contribution.incarnation, contribution.group)
        marks = self._marks.get(owner)
        if marks is not None and grant in marks:
            return True
        return contribution.batch in self._dropped.get((*owner, grant), ())

    def at(self, contribution: ContributionId, grant: int) -> Open:
        """Return the open contribution, made anew if this is the first of it."""
        return self.open.setdefault(contribution, Open(grant))

    def settle(self, contribution: ContributionId) -> None:
        """Drop a committed contribution and refuse whatever still comes of its grant."""
        held = self.open.pop(contribution, None)
        if held is not None:
            self._mark(contribution.incarnation, contribution.group, held.grant)

    def discard(self, incarnation: int, group: int, grant: int, batch: int) -> None:
        """Drop one batch of a grant, or with `NO_BATCH` all of it, for good."""
        for name in [
            name
            for name, held in self.open.items()
            if (name.incarnation, name.group, held.grant) == (incarnation, group, grant)
            and batch in (NO_BATCH, name.batch)
        ]:
            del self.open[name]
        if batch == NO_BATCH:
            self._mark(incarnation, group, grant)
        else:
            self._dropped.setdefault((incarnation, group, grant), set()).add(batch)

    def marks_of(self, group: int) -> list[tuple[int, Marks]]:
        """Return (incarnation, settled grants) of one group."""
        return [(who, marks) for (who, of), marks in self._marks.items() if of == group]

    def know(self, group: int, settled: Mapping[int, Marks]) -> None:
        """Take in which grants of a group are settled, by incarnation, as another server knows."""
        for who, marks in settled.items():
            self._marks.setdefault((who, group), Marks()).join(marks)

    def strip(self, bids: Set[int]) -> list[ContributionId]:
        """Drop these blocks, which are held elsewhere now, of all that is open; return what."""
        found = []
        for name, held in self.open.items():
            for bid in bids & held.payloads.keys():
                del held.payloads[bid]
                held.declared.pop(bid, None)
                held.unseen.discard(bid)
            if held.bids is not None and held.bids & bids:
                held.bids -= bids
            found.append(name)
        return found

    def _mark(self, incarnation: int, group: int, grant: int) -> None:
        self._marks.setdefault((incarnation, group), Marks()).settle(grant)
        self._dropped.pop((incarnation, group, grant), None)

    def keep_only(self, members: set[int], kept: set[ContributionId]) -> None:
        """Drop what departed incarnations left behind, but for contributions that still count."""
        for name in [n for n in self.open if n.incarnation not in members and n not in kept]:
            del self.open[name]
        needed = members | {name.incarnation for name in kept}
        self._marks = {owner: marks for owner, marks in self._marks.items() if owner[0] in needed}
        self._dropped = {key: batches for key, batches in self._dropped.items() if key[0] in needed}

    @property
    def bytes_held(self) -> int:
        """Bytes of gradients that wait for their update."""
        return sum(
            payload.nbytes for held in self.open.values() for payload in held.payloads.values()
        )
