"""A trace alone tells where the time went: what a meter has booked, its spans say again."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from zkv import span_split as ss
from zkv import time_split as ts
from zkv.spans import BATCHES, ENCODER, NETWORK, TRAINING, Span, Spans
from zkv.time_split import PARTS, Meter, Part

WITHIN = ("push w", "encode 3", ss.VALUES, ss.CALL, ss.BETWEEN, ss.PREPARE, "forward", "backward")


class Life:
    """A worker that books and traces what it does, by a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0
        self.meter, self.spans = Meter(self.clock), Spans(self.clock)

    def clock(self) -> float:
        return self.now

    def does(self, name: str, *seconds: int, why: str = "", inner: Any = ()) -> None:
        """Do something for so long, with what is within it in the middle."""
        part = ss.part_of(Span(TRAINING, name, 0.0, 0.0))
        with ExitStack() as stack:
            if part is not None:
                stack.enter_context(self.meter.on(part))
            stack.enter_context(self.spans.timed(TRAINING, name, why=why))
            self.now += sum(seconds)
            for one in inner:
                self.does(*one)
        if name == ss.GRANT:
            self.meter.explain(why)
        if name == ss.COMPUTE:
            self.meter.batch_over()


things = st.lists(st.tuples(st.sampled_from(WITHIN), st.integers(0, 9)), max_size=4)
batches = st.lists(
    st.tuples(st.integers(0, 9), things, st.integers(0, 9), st.sampled_from(["", "bsp"]), things),
    max_size=5,
)


@given(batches)
def test_spans_say_what_the_meter_has_booked(taken):
    life = Life()
    for data, drained, waited, why, within in taken:
        life.now += data
        life.does(ss.GRANT, waited, why=why, inner=[(ss.DRAIN, n) for _, n in drained])
        life.does(ss.COMPUTE, waited, inner=within)
    booked, told = life.meter.spent(), ss.split(life.spans.kept)
    assert told == booked
    assert sum(getattr(told, f"{name}_s") for name in PARTS) == told.wall_s


def span(track: str, name: str, start_s: float, end_s: float | None, **about: str) -> Span:
    return Span(track, name, start_s, end_s, about)


def test_its_own_contribution_is_on_its_way_until_its_last_send_has_arrived():
    told = ss.split(
        [
            span(NETWORK, "send 0", 0.0, 3.0),
            span(NETWORK, "send 1", 1.0, 12.0),
            span(NETWORK, "send 2", 13.0, 30.0),
            span(TRAINING, ss.GRANT, 10.0, 15.0, why="the next batch waits for worker 1: bsp"),
            span(TRAINING, ss.COMPUTE, 15.0, 20.0),
            span(TRAINING, ss.GRANT, 21.0, 27.0, why="slow"),
            span(TRAINING, ss.COMPUTE, 27.0, 28.0),
            span(TRAINING, ss.GRANT, 29.0, 33.0, why="worker 1 (clock 3)"),
            span(TRAINING, ss.COMPUTE, 33.0, 34.0),
            span(ENCODER, "encode 0", 16.0, 18.0),
            span(BATCHES, "batch 1 committed", 15.0, 33.0),
            span(TRAINING, "push w", 1.0, None),
        ]
    )
    # The second send is here at 12, but the third is on its way from 13 on: its end counts.
    assert dict(told.waits) == {ts.OWN: 5 + 6 + 1, "worker 1": 3}
    assert (told.encode_beside_s, told.wait_s, told.compute_s, told.data_s) == (2, 15, 7, 2)


def test_spans_of_nothing_are_no_batches():
    assert ss.split([]) == Meter(lambda: 0.0).spent()
    assert ss.part_of(span(NETWORK, "push w", 0.0, 1.0)) is None
    assert ss.part_of(span(TRAINING, "forward", 0.0, 1.0)) is None
    assert ss.part_of(span(TRAINING, "push w", 0.0, 1.0)) is Part.ENCODE
