"""Pace: in flight is what the link holds, and little more; windows share it by urgency."""

from __future__ import annotations

import heapq
from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv.pace import FIRST_BYTES, SLACK_S, SUSTAINED, Pace
from zkv.window import Window, ready

BLOCK = 500_000


class Link:
    """One way out of so many bytes a second, in order, and the time until the answer is back."""

    bucket = False
    """Whether one block passes at once after a pause."""

    def __init__(self, rate: float, trip_s: float, windows: list[Window[Hashable]]) -> None:
        self.rate, self.trip_s, self.windows = rate, trip_s, windows
        self.now = self.free_at = 0.0
        self.answers: list[tuple[float, int, int, Hashable]] = []
        self.done: list[tuple[float, Hashable]] = []
        self.most = 0

    def send(self) -> None:
        for name in ready(self.windows, self.now):
            peer = name[0]  # type: ignore[index]
            full = self.bucket and self.now - self.free_at > 0.5
            takes_s = 0.0 if full else BLOCK / self.rate
            self.free_at = max(self.now, self.free_at) + takes_s
            answer = (self.free_at + self.trip_s, len(self.done) + len(self.answers), peer, name)
            heapq.heappush(self.answers, answer)
        self.most = max(self.most, sum(window.in_flight for window in self.windows))

    def step(self) -> None:
        self.now, _, peer, name = heapq.heappop(self.answers)
        self.windows[peer].acknowledge(name, self.now)
        self.done.append((self.now, name))
        self.send()

    def run(self) -> None:
        self.send()
        while self.answers:
            self.step()


@given(
    rate=st.floats(1e6, 1e9),
    trip_s=st.floats(1e-4, 0.2),
    peers=st.integers(1, 4),
    rounds=st.integers(2, 4),
)
def test_a_link_is_kept_busy_and_holds_no_more_than_it_has_to(
    rate: float, trip_s: float, peers: int, rounds: int
) -> None:
    pace = Pace()
    windows: list[Window[Hashable]] = [Window(2**40, pace=pace) for _ in range(peers)]
    link = Link(rate, trip_s, windows)
    for turn in range(rounds):
        began, link.most = link.now, 0
        for at in range(60):
            windows[at % peers].offer(
                (at % peers, turn, at), BLOCK, (at % peers, turn, at), (turn, at)
            )
        link.run()
    took_s = link.now - began
    # Once the link is known, a round takes what its bytes take, and one trip.
    assert took_s <= 1.05 * 60 * BLOCK / rate + 3 * trip_s + 3 * BLOCK / rate
    holds = rate * trip_s
    assert link.most <= 2.5 * holds + SLACK_S * rate + (3 + peers) * BLOCK
    assert pace.in_flight == 0


@given(rate=st.floats(1e6, 1e9), trip_s=st.floats(1e-4, 0.01), rounds=st.integers(1, 4))
def test_what_a_link_lets_pass_at_once_after_a_pause_is_not_its_rate(
    rate: float, trip_s: float, rounds: int
) -> None:
    pace = Pace()
    window: Window[Hashable] = Window(2**40, pace=pace)
    link = Link(rate, trip_s, [window])
    link.bucket = True
    for turn in range(rounds):
        link.now += 1.0
        for at in range(60):
            window.offer((0, turn, at), BLOCK, (0, turn, at), (turn, at))
        link.run()
    assert 0 < pace.rate <= SUSTAINED / (SUSTAINED - 1) * rate * 1.001


@given(peers=st.integers(1, 3))
def test_what_is_urgent_overtakes_what_waits_whomever_it_is_for(peers: int) -> None:
    """It waits for two blocks, or, where there are many peers, for one of each and then its own."""
    pace = Pace()
    windows: list[Window[Hashable]] = [Window(2**40, pace=pace) for _ in range(peers)]
    link = Link(50e6, 1e-4, windows)
    for at in range(40):
        windows[at % peers].offer((at % peers, "warm", at), BLOCK, (at % peers, "warm", at))
    link.run()
    for at in range(40):
        windows[at % peers].offer((at % peers, at), BLOCK, (at % peers, at), (1, 40 - at))
    link.send()
    for _ in range(5):
        link.step()
    last = peers - 1
    urgent = (last, "urgent")
    windows[last].offer(urgent, BLOCK, urgent, (0, 0))
    before = len(link.done)
    link.send()
    while link.answers:
        link.step()
    order = [name for _, name in link.done[before:]]
    assert order.index(urgent) <= max(2, 2 * peers)


def test_without_priority_what_was_offered_first_goes_first() -> None:
    window: Window[int] = Window(10)
    for number in range(5):
        window.offer(number, 10, number)
    out = []
    for _ in range(5):
        (number,) = window.ready(0.0)
        out.append(number)
        window.acknowledge(number, 0.0)
    assert out == [0, 1, 2, 3, 4]


@given(
    orders=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=30),
)
def test_the_lowest_order_goes_first_and_ties_in_the_order_of_coming(
    orders: list[tuple[int, int]],
) -> None:
    window: Window[int] = Window(1)
    for number, order in enumerate(orders):
        window.offer(number, 1, number, order)
    out = []
    while len(window):
        (number,) = window.ready(0.0)
        out.append(number)
        window.acknowledge(number, 0.0)
    assert out == sorted(range(len(orders)), key=lambda number: (orders[number], number))


def test_a_peer_that_does_not_answer_does_not_use_up_the_others_credit() -> None:
    pace = Pace()
    hung, well = (Window[str](2**40, resend_s=1.0, pace=pace) for _ in range(2))
    for at in range(20):
        hung.offer(f"h{at}", BLOCK, f"h{at}")
    taken = ready((hung, well), 0.0)
    assert len(taken) == FIRST_BYTES // BLOCK
    for at in range(20):
        well.offer(f"w{at}", BLOCK, f"w{at}")
    # One block at a time goes to the other peer, whatever is on its way to the first.
    assert ready((hung, well), 0.1) == ["w0"]
    later = 1.1 + hung.deadline()  # type: ignore[operator]
    assert ready((hung, well), later)[0] == "h0"
    assert pace.in_flight == 2 * BLOCK
    assert well.acknowledge("w0", later)
    assert ready((hung, well), later) == ["w1"]


def test_an_old_rate_is_forgotten() -> None:
    pace = Pace()
    for at in range(5):
        pace.sent(at, BLOCK, at * 0.001)
        pace.arrived(at, at * 0.001 + 0.0005)
    fast = pace.rate
    for at in range(5, 10):
        pace.sent(at, BLOCK, 20.0 + at)
        pace.arrived(at, 20.5 + at)
    assert pace.rate == pytest.approx(BLOCK / 0.5) != pytest.approx(fast)


def test_an_item_may_be_acknowledged_at_the_instant_that_it_was_sent() -> None:
    pace = Pace()
    pace.sent("a", 10, 1.0)
    pace.arrived("a", 1.0)
    assert pace.credit_bytes >= 20
    pace.arrived("a", 1.0)
    pace.gone("b")
    assert pace.in_flight == 0
