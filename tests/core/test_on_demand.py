"""Grants on demand: what a server pins and sends, and what a worker asks for and keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bench import BLOCKS, ENTRIES, ME, VALUES, Bench
from rig import Rig
from strategies import placed

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.errors import BrokerLost, ProtocolError, Refused
from zkv.wire import MODEL, SEEDS, ContributionId, KeySpec
from zkv_brokers.decisions import Pins
from zkv_brokers.grants import ToWorker
from zkv_brokers.holdings import NOTHING, Holdings
from zkv_workers import signals as s
from zkv_workers.model import BatchState

W, V = KeySpec("w", "float32", (2,)), KeySpec("v", "float32", (2,))
ASKS = 2
"""The incarnation that asks; 1 pushes."""

# --- servers -----------------------------------------------------------------------------------


def granted() -> Rig:
    """One server with two blocks of ones; worker 2 has a grant on demand."""
    rig = Rig(placed([W, V], 1, bucket_bytes=0))
    rig.init({kid: np.ones(2, np.float32) for kid in (0, 1)})
    rig.data(0, d.Greet(ASKS, 1))
    rig.log(c.Grant(ASKS, MODEL, 1, 0, [], -1, True), c.Grant(1, MODEL, 1, 0, []))
    return rig


def ask(rig: Rig, *bids: int, grant: int = 1, index: int = 0) -> None:
    rig.data(0, d.Ask(ASKS, MODEL, grant, list(bids), (), index or rig.index))


def got(rig: Rig, *bids: int) -> None:
    rig.data(0, d.Got(ASKS, MODEL, 1, list(bids)))


def sent(rig: Rig) -> list[tuple[int, list[float]]]:
    """The blocks that were sent to the worker that asks, and their values as they are now."""
    found = [one for _, one in rig.sent if isinstance(one, ToWorker) and one.incarnation == ASKS]
    blocks = [one for one in found if isinstance(one.message, d.Block)]
    return [(one.message.bid, one.payload.tolist()) for one in blocks]  # type: ignore[union-attr]


def update(rig: Rig, version: int) -> None:
    name = ContributionId(1, MODEL, version)
    rig.push(name, version, {kid: np.full(2, 10, np.float32) for kid in (0, 1)})
    rig.log(c.Commit(MODEL, version, [c.Counted(name, 1.0)], None))


def pins(rig: Rig) -> list[int]:
    return [state.current.pins for state in rig.shards[0].store.blocks.values()]


def test_nothing_is_sent_before_it_is_asked_for() -> None:
    rig = granted()
    assert sent(rig) == []
    ask(rig, 1)
    assert sent(rig) == [(1, [1, 1])]


def test_a_version_stays_pinned_whatever_has_arrived_until_the_batch_is_done() -> None:
    rig = granted()
    ask(rig, 0)
    got(rig, 0)
    for version in (1, 2):
        update(rig, version)
    ask(rig, 0, 1)
    got(rig, 0, 1)
    ask(rig, 1, 0)
    # In the order in which they were asked for, and as they were when they were granted.
    assert sent(rig) == [(0, [1, 1]), (0, [1, 1]), (1, [1, 1]), (1, [1, 1]), (0, [1, 1])]
    grants = rig.shards[0].grants
    assert (ASKS, MODEL, 1) in grants._open
    rig.data(0, d.Done(ContributionId(ASKS, MODEL, 1), 1, 1.0, [], [0, 1], rig.index))
    assert (ASKS, MODEL, 1) not in grants._open
    ask(rig, 0)
    assert len(sent(rig)) == 5


def test_the_end_of_a_batch_unpins_and_what_waits_for_credit_is_not_sent() -> None:
    rig = granted()
    rig.log(c.Discard(1, MODEL, 1, -1))
    assert pins(rig) == [1, 1]
    rig.shards[0].grants._windows.clear()
    rig.shards[0].grants.window_bytes = 1
    ask(rig, 0, 1)
    assert sent(rig) == [(0, [1, 1])]
    for _ in range(2):
        rig.data(0, d.Done(ContributionId(ASKS, MODEL, 1), 1, 1.0, [0, 1], [], rig.index))
    assert pins(rig) == [0, 0]
    got(rig, 0)
    assert sent(rig) == [(0, [1, 1])]


def test_a_block_is_queued_once_until_it_has_arrived() -> None:
    rig = granted()
    rig.shards[0].grants.window_bytes = 1
    ask(rig, 0, 1)
    ask(rig, 1)
    got(rig, 1)  # A late word of what was not sent yet: it says nothing.
    ask(rig, 1)
    assert [bid for bid, _ in sent(rig)] == [0]
    ask(rig, 0)  # It was lost: once more.
    assert [bid for bid, _ in sent(rig)] == [0, 0]
    got(rig, 0)
    assert [bid for bid, _ in sent(rig)] == [0, 0, 1]


def test_a_request_ahead_of_the_log_waits_for_it() -> None:
    rig = granted()
    ask(rig, 0, grant=2, index=rig.index + 1)
    assert sent(rig) == []
    rig.log(c.Grant(ASKS, MODEL, 2, 0, [], -1, True))
    assert sent(rig) == [(0, [1, 1])]


@pytest.mark.parametrize(
    "entry", [c.Discard(ASKS, MODEL, 1, -1), c.Epoch(2, [1, 3], [])], ids=["cancel", "lost"]
)
def test_what_takes_a_grant_back_unpins_it(entry: c.Entry) -> None:
    rig = granted()
    rig.log(c.Discard(1, MODEL, 1, -1))
    ask(rig, 0)
    rig.log(entry)
    assert pins(rig) == [0, 0]
    ask(rig, 1)
    assert len(sent(rig)) == 1


def test_a_batch_that_is_withdrawn_leaves_its_grant() -> None:
    rig = granted()
    rig.log(c.Discard(ASKS, MODEL, 1, 7))
    ask(rig, 1)
    assert sent(rig) == [(1, [1, 1])]


def test_a_grant_on_demand_is_never_ahead_of_the_log() -> None:
    rig = granted()
    with pytest.raises(ProtocolError, match="grant 2 of incarnation 2 is on demand, but the log"):
        rig.log(c.Grant(ASKS, MODEL, 2, 1, [], -1, True))


# --- the broker --------------------------------------------------------------------------------


def test_who_asks_holds_no_version_and_pins_it_until_its_batch_is_finished() -> None:
    pinned = Pins(2, on_demand={ASKS})
    holdings = Holdings(MODEL, pinned)
    holdings.granted(ASKS, 1, 5)
    holdings.received(ASKS, 1)
    assert pinned.by_grant == {(ASKS, MODEL, 1): 5}
    assert holdings.version(ASKS) == NOTHING
    assert holdings.finished(ASKS, 1)
    assert not holdings.finished(ASKS, 1)
    assert pinned.by_grant == {}
    holdings.granted(1, 1, 5)
    assert not holdings.finished(1, 1)
    holdings.received(1, 1)
    assert holdings.version(1) == 5
    pinned.release(ASKS)
    assert pinned.on_demand == set()


def test_plain_keys_are_granted_as_ever() -> None:
    assert not Holdings(3, Pins(2, on_demand={ASKS})).is_on_demand(ASKS)
    assert Holdings(MODEL, Pins(2, on_demand={ASKS})).is_on_demand(ASKS)


# --- workers -----------------------------------------------------------------------------------


class Asking(Bench):
    """A worker with a grant on demand; `asked` are the blocks that it has asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.give()
        self.state = self.start()

    def give(self, number: int = 1) -> None:
        self.say(c.Granted(MODEL, number, 0, True, 0, 0, 0, 7, [], 0, on_demand=True))

    def start(self, token: int = 2) -> BatchState:
        self.feed(s.Begin(token, on_demand=True))
        answer = self.answer(token)
        assert isinstance(answer, s.Answer)
        return self.running.add(BatchState(answer.value, 1.0))

    @property
    def asked(self) -> list[int]:
        asks = [one.message for one in self.out if isinstance(one, s.SendData)]
        found = [one for one in asks if isinstance(one, d.Ask)]
        assert all(one.index == 7 for one in found)
        return [bid for one in found for bid in one.bids]

    def want(self, *keys: str) -> None:
        self.feed(s.Want(self.state.number, self.state.kids_of(keys)))

    def need(self, token: int, *keys: str) -> Any:
        self.feed(s.Await(token, self.state.number, self.state.kids_of(keys)))
        return self.answer(token)

    def forget(self, *keys: str) -> None:
        self.feed(s.Forget(self.state.number, self.state.kids_of(keys)))

    @property
    def here(self) -> set[int]:
        return set(self.session.made.cycle.blocks)


def test_the_broker_is_told_and_nothing_is_asked_for_that_nobody_wants() -> None:
    bench = Asking()
    assert bench.heard[-1] == c.Begin(True)
    assert bench.asked == []


def test_a_key_is_asked_for_waited_for_forgotten_and_asked_for_again() -> None:
    bench = Asking()
    for token in (5, 6):
        assert bench.need(token, "a") is None
        for bid in (1, 0):
            bench.send(bid)
        assert bench.answer(token) == s.Answer(token, None)
        out = np.zeros(4, np.float32)
        bench.state.read_into("a", out)
        np.testing.assert_array_equal(out, [1, 2, 3, 4])
        bench.forget("a")
        assert bench.here == set()
    assert bench.asked == [0, 1, 0, 1]
    assert bench.receipts() == []


def test_what_is_wanted_ahead_is_here_when_it_is_needed() -> None:
    bench = Asking()
    bench.want("a")
    bench.want("a")
    for bid in (0, 1):
        bench.send(bid)
    assert bench.need(5, "a") == s.Answer(5, None)
    assert bench.asked == [0, 1]


def test_a_block_of_several_keys_stays_until_none_of_them_is_wanted() -> None:
    bench = Asking()
    bench.want("b", "c")
    bench.send(2)
    bench.forget("b")
    assert bench.need(5, "c") == s.Answer(5, None)
    bench.forget("c")
    assert bench.here == set()
    assert bench.asked == [2]


def test_a_block_that_nobody_wants_any_more_is_acknowledged_and_dropped() -> None:
    bench = Asking()
    bench.want("a")
    bench.forget("a")
    bench.send(0)
    assert bench.here == set()
    got = [one.message for one in bench.out if isinstance(one, s.SendData)][-1]
    assert got == d.Got(ME, MODEL, 1, [0])


def test_what_does_not_come_is_asked_for_again() -> None:
    bench = Asking()
    bench.want("a")
    bench.send(0)
    config = bench.session.config
    bench.out += bench.session.handle(s.Tick(), config.resend_s)
    assert bench.asked == [0, 1, 1]


def test_the_end_of_a_batch_forgets_all_and_the_next_one_begins_with_nothing() -> None:
    bench = Asking()
    bench.want("a", "b")
    bench.send(0)
    bench.feed(s.Withdraw(bench.state.number))
    bench.state = bench.start(7)
    assert bench.here == set()
    bench.want("b")
    bench.send(2)
    assert bench.here == {2}
    bench.feed(s.Finish(8, bench.state.number, 1.0, ()))
    bench.send(2)
    bench.give(2)
    bench.state = bench.start(9)
    assert bench.here == set()
    assert bench.session.downloads.owing() == set()


def test_a_cancelled_batch_answers_who_waits_and_asks_for_nothing() -> None:
    bench = Asking()
    assert bench.need(5, "a") is None
    bench.say(c.Cancel(MODEL, 1))
    assert bench.answer(5) == s.Answer(5, None)
    bench.want("b")
    bench.forget("a")
    assert bench.asked == [0, 1]


def test_the_batches_of_one_worker_are_all_alike() -> None:
    bench = Asking()
    bench.feed(s.Begin(9))
    answer = bench.answer(9)
    assert isinstance(answer, s.Fail)
    assert isinstance(answer.error, Refused)
    assert "all just in time, or none" in str(answer.error)


def test_who_waits_for_room_is_answered_when_servers_have_what_was_sent() -> None:
    bench = Asking()
    bench.feed(s.Room(4, 0))
    assert bench.answer(4) == s.Answer(4, None)
    block = s.Sealed(np.zeros(2, np.float32))
    bench.feed(s.SendBlock(bench.state.number, 0, block))
    bench.feed(s.Room(5, 7))
    bench.feed(s.Room(6, 8))
    bench.feed(s.Room(7, 7))
    bench.feed(s.GiveUp(7))
    assert bench.answer(5) is None
    assert bench.answer(6) == s.Answer(6, None)
    name = bench.session.made.name(MODEL, bench.state.number)
    bench.feed(s.FromServer(d.Ack(0, ME, [(name, 0)]), None))
    assert bench.answer(5) == s.Answer(5, None)
    assert bench.answer(7) is None


# --- first values in parts -----------------------------------------------------------------------


def offered() -> tuple[Bench, s.Seeding]:
    """A worker that the broker asks for values that it does not have yet."""
    bench = Bench()
    specs = tuple(entry.spec for entry in ENTRIES)
    bench.feed(s.Initialise(3, specs, {}, plain=False, in_parts=True))
    bench.say(c.Layout(1, ENTRIES, BLOCKS, True, 4))
    answer = bench.answer(3)
    assert isinstance(answer, s.Answer)
    assert isinstance(answer.value, s.Seeding)
    return bench, answer.value


def pushed(bench: Bench) -> list[d.Data]:
    return [one.message for one in bench.out if isinstance(one, s.SendData)]


def test_values_are_pushed_as_they_are_made_and_the_end_waits_for_all_servers() -> None:
    bench, seeding = offered()
    name = ContributionId(ME, SEEDS, 1)
    for bid, values in VALUES.items():
        bench.feed(s.Seed(seeding, bid, values))
        assert pushed(bench)[-1] == d.Push(name, 1, bid, "none", 4)
    bench.feed(s.EndSeeds(6, seeding))
    assert pushed(bench)[-1] == d.Done(name, 1, 0.0, [0, 1, 2], [], 4)
    assert bench.answer(6) is None
    bench.say(c.Ready(1))
    assert bench.answer(6) == s.Answer(6, None)


def test_values_for_a_broker_that_is_gone_are_refused() -> None:
    bench, seeding = offered()
    bench.feed(s.EndSeeds(6, seeding))
    before: Array = VALUES[0]
    bench.link = type(bench.link)(33)
    bench.say(c.Beat(0.0))
    answer = bench.answer(6)
    assert isinstance(answer, s.Fail)
    assert isinstance(answer.error, BrokerLost)
    count = len(pushed(bench))
    bench.feed(s.Seed(seeding, 0, before))
    assert len(pushed(bench)) == count
    bench.feed(s.EndSeeds(7, seeding))
    later = bench.answer(7)
    assert isinstance(later, s.Fail)
    assert "initialise again" in str(later.error)
