"""Who holds a name when a new process asks for it: whether it lives is asked, not guessed."""

from __future__ import annotations

from zkv import control as c
from zkv.link import Link
from zkv.policy import policy
from zkv.wire import open_envelope
from zkv_brokers import router as r
from zkv_brokers.state import packed, unpacked

BEAT_S = 0.5
WORKER = c.WorkerHello("w0", 0, 1, False, "host", 1)
SERVER = c.ServerHello("s", "tcp://s:1", 0, "host", 1, False)


class Peer:
    """A process at one end of a link; what it has said may be on its way for long."""

    def __init__(self, router: r.Router, instance: int, *others: Peer) -> None:
        self.router, self.link = router, Link(instance)
        self.route = str(instance).encode()
        self.heard: list[c.Message] = []
        self.others: tuple[Peer, ...] = others
        self.deaf = False

    def frames(self, now: float, *messages: c.Message) -> list[r.Event]:
        """What it says, without its being heard yet."""
        for message in messages:
            self.link.send(message)
        return [r.Received(self.route, c.encode_packet(one)) for one in self.link.outgoing(now)]

    def hear(self, now: float, events: list[r.Event]) -> None:
        """The broker hears this, and what it says arrives, but at the deaf."""
        for action in self.router.turn([*events, r.Tick()], now):
            for one in (self, *self.others):
                if isinstance(action, r.Send) and action.route == one.route and not one.deaf:
                    packet = c.decode_messages(open_envelope(action.frame))
                    one.heard += one.link.receive(packet, now)[1]

    def say(self, now: float, *messages: c.Message) -> None:
        self.hear(now, self.frames(now, *messages))

    def told(self, kind: type) -> bool:
        return any(isinstance(one, kind) for one in self.heard)


def contest() -> tuple[Peer, Peer]:
    """A holder of a name and a newcomer that asks for it, at time 10."""
    config = r.RouterConfig("tcp://b:1", policy("asp"), beat_s=BEAT_S)
    router = r.Router(config, term=1, instance=5)
    Peer(router, 11).say(0.0, SERVER)
    old = Peer(router, 22)
    new = Peer(router, 33, old)
    old.others = (new,)
    old.say(9.9, WORKER)
    assert old.told(c.Welcome)
    return old, new


def test_what_a_dead_process_has_left_on_the_way_does_not_keep_its_name() -> None:
    """A kernel goes on sending it, after a cut or a stop of the broker: it comes when the new
    process has asked already, and a restarted worker would be refused for ever."""
    old, new = contest()
    old.deaf = True
    late = [old.frames(9.95, c.Beat(9.95)), old.frames(9.97, c.Beat(9.97))]
    new.say(10.0, WORKER)
    for now, frames in zip((10.05, 11.0), late, strict=True):
        new.hear(now, frames)
        new.say(now + 0.01)
    assert not new.told(c.Welcome)
    assert not new.told(c.Refusal)
    new.say(11.0 + 3 * BEAT_S + 0.05)
    assert new.told(c.Welcome)
    assert not new.told(c.Refusal)


def test_a_contest_goes_on_behind_a_broker_that_died() -> None:
    old, new = contest()
    old.deaf = True
    new.say(10.0, WORKER)
    again = unpacked(packed(old.router))
    assert again.door._contested == old.router.door._contested != {}
    old.router = new.router = again
    new.say(10.0 + 3 * BEAT_S + 0.05)
    assert new.told(c.Welcome)


def test_who_answers_keeps_its_name() -> None:
    old, new = contest()
    new.say(10.0, WORKER)
    for now in (10.1, 10.2):
        old.say(now, c.Beat(now))
    new.say(10.3)
    assert new.told(c.Refusal)
    assert not new.told(c.Welcome)


def test_who_is_heard_all_the_time_and_cannot_be_reached_is_waited_for() -> None:
    """Its answers may be behind megabytes on a slow link; it is no less alive."""
    old, new = contest()
    old.deaf = True
    new.say(10.0, WORKER)
    for tenth in range(1, 60):
        new.hear(10 + tenth / 10, old.frames(10 + tenth / 10, c.Beat(10 + tenth / 10)))
    new.say(16.0)
    assert not new.told(c.Refusal)
    assert not new.told(c.Welcome)
    new.say(17.6)
    assert new.told(c.Welcome)
