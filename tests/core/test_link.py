"""Links over a channel that loses, repeats and reorders packets: in order, each exactly once."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv import control as c
from zkv.link import Link, PeerChanged
from zkv.wire import MESSAGES_PER_PACKET_MAX, open_envelope


def says(number: int) -> c.Message:
    """A message that can be told from all others."""
    return c.Status(number)


class Channel:
    """Packets on their way between two links, with faults drawn from a seed."""

    def __init__(self, seed: int, *, loss: float, repeat: float, reorder: bool) -> None:
        self.chance = random.Random(seed)
        self.loss, self.repeat, self.reorder = loss, repeat, reorder
        self.flying: list[tuple[Link, bytes]] = []
        self.got: dict[int, list[c.Message]] = {}
        self.changes: dict[int, list[PeerChanged]] = {}
        self.now = 0.0

    def put(self, packets: Sequence[c.Packet], to: Link) -> None:
        for packet in packets:
            for _ in range(2 if self.chance.random() < self.repeat else 1):
                if self.chance.random() >= self.loss:
                    self.flying.append((to, c.encode_packet(packet)))

    def deliver(self) -> None:
        """Let one packet arrive."""
        at = self.chance.randrange(len(self.flying)) if self.reorder else 0
        link, frame = self.flying.pop(at)
        change, messages = link.receive(c.decode_messages(open_envelope(frame)), self.now)
        self.got.setdefault(link.instance, []).extend(messages)
        if change is not None:
            self.changes.setdefault(link.instance, []).append(change)

    def turn(self, one: Link, two: Link, deliveries: int) -> None:
        """Let both send, some packets arrive, and time pass."""
        self.put(one.outgoing(self.now), two)
        self.put(two.outgoing(self.now), one)
        for _ in range(min(deliveries, len(self.flying))):
            self.deliver()
        self.now += 0.3

    def settle(self, one: Link, two: Link, turns: int = 400) -> None:
        """Let time pass without further faults until both are idle."""
        self.loss = 0.0
        for _ in range(turns):
            self.turn(one, two, len(self.flying))
            if one.idle and two.idle and not self.flying:
                return
        raise AssertionError("the links did not come to rest")


faults = st.fixed_dictionaries(
    {
        "loss": st.sampled_from([0.0, 0.1, 0.5, 0.9]),
        "repeat": st.sampled_from([0.0, 0.3, 1.0]),
        "reorder": st.booleans(),
    }
)


@given(
    seed=st.integers(0, 2**32),
    options=faults,
    plan=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 9)), max_size=20),
)
def test_every_message_arrives_once_and_in_order_and_is_acknowledged(
    seed: int, options: dict[str, float], plan: list[tuple[int, int, int]]
) -> None:
    channel = Channel(seed, **options)
    one, two = Link(11), Link(22)
    sent: dict[int, list[c.Message]] = {22: [], 11: []}
    for first, second, deliveries in plan:
        for link, count, to in ((one, first, 22), (two, second, 11)):
            for _ in range(count):
                message = says(len(sent[to]))
                sent[to].append(message)
                link.send(message)
        channel.turn(one, two, deliveries)
        for receiver, messages in channel.got.items():
            assert messages == sent[receiver][: len(messages)]
    channel.settle(one, two)
    for receiver, messages in sent.items():
        assert channel.got.get(receiver, []) == messages
    # Nothing is kept of what was acknowledged.
    assert not one._unacked
    assert not two._unacked
    assert one.deadline() is None
    assert two.deadline() is None


@given(
    seed=st.integers(0, 2**32),
    options=faults,
    before=st.integers(0, 6),
    after=st.integers(0, 6),
    deliveries=st.integers(1, 12),
)
def test_a_restarted_peer_is_reported_and_nothing_of_the_old_one_comes_after(
    seed: int, options: dict[str, float], before: int, after: int, deliveries: int
) -> None:
    channel = Channel(seed, **options)
    one, old = Link(11), Link(22)
    # They know each other before the restart.
    one.send(says(0))
    old.send(says(0))
    channel.settle(one, old)
    channel.loss, channel.got = options["loss"], {}
    for number in range(before):
        old.send(says(100 + number))
        one.send(says(200 + number))
    channel.turn(one, old, deliveries)
    # The process dies: what was on its way to it is lost, what it sent may still arrive.
    channel.flying = [entry for entry in channel.flying if entry[0] is one]
    new = Link(33)
    for number in range(after):
        new.send(says(300 + number))
    new.send(says(399))
    channel.put(new.outgoing(channel.now), one)
    heard = len(channel.got.get(11, []))
    for turn in range(200):
        if turn == 50:
            channel.loss = 0.0
        channel.turn(one, new, len(channel.flying))
        fresh = [m.token for m in channel.got.get(11, [])[heard:]]  # type: ignore[union-attr]
        if PeerChanged(33, 22) in channel.changes.get(11, []):
            break
    assert channel.changes[11][-1] == PeerChanged(33, 22)
    # Old messages may come first, then the new ones; never an old one after a new one.
    assert fresh == sorted(fresh)
    # What was queued for the old instance is forgotten; its owner tells the new one what it needs.
    assert one.idle
    one.send(says(500))
    channel.settle(one, new)
    assert [m.token for m in channel.got[33]] == [500]  # type: ignore[union-attr]
    tokens = [m.token for m in channel.got[11]]  # type: ignore[union-attr]
    assert [t for t in tokens if t >= 300] == [*range(300, 300 + after), 399]
    assert channel.changes[11].count(PeerChanged(33, 22)) == 1


def packets(link: Link, *tokens: int, now: float = 0.0) -> list[c.Packet]:
    for token in tokens:
        link.send(says(token))
    return link.outgoing(now)


def test_the_first_peer_is_a_change_from_nobody() -> None:
    one, two = Link(11), Link(22)
    (hello,) = packets(one, 1)
    assert (hello.source, hello.target, hello.number) == (11, 0, 1)
    assert two.receive(hello, 5.0) == (PeerChanged(11, 0), [says(1)])
    assert two.heard == 5.0
    (answer,) = two.outgoing(5.0)
    assert (answer.target, answer.received, answer.messages) == (11, 2, [])
    assert one.receive(answer, 6.0) == (PeerChanged(22, 0), [])
    assert one.idle


def test_a_packet_for_another_instance_is_ignored_but_answered() -> None:
    broker = Link(33)
    worker = Link(11, peer=22)
    (packet,) = packets(worker, 1, 2)
    change, messages = broker.receive(packet, 0.0)
    assert (change, messages) == (PeerChanged(11, 0), [])
    (answer,) = broker.outgoing(0.0)
    assert (answer.source, answer.target, answer.received) == (33, 11, 1)
    change, messages = worker.receive(answer, 0.0)
    assert (change, messages) == (PeerChanged(33, 22), [])


def test_an_acknowledgement_for_another_instance_acknowledges_nothing() -> None:
    link = Link(11, peer=22)
    packets(link, 1)
    link.receive(c.Packet(22, 99, 1, 50, []), 0.0)
    link.receive(c.Packet(22, 0, 1, 50, []), 0.0)
    assert not link.idle
    link.receive(c.Packet(22, 11, 1, 2, []), 0.0)
    assert link.idle


def test_a_source_of_0_is_nobody_and_a_former_peer_does_not_come_back() -> None:
    link = Link(11, peer=22)
    assert link.receive(c.Packet(0, 11, 1, 1, [says(1)]), 0.0) == (None, [])
    assert link.peer == 22
    link.receive(c.Packet(33, 11, 1, 1, [says(2)]), 0.0)
    assert link.receive(c.Packet(22, 11, 1, 1, [says(3)]), 0.0) == (None, [])
    assert link.peer == 33


def test_a_rising_link_lets_only_a_higher_instance_take_the_peers_place() -> None:
    link = Link(11, peer=22, rising=True)
    assert link.receive(c.Packet(21, 11, 1, 1, [says(1)]), 0.0) == (None, [])
    assert link.peer == 22
    assert link.receive(c.Packet(23, 11, 1, 1, [says(2)]), 0.0) == (PeerChanged(23, 22), [says(2)])


def test_an_acknowledgement_of_what_was_never_sent_changes_nothing() -> None:
    link = Link(11, peer=22)
    packets(link, 1)
    link.send(says(2))
    link.receive(c.Packet(22, 11, 1, 2**63 - 1, []), 0.0)
    (rest,) = link.outgoing(0.0)
    assert (rest.number, rest.messages) == (2, [says(2)])


def test_what_is_not_acknowledged_goes_out_again_after_1_2_4_8_and_8_times_the_first_pause() -> (
    None
):
    link = Link(11, peer=22, resend_s=1.0)
    packets(link, 1)
    times = []
    for _ in range(6):
        due = link.deadline()
        assert due is not None
        assert link.outgoing(due - 0.001) == []
        (again,) = link.outgoing(due)
        assert again.messages == [says(1)]
        times.append(due)
    assert times == [1, 3, 7, 15, 23, 31]
    link.receive(c.Packet(22, 11, 1, 2, []), 31.0)
    assert link.deadline() is None
    packets(link, 2, now=40.0)
    assert link.deadline() == 41.0


def test_a_gap_is_filled_by_the_resend_and_later_messages_wait_for_it() -> None:
    one, two = Link(11), Link(22, peer=11)
    (lost,) = packets(one, 1)
    (late,) = packets(one, 2)
    assert two.receive(late, 0.0)[1] == []
    (again,) = one.outgoing(1.0)
    assert two.receive(again, 1.0)[1] == [says(1), says(2)]
    assert two.receive(lost, 2.0)[1] == []


def test_a_thousand_messages_travel_in_packets_of_at_most_512() -> None:
    one, two = Link(11), Link(22)
    out = packets(one, *range(1000))
    assert [len(packet.messages) for packet in out] == [MESSAGES_PER_PACKET_MAX, 488]
    got = [message for packet in out for message in two.receive(packet, 0.0)[1]]
    assert got == [says(number) for number in range(1000)]


@pytest.mark.parametrize("count", [1, 3])
def test_a_bare_acknowledgement_is_sent_once_for_each_arrival(count: int) -> None:
    one, two = Link(11), Link(22)
    (packet,) = packets(one, 1)
    for _ in range(count):
        two.receive(packet, 0.0)
        assert [answer.received for answer in two.outgoing(0.0)] == [2]
    assert two.outgoing(0.0) == []


def test_a_thousand_restarts_of_the_peer_are_remembered_in_bounded_memory() -> None:
    link = Link(11)
    for source in range(100, 1100):
        link.receive(c.Packet(source, 11, 1, 1, [says(source)]), 0.0)
    assert len(link._former) <= 64
