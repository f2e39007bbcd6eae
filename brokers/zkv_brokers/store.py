"""The values that one server holds: blocks, optimizer state, and how a commit changes them.

A block's values are immutable while somebody still has to receive them (rule 3): a commit then
writes a new array, and only writes in place where no version is pinned. Knows no sockets and no
log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from zkv.dtypes import Array, DType, narrow, widen
from zkv.layout import Layout
from zkv.optim import Rule, init_slots, square_sum, square_sum_of, stays_where_zero, update
from zkv.optimizer_spec import OptimizerSpec, optimizer
from zkv.staleness import Staleness
from zkv.sums import divided
from zkv.wire import MODEL, BlockSpec, Segment
from zkv_brokers.aggregates import (
    Aggregation,
    Share,
    SparseSum,
    Total,
    present_in,
    spans,
    total_weight,
)
from zkv_brokers.block_state import BlockState as BlockState
from zkv_brokers.block_state import Pinned as Pinned
from zkv_brokers.dense import Dense, Run
from zkv_brokers.memory import Memory
from zkv_brokers.regions import Regions
from zkv_brokers.views import Views
from zkv_codecs.backend import fastest

PLAIN_DEFAULT = "assign"
MODEL_DEFAULT = "sgd:lr=0.01"


@dataclass(slots=True)
class Settings:
    """The optimizers in force: for the model, and for plain keys."""

    model: OptimizerSpec
    plain: OptimizerSpec
    staleness: Staleness = field(default_factory=Staleness)

    @staticmethod
    def default() -> Settings:
        """Return the settings of a cluster that was told nothing."""
        return Settings(optimizer(MODEL_DEFAULT), optimizer(PLAIN_DEFAULT))


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
        self.settings = Settings.default()
        self.blocks: dict[int, BlockState] = {}
        self.backend = fastest()
        """The kernels of codecs."""
        self.views = Views(layout, self.backend)
        """What grants of batches send, where that is not the values themselves."""
        self._own_rules: dict[str, OptimizerSpec] = {}
        self._rules: dict[int, tuple[OptimizerSpec, Rule, float]] = {}

    def configure(self, settings: Settings) -> None:
        """Use these optimizers from the next commit on."""
        self.settings = settings
        self._rules.clear()

    def _rule_for(self, kid: int) -> tuple[OptimizerSpec, Rule, float]:
        found = self._rules.get(kid)
        if found is None:
            spec = self.spec_for(kid)
            found = self._rules[kid] = (spec, *spec.for_key(self.layout.entries[kid].spec.key))
        return found

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
        self._rules.pop(kid, None)
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

    def spec_for(self, kid: int) -> OptimizerSpec:
        """Return the optimizer that updates this key: its own, or the one for its group."""
        text = self.layout.entries[kid].spec.rule
        if text:
            if text not in self._own_rules:
                self._own_rules[text] = optimizer(text)
            return self._own_rules[text]
        return self.settings.model if self.layout.group_of[kid] == MODEL else self.settings.plain

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
            self.reduces_by_mean(block),
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

    def reduces_by_mean(self, block: BlockSpec) -> bool:
        """Return whether contributions to this block are averaged by weight (else added)."""
        return self.layout.averages(block)

    def square_sums(self, block: BlockSpec, shares: Sequence[Share], version: int) -> float:
        """Return Σ g² (float64) of the reduced gradient, over the keys that will be updated."""
        total = self.aggregate(block, shares)
        if total is None:
            return 0.0
        found = 0.0
        for run in self._runs(block, shares, version):
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
        runs = list(self._runs(block, shares, version))
        kept = self.blocks[block.bid].kept
        if self._commit_dense(block, shares, runs, version, scale, fresh=kept):
            self.blocks[block.bid].kept = False
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
        state.part()
        values = state.current.values
        factor = scale(self.spec_for(block.segments[0].kid))
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
        is_lent = self.memory.is_lent
        return state.kept or state.current.pins > 0 or is_lent(state.current.values)

    def _commit_dense(
        self,
        block: BlockSpec,
        shares: Sequence[Share],
        runs: Sequence[Run],
        version: int,
        scale: Callable[[OptimizerSpec], float],
        *,
        fresh: bool = False,
    ) -> bool:
        """Apply an update of contributions that came as they are (see `commit`); False: it is not
        one. `fresh`: in arrays of its own."""
        dense, state = self._dense(block, shares, runs), self.blocks[block.bid]
        if dense is None:
            return False
        self._prepare(state, runs, self.layout.dtype(block))
        values, slots = state.current.values, state.slots
        fresh_values = fresh or self._is_kept(state)
        out = self._regions.empty(block, version + 1) if fresh_values else values
        slots_out = tuple(np.empty_like(slot) for slot in slots) if fresh else slots
        factor = scale(self.spec_for(block.segments[0].kid))
        dense.apply(runs, factor, (values, slots), (out, slots_out))
        state.slots, state.changed = slots_out, version + 1
        if fresh_values:
            state.current = Pinned(out)
        return True

    def _dense(
        self, block: BlockSpec, shares: Sequence[Share], runs: Sequence[Run]
    ) -> Dense | None:
        if self.backend.name != "numba" or self.layout.dtype(block).name != "float32":
            return None
        if sum(run.stop - run.start for run in runs) != block.size:
            return None
        mean, staleness = self.reduces_by_mean(block), self.settings.staleness
        factors = [
            (share.weight if mean else 1.0) * staleness.factor(share.staleness) for share in shares
        ]
        return Dense.of(shares, block.kids, factors)

    def ahead(self, block: BlockSpec, shares: Sequence[Share], version: int) -> BlockState:
        """Return what a block will be after an update (see `commit`), in arrays of its own."""
        now = self.blocks[block.bid]
        runs, counts = list(self._runs(block, shares, version)), dict(now.counts)
        state = BlockState(now.current, now.master, now.rule, now.slots, counts, now.changed)
        self.blocks[block.bid] = state
        try:
            if self._commit_dense(block, shares, runs, version, lambda spec: 1.0, fresh=True):
                self.count(block, shares)
                return state
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
            if self.commit(block, shares, version, lambda spec: 1.0):
                self.count(block, shares)
            return self.blocks[block.bid]
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

    def _updated(
        self, block: BlockSpec, shares: Sequence[Share]
    ) -> Iterator[tuple[Segment, int, int, float]]:
        """Yield (segment, start, stop, divisor) of the keys that this update changes.

        Left alone is a key that everybody skipped, and one whose mean would be over no sample.
        """
        mean = self.reduces_by_mean(block)
        everyone = total_weight(shares)
        all_present = all(share.payload is not None and not share.skipped for share in shares)
        for segment, start, stop in spans(block):
            present = shares if all_present else present_in(shares, segment.kid)
            if not present:
                continue
            divisor = everyone if mean else 1.0
            if mean and not all_present and self.layout.entries[segment.kid].spec.absent == "out":
                divisor = total_weight(present)
            if divisor > 0.0:
                yield segment, start, stop, divisor

    def _runs(self, block: BlockSpec, shares: Sequence[Share], version: int) -> Iterator[Run]:
        """Yield the runs of keys that this update changes, neighbours that are alike joined."""
        state = self.blocks[block.bid]
        begun, ended, alike = 0, -1, None
        rates: dict[int, float] = {}
        for segment, start, stop, divisor in self._updated(block, shares):
            spec, rule, lr_factor = self._rule_for(segment.kid)
            if id(spec) not in rates:
                rates[id(spec)] = spec.lr_at(version)
            count = 0 if state.rule not in ("", rule.name) else state.counts[segment.kid]
            # No run is made of each key: a bucket may have thousands, all of them alike.
            found = (rule, rates[id(spec)] * lr_factor, count + 1, divisor)
            if start != ended or found != alike:
                if alike is not None:
                    yield Run(begun, ended, *alike)
                begun, alike = start, found
            ended = stop
        if alike is not None:
            yield Run(begun, ended, *alike)

    def count(self, block: BlockSpec, shares: Sequence[Share]) -> None:
        """Note that the keys that this commit has changed have had one more update."""
        counts = self.blocks[block.bid].counts
        for segment, _, _, _ in self._updated(block, shares):
            counts[segment.kid] += 1
