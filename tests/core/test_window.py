"""Byte credits: never more in flight than allowed, first in first out, nothing forgotten."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from zkv.window import Window

sizes = st.lists(st.integers(0, 12), max_size=30)


@given(bytes_max=st.integers(1, 20), offered=sizes, seed=st.integers(0, 2**32 - 1))
def test_everything_is_given_out_in_order_within_the_credit(
    bytes_max: int, offered: list[int], seed: int
) -> None:
    chance = random.Random(seed)
    window: Window[int] = Window(bytes_max)
    given_out: list[int] = []
    waiting = list(range(len(offered)))
    flying: set[int] = set()
    now = 0.0
    while waiting or flying or window.queued:
        now += 1.0
        for number in waiting[: chance.randrange(4)]:
            window.offer(number, offered[number], number)
            waiting.remove(number)
        out = window.ready(now)
        given_out += out
        flying |= set(out)
        in_flight = sum(offered[number] for number in flying)
        assert window.in_flight == in_flight
        # One item may exceed the credit, but alone (apart from what has no bytes).
        assert in_flight <= bytes_max or sum(offered[n] > 0 for n in flying) == 1
        # Whatever waits does so for want of credit.
        assert not window.queued or window.in_flight > 0
        assert len(window) == window.queued + len(flying)
        for number in chance.sample(sorted(flying), chance.randrange(len(flying) + 1)):
            assert window.acknowledge(number, now)
            flying.discard(number)
    assert given_out == list(range(len(offered)))
    assert (len(window), window.in_flight, window.names()) == (0, 0, set())


@given(offered=st.lists(st.integers(0, 9), min_size=1, max_size=12), data=st.data())
def test_what_is_forgotten_is_never_given_out_and_gives_its_credit_back(
    offered: list[int], data: st.DataObject
) -> None:
    window: Window[int] = Window(9, resend_s=1.0)
    for number, size in enumerate(offered):
        window.offer(number, size, number)
    sent = window.ready(0.0)
    gone = set(data.draw(st.lists(st.integers(0, len(offered) + 2))))
    window.forget(gone)
    assert window.in_flight == sum(offered[n] for n in set(sent) - gone)
    assert window.names() == set(range(len(offered))) - gone
    later: list[int] = []
    for now in range(1, 40):
        out = window.ready(float(now))
        later += out
        for number in out:
            window.acknowledge(number, float(now))
    assert set(later) | set(sent) >= set(range(len(offered))) - gone
    assert not set(later) & gone


def test_an_item_larger_than_the_credit_travels_alone() -> None:
    window: Window[str] = Window(10)
    for name, size in (("a", 4), ("large", 50), ("b", 4)):
        window.offer(name, size, name)
    assert window.ready(0.0) == ["a"]
    window.acknowledge("a", 0.0)
    assert window.ready(0.0) == ["large"]
    assert window.ready(0.0) == []
    window.acknowledge("large", 0.0)
    assert window.ready(0.0) == ["b"]


def test_a_second_acknowledgement_changes_nothing() -> None:
    window: Window[str] = Window(10)
    window.offer("a", 6, "a")
    assert not window.acknowledge("a", 0.0)
    window.ready(0.0)
    assert window.is_sent("a")
    assert window.acknowledge("a", 1.0)
    assert not window.acknowledge("a", 1.0)
    assert window.in_flight == 0
    assert not window.is_sent("a")


def test_without_a_pause_nothing_is_given_out_twice() -> None:
    window: Window[str] = Window(10)
    window.offer("a", 6, "a")
    assert window.ready(0.0) == ["a"]
    assert window.deadline() is None
    assert window.ready(1e9) == []


def test_silence_gives_out_the_oldest_again_after_1_2_4_8_and_8_times_the_pause() -> None:
    window: Window[str] = Window(100, resend_s=1.0)
    window.offer("a", 0, "a")
    assert window.ready(0.0) == ["a"]
    times = []
    for _ in range(6):
        due = window.deadline()
        assert due is not None
        assert window.ready(due - 0.001) == []
        assert window.ready(due) == ["a"]
        times.append(due)
    assert times == [1, 3, 7, 15, 23, 31]


def test_a_large_item_may_take_its_time_on_a_slow_link() -> None:
    window: Window[str] = Window(10**7, resend_s=2.0)
    window.offer("block", 1_000_000, "block")
    window.ready(0.0)
    assert window.deadline() == 2.0 + 8.0


def test_an_answer_to_a_later_item_shows_that_the_earlier_ones_are_lost() -> None:
    window: Window[int] = Window(100, resend_s=1.0)
    for number in range(5):
        window.offer(number, 1, number)
    window.ready(0.0)
    window.acknowledge(3, 0.1)
    assert window.ready(0.1) == [0, 1, 2]
    # They are now the latest: an answer to 4, sent before them, says nothing of them.
    window.acknowledge(4, 0.2)
    assert window.ready(0.2) == []
    window.acknowledge(2, 0.3)
    assert window.ready(0.3) == [0, 1]


def test_while_acknowledgements_come_in_nothing_is_sent_again() -> None:
    window: Window[int] = Window(100, resend_s=1.0)
    for number in range(10):
        window.offer(number, 0, number)
    window.ready(0.0)
    for number in range(9):
        # Each comes just in time: the link is slow, and has lost nothing.
        assert window.ready(0.9 * number) == []
        window.acknowledge(number, 0.9 * (number + 1))
    assert window.ready(9.2) == [9]
    # An acknowledgement also brings the first pause back.
    window.offer("next", 0, 10)
    window.ready(9.3)
    window.acknowledge(9, 9.4)
    assert window.deadline() == 10.4


def test_an_item_offered_again_takes_the_place_of_the_one_before() -> None:
    window: Window[str] = Window(100)
    window.offer("a", 6, "first")
    window.ready(0.0)
    window.offer("a", 4, "second")
    assert window.ready(1.0) == ["second"]
    assert window.in_flight == 4
    assert window.acknowledge("a", 2.0)
    assert (window.in_flight, len(window)) == (0, 0)
