"""One update as one member sees it that adds gradients up with others: sums come in, sums go out.

Pure: it knows routes and arrays, and no messages on their way, no windows and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array, widen
from zkv.layout import Layout
from zkv.sums import tree_sum, weighted
from zkv.topology import Member, Route, routes, topology
from zkv.wire import MODEL, BlockSpec


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """The weighted sum of some contributions to a block, wide; None: none of them has the block."""

    values: Array | None
    of: tuple[d.Addend, ...] = ()
    index: int = 0
    """The log index that servers must have come to before they use it: the latest that one of these
    workers knows of, as it may have changed a setting."""
    own: bool = False
    """Whether the array may be added into."""


def own_term(
    layout: Layout,
    block: BlockSpec,
    stored: Array,
    addend: d.Addend,
    skipped: Sequence[int],
    index: int,
) -> Term:
    """Return what a member's own gradient of a block is to the sum.

    `stored` is flat and of the block's stored dtype; of skipped keys nothing counts.
    """
    wide = widen(stored, layout.dtype(block))
    values = weighted(wide, addend.weight if layout.averages(block) else 1.0)
    start, absent = 0, set(skipped)
    for segment in block.segments if absent else ():
        stop = start + segment.stop - segment.start
        if segment.kid in absent:
            # Adding -0.0 changes no bit of a sum.
            values[start:stop] = -0.0
        start = stop
    return Term(values, (addend,), index, own=True)


@dataclass(slots=True)
class Round:
    """The sums of one update, at the member `me`."""

    told: c.Together
    me: int
    """This member's number."""
    routes: dict[int, Route]
    companions: dict[int, c.Companion]
    """The members by number."""
    _terms: dict[int, dict[int, Term]] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)

    @staticmethod
    def begin(told: c.Together, incarnation: int, layout: Layout) -> Round:
        """Return the update that the broker tells of.

        Raises:
            ValueError: this worker is none of its members, or there is no such topology.
        """
        members = [Member(one.number, one.host) for one in told.members]
        me = next((one.number for one in told.members if one.incarnation == incarnation), -1)
        sizes = {
            block.bid: block.size * layout.dtype(block).wide.itemsize
            for block in layout.blocks_in(MODEL)
            if block.segments
        }
        made = routes(topology(told.topology), members, me, sizes)
        return Round(told, me, made, {one.number: one for one in told.members})

    @property
    def version(self) -> int:
        """The version that the update leads to."""
        return self.told.version

    def is_in(self, incarnation: int, grant: int) -> bool:
        """Return whether what this worker brings under this grant is a part of the update."""
        return any((o.incarnation, o.grant) == (incarnation, grant) for o in self.told.members)

    def number(self, incarnation: int) -> int:
        """Return a member's number; -1: it is none."""
        return next((n for n, o in self.companions.items() if o.incarnation == incarnation), -1)

    def put(self, bid: int, number: int, term: Term) -> Term | None:
        """Take a member's sum in, its own included; return what all that come here add up to, once.

        What comes twice, or is not due here, changes nothing.
        """
        route = self.routes.get(bid)
        if route is None or number not in route.sources or bid in self._done:
            return None
        terms = self._terms.setdefault(bid, {})
        if number in terms:
            return None
        terms[number] = term
        if len(terms) < len(route.sources):
            return None
        del self._terms[bid]
        self._done.add(bid)
        return total([terms[one] for one in route.sources])


def total(terms: Sequence[Term]) -> Term:
    """Return the sum of sums over the fixed tree of `zkv.sums`."""
    if len(terms) == 1:
        return terms[0]

    def values(at: int) -> Array | None:
        found = terms[at].values
        return found if found is None or terms[at].own else found.copy()

    of = tuple(addend for term in terms for addend in term.of)
    index = max(term.index for term in terms)
    return Term(tree_sum(values, len(terms)), of, index, own=True)
