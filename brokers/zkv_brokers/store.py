"""The values that one server holds: blocks, optimizer state, and how a commit changes them.

A block's values are immutable while somebody still has to receive them (rule 3): a commit then
writes a new array, and only writes in place where no version is pinned. Knows no sockets and no
log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from zkv.dtypes import Array, DType, narrow, widen
from zkv.layout import Layout
from zkv.optim import init_slots, square_sum, square_sum_of, stays_where_zero, update
from zkv.optimizer_spec import OptimizerSpec
from zkv.sums import divided
from zkv.wire import BlockSpec
from zkv_brokers.aggregates import (
    Aggregation,
    Share,
    SparseSum,
    Total,
    spans,
)
from zkv_brokers.block_state import BlockState as BlockState
from zkv_brokers.block_state import Pinned as Pinned
from zkv_brokers.dense import Dense, Run
from zkv_brokers.key_rules import KeyRules
from zkv_brokers.memory import Memory
from zkv_brokers.optimizers_in_force import Settings as Settings
from zkv_brokers.regions import Regions
from zkv_brokers.views import Views
from zkv_codecs.backend import fastest


def _whole(spec: OptimizerSpec) -> float:
    return 1.0


class Store:
    """The blocks of one server. `layout` is shared with the shard that drives this.

    `clock` gives seconds, and is read for figures alone: nothing is decided by it.
    """

    def __init__(
        self,
        layout: Layout,
        clock: Callable[[], float] = lambda: 0.0,
        memory: Memory | None = None,
    ) -> None:
        self.layout = layout
        self.memory = Memory() if memory is None else memory
        self._regions = Regions(layout, self.memory)
        self.clock = clock
        self.decode_s: dict[int, float] = {}
        """Seconds spent on decoding what workers have pushed, by block."""
        self.blocks: dict[int, BlockState] = {}
        self.backend = fastest()
        """The kernels of codecs."""
        self.views = Views(layout, self.backend)
        """What grants of batches send, where that is not the values themselves."""
        self.rules = KeyRules(layout)

    @property
    def settings(self) -> Settings:
        """The optimizers in force."""
        return self.rules.settings

    def configure(self, settings: Settings) -> None:
        """Use these optimizers from the next commit on."""
        self.rules.settings = settings
        self.rules.forget()

    def put(self, block: BlockSpec, payload: Array) -> None:
        """Set a block's first values (flat, stored dtype), which are copied."""
        dtype = self.layout.dtype(block)
        master = widen(payload, dtype).copy() if dtype.half else None
        self.blocks[block.bid] = BlockState(
            Pinned(self._regions.copy_of(block, 0, payload)),
            master,
            counts=dict.fromkeys(block.kids, 0),
        )

    def split_out(self, kid: int, before: BlockSpec, bid: int) -> None:
        """Move a key's values out of bucket `before` into block `bid`: it trains alone now."""
        state = self.blocks[before.bid]
        (span,) = [(start, stop) for segment, start, stop in spans(before) if segment.kid == kid]
        rest = [slice(start, stop) for segment, start, stop in spans(before) if segment.kid != kid]

        def taken(array: Array) -> Array:
            return array[span[0] : span[1]].copy()

        def left(array: Array) -> Array:
            return np.concatenate([array[cut] for cut in rest]) if rest else array[:0].copy()

        self.blocks[bid] = BlockState(
            Pinned(taken(state.current.values)),
            None if state.master is None else taken(state.master),
            state.rule,
            tuple(taken(slot) for slot in state.slots),
            {kid: state.counts.pop(kid)},
        )
        state.current = Pinned(left(state.current.values))
        state.master = None if state.master is None else left(state.master)
        state.slots = tuple(left(slot) for slot in state.slots)
        self.views.cut(before.bid, state.current.values)
        if before.bid in self.decode_s:
            moved = (span[1] - span[0]) / max(1, before.size) * self.decode_s[before.bid]
            self.decode_s[before.bid] -= moved
            self.decode_s[bid] = moved

    def drop(self, bid: int) -> None:
        """Forget a block."""
        self.blocks.pop(bid, None)
        self.decode_s.pop(bid, None)
        self.views.drop(bid)

    def granted(self, block: BlockSpec, version: int) -> Pinned:
        """Return what a batch that is granted at this version of the model computes on."""
        current = self.blocks[block.bid].current
        view = self.views.at(block, current.values, version)
        return current if view is None else Pinned(view.values)

    def aggregate(
        self, block: BlockSpec, shares: Sequence[Share], *, zeros_stay: bool = False
    ) -> Total | None:
        """Return the reduced gradient of a block in its wide dtype, or None if all skip all of it.

        The weighted sum over the fixed tree of rule 15, not divided yet; it may be sparse, and is
        so sooner if the rules let elements alone whose gradient is zero (`zeros_stay`). All keys of
        a block have the same `reduce`, by the way that buckets are made.
        """
        dtype = self.layout.dtype(block)
        aggregation = Aggregation(
            block,
            dtype,
            self.layout.averages(block),
            self.settings.staleness,
            self._wide_values(block, dtype),
            self.backend,
            self.clock,
        )
        total = aggregation.total(shares, zeros_stay)
        self.decoded(block.bid, aggregation.decode_s)
        return total

    def decoded(self, bid: int, seconds: float) -> None:
        """Note what it took to decode frames of a block."""
        if seconds:
            self.decode_s[bid] = self.decode_s.get(bid, 0.0) + seconds

    def _wide_values(self, block: BlockSpec, dtype: DType) -> Array:
        state = self.blocks[block.bid]
        return state.master if state.master is not None else widen(state.current.values, dtype)

    def square_sums(self, block: BlockSpec, shares: Sequence[Share], version: int) -> float:
        """Return Σ g² (float64) of the reduced gradient, over the keys that will be updated."""
        total = self.aggregate(block, shares)
        if total is None:
            return 0.0
        found = 0.0
        for run in self.rules.runs(block, shares, version, self.blocks[block.bid]):
            if isinstance(total, SparseSum):
                part = total.part(run.start, run.stop)
                values = divided(part.values, run.divisor)
                found += square_sum_of(part.positions, values, part.size)
            else:
                found += square_sum(divided(total[run.start : run.stop], run.divisor))
        return found

    def commit(
        self,
        block: BlockSpec,
        shares: Sequence[Share],
        version: int,
        scale: Callable[[OptimizerSpec], float],
    ) -> bool:
        """Apply one update to a block; `version` is the model's before it.

        Return whether any key had an update. `scale(spec)` is the factor of global-norm clipping
        (1.0 for none).
        """
        runs = list(self.rules.runs(block, shares, version, self.blocks[block.bid]))
        if self._commit_dense(block, shares, runs, version, scale) is not None:
            return True
        zeros_stay = all(stays_where_zero(run.rule) for run in runs)
        total = self.aggregate(block, shares, zeros_stay=zeros_stay)
        if total is None or not runs:
            return False
        dtype = self.layout.dtype(block)
        state = self.blocks[block.bid]
        self._prepare(state, runs, dtype)
        state.changed = version + 1
        if self._is_kept(state):
            state.current = Pinned(self._regions.copy_of(block, version + 1, state.current.values))
        values = state.current.values
        factor = scale(self.rules.spec_for(block.segments[0].kid))
        for run in runs:
            # What is NaN or infinite times zero is not zero.
            zeros_stay = stays_where_zero(run.rule) and math.isfinite(factor)
            where, sums = run.of(total, zeros_stay=zeros_stay)
            gradient = divided(sums, run.divisor)
            if factor != 1.0:
                gradient = gradient * gradient.dtype.type(factor)
            self._apply(state, values, where, gradient, run, dtype)
        return True

    def _is_kept(self, state: BlockState) -> bool:
        """Return whether somebody still needs a block's values as they are."""
        return state.current.pins > 0 or self.memory.is_lent(state.current.values)

    def _commit_dense(
        self,
        block: BlockSpec,
        shares: Sequence[Share],
        runs: Sequence[Run],
        version: int,
        scale: Callable[[OptimizerSpec], float],
        *,
        fresh: bool = False,
    ) -> bool | None:
        """Apply an update of contributions that came as they are (see `commit`) and return whether
        all of it is finite; None: it is not one. `fresh`: in arrays of its own."""
        dense, state = self._dense(block, shares, runs), self.blocks[block.bid]
        if dense is None:
            return None
        self._prepare(state, runs, self.layout.dtype(block))
        values, slots = state.current.values, state.slots
        fresh_values = fresh or self._is_kept(state)
        out = self._regions.empty(block, version + 1) if fresh_values else values
        slots_out = tuple(np.empty_like(slot) for slot in slots) if fresh else slots
        factor = scale(self.rules.spec_for(block.segments[0].kid))
        finite = dense.apply(runs, factor, (values, slots), (out, slots_out))
        state.slots, state.changed = slots_out, version + 1
        if fresh_values:
            state.current = Pinned(out)
        return finite

    def sums_in_one_go(self, block: BlockSpec) -> bool:
        """Return whether there are kernels for contributions to a block that came as they are."""
        return self.backend.name == "numba" and self.layout.dtype(block).name == "float32"

    def _dense(
        self, block: BlockSpec, shares: Sequence[Share], runs: Sequence[Run]
    ) -> Dense | None:
        if not self.sums_in_one_go(block):
            return None
        if sum(run.stop - run.start for run in runs) != block.size:
            return None
        mean, staleness = self.layout.averages(block), self.settings.staleness
        factors = [
            (share.weight if mean else 1.0) * staleness.factor(share.staleness) for share in shares
        ]
        return Dense.of(shares, block.kids, factors)

    def ahead(
        self, block: BlockSpec, shares: Sequence[Share], version: int
    ) -> tuple[BlockState, bool]:
        """Return what a block will be after an update (see `commit`), in arrays of its own, and
        whether that is known to be finite, and with it all that it is made of."""
        now = self.blocks[block.bid]
        runs, counts = list(self.rules.runs(block, shares, version, now)), dict(now.counts)
        state = BlockState(now.current, now.master, now.rule, now.slots, counts, now.changed)
        self.blocks[block.bid] = state
        try:
            finite = self._commit_dense(block, shares, runs, version, _whole, fresh=True)
            if finite is not None:
                self.count(block, shares)
                return state, finite
        finally:
            self.blocks[block.bid] = now
        self.blocks[block.bid] = BlockState(
            Pinned(self._regions.copy_of(block, version + 1, now.current.values)),
            None if now.master is None else now.master.copy(),
            now.rule,
            tuple(slot.copy() for slot in now.slots),
            dict(now.counts),
        )
        try:
            if self.commit(block, shares, version, _whole):
                self.count(block, shares)
            return self.blocks[block.bid], False
        finally:
            self.blocks[block.bid] = now

    def _apply(
        self,
        state: BlockState,
        values: Array,
        where: slice | Array,
        gradient: Array,
        run: Run,
        dtype: DType,
    ) -> None:
        """Update the elements at `where`, in place: a slice, or positions."""
        if run.rule.name == "assign":
            values[where] = narrow(gradient, dtype)
            if state.master is not None:
                state.master[where] = gradient
            return
        target = values if state.master is None else state.master
        part, slots = target[where], tuple(slot[where] for slot in state.slots)
        update(run.rule, part, slots, gradient, lr=run.lr, count=run.count, out=(part, slots))
        if not isinstance(where, slice):
            # Positions gave copies; slices are views, and done.
            target[where] = part
            for slot, fresh in zip(state.slots, slots, strict=True):
                slot[where] = fresh
        if state.master is not None:
            values[where] = narrow(part, dtype)

    def _prepare(self, state: BlockState, runs: Sequence[Run], dtype: DType) -> None:
        """Make fresh state where the rule is not the one that the state belongs to."""
        for run in runs:
            if state.rule != run.rule.name:
                if state.rule:
                    state.counts = dict.fromkeys(state.counts, 0)
                wide = state.master if state.master is not None else state.current.values
                if wide.dtype != dtype.wide:
                    wide = widen(wide, dtype)
                state.rule, state.slots = run.rule.name, init_slots(run.rule, wide)

    def count(self, block: BlockSpec, shares: Sequence[Share]) -> None:
        """Note that the keys that this commit has changed have had one more update."""
        self.rules.count(block, shares, self.blocks[block.bid])
