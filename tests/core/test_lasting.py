"""A broker's router and its journal: what it goes on from, with whom, and when it must not."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from zkv import control as c
from zkv.errors import BadSnapshot, JournalError
from zkv.link import STRANGER, Link, PeerChanged
from zkv.policy import policy
from zkv.roles import Holder
from zkv.snapshot import encode
from zkv.wire import SEEDS, ContributionId, KeySpec, open_envelope
from zkv_brokers import recovery
from zkv_brokers import router as r
from zkv_brokers.lasting import Lasting
from zkv_brokers.returning import ABANDONED_S
from zkv_brokers.signals import Complete, Find, Found, GiveUp, Written
from zkv_brokers.state import packed

CONFIG = r.RouterConfig("tcp://broker:5555", policy("bsp"), lasts=True)
SERVER = c.ServerHello("s", "tcp://s:1", 0, "host", 1, False)
WORKER = c.WorkerHello("w0", 0, 1, False, "host", 1)


class Peer:
    """A process that talks to whatever broker is there."""

    def __init__(self, instance: int, key: str = "") -> None:
        self.key = key
        self.link = Link(instance, rising=True)
        self.route = str(instance).encode()
        self.heard: list[c.Message] = []
        self.changes: list[PeerChanged] = []

    def say(self, broker: Lasting, *said: c.Message, lost: bool = False) -> None:
        """Say this to the broker, and hear what it answers to that, unless that is lost."""
        now = broker.now()
        for message in said:
            self.link.send(message)
        frames = [c.encode_packet(packet) for packet in self.link.outgoing(now)]
        # Receipts leave with the next tick.
        events = [*(r.Received(self.route, frame, self.key) for frame in frames), r.Tick()]
        for action in broker.turn(events, now):
            if isinstance(action, r.Send) and action.route == self.route and not lost:
                packet = c.decode_messages(open_envelope(action.frame))
                change, heard = self.link.receive(packet, now)
                self.changes += [change] if change is not None and change.before else []
                self.heard += heard


def broker(folder: Path, config: r.RouterConfig = CONFIG) -> Lasting:
    return Lasting(config, folder)


def killed(one: Lasting) -> None:
    """End a broker as a kill does: its journal is as it is."""
    one.close(done=False)


def test_members_are_taken_up_where_they_were_and_hear_what_they_had_missed(
    tmp_path: Path,
) -> None:
    one, server, worker = broker(tmp_path), Peer(11), Peer(22)
    server.say(one, SERVER)
    worker.say(one, WORKER, lost=True)
    state = packed(one.router)
    killed(one)

    two = broker(tmp_path)
    assert two.router.members.incarnations() == one.router.members.incarnations()
    assert two.router.members.term > one.router.members.term
    assert packed(recovery.recovered([recovery.state_record(one.router, 0.0)], CONFIG)[0]) == state
    worker.say(two, c.Beat(0.0))
    assert [m for m in worker.heard if isinstance(m, c.Welcome)] != []
    server.say(two, c.Beat(0.0))
    server.say(two, c.Beat(0.0))
    assert [change.goes_on for change in server.changes] == [True]
    assert server.link.idle
    assert sum(isinstance(m, c.ServerWelcome) for m in server.heard) == 1
    killed(two)


def test_the_time_without_a_broker_is_nobodys_silence(tmp_path: Path) -> None:
    one, server = broker(tmp_path), Peer(11)
    server.say(one, SERVER)
    last = one.router.hub.now
    killed(one)
    two = broker(tmp_path)
    # Its clock goes on from the last turn, whatever this machine's says by now.
    assert 0 <= two.now() - last < 60
    two._ahead_s += 1e6
    killed(two)
    three = broker(tmp_path)
    assert three.router.hub.silent_s(11) < 60
    killed(three)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"policy": policy("asp")}, "policy was 'bsp' and is 'asp'"),
        ({"servers": 2, "workers": 3}, "servers was 1 and is 2; workers was 1 and is 3"),
        ({"optimizer": "adam:lr=0.1"}, "optimizer was None and is 'adam:lr=0.1'"),
    ],
)
def test_a_journal_of_other_settings_is_not_gone_on_from_and_is_kept(
    tmp_path: Path, change: dict[str, object], told: str
) -> None:
    killed(broker(tmp_path))
    with pytest.raises(JournalError) as error:
        broker(tmp_path, replace(CONFIG, **change))
    assert told in str(error.value)
    assert f"remove {tmp_path}" in str(error.value)
    # How patient it is may change, and how many it takes.
    other = broker(tmp_path, replace(CONFIG, worker_lost_s=3.0, max_members=5, max_keys=6))
    assert other.router.config.max_keys == 6
    assert other.router.hub._peers_max == 2 * 5 + 1024
    killed(other)
    again = broker(tmp_path)
    assert again.router.config == CONFIG
    killed(again)


def test_a_journal_of_another_version_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(broker(tmp_path))
    monkeypatch.setattr(recovery, "VERSION", "9.9")
    with pytest.raises(JournalError, match=r"is of zkv 0\.\S+, this is zkv 9\.9"):
        broker(tmp_path)


def test_a_journal_that_makes_no_sense_is_told(tmp_path: Path) -> None:
    one = broker(tmp_path)
    assert one._file is not None
    one._file.append(b"\x92\xa5turns\x91\x92\x01\x91\xa1x")
    killed(one)
    with pytest.raises(JournalError, match="is no journal of a broker"):
        broker(tmp_path)


def test_nothing_is_said_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, server = broker(tmp_path), Peer(11)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(JournalError, match="No space left"):
        server.say(one, SERVER)
    assert server.heard == []
    monkeypatch.undo()
    killed(one)
    two = broker(tmp_path)
    server.link.again()
    server.say(two)
    assert any(isinstance(m, c.ServerWelcome) for m in server.heard)
    killed(two)


def test_a_run_that_nobody_comes_back_to_makes_way_for_a_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = broker(tmp_path)
    Peer(11).say(one, SERVER)
    Peer(22).say(one, WORKER)
    killed(one)

    two, fresh = broker(tmp_path), Peer(33)
    fresh.say(two, replace_name(SERVER, "fresh"))
    assert fresh.heard == []
    old = two.router
    with caplog.at_level(logging.WARNING):
        two._ahead_s += ABANDONED_S + 0.1
        two.turn([r.Tick()], two.now())
    assert "nobody of the run" in caplog.text
    assert two.router is not old
    assert (tmp_path / "journal.old").exists()
    # It is told that this is another broker, and announces itself to that.
    fresh.say(two, c.Beat(0.0))
    assert [change.goes_on for change in fresh.changes] == [False]
    fresh.say(two, replace_name(SERVER, "fresh"))
    assert any(isinstance(m, c.ServerWelcome) for m in fresh.heard)
    killed(two)


def test_who_is_let_in_is_known_to_the_run_after_one_that_nobody_comes_back_to(
    tmp_path: Path,
) -> None:
    config = replace(CONFIG, key="broker")
    keys = r.Keys((Holder("node", "node", frozenset({"server"})),))
    one = broker(tmp_path, config)
    one.turn([keys], one.now())
    Peer(11, "node").say(one, SERVER)
    killed(one)
    two, fresh = broker(tmp_path, config), Peer(33, "node")
    two.turn([keys], two.now())
    fresh.say(two, SERVER)
    old = two.router
    two._ahead_s += ABANDONED_S + 0.1
    two.turn([r.Tick()], two.now())
    assert two.router is not old
    fresh.say(two, c.Beat(0.0))
    fresh.say(two, SERVER)
    assert any(isinstance(m, c.ServerWelcome) for m in fresh.heard)
    killed(two)


def test_whose_key_is_revoked_while_it_waits_for_a_run_does_not_come_in(tmp_path: Path) -> None:
    config = replace(CONFIG, key="broker", servers=2)
    stays, goes = (Holder(name, name, frozenset({"server"})) for name in ("stays", "goes"))
    one, server, stranger = broker(tmp_path, config), Peer(11, "stays"), Peer(33, "goes")
    one.turn([r.Keys((stays, goes))], one.now())
    server.say(one, SERVER)
    killed(one)
    two = broker(tmp_path, config)
    two.turn([r.Keys((stays, goes))], two.now())
    stranger.say(two, replace_name(SERVER, "stranger"))
    two.turn([r.Keys((stays,))], two.now())
    server.say(two, c.Beat(0.0))
    assert [one.hello.name for one in two.router.members.servers.values()] == ["s"]
    killed(two)


def test_a_run_that_somebody_comes_back_to_lets_no_stranger_in(tmp_path: Path) -> None:
    one, server, fresh = broker(tmp_path), Peer(11), Peer(33)
    server.say(one, SERVER)
    killed(one)
    two = broker(tmp_path)
    other = c.ServerHello("fresh", "tcp://fresh:1", 0, "host", 1, False)
    fresh.say(two, other)
    server.say(two, c.Beat(0.0))
    two._ahead_s += ABANDONED_S + 0.1
    fresh.say(two, c.Beat(0.0))
    assert [m.reason for m in fresh.heard if isinstance(m, c.Refusal)] != []
    assert not two.router.returning.abandoned
    killed(two)


def test_a_journal_that_lacks_its_end_is_not_gone_on_from(tmp_path: Path) -> None:
    """Somebody was told what it does not know: its last record was lost by the disk."""
    one, server = broker(tmp_path), Peer(11)
    server.say(one, SERVER)
    before = (tmp_path / "journal").read_bytes()
    server.say(one, c.Beat(0.0, ask=True))
    killed(one)
    (tmp_path / "journal").write_bytes(before)
    two = broker(tmp_path)
    server.say(two, c.Beat(0.0))
    assert two.router.failed is not None
    assert "its journal lacks" in two.router.failed.reason
    killed(two)
    # A run that has failed is not gone on with.
    three = broker(tmp_path)
    assert three.router.failed is None
    assert not three.router.members.servers
    killed(three)


def test_a_broker_that_a_later_one_has_replaced_ends(tmp_path: Path) -> None:
    one, server = broker(tmp_path), Peer(11)
    server.say(one, SERVER)
    packet = c.Packet(server.link.instance, one.router.hub.instance + 1, 2, 1, [])
    with pytest.raises(JournalError, match="a later broker has taken this run over"):
        one.turn([r.Received(server.route, c.encode_packet(packet))], one.now())
    killed(one)


def test_with_keys_only_servers_are_believed_that_there_is_a_later_broker(tmp_path: Path) -> None:
    """Whoever may do nothing but look on could end the run else."""
    one = broker(tmp_path, replace(CONFIG, key="broker"))
    roles = ("server", "worker", "follower")
    one.turn([r.Keys(tuple(Holder(role, role, frozenset({role})) for role in roles))], one.now())
    server, worker, follower = Peer(11, "server"), Peer(22, "worker"), Peer(33, "follower")
    server.say(one, SERVER)
    worker.say(one, WORKER)
    follower.say(one, c.Status(1))
    assert [m.token for m in follower.heard if isinstance(m, c.Reply)] == [1]

    def forged(peer: Peer) -> r.Received:
        packet = c.Packet(peer.link.instance, one.router.hub.instance + 1, 9, 1, [])
        return r.Received(peer.route, c.encode_packet(packet), peer.key)

    one.turn([forged(worker), forged(follower)], one.now())
    with pytest.raises(JournalError, match="a later broker has taken this run over"):
        one.turn([forged(server)], one.now())
    killed(one)


@pytest.mark.parametrize("liar", ["follower", "worker"])
def test_with_keys_who_only_looks_on_is_not_believed_that_something_is_lost(
    tmp_path: Path, liar: str
) -> None:
    config = replace(CONFIG, key="broker")
    one, peer = broker(tmp_path, config), Peer(22, liar)
    one.turn([r.Keys((Holder(liar, liar, frozenset({liar})),))], one.now())
    Peer(11, "broker").say(one, SERVER)
    peer.say(one, WORKER if liar == "worker" else structs.replace(WORKER, observer=True))
    assert len(one.router.members.workers) == 1
    killed(one)
    two = broker(tmp_path, config)
    packet = c.Packet(22, two.router.hub.instance, 9, 1000, [])
    two.turn([r.Received(peer.route, c.encode_packet(packet), liar)], two.now())
    assert (two.router.failed is not None) == (liar == "worker")
    killed(two)


def test_who_is_not_known_is_told_to_begin_anew_whatever_it_had_numbered(tmp_path: Path) -> None:
    one, server = broker(tmp_path), Peer(11)
    server.say(one, SERVER)
    killed(one)
    two = broker(tmp_path)
    two.router.hub.forget(11)
    server.link.send(c.Beat(0.0))
    (packet,) = server.link.outgoing(0.0)
    (action,) = two.turn([r.Received(b"11", c.encode_packet(packet))], two.now())
    assert isinstance(action, r.Send)
    answer = c.decode_messages(open_envelope(action.frame))
    assert (answer.number, answer.messages) == (STRANGER, [])
    change, _ = server.link.receive(answer, 0.0)
    assert change is not None
    assert not change.goes_on
    server.say(two, c.Beat(1.0))
    assert server.link.idle
    killed(two)


def test_an_end_in_good_order_takes_the_journal_away_unless_somebody_trains(
    tmp_path: Path,
) -> None:
    one, server, worker = broker(tmp_path), Peer(11), Peer(22)
    server.say(one, SERVER)
    worker.say(one, WORKER)
    one.close(done=True)
    assert (tmp_path / "journal").exists()
    two = broker(tmp_path)
    worker.say(two, c.Leave())
    server.say(two, c.Beat(0.0))
    worker.say(two, c.Beat(0.0))
    two.close(done=True)
    assert not (tmp_path / "journal").exists()


def test_the_journal_stays_bounded_and_makes_the_same_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "REPLAY_BYTES", 10_000)
    one, server = broker(tmp_path), Peer(11)
    server.say(one, SERVER)
    largest = 0
    for _ in range(400):
        server.say(one, c.Beat(0.0))
        largest = max(largest, (tmp_path / "journal").stat().st_size)
    assert largest < 40_000
    record = recovery.state_record(one.router, 0.0)
    killed(one)
    two = broker(tmp_path)
    # What differs is that it was restarted; so do that to the other one, too.
    other = recovery.recovered([record], CONFIG)[0]
    assert packed(other) == packed(one.router)
    assert two.router.log.digest == one.router.log.digest
    killed(two)


def replace_name(hello: c.ServerHello, name: str) -> c.ServerHello:
    return c.ServerHello(name, f"tcp://{name}:1", 0, hello.host, hello.pid, False)


def test_who_comes_first_to_a_broker_whose_run_has_ended_waits_and_is_let_into_the_next(
    tmp_path: Path,
) -> None:
    """All of it was killed, and started again."""
    one = broker(tmp_path)
    Peer(11).say(one, SERVER)
    Peer(22).say(one, WORKER)
    killed(one)
    two, worker, server = broker(tmp_path), Peer(33), Peer(44)
    two.turn([r.ServerLink(0, up=False)], two.now())
    worker.say(two, WORKER)
    two._ahead_s += ABANDONED_S - 1.0
    two.turn([r.Tick()], two.now())
    assert two.router.failed is None
    assert worker.heard == []
    two._ahead_s += 1.1
    two.turn([r.Tick()], two.now())
    for peer, hello in ((server, SERVER), (worker, WORKER)):
        peer.say(two, c.Beat(0.0))
        peer.say(two, hello)
    assert any(isinstance(m, c.Welcome) for m in worker.heard)
    killed(two)


def test_who_comes_early_is_let_in_when_somebody_has_come_back(tmp_path: Path) -> None:
    one, server, worker = broker(tmp_path), Peer(11), Peer(33)
    server.say(one, SERVER)
    killed(one)
    two = broker(tmp_path)
    worker.say(two, WORKER)
    assert not two.router.members.workers
    server.say(two, c.Beat(0.0))
    assert len(two.router.members.workers) == 1
    killed(two)


def test_receipts_alone_cost_no_write_until_the_next_tick(tmp_path: Path) -> None:
    one, server = broker(tmp_path), Peer(11)
    server.say(one, SERVER)
    one.turn([r.Tick()], one.now())
    assert one._file is not None
    size = one._file.bytes
    server.link.send(c.Beat(0.0))
    frames = [c.encode_packet(packet) for packet in server.link.outgoing(0.0)]
    assert one.turn([r.Received(b"11", frame) for frame in frames], one.now()) == []
    assert one._file.bytes == size
    (receipt,) = one.turn([r.Tick()], one.now())
    assert isinstance(receipt, r.Send)
    assert one._file.bytes > size
    killed(one)


SAVES = replace(CONFIG, snapshot_dir="there")


def cut(one: Lasting, server: Peer, worker: Peer) -> None:
    """Have a snapshot cut, of a model that the server has."""
    server.say(one, SERVER)
    worker.say(one, WORKER)
    worker.say(one, c.Offer(1, [KeySpec("w", "float32", (2,))], False))
    (init,) = one.router.catalog.pending
    name = ContributionId(one.router.members.incarnations()[0], SEEDS, init)
    server.say(one, c.Held([(name, 0)]))
    worker.say(one, c.TakeSnapshot(2))
    worker.say(one, c.Saved(1, why="it has none"))
    assert one.router.snapshots.busy


def alone(one: Lasting, peer: Peer, message: c.Message) -> list[r.Action]:
    """Say one thing to the broker; return what it does at once."""
    peer.link.send(message)
    frames = [c.encode_packet(packet) for packet in peer.link.outgoing(one.now())]
    return one.turn([r.Received(peer.route, frame) for frame in frames], one.now())


def test_what_is_done_with_files_is_safe_before_and_is_done_again_by_the_next_life(
    tmp_path: Path,
) -> None:
    one, server, worker = broker(tmp_path, SAVES), Peer(11), Peer(22)
    cut(one, server, worker)
    (complete,) = alone(one, server, c.Saved(1, 8, "0" * 64))
    assert isinstance(complete, Complete)
    killed(one)

    two = broker(tmp_path, SAVES)
    assert [action for action in two.first if isinstance(action, Complete)] == [complete]
    (give_up, *_) = two.turn([Written(1, "the disk is full")], two.now())
    assert give_up == GiveUp("there", complete.manifest.name)
    killed(two)

    three = broker(tmp_path, SAVES)
    assert [action for action in three.first if not isinstance(action, r.Note | r.Send)] == [
        r.ServersChanged(((0, "tcp://s:1"),)),
        give_up,
    ]
    assert not three.router.snapshots.busy
    worker.say(three, c.Beat(0.0))
    assert [m.reason for m in worker.heard if isinstance(m, c.Refusal)] == ["the disk is full"]
    killed(three)


def test_a_run_goes_on_from_its_journal_and_not_from_the_snapshot_it_began_from(
    tmp_path: Path,
) -> None:
    one, server, worker = broker(tmp_path / "before", SAVES), Peer(11), Peer(22)
    cut(one, server, worker)
    (complete,) = alone(one, server, c.Saved(1, 8, "0" * 64))
    assert isinstance(complete, Complete)
    text = encode(complete.manifest).decode()
    killed(one)

    asp = replace(CONFIG, policy=policy("asp"))
    first = Lasting(asp, tmp_path, lambda: ("there", text))
    killed(first)

    def gone() -> tuple[str, str]:
        raise BadSnapshot("there is none")

    again = Lasting(asp, tmp_path, gone)
    assert again.router.config == first.router.config
    assert (again.router.config.restored, str(again.router.policy)) == (text, "bsp")
    killed(again)
    with pytest.raises(BadSnapshot, match="there is none"):
        Lasting(asp, tmp_path / "another", gone)


@pytest.mark.parametrize("call", ["open", "fsync"])
def test_a_journal_that_cannot_be_written_anew_is_appended_to_and_written_anew_later(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    """Without a descriptor, or room for a second file: whoever crowds a port must not end a run."""
    one, server = broker(tmp_path), Peer(11)
    server.say(one, SERVER)
    assert one._file is not None
    real, begun = getattr(os, call), one._file.bytes

    def fails(what: object, *given: int) -> int:
        if call == "fsync" or str(what).endswith("journal.new"):
            raise OSError(24, "Too many open files")
        return int(real(what, *given))

    monkeypatch.setattr(os, call, fails)
    monkeypatch.setattr(recovery.Turns, "is_long", True)
    for _ in range(3):
        server.say(one, c.Beat(0.0))
    assert "the journal is not made shorter, and goes on: [Errno 24]" in caplog.text
    assert one._file.bytes > begun
    assert not (tmp_path / "journal.new").exists()
    state = packed(one.router)
    monkeypatch.setattr(os, call, real)
    server.say(one, c.Beat(0.0))
    killed(one)
    monkeypatch.undo()
    two = broker(tmp_path)
    assert two.router.members.servers.keys() == one.router.members.servers.keys()
    assert state != b""
    killed(two)


def test_a_journal_that_somebody_else_has_is_no_more_gone_on_with_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, server = broker(tmp_path), Peer(11)
    server.say(one, SERVER)
    (tmp_path / "journal").rename(tmp_path / "journal.taken")
    monkeypatch.setattr(recovery.Turns, "is_long", True)
    monkeypatch.setattr(recovery.Turns, "must_be_kept", staticmethod(lambda actions: False))
    with pytest.raises(JournalError, match="another broker has taken"):
        server.say(one, c.Beat(0.0))
    killed(one)


# --- roll-backs ------------------------------------------------------------------------------


def asked_to_go_back(one: Lasting, server: Peer, worker: Peer) -> tuple[Find, str]:
    """Have a snapshot taken, and somebody ask that the run goes back to it; return what is to be
    looked for, and the manifest that will be found."""
    cut(one, server, worker)
    (complete,) = alone(one, server, c.Saved(1, 8, "0" * 64))
    assert isinstance(complete, Complete)
    one.turn([Written(1)], one.now())
    (find,) = [a for a in alone(one, worker, c.GoBack(9)) if isinstance(a, Find)]
    return find, encode(complete.manifest).decode()


def test_a_broker_that_is_killed_behind_a_roll_back_goes_on_with_the_new_run(
    tmp_path: Path,
) -> None:
    one, server, worker = broker(tmp_path, SAVES), Peer(11), Peer(22)
    find, text = asked_to_go_back(one, server, worker)
    assert find.places == (("there", ""),)
    old = one.router
    one.turn([Found("there", text, 7)], one.now())
    new = one.router
    assert new is not old
    assert old.successor is new
    assert new.members.term > old.members.term
    assert new.members.incarnations()[0] > old.members.incarnations()[0]
    state = packed(new)
    killed(one)

    two = broker(tmp_path, SAVES)
    assert two.router.rolling.times == 1
    assert two.router.config.restored == text
    assert packed(new) == state
    # Its first word of the new run counts, though this broker has a term of its own by now.
    worker.heard.clear()
    worker.say(two, c.Beat(0.0))
    (told,) = [m for m in worker.heard if isinstance(m, c.RollBack)]
    assert (told.name, told.version) == (two.router.restoring.manifest.name, 0)  # type: ignore[union-attr]
    worker.say(two, c.Begin())
    assert not two.router.groups.begun
    worker.say(two, c.WentBack(told.term - 1), c.Begin())
    assert not two.router.groups.begun
    worker.say(two, c.WentBack(told.term), c.Begin())
    assert two.router.groups.begun == set(two.router.members.incarnations())
    server.say(two, c.WentBack(told.term), c.Restored())
    two._ahead_s += 2.0  # What was not delivered is sent again.
    worker.say(two, c.Beat(0.0))
    (answer,) = [m for m in worker.heard if isinstance(m, c.Reply) and m.token == 9]
    assert answer.value["version"] == 0
    killed(two)


def test_a_broker_that_is_killed_before_a_roll_back_looks_for_the_snapshot_again(
    tmp_path: Path,
) -> None:
    one, server, worker = broker(tmp_path, SAVES), Peer(11), Peer(22)
    find, text = asked_to_go_back(one, server, worker)
    killed(one)
    two = broker(tmp_path, SAVES)
    assert two.router.rolling.times == 0
    # Who has asked has no receipt, and asks again.
    two._ahead_s += 5.0
    assert find in alone(two, worker, c.Beat(0.0))
    two.turn([Found("there", text, 7)], two.now())
    assert two.router.rolling.times == 1
    killed(two)


def test_a_snapshot_that_cannot_be_used_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    one, server, worker = broker(tmp_path, SAVES), Peer(11), Peer(22)
    _, text = asked_to_go_back(one, server, worker)
    before = one.router.members.incarnations(), one.router.log.digest
    for found in (Found("", "", 7, "server-0 is torn"), Found("there", text[:-9], 7)):
        one.turn([found], one.now())
        assert one.router.successor is None
        one._ahead_s += 2.0
        worker.heard.clear()
        worker.say(one, c.Beat(0.0))
        assert [m.code for m in worker.heard if isinstance(m, c.Refusal)] == ["BadSnapshot"]
        alone(one, worker, c.GoBack(9))
    assert (one.router.members.incarnations(), one.router.log.digest) == before
    killed(one)


def test_a_server_that_comes_before_the_loss_is_noticed_waits_for_it(tmp_path: Path) -> None:
    one, server, worker = broker(tmp_path, SAVES), Peer(11), Peer(22)
    cut(one, server, worker)
    alone(one, server, c.Saved(1, 8, "0" * 64))
    one.turn([Written(1)], one.now())
    other = Peer(33)
    other.say(one, replace_name(SERVER, "other"))
    assert other.heard == []
    one._ahead_s += 1.0
    server.say(one, c.Beat(0.0))
    one._ahead_s += 1.2
    other.say(one, c.Beat(0.0))
    # The first one lives.
    assert [m.reason[:9] for m in other.heard if isinstance(m, c.Refusal)] == ["all 1 ser"]
    another = Peer(44)
    another.say(one, replace_name(SERVER, "another"))
    one._ahead_s += 1.6
    one.turn([r.ServerLink(0, up=False), r.Tick()], one.now())
    worker.say(one, c.Beat(0.0))
    another.say(one, c.Beat(0.0))
    assert one.router.rolling.waiting
    assert one.router.rolling._looking
    killed(one)


def test_a_server_that_was_only_silent_is_taken_up_again_and_nothing_is_undone(
    tmp_path: Path,
) -> None:
    one, server, worker = broker(tmp_path, SAVES), Peer(11), Peer(22)
    cut(one, server, worker)
    alone(one, server, c.Saved(1, 8, "0" * 64))
    one.turn([Written(1)], one.now())
    for _ in range(5):
        one._ahead_s += 5.0
        worker.say(one, c.Beat(0.0))
    assert one.router.rolling.waiting
    reasons = [m.reason for m in worker.heard if isinstance(m, c.Waiting)]
    assert "is lost" in reasons[-1]
    assert "--server-back" in reasons[-1]
    assert "version 0 of snapshot" in reasons[-1]
    server.say(one, c.Beat(0.0))
    assert not one.router.rolling.waiting
    assert one.router.failed is None
    killed(one)
