"""Where a worker's time went, from its spans alone: the same parts as in `worker.stats()`.

Pure. A meter is told again what was entered and left, at the times of the spans, whose nesting says
the rest. What has no span, such as handing over the last gradients, counts as what is around it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from zkv.reasons import gist
from zkv.spans import ENCODER, NETWORK, TRAINING, Span
from zkv.time_split import Meter, Part, Spent

COMPUTE, GRANT, VALUES = "compute", "wait for a grant", "wait for values"
FATE, CALL = "wait for the fate of a batch", "other call"
DRAIN, PREPARE, BETWEEN = "wait for the encoder", "prepare codecs", "between local batches"
NAMES = {
    COMPUTE: Part.COMPUTE,
    GRANT: Part.WAIT,
    FATE: Part.WAIT,
    VALUES: Part.COMMUNICATION,
    CALL: Part.CALLS,
    DRAIN: Part.ENCODE,
    PREPARE: Part.ENCODE,
    BETWEEN: Part.BETWEEN,
}
"""Spans of the track of training, by what they are called; a push or an encode has its key, too."""


def part_of(span: Span) -> Part | None:
    """Return what a span of a worker is, if it is a part of its time."""
    if span.track != TRAINING or span.end_s is None:
        return None
    if span.name.startswith(("push ", "encode ")):
        return Part.ENCODE
    return NAMES.get(span.name)


def split(spans: Sequence[Span]) -> Spent:
    """Return the sum over the batches that these spans of one worker show."""
    now = 0.0
    meter = Meter(lambda: now)
    moves = []
    for span in spans:
        part = part_of(span)
        if part is not None and span.end_s is not None:
            moves += [(span.start_s, 0, part, span), (span.end_s, 1, part, span)]
        elif span.track == ENCODER and span.end_s is not None:
            meter.beside(span.end_s - span.start_s)
    way = _Way(spans)
    # What begins at a moment is entered before what ends then is left: so no span ends first.
    for now, leaves, part, span in sorted(moves, key=lambda move: move[:2]):
        if not leaves:
            meter.enter(part)
            continue
        meter.leave(part)
        if span.name == GRANT:
            meter.explain(gist(str(span.about.get("why", ""))), way.own_s(span.start_s, now))
        elif span.name == FATE:
            meter.explain_fate()
        elif part is Part.COMPUTE:
            meter.batch_over()
    return meter.spent()


class _Way:
    """Until when a worker's contributions were on their way."""

    def __init__(self, spans: Sequence[Span]) -> None:
        sends = sorted(
            (span.start_s, span.end_s)
            for span in spans
            if span.track == NETWORK and span.end_s is not None
        )
        self._starts = [start_s for start_s, _ in sends]
        self._ends = list(accumulate((end_s for _, end_s in sends), max))

    def own_s(self, start_s: float, end_s: float) -> float:
        """Return how long of this time, from its begin, something was on its way."""
        at = bisect_right(self._starts, end_s)
        return min(self._ends[at - 1], end_s) - start_s if at else 0.0
