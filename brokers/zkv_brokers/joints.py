"""Sums that workers have made of their contributions, on one server (`zkv.topology`).

Such a sum stands for the same block of all contributions that are in it, and each of them holds it
as its own; so nothing else has to know of it, but for the sum at a commit. The log takes it apart
again where the update will be another one (`Apart`). Part of one server's shard; knows no sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import DTYPES, Array, all_finite
from zkv.layout import Layout
from zkv.wire import MODEL, BlockSpec, ContributionId
from zkv_brokers.aggregates import Joined
from zkv_brokers.contributions import Contributions, Open
from zkv_brokers.shard_events import ToBroker
from zkv_brokers.streaming import Streaming
from zkv_codecs.frames import aligned


@dataclass(slots=True)
class Joints:
    """The sums of the update that is being made. `layout` and `contributions` are the shard's."""

    layout: Layout
    contributions: Contributions
    version: int = 0
    """That the update leads to which the last sums were for."""
    senders: dict[int, dict[int, int]] = field(default_factory=dict)
    """By block, for each worker that has part in a sum, who has sent that. (incarnations)"""
    _apart: set[tuple[int, int]] = field(default_factory=set)
    """(incarnation, grant) of what has to come by itself."""

    def take(
        self,
        message: d.Push,
        payload: Array,
        members: set[int],
        streaming: Streaming,
        make: Callable[[Sequence[BlockSpec]], None],
        report: Callable[[ContributionId, Open], None],
        ack: Callable[[ContributionId, int], None],
    ) -> list[ToBroker]:
        """Take in what workers have added up of one block; return what the broker is told.

        `make` makes blocks for which all is here, `report` reports what is held, and `ack` gives a
        receipt.
        """
        if message.bid in self.layout.blocks:
            ack(message.contribution, -2 - message.bid)
        if streaming.version != self.version:
            self.version = streaming.version
            self.senders.clear()
        found = self.put(message, payload, members, streaming.expected)
        if isinstance(found, str):
            return [ToBroker(c.Unsound(message.contribution, message.grant, found))]
        # All of them are marked before a block is made: it takes all that are expected.
        if any([streaming.begun(name, held) for name, held in found]):
            make([self.layout.blocks[message.bid]])
        for name, held in found:
            report(name, held)
        return []

    def put(
        self,
        message: d.Push,
        payload: Array,
        members: set[int],
        expected: Sequence[c.Expected],
    ) -> list[tuple[ContributionId, Open]] | str:
        """Take a sum in and return the contributions that are in it, or why it is of no use.

        None are returned if it comes too late to matter. Only of those that are `expected` may
        others send sums.
        """
        parts = message.of or ()
        if any(self._is_late(part, members) for part in parts):
            return []
        known = {(one.incarnation, one.grant) for one in expected}
        if any((part.contribution.incarnation, part.grant) not in known for part in parts):
            return f"the sum of block {message.bid} is for no update that the log foresees"
        block = self.layout.blocks.get(message.bid)
        if block is None or not block.segments or not parts:
            return f"there is no block {message.bid} here, or nothing is in its sum"
        dtype = self.layout.dtype(block)
        if payload.nbytes != block.size * dtype.wide.itemsize:
            return f"the sum of block {block.bid} has {payload.nbytes} bytes"
        values = aligned(payload).view(dtype.wide)
        nan = self.layout.entries[block.segments[0].kid].spec.allow_nan
        if not dtype.floating:
            return f"block {block.bid} is of {dtype.name}, which comes one by one"
        if not nan and not all_finite(values, DTYPES[dtype.wide.name]):
            return f"the sum of block {block.bid} has NaN or Inf"
        names = frozenset(part.contribution for part in parts)
        held = [self.contributions.at(part.contribution, part.grant) for part in parts]
        pairs = list(zip(held, parts, strict=True))
        if len(names) < len(parts) or any(_contradicts(*pair, block.bid) for pair in pairs):
            return f"the sum of block {block.bid} is not made of what its workers have told"
        found = [one.payloads.get(block.bid) for one in held]
        if any(one is not None for one in found):
            same = isinstance(found[0], Joined) and found[0].of == names
            return [] if same else f"block {block.bid} has come in two sums"
        joined = Joined(values, names)
        for one, part in pairs:
            one.payloads[block.bid] = joined
            one.declared[block.bid] = part.weight
        sender = message.contribution.incarnation
        senders = self.senders.setdefault(block.bid, {})
        senders.update({name.incarnation: sender for name in names})
        return [(part.contribution, one) for one, part in pairs]

    def _is_late(self, part: d.Addend, members: set[int]) -> bool:
        """Whether a contribution is settled, or comes by itself, or is of nobody any more."""
        name = part.contribution
        return (
            name.incarnation not in members
            or name.group != MODEL
            or (name.incarnation, part.grant) in self._apart
            or self.contributions.is_settled(name, part.grant)
        )

    def take_apart(
        self, entry: c.Apart, to_report: Sequence[tuple[ContributionId, int]]
    ) -> list[tuple[ContributionId, int]]:
        """Forget the sums of these contributions, and what was reported of them.

        Return what is to be reported instead of `to_report`, each with its grant: what is said from
        here on has to be true behind this entry.
        """
        self._apart = {
            (incarnation, grant)
            for incarnation, grant in self._apart
            if not self.contributions.is_settled(ContributionId(incarnation, MODEL, 0), grant)
        } | {(one.incarnation, one.grant) for one in entry.expected}
        self.senders.clear()
        found = [
            (name, held)
            for name, held in self.contributions.open.items()
            if (name.incarnation, held.grant) in self._apart and name.group == MODEL
        ]
        for _, held in found:
            for bid in [b for b, one in held.payloads.items() if isinstance(one, Joined)]:
                del held.payloads[bid], held.declared[bid]
            held.reported = held.complete and not held.void
        names = {name for name, _ in found}
        kept = [one for one in to_report if one[0] not in names]
        return kept + [(name, held.grant) for name, held in found if held.reported]

    def is_handed_on(self, version: int, bid: int, incarnation: int) -> bool:
        """Return whether another worker hands a block's values of this version on to this one."""
        sender = self.senders.get(bid, {}).get(incarnation)
        return version == self.version and sender is not None and sender != incarnation


def _contradicts(held: Open, part: d.Addend, bid: int) -> bool:
    """Whether a contribution is not what a sum says of it."""
    if held.grant != part.grant or held.void:
        return True
    return held.bids is not None and (bid not in held.bids or held.weight != part.weight)
