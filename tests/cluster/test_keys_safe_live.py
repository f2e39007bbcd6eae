"""Keys on all sockets of a live cluster: who gets in, who does not, and what each side is told."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from harness import cluster, until
from keyrings import Keys, safe

from zkv import control as c
from zkv.data_messages import Fetch, Greet, Push, encode_data
from zkv.errors import ClusterNotReady, ConfigError, NotAuthorised
from zkv.link import Link
from zkv.wire import ContributionId
from zkv_brokers.server import Server, ServerConfig
from zkv_cli.ask import ask, ask_change, ask_status
from zkv_net.curve import Curve
from zkv_net.keys import KeyFolder
from zkv_net.safety import choose
from zkv_net.sockets import new_socket

SPARE = 8 * np.ones(4, np.float32)


async def batches(worker: Any, count: int = 3) -> float:
    """Do batches of ones; return what the model's elements have become."""
    await worker.init({"w": np.zeros(4, np.float32)}, rule="sgd:lr=1")
    for _ in range(count):
        async with worker.batch() as batch:
            batch.push("w", np.ones(4, np.float32))
    await batch.wait()
    return float((await worker.pull("w"))[0])


@pytest.mark.one_loop
@pytest.mark.parametrize("route", ["direct", "broker"])
@pytest.mark.parametrize("topology", ["servers", "ring"])
async def test_workers_with_keys_train(tmp_path, route, topology):
    keys = Keys(tmp_path)
    for name in ("node2", "node3"):
        keys.make(name, "worker")
    async with safe(keys, 2, route=route, workers=2, topology=topology) as made:

        async def one(rank: int, name: str) -> float:
            async with made.worker(rank, world=2, keys=keys.folder(name)) as worker:
                return await batches(worker)

        assert await asyncio.gather(one(0, "node2"), one(1, "node3")) == [-3.0, -3.0]
        told = ask_in_thread(made.address, keys.folder("node2"))
        assert (await told)["topology"]["updates"] == (
            3 if (topology, route) == ("ring", "direct") else 0
        )


async def ask_in_thread(address: str, folder: str) -> Any:
    return await asyncio.to_thread(ask, address, c.Status(1), 5.0, keys=folder)


@pytest.mark.one_loop
async def test_a_machine_with_the_brokers_own_keys_may_be_everything(tmp_path):
    keys = Keys(tmp_path)
    own = {"keys": keys.folder("head")}
    async with (
        cluster(1, server_options=own, **own) as made,
        made.worker(0, **own) as worker,
    ):
        assert await batches(worker) == -3.0


@pytest.mark.one_loop
async def test_a_key_that_is_added_later_gets_in_without_a_restart(tmp_path, caplog):
    keys = Keys(tmp_path)
    own = keys.make("late", "worker", add=False)
    async with safe(keys) as made:
        worker = made.worker(0, keys=keys.folder("late"))
        joining = asyncio.create_task(worker.connect())
        await until(lambda: "does not let this process's key in" in caplog.text)
        assert f"zkv keys add worker late {own.public}" in caplog.text
        await until(lambda: "refused a connection from 127.0.0.1" in caplog.text)
        assert f"zkv keys add ROLE NAME {own.public}" in caplog.text
        assert not joining.done()
        keys.let_in(own, "worker")
        assert (await joining) is worker
        assert await batches(worker) == -3.0
        await worker.__aexit__(None, None, None)


@pytest.mark.one_loop
async def test_a_key_that_never_gets_in_is_named_with_its_remedy(tmp_path):
    keys = Keys(tmp_path)
    own = keys.make("stranger", "worker", add=False)
    async with safe(keys) as made:
        with pytest.raises(ClusterNotReady) as raised:
            await made.worker(0, keys=keys.folder("stranger"), connect_timeout_s=0.6).connect()
        assert f"zkv keys add worker stranger {own.public}" in str(raised.value)
        with pytest.raises(NotAuthorised, match="zkv keys add worker stranger"):
            await ask_in_thread(made.address, keys.folder("stranger"))


async def test_a_revoked_key_is_cut_off_and_the_others_go_on(tmp_path, caplog):
    keys = Keys(tmp_path)
    for name in ("node2", "node3"):
        keys.make(name, "worker")
    async with (
        safe(keys, policy_text="bsp") as made,
        made.worker(0, world=2, keys=keys.folder("node2")) as stays,
        made.worker(1, world=2, keys=keys.folder("node3")) as goes,
    ):
        assert await asyncio.gather(batches(stays), batches(goes)) == [-3.0, -3.0]
        links = [safety for safety in safeties(made) if len(safety._live) > 1]
        assert len(links) == 2
        keys.head.revoke("node3")
        with pytest.raises(NotAuthorised, match="its key was revoked"):
            await batches(goes, 1000)
        assert await batches(stays, 2) == -5.0
        public = KeyFolder(tmp_path / "node3").own().public
        # Its links are cut, and it is not let in again.
        await until(lambda: not any(live_of(safety, public) for safety in safeties(made)))
        await until(lambda: "refused a connection" in caplog.text)
        with pytest.raises(ClusterNotReady, match="not added yet, or revoked"):
            await made.worker(1, keys=keys.folder("node3"), connect_timeout_s=0.5).connect()


def safeties(made: Any) -> list[Curve]:
    return [made.broker._safety, *(server._safety for server in made.servers)]


def live_of(safety: Curve, key: str) -> list[Any]:
    return [one for one in safety._live.values() if one.key == key]


@pytest.mark.one_loop
async def test_a_revoked_server_ends_the_run_with_its_name(tmp_path):
    keys = Keys(tmp_path)
    keys.make("node2", "worker")
    async with safe(keys) as made, made.worker(0, keys=keys.folder("node2")) as worker:
        await batches(worker)
        keys.head.revoke("node1")
        with pytest.raises(Exception, match="its key was revoked") as raised:
            await batches(worker, 1000)
        assert type(raised.value).__name__ == "ServerLost"


@asynccontextmanager
async def one_more_server(address: str, folder: str) -> Any:
    server = Server(ServerConfig(address, keys=folder, joins=True))
    server.start()
    try:
        yield server
    finally:
        server.stop()
        server.close()


@pytest.mark.one_loop
@pytest.mark.parametrize("roles", ["worker", "follower", "admin", "worker,follower,admin"])
async def test_only_a_servers_key_can_be_a_server(tmp_path, roles):
    keys = Keys(tmp_path)
    keys.make("other", roles)
    async with safe(keys) as made, one_more_server(made.address, keys.folder("other")) as server:
        with pytest.raises(NotAuthorised, match=r"may not be a server.*zkv keys add .*server"):
            await server.serve()


@pytest.mark.one_loop
@pytest.mark.parametrize("roles", ["server", "follower", "admin"])
async def test_only_a_workers_key_can_be_a_worker(tmp_path, roles):
    keys = Keys(tmp_path)
    keys.make("other", roles)
    async with safe(keys) as made:
        with pytest.raises(NotAuthorised, match=r"may not be a worker.*zkv keys add .*worker"):
            await made.worker(0, keys=keys.folder("other")).connect()


@pytest.mark.one_loop
async def test_a_follower_reads_and_does_nothing_else(tmp_path):
    keys = Keys(tmp_path)
    keys.make("node2", "worker")
    keys.make("eye", "follower")
    folder = keys.folder("eye")
    async with (
        safe(keys) as made,
        made.worker(0, keys=keys.folder("node2")) as worker,
        made.worker(observer=True, keys=folder) as follower,
    ):
        await batches(worker)
        assert (await follower.pull("w")).tolist() == [-3.0] * 4
        for act in (
            lambda: follower.set(lr=0.5),
            lambda: follower.init({"more": np.zeros(2, np.float32)}),
        ):
            with pytest.raises(NotAuthorised, match=r"eye.*may not"):
                await act()


@pytest.mark.one_loop
async def test_settings_are_changed_and_blocks_moved_by_admins(tmp_path):
    keys = Keys(tmp_path)
    for name in ("worker", "follower", "admin"):
        keys.make(name, name)
    async with safe(keys) as made:
        drain = c.Rearrange(1, "rebalance", dry=True)
        for name in ("worker", "follower", "node1"):
            for asked, word in ((c.Change(1, "lr", "0.5"), "change 'lr'"), (drain, "move blocks")):
                with pytest.raises(NotAuthorised, match=f"may not {word}"):
                    await asyncio.to_thread(ask, made.address, asked, 5.0, keys=keys.folder(name))
        change = c.Change(1, "lr", "0.5")
        folder = keys.folder("admin")
        assert await asyncio.to_thread(ask, made.address, change, 5.0, keys=folder)


@pytest.mark.one_loop
async def test_a_name_belongs_to_its_key(tmp_path):
    keys = Keys(tmp_path)
    for name in ("node2", "node3"):
        keys.make(name, "worker")
    async with (
        safe(keys) as made,
        made.worker(0, name="mine", keys=keys.folder("node2")) as mine,
    ):
        await batches(mine)
        for name in ("mine", "node2", "node1"):
            other = made.worker(1, name=name, keys=keys.folder("node3"))
            with pytest.raises(NotAuthorised, match=f"the name '{name}' belongs to the key"):
                await other.connect()
        # Whoever was impersonated has noticed nothing.
        assert await batches(mine, 2) == -5.0
        async with made.worker(1, name="node3", keys=keys.folder("node3")) as own:
            assert own.rank == 1


@pytest.mark.one_loop
async def test_who_expects_another_broker_is_told_how_to_compare(tmp_path, caplog):
    keys = Keys(tmp_path)
    keys.make("node2", "worker")
    KeyFolder(tmp_path / "node2").trust("ab" * 32)
    async with safe(keys) as made:
        worker = made.worker(0, keys=keys.folder("node2"), connect_timeout_s=1.0)
        with pytest.raises(ClusterNotReady, match=r"another key than abababab.*--broker-key"):
            await worker.connect()
        assert "a handshake has failed, probably of a process on 127.0.0.1" in caplog.text


@pytest.mark.one_loop
async def test_without_keys_nobody_gets_in_where_they_are_asked_for(tmp_path, caplog):
    keys = Keys(tmp_path)
    async with safe(keys) as made:
        worker = made.worker(0, connect_timeout_s=0.6)
        with pytest.raises(ClusterNotReady, match="asks for keys, and this process has none"):
            await worker.connect()
        assert "it uses no keys, or" in caplog.text
        with pytest.raises(ClusterNotReady, match="asks for keys"):
            await asyncio.to_thread(ask_status, made.address, 5.0)


@pytest.mark.one_loop
async def test_a_command_finds_the_default_keys_where_a_broker_on_loopback_asks(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    # What the command sets goes with the test.
    monkeypatch.setenv("ZKV_KEYS", "")
    keys = Keys(tmp_path)
    keys.head.path.parent.joinpath("zkv").mkdir()
    keys.head.path.rename(tmp_path / "zkv" / "keys")
    keys.head.path = tmp_path / "zkv" / "keys"
    own = {"keys": str(keys.head.path)}
    async with cluster(1, server_options=own, **own) as made:
        assert await asyncio.to_thread(ask_change, made.address, "lr", "0.5", 5.0) >= 0


@pytest.mark.one_loop
async def test_with_keys_nobody_talks_to_a_broker_without(tmp_path):
    keys = Keys(tmp_path)
    keys.make("node2", "worker")
    async with cluster(1) as made:
        worker = made.worker(0, keys=keys.folder("node2"), connect_timeout_s=0.6)
        with pytest.raises(
            ClusterNotReady, match=r"answers without encryption.*started with --insecure"
        ):
            await worker.connect()


@pytest.mark.one_loop
async def test_nobody_new_gets_in_while_the_gate_is_closed(tmp_path, caplog):
    keys = Keys(tmp_path)
    keys.make("node2", "worker")
    async with safe(keys) as made, made.worker(0, keys=keys.folder("node2")) as worker:
        await batches(worker)
        made.broker._safety._gate.close()
        with pytest.raises(ClusterNotReady):
            await made.worker(1, keys=keys.folder("node2"), connect_timeout_s=1.0).connect()
        # The handshake is refused already; what came through it would be dropped, too.
        assert "dropped what came" not in caplog.text
        # Who was in stays in.
        assert await batches(worker, 1) == -4.0


# --- one who is let in, and lies -----------------------------------------------------------------


@asynccontextmanager
async def socket_of(folder: str, address: str, key: str) -> Any:
    """A raw socket with a machine's keys."""
    context: zmq.Context[Any] = zmq.Context()
    own = KeyFolder(Path(folder)).own()
    socket = new_socket(context, zmq.DEALER, data=True)
    curve = Curve(context, own, key)
    curve.dial(socket, address)
    socket.connect(address)
    try:
        yield socket
    finally:
        context.destroy(linger=0)


@pytest.mark.one_loop
@pytest.mark.parametrize("way", ["direct", "broker", "broker, with a longer route"])
async def test_a_workers_key_cannot_push_for_another_worker(tmp_path, caplog, way):
    keys = Keys(tmp_path)
    for name in ("node2", "node3"):
        keys.make(name, "worker")
    node1 = KeyFolder(tmp_path / "node1")
    async with safe(keys) as made, made.worker(0, keys=keys.folder("node2")) as worker:
        assert await batches(worker) == -3.0
        victim = worker._driver.session.member.incarnation
        server = made.servers[0]
        route_before = dict(server._senders.routes)
        digest = server.shard.store.blocks[0].current.values.copy()
        address, key = server.address, node1.own().public
        first: list[bytes] = []
        if way != "direct":
            address, key = made.broker.data_address, keys.broker.public
            first = [(0).to_bytes(2, "big")]
            if "longer" in way:
                # As if the broker had put somebody else's key there.
                first.append(bytes.fromhex(KeyFolder(tmp_path / "node2").own().public) + b"12345")
        name = ContributionId(victim, 0, 7)
        async with socket_of(keys.folder("node3"), address, key) as socket:
            greet, push = Greet(victim, 1), Push(name, 99, 0, "none", 0)
            socket.send_multipart([*first, b"", encode_data(greet)])
            socket.send_multipart([*first, b"", encode_data(push), SPARE.tobytes()])
            expected = "route is longer" if "longer" in way else "is not of the key"
            await until(lambda: expected in caplog.text)
            assert server._senders.routes == route_before
            assert np.array_equal(server.shard.store.blocks[0].current.values, digest)
        assert await batches(worker, 2) == -5.0


@pytest.mark.one_loop
async def test_a_packet_in_another_peers_name_is_dropped(tmp_path, caplog):
    keys = Keys(tmp_path)
    for name in ("node2", "node3"):
        keys.make(name, "worker")
    async with safe(keys) as made, made.worker(0, keys=keys.folder("node2")) as worker:
        await batches(worker)
        link: Link = worker._driver.session._link
        packet = c.Packet(link.instance, link.peer, link._first_unacked, 1, [c.Leave()])
        async with socket_of(keys.folder("node3"), made.address, keys.broker.public) as socket:
            socket.send(c.encode_packet(packet))
            await until(lambda: "dropped a packet of another peer's" in caplog.text)
        assert await batches(worker, 2) == -5.0


def strikes(server: Server) -> int:
    assert server._data is not None
    return sum(len(link.strikes) for link in server._data._links.values())


@pytest.mark.one_loop
async def test_a_servers_key_cannot_ask_for_another_role_at_a_data_port(tmp_path, caplog):
    keys = Keys(tmp_path)
    keys.make("node2", "worker")
    keys.make("admin", "admin")
    keys.make("eye", "follower")
    async with safe(keys) as made, made.worker(0, keys=keys.folder("node2")) as worker:
        await batches(worker)
        server, node1 = made.servers[0], KeyFolder(tmp_path / "node1").own().public
        for count, name in enumerate(("node2", "admin", "eye"), start=1):
            async with socket_of(keys.folder(name), server.address, node1) as socket:
                socket.send_multipart([b"", encode_data(Fetch(0, 0, 0, 0, []))])
                await until(lambda n=count: strikes(server) == n)
        assert "asks as a server, and is for none" in caplog.text
        assert not server._couriers._askers


@pytest.mark.one_loop
async def test_a_worker_believes_no_other_key_than_its_companions(tmp_path, caplog):
    keys = Keys(tmp_path)
    for name in ("node2", "node3", "liar"):
        keys.make(name, "worker")
    async with (
        safe(keys, topology="ring", workers=2) as made,
        made.worker(0, world=2, keys=keys.folder("node2")) as first,
        made.worker(1, world=2, keys=keys.folder("node3")) as second,
    ):
        assert await asyncio.gather(batches(first), batches(second)) == [-3.0, -3.0]
        peers = first._driver.others
        incarnation = second._driver.session.member.incarnation
        before = dict(peers._routes)
        assert incarnation in before
        node2 = KeyFolder(tmp_path / "node2").own().public
        for name, words in (("liar", "is not of the key"), ("node1", "is for server")):
            caplog.clear()
            async with socket_of(keys.folder(name), peers._address, node2) as socket:
                socket.send_multipart([b"", encode_data(Greet(incarnation, 1))])
                await until(lambda w=words: w in caplog.text)
        # The real one greets again from time to time, over its own connection.
        assert peers._routes == before
        assert await asyncio.gather(batches(first, 2), batches(second, 2)) == [-5.0, -5.0]


# --- starting ------------------------------------------------------------------------------------


def test_a_broker_needs_a_brokers_keys(tmp_path):
    keys = Keys(tmp_path)
    keys.make("node2", "worker")

    async def start() -> None:
        async with cluster(1, keys=keys.folder("node2")):
            pass

    with pytest.raises(ConfigError, match="made for worker, not for a broker"):
        asyncio.run(start())


@pytest.mark.one_loop
async def test_what_is_open_is_told_every_minute(monkeypatch, caplog):
    clock = [0.0]
    monkeypatch.setattr("zkv_net.safety.monotonic", lambda: clock[0])
    with caplog.at_level(logging.WARNING):
        safety = choose(zmq.Context.instance(), binds=["tcp://0.0.0.0:1"], insecure=True)
        for clock[0] in (59.0, 60.0, 61.0, 119.0, 120.0, 121.0):
            safety.tick()
    assert caplog.text.count("--insecure: whoever reaches tcp://0.0.0.0:1") == 2
    caplog.clear()
    loopback = choose(zmq.Context.instance(), binds=["tcp://127.0.0.1:1"], insecure=True)
    clock[0] = 1e6
    loopback.tick()
    assert not caplog.text
