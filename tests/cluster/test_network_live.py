"""Addresses, start order, restarts and losses, with the drivers of all roles in one loop."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zmq
from crew import all_begun, crew, end, ones, version, work, zeros
from harness import Cluster, cluster, until
from processes import free_address

from zkv.aio import AsyncWorker, connect
from zkv.errors import BrokerLost, ClusterNotReady, ConfigError, ServerLost, ZkvError
from zkv.policy import bsp
from zkv_brokers.broker import Broker, BrokerConfig
from zkv_brokers.server import Server, ServerConfig
from zkv_net.loop import address_toward, advertised, term_number
from zkv_net.sockets import bind, join_address, new_socket, split_address

SGD = "sgd:lr=1"


def has_ipv6() -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


# --- addresses -----------------------------------------------------------------------------------


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback address ::1")
@pytest.mark.parametrize("route", ["direct", "broker"])
async def test_all_roles_over_ipv6(route: str) -> None:
    """D30: bind and connect; addresses are printed with brackets."""
    async with cluster(
        2,
        optimizer=SGD,
        route=route,
        bind="tcp://[::1]:0",
        server_options={"bind": "tcp://[::1]:0"},
    ) as made:
        for address in (made.address, made.broker.data_address, *(s.address for s in made.servers)):
            assert address.startswith("tcp://[::1]:")
        async with crew(made, 2) as workers:
            batches = await asyncio.gather(*(work(worker) for worker in workers))
            assert await batches[0].wait() == "committed"


def test_ipv4_binds_with_and_without_the_ipv6_option() -> None:
    with zmq.Context() as context:
        for option in (0, 1):
            with new_socket(context, zmq.ROUTER, data=False) as plain:
                plain.setsockopt(zmq.IPV6, option)
                bound = bind(plain, "tcp://127.0.0.1:0", insecure=False)
                assert bound.startswith("tcp://127.0.0.1:")
                assert not bound.endswith(":0")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://10.0.0.2:5555", "10.0.0.2", "5555"),
        ("tcp://[fe80::1]:5555", "fe80::1", "5555"),
        ("tcp://head:*", "head", "*"),
    ],
)
def test_addresses_are_taken_apart_and_put_together(text: str, host: str, port: str) -> None:
    assert split_address(text) == (host, port)
    assert join_address(host, port) == text


@pytest.mark.parametrize(
    "text", ["", "head", "head:1", "tcp://", "tcp://head", "tcp://:1", "tcp://head:70000"]
)
def test_a_text_that_is_no_address_is_repeated_in_the_error(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        split_address(text)
    assert repr(text) in str(raised.value)


def test_the_announced_address_is_the_one_that_leads_to_the_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D31: a wildcard bind is never announced, and what a host name means is never asked."""

    def no_guess(*_: Any) -> str:
        raise AssertionError("an own address must not be guessed from the host's name")

    for name in ("getfqdn", "gethostbyname", "gethostname"):
        monkeypatch.setattr(socket, name, no_guess)
    assert address_toward("tcp://127.0.0.1:9") == "127.0.0.1"
    for wildcard in ("tcp://0.0.0.0:7000", "tcp://*:7000", "tcp://[::]:7000"):
        assert advertised(wildcard, "tcp://127.0.0.1:9", None) == "tcp://127.0.0.1:7000"
    assert advertised("tcp://10.1.2.3:7000", "tcp://10.9.9.9:9", None) == "tcp://10.1.2.3:7000"


def test_loopback_is_never_announced_to_another_machine() -> None:
    for bound in ("tcp://127.0.0.1:7000", "tcp://127.0.1.1:7000", "tcp://[::1]:7000"):
        with pytest.raises(ConfigError) as raised:
            advertised(bound, "tcp://10.9.9.9:5555", None)
        assert "tcp://10.9.9.9:5555" in str(raised.value)
        assert "--advertise" in str(raised.value)
        chosen = advertised(bound, "tcp://10.9.9.9:5555", "10.1.2.3")
        assert chosen == "tcp://10.1.2.3:7000"


def test_a_chosen_address_wins_unless_nobody_could_connect_to_it() -> None:
    wildcard, peer = "tcp://0.0.0.0:7000", "tcp://10.9.9.9:5555"
    assert advertised(wildcard, peer, "10.1.2.3") == "tcp://10.1.2.3:7000"
    assert advertised(wildcard, peer, "2001:db8::1") == "tcp://[2001:db8::1]:7000"
    for useless in ("0.0.0.0", "::", "*", "127.0.0.1", "localhost"):
        with pytest.raises(ConfigError, match=r"advertise|loopback"):
            advertised(wildcard, peer, useless)


async def test_a_wrong_advertised_address_is_in_the_message() -> None:
    """D31: nobody listens where the server says that it is; the worker is told where that was."""
    async with cluster(1, optimizer=SGD, server_options={"advertise": "127.0.0.9"}) as made:
        (server,) = made.servers
        assert server.address.startswith("tcp://127.0.0.9:")
        await until(lambda: made.broker.router.members.complete, what="the server's announcement")
        async with made.worker(0, wait_timeout_s=0.7) as worker:
            with pytest.raises(ZkvError) as raised:
                await worker.init({"w": zeros()})
            assert server.address in str(raised.value)


# --- start order ---------------------------------------------------------------------------------


class Roles:
    """Broker, two servers and a worker that are started one by one on a port that is known."""

    def __init__(self) -> None:
        self.address = free_address()
        self.worker: AsyncWorker = connect(
            self.address,
            rank=0,
            world=1,
            connect_timeout_s=10.0,
            wait_timeout_s=10.0,
            narrate_after_s=0.05,
            narrate_every_s=0.05,
        )
        self.running: list[Any] = []
        self.tasks: list[asyncio.Task[Any]] = []

    async def start(self, role: str) -> None:
        if role == "worker":
            self.tasks.append(asyncio.create_task(self.worker.connect()))
        elif role == "broker":
            broker = Broker(
                BrokerConfig(
                    bsp(),
                    bind=self.address,
                    data_bind="tcp://127.0.0.1:0",
                    servers=2,
                    optimizer=SGD,
                )
            )
            self._serve(broker)
        else:
            for _ in range(2):
                config = ServerConfig(self.address, narrate_after_s=0.05, narrate_every_s=0.05)
                self._serve(Server(config))

    def _serve(self, role: Any) -> None:
        role.start()
        self.running.append(role)
        self.tasks.append(asyncio.create_task(role.serve()))

    async def stop(self) -> None:
        await self.worker.close()
        for role in self.running:
            role.stop()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for role in self.running:
            role.close()


@pytest.mark.parametrize("order", list(itertools.permutations(["worker", "servers", "broker"])))
async def test_any_start_order(order: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    """D32: whoever comes first waits, and says for whom, until the last one is there."""
    roles = Roles()
    nobody = f"waiting for broker: nothing has answered at {roles.address}"
    try:
        for at, role in enumerate(order):
            await roles.start(role)
            here = set(order[: at + 1])
            if "broker" not in here:
                logger = "zkv.worker" if role == "worker" else "zkv.server"
                await until(
                    lambda logger=logger: any(
                        r.name == logger and nobody in r.getMessage() for r in caplog.records
                    ),
                    what=f"that the {role} says for whom it waits",
                )
            elif here == {"broker", "worker"}:
                text = "waiting for servers 1, 2 of 2: nothing has announced itself at"
                await until(lambda text=text: text in caplog.text, what="that word of the servers")
        await until(lambda: roles.worker._member is not None, what="that the worker has joined")
        await roles.worker.init({"w": zeros()})
        batch = await work(roles.worker)
        assert await batch.wait() == "committed"
    finally:
        await roles.stop()


async def test_a_worker_gives_up_when_no_broker_answers() -> None:
    address = free_address()
    with pytest.raises(ClusterNotReady) as raised:
        await connect(address, connect_timeout_s=0.3).connect()
    assert f"nothing has answered at {address}" in str(raised.value)
    assert "0.3 s" in str(raised.value)
    assert isinstance(raised.value, TimeoutError)


async def test_a_worker_gives_up_when_servers_are_missing() -> None:
    broker = Broker(BrokerConfig(bsp(), bind="tcp://127.0.0.1:0", servers=3))
    broker.start()
    serving = asyncio.create_task(broker.serve())
    server = Server(ServerConfig(broker.address))
    server.start()
    task = asyncio.create_task(server.serve())
    try:
        with pytest.raises(ClusterNotReady) as raised:
            await connect(broker.address, connect_timeout_s=1.5).connect()
        assert "waiting for servers 2, 3 of 3" in str(raised.value)
        assert f"zkv server --broker {broker.address}" in str(raised.value)
    finally:
        server.stop()
        broker.stop()
        await asyncio.gather(task, serving)
        server.close()
        broker.close()


async def test_a_server_gives_up_when_no_broker_answers() -> None:
    address = free_address()
    server = Server(ServerConfig(address, connect_timeout_s=0.2))
    server.start()
    try:
        with pytest.raises(ClusterNotReady, match=f"nothing has answered at {address}"):
            await server.serve()
    finally:
        server.close()


# --- restarts and losses -------------------------------------------------------------------------


@asynccontextmanager
async def another_broker(made: Cluster) -> AsyncIterator[Broker]:
    """Stop the broker as if it had crashed and start a new one, without its log, at its address."""
    made.broker.stop()
    await made.tasks[0]
    made.broker.close()
    config = replace(made.broker.config, bind=made.address, data_bind="tcp://127.0.0.1:0")
    broker = Broker(config)
    broker.start()
    serving = asyncio.create_task(broker.serve())
    made.broker = broker
    try:
        yield broker
    finally:
        broker.stop()
        await serving
        broker.close()


async def asks_for_ever(worker: AsyncWorker) -> None:
    """Ask until an answer is an error."""
    while True:
        await worker.status()


def test_terms_rise_from_one_broker_to_the_next() -> None:
    first = term_number()
    assert first > 10**12, "finer than seconds: a broker may be back within one"
    assert term_number() >= first


@pytest.mark.parametrize("when", ["joined", "initialised", "initialising"])
async def test_the_broker_may_restart_before_the_first_grant(when: str) -> None:
    """Servers and workers announce themselves again; what was said before is said again."""
    async with cluster(2, optimizer=SGD) as made:
        workers = [made.worker(rank, world=2, wait_timeout_s=8.0) for rank in range(2)]
        await asyncio.gather(*(worker.connect() for worker in workers))
        params = {"w": zeros(), "large": zeros(300_000)}
        if when == "initialised":
            await asyncio.gather(*(worker.init(params) for worker in workers))
        early = []
        if when == "initialising":
            early = [asyncio.ensure_future(worker.init(params)) for worker in workers]
        async with another_broker(made) as broker:
            if when == "joined":
                await asyncio.gather(*(worker.init(params) for worker in workers))
            await asyncio.gather(*early)
            batches = await asyncio.gather(*(work(worker) for worker in workers))
            assert [await batch.wait() for batch in batches] == ["committed"] * 2
            assert (await workers[1].pull("w")).tolist() == [-1.0] * 3
            assert broker.router is not None
            assert broker.router.failed is None
            await asyncio.gather(*(worker.close() for worker in workers))
            for server in made.servers:
                server.stop()
            await asyncio.gather(*made.tasks[1:])


async def test_a_broker_that_lost_its_log_ends_the_run() -> None:
    """After the first grant nobody may go on as if nothing had happened; all are told where."""
    async with cluster(2, optimizer=SGD) as made, crew(made, 2) as workers:
        batches = await asyncio.gather(*(work(worker) for worker in workers))
        assert await batches[0].wait() == "committed"
        async with another_broker(made):
            for worker in workers:
                with pytest.raises(BrokerLost, match=made.address):
                    await asks_for_ever(worker)
            for task in made.tasks[1:]:
                with pytest.raises(BrokerLost):
                    await task


async def test_a_broker_that_stays_away_is_named() -> None:
    async with cluster(1, optimizer=SGD) as made, crew(made, 1, broker_lost_s=0.6) as workers:
        made.broker.stop()
        await made.tasks[0]
        made.broker.close()
        with pytest.raises(BrokerLost) as raised:
            await workers[0].status()
        assert made.address in str(raised.value)
        with pytest.raises(BrokerLost):
            await workers[0].pull()


@pytest.mark.parametrize("route", ["direct", "broker"])
async def test_a_server_that_stops_is_named_to_everybody(route: str) -> None:
    async with cluster(2, optimizer=SGD, route=route) as made, crew(made, 3) as workers:
        batches = await all_begun(workers)
        await end(batches[0], ones())
        waiting = asyncio.ensure_future(work(workers[0]))
        made.servers[1].stop()
        with pytest.raises(ServerLost) as raised:
            await waiting
        assert made.servers[1].address in str(raised.value)
        assert "server" in str(raised.value)
        with pytest.raises(ServerLost):
            await batches[0].wait()
        for worker in workers:
            with pytest.raises(ServerLost, match=made.servers[1].address):
                await worker.pull()


async def test_a_server_that_is_silent_is_named_too() -> None:
    """It says nothing any more, as after a kill: the broker misses its beats."""
    async with (
        cluster(2, optimizer=SGD, server_lost_s=0.8) as made,
        crew(made, 1) as workers,
    ):
        made.servers[1].close()
        with pytest.raises(ServerLost) as raised:
            await asks_for_ever(workers[0])
        assert made.servers[1].address in str(raised.value)


async def test_a_worker_that_is_silent_is_let_go_and_the_others_go_on() -> None:
    async with cluster(2, optimizer=SGD, worker_lost_s=0.8) as made, crew(made, 2) as workers:
        batches = await all_begun(workers)
        await end(batches[0], ones())
        # As after a kill: no goodbye, only silence.
        workers[1]._driver.close()
        workers[1]._made = None
        assert await batches[0].wait() == "committed"
        assert version(made) == 1
        batch = await work(workers[0])
        assert await batch.wait() == "committed"
        np.testing.assert_array_equal(await workers[0].pull("w"), -2 * ones())
