"""By which rule each key of a server is updated, and what of a block is updated in one go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zkv.layout import Layout
from zkv.optim import Rule
from zkv.optimizer_spec import OptimizerSpec, optimizer
from zkv.wire import MODEL, BlockSpec, Segment
from zkv_brokers.aggregates import Share, present_in, spans, total_weight
from zkv_brokers.block_state import BlockState
from zkv_brokers.dense import Run
from zkv_brokers.optimizers_in_force import Settings

Alike = tuple[int, int, OptimizerSpec, Rule, float]
"""Elements `[start, stop)` of a block, and how they are updated; last the factor of the rate."""


class KeyRules:
    """The rules of the keys of a layout. Knows no values."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.settings = Settings.default()
        self._own_rules: dict[str, OptimizerSpec] = {}
        self._known: dict[int, tuple[OptimizerSpec, Rule, float]] = {}
        self._alike: dict[int, tuple[BlockSpec, list[Alike]]] = {}
        """What is updated in one go if all keys of a block are, found once."""

    def forget(self) -> None:
        """Look up anew how each key is updated."""
        self._known.clear()
        self._alike.clear()

    def spec_for(self, kid: int) -> OptimizerSpec:
        """Return the optimizer that updates this key: its own, or the one for its group."""
        text = self.layout.entries[kid].spec.rule
        if text:
            if text not in self._own_rules:
                self._own_rules[text] = optimizer(text)
            return self._own_rules[text]
        return self.settings.model if self.layout.group_of[kid] == MODEL else self.settings.plain

    def _of(self, kid: int) -> tuple[OptimizerSpec, Rule, float]:
        found = self._known.get(kid)
        if found is None:
            spec = self.spec_for(kid)
            found = self._known[kid] = (spec, *spec.for_key(self.layout.entries[kid].spec.key))
        return found

    def runs(
        self, block: BlockSpec, shares: Sequence[Share], version: int, state: BlockState
    ) -> Iterator[Run]:
        """Yield the runs of keys that this update changes, neighbours that are alike joined."""
        counts, divisor = set(state.counts.values()), self._of_all(block, shares)
        if divisor > 0.0 and len(counts) == 1:
            (before,) = counts
            for start, stop, spec, rule, factor in self._alike_in(block):
                count = 0 if state.rule not in ("", rule.name) else before
                yield Run(start, stop, rule, spec.lr_at(version) * factor, count + 1, divisor)
            return
        begun, ended, alike = 0, -1, None
        rates: dict[int, float] = {}
        for segment, start, stop, divisor in self._updated(block, shares):
            spec, rule, lr_factor = self._of(segment.kid)
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

    def _updated(
        self, block: BlockSpec, shares: Sequence[Share]
    ) -> Iterator[tuple[Segment, int, int, float]]:
        """Yield (segment, start, stop, divisor) of the keys that this update changes.

        Left alone is a key that everybody skipped, and one whose mean would be over no sample.
        """
        mean = self.layout.averages(block)
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

    def _of_all(self, block: BlockSpec, shares: Sequence[Share]) -> float:
        """Return what sums of this update are divided by, if it changes all keys; else 0.0."""
        if any(share.payload is None or share.skipped for share in shares):
            return 0.0
        return total_weight(shares) if self.layout.averages(block) else 1.0

    def _alike_in(self, block: BlockSpec) -> list[Alike]:
        known = self._alike.get(block.bid)
        if known is None or known[0] is not block:
            found: list[Alike] = []
            for segment, start, stop in spans(block):
                rule = self._of(segment.kid)
                if found and found[-1][2:] == rule:
                    start = found.pop()[0]
                found.append((start, stop, *rule))
            known = self._alike[block.bid] = (block, found)
        return known[1]

    def count(self, block: BlockSpec, shares: Sequence[Share], state: BlockState) -> None:
        """Note that the keys that this commit has changed have had one more update."""
        counts = state.counts
        if self._of_all(block, shares) > 0.0:
            counts.update([(kid, one + 1) for kid, one in counts.items()])
            return
        for segment, _, _, _ in self._updated(block, shares):
            counts[segment.kid] += 1
