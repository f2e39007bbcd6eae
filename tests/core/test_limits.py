"""Limits on what peers may ask of a broker and a server: each is named when it is reached."""

from __future__ import annotations

import numpy as np
import pytest
from rig import Rig
from strategies import placed

from zkv import control as c
from zkv import data_messages as d
from zkv.errors import ProtocolError
from zkv.limits import Bucket
from zkv.link import Link
from zkv.policy import policy
from zkv.wire import MODEL, NO_BATCH, ContributionId, KeySpec, open_envelope
from zkv_brokers import contributions
from zkv_brokers import router as r


class Desk:
    """A broker, and peers that say one thing each."""

    def __init__(self, **limits: int) -> None:
        config = r.RouterConfig("tcp://b:1", policy("bsp"), servers=1, **limits)
        self.router = r.Router(config, term=1, instance=22)
        self.links: dict[int, Link] = {}

    def say(self, peer: int, *messages: c.Message) -> list[c.Message]:
        """Let a peer say this; return what it hears."""
        link = self.links.setdefault(peer, Link(peer))
        for message in messages:
            link.send(message)
        heard = []
        for packet in link.outgoing(1.0):
            actions = self.router.handle(r.Received(b"%d" % peer, c.encode_packet(packet)), 1.0)
            for action in actions:
                if isinstance(action, r.Send) and action.route == b"%d" % peer:
                    answer = c.decode_messages(open_envelope(action.frame))
                    heard += link.receive(answer, 1.0)[1]
        return heard

    def hello(self, peer: int) -> list[c.Message]:
        return self.say(peer, c.WorkerHello(f"w{peer}", -1, 0, False, "h", 1))


def refusals(heard: list[c.Message]) -> list[str]:
    return [one.reason for one in heard if isinstance(one, c.Refusal)]


@pytest.mark.parametrize("complete", [False, True])
def test_a_broker_takes_so_many_members(complete: bool) -> None:
    desk = Desk(max_members=3)
    if complete:
        desk.say(1, c.ServerHello("s", "tcp://s:1", 0, "h", 1, False))
    room = 2 if complete else 3
    for peer in range(2, 2 + room):
        assert not refusals(desk.hello(peer))
    (why,) = refusals(desk.hello(99))
    assert "--max-members" in why
    assert len(desk.router.members.workers) == (2 if complete else 0)


def test_a_broker_knows_so_many_peers() -> None:
    desk = Desk(max_members=4)
    for peer in range(1, 2 * 4 + 1024 + 50):
        desk.say(peer, c.Status(1))
    assert len(desk.router.hub.peers()) == 2 * 4 + 1024


def test_a_model_has_so_many_keys() -> None:
    desk = Desk(max_keys=5)
    desk.say(1, c.ServerHello("s", "tcp://s:1", 0, "h", 1, False))
    for peer in (2, 3):
        desk.hello(peer)

    def offer(names: str) -> c.Offer:
        return c.Offer(7, [KeySpec(name, "float32", (1,)) for name in names], False)

    (why,) = refusals(desk.say(2, offer("abcdef")))
    assert "--max-keys" in why
    assert "'a'" in why
    assert not refusals(desk.say(2, offer("abcde")))
    # The same keys by another worker are no more of them.
    assert not refusals(desk.say(3, offer("abcde")))
    (why,) = refusals(desk.say(3, offer("f")))
    assert "5 keys and 1 more" in why


def test_a_worker_has_so_many_contributions_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contributions, "OPEN_MAX", 10)
    rig = Rig(placed([KeySpec("a", "float32", (8,))], 1))
    rig.init({0: np.ones(8, np.float32)})

    def done(batch: int, grant: int = 1) -> None:
        rig.data(0, d.Done(ContributionId(1, MODEL, batch), grant, 1.0, [], [], 0))

    for batch in range(10):
        done(batch)
    with pytest.raises(ProtocolError, match="has 10 contributions to group 0 open"):
        done(10)
    # One that is open already, another worker's, and after they are settled: all is well.
    done(9)
    rig.data(0, d.Done(ContributionId(2, MODEL, 1), 1, 1.0, [], [], 0))
    rig.log(c.Discard(1, MODEL, 1, NO_BATCH))
    for batch in range(20, 30):
        done(batch, grant=2)
    with pytest.raises(ProtocolError, match="open, the most"):
        done(30, grant=2)


def test_a_bucket_takes_a_rate_and_twice_that_at_once() -> None:
    bucket = Bucket(10.0, 0.0)
    assert sum(bucket.takes(0.0) for _ in range(100)) == 20
    assert sum(bucket.takes(1.0) for _ in range(100)) == 10
    assert sum(bucket.takes(100.0) for _ in range(100)) == 20
    assert all(bucket.takes(101.0 + at / 8) for at in range(100))
