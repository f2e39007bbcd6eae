"""Bad input at a server: whatever workers send, its shard goes on, and no value is changed.

A message that makes no sense is a ProtocolError, or voids the contribution that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import Rig, same_bits
from strategies import data_messages, placed, values_of

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.errors import ProtocolError, VersionMismatch
from zkv.wire import (
    MODEL,
    NO_BATCH,
    PROTOCOL_VERSION,
    PULLS,
    SEEDS,
    ContributionId,
    KeySpec,
    encode,
    split_route,
)
from zkv_brokers.grants import ToWorker
from zkv_brokers.node import Failed, Node, NodeConfig
from zkv_brokers.shard import FromWorker, Reset, Shard, ToBroker

HONEST = 3

# --- shards ----------------------------------------------------------------------------------

small = st.integers(0, 4)
groups = st.sampled_from([MODEL, PULLS, SEEDS, 1, 2, 77])
names = st.builds(ContributionId, st.sampled_from([0, 1, 2, 9]), groups, small)
bids = st.lists(st.integers(0, 6), max_size=4)
near = st.one_of(
    st.builds(d.Greet, st.sampled_from([0, 1, 2, 9]), small),
    st.builds(d.Push, names, small, st.integers(0, 6), st.sampled_from(["none", "zip", ""]), small),
    st.builds(d.Done, names, small, st.floats(0, 9), bids, bids, st.integers(0, 12)),
    st.builds(d.Got, st.sampled_from([0, 1, 2, 9]), groups, small, bids),
    st.builds(d.Ask, st.sampled_from([0, 1, 2, 9]), groups, small, bids),
    st.builds(d.Ask, st.just(2), st.just(MODEL), small, bids, index=st.integers(0, 12)),
    data_messages.filter(lambda message: HONEST not in _incarnations(message)),
)
payloads = st.integers(0, 64).map(lambda size: np.full(size, 0xFF, np.uint8))


def _incarnations(message: d.Data) -> set[int]:
    """Of whom a message speaks; what servers say to each other is of nobody."""
    if isinstance(message, d.Fetch | d.Part):
        return set()
    name = getattr(message, "contribution", None)
    return {name.incarnation if name is not None else message.incarnation}  # type: ignore[union-attr]


def rig_of_two() -> Rig:
    """Two servers with a model of five keys, one of them on its own, and a live contribution."""
    specs = [
        KeySpec("a", "float32", (2,)),
        KeySpec("b", "float32", (3, 2)),
        KeySpec("c", "float16", (2,)),
        KeySpec("d", "int32", (2,), rule="assign"),
        KeySpec("e", "float32", ()),
    ]
    rig = Rig(placed(specs, 2, bucket_bytes=16, block_bytes=16), optimizer_text="momentum:lr=0.1")
    chance = np.random.default_rng(0)
    rig.init({entry.kid: values_of(entry.spec, chance) for entry in rig.model.own})
    rig.log(c.Regroup(4, 1, 50))
    rig.layout.regroup(4, 1, 50)
    rig.log(c.Grant(HONEST, MODEL, 1, 0, []), c.Grant(1, MODEL, 1, 0, []))
    rig.log(c.Grant(2, MODEL, 1, 0, [], -1, True))
    return rig


def gradient(rig: Rig) -> dict[int, Array]:
    return {
        entry.kid: np.ones_like(rig.zero(entry.kid)) for entry in rig.model.own if entry.kid != 4
    }


def send(rig: Rig, server: int, message: d.Data, payload: Array | None) -> None:
    shard = rig.shards[server]
    if not isinstance(message, d.Push | d.Block):
        payload = None
    try:
        actions = shard.handle(FromWorker(message, payload), 0.0)
    except ProtocolError:
        return
    for action in actions:
        assert isinstance(action, ToBroker | ToWorker)
        if isinstance(action, ToWorker):
            # What is answered is a message that can be sent.
            d.encode_data(action.message)


@given(
    nonsense=st.lists(st.tuples(st.integers(0, 1), near, payloads), max_size=30),
    cut=st.integers(0, 30),
)
@settings(max_examples=200)
def test_no_data_message_breaks_a_shard_or_changes_a_value(
    nonsense: list[tuple[int, d.Data, Array]], cut: int
) -> None:
    rig, calm = rig_of_two(), rig_of_two()
    before = rig.values()
    for server, message, payload in nonsense[:cut]:
        send(rig, server, message, payload)
    same_bits(rig.values(), before)
    honest = ContributionId(HONEST, MODEL, 1)
    rig.push(honest, 1, gradient(rig))
    for server, message, payload in nonsense[cut:]:
        send(rig, server, message, payload)
    same_bits(rig.values(), before)
    calm.push(honest, 1, gradient(calm))
    for one in (rig, calm):
        one.log(c.Commit(MODEL, 1, [c.Counted(honest, 1.0)], None))
        one.log(c.Epoch(2, [HONEST], []))
    same_bits(rig.values(), calm.values())
    for shard in rig.shards:
        assert not shard.contributions.open


def test_initial_values_are_taken_from_the_initialiser_alone_and_once() -> None:
    rig = rig_of_two()
    before = rig.values()
    block = rig.layout.blocks_of_key[0][0]
    server, bid = rig.layout.blocks[block].server, block
    nine = np.full(2, 9, np.float32).view(np.uint8)
    for incarnation, batch, grant in ((2, 1, 1), (2, 7, 7), (1, 7, 7), (1, 1, 99)):
        name = ContributionId(incarnation, SEEDS, batch)
        for message, payload in (
            (d.Push(name, grant, bid, "none", 0), nine),
            (d.Done(name, grant, 0.0, [bid], [], 0), None),
        ):
            with pytest.raises(ProtocolError, match=f"values of initialisation {batch}"):
                rig.shards[server].handle(FromWorker(message, payload), 0.0)
    rig.data(server, d.Push(ContributionId(1, SEEDS, 1), 1, bid, "none", 0), nine)
    same_bits(rig.values(), before)


def test_initial_values_are_held_when_all_of_them_are_here_whatever_done_says() -> None:
    model = placed([KeySpec("w", "float32", (8,))], 1, bucket_bytes=0, block_bytes=16)
    rig = Rig(model)
    rig.log(c.Init(1, 1, model.entries, model.blocks))
    name = ContributionId(1, SEEDS, 1)
    rig.data(0, d.Done(name, 1, 0.0, [], [], rig.index))
    assert not rig.said(c.Held)
    for bid in (0, 1):
        rig.data(0, d.Push(name, 1, bid, "none", rig.index), np.full(4, bid, np.float32))
    assert len(rig.said(c.Held)) == 1
    assert rig.values()[0].tolist() == [0] * 4 + [1] * 4


def test_a_group_that_does_not_exist_is_named_and_never_reported() -> None:
    rig = rig_of_two()
    held = len(rig.said(c.Held))
    name = ContributionId(1, 77, 1)
    for message in (d.Done(name, 1, 1.0, [], [], 0), d.Push(name, 1, 0, "none", 0)):
        with pytest.raises(ProtocolError, match="pushed to group 77, which server 0 does not know"):
            rig.data(0, message, np.zeros(8, np.uint8) if isinstance(message, d.Push) else None)
    assert len(rig.said(c.Held)) == held


def test_a_block_of_another_group_voids_the_contribution() -> None:
    rig = rig_of_two()
    name = ContributionId(1, MODEL, 1)
    server = rig.layout.blocks_in(1)[0].server
    (bid,) = [block.bid for block in rig.layout.blocks_in(1)]
    rig.data(server, d.Done(name, 1, 1.0, [bid], [], 0))
    ((_, void),) = rig.said(c.Void)
    assert f"holds no block {bid} of group 0" in void.reason
    rig.data(server, d.Done(name, 1, 1.0, [bid], [], 0))
    assert len(rig.said(c.Void)) == 1


def test_data_ahead_of_the_log_is_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zkv_brokers.parked.PARKED_BYTES_MAX", 10 * 1024)
    rig = rig_of_two()
    far = rig.index + 1_000_000
    for batch in range(1000):
        rig.data(0, d.Done(ContributionId(1, MODEL, batch), 1, 1.0, [], [], far))
    assert len(rig.shards[0]._parked.waiting) <= 10
    rig.log(c.Discard(1, MODEL, 1, NO_BATCH))
    assert len(rig.shards[0]._parked.waiting) <= 10


def test_a_parked_message_that_makes_no_sense_does_not_hold_up_the_others() -> None:
    rig = rig_of_two()
    ahead = rig.index + 1
    bad, good = ContributionId(1, 77, 1), ContributionId(HONEST, MODEL, 1)
    for name in (bad, good):
        rig.data(0, d.Done(name, 1, 1.0, [], [], ahead))
    before = len(rig.said(c.Held))
    rig.log(c.Discard(2, MODEL, 1, NO_BATCH))
    assert [h.contributions for _, h in rig.said(c.Held)][before:] == [[(good, 1)]]


@given(frames=st.lists(st.binary(max_size=40), max_size=5))
def test_any_data_frames_are_dropped_or_handled(frames: list[bytes]) -> None:
    shard = Shard(window_bytes=1)
    try:
        _, rest = split_route(frames)
        payload = None if len(rest) == 1 else np.frombuffer(rest[1], np.uint8)
        message = d.decode_data(rest[0], None if payload is None else payload.nbytes)
        shard.handle(FromWorker(message, payload), 0.0)
    except ProtocolError:
        pass
    assert shard.handle(Reset(), 0.0) == []


# --- frames that are no packets ------------------------------------------------------------------


@pytest.mark.parametrize("frame", [b"", b"\x91\x00", b"\x93\x00\x00\x00", b"\x92\x02\x80", b"\x01"])
def test_what_is_no_packet_of_any_version_ends_no_server(frame: bytes) -> None:
    node = Node(NodeConfig("tcp://b:5555", "s", "tcp://s:1"), instance=1, now=0.0)
    with pytest.raises(ProtocolError, match="not a packet") as caught:
        node.broker_says(frame, 0.1)
    assert not isinstance(caught.value, VersionMismatch)
    assert not any(isinstance(action, Failed) for action in node.tick(0.2))
    theirs = encode((PROTOCOL_VERSION + 1, 5, 0, 1, 1, []))
    (failed,) = [a for a in node.broker_says(theirs, 0.3) if isinstance(a, Failed)]
    assert isinstance(failed.error, VersionMismatch)


class Counted(list[int]):
    """Keys of a grant that count how often they are gone through."""

    looks = 0

    def __iter__(self) -> Iterator[int]:
        self.looks += 1
        return super().__iter__()


def test_a_pull_does_not_go_through_its_keys_for_each_block_again() -> None:
    """A pull of n keys in n / 1,000 blocks would cost n times n otherwise."""
    specs = [KeySpec(f"w{number}", "float32", (2,)) for number in range(12)]
    rig = Rig(placed(specs, 1, bucket_bytes=32, block_bytes=32))
    rig.init({kid: np.full(2, kid, np.float32) for kid in range(12)})
    asked = Counted([0, 1, 5, 9, 10])
    rig.data(0, d.Greet(HONEST, 0))
    rig.log(c.Grant(HONEST, PULLS, 1, 0, asked))
    assert len({message.bid for _, message in rig.said(d.Block)}) == 3
    # To find the blocks, and to choose of what is in them.
    assert asked.looks <= 2
