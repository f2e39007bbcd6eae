"""A batch begins when it is granted; each key's values are waited for by themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bench import VALUES, Bench

from zkv import control as c
from zkv.dtypes import Array
from zkv.errors import Cancelled, KeyMismatch, UnknownKey
from zkv.wire import MODEL, open_envelope
from zkv_workers import signals as s
from zkv_workers.model import BatchState


def test_a_batch_begins_before_its_values_are_here_and_each_key_comes_by_itself() -> None:
    bench = Bench()
    bench.grant()
    state = bench.begin()
    assert state.missing(["a"]) == (0,)
    bench.wait(5, state, "a")
    bench.wait(6, state, "b", "c")
    bench.wait(7, state)
    bench.send(0)
    assert bench.answer(5) is None
    bench.send(1)
    assert bench.answer(5) == s.Answer(5, None)
    assert state.missing(["a"]) == ()
    np.testing.assert_array_equal(state.value("a"), [1, 2, 3, 4])
    assert bench.answer(6) is bench.answer(7) is None
    assert bench.receipts() == []
    bench.send(2)
    assert bench.answer(6) == s.Answer(6, None)
    assert bench.answer(7) == s.Answer(7, None)
    assert bench.receipts() == [c.Received(MODEL, 1)]
    params = state.params()
    assert params["a"] is state.value("a")
    assert params["t"] is params["b"] is state.value("t")
    assert list(params) == ["a", "b", "c", "t"]


def test_values_are_written_straight_into_an_array() -> None:
    bench = Bench()
    bench.grant()
    state = bench.begin()
    for bid in VALUES:
        bench.send(bid)
    for key, values in (("a", [1, 2, 3, 4]), ("c", [6, 7]), ("t", [5])):
        out = np.zeros(len(values), np.float32)
        state.read_into(key, out)
        np.testing.assert_array_equal(out, values)
    frozen = np.zeros(4, np.float32)
    frozen.flags.writeable = False
    for bad in (np.zeros(8, np.float32)[::2], frozen):
        with pytest.raises(KeyMismatch, match="'a': read_into takes a writable, C-contiguous"):
            state.read_into("a", bad)
    with pytest.raises(KeyMismatch, match="'a': dtype float32 expected, given float64"):
        state.read_into("a", np.zeros(4))


def test_values_that_are_here_already_are_not_waited_for() -> None:
    bench = Bench()
    for bid in VALUES:
        bench.send(bid)
    bench.grant()
    state = bench.begin()
    assert state.missing() == ()
    # A grant at a version that is held sends nothing.
    bench.feed(s.Finish(3, state.number, 1.0, ()))
    bench.grant(2, follow=False)
    again = bench.begin(4)
    assert again.missing(["c"]) == again.missing() == ()
    np.testing.assert_array_equal(again.value("c"), [6, 7])
    assert again.value("c") is not state.value("c")


def test_who_waits_for_values_of_a_cancelled_batch_is_told() -> None:
    bench = Bench()
    bench.grant()
    state = bench.begin()
    bench.send(0)
    bench.wait(5, state, "a")
    bench.say(c.Cancel(MODEL, 1))
    assert bench.answer(5) == s.Answer(5, None)
    with pytest.raises(Cancelled, match="batch 1 was cancelled"):
        state.value("a")
    # It is too late to ask; and the next grant's values are its own.
    bench.wait(6, state, "b")
    assert bench.answer(6) == s.Answer(6, None)
    bench.grant(2, version=1)
    fresh = bench.begin(7)
    bench.wait(8, fresh, "a")
    for bid in (0, 1):
        bench.send(bid, grant=1)
    assert bench.answer(8) is None
    for bid in (0, 1):
        bench.send(bid, grant=2, version=1)
    assert bench.answer(8) == s.Answer(8, None)


def test_a_wait_that_was_given_up_is_not_answered_and_a_batch_may_end_before_its_values() -> None:
    bench = Bench()
    bench.grant()
    state = bench.begin()
    bench.wait(5, state)
    bench.feed(s.GiveUp(5))
    bench.feed(s.Finish(6, state.number, 1.0, (0, 1, 2)))
    for bid in VALUES:
        bench.send(bid)
    assert bench.answer(5) is None
    assert bench.receipts() == [c.Received(MODEL, 1)]


def test_a_wait_is_bounded_and_says_for_whom() -> None:
    bench = Bench()
    bench.grant()
    state = bench.begin()
    bench.wait(5, state, "a")
    link, now = bench.link, 0.0
    while bench.answer(5) is None and now < 1000.0:
        now += 1.0
        # The broker goes on to be heard.
        link.send(c.Beat(now))
        for packet in link.outgoing(now):
            out = bench.session.handle(s.FromBroker(c.encode_packet(packet)), now)
            out += bench.session.handle(s.Tick(), now)
            bench.out += out
            for one in out:
                if isinstance(one, s.SendControl):
                    link.receive(c.decode_messages(open_envelope(one.frame)), now)
    answer = bench.answer(5)
    assert isinstance(answer, s.Fail)
    assert str(answer.error).startswith("the values of batch 1 did not come within 600")
    assert "server 0 ('s' at tcp://s:1) owes an answer" in str(answer.error)


def test_keys_that_are_not_of_the_model_are_refused_by_name() -> None:
    bench = Bench()
    bench.grant()
    state = bench.begin()
    with pytest.raises(UnknownKey, match="'x'"):
        state.missing(["x"])
    bench.say(c.Regrouped(2, 1, 9, 2))
    bench.feed(s.Withdraw(state.number))
    with pytest.raises(UnknownKey, match="'c' is not part of the model: it is pushed by itself"):
        bench.begin(8).value("c")


def test_values_added_by_another_thread_do_not_disturb_a_reader() -> None:
    """What is read is looked up by number: never by going through what is there."""

    class Growing(dict[int, Array]):
        def __iter__(self) -> Any:
            raise RuntimeError("dictionary changed size during iteration")

    bench = Bench()
    bench.grant()
    bench.feed(s.Begin(2))
    answer = bench.answer(2)
    grant: s.Grant = answer.value
    from dataclasses import replace

    state = BatchState(replace(grant, blocks=Growing(VALUES)), 1.0)
    assert state.missing() == ()
    np.testing.assert_array_equal(state.value("b"), [5])
    assert state.params().keys() == {"a", "b", "c", "t"}


def test_what_was_finished_under_a_grant_is_cancelled_with_it() -> None:
    """The broker's word on the contribution comes behind the next grant, whose batch may depend on
    what became of it."""
    bench = Bench()
    bench.grant()
    bench.send(0)
    state = bench.begin()
    bench.feed(s.Finish(3, state.number, 1.0, ()))
    assert bench.answer(3) is None
    bench.say(c.Cancel(MODEL, 1))
    answer = bench.answer(3)
    assert isinstance(answer, s.Answer)
    assert answer.value.outcome == "cancelled"
    counts = dict(bench.session.made.counts)
    bench.say(c.Settled([(MODEL, state.number, -1, "cancelled: the update happened without it")]))
    assert bench.session.made.counts == counts
    assert counts["cancelled"] == 1
