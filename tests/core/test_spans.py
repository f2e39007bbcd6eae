"""Spans: what the ring keeps, and lanes on which nothing overlaps in part."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv.spans import Span, Spans, flow, lanes
from zkv.wire import ContributionId

intervals = st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda at: (at[0], at[0] + at[1]))


def ticking() -> Spans:
    ticks = itertools.count()
    return Spans(lambda: float(next(ticks)), events_max=4)


@given(st.integers(0, 12), st.integers(1, 5))
def test_the_latest_are_kept_and_the_others_are_counted(count, events_max):
    spans = Spans(lambda: 0.0, events_max=events_max)
    for number in range(count):
        spans.span("t", str(number), 0.0, 1.0)
    kept = [str(number) for number in range(count)][-events_max:]
    assert [one.name for one in spans.kept] == kept
    assert spans.dropped == count - len(kept)


def test_a_block_of_code_is_a_span_also_when_it_raises():
    spans = ticking()

    def fails() -> None:
        with spans.timed("t", "n", into=("1.0.1.0",), a=1) as about:
            about["b"] = 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert spans.kept == [Span("t", "n", 0.0, 1.0, {"a": 1, "b": 2}, (), ("1.0.1.0",))]


@given(
    st.builds(
        Span,
        st.text(),
        st.text(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.none() | st.floats(allow_nan=False, allow_infinity=False),
        st.dictionaries(st.text(), st.integers(-(2**53), 2**53) | st.text() | st.booleans()),
        st.tuples(st.text()),
    )
)
def test_a_span_is_the_same_after_its_line_of_json(span):
    assert msgspec.json.decode(msgspec.json.encode(span), type=Span) == span


def overlap(one: tuple[int, int], two: tuple[int, int]) -> bool:
    return one[0] < two[1] and two[0] < one[1]


def holds(one: tuple[int, int], two: tuple[int, int]) -> bool:
    return one[0] <= two[0] and two[1] <= one[1]


@given(st.lists(intervals, max_size=14), st.booleans())
def test_on_one_lane_nothing_overlaps_in_part(times, nested):
    chosen = lanes(times, nested=nested)
    assert len(chosen) == len(times)
    assert set(chosen) == set(range(len(set(chosen))))
    for one, two in itertools.combinations(range(len(times)), 2):
        if chosen[one] == chosen[two] and overlap(times[one], times[two]):
            assert nested
            inside = holds(times[one], times[two]) or holds(times[two], times[one])
            assert inside


@given(st.lists(intervals, min_size=1, max_size=14))
def test_no_more_lanes_than_spans_at_one_time(times):
    """Greedy by starts needs as many lanes as the most that are open at once (interval graphs)."""
    long = [(start, max(end, start + 1)) for start, end in times]
    most = max(sum(start <= at < end for start, end in long) for at, _ in long)
    assert max(lanes(long, nested=False)) + 1 == most


def test_calls_within_calls_need_one_lane():
    assert lanes([(0, 10), (1, 4), (2, 3), (4, 9)], nested=True) == [0, 0, 0, 0]
    assert lanes([(0, 10), (1, 4), (2, 3), (4, 9)], nested=False) == [0, 1, 2, 1]


def test_arrows_of_different_blocks_have_different_names():
    names = {flow(ContributionId(i, g, b), bid) for i in (1, 11) for g in (0, 1) for b in (1, 11)
             for bid in (0, 1, 11)}  # fmt: skip
    assert len(names) == 2 * 2 * 2 * 3
