"""Frames that no honest peer sends, at the broker's and a server's border: each is refused, and
nothing changes.

`python tests/fuzzing_frames.py COUNT [SEED]` tries COUNT of them (`scripts/fuzz` does that), a test
fewer. What is wrong is printed with what is needed to see it again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rig import Rig
from strategies import placed

from zkv import control as c
from zkv.data_messages import Ask, AskRows, Done, Got, Greet, Push, decode_data, encode_data
from zkv.errors import ProtocolError
from zkv.policy import policy
from zkv.roles import Holder
from zkv.wire import MODEL, ContributionId, KeySpec, open_envelope, split_route
from zkv_brokers import router as r
from zkv_brokers.node import Failed, Node, NodeConfig
from zkv_brokers.recording import digest_of
from zkv_brokers.shard import FromWorker

KEPT = json.loads((Path(__file__).parent / "fixtures" / "frames_v1.json").read_text())
MESSAGES = [
    message
    for _, frame in KEPT["control"]
    for message in c.decode_messages(open_envelope(bytes.fromhex(frame))).messages
]
DATA = [bytes.fromhex(frame) for _, frame in KEPT["data"]]
BROKER, SERVER = 22, 3
"""Instances, which packets are addressed to."""
MEMBER = 1048577
"""The incarnation that the kept frames speak of."""
HONEST = [
    message
    for bid in range(3)
    for batch in range(2, 6)
    for name in [ContributionId(MEMBER, MODEL, batch)]
    for message in (
        Greet(MEMBER, 1),
        Push(name, batch, bid, "none", 0),
        Done(name, batch, 1.0, [bid], [], 0),
        Got(MEMBER, MODEL, batch, [bid]),
        Ask(MEMBER, MODEL, batch, [bid]),
    )
]
OWN, WORKER, UNKNOWN = "0" * 64, "1" * 64, "f" * 64
LOOK_EVERY = 500
GROWTH_MAX = 50_000
"""Objects that may be left, however many frames there were."""
PEERS = 30
"""So many processes send the frames."""
ODD = (b"", b"\x00", b"\xc1", b"\xff" * 9, b"\xdd\xff\xff\xff\xff", b"\x91" * 2000, b"\x80")


def packet(chance: np.random.Generator, target: int) -> bytes:
    """A packet of one or two messages that has the right form; a third of them is spoiled."""
    some = [MESSAGES[chance.integers(len(MESSAGES))] for _ in range(chance.integers(1, 3))]
    source = int(chance.integers(1, PEERS))
    frame = c.encode_packet(c.Packet(source, target * int(chance.integers(2)), 1, 1, some))
    return spoiled(chance, [frame]) if chance.integers(3) == 0 else frame


def spoiled(chance: np.random.Generator, corpus: list[bytes]) -> bytes:
    """A frame of the corpus with up to four things changed, or something that never was one."""
    raw = bytearray(corpus[chance.integers(len(corpus))])
    for _ in range(chance.integers(0, 5)):
        at = int(chance.integers(len(raw) + 1))
        match chance.integers(7):
            case 0 if at < len(raw):
                raw[at] = int(chance.integers(256))
            case 1 if at < len(raw):
                raw[at] ^= 1 << int(chance.integers(8))
            case 2:
                del raw[at:]
            case 3:
                raw[at:at] = chance.bytes(int(chance.integers(1, 9)))
            case 4:
                other = corpus[chance.integers(len(corpus))]
                raw[at:] = other[int(chance.integers(len(other))) :]
            case 5:
                raw[at:at] = ODD[chance.integers(len(ODD))]
            case _:
                raw = bytearray(chance.bytes(int(chance.integers(1, 60))))
    return bytes(raw)


# --- the broker ----------------------------------------------------------------------------------


def broker() -> r.Router:
    """A broker with keys, one of which is a worker's."""
    config = r.RouterConfig(
        "tcp://b:1", policy("bsp"), workers=2, key=OWN, max_members=32, max_keys=50
    )
    made = r.Router(config, term=1, instance=BROKER)
    made.handle(r.Keys((Holder(WORKER, "w", frozenset({"worker"})),)), 0.0)
    return made


def of_broker(router: r.Router) -> Any:
    """All that a broker has decided."""
    keys = sorted(map(str, router.layout.kid_of))
    members = sorted(map(str, router.members.by_peer.values()))
    return router.log.digest, keys, members, str(router.policy), router.failed


def at_the_broker(count: int, seed: int) -> int:
    """Frames by a key that is not let in: nothing is decided. By a worker's: no harm is done."""
    stranger, lied_to = broker(), broker()
    before, refused = of_broker(stranger), 0
    for number, chance in numbered(count, seed):
        frame, now = packet(chance, BROKER), number * 1e-3
        where = f"control frame {number} of seed {seed}: {frame.hex()[:200]}"
        try:
            open_envelope(frame)
        except ProtocolError:
            refused += 1
        for router, key in ((stranger, UNKNOWN), (lied_to, WORKER)):
            route = int(chance.integers(100)).to_bytes(5, "big")
            try:
                router.handle(r.Received(route, frame, key), now)
                if number % 100 == 0:
                    router.handle(r.Tick(), now)
            except Exception as error:
                raise AssertionError(where) from error
        if number % LOOK_EVERY == 0 or number == count - 1:
            assert of_broker(stranger) == before, where
            assert lied_to.failed is None, where
            assert len(lied_to.members.by_peer) <= 32, where
            assert len(lied_to.layout.kid_of) <= 50, where
            assert all(len(one.hub.peers()) <= 2 * 32 + 1024 for one in (stranger, lied_to)), where
    return refused


# --- a server ------------------------------------------------------------------------------------


def data_frames(chance: np.random.Generator) -> list[bytes]:
    """A header, half of them as a member may send it, and perhaps a payload, which may fit."""
    honest = chance.integers(2)
    message = HONEST[chance.integers(len(HONEST))]
    header = encode_data(message) if honest else spoiled(chance, DATA)
    fits = isinstance(message, Push | AskRows) if honest else chance.integers(2)
    size = (16, 12, 8, int(chance.integers(0, 70)))[chance.integers(4)]
    return [header, chance.bytes(size)] if fits else [header]


def at_a_server(count: int, seed: int) -> int:
    """Data frames of a member: no value changes, as no update was committed. And what is no word of
    the broker's over its link ends nothing."""
    specs = [KeySpec("a", "float32", (8,)), KeySpec("b", "float16", (3, 2))]
    rig = Rig(placed(specs, 1, bucket_bytes=0, block_bytes=16), members=(MEMBER, 1, 2))
    rig.init({0: np.ones(8, np.float32), 1: np.ones(6, np.float16)})
    shard, refused = rig.shards[0], 0
    node = Node(NodeConfig("tcp://b:1", "s", "tcp://s:1"), instance=SERVER, now=0.0)
    before, told = digest_of(shard), digest_of(node.shard)
    for number, chance in numbered(count, seed):
        frames = data_frames(chance)
        where = f"data frames {number} of seed {seed}: {[one.hex()[:200] for one in frames]}"
        try:
            _, rest = split_route([b"", *frames])
            payload = None if len(rest) == 1 else np.frombuffer(rest[1], np.uint8)
            message = decode_data(rest[0], None if payload is None else payload.nbytes)
            shard.take(FromWorker(message, payload), 0.0)
            shard.turn_over(0.0)
        except ProtocolError:
            refused += 1
        except Exception as error:
            raise AssertionError(where) from error
        told_it = packet(chance, SERVER)
        try:
            actions = node.broker_says(told_it, number * 1e-3)
        except ProtocolError:
            actions = []
        except Exception as error:
            raise AssertionError(f"number {number} of seed {seed}: {told_it.hex()}") from error
        if any(isinstance(one, Failed) for one in actions):
            # It was told to end, or that its broker is of another version: as a real one can.
            node = Node(
                NodeConfig("tcp://b:1", "s", "tcp://s:1"), instance=SERVER, now=number * 1e-3
            )
        if number % LOOK_EVERY == 0 or number == count - 1:
            assert digest_of(shard) == before, where
            assert digest_of(node.shard) == told, where
    return refused


# --- both ----------------------------------------------------------------------------------------


def numbered(count: int, seed: int) -> Iterator[tuple[int, np.random.Generator]]:
    """Count, with chance that begins anew now and then, so that one can be seen again soon.

    Raises:
        AssertionError: there is more in memory after the last than after a quarter of them.
    """
    quarter = 0
    for number in range(count):
        if number % LOOK_EVERY == 0:
            chance = np.random.default_rng([seed, number])
        if number == count // 4:
            quarter = sys.getallocatedblocks()
        yield number, chance
    grown = sys.getallocatedblocks() - quarter
    assert grown < GROWTH_MAX, f"{grown} objects more after {count} frames of seed {seed}"


def run(count: int, seed: int) -> int:
    """Try so many frames at each border; return how many were refused as no messages."""
    # Once for what is made at first use: decoders, tables of messages.
    at_the_broker(LOOK_EVERY, seed)
    at_a_server(LOOK_EVERY, seed)
    return at_the_broker(count, seed) + at_a_server(count, seed)


if __name__ == "__main__":
    asked = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    begun = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    print(f"{asked} frames of seed {begun} at each border: {run(asked, begun)} were no messages")
