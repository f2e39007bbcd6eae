"""How often members beat: one setting of the broker, which all are told, and what follows it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench import ME

from zkv import control as c
from zkv import heartbeat as h
from zkv.errors import BrokerLost, ConfigError, ProtocolError
from zkv.link import Link
from zkv.policy import policy
from zkv.wire import open_envelope
from zkv_brokers import router as r
from zkv_brokers.node import Node, NodeConfig, SendControl
from zkv_brokers.recovery import FREE
from zkv_cli.roles import broker_config
from zkv_cli.settings import BrokerSection, load
from zkv_workers import signals as s
from zkv_workers.session import Session, SessionConfig

CONFIG = r.RouterConfig("tcp://broker:5555", policy("asp"), beat_s=0.05, worker_lost_s=1.0)
WORKER = c.WorkerHello("w0", 0, 1, False, "host", 1)
SERVER = c.ServerHello("s", "tcp://s:1", 0, "host", 1, False)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0.5s", 0.5), ("50ms", 0.05), ("20ms", 0.02), ("1min", 60.0), (2, 2.0), (0.1, 0.1)],
)
def test_a_time_between_beats_is_a_number_of_seconds_or_has_a_unit(text, seconds):
    assert h.beat(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "often", "-1s", "0s", "19ms", "61", "2min", "nan", "inf", "1e400", True, None, "5h"],
)
def test_other_times_between_beats_are_refused_with_the_bounds(text):
    with pytest.raises(ValueError, match=r"from 0\.02 to 60 s|0\.02 to 60 s apart"):
        h.beat(text)


def test_it_is_a_setting_like_the_brokers_others(tmp_path, monkeypatch):
    file = tmp_path / "zkv.toml"
    file.write_text('[broker]\nbeat_s = "40ms"\n')
    assert load().broker.beat_s == h.BEAT_S == 0.5
    assert load(file=file).broker.beat_s == 0.04
    monkeypatch.setenv("ZKV_BROKER__BEAT_S", "30ms")
    assert load(file=file).broker.beat_s == 0.03
    section = load({("broker", "beat_s"): "20ms"}, file).broker
    assert section.beat_s == 0.02
    made = broker_config(section)
    assert made.beat_s == made.router("tcp://b:1", "", "").beat_s == 0.02
    with pytest.raises(ConfigError, match=r"--beat: '70s': heartbeats are from 0\.02 to 60 s"):
        load({("broker", "beat_s"): "70s"})


def test_beats_that_are_rarer_than_what_makes_a_member_lost_are_refused():
    flags = {("broker", "worker_lost_s"): 2.0, ("broker", "beat_s"): "2s"}
    with pytest.raises(ConfigError, match=r"after 2 s of silence \(worker_lost_s\)"):
        load(flags)
    flags = {("broker", "server_lost_s"): 1.0, ("broker", "beat_s"): "2s"}
    with pytest.raises(ConfigError, match=r"after 1 s of silence \(server_lost_s\)"):
        load(flags)
    assert BrokerSection(beat_s="2s").beat_s == 2.0


def test_a_later_broker_of_a_run_keeps_the_time_that_its_members_were_told():
    assert "beat_s" not in FREE


class Talk:
    """One peer's end of its link with a router."""

    def __init__(self, router: r.Router, instance: int) -> None:
        self.router, self.link = router, Link(instance)
        self.route = str(instance).encode()
        self.heard: list[c.Message] = []

    def say(self, now: float, *messages: c.Message) -> None:
        for message in messages:
            self.link.send(message)
        events = [r.Received(self.route, c.encode_packet(p)) for p in self.link.outgoing(now)]
        for action in self.router.turn([*events, r.Tick()], now):
            if isinstance(action, r.Send) and action.route == self.route:
                packet = c.decode_messages(open_envelope(action.frame))
                self.heard += self.link.receive(packet, now)[1]

    def told(self, kind: type) -> list[c.Message]:
        return [one for one in self.heard if isinstance(one, kind)]


def cluster(config: r.RouterConfig = CONFIG) -> tuple[r.Router, Talk, Talk]:
    """A router, its server and a worker that was let in, at time 0."""
    router = r.Router(config, term=1, instance=5)
    server, worker = Talk(router, 11), Talk(router, 22)
    server.say(0.0, SERVER)
    worker.say(0.0, WORKER)
    return router, server, worker


def test_members_are_told_as_they_come_in_and_the_broker_beats_as_often():
    _, server, worker = cluster()
    assert [one.beat_s for one in server.told(c.ServerWelcome)] == [0.05]
    assert [one.beat_s for one in worker.told(c.Welcome)] == [0.05]
    for turn in range(1, 11):
        worker.say(turn * 0.05 + 0.001)
    # And one to who had come in at 0.
    assert len(worker.told(c.Beat)) in (10, 11)


def beats_of_session(told_s: float, trace: str = "") -> int:
    """How many beats a worker sends in its first second and a bit."""
    session = Session(
        SessionConfig("w", "tcp://b:1", trace=trace, beat_s=0.1 if trace else h.BEAT_S), instance=11
    )
    broker, heard = Link(22), []
    out = [*session.handle(s.Tick(), 0.0), *session.handle(s.Join(1), 0.0)]
    at = [c.ServerAt(0, "s", "tcp://s:1")]
    broker.send(c.Welcome(0, ME, 0, 1, 1, at, "", "bsp", beat_s=told_s))
    for packet in broker.outgoing(0.0):
        out += session.handle(s.FromBroker(c.encode_packet(packet)), 0.0)
    for turn in range(1, 106):
        out += session.handle(s.Tick(), turn / 100)
    for one in out:
        if isinstance(one, s.SendControl):
            packet = c.decode_messages(open_envelope(one.frame))
            heard += broker.receive(packet, 0.0)[1]
    return sum(isinstance(one, c.Beat) for one in heard)


@pytest.mark.parametrize(
    ("told_s", "trace", "beats"), [(0.05, "", 20), (0.5, "", 3), (0.5, "folder", 10)]
)
def test_a_worker_beats_as_often_as_it_was_told_and_a_traced_one_no_slower_than_it_would(
    told_s, trace, beats
):
    assert abs(beats_of_session(told_s, trace) - beats) <= 1


@pytest.mark.parametrize(("told_s", "asks", "beats"), [(0.05, False, 20), (0.5, True, 10)])
def test_a_server_does_so_too(told_s, asks, beats):
    config = NodeConfig("tcp://b:1", "s", "tcp://s:1", asks=asks, beat_s=0.1 if asks else h.BEAT_S)
    node, broker, heard = Node(config, instance=11, now=0.0), Link(22), []
    out = node.tick(0.0)
    broker.send(c.ServerWelcome(0, 1, 1, told_s))
    for packet in broker.outgoing(0.0):
        out += node.broker_says(c.encode_packet(packet), 0.0)
    for turn in range(1, 106):
        out += node.tick(turn / 100)
    for one in out:
        if isinstance(one, SendControl):
            heard += broker.receive(c.decode_messages(open_envelope(one.frame)), 0.0)[1]
    assert abs(sum(isinstance(one, c.Beat) for one in heard) - beats) <= 1


def test_what_a_broker_tells_has_bounds():
    link = Link(22)
    link.send(c.ServerWelcome(0, 1, 1, 0.0))
    (packet,) = link.outgoing(0.0)
    with pytest.raises(ProtocolError, match=r"0\.02"):
        c.decode_messages(open_envelope(c.encode_packet(packet)))


@pytest.mark.parametrize(("beat_s", "gone"), [(0.05, True), (0.5, False)])
def test_a_holder_of_a_name_that_is_silent_for_three_beats_loses_it(beat_s, gone):
    router, _, _ = cluster(replace(CONFIG, beat_s=beat_s))
    (old,) = router.members.workers.values()
    fresh = Talk(router, 33)
    fresh.say(0.01, WORKER)
    fresh.say(0.1)
    assert not fresh.told(c.Welcome)
    fresh.say(0.2)
    assert (old.incarnation not in router.members.workers) == gone
    assert bool(fresh.told(c.Welcome)) == gone


@pytest.mark.parametrize(("beat_s", "gone"), [(0.05, True), (0.5, False)])
def test_a_server_whose_connection_broke_is_lost_after_three_beats(beat_s, gone):
    router, _, worker = cluster(replace(CONFIG, beat_s=beat_s))
    router.turn([r.ServerLink(0, False)], 0.0)
    worker.say(0.1)
    assert router.failed is None
    worker.say(0.2)
    assert (len(router.members.servers) == 0 or router.failed is not None) == gone


def test_a_member_with_rare_beats_gives_a_broker_three_of_them():
    session = Session(SessionConfig("w", "tcp://b:1", broker_lost_s=1.0), instance=11)
    broker = Link(22)
    session.handle(s.Join(1), 0.0)
    at = [c.ServerAt(0, "s", "tcp://s:1")]
    broker.send(c.Welcome(0, ME, 0, 1, 1, at, "", "bsp", beat_s=2.0))
    for packet in broker.outgoing(0.0):
        session.handle(s.FromBroker(c.encode_packet(packet)), 0.0)
    session.handle(s.Tick(), 5.9)
    assert session.broken is None
    session.handle(s.Tick(), 6.1)
    assert isinstance(session.broken, BrokerLost)


def test_what_is_not_acknowledged_goes_out_again_after_two_beats_in_bounds():
    assert [h.link_resend_s(beat) for beat in (0.02, 0.05, 0.15, 0.5, 60.0)] == [
        *(0.2, 0.2, 0.3, 1.0, 1.0)
    ]
    router = r.Router(CONFIG, term=1, instance=5)
    sent = Link(11)
    sent.send(SERVER)
    (packet,) = sent.outgoing(0.0)
    frames = router.turn([r.Received(b"11", c.encode_packet(packet)), r.Tick()], 0.0)
    assert any(isinstance(one, r.Send) for one in frames)
    for now, again in ((0.19, False), (0.21, True)):
        router.hub.now = now
        out = [one for one in router.hub.outgoing() if isinstance(one, r.Send)]
        assert bool(out) == again


def test_clocks_are_looked_at_twice_in_a_beat():
    assert [h.tick_s(beat) for beat in (0.02, 0.05, 0.5, 60.0)] == [0.01, 0.025, 0.1, 0.1]
    assert h.tick_s(0.5, 0.05) == 0.05


def test_who_beats_irregularly_is_waited_for_as_long_as_that_is_nothing_new():
    steady, late, few = h.Rhythm(), h.Rhythm(), h.Rhythm()
    at = 0.0
    for number in range(40):
        steady.beaten(0.5 * number)
        late.beaten(at)
        at += 0.5 if number % 2 else 3.5
    for number in range(h.GAPS_LEAST):
        few.beaten(9.0 * number * number)
    assert steady.patience_s(10.0) == 10.0
    # The pauses are 0.5 and 3.5 s: 2 s in the middle, 1.5 s from it.
    assert late.patience_s(10.0) == 2.0 + h.MADS * 1.5
    assert late.patience_s(1.0) == h.FLOORS_MOST * 1.0
    assert few.patience_s(10.0) == 10.0
    assert h.Rhythm().patience_s(10.0) == 10.0


def test_a_member_is_put_out_by_its_own_rhythm():
    """Of two that are silent alike, the one stays whose beats have always come late."""

    def told(*gaps):
        router = r.Router(replace(CONFIG, worker_lost_s=1.0), term=1, instance=5)
        link, now = Link(9, resend_s=100.0), 0.0

        def say(*messages):
            for message in messages:
                link.send(message)
            for packet in link.outgoing(now):
                router.handle(r.Received(b"w", c.encode_packet(packet)), now)

        server = Link(8, resend_s=100.0)
        server.send(SERVER)
        for packet in server.outgoing(now):
            router.handle(r.Received(b"s", c.encode_packet(packet)), now)
        say(WORKER)
        assert len(router.members.workers) == 1
        for gap in gaps:
            now += gap
            say(c.Beat(now))
            router.handle(r.Tick(), now)
        router.handle(r.Tick(), now + 1.5)
        return len(router.members.workers)

    assert told(*[0.1, 0.3, 0.5, 0.7, 0.9] * 4) == 1
    assert told(*[0.5] * 20) == 0
