"""What the contributions of an update say of one block, and their sum over the tree of rule 15.

The sum of frames that hold a few elements each is kept as these elements. Its bits are those of the
dense sum: what a sparse frame says is added to zeros, so that -0.0 is nowhere in such a sum, and
adding the +0.0 of an element that was not sent changes no bit. So each element is summed over the
same tree by the same additions, whether it stands in a dense array or beside others that were sent.
Knows no values that are trained, no rules, no log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np

from zkv.dtypes import Array, DType, widen
from zkv.errors import ProtocolError
from zkv.staleness import Staleness
from zkv.sums import tree_sum, weighted
from zkv.wire import BlockSpec, ContributionId, Segment
from zkv_codecs.backend import Backend
from zkv_codecs.feedback import Encoded
from zkv_codecs.plan import Plan
from zkv_codecs.signs import majority
from zkv_codecs.sparse import add_at


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """The weighted sum of several contributions to one block, as workers have added it up.

    `values` are wide; each of the contributions holds the same object.
    """

    values: Array
    of: frozenset[ContributionId]

    @property
    def nbytes(self) -> int:
        """Bytes for each of the contributions."""
        return self.values.nbytes // len(self.of)


Payload = Array | Encoded | Joined
"""What is kept of a pushed block: stored values, what a codec has made of them, or a sum that it is
in."""

FEW = {"numba": 12, "numpy": 32}
"""A sum stays sparse if all frames together hold at most this part of the block's elements, by the
kernels in use: 1/12, 1/32. Measured on a block of 262,144 elements: about there a commit of one or
two frames, dense sum and rule over all elements, takes as long; of eight, 1.5 times as long."""
MANY = 4
"""Where the rule wants all elements, so many frames: fewer are added into one dense array, and no
sparse sum that is made dense in the end is faster than that."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one contribution says of one block: its payload (None: no key of it), skipped keys."""

    weight: float
    payload: Payload | None
    skipped: frozenset[int]
    staleness: int = 0
    base: Array | None = None
    """The values that it was computed on, where delay compensation needs them."""


@dataclass(frozen=True, slots=True)
class SparseSum:
    """A flat array of `size` elements, all +0.0 but those at `positions` (ascending)."""

    positions: Array
    values: Array
    size: int

    def dense(self) -> Array:
        """Return it as an array."""
        whole = np.zeros(self.size, self.values.dtype)
        whole[self.positions] = self.values
        return whole

    def part(self, start: int, stop: int) -> SparseSum:
        """Return elements `[start, stop)`, with positions from `start`."""
        if (start, stop) == (0, self.size):
            return self
        low, high = np.searchsorted(self.positions, (start, stop))
        return SparseSum(self.positions[low:high] - start, self.values[low:high], stop - start)


Total = Array | SparseSum


@dataclass(slots=True)
class Aggregation:
    """How the shares of one block are added up."""

    block: BlockSpec
    dtype: DType
    mean: bool
    """Whether shares are weighted by their samples."""
    staleness: Staleness
    now: Array
    """The block's present values, wide: delay compensation begins there."""
    backend: Backend
    clock: Callable[[], float]
    decode_s: float = 0.0
    """Seconds by `clock` that it took to decode frames and to add them."""

    def total(self, shares: Sequence[Share], zeros_stay: bool) -> Total | None:
        """Return the weighted sum, not divided yet; None: no share has any key of the block.

        `zeros_stay` says that a sparse sum will be used as such, and never made dense.
        """
        shares = [self._counting(share) for share in shares]
        if any(isinstance(share.payload, Joined) for share in shares):
            return self._joined(shares)
        sparse = self._sparse(shares, 1 if zeros_stay else MANY)
        if sparse is not None:
            return sparse

        def add(at: int, total: Array) -> bool:
            share = shares[at]
            if not isinstance(share.payload, Encoded) or self._plainer(share):
                return False
            self._add(share.payload, self._factor(share), total)
            return True

        total = tree_sum(lambda at: self._term(shares[at]), len(shares), add)
        if total is None or not any(map(_votes, shares)):
            return total
        decided = majority(total, self.backend).astype(total.dtype, copy=False)
        # It is divided by the weights later on, as a sum is.
        return decided * decided.dtype.type(total_weight(shares)) if self.mean else decided

    def _joined(self, shares: Sequence[Share]) -> Total | None:
        """Return the sum where workers have added some up."""
        terms = apart(shares)
        return tree_sum(lambda at: self._term(terms[at]), len(terms))

    def _factor(self, share: Share) -> float:
        scale = self.staleness.factor(share.staleness) if self.dtype.floating else 1.0
        return (share.weight if self.mean else 1.0) * scale

    def _counting(self, share: Share) -> Share:
        """Return the share without its payload if it skips all keys of the block."""
        skips_all = share.skipped.issuperset(self.block.kids)
        return replace(share, payload=None) if skips_all else share

    def _skipped(self, share: Share) -> bool:
        """Return whether some keys of the block do not count, whatever was sent of them."""
        return not share.skipped.isdisjoint(self.block.kids)

    def _plainer(self, share: Share) -> bool:
        """Return whether more has to be done than to add what was sent."""
        return share.base is not None or self._skipped(share)

    def _add(self, sent: Encoded, factor: float, total: Array) -> None:
        began = self.clock()
        sent.chain.add(sent.packed, factor, total, self.backend)
        self.decode_s += self.clock() - began

    def _term(self, share: Share) -> Array | None:
        if share.payload is None:
            return None
        if isinstance(share.payload, Joined):
            return share.payload.values.copy()
        fresh = self._weighted(share, share.payload)
        for segment, start, stop in spans(self.block) if self._skipped(share) else ():
            if segment.kid in share.skipped:
                # Whatever was sent there. Adding -0.0 changes no bit of a sum (+0.0 would turn
                # -0.0 around), so that it is as if the key had a block of its own.
                fresh[start:stop] = -0.0
        return fresh

    def _weighted(self, share: Share, payload: Array | Encoded) -> Array:
        if isinstance(payload, Encoded) and payload.chain.sparse and share.base is None:
            fresh: Array = np.zeros(self.block.size, self.dtype.wide)
            self._add(payload, self._factor(share), fresh)
            return fresh
        wide = self._decoded(payload)
        if share.base is not None:
            then = widen(share.base, self.dtype)
            wide = self.staleness.compensated(wide, self.now, then)
        return weighted(wide, self._factor(share))

    def _decoded(self, payload: Array | Encoded) -> Array:
        if not isinstance(payload, Encoded):
            return widen(payload, self.dtype)
        began = self.clock()
        values = payload.chain.decode(payload.packed, self.backend).values
        wide = values.astype(self.dtype.wide, copy=False)
        self.decode_s += self.clock() - began
        return wide

    def _sparse(self, shares: Sequence[Share], frames_min: int) -> SparseSum | None:
        """Return the sum as the elements that were sent, if these are few; else None.

        It is made in arrays that have room for these elements and no others.
        """
        frames = [share.payload for share in shares if isinstance(share.payload, Encoded)]
        count = sum(frame.packed.count for frame in frames)
        few = count * FEW[self.backend.name] <= self.block.size
        if len(frames) < frames_min or not few or any(map(self._forbids_sparse, shares)):
            return None
        began = self.clock()
        positions, pieces = self._pieces(shares, count)

        def add(at: int, total: Array) -> bool:
            piece = pieces[at]
            if piece is not None:
                add_at(*piece, self._factor(shares[at]), total, self.backend)
            return True

        def term(at: int) -> Array | None:
            if pieces[at] is None:
                return None
            fresh: Array = np.zeros(positions.size, self.dtype.wide)
            add(at, fresh)
            return fresh

        total = tree_sum(term, len(shares), add)
        assert total is not None
        self.decode_s += self.clock() - began
        return SparseSum(positions, total, self.block.size)

    def _forbids_sparse(self, share: Share) -> bool:
        if share.payload is None:
            return False
        sparse = isinstance(share.payload, Encoded) and share.payload.chain.sparse
        return not sparse or _votes(share) or self._plainer(share)

    def _pieces(
        self, shares: Sequence[Share], count: int
    ) -> tuple[Array, list[tuple[Array, Array] | None]]:
        """Return all positions that were sent, and for each share its values, and where among
        these positions they belong."""
        chosen = [
            share.payload.chain.chosen(share.payload.packed, self.backend)
            if isinstance(share.payload, Encoded)
            else None
            for share in shares
        ]
        indices = np.concatenate([one[1] for one in chosen if one is not None])
        positions, slots = np.empty((2, count), np.uint32)
        merge = self.backend.family("sparse").merge
        found = merge(indices, self.block.size, positions, slots)
        pieces: list[tuple[Array, Array] | None] = []
        start = 0
        for one in chosen:
            stop = start + (0 if one is None else one[1].size)
            pieces.append(None if one is None else (one[0], slots[start:stop]))
            start = stop
        # NumPy indexes fastest with its own type.
        return positions[:found].astype(np.intp), pieces


def warm(chosen: Plan, backend: Backend) -> None:
    """Compile what sparse sums need beside the codecs themselves, if a plan has sparse codecs."""
    codecs = (chosen.codec, *(codec for _, codec in chosen.exceptions))
    if backend.name == "numba" and any(codec.chain.sparse for codec in codecs):
        indices = np.zeros(2, np.uint32)
        backend.family("sparse").merge(indices, 1, indices.copy(), indices.copy())


def apart(shares: Sequence[Share]) -> list[Share]:
    """Return the shares whose payloads are the terms of the sum: what workers have added up is one
    term, at the place of the first that is in it.

    Raises:
        ProtocolError: a sum has more or less in it than is to be counted.
    """
    found = Counter(id(share.payload) for share in shares if isinstance(share.payload, Joined))
    terms: list[Share] = []
    seen: set[int] = set()
    for share in shares:
        joined = share.payload
        if isinstance(joined, Joined):
            if found[id(joined)] != len(joined.of):
                raise ProtocolError(
                    f"{found[id(joined)]} contributions are counted of a sum that "
                    f"{len(joined.of)} are in"
                )
            if id(joined) in seen:
                continue
            seen.add(id(joined))
        terms.append(share)
    return terms


def _votes(share: Share) -> bool:
    return isinstance(share.payload, Encoded) and share.payload.chain.is_vote


def total_weight(shares: Sequence[Share]) -> float:
    """Return the samples in all these shares, summed in float64."""
    if len(shares) < 8:
        # NumPy adds so few one after the other, too; `sum` does more than that in later Pythons.
        return reduce(add, [share.weight for share in shares], 0.0)
    return float(np.sum(np.asarray([share.weight for share in shares], dtype=np.float64)))


def present_in(shares: Sequence[Share], kid: int) -> list[Share]:
    """Return the shares that hold a gradient for this key."""
    return [share for share in shares if share.payload is not None and kid not in share.skipped]


def spans(block: BlockSpec) -> Iterator[tuple[Segment, int, int]]:
    """Yield each segment of a block with its element range inside the block."""
    start = 0
    for segment in block.segments:
        stop = start + segment.stop - segment.start
        yield segment, start, stop
        start = stop
