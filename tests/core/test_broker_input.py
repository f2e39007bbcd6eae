"""Bad input at the broker and at a worker: nothing but our own errors, and life goes on."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import broker_messages, messages, texts

from zkv import control as c
from zkv.link import Link
from zkv.policy import policy
from zkv.wire import (
    MODEL,
    PROTOCOL_VERSION,
    PULLS,
    SEEDS,
    ContributionId,
    KeySpec,
    encode,
    open_envelope,
)
from zkv_brokers import router as rt

BROKER, SERVER, STRANGERS, LATE = 1000, 2000, (3000, 3001, 3002), 4000


class Peer:
    """A process with a link to the broker; a stranger says whatever it is told to."""

    def __init__(self, instance: int) -> None:
        self.route = str(instance).encode()
        self.link = Link(instance)
        self.heard: list[c.Message] = []


class Desk:
    """A router and its peers, with frames carried at once."""

    def __init__(self, policy_text: str = "bsp") -> None:
        config = rt.RouterConfig("tcp://broker:5555", policy(policy_text))
        self.router = rt.Router(config, term=1, instance=BROKER)
        self.peers = {n: Peer(n) for n in (SERVER, *STRANGERS, LATE)}
        self.now = 0.0

    def feed(self, event: rt.Event) -> None:
        self.now += 0.01
        for action in self.router.handle(event, self.now):
            if isinstance(action, rt.Send):
                self._carry(action)

    def _carry(self, action: rt.Send) -> None:
        packet = c.decode_messages(open_envelope(action.frame))
        peer = self.peers.get(int(action.route)) if action.route.isdigit() else None
        if peer is not None:
            _, heard = peer.link.receive(packet, self.now)
            peer.heard += heard

    def say(self, instance: int, *said: c.Message) -> None:
        """Let a peer say this, and acknowledge what it has heard."""
        peer = self.peers[instance]
        for message in said:
            peer.link.send(message)
        for packet in peer.link.outgoing(self.now):
            self.feed(rt.Received(peer.route, c.encode_packet(packet)))

    def tick(self, *silent: int) -> None:
        """Let time pass; everybody says that it is alive, but for those who are silent."""
        for instance, peer in self.peers.items():
            if peer.link.peer and instance not in silent:
                self.say(instance, c.Beat(self.now))
        self.now += 0.5
        self.feed(rt.Tick())


def desk() -> Desk:
    """A desk with its server and two members that have said nothing yet."""
    made = Desk()
    made.say(SERVER, c.ServerHello("s", "tcp://s:1", 0, "host", 1, False))
    for rank, stranger in enumerate(STRANGERS[:2]):
        made.say(stranger, c.WorkerHello(f"w{rank}", rank, 2, False, "host", 1))
    return made


def welcomed(made: Desk, instance: int) -> bool:
    return any(isinstance(message, c.Welcome) for message in made.peers[instance].heard)


def alive(made: Desk) -> None:
    """The server is not told to stop, and a real worker can join."""
    made.tick()
    made.say(LATE, c.WorkerHello("late", 77, 0, False, "host", 1))
    made.say(SERVER)
    assert welcomed(made, LATE)
    stops = [m for m in made.peers[SERVER].heard if isinstance(m, c.Refusal | c.Fatal | c.Bye)]
    assert stops == []
    assert made.router.failed is None
    # Who falls silent is lost, whatever it has said before: nobody waits for a ghost.
    for _ in range(30):
        made.tick(*STRANGERS)
    assert [worker.hello.name for worker in made.router.members.workers.values()] == ["late"]
    assert set(made.router.hub.peers()) == {SERVER, LATE}
    made.say(LATE, c.Status(9))
    assert any(isinstance(m, c.Reply) and m.token == 9 for m in made.peers[LATE].heard)


# --- frames ----------------------------------------------------------------------------------


@given(
    frames=st.lists(
        st.binary(max_size=60)
        | st.lists(messages, max_size=2).map(
            lambda m: c.encode_packet(c.Packet(9, 0, 1, 1, m))[:-1]
        )
        | st.tuples(st.integers(0, 3), texts).map(encode),
        max_size=10,
    ),
    route=st.binary(min_size=1, max_size=5),
)
@example(frames=[encode((PROTOCOL_VERSION + 1, "whatever"))], route=b"x")
def test_any_frame_is_dropped_or_answered_and_the_broker_goes_on(
    frames: list[bytes], route: bytes
) -> None:
    made = desk()
    for frame in frames:
        made.feed(rt.Received(route, frame))
    alive(made)


def test_a_peer_of_another_version_is_refused_with_both_numbers() -> None:
    router = desk().router
    actions = router.handle(rt.Received(b"new", encode((7, "of another shape"))), 1.0)
    (send,) = [a for a in actions if isinstance(a, rt.Send) and a.route == b"new"]
    (refusal,) = c.decode_messages(open_envelope(send.frame)).messages
    assert isinstance(refusal, c.Refusal)
    assert (refusal.token, refusal.code) == (0, "VersionMismatch")
    assert "protocol 7, this process speaks 1" in refusal.reason


# --- messages that are well formed and make no sense -----------------------------------------

FIRST = (1 << 20) + 1
few = st.integers(0, 3)
groups = st.sampled_from([MODEL, PULLS, SEEDS, 1, 2, 77])
incarnations = st.sampled_from([0, FIRST, FIRST + 1, FIRST + 2])
names = st.builds(ContributionId, incarnations, groups, few)
keys = st.sampled_from(["a", "b", "\U0001f511", 7, 0])
specs = st.builds(
    KeySpec,
    keys,
    st.sampled_from(["float32", "int8", "object", ""]),
    st.sampled_from([(), (2,), (0,), (2**40, 2**40)]),
    rule=st.sampled_from(["", "sgd:lr=1", "nonsense", "assign"]),
    same_as=st.none() | keys,
)
hellos = st.builds(
    c.WorkerHello,
    st.sampled_from(["w0", "w1", "x", ""]),
    st.integers(-2, 3),
    st.integers(0, 3),
    st.booleans(),
    st.just("host"),
    st.just(1),
)
near = st.one_of(
    hellos,
    st.builds(
        c.ServerHello,
        texts,
        st.sampled_from(["tcp://s:1", "tcp://t:1"]),
        few,
        texts,
        few,
        st.just(False),
    ),
    st.builds(c.Offer, few, st.lists(specs, max_size=3), st.booleans()),
    st.builds(c.Begin),
    st.builds(c.Plain, few, keys),
    st.builds(c.Finish, names, few, st.floats(0, 9)),
    st.builds(c.Withdraw, names, few),
    st.builds(c.Received, groups, few),
    st.builds(c.Pull, few, st.lists(keys, max_size=3)),
    st.builds(c.Barrier, few, few),
    st.builds(c.Leave),
    st.builds(
        c.Change,
        few,
        st.sampled_from(["lr", "policy", "x"]),
        st.sampled_from(["0.1", "nan", "-1", "asp", "bsp", "k-bsp:0"]),
    ),
    st.builds(c.Status, few),
    st.builds(c.Held, st.lists(st.tuples(names, few), max_size=2)),
    st.builds(c.Void, names, few, keys, texts),
    broker_messages.filter(lambda message: not isinstance(message, c.ServerHello)),
)


passed_on = st.one_of(
    st.builds(c.Held, st.lists(st.tuples(names, few), max_size=2)),
    st.builds(c.Void, names, few, keys, texts),
)
"""What a server reports because some worker has sent it the data."""
turns = st.one_of(
    st.tuples(st.sampled_from(STRANGERS), near),
    st.tuples(st.just(SERVER), passed_on),
    st.tuples(st.just(0), st.builds(c.Begin, st.booleans())),
)


@given(nonsense=st.lists(turns, max_size=30), trained=st.booleans())
@example(
    nonsense=[(STRANGERS[0], c.Accounts([c.Account(0, "", 0, 2**63 - 1, 0.0, 0.0)]))], trained=True
)
@settings(max_examples=150)
def test_no_sequence_of_messages_of_strangers_and_members_breaks_the_broker(
    nonsense: list[tuple[int, c.Message]], trained: bool
) -> None:
    made = desk()
    if trained:
        train(made)
    for who, message in nonsense:
        if who:
            made.say(who, message)
            made.say(SERVER)
        else:
            made.tick()
    alive(made)


def train(made: Desk) -> int:
    """Let the first two members begin a batch; return the first one's grant."""
    made.say(STRANGERS[0], c.Offer(1, [KeySpec("a", "float32", (2,))], False))
    made.say(SERVER, c.Held([(ContributionId(FIRST, SEEDS, 1), 1)]))
    for stranger in STRANGERS[:2]:
        made.say(stranger, c.Begin())
    heard = made.peers[STRANGERS[0]].heard
    (granted,) = [m for m in heard if isinstance(m, c.Granted) and not m.ahead]
    return granted.grant


def refusals(made: Desk, instance: int) -> list[str]:
    return [m.reason for m in made.peers[instance].heard if isinstance(m, c.Refusal)]


@pytest.mark.parametrize("kind", ["held", "void"])
def test_a_server_that_passes_on_what_no_group_knows_is_not_stopped(kind: str) -> None:
    made, name = desk(), ContributionId(FIRST, MODEL, 1)
    made.say(SERVER, c.Held([(name, 1)]) if kind == "held" else c.Void(name, 1, "a", "NaN"))
    alive(made)


def test_a_batch_under_a_grant_that_was_never_given_is_refused_to_its_worker_alone() -> None:
    made, name = desk(), ContributionId(FIRST, MODEL, 1)
    grant = train(made)
    made.say(STRANGERS[0], c.Finish(name, grant + 76, 1.0))
    made.say(SERVER, c.Held([(name, grant + 76)]))
    made.say(STRANGERS[0])
    (reason,) = refusals(made, STRANGERS[0])
    assert f"grant {grant + 76}" in reason
    alive(made)


def test_a_second_batch_under_one_grant_is_refused_to_its_worker_alone() -> None:
    made = desk()
    grant = train(made)
    one, two = (ContributionId(FIRST, MODEL, batch) for batch in (1, 2))
    for name in (one, two):
        made.say(STRANGERS[0], c.Finish(name, grant, 1.0))
    for name in (one, two):
        made.say(SERVER, c.Held([(name, grant)]))
    made.say(STRANGERS[0])
    assert len(refusals(made, STRANGERS[0])) == 1
    alive(made)


def test_a_process_that_says_hello_twice_is_one_member() -> None:
    made = desk()
    for name in ("x", "y"):
        made.say(STRANGERS[2], c.WorkerHello(name, -1, 0, False, "host", 1))
    assert len(made.router.members.workers) == 3
    made.say(STRANGERS[2], c.Leave())
    alive(made)


def test_a_server_of_an_earlier_run_does_not_end_a_run_that_is_complete() -> None:
    made = desk()
    made.say(STRANGERS[2], c.ServerHello("old", "tcp://old:1", 0, "host", 1, True))
    assert made.peers[STRANGERS[2]].heard
    alive(made)


def test_what_only_a_broker_says_is_not_even_read_by_one() -> None:
    made = desk()
    made.say(STRANGERS[2], c.Reply(1, [[]] * 1000))
    assert made.router.hub._links.get(STRANGERS[2]) is None
    alive(made)
