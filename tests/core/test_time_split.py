"""Where a worker's time goes: the parts are the whole, whoever enters and leaves what, and when."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv import control as c
from zkv import time_split as ts
from zkv.errors import ProtocolError
from zkv.reasons import Reason, Who, gist
from zkv.time_split import PARTS, Meter, Part
from zkv.wire import open_envelope

# What is entered and left in this order (a second leave does not happen), with time in between.
steps = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave", "over", "explain", "ending", "beside", "encoded"]),
        st.sampled_from([part for part in Part if part is not Part.DATA]),
        st.integers(0, 50),
        st.sampled_from(["", "bsp", "ssp"]),
    ),
    max_size=60,
)


class Hand:
    """A clock that is set by hand; whole seconds, so that sums are exact."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> float:
        return self.now


def played(taken: list[tuple[str, Part, int, str]]) -> tuple[Meter, float | None, float]:
    """The meter after these steps, when it began, and when its last batch was over."""
    clock = Hand()
    meter = Meter(clock, rows_kept=100)
    held: list[Part] = []
    began: float | None = None
    over = 0.0
    for what, part, passed, why in taken:
        clock.now += passed
        match what:
            case "enter":
                began = clock.now if began is None and part is Part.WAIT else began
                meter.enter(part)
                held.append(part)
            case "leave" if part in held:
                held.remove(part)
                meter.leave(part)
            case "over":
                meter.batch_over()
                over = clock.now
            case "ending":
                with meter.ending():
                    clock.now += 1
                over = clock.now
            case "explain":
                meter.explain(why, passed / 2)
            case "encoded":
                meter.encoded(passed)
            case "beside":
                meter.beside(passed)
    return meter, began, over


@given(taken=steps)
def test_the_parts_of_all_batches_add_up_to_the_time_that_has_passed(
    taken: list[tuple[str, Part, int, str]],
) -> None:
    meter, began, over = played(taken)
    spent = meter.spent()
    wall_s = 0.0 if began is None else max(0.0, over - began)
    assert spent.wall_s == wall_s
    assert sum(getattr(spent, f"{name}_s") for name in PARTS) == wall_s
    assert [sum(column) for column in zip(*meter.rows, strict=True)] == [
        getattr(spent, f"{name}_s") for name in PARTS if meter.rows
    ]
    assert sum(seconds for _, seconds in spent.waits) == spent.wait_s
    assert len(spent.waits) <= ts.REASONS_MAX
    shares = ts.shares(spent.to_plain())
    assert sum(shares.values()) == pytest.approx(1.0 if wall_s else 0.0)


def test_each_moment_is_of_the_innermost_kind_that_is_entered():
    clock = Hand()
    meter = Meter(clock)

    def passes(seconds: int) -> None:
        clock.now += seconds

    passes(1000)  # Before the first request: nobody's.
    with meter.on(Part.WAIT), meter.on(Part.CALLS):
        passes(7)
        with meter.on(Part.ENCODE):
            passes(1)
    meter.explain("ssp", own_s=2)
    with meter.on(Part.COMPUTE):
        with meter.on(Part.COMMUNICATION):
            passes(20)
        passes(30)
        with meter.on(Part.BETWEEN):
            passes(400)
        passes(5)
        meter.encoded(5)
        meter.beside(3)
    with meter.ending():
        passes(6)
    passes(100)  # Of a batch that is not over.
    spent = meter.spent(12.5)
    told = {name: getattr(spent, f"{name}_s") for name in PARTS}
    assert told == {
        "data": 400,
        "compute": 30,
        "encode": 12,
        "communication": 20,
        "calls": 0,
        "wait": 7,
    }
    assert dict(spent.waits) == {ts.OWN: 2, "ssp": 5}
    assert (spent.batches, spent.wall_s, spent.encode_beside_s) == (1, 469, 3)
    line = ts.line(spent.to_plain())
    assert line == (
        "1 batch of 4.69e+05 ms: data 85.3%, compute 6.4%, encode 2.6%, communication 4.3%, "
        "wait 1.5%; memory 12 MiB at most"
    )


def test_reasons_beyond_the_bound_are_one():
    clock = Hand()
    meter = Meter(clock)
    for number in range(1, 3 * ts.REASONS_MAX + 1):
        with meter.on(Part.WAIT):
            clock.now += 1
        meter.explain(f"reason {number}" if number % 5 else "")
        meter.batch_over()
    waits = dict(meter.spent().waits)
    assert len(waits) <= ts.REASONS_MAX
    assert sum(waits.values()) == 24
    assert {ts.OTHERS, ts.UNTOLD} < waits.keys()
    assert waits[ts.UNTOLD] == 4


def test_two_lives_of_a_worker_are_added_up():
    one = ts.Spent(2, 3.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.5, 100.0, (("a", 0.0),)).to_plain()
    two = ts.Spent(1, 4.0, 0.0, 1.0, 0.0, 0.0, 0.0, 3.0, 0.0, 90.0, (("a", 1.0), ("b", 2.0)))
    both = ts.added([one, two.to_plain()])
    assert (both["batches"], both["wall_s"], both["wait_s"], both["peak_mib"]) == (3, 7, 3, 100)
    assert both["waits"] == {"a": 1.0, "b": 2.0}
    assert ts.added([one]) == one


NAMED = Who(1, "b", "host", clock=3, last_heard_s=0.25)


def test_the_gist_of_a_reason_says_whom_and_why_without_what_changes():
    rule = "bsp: the update needs a contribution of each"
    for clock, have in ((3, 1), (4, 2)):
        who = Who(1, "b", "host", clock, last_heard_s=clock / 7)
        reason = Reason(rule, (who,), 2, have, what="the next batch")
        assert gist(reason.text()) == f"worker 1: {rule}"
    words = "waiting for 1 of 2 workers to join; here are 0 ('worker-0' on host)"
    assert gist(words) == "waiting for 1 of 2 workers to join; here are 0"


def packet(message: Any) -> bytes:
    return c.encode_packet(c.Packet(1, 2, 3, 4, [message]))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), 1e13])
def test_seconds_that_cannot_be_are_refused_at_the_border(bad):
    whole = ts.Spent(1, 1.0, bad, 0.0, 0.0, 0.0, 0.0, 0.0)
    with pytest.raises(ProtocolError):
        c.decode_messages(open_envelope(packet(c.Accounts([], whole))), by_broker=True)
