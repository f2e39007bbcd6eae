"""Reasons as values: what they say, what they are as plain data, and that no more than four are
named."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from zkv import control as c
from zkv.events import Finished, Joined
from zkv.policy import policy
from zkv.reasons import NAMES_MAX, ON_THEIR_WAY, Reason, Who
from zkv_brokers import reasons
from zkv_brokers.decisions import Pins
from zkv_brokers.group import Group
from zkv_brokers.members import Members, Server, Worker

RULE = "bsp: the update needs a contribution of every worker"


def member(number: int) -> Worker:
    hello = c.WorkerHello(f"w{number}", number, 0, False, f"host{number}", 100 + number)
    return Worker(peer=number + 50, number=number, incarnation=number + 1, hello=hello)


def made(count: int, rule: str = "bsp") -> tuple[Members, Group]:
    """Members and a group in which all have begun."""
    members = Members(term=1, servers_wanted=1)
    for number in range(count):
        members.workers[number + 1] = member(number)
    group = Group(0, policy(rule), members_min=1, servers=[0], pins=Pins(4))
    group.incarnations.update({number: number + 1 for number in range(count)})
    group.sync.handle(Joined(0, tuple(range(1, count))))
    return members, group


def silent(one: Any) -> float:
    return 0.25 * one.peer


def test_a_blocked_worker_is_told_who_is_missing_where_and_since_when():
    members, group = made(3)
    group.sync.handle(Finished(0, 1))
    group.sync.handle(Finished(2, 1))
    reason = reasons.blocked(group, members.workers[1], members, silent, "the next batch")
    assert reason is not None
    assert reason.on == (Who(1, "w1", "host1", 0, 12.75),)
    assert (reason.rule, reason.need, reason.have) == (RULE, 3, 2)
    assert reason.text() == (
        "the next batch waits for worker 1 ('w1' on host1, clock 0, last heard 12.8 s ago): "
        f"{RULE}; it has 2 of 3"
    )
    plain = json.loads(json.dumps(reason.to_plain()))
    assert plain["text"] == reason.text()
    assert {"rule", "on", "need", "have", "text"} <= plain.keys()
    assert plain["on"] == [
        {
            "number": 1,
            "name": "w1",
            "host": "host1",
            "clock": 0,
            "last_heard_s": 12.75,
            "role": "worker",
        }
    ]
    assert reasons.blocked(group, members.workers[2], members, silent, "the next batch") is None


def test_of_many_four_are_named_and_the_others_counted():
    members, group = made(7)
    group.sync.handle(Finished(6, 1))
    reason = reasons.blocked(group, members.workers[7], members, silent, "the next batch")
    assert reason is not None
    assert [who.number for who in reason.on] == [0, 1, 2, 3]
    assert reason.more == 2
    assert " and 2 more: bsp" in reason.text()


def test_under_a_slack_only_the_slow_are_named():
    members, group = made(3, "ssp:1")
    for worker, grant in ((0, 1), (0, 2), (1, 1)):
        group.sync.handle(Finished(worker, grant))
    reason = reasons.blocked(group, members.workers[1], members, silent, "the next batch")
    assert reason is not None
    assert [(who.number, who.clock) for who in reason.on] == [(2, 0)]
    assert (reason.need, reason.have) == (1, 0)


def test_a_server_that_lacks_a_contribution_is_named_with_its_address():
    who = Who(1, "s", "far", 0, 1.5, "server", "tcp://10.0.0.2:5600")
    reason = Reason(RULE, (who,), 2, 1, "the next batch", ON_THEIR_WAY)
    assert reason.text() == f"the next batch waits for {ON_THEIR_WAY}: {RULE}; it has 1 of 2"
    assert reason.to_plain()["on"][0]["address"] == "tcp://10.0.0.2:5600"
    assert who.text() == "server 1 ('s' at tcp://10.0.0.2:5600, last heard 1.5 s ago)"


def test_a_barrier_names_those_who_are_not_there():
    members, _ = made(3)
    for number in (1, 3):
        members.workers[number].barrier = 2
    reason = reasons.at_barrier(members.workers[1], members, lambda number: 7, silent)
    assert (reason.need, reason.have) == (3, 2)
    assert [(who.number, who.clock) for who in reason.on] == [(1, 7)]
    assert reason.text() == "barrier 2 waits for worker 1 ('w1' on host1, pid 101)"


def test_the_start_line_and_missing_servers_count_both():
    members, _ = made(2)
    members.world_min = 3
    missing = reasons.workers_missing(members)
    assert missing is not None
    assert (missing.need, missing.have) == (3, 2)
    assert missing.text().startswith("waiting for 1 of 3 workers to join; here are 0 ('w0' on")
    servers = reasons.servers_missing(members, "tcp://10.0.0.1:5555")
    assert servers is not None
    assert (servers.need, servers.have) == (1, 0)
    assert "zkv server --broker tcp://10.0.0.1:5555" in servers.text()
    members.servers[0] = SimpleNamespace()  # type: ignore[assignment]
    members.world_min = 2
    assert reasons.servers_missing(members, "tcp://10.0.0.1:5555") is None
    assert reasons.workers_missing(members) is None


@given(
    numbers=st.lists(st.integers(0, 10**6), min_size=1, max_size=NAMES_MAX, unique=True),
    more=st.integers(0, 9),
    need=st.integers(0, 99),
    have=st.integers(0, 99),
    name=st.text(min_size=1, max_size=20),
)
def test_the_words_name_all_that_the_value_has(numbers, more, need, have, name):
    on = tuple(Who(number, name, "h") for number in numbers)
    reason = Reason("some rule", on, need, have, "x", more=more)
    text = reason.text()
    assert all(who.text() in text for who in on)
    assert (f"and {more} more" in text) == bool(more)
    assert text.endswith(f"some rule; it has {have} of {need}")
    assert len(reason.to_plain()["on"]) == len(numbers)


def test_who_is_out_of_touch_is_named_to_those_whom_nothing_else_stops():
    members, _ = made(7)
    worker = members.workers[7]
    hello = c.ServerHello("s", "tcp://s:1", 0, "host", 1, False)
    members.servers[0] = Server(99, 0, hello)
    assert reasons.out_of_touch(worker, members, lambda one: 1.0) is None
    reason = reasons.out_of_touch(worker, members, lambda one: 3.0 if one.peer == 99 else 0.1)
    assert reason is not None
    assert reason.text() == "nothing is heard of server 0 ('s' at tcp://s:1, pid 1) for 3.0 s"
    assert reason.on == (Who(0, "s", "host", 0, 3.0, "server", "tcp://s:1"),)
    reason = reasons.out_of_touch(worker, members, lambda one: 3.0)
    assert reason is not None
    assert reason.text().endswith(" and 3 more")
    assert [who.role for who in reason.on] == ["server", "worker", "worker", "worker"]
