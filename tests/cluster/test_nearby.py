"""Payloads between processes of one machine: through memory if that is proven, else by socket."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from crew import crew, ones
from harness import Cluster, cluster, until
from hypothesis import given
from hypothesis import strategies as st

from zkv.aio import AsyncWorker
from zkv.data_messages import Probe, Share, Shared, decode_data, encode_data
from zkv.errors import ProtocolError
from zkv_net import nearby
from zkv_net.nearby import LEAST_BYTES, SLOT_BYTES, Nearby, NeverShown, payload_bytes
from zkv_net.sockets import FdSocket

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this system has no memory files"
)
LARGE = 200_000
"""Elements of a key whose block goes through memory."""


# --- two peers and what is between them ------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """A received frame."""

    buffer: bytes
    address: str = "127.0.0.1"

    def get(self, name: str) -> str:
        assert name == "Peer-Address"
        return self.address

    def __len__(self) -> int:
        return len(self.buffer)


@dataclass
class End:
    """One process: what it has sent is in `out`, what it has received in `got`."""

    number: int
    shared_bytes: int = 2 * SLOT_BYTES
    out: deque[list[bytes]] = field(default_factory=deque)
    got: list[bytes | None] = field(default_factory=list)
    sent: list[tuple[int, list[bytes]]] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.nearby = Nearby(self._post, lambda: self.now, self.shared_bytes)

    def _post(self, peer: int, frames: list[Any]) -> None:
        self.out.append([bytes(memoryview(one)) for one in frames])

    def greet(self, peer: int) -> None:
        offer = self.nearby.offer(peer, server=0, incarnation=1)
        if offer is not None:
            self.nearby.send(peer, encode_data(offer), None)

    def hear(self, peer: int, frames: list[bytes], address: str = "127.0.0.1") -> None:
        _, *rest = [Frame(one, address) for one in frames]
        message = decode_data(rest[0].buffer, payload_bytes(rest))
        payload, came = self.nearby.payload(peer, rest[1:])
        self.nearby.turn()
        if isinstance(message, Share):
            self.nearby.send(peer, encode_data(self.nearby.offered(peer, message, rest[0])), None)
        elif isinstance(message, Shared):
            self.nearby.answered(peer, message)
        elif came:
            self.got.append(None if payload is None else payload.tobytes())


PUSH = encode_data(Probe(1, 1))
"""Any message with a payload."""


@given(
    losses=st.lists(st.booleans(), max_size=12),
    sizes=st.lists(st.sampled_from([0, 1, LEAST_BYTES, SLOT_BYTES, SLOT_BYTES + 1]), max_size=12),
)
def test_offers_are_repeated_until_both_know_and_nothing_changes_its_place(
    losses: list[bool], sizes: list[int]
) -> None:
    one, other = End(1), End(2)
    try:
        lost = deque(losses)
        for _ in range(len(losses) + 3):
            one.greet(2)
            other.greet(1)
            for sender, receiver in ((one, other), (other, one), (one, other)):
                while sender.out:
                    frames = sender.out.popleft()
                    if not (lost and lost.popleft()):
                        receiver.hear(sender.number, frames)
        assert one.nearby.transport == other.nearby.transport == "memory"
        sent = [np.full(size, at, np.uint8) for at, size in enumerate(sizes)]
        for values in sent:
            one.nearby.send(2, *_message(values))
        while one.out:
            frames = one.out.popleft()
            assert len(frames) == 4 or not LEAST_BYTES <= len(frames[2]) <= SLOT_BYTES
            _, *rest = [Frame(frame) for frame in frames]
            payload, came = other.nearby.payload(1, rest[1:])
            assert came
            other.got.append(payload.tobytes())
            one.nearby.turn()
        assert other.got == [values.tobytes() for values in sent]
    finally:
        one.nearby.close()
        other.nearby.close()


def _message(values: Any) -> tuple[bytes, Any]:
    return PUSH, values


def test_values_that_change_between_two_turns_are_written_again() -> None:
    """A server updates in place what nobody is sent any more."""
    one, other = End(1), End(2)
    one.greet(2)
    other.hear(1, one.out.popleft())
    one.hear(2, other.out.popleft())
    values = np.zeros(LEAST_BYTES, np.uint8)
    for turn in range(2):
        values[:] = turn
        one.nearby.send(2, PUSH, values, turn)
    while one.out:
        other.hear(1, one.out.popleft())
    assert other.got == [bytes(LEAST_BYTES), b"\1" * LEAST_BYTES]
    one.nearby.close()
    other.nearby.close()


def test_room_that_one_peer_makes_is_for_whoever_waits() -> None:
    one, others = End(0), {number: End(number) for number in (1, 2)}

    def deliver(number: int) -> list[bytes | None]:
        """Let a peer hear all that was sent to it, and return what it got."""
        for frames in [one.sent.pop(0) for _ in range(len(one.sent))]:
            if frames[0] == number:
                others[number].hear(0, frames[1])
            else:
                one.sent.append(frames)
        return others[number].got

    one.nearby._post = lambda peer, frames: one.sent.append(
        (peer, [bytes(memoryview(frame)) for frame in frames])
    )
    for number, other in others.items():
        one.greet(number)
        deliver(number)
        while other.out:
            one.hear(number, other.out.popleft())
    values = [np.full(SLOT_BYTES, at, np.uint8) for at in range(4)]
    for at, number in enumerate((1, 1, 2, 2)):
        one.nearby.send(number, PUSH, values[at])
    assert [peer for peer, _ in one.sent] == [1, 1]
    assert deliver(1) == [values[0].tobytes(), values[1].tobytes()]
    one.nearby.turn()
    assert deliver(2) == [values[2].tobytes(), values[3].tobytes()]
    for end in (one, *others.values()):
        end.nearby.close()


@pytest.mark.parametrize("tells", ["its name", "its address"])
def test_who_is_elsewhere_is_asked_once(tells: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it claims, nothing is opened for an address of another machine."""
    one, other = End(1), End(2)
    one.greet(2)
    if tells == "its name":
        monkeypatch.setattr(nearby, "machine", lambda: "net:[another]")
        other.hear(1, one.out.popleft())
    else:
        monkeypatch.setattr(nearby, "Inbox", None)
        other.hear(1, one.out.popleft(), "192.0.2.7")
    one.hear(2, other.out.popleft())
    assert one.nearby.transport == "tcp: it is on another machine"
    one.greet(2)
    assert not one.out
    one.nearby.close()
    other.nearby.close()


def test_a_payload_that_was_never_shown_costs_only_its_message() -> None:
    one = End(1)
    one.greet(2)
    for frames in ([b"", b"x" * 33], [b"x", b"x" * 33], [b"", b"", b""]):
        with pytest.raises(ProtocolError, match="never shown"):
            one.nearby.payload(2, [Frame(frame) for frame in frames])
    with pytest.raises(ProtocolError, match="33 bytes"):
        payload_bytes([Frame(PUSH), Frame(b""), Frame(b"x")])
    one.nearby.close()


def test_memory_that_was_forgotten_is_offered_again() -> None:
    """As when a peer was taken for gone: what is lost until it knows goes again, as on any link."""
    one, other = End(1), End(2)
    for _ in range(2):
        one.greet(2)
        other.hear(1, one.out.popleft())
        one.hear(2, other.out.popleft())
        values = np.ones(LEAST_BYTES, np.uint8)
        one.nearby.send(2, PUSH, values)
        other.nearby.gone(1)
        _, _, *frames = one.out.popleft()
        with pytest.raises(NeverShown):
            other.nearby.payload(1, [Frame(frame) for frame in frames])
        one.nearby.answered(2, other.nearby.forgotten(0, 1))
        one.nearby.send(2, PUSH, values)
        other.hear(1, one.out.popleft())
        assert other.got.pop() == values.tobytes()
    one.nearby.close()
    other.nearby.close()


# --- in a cluster ----------------------------------------------------------------------------


class Bytes:
    """Counts what goes through sockets in frames that are large enough for memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.large = 0
        whole = FdSocket.send

        def send(socket: FdSocket, frames: Any) -> bool:
            self.large += sum(n for one in frames if (n := memoryview(one).nbytes) >= LEAST_BYTES)
            return whole(socket, frames)

        monkeypatch.setattr(FdSocket, "send", send)


async def together(workers: list[AsyncWorker], gradients: list[dict[str, Any]]) -> None:
    """Let each worker contribute its gradients to one update."""

    async def one(worker: AsyncWorker, given: dict[str, Any]) -> Any:
        async with worker.batch() as batch:
            batch.push_all(given.items())
        return batch

    batches = await asyncio.gather(*map(one, workers, gradients))
    assert [await batch.wait() for batch in batches] == ["committed"] * len(workers)


async def trained(made: Cluster, codec_seed: int = 0, **options: Any) -> tuple[bytes, list[str]]:
    """Return the bits of a model after three rounds, and how payloads went at the end."""
    params = {"w": np.zeros(LARGE, np.float32), "b": np.zeros(3, np.float32)}
    async with crew(made, 2, params, **options) as workers:
        chance = [np.random.default_rng(rank) for rank in range(2)]
        for _ in range(3):
            await together(
                workers,
                [{"w": one.standard_normal(LARGE, np.float32), "b": ones()} for one in chance],
            )
        values = await workers[0].pull("w")
        rows = (await workers[0].status())["workers"]
        return values.tobytes(), [row["transport"] for row in rows]


def tells(made: Cluster, text: str) -> Any:
    """Whether the broker knows that all workers' payloads go like that."""
    members = made.broker.router.members.workers.values()
    return len(members) == 2 and all(one.transport == text for one in members)


@pytest.mark.parametrize("codec", ["none", "int8+ef"])
async def test_a_run_through_memory_has_the_bits_of_one_through_sockets(codec: str) -> None:
    bits = []
    for options in ({}, {"shared_bytes": 0}):
        async with cluster(2, codec=codec) as made:
            found, _ = await trained(made, **options)
            bits.append(found)
    assert bits[0] == bits[1]


async def test_status_says_how_payloads_go_and_no_socket_carries_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster(2) as made, crew(made, 2, {"w": np.zeros(LARGE, np.float32)}) as workers:
        await until(lambda: tells(made, "memory"))
        rows = (await workers[0].status())["workers"]
        assert [row["transport"] for row in rows] == ["memory", "memory"]
        counted = Bytes(monkeypatch)
        for _ in range(2):
            await together(workers, [{"w": np.ones(LARGE, np.float32)}] * 2)
        assert counted.large == 0


@pytest.mark.parametrize("where", ["workers", "servers"])
async def test_it_can_be_switched_off_at_either_end(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Bytes(monkeypatch)
    servers = {"server_options": {"shared_bytes": 0}} if where == "servers" else {}
    options = {"shared_bytes": 0} if where == "workers" else {}
    async with cluster(1, **servers) as made:
        _, _ = await trained(made, **options)
    assert counted.large >= 2 * 3 * 4 * LARGE


async def test_without_memory_files_payloads_go_through_sockets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container whose memory is used up."""

    def full(name: str, flags: int = 0) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "memfd_create", full)
    async with cluster(2) as made, crew(made, 2, {"w": np.zeros(LARGE, np.float32)}) as workers:
        why = "tcp: no memory can be shared: [Errno 28] No space left on device"
        await until(lambda: tells(made, why))
        await together(workers, [{"w": np.ones(LARGE, np.float32)}] * 2)


@pytest.mark.parametrize("shared_bytes", [SLOT_BYTES, 32 * SLOT_BYTES])
async def test_a_block_that_no_slot_holds_goes_through_memory_where_it_lives_there(
    shared_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Bytes(monkeypatch)
    size, shared = SLOT_BYTES // 4 + 1, {"shared_bytes": shared_bytes}
    async with (
        cluster(1, block_bytes=4 * SLOT_BYTES, server_options=shared) as made,
        crew(made, 2, {"w": np.zeros(size, np.float32)}, **shared) as workers,
    ):
        await until(lambda: tells(made, "memory"))
        await together(workers, [{"w": np.ones(size, np.float32)}] * 2)
        before = counted.large
        await together(workers, [{"w": np.ones(size, np.float32)}] * 2)
        through_sockets = counted.large - before
        assert (through_sockets == 0) == (shared_bytes > SLOT_BYTES)
        assert through_sockets >= (2 * 4 * size if shared_bytes == SLOT_BYTES else 0)
        assert (await workers[0].pull("w")).tolist()[0] == (await workers[1].pull("w")).tolist()[-1]


async def test_a_worker_that_a_server_has_forgotten_goes_on() -> None:
    async with cluster(1) as made, crew(made, 2, {"w": np.zeros(LARGE, np.float32)}) as workers:
        await until(lambda: tells(made, "memory"))
        for who in list(made.servers[0]._nearby._peers):
            made.servers[0]._nearby.gone(who)
        await together(workers, [{"w": np.ones(LARGE, np.float32)}] * 2)
        await until(lambda: tells(made, "memory"))


async def test_who_greets_before_it_is_a_member_is_not_forgotten() -> None:
    async with cluster(1) as made, crew(made, 1, {"w": np.zeros(LARGE, np.float32)}):
        senders, now = made.servers[0]._senders, time.monotonic()
        (member,) = senders.routes
        next_one = member + 1
        senders.routes[next_one] = [b"early"]
        senders.forget_those_gone({member}, now)
        assert next_one in senders.routes
        senders.forget_those_gone({member, next_one}, now)
        senders.forget_those_gone({member}, now)
        assert next_one not in senders.routes


async def test_a_worker_that_comes_back_gets_memory_again() -> None:
    async with cluster(1) as made:
        for _ in range(3):
            async with crew(made, 2, {"w": np.zeros(LARGE, np.float32)}) as workers:
                await until(lambda: tells(made, "memory"))
                pulled = await asyncio.gather(*(worker.pull("w") for worker in workers))
                assert all(one.nbytes == 4 * LARGE for one in pulled)
                # Those that are gone hold no place.
                await until(lambda: len(made.servers[0]._nearby._peers) == 2)
