"""The wire: any message survives its frames, and any bytes are a message or a ProtocolError."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from strategies import (
    CONTROL,
    DATA,
    ENTRIES,
    FOR_BROKER,
    broker_messages,
    data_messages,
    messages,
    struct,
)

from zkv import control as c
from zkv import data_messages as d
from zkv.errors import ProtocolError, VersionMismatch
from zkv.time_split import Spent
from zkv.wire import (
    CONTROL_BYTES_MAX,
    HEADER_BYTES_MAX,
    MESSAGES_PER_PACKET_MAX,
    PAYLOAD_BYTES_MAX,
    PROTOCOL_VERSION,
    WEIGHT_MAX,
    BlockSpec,
    ContributionId,
    KeyEntry,
    KeySpec,
    Segment,
    TableEntry,
    TableSpec,
    encode,
    open_envelope,
    split_route,
)

FIXTURE = Path(__file__).parent.parent / "fixtures" / "frames_v1.json"
RECORDED = json.loads(FIXTURE.read_text("utf-8"))
UINT = st.integers(0, 2**63 - 1)
WITH_PAYLOAD = d.Push | d.Block | d.Probe | d.AskRows | d.Rows | d.Part | d.Pass


def decode_packet(frame: bytes, *, by_broker: bool = False) -> c.Packet:
    return c.decode_messages(open_envelope(frame), by_broker=by_broker)


def payload_bytes(message: d.Data) -> int | None:
    return 8 if isinstance(message, WITH_PAYLOAD) else None


# --- round trips -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONTROL, ids=lambda kind: kind.__name__)
@given(data=st.data(), source=UINT, target=UINT, number=UINT, received=UINT)
@settings(max_examples=25)
def test_every_control_message_survives_its_frame(
    kind: type, data: st.DataObject, source: int, target: int, number: int, received: int
) -> None:
    sent = c.Packet(source, target, number, received, data.draw(st.lists(struct(kind), max_size=2)))
    assert decode_packet(c.encode_packet(sent)) == sent
    if kind in FOR_BROKER:
        assert decode_packet(c.encode_packet(sent), by_broker=True) == sent


@pytest.mark.parametrize("kind", ENTRIES, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=25)
def test_every_entry_survives_inside_a_log(kind: type, data: st.DataObject) -> None:
    log = c.Log(1, 2, data.draw(st.lists(struct(kind), max_size=3)))
    assert decode_packet(c.encode_packet(c.Packet(1, 2, 3, 4, [log]))).messages == [log]


@pytest.mark.parametrize("kind", DATA, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=25)
def test_every_data_message_survives_its_header(kind: type, data: st.DataObject) -> None:
    message = data.draw(struct(kind))
    assert d.decode_data(d.encode_data(message), payload_bytes(message)) == message


def test_no_two_kinds_of_message_share_a_number() -> None:
    for family in (CONTROL, ENTRIES, DATA):
        numbers = [msgspec.inspect.type_info(kind).tag for kind in family]  # type: ignore[union-attr]
        assert len(set(numbers)) == len(family)


# --- any bytes -------------------------------------------------------------------------------


def packet_or_protocol_error(frame: bytes) -> None:
    for by_broker in (False, True):
        try:
            packet = decode_packet(frame, by_broker=by_broker)
        except ProtocolError:
            continue
        # What was let in is a message that this process could have written itself.
        assert decode_packet(c.encode_packet(packet), by_broker=by_broker) == packet


def data_or_protocol_error(header: bytes, size: int | None) -> None:
    try:
        message = d.decode_data(header, size)
    except ProtocolError:
        return
    assert d.decode_data(d.encode_data(message), size) == message


@given(frame=st.binary(max_size=200), size=st.none() | st.integers(0, 2**40))
@example(frame=b"", size=None)
@example(frame=b"\xc1", size=0)
def test_any_bytes_are_a_message_or_a_protocol_error(frame: bytes, size: int | None) -> None:
    packet_or_protocol_error(frame)
    data_or_protocol_error(frame, size)


@st.composite
def mutated(draw: st.DrawFn, frames: st.SearchStrategy[bytes]) -> bytes:
    """Draw a valid frame and damage it: change, insert or cut out a few bytes anywhere."""
    frame = bytearray(draw(frames))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(frame)))
        match draw(st.sampled_from(("set", "insert", "cut", "end"))):
            case "set" if at < len(frame):
                frame[at] = draw(st.integers(0, 255))
            case "insert":
                frame[at:at] = draw(st.binary(min_size=1, max_size=4))
            case "cut":
                del frame[at : at + draw(st.integers(1, 4))]
            case _:
                frame = frame[:at]
    return bytes(frame)


def packed(sent: list[Any]) -> bytes:
    return c.encode_packet(c.Packet(1, 2, 3, 4, sent))


@given(frame=mutated(st.lists(messages, min_size=1, max_size=2).map(packed)))
def test_a_damaged_packet_is_a_message_or_a_protocol_error(frame: bytes) -> None:
    packet_or_protocol_error(frame)


@given(header=mutated(data_messages.map(d.encode_data)), size=st.sampled_from([None, 0, 8]))
def test_a_damaged_header_is_a_message_or_a_protocol_error(header: bytes, size: int | None) -> None:
    data_or_protocol_error(header, size)


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=20,
)


@given(body=junk, kind=st.integers(0, 80))
def test_well_formed_msgpack_of_another_shape_is_a_message_or_a_protocol_error(
    body: Any, kind: int
) -> None:
    fields = body if isinstance(body, list) else [body]
    packet_or_protocol_error(encode((PROTOCOL_VERSION, 1, 2, 3, 4, [[kind, *fields]])))
    packet_or_protocol_error(encode((PROTOCOL_VERSION, body)))
    data_or_protocol_error(encode((PROTOCOL_VERSION, [kind % 10, *fields])), 8)
    data_or_protocol_error(encode((PROTOCOL_VERSION, [kind % 10, *fields])), None)


@given(sent=messages, rest=st.binary(min_size=1, max_size=5))
def test_trailing_bytes_are_refused(sent: Any, rest: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_packet(packed([sent]) + rest)


@given(message=data_messages, rest=st.binary(min_size=1, max_size=5))
def test_trailing_bytes_of_a_header_are_refused(message: d.Data, rest: bytes) -> None:
    with pytest.raises(ProtocolError):
        d.decode_data(d.encode_data(message) + rest, payload_bytes(message))


@pytest.mark.parametrize(
    "fields",
    [
        [45, 0],  # a field too few
        [45, 0, 1, 2],  # a field too many
        [45, "0", 1],
        [45, 0, True],
        [45, 0, 1.5],
        [45, 0, -1],
        [45, 0, 2**63],
        [45, 0, 2**64 - 1],
        [45, -(2**63) - 0, None],
        [46, 1, [b"key"]],
        [46, 1, [None]],
        [46, 1, [-1]],
        [46, 1, [2**63]],
        [46, 1, ["x" * 256]],
        [46, 1, [1.0]],
        [43, [1, 0, 1], 1, float("nan")],
        [43, [1, 0, 1], 1, float("inf")],
        [43, [1, 0, 1], 1, -1.0],
        [43, [1, 0, 1], 1, WEIGHT_MAX * 2],
        [40, 1, [["k", "float32", [1] * 33, "", "", False, "zero", None]], False],
        [40, 1, [["k", "float32", [-1], "", "", False, "zero", None]], False],
        [40, 1, [["k", 5, [1], "", "", False, "zero", None]], False],
        [99, 1],
        [],
        [None],
    ],
    ids=str,
)
def test_a_wrong_field_is_refused(fields: list[Any]) -> None:
    with pytest.raises(ProtocolError, match="not a control message"):
        decode_packet(encode((PROTOCOL_VERSION, 1, 2, 3, 4, [fields])))


def test_text_that_is_not_utf8_is_refused() -> None:
    good = packed([c.Pull(1, ["\u00e9"])])
    assert good.count(b"\xc3\xa9") == 1
    with pytest.raises(ProtocolError):
        decode_packet(good.replace(b"\xc3\xa9", b"\xc3\x28"))
    header = d.encode_data(d.Fenced(0, 1, "\u00e9"))
    with pytest.raises(ProtocolError):
        d.decode_data(header.replace(b"\xc3\xa9", b"\xff\xfe"), None)


def test_extension_types_maps_and_deep_nesting_are_refused() -> None:
    for body in (b"\xd4\x01\x00", b"\x81\xa1a\x01", b"\x91" * 100_000 + b"\x90"):
        with pytest.raises(ProtocolError):
            decode_packet(b"\x96\x01\x01\x02\x03\x04" + body)
        with pytest.raises(ProtocolError):
            d.decode_data(b"\x92\x01" + body, None)


def test_an_announced_length_that_is_not_there_costs_nothing() -> None:
    for body in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"):
        with pytest.raises(ProtocolError):
            decode_packet(b"\x96\x01\x01\x02\x03\x04" + body)
        with pytest.raises(ProtocolError):
            d.decode_data(b"\x92\x01" + body, None)


# --- limits ----------------------------------------------------------------------------------


def empty_arrays(prefix: bytes, size: int) -> bytes:
    count = size - len(prefix) - 5
    return prefix + b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count


@pytest.mark.parametrize(
    "prefix",
    [
        pytest.param(b"\x96\x01\x01\x02\x03\x04", id="as the messages"),
        pytest.param(b"\x96\x01\x01\x02\x03\x04\x91\x93\x4c\x01", id="as the value of a reply"),
        pytest.param(b"\x96\x01\x01\x02\x03\x04\x91\x93\x2e\x01", id="as the keys of a pull"),
    ],
)
def test_16_mb_of_empty_arrays_cost_the_broker_no_memory(prefix: bytes) -> None:
    frame = empty_arrays(prefix, CONTROL_BYTES_MAX)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode_packet(frame, by_broker=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * CONTROL_BYTES_MAX


def test_what_is_too_large_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match=f"a packet of {CONTROL_BYTES_MAX + 1} bytes"):
        decode_packet(bytes(CONTROL_BYTES_MAX + 1))
    with pytest.raises(ProtocolError, match=f"a data header of {HEADER_BYTES_MAX + 1} bytes"):
        d.decode_data(bytes(HEADER_BYTES_MAX + 1), None)
    push = d.encode_data(d.Push(ContributionId(1, 0, 1), 1, 0, "none", 0))
    with pytest.raises(ProtocolError, match=f"a payload of {PAYLOAD_BYTES_MAX + 1} bytes"):
        d.decode_data(push, PAYLOAD_BYTES_MAX + 1)
    assert d.decode_data(push, PAYLOAD_BYTES_MAX)


def test_a_packet_has_at_most_512_messages() -> None:
    assert MESSAGES_PER_PACKET_MAX == 512
    assert len(decode_packet(packed([c.Begin()] * 512)).messages) == 512
    with pytest.raises(ProtocolError):
        decode_packet(packed([c.Begin()] * 513))


@pytest.mark.parametrize(
    "message", [c.Log(1, 0, []), c.Reply(1, {}), c.Welcome(0, 1, 0, 1, 1, [], "", "")]
)
def test_the_broker_does_not_hear_what_only_a_broker_says(message: c.Message) -> None:
    assert decode_packet(packed([message])).messages == [message]
    with pytest.raises(ProtocolError):
        decode_packet(packed([message]), by_broker=True)


@given(message=broker_messages)
def test_the_broker_hears_everything_that_others_say(message: c.Message) -> None:
    assert decode_packet(packed([message]), by_broker=True).messages == [message]


# --- versions --------------------------------------------------------------------------------


@given(
    version=UINT.filter(lambda version: version != PROTOCOL_VERSION),
    rest=st.lists(junk, max_size=6),
)
@example(version=2, rest=[])
@example(version=0, rest=[1, 2, 3, 4, [[41]]])
def test_a_peer_of_another_version_is_told_both_numbers(version: int, rest: list[Any]) -> None:
    frame = encode([version, *rest])
    for reader in (decode_packet, lambda header: d.decode_data(header, None)):
        with pytest.raises(VersionMismatch) as caught:
            reader(frame)
        assert f"protocol {version}, this process speaks {PROTOCOL_VERSION}" in str(caught.value)


def of_version(version: int, frame: bytes) -> bytes:
    """A packet as another version may say it: the number is the second byte of each."""
    assert frame[:2] == bytes((0x96, PROTOCOL_VERSION))
    return frame[:1] + bytes((version,)) + frame[2:]


@pytest.mark.parametrize("version", [0, 2, 127])
@pytest.mark.parametrize("frame", [bytes.fromhex(one) for _, one in RECORDED["control"]])
def test_who_ends_by_a_mismatch_takes_a_whole_packet_for_one(frame: bytes, version: int) -> None:
    with pytest.raises(VersionMismatch, match=f"protocol {version}, this process speaks 1"):
        open_envelope(of_version(version, frame), whole=True)
    assert open_envelope(frame, whole=True) == open_envelope(frame)


@given(version=UINT.filter(lambda version: version != PROTOCOL_VERSION), rest=st.lists(junk))
@example(version=0, rest=[])
@example(version=0, rest=[0, 0])
@example(version=0, rest=[0, 0, 0, 0, 0])
@example(version=2, rest=[{"another": "form"}])
@example(version=2, rest=[1, 2, 3, 4, [], 5])
def test_who_ends_by_a_mismatch_does_not_take_a_number_for_one(
    version: int, rest: list[Any]
) -> None:
    numbers, last = rest[:4], rest[4:]
    assume(
        not (
            all(type(one) is int and 0 <= one < 2**63 for one in numbers)
            and len(last) == 1
            and isinstance(last[0], list | tuple)
        )
    )
    with pytest.raises(ProtocolError, match="not a packet") as caught:
        open_envelope(encode([version, *rest]), whole=True)
    assert not isinstance(caught.value, VersionMismatch)


# --- routes and payloads ---------------------------------------------------------------------


@given(
    route=st.lists(st.binary(min_size=1, max_size=5), max_size=2),
    rest=st.lists(st.binary(max_size=5), min_size=1, max_size=2),
)
def test_a_route_is_split_off_at_the_empty_frame(route: list[bytes], rest: list[bytes]) -> None:
    assert split_route([*route, b"", *rest]) == (route, rest)


@given(frames=st.lists(st.binary(max_size=3), max_size=8))
def test_any_frames_have_a_route_or_are_a_protocol_error(frames: list[bytes]) -> None:
    try:
        route, rest = split_route(frames)
    except ProtocolError:
        assert b"" not in frames[:3] or len(frames) - frames.index(b"") - 1 not in (1, 2)
    else:
        assert [*route, b"", *rest] == frames
        assert all(route)


@pytest.mark.parametrize(
    "frames",
    [[], [b""], [b"a"], [b"a", b"b", b"c", b"", b"h"], [b"a", b"", b"h", b"", b"at", b"more"]],
    ids=str,
)
def test_frames_without_a_place_for_a_header_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        split_route(frames)


def test_a_place_in_memory_may_stand_behind_an_empty_payload() -> None:
    assert split_route([b"a", b"", b"h", b"", b"at"]) == ([b"a"], [b"h", b"", b"at"])


@given(message=data_messages, size=st.integers(0, 100))
def test_a_payload_stands_exactly_where_one_belongs(message: d.Data, size: int) -> None:
    header = d.encode_data(message)
    wrong = None if payload_bytes(message) is not None else size
    with pytest.raises(ProtocolError, match="payload frame"):
        d.decode_data(header, wrong)


# --- frames of every released version stay readable -------------------------------------------

NAME = ContributionId(1048577, 0, 3)
KEYS = [
    KeyEntry(0, KeySpec("w\u00e9", "float32", (2, 3), "mean", "adam:lr=0.1", True, "out")),
    KeyEntry(1, KeySpec(7, "bfloat16", ())),
    KeyEntry(0, KeySpec("tied", "float32", (2, 3), same_as="w\u00e9")),
]
BLOCKS = [BlockSpec(0, 0, [Segment(0, 0, 6)]), BlockSpec(1, 1, [Segment(1, 0, 1)])]
TABLE = TableSpec("emb", 64, "float32", "normal:0.01", 3, 1000, "adam", "sum", True)
TABLES = (TableEntry(2, TABLE, [2, 3]),)
TABLE_BLOCKS = [BlockSpec(2, 0, []), BlockSpec(3, 1, [])]
GOLDEN_ENTRIES: list[c.Entry] = [
    c.Init(1, 1048577, KEYS, BLOCKS),
    c.Init(2, 1048577, [], TABLE_BLOCKS, False, TABLES),
    c.Drop(1),
    c.Regroup(1, 2, 5),
    c.Grant(1048577, 0, 4, 9, [0, 1]),
    c.Grant(1048577, 0, 4, 9, [], -1, True),
    c.Grant(1048577, -1, 7, 9, [], rows=True),
    c.Sum(0, 10, [c.Counted(NAME, 32.0)]),
    c.Commit(0, 10, [c.Counted(NAME, 32.0)], 2.5),
    c.Commit(0, 11, [], None),
    c.Discard(1048577, 0, 4, -1),
    c.Discard(1048577, 0, 4, -1, values=True),
    c.Configure({"model": {"rule": "sgd", "lr": 0.1}, "plain": {"rule": "assign", "lr": 1.0}}),
    c.Epoch(3, [1048577, 1048578], [NAME]),
    c.Expect(0, 11, [c.Expected(1048577, 5), c.Expected(1048578, 3)]),
    c.Apart(0, [c.Expected(1048577, 5), c.Expected(1048578, 3)]),
    c.Mirror(3, [(0, 1)]),
    c.Copy(4, [(0, 1)], [c.ServerAt(0, "s0", "tcp://10.0.0.1:7000")], "tcp://10.0.0.9:5556"),
    c.Move(5, [(0, 1)]),
    c.Move(5, [(0, 1)], (0,)),
    c.Move(5, [(0, 1)], lost=0),
    c.Unmirror(5, [(0, 1)]),
    c.Retire(0),
    c.Snapshot(3, "s3://bucket/run", "zkv-0000000000000001-00000003"),
    c.Restore("/shared/run", "zkv-0000000000000001-00000003", "00" * 32, [(0, 41)]),
]
GOLDEN_CONTROL: list[c.Message] = [
    c.Log(1, 5, GOLDEN_ENTRIES),
    c.WorkerHello("trainer", -1, 0, False, "node-1", 4711),
    c.ServerHello("s0", "tcp://10.0.0.1:7000", 2**30, "node-2", 4712, False),
    c.ServerHello("s2", "tcp://10.0.0.1:7001", 0, "node-2", 4713, False, True),
    c.Welcome(0, 1048577, 0, 3, 1, [c.ServerAt(0, "s0", "tcp://10.0.0.1:7000")], "", "bsp"),
    c.ServerWelcome(0, 2, 1),
    c.Beat(1.5),
    c.Beat(2.5, 1.5),
    c.Beat(1.5, None, True),
    c.Waiting("worker 2 is late"),
    c.Fatal("ServerLost", "server 1 is gone"),
    c.Bye("done"),
    c.Offer(1, [key.spec for key in KEYS], False, 5e7),
    c.Offer(1, [], False, 0.0, (TABLE,)),
    c.UsePool(9, 1797, 32, 1, True, 2),
    c.Begin(),
    c.Begin(True),
    c.Plain(2, "w\u00e9"),
    c.Finish(NAME, 4, 32.0),
    c.Finish(NAME, 4, 32.0, 0.5, 4096),
    c.Finish(NAME, 4, 32.0, 0.5, 4096, None, 0, 3),
    c.Followed(3, [(0, 4)]),
    c.TakeSnapshot(8),
    c.SaveState(3, "/shared/run", "zkv-0000000000000001-00000003", 41),
    c.Saved(3, 4096, "00" * 32),
    c.Saved(3, why="No space left on device"),
    c.Restored(),
    c.GoBack(9, "zkv-0000000000000001-00000003"),
    c.RollBack(2, "zkv-0000000000000001-00000003", 41, 12, "server 1 is lost", [0, 1]),
    c.WentBack(2),
    c.Rearrange(7, "drain", "s0"),
    c.Rearrange(7, "move", "1", ("w*", 7), True),
    c.Copied(4, [0]),
    c.Copied(4, [0], "no room"),
    c.Traffic([(0, 4096)]),
    c.Accounts([c.Account(0, "int8+ef", 400, 104, 0.25, 1.5, "a slow link")]),
    c.Accounts([], Spent(3, 2.0, 0.5, 1.0, 0.125, 0.125, 0.0, 0.25, 0.5, 64.5, (("bsp", 0.25),))),
    c.Listens("tcp://10.0.0.7:6001", "boot-7 net:[4026531840]"),
    c.CutOff(4, "worker 1 does not answer"),
    c.Withdraw(NAME, 4),
    c.Received(0, 4),
    c.Pull(3, ["w\u00e9", 7]),
    c.Pull(3, [], 9),
    c.Pull(3, [], 9, True),
    c.Barrier(4, 1),
    c.Leave(),
    c.Change(5, "lr", "0.01"),
    c.Status(6),
    c.Held([(NAME, 4)]),
    c.Held([(NAME, 4)], 12),
    c.Unsound(NAME, 4, "NaN"),
    c.Void(NAME, 4, "w\u00e9", "NaN"),
    c.SquareSums(0, 10, [(0, 2.5)]),
    c.Trouble("disk full"),
    c.Decoding([(0, 0.25)], 9, 0.5),
    c.Decoding([], 9, 0.5, ((2, 1000, 256_000), (3, 0, 0))),
    c.Layout(1, KEYS, BLOCKS, True, 6),
    c.Layout(2, [], TABLE_BLOCKS, False, 6, TABLES),
    c.Ready(1),
    c.Regrouped(1, 2, 5, 7),
    c.Granted(0, 4, 9, True, 2, 1, 3, 8, [], 0),
    c.Granted(0, 5, 10, False, 3, 1, 3, 9, [], 0, c.Samples(1, 32, 64)),
    c.Granted(0, 6, 11, False, 3, 1, 3, 9, [], 0, None, "bits:heuristic", "none", "int8+ef"),
    c.Granted(0, 7, 12, True, 3, 1, 3, 9, [], 0, on_demand=True),
    c.Granted(0, 8, 12, True, 3, 1, 3, 9, [], 0, joint=True),
    c.Together(8, 13, "ring", [c.Companion(0, 1048577, 8, "node-1", "tcp://10.0.0.7:6001")], 9),
    c.Separate(8, 10),
    c.Exhausted(),
    c.Cancel(0, 4),
    c.Settled([(0, 3, 10, ""), (0, 4, -1, "late")]),
    c.Reply(6, {"version": 10}),
    c.Refusal(5, "Refused", "no"),
    c.Follow(3, [(0, [0, 1])], 9),
    c.Servers([c.ServerAt(0, "s0", "tcp://10.0.0.1:7000")]),
    c.Catchup(1, 9, [c.Epoch(3, [1048577], [])], [(0, 10)], True),
    c.Keyring([(1048577, "ab" * 32)], [("tcp://10.0.0.1:7000", "cd" * 32)]),
    c.Keyring([], [], [("ab" * 32, 5)]),
]
FORM = d.Form(8, "", 0, 7)
GOLDEN_DATA: list[d.Data] = [
    d.Greet(1048577, 1),
    d.Push(NAME, 4, 0, "none", 6),
    d.Push(NAME, 4, 0, "none", 6, None, 32.0),
    d.Push(NAME, 4, 0, "none", 6, of=(d.Addend(NAME, 4, 32.0),)),
    d.Pass(1048577, 9, 0),
    d.Took(1048577, [(NAME, 0)], [(9, 1)]),
    d.Push(NAME, 4, 0, "none", 6, None, 32.0, 3),
    d.Done(NAME, 4, 32.0, [0], [1], 6),
    d.Done(NAME, 4, 32.0, [0, 1 << 40 | 2], [1], 6, True),
    d.Done(NAME, 4, 32.0, [0], [1], 6, False, 3),
    d.Fetch(1, 4, 0, 9, [2]),
    d.Part(0, 1, 4, 0, 2, 3, 80),
    d.Got(1048577, 0, 4, [0, 1]),
    d.Ask(1048577, -1, 4, [1]),
    d.Ask(1048577, 0, 4, [1], (), 6),
    d.Block(0, 1048577, 0, 4, 9, 0, "none", []),
    d.Block(0, 1048577, 0, 4, 9, 0, "none", [], None, 8, (d.Delta("int8", FORM, 12),)),
    d.Block(0, 1048577, 0, 4, 9, 0, "none", [], like=3),
    d.Ack(0, 1048577, [(NAME, 0), (NAME, -1)]),
    d.Fenced(0, 1048577, "no member"),
    d.Probe(1048577, 3),
    d.Probed(0, 1048577, 3),
    d.Share(0, 1048577, "net:[4026531840]", 4711, 9, 8192, 2**30, b"0123456789abcdef"),
    d.Shared(0, 1048577, b"0123456789abcdef", "it is on another machine"),
    d.AskRows(1048577, 0, 4, 2, 9, 6),
    d.AskRows(1048577, -1, 7, 2, 9, 6, 4096),
    d.Rows(0, 1048577, 9),
    d.Rows(0, 1048577, 9, "", 4096, 8192),
    d.Rows(0, 1048577, 9, "row 4 stands twice"),
]


def golden() -> dict[str, list[list[str]]]:
    """The frames of this process, as (what it says, hex)."""
    return {
        "control": [
            [str(message), c.encode_packet(c.Packet(11, 22, 3, 4, [message])).hex()]
            for message in GOLDEN_CONTROL
        ],
        "data": [[str(message), d.encode_data(message).hex()] for message in GOLDEN_DATA],
    }


def test_frames_of_protocol_version_1_stay_readable() -> None:
    if os.environ.get("ZKV_REWRITE_FRAMES"):
        FIXTURE.write_text(json.dumps(golden(), indent=1, ensure_ascii=True) + "\n")
    kept = json.loads(FIXTURE.read_text())
    control = [bytes.fromhex(frame) for _, frame in kept["control"]]
    data = [bytes.fromhex(frame) for _, frame in kept["data"]]
    assert [decode_packet(frame) for frame in control] == [
        c.Packet(11, 22, 3, 4, [message]) for message in GOLDEN_CONTROL
    ]
    assert [
        d.decode_data(frame, payload_bytes(message))
        for frame, message in zip(data, GOLDEN_DATA, strict=True)
    ] == GOLDEN_DATA
    assert golden() == kept


def test_the_kept_frames_show_every_kind_of_message() -> None:
    assert {type(message) for message in GOLDEN_CONTROL} == set(CONTROL)
    assert {type(entry) for entry in GOLDEN_ENTRIES} == set(ENTRIES)
    assert {type(message) for message in GOLDEN_DATA} == set(DATA)
