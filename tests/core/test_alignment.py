"""Clocks of two processes: what round trips tell of them, and how wrong that can be."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv import control as c
from zkv.alignment import Alignment, RoundTrips
from zkv.link import Link
from zkv.policy import policy
from zkv.wire import open_envelope
from zkv_brokers import router as rt
from zkv_brokers.node import Node, NodeConfig, SendControl
from zkv_workers import signals as s
from zkv_workers.config import SessionConfig
from zkv_workers.session import Session

BROKER, PEER = 1000, 2000
delays = st.floats(0.0, 10.0)
EPSILON = 1e-6


def test_the_middle_of_the_round_trip():
    """Sent at 10 s, heard at 10.4 s, the other said 100 s: it is ahead by 89.8 s, ± 0.2 s."""
    trips = RoundTrips()
    assert trips.alignment is None
    trips.note(10.0, 100.0, 10.4)
    assert trips.alignment == Alignment(pytest.approx(89.8), pytest.approx(0.2), 1)


@given(st.floats(-1e5, 1e5), st.lists(st.tuples(st.floats(0, 1e4), delays, delays), min_size=1))
def test_the_truth_is_within_the_error_that_is_told(offset, trips):
    """Whatever the delays of the two ways are, and the shortest of the round trips counts."""
    known = RoundTrips()
    for sent, there, back in trips:
        known.note(sent, sent + there + offset, sent + there + back)
    found = known.alignment
    assert found is not None
    assert abs(found.offset_s - offset) <= found.error_s + EPSILON
    assert found.error_s <= min(there + back for _, there, back in trips) / 2 + EPSILON
    assert found.round_trips == len(trips)


@pytest.mark.parametrize(
    ("sent", "theirs", "heard"),
    [(2.0, 0.0, 1.0), (math.nan, 0.0, 1.0), (-math.inf, 0.0, 1.0), (0.0, math.inf, 1.0)],
)
def test_what_is_no_round_trip_is_left_out(sent, theirs, heard):
    known = RoundTrips()
    known.note(0.0, 5.0, 2.0)
    known.note(sent, theirs, heard)
    assert known.alignment == Alignment(4.0, 1.0, 1)


def broker() -> rt.Router:
    return rt.Router(rt.RouterConfig("tcp://b:5555", policy("bsp")), term=1, instance=BROKER)


def messages(actions: list[rt.Action], link: Link) -> list[c.Message]:
    heard: list[c.Message] = []
    for action in actions:
        if isinstance(action, rt.Send):
            heard += link.receive(c.decode_messages(open_envelope(action.frame)), 0.0)[1]
    return heard


@pytest.mark.parametrize("ask", [False, True])
def test_the_broker_answers_at_once_who_asks_and_nobody_else(ask):
    router, link = broker(), Link(PEER)
    link.send(c.Beat(7.5, ask=ask))
    (packet,) = link.outgoing(0.0)
    heard = messages(router.handle(rt.Received(b"p", c.encode_packet(packet)), 42.0), link)
    assert heard == ([c.Beat(42.0, 7.5)] if ask else [])


def test_a_server_and_a_worker_learn_the_brokers_clock_if_they_ask():
    """Own clocks 100 s behind and 50 s ahead; 10 ms there, 30 ms back."""
    router = broker()
    node = Node(
        NodeConfig("tcp://b:5555", "s", "tcp://s:1", asks=True, beat_s=0.1), instance=1, now=0.0
    )
    session = Session(SessionConfig("w", "tcp://b:5555", trace="folder", beat_s=0.1), instance=2)
    for turn in range(4):
        now = turn + 200.0
        sent = [action.frame for action in node.tick(now - 100) if isinstance(action, SendControl)]
        for frame in sent:
            for action in router.handle(rt.Received(b"s", frame), now + 0.010):
                if isinstance(action, rt.Send) and action.route == b"s":
                    node.broker_says(action.frame, now + 0.040 - 100)
        event: s.Input = s.Tick() if turn else s.Join(1)
        outputs = session.handle(event, now + 50)
        for frame in [one.frame for one in outputs if isinstance(one, s.SendControl)]:
            for action in router.handle(rt.Received(b"w", frame), now + 0.010):
                if isinstance(action, rt.Send) and action.route == b"w":
                    session.handle(s.FromBroker(action.frame), now + 0.040 + 50)
    for trips, offset in ((node.round_trips, 100.0), (session.round_trips, -50.0)):
        found = trips.alignment
        assert found is not None
        assert found.error_s == pytest.approx(0.020)
        assert found.offset_s == pytest.approx(offset - 0.010)
