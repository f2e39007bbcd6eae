"""The width that all workers send with, where the plan says `bits:...`: one controller for the run.

It sits at the broker, as an update takes as long as its slowest contribution: widths that differed
between workers could not be told apart by their times. A step is an update: its loss is the mean of
its contributions' losses by weight, its bytes are those of all of them, its seconds those since the
update before. Pure: the time comes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from zkv_brokers.decisions import Arrival
from zkv_codecs.bits import BitController, BitState, Observation
from zkv_codecs.bits_learned import Learned
from zkv_codecs.plan import Plan

DEAF = "No loss was told: call batch.set_loss(loss) in each batch."
SECONDS_LEAST, BYTES_MOST = 1e-9, 1e18


@dataclass(slots=True)
class Widths:
    """A controller and what it remembers."""

    controller: BitController[Any]
    clock: Callable[[], float]
    state: BitState = field(init=False)
    _last: float | None = None
    """When the last update was."""
    _deaf: bool = False
    """Whether no loss was told of the last one, though the controller needs it."""

    def __post_init__(self) -> None:
        self.state = self.controller.start()

    @property
    def codec(self) -> str:
        """Text of the codec for grants to come."""
        return self.state.codec

    @property
    def why(self) -> str:
        """One sentence on the width in use."""
        text = self.controller.explain(self.state)
        return f"{text} {DEAF}" if self._deaf else text

    def updated(self, contributions: Sequence[Arrival]) -> None:
        """Take an update in. One of which no loss was told, and the first, say nothing."""
        now, last = self.clock(), self._last
        self._last = now
        told = [one for one in contributions if one.loss is not None]
        self._deaf = self.controller.needs_loss and not told
        if self._deaf or last is None:
            return
        seen = Observation(
            loss=_mean_loss(told),
            nbytes=min(float(sum(one.nbytes for one in contributions)), BYTES_MOST),
            seconds=max(now - last, SECONDS_LEAST),
        )
        self.state, _ = self.controller.observe(self.state, seen)


def _mean_loss(told: Sequence[Arrival]) -> float:
    """Return the mean by weight; 0 of none."""
    weight = sum(one.weight for one in told)
    if not weight:
        return sum(one.loss or 0.0 for one in told) / max(1, len(told))
    # Each part is finite or not by itself: an infinite loss of no weight must not become NaN.
    parts = [one.weight / weight * one.loss for one in told if one.weight and one.loss is not None]
    return math.fsum(parts) if all(map(math.isfinite, parts)) else math.nan


def widths(plan: Plan, clock: Callable[[], float], rule: str = "") -> Widths | None:
    """Return the widths of a plan; None if it has one codec, or chooses for each key.

    `rule`: the name of the model's update rule.
    """
    adaptive = plan.adaptive
    if isinstance(adaptive, Learned):
        adaptive = adaptive.under(rule)
    return Widths(adaptive, clock) if isinstance(adaptive, BitController) else None
