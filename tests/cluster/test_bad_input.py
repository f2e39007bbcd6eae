"""Bad input gives a clear error to whom it comes from, and nothing else is lost."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zmq
from crew import all_begun, crew, end, ones, version, work, zeros
from harness import Cluster, cluster, until

from zkv import control as c
from zkv.aio import AsyncWorker, connect
from zkv.data_messages import Done, Greet, Push, encode_data
from zkv.errors import (
    ConfigError,
    KeyMismatch,
    NameInUse,
    PushRefused,
    Refused,
    UnknownKey,
    VersionMismatch,
)
from zkv.policy import bsp
from zkv.wire import CONTROL_BYTES_MAX, PROTOCOL_VERSION, ContributionId, encode, open_envelope
from zkv_brokers.broker import Broker, BrokerConfig
from zkv_brokers.server import Server, ServerConfig

SGD = "sgd:lr=1"
PARAMS = {"w": zeros(4), 7: zeros(2)}


def zkv_connect(address: str, **options: Any) -> AsyncWorker:
    """Return a worker that is soon out of patience."""
    return connect(address, connect_timeout_s=5.0, wait_timeout_s=5.0, **options)


async def still_trains(made: Cluster, workers: list[Any]) -> None:
    """Check that a whole round works and changes w by one."""
    before = (await workers[0].pull("w"))[0]
    batches = await asyncio.gather(*(work(worker, ones(4)) for worker in workers))
    assert [await batch.wait() for batch in batches] == ["committed"] * len(workers)
    assert (await workers[0].pull("w"))[0] == before - 1


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        ("v", ones(4), UnknownKey, ["unknown key 'v'", "'w'"]),
        ("7", ones(2), UnknownKey, ["unknown key '7'", "a key 7", "int"]),
        (8, ones(2), UnknownKey, ["unknown key 8"]),
        ("w", ones(5), KeyMismatch, ["'w'", "(4,)", "(5,)"]),
        ("w", ones(1), KeyMismatch, ["'w'", "(4,)", "(1,)"]),
        ("w", np.float32(1), KeyMismatch, ["'w'", "(4,)", "()"]),
        ("w", np.ones(4), KeyMismatch, ["'w'", "float32", "float64"]),
        ("w", np.ones(4, np.int32), KeyMismatch, ["'w'", "float32", "int32"]),
        ("w", [1.0] * 4, KeyMismatch, ["'w'", "list"]),
        ("w", None, KeyMismatch, ["'w'", "NoneType"]),
        ("w", np.array([None] * 4), TypeError, ["object"]),
        ("w", np.array(["a"] * 4), TypeError, ["float32"]),
        ("w", np.ones(4, complex), TypeError, ["complex128"]),
    ],
)
async def test_a_bad_push_is_refused_at_once(
    key: Any, value: Any, error: type[Exception], words: list[str]
) -> None:
    async with cluster(2, optimizer=SGD) as made, crew(made, 1, PARAMS) as workers:
        (worker,) = workers
        with pytest.raises(error) as raised:
            worker.push(key, value)
        for word in words:
            assert word in str(raised.value)
        async with worker.batch() as batch:
            with pytest.raises(error) as raised:
                batch.push(key, value)
            for word in words:
                assert word in str(raised.value)
            batch.push("w", ones(4))
        assert await batch.wait() == "committed"
        await still_trains(made, workers)


async def test_of_several_pushes_those_before_a_bad_one_count() -> None:
    async with cluster(2, optimizer=SGD) as made, crew(made, 1, PARAMS) as workers:
        (worker,) = workers
        async with worker.batch() as batch:
            with pytest.raises(KeyMismatch, match="key 7: shape"):
                batch.push_all([("w", ones(4)), (7, ones(5)), (7, ones(2))])
        assert await batch.wait() == "committed"
        moved = await worker.pull(["w", 7])
        assert moved["w"].tolist() == [-1, -1, -1, -1]
        assert moved[7].tolist() == [0, 0]
        await still_trains(made, workers)


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (-1, ValueError),
        (2**63, ValueError),
        (2**80, ValueError),
        (True, TypeError),
        (1.0, TypeError),
        (None, TypeError),
        ("", ValueError),
        ("x" * 256, ValueError),
        ("ä" * 128, ValueError),
        ("\ud800", ValueError),
    ],
)
async def test_a_bad_key_is_refused_everywhere(key: Any, error: type[Exception]) -> None:
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, PARAMS) as workers:
        (worker,) = workers
        with pytest.raises(error):
            await worker.init({key: ones()})
        with pytest.raises(error):
            worker.push(key, ones())
        with pytest.raises((error, TypeError, UnknownKey)):
            await worker.pull([key])
        await still_trains(made, workers)


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        ({"x": np.array([object()])}, TypeError, ["'x'", "object"]),
        ({"x": "text"}, TypeError, ["'x'", "str"]),
        ({"x": None}, TypeError, ["'x'", "NoneType"]),
        ({"x": np.zeros(2, np.complex64)}, TypeError, ["'x'", "complex64"]),
        ([("x", ones())], TypeError, ["dict", "list"]),
        ({}, KeyMismatch, ["without any key"]),
        ({"w": zeros(5), 7: zeros(2)}, KeyMismatch, ["'w'", "(4,)", "(5,)"]),
        ({"w": np.zeros(4), 7: zeros(2)}, KeyMismatch, ["'w'", "float32", "float64"]),
        ({"w": zeros(4)}, KeyMismatch, ["lacks 7"]),
        ({"w": zeros(4), 7: zeros(2), "more": zeros()}, KeyMismatch, ["adds 'more'"]),
    ],
)
async def test_a_bad_init_is_refused(params: Any, error: type[Exception], words: list[str]) -> None:
    """D10 among them: other shapes, dtypes or key sets than those that were initialised."""
    async with cluster(2, optimizer=SGD) as made, crew(made, 1, PARAMS) as workers:
        with pytest.raises(error) as raised:
            await workers[0].init(params)
        for word in words:
            assert word in str(raised.value)
        await still_trains(made, workers)


async def test_two_workers_that_differ_from_the_start() -> None:
    """The first one's keys count; the other is told the key and both shapes, and may try again."""
    async with (
        cluster(2, optimizer=SGD) as made,
        made.worker(0, world=2) as first,
        made.worker(1, world=2) as second,
    ):
        await first.init({"w": zeros(4)})
        with pytest.raises(KeyMismatch, match=r"'w'.*\(4,\).*\(5,\)"):
            await second.init({"w": zeros(5)})
        await second.init({"w": ones(4)})
        await still_trains(made, [first, second])


@pytest.mark.parametrize("rule", ["sgdd", "sgd:lr=fast", "adam:lr=-1"])
async def test_an_unknown_rule_is_refused_with_the_key(rule: str) -> None:
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, PARAMS) as workers:
        with pytest.raises(KeyMismatch, match="'x'"):
            await workers[0].init({"x": ones()}, rule=rule)
        await still_trains(made, workers)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
async def test_a_bad_weight_is_refused(weight: float) -> None:
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, PARAMS) as workers:
        with pytest.raises(ValueError, match="weight"):
            workers[0].batch(weight=weight)
        with pytest.raises(ValueError, match="weight"):
            workers[0].push("w", ones(4), weight=weight)
        await still_trains(made, workers)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
async def test_not_a_number_is_refused_and_stalls_nobody(bad: float) -> None:
    """Worker 1's contribution is void on every server; the round goes on with the others."""
    async with cluster(2, optimizer=SGD) as made, crew(made, 3, PARAMS) as workers:
        batches = await all_begun(workers)
        for batch in batches:
            batch.push(7, ones(2))
        gradient = ones(4)
        gradient[2] = bad
        await end(batches[0], ones(4))
        await end(batches[1], gradient)
        await end(batches[2], 3 * ones(4))
        assert [await batch.wait() for batch in batches] == ["committed", "discarded", "committed"]
        pulled = await workers[0].pull()
        np.testing.assert_array_equal(pulled["w"], -2 * ones(4))
        np.testing.assert_array_equal(pulled[7], -ones(2))
        with pytest.raises(PushRefused) as raised:
            await work(workers[1])
        for word in ("worker 1", "worker-1", "'w'", "NaN or Inf", "allow_nan"):
            assert word in str(raised.value)
        await still_trains(made, workers)


async def test_a_round_of_nothing_but_refused_pushes_changes_nothing() -> None:
    async with cluster(2, optimizer=SGD) as made, crew(made, 2, PARAMS) as workers:
        batches = await all_begun(workers)
        for batch in batches:
            await end(batch, np.full(4, np.nan, np.float32))
        assert [await batch.wait() for batch in batches] == ["discarded"] * 2
        assert version(made) == 0
        for worker in workers:
            with pytest.raises(PushRefused):
                await worker.pull()
        await still_trains(made, workers)


async def test_a_plain_push_that_is_refused_raises_where_it_is_awaited() -> None:
    async with cluster(1) as made, crew(made, 2) as workers:
        good, bad = workers[0].push("w", ones()), workers[1].push("w", ones() * np.nan)
        assert await good == "committed"
        with pytest.raises(PushRefused, match="'w'"):
            await bad
        np.testing.assert_array_equal(await workers[0].pull("w"), ones())


async def test_not_a_number_where_it_is_allowed() -> None:
    async with (
        cluster(1, optimizer=SGD) as made,
        crew(made, 1, init_options={"allow_nan": True}) as workers,
    ):
        batch = await work(workers[0], np.array([np.nan, np.inf, 1], np.float32))
        assert await batch.wait() == "committed"
        np.testing.assert_array_equal(await workers[0].pull("w"), [np.nan, -np.inf, -1])


async def test_integers_cannot_be_trained_by_gradients() -> None:
    params = {"n": np.arange(3)}
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, params) as workers:
        batch = await work(workers[0], np.arange(3), "n")
        assert await batch.wait() == "discarded"
        with pytest.raises(PushRefused, match=r"'n'.*rule sgd cannot update int64.*assign"):
            await workers[0].pull()


# --- bytes from strangers ------------------------------------------------------------------------


@asynccontextmanager
async def stranger(address: str, *, kind: int = zmq.DEALER) -> AsyncIterator[zmq.Socket[bytes]]:
    """Yield a raw socket that is connected to a port of the cluster."""
    with zmq.Context() as context:
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 500)
        socket.connect(address)
        try:
            yield socket
        finally:
            socket.close()


async def heard(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Return the next message, without blocking the loop that the cluster runs in."""
    await until(lambda: socket.poll(0), what="an answer")
    return socket.recv_multipart()


def nonsense() -> list[list[bytes]]:
    """Frames that are no messages, of many kinds."""
    name = ContributionId(1, 0, 1)
    hello = c.Packet(99, 0, 1, 1, [c.Beat(1.0)])
    push = encode_data(Push(name, 1, 0, "none", 0))
    packet = c.encode_packet(hello)
    return [
        [b""],
        [b"", b""],
        [b"x"],
        [b"\x00" * 100],
        [b"\xc1"],
        [secrets.token_bytes(300)],
        [b"a", b"b", b"c", b"d"],
        [b"x"] * 50,
        [packet[:-1]],
        [packet + b"\x00"],
        [b"\x96" + packet],
        [c.encode_packet(c.Packet(0, 0, 1, 1, [c.Begin()]))],
        [c.encode_packet(c.Packet(77, 0, 1, 1, [c.Begin()]))],
        [c.encode_packet(c.Packet(78, 0, 1, 1, [c.Pull(1, ["w"])]))],
        [c.encode_packet(c.Packet(79, 0, 1, 1, [c.Change(1, "lr", "nan")]))],
        [c.encode_packet(c.Packet(80, 0, 1, 1, [c.Change(1, "colour", "blue")]))],
        [c.encode_packet(c.Packet(81, 0, 1, 1, [c.Finish(name, 1, 1.0)]))],
        [c.encode_packet(c.Packet(82, 0, 1, 1, [c.Held([(name, 1)])]))],
        [c.encode_packet(c.Packet(83, 0, 5, 900, [c.Leave()]))],
        [b"", push],
        [b"", push, b"\x00" * 7],
        [b"", push, b"\x00" * 16, b"more"],
        [b"", encode_data(Greet(12345, 1))],
        [b"", encode_data(Done(name, 1, 1.0, [0, 1, 2], [], 0))],
        [b"", secrets.token_bytes(400)],
        [b"\x00\x00", b"", push, b"\x00" * 7],
        [b"\x00\x63", b"", push, b"\x00" * 7],
        [b"\x00\x00", b"", secrets.token_bytes(99)],
        [b"\x00" * 3, b"", push, b""],
    ]


@pytest.mark.parametrize("route", ["direct", "broker"])
async def test_strange_frames_cost_only_their_sender(
    route: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All ports take any bytes; the sums of those who train are not touched."""
    caplog.set_level("CRITICAL", logger="zkv")
    async with (
        cluster(2, optimizer=SGD, route=route) as made,
        crew(made, 2, PARAMS) as workers,
    ):
        ports = [made.address, made.broker.data_address, *(s.address for s in made.servers)]
        await still_trains(made, workers)
        for port in ports:
            async with stranger(port) as socket:
                for frames in nonsense():
                    socket.send_multipart(frames)
                await still_trains(made, workers)
        assert made.broker.router is not None
        assert made.broker.router.failed is None
        assert version(made) == 1 + len(ports)


async def test_a_frame_above_the_limit_ends_only_its_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("CRITICAL", logger="zkv")
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, PARAMS) as workers:
        async with stranger(made.address) as socket:
            socket.send(b"\x00" * (CONTROL_BYTES_MAX + 1))
            await still_trains(made, workers)
        async with stranger(made.servers[0].address) as socket:
            socket.send_multipart([b"", b"\x00" * (300 * 1024)])
            await still_trains(made, workers)


async def test_bytes_that_are_no_zeromq_at_all() -> None:
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, PARAMS) as workers:
        for address in (made.address, made.broker.data_address, made.servers[0].address):
            port = int(address.rpartition(":")[2])
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + secrets.token_bytes(2000))
            await still_trains(made, workers)
            writer.close()


async def test_another_protocol_version_is_refused_with_both_numbers() -> None:
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, PARAMS) as workers:
        theirs = PROTOCOL_VERSION + 1
        # Whatever a later version puts behind its number, the number itself stays first.
        for packet in ((theirs, 5, 0, 1, 1, []), (theirs, {"another": "form"})):
            async with stranger(made.address) as socket:
                socket.send(encode(packet))
                (answer,) = await heard(socket)
                (refusal,) = c.decode_messages(open_envelope(answer)).messages
                assert isinstance(refusal, c.Refusal)
                assert refusal.code == "VersionMismatch"
                assert f"protocol {theirs}" in refusal.reason
                assert f"speaks {PROTOCOL_VERSION}" in refusal.reason
        await still_trains(made, workers)


@pytest.mark.parametrize("role", ["worker", "server"])
async def test_a_broker_of_another_version_ends_who_has_dialled_it(role: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        address = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        if role == "worker":
            running = asyncio.ensure_future(zkv_connect(address).connect())
        else:
            server = Server(ServerConfig(address, connect_timeout_s=5.0))
            server.start()
            running = asyncio.ensure_future(server.serve())
        route = (await heard(socket))[0]
        socket.send_multipart([route, encode((PROTOCOL_VERSION + 1, 5, 0, 1, 1, []))])
        with pytest.raises(VersionMismatch, match=rf"{PROTOCOL_VERSION + 1}.*{PROTOCOL_VERSION}"):
            await running
        if role == "server":
            server.close()


# --- addresses, names, ranks, budgets ------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("tcp://no-such-host.invalid:5555", ["no-such-host.invalid", "cannot be resolved"]),
        ("10.0.0.2:5555", ["10.0.0.2:5555", "tcp://"]),
        ("tcp://10.0.0.2", ["tcp://10.0.0.2", "port"]),
        ("tcp://10.0.0.2:port", ["tcp://10.0.0.2:port", "port"]),
        ("tcp://::1:5555", ["brackets"]),
        ("ipc:///tmp/broker", ["ipc:///tmp/broker", "tcp://"]),
    ],
)
async def test_an_address_that_leads_nowhere_fails_at_once(address: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        await zkv_connect(address).connect()
    server = Server(ServerConfig(address))
    with pytest.raises(ConfigError) as raised_too:
        server.start()
    for word in words:
        assert word in str(raised.value)
        assert word in str(raised_too.value)


async def test_two_brokers_on_one_address() -> None:
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, PARAMS) as workers:
        second = Broker(replace(BrokerConfig(bsp()), bind=made.address))
        with pytest.raises(ConfigError) as raised:
            second.start()
        assert made.address in str(raised.value)
        assert "in use" in str(raised.value)
        await still_trains(made, workers)


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://192.0.2.1:0"])
async def test_a_port_that_is_open_to_all_has_to_be_asked_for(bind: str) -> None:
    broker = Broker(replace(BrokerConfig(bsp()), bind=bind))
    with pytest.raises(ConfigError, match="--insecure"):
        broker.start()


async def test_an_address_of_no_interface_cannot_be_bound() -> None:
    config = BrokerConfig(bsp(), bind="tcp://192.0.2.1:0", insecure=True)
    with pytest.raises(ConfigError, match="no interface of this machine"):
        Broker(config).start()


async def test_a_name_that_a_live_worker_has() -> None:
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, PARAMS, name="ada") as workers:
        with pytest.raises(NameInUse, match="'ada'"):
            await zkv_connect(made.address, name="ada").connect()
        await still_trains(made, workers)


async def test_a_rank_that_a_live_worker_has() -> None:
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, PARAMS) as workers:
        with pytest.raises(Refused, match=r"rank 0 is taken by worker 0 \('worker-0'"):
            await zkv_connect(made.address, rank=0, name="another").connect()
        await still_trains(made, workers)


async def test_one_server_too_many() -> None:
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, PARAMS) as workers:
        server = Server(ServerConfig(made.address))
        server.start()
        try:
            with pytest.raises(Refused, match="--servers 2"):
                await asyncio.wait_for(server.serve(), 5)
        finally:
            server.close()
        await still_trains(made, workers)


async def test_a_budget_below_what_the_policy_needs_refuses_to_start() -> None:
    """BSP with 3 workers needs room for 3 x 4,000 bytes; both figures are said."""
    options = {"budget_bytes": 8_000}
    async with (
        cluster(1, optimizer=SGD, server_options=options) as made,
        crew(made, 3, {"w": zeros(1000)}) as workers,
    ):
        begun = await asyncio.gather(
            *(worker.batch().__aenter__() for worker in workers), return_exceptions=True
        )
        for error in begun:
            assert isinstance(error, ConfigError)
            assert "8000 bytes" in str(error)
            assert "12000 bytes" in str(error)
            assert "--budget" in str(error)


async def test_a_live_setting_that_does_not_exist() -> None:
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, PARAMS) as workers:
        for setting, value, words in (
            ("colour", "blue", "no live setting 'colour'"),
            ("lr", "fast", "'fast' is not a number"),
            ("lr", -1, "not negative"),
            ("policy", "bspp", "k-batch-asp:K"),
        ):
            with pytest.raises(Refused, match=words):
                await workers[0].set(**{setting: value})
        await still_trains(made, workers)
