"""Bad input at a worker: any message in any order is taken, turned down or told, never fatal."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import data_messages, messages, texts

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.errors import VersionMismatch
from zkv.link import Link
from zkv.wire import (
    MODEL,
    PROTOCOL_VERSION,
    PULLS,
    SEEDS,
    BlockSpec,
    ContributionId,
    KeyEntry,
    KeySpec,
    Segment,
    TableEntry,
    TableSpec,
    encode,
    open_envelope,
)
from zkv_workers import signals as s
from zkv_workers.pulls import pull_of
from zkv_workers.session import Session, SessionConfig

ME = 1_048_577
few = st.integers(0, 3)
groups = st.sampled_from([MODEL, PULLS, SEEDS, 1, 2, 77])
keys = st.sampled_from(["a", "b", 7])
names = st.builds(ContributionId, st.sampled_from([0, ME, ME + 1]), groups, few)
payloads = st.integers(0, 40).map(lambda size: np.full(size, 0x3F, np.uint8))
kids = st.lists(few, max_size=3)

ENTRIES = [
    KeyEntry(0, KeySpec("a", "float32", (2,))),
    KeyEntry(1, KeySpec("b", "float32", (3,))),
]
BLOCKS = [BlockSpec(0, 0, [Segment(0, 0, 2), Segment(1, 0, 3)]), BlockSpec(3, 0, [])]
TABLES = (TableEntry(2, TableSpec("t", 1, "float32", "zeros", 0), [3]),)
layouts = st.builds(
    c.Layout, few, st.just(ENTRIES), st.just(BLOCKS), st.booleans(), few, st.just(TABLES)
)
granted = st.builds(
    c.Granted, groups, few, few, st.booleans(), few, few, few, few, st.just([]) | kids, few
)
from_broker = st.one_of(
    st.builds(
        c.Welcome, few, st.just(ME), few, few, few,
        st.just([c.ServerAt(0, "s", "tcp://s:1")]), texts, texts,
    ),
    layouts,
    granted,
    st.builds(c.Ready, few),
    st.builds(c.Regrouped, few, st.integers(1, 3), st.integers(5, 8), few),
    st.builds(c.Cancel, groups, few),
    st.builds(c.Settled, st.lists(st.tuples(groups, few, st.integers(-1, 3), texts), max_size=2)),
    st.builds(c.Reply, few, st.none() | few | texts),
    st.builds(c.Refusal, st.integers(1, 3), texts, texts),
    st.builds(c.Waiting, texts),
    messages.filter(lambda m: not isinstance(m, c.Fatal | c.Bye | c.Refusal)),
)  # fmt: skip
from_server = st.one_of(
    st.builds(
        d.Block, few, st.just(ME), groups, few, few, few, st.sampled_from(["none", "zip"]), kids
    ),
    st.builds(d.Rows, few, st.just(ME), few, st.sampled_from(["", "no"])),
    st.builds(d.Ack, few, st.just(ME), st.lists(st.tuples(names, st.integers(-1, 3)), max_size=3)),
    data_messages.filter(lambda m: not isinstance(m, d.Fenced)),
)
OTHER = ME + 1
members = [c.Companion(n, ME + n, 1, "here", f"tcp://w:{n}") for n in range(2)]
joint = st.one_of(
    st.builds(
        c.Granted, st.just(MODEL), few, few, st.just(True), few, few, few, few, st.just([]), few,
        joint=st.booleans(), ahead=st.booleans(),
    ),
    st.builds(
        c.Together, few, few, st.sampled_from(["ring", "hierarchical", "star"]),
        st.just(members) | st.just(members[1:]), few,
    ),
    st.builds(c.Separate, few, few),
)  # fmt: skip
addends = st.builds(
    d.Addend, st.builds(ContributionId, st.just(OTHER), st.just(MODEL), few), few, st.just(1.0)
)
from_peer = st.one_of(
    st.builds(
        d.Push, st.builds(ContributionId, st.just(OTHER), st.just(MODEL), few), few, few,
        st.just("none"), few, of=st.lists(addends, max_size=2).map(tuple),
    ),
    st.builds(d.Pass, st.just(OTHER), few, few),
    st.builds(d.Took, st.just(OTHER), st.lists(st.tuples(names, few), max_size=2), st.just([])),
    data_messages,
)  # fmt: skip
array = np.ones(2, np.float32)
ROW_IDS = np.arange(3, dtype=np.uint64)
token = st.integers(1, 9)
calls = st.one_of(
    st.builds(s.Join, token),
    st.builds(
        s.Initialise,
        token,
        st.just(tuple(entry.spec for entry in ENTRIES)),
        st.just({"a": array, "b": np.ones(3, np.float32)}),
        st.booleans(),
        tables=st.just(tuple(entry.spec for entry in TABLES)),
    ),
    st.builds(s.AskRows, token, st.integers(1, 2), st.just(ROW_IDS), few, few),
    st.builds(s.PushRows, few, st.just(3), st.just(np.zeros(12, np.uint8))),
    st.builds(s.ReleaseRows, few),
    st.builds(s.Begin, token),
    st.builds(s.Await, token, few, st.lists(st.integers(0, 1), max_size=2).map(tuple)),
    st.builds(s.Finish, token, few, st.floats(0, 9), kids.map(tuple)),
    st.builds(s.Withdraw, few),
    st.builds(s.Report, st.just([c.Account(0, "int8+ef", 8, 4, 0.1, 0.5)])),
    st.builds(s.PushPlain, token, keys, st.just(array), st.just(1.0)),
    st.builds(s.Pull, token, st.lists(keys, max_size=2).map(tuple), st.booleans()),
    st.builds(s.Barrier, token),
    st.builds(s.Ask, token, st.sampled_from(["", "lr"]), texts),
    st.builds(s.GiveUp, token),
    st.just(s.Tick()),
)


class Bench:
    """A session and the broker's end of its link, for a broker that says anything."""

    def __init__(self) -> None:
        self.session = Session(SessionConfig("w", "tcp://broker:5555"), instance=11)
        self.link = Link(22)
        self.now = 0.0
        self.out: list[s.Output] = []

    def feed(self, event: s.Input) -> list[s.Output]:
        self.now += 0.01
        out = self.session.handle(event, self.now)
        for one in out:
            if isinstance(one, s.SendControl):
                self.link.receive(c.decode_messages(open_envelope(one.frame)), self.now)
            if isinstance(one, s.SendData | s.SendPeer):
                d.encode_data(one.message)
        self.out += out
        return out

    def say(self, message: c.Message) -> None:
        self.link.send(message)
        for packet in self.link.outgoing(self.now):
            self.feed(s.FromBroker(c.encode_packet(packet)))


def answers(bench: Bench, token_: int) -> list[Any]:
    return [o for o in bench.out if isinstance(o, s.Answer | s.Fail) and o.token == token_]


turns = st.one_of(
    st.tuples(st.just("call"), calls, st.none()),
    st.tuples(st.just("broker"), from_broker, st.none()),
    st.tuples(st.just("server"), from_server, payloads),
    st.tuples(st.just("broker"), joint, st.none()),
    st.tuples(st.just("peer"), from_peer, payloads | st.just(np.zeros(20, np.uint8))),
)


@given(plan=st.lists(turns, max_size=25), joined=st.booleans())
@settings(max_examples=150)
def test_no_order_of_calls_and_messages_breaks_a_session(
    plan: list[tuple[str, Any, Array | None]], joined: bool
) -> None:
    bench = Bench()
    if joined:
        bench.feed(s.Join(99))
        bench.say(c.Welcome(0, ME, 0, 1, 1, [c.ServerAt(0, "s", "tcp://s:1")], "", "bsp"))
        bench.feed(
            s.Initialise(
                98, tuple(e.spec for e in ENTRIES), {"a": array, "b": np.ones(3, np.float32)}, False
            )
        )
        bench.say(c.Layout(1, ENTRIES, BLOCKS, False, 1))
    for who, what, payload in plan:
        match who:
            case "call":
                bench.feed(what)
            case "broker":
                bench.say(what)
            case "peer":
                needs = isinstance(what, d.Block | d.Push | d.Pass | d.Probe)
                bench.feed(s.FromPeer(what, payload if needs else None))
            case _:
                needs = isinstance(what, d.Block | d.Push)
                bench.feed(s.FromServer(what, payload if needs else None))
    # It still answers: a status call goes out, and its reply comes back.
    if bench.session.broken is None:
        bench.feed(s.Ask(55))
        bench.say(c.Reply(55, {"version": 3}))
        assert answers(bench, 55) == [s.Answer(55, {"version": 3})]


def is_packet(frame: bytes) -> bool:
    """Whether these bytes are a whole packet of any version."""
    try:
        values = msgspec.msgpack.decode(frame)
    except Exception:
        return False
    if not isinstance(values, list) or len(values) != 6 or not isinstance(values[5], list):
        return False
    return all(type(one) is int and 0 <= one < 2**63 for one in values[:5])


@given(frames=st.lists(st.binary(max_size=60).filter(lambda one: not is_packet(one)), max_size=8))
@example(frames=[b"\x91\x00"])
@example(frames=[b"\x93\x00\x00\x00", b"\x92\x02\x80"])
@example(frames=[b"\x96\x00\x00\x00\x00\x00\x00"])
def test_any_bytes_from_the_broker_are_dropped(frames: list[bytes]) -> None:
    bench = Bench()
    bench.feed(s.Join(99))
    for frame in frames:
        bench.feed(s.FromBroker(frame))
    bench.say(c.Welcome(0, ME, 0, 1, 1, [], "", "bsp"))
    assert answers(bench, 99) == [s.Answer(99, s.Membership(0, ME, 1, "bsp"))]


def test_a_broker_of_another_version_ends_the_session_with_both_numbers() -> None:
    bench = Bench()
    bench.feed(s.Join(99))
    bench.feed(s.FromBroker(encode((PROTOCOL_VERSION + 1, 5, 0, 1, 1, [["of", "another", 1]]))))
    (failed,) = answers(bench, 99)
    assert isinstance(failed, s.Fail)
    assert isinstance(failed.error, VersionMismatch)
    assert "protocol 2, this process speaks 1" in str(failed.error)


def test_a_broker_that_wants_values_which_were_not_offered_is_turned_down() -> None:
    bench = Bench()
    bench.feed(s.Join(99))
    bench.say(c.Welcome(0, ME, 0, 1, 1, [], "", "bsp"))
    bench.say(c.Layout(1, ENTRIES, BLOCKS, True, 1))
    assert [o.level for o in bench.out if isinstance(o, s.Narrate)] == ["warning"]
    assert bench.session.broken is None


def test_what_the_wait_before_a_grant_was_for_is_still_known_after_it() -> None:
    bench = Bench()
    bench.feed(s.Join(99))
    bench.say(c.Welcome(0, ME, 0, 1, 1, [], "", "bsp"))
    for grant, said in ((1, "worker 1 is late"), (2, "")):
        if said:
            bench.say(c.Waiting(said))
        bench.feed(s.Begin(100 + grant))
        bench.say(c.Granted(0, grant, 0, True, 0, 0, 0, 0, [], 0))
        bench.say(c.Cancel(0, grant))
        requests = bench.session.requests
        assert (requests.reason, requests.last_reason) == ("", said)


def test_a_pull_of_many_keys_is_told_in_few_words() -> None:
    """Whoever waits for a hundred thousand reads a line, not a megabyte."""
    assert pull_of(()) == "the pull of the model"
    assert pull_of(("a", 7)) == "the pull of 'a', 7"
    many = tuple(f"w{number}" for number in range(100_000))
    assert pull_of(many) == (
        "the pull of 'w0', 'w1', 'w2', 'w3', 'w4', 'w5', 'w6', 'w7' and 99992 more"
    )
