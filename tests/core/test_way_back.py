"""A session whose run has gone back: each call ends, at once or in time, and none of the old run
reaches the new one."""

from __future__ import annotations

from typing import Any

import pytest

from zkv import control as c
from zkv.errors import RolledBack, ServerLost, WaitTimeout
from zkv.link import Link
from zkv.wire import INCARNATIONS_PER_TERM, BlockSpec, KeyEntry, KeySpec, Segment
from zkv_workers import signals as s
from zkv_workers.config import SessionConfig
from zkv_workers.session import Session
from zkv_workers.way_back import KEYS

WELCOME = c.Welcome(
    number=3, incarnation=7, rank=3, world=1, term=2, servers=[], data_address="", policy="bsp"
)
BACK = c.RollBack(9, "zkv-0000000000000002-00000001", 41, 12, "server 1 is lost", [0])
KEY = KeyEntry(0, KeySpec("w", "float32", (2,)))
LAYOUT = c.Layout(0, [KEY], [BlockSpec(0, 0, [Segment(0, 0, 2)])], False, 3)


class Told:
    """A session, and the broker's end of its link."""

    def __init__(self) -> None:
        config = SessionConfig("w", "tcp://b:1", wait_timeout_s=60.0)
        self.session, self.link = Session(config, instance=5), Link(8, peer=5)
        self.hear(WELCOME)

    def hear(self, *messages: c.Message, now: float = 0.0) -> list[s.Output]:
        """Have the broker say this; return what the session does."""
        for message in messages:
            self.link.send(message)
        out: list[s.Output] = []
        for packet in self.link.outgoing(now):
            out += self.session.handle(s.FromBroker(c.encode_packet(packet)), now)
        return out

    def says(self, event: s.Input, now: float = 0.0) -> list[s.Output]:
        """Have the user say something."""
        return ends(self.session.handle(event, now))


def ends(out: list[s.Output]) -> list[Any]:
    return [one for one in out if isinstance(one, s.Answer | s.Fail)]


def test_open_calls_and_later_ones_end_when_the_keys_are_here_and_none_before() -> None:
    told = Told()
    assert told.says(s.Begin(1)) == []
    assert ends(told.hear(BACK)) == []
    assert told.says(s.Pull(2, ("w",))) == []
    again = s.Membership(3, 9 * INCARNATIONS_PER_TERM + 1, 1, "bsp")
    told.hear(c.Welcome(again.number, again.incarnation, 3, 1, 9, [], "", "bsp"))
    first, second = ends(told.hear(LAYOUT, c.Ready(0)))
    assert (first.token, second.token) == (1, 2)
    error = first.error
    assert isinstance(error, RolledBack)
    assert (error.version, error.undone, error.snapshot) == (41, 12, BACK.name)
    assert "12 updates after version 41 are lost, as server 1 is lost" in str(error)
    # Until it is known that this was heard, nothing is of the new run.
    (later,) = told.says(s.Begin(3))
    assert later.error is error
    told.says(s.GoOn(RolledBack("another one")))
    assert told.session.back.told is error
    told.says(s.GoOn(error))
    assert told.says(s.Begin(4)) == []
    assert told.session.made.cycle.asked
    assert told.session.layout.kid_of == {"w": 0}


def test_what_would_be_waited_for_in_vain_ends_at_once() -> None:
    told = Told()
    told.hear(BACK)
    (fate,) = told.says(s.Finish(1, 7, 1.0, ()))
    assert fate.value.outcome == "undone"
    (values,) = told.says(s.Await(2, 7, (0,)))
    assert values == s.Answer(2, None)
    assert told.says(s.Withdraw(7)) == []


def test_calls_end_with_the_run_and_with_patience() -> None:
    told = Told()
    told.says(s.Begin(1))
    told.hear(BACK)
    told.says(s.Pull(2, ("w",)), now=5.0)
    (late,) = ends(told.session.handle(s.Tick(), 61.0))
    assert late.token == 1
    assert isinstance(late.error, WaitTimeout)
    assert KEYS in str(late.error)
    (failed,) = ends(told.hear(c.Fatal("ServerLost", "no server has come in its place"), now=61.0))
    assert failed.token == 2
    assert isinstance(failed.error, ServerLost)


@pytest.mark.parametrize("again", [0, 3])
def test_who_has_not_heard_of_one_hears_of_all_that_is_lost(again: int) -> None:
    told = Told()
    told.hear(BACK, c.RollBack(10, BACK.name, 41 - again, again, "server 0 is lost", [0]))
    found = told.session.back.told
    assert found is not None
    assert (found.version, found.undone) == (41 - again, 12 + again)
    assert told.session.back.floor == 10 * INCARNATIONS_PER_TERM
