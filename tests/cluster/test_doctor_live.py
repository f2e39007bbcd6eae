"""`zkv doctor` against clusters that are well, and against set-ups that are broken: each is named.

Those that need other machines are in test_namespaces.py, those that need processes below.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import peers_that_fail as peers
import pytest
import zmq
from harness import cluster, until
from keyrings import Keys, safe
from processes import free_address, launched

from zkv.policy import policy
from zkv_brokers.broker import Broker, BrokerConfig
from zkv_cli import doctor, doctor_handshake, doctor_probes, doctor_server

pytestmark = pytest.mark.one_loop

ZKV = [sys.executable, "-m", "zkv_cli"]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here takes long if it comes at all."""
    monkeypatch.setattr(doctor, "ANSWER_S", 0.5)
    monkeypatch.setattr(doctor, "BELOW_S", 0.5)
    monkeypatch.setattr(doctor_server, "ANSWER_S", 0.3)
    monkeypatch.setattr(doctor_probes, "GREETING_S", 0.4)


class Told:
    """What a doctor has said, check by check."""

    def __init__(self, text: str) -> None:
        self.plain = json.loads(text)
        self.checks: dict[str, dict[str, Any]] = {c["name"]: c for c in self.plain["checks"]}

    @property
    def failed(self) -> list[str]:
        return [name for name, c in self.checks.items() if c["outcome"] == "fail"]

    def found(self, name: str) -> str:
        return str(self.checks[name]["found"])


@pytest.fixture
def examined(capsys: pytest.CaptureFixture[str]) -> Any:
    def examine(address: str) -> Told:
        healthy = doctor.run(address, as_json=True)
        told = Told(capsys.readouterr().out)
        assert told.plain["healthy"] is healthy is (not told.failed)
        assert told.plain["broker"] == address
        return told

    return examine


# --- broken set-ups ----------------------------------------------------------------------------


def test_a_name_that_nobody_knows(examined, monkeypatch):
    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    told = examined("tcp://head.example:5555")
    assert told.failed == ["name resolution"]
    assert "head.example cannot be resolved" in told.found("name resolution")
    assert told.found("zkv protocol") == "needs name resolution, which failed"


def test_name_servers_that_do_not_answer_are_not_waited_for(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ended.wait() and [])
    monkeypatch.setattr(doctor_probes, "NAME_S", 0.05)
    found = doctor_probes.resolve("head.example")
    ended.set()
    assert (found.dialled, found.timed_out_s) == ((), 0.05)


def test_a_closed_port(examined):
    with peers.closed() as address:
        told = examined(address)
    assert told.failed == ["TCP connection"]
    assert "refuses connections" in told.found("TCP connection")
    assert told.found("ZMTP handshake") == "needs TCP connection, which failed"


def test_a_web_server(examined):
    with peers.web() as address:
        told = examined(address)
    assert told.failed == ["ZMTP handshake"]
    assert "a web server (HTTP)" in told.found("ZMTP handshake")


def test_a_port_that_accepts_and_says_nothing(examined):
    with peers.silent() as address:
        told = examined(address)
    assert told.failed == ["ZMTP handshake"]
    assert "says nothing" in told.found("ZMTP handshake")


def test_a_port_that_hangs_up(examined):
    with peers.hanging_up() as address:
        told = examined(address)
    assert told.failed == ["ZMTP handshake"]
    assert "closes it at once" in told.found("ZMTP handshake")


def test_a_broker_that_asks_for_keys_where_there_are_none(examined):
    def with_keys(made: zmq.Socket[bytes]) -> None:
        made.setsockopt(zmq.CURVE_SERVER, 1)
        made.setsockopt(zmq.CURVE_SECRETKEY, zmq.curve_keypair()[1])

    with peers.zeromq(lambda frame: None, with_keys) as address:
        told = examined(address)
    assert told.failed == ["CURVE"]
    assert "lets in nobody without a key" in told.found("CURVE")


def test_another_protocol(examined):
    with peers.zeromq(peers.of_protocol(2)) as address:
        told = examined(address)
    assert told.failed == ["zkv protocol"]
    assert "the peer speaks protocol 2, this process speaks 1" in told.found("zkv protocol")
    assert told.found("versions") == "needs zkv protocol, which failed"


def test_another_program_that_uses_zeromq(examined):
    with peers.zeromq(lambda frame: b"hello") as address:
        told = examined(address)
    assert told.failed == ["zkv protocol"]
    assert "none of zkv's" in told.found("zkv protocol")
    with peers.zeromq(lambda frame: None) as address:
        told = examined(address)
    assert "no broker answers there" in told.found("zkv protocol")


# --- clusters ----------------------------------------------------------------------------------


async def ready(made: Any) -> None:
    await until(lambda: all(one.node.welcome for one in made.servers), what="all servers")


async def test_a_cluster_that_is_well_has_no_failed_check(examined):
    async with cluster(servers=2) as made:
        await ready(made)
        told = await asyncio.to_thread(examined, made.address)
    assert told.failed == []
    assert "2 of 2 servers" in told.found("cluster")
    assert "can be reached" in told.found("route broker")
    rates = told.checks["throughput"]["figures"]["bytes_per_s"]
    assert rates.keys() == {"server 0", "server 1"}
    assert min(rates.values()) > 0
    assert abs(told.checks["clock"]["figures"]["offset_s"]) < 60
    assert (
        told.checks["versions"]["figures"]["here"] == told.checks["versions"]["figures"]["broker"]
    )


async def test_memory_of_one_machine_is_tried(examined):
    async with cluster(servers=1) as made:
        await ready(made)
        told = await asyncio.to_thread(examined, made.address)
    assert told.checks["shared memory"]["outcome"] == "ok"
    async with cluster(servers=1, server_options={"shared_bytes": 0}) as made:
        await ready(made)
        told = await asyncio.to_thread(examined, made.address)
    assert told.found("shared memory") == "server 0 offers no memory"


async def test_a_run_goes_on_as_if_no_doctor_had_been_there(examined):
    import numpy as np

    async with cluster(servers=2, optimizer="sgd:lr=1") as made, made.worker(0) as worker:
        await worker.init({"w": np.zeros(4, np.float32)})
        for _ in range(3):
            async with worker.batch() as batch:
                batch.push("w", -np.ones(4, np.float32))
                told = await asyncio.to_thread(examined, made.address)
                assert told.failed == []
            assert await batch.wait() == "committed"
        np.testing.assert_array_equal(await worker.pull("w"), np.full(4, 3, np.float32))
        members = made.broker.router.members
        assert len(members.workers) == 1
        assert members.epoch == 1
        for server in made.servers:
            assert server.shard.grants._reachable == set(members.workers)


async def test_a_broker_with_missing_servers(examined):
    broker = Broker(BrokerConfig(policy("bsp"), bind="tcp://127.0.0.1:0", servers=2))
    broker.start()
    serving = asyncio.create_task(broker.serve())
    try:
        told = await asyncio.to_thread(examined, broker.address)
    finally:
        broker.stop()
        await serving
        broker.close()
    assert told.failed == ["cluster"]
    assert "0 of 2 servers" in told.found("cluster")
    assert "zkv server --broker" in told.checks["cluster"]["todo"]


async def test_an_advertised_address_that_nobody_listens_at(examined):
    # Any address of 127/8 is this machine, and the server listens at one of them.
    async with cluster(servers=1, server_options={"advertise": "127.0.0.9"}) as made:
        await ready(made)
        told = await asyncio.to_thread(examined, made.address)
    assert told.failed == ["server 0"]
    assert "tcp://127.0.0.9:" in told.found("server 0")
    assert "refuses connections" in told.found("server 0")
    assert told.found("throughput") == "no server can be reached from here"


async def test_two_servers_that_are_swapped(examined):
    async with cluster(servers=2) as made:
        await ready(made)
        members = made.broker.router.members
        one, other = members.servers[0], members.servers[1]
        swapped = one.hello.address, other.hello.address
        one.hello = _moved(one.hello, swapped[1])
        other.hello = _moved(other.hello, swapped[0])
        told = await asyncio.to_thread(examined, made.address)
    assert told.failed == ["server 0", "server 1"]
    assert "is server 1 for who asks from here" in told.found("server 0")


def _moved(hello: Any, address: str) -> Any:
    import msgspec

    return msgspec.structs.replace(hello, address=address)


async def test_a_clock_that_is_wrong(examined):
    async with cluster(servers=1) as made:
        await ready(made)
        said = made.broker._about
        made.broker._about = lambda: {**said(), "time_s": said()["time_s"] + 3600}
        told = await asyncio.to_thread(examined, made.address)
    assert told.failed == []
    assert told.checks["clock"]["outcome"] == "warn"
    assert "s ahead of this one" in told.found("clock")


async def test_an_older_broker_that_does_not_tell_of_itself(examined):
    async with cluster(servers=1) as made:
        await ready(made)
        made.broker._about = dict
        told = await asyncio.to_thread(examined, made.address)
    assert told.failed == []
    assert told.checks["versions"]["outcome"] == "warn"
    assert told.checks["clock"]["outcome"] == told.checks["route broker"]["outcome"] == "skipped"


async def test_the_address_of_a_server_or_of_the_data_port_in_place_of_the_brokers(examined):
    address = free_address()
    async with cluster(servers=1, bind=address) as made:
        await ready(made)
        told = await asyncio.to_thread(examined, made.servers[0].address)
        assert told.failed == ["zkv protocol"]
        assert "is the data port of server 0" in told.found("zkv protocol")
        told = await asyncio.to_thread(examined, made.broker.data_address)
        assert told.failed == ["zkv protocol"]
        assert told.checks["zkv protocol"]["todo"] == f"Give {made.address}."


async def test_a_handshake_that_succeeds_is_told(monkeypatch):
    monkeypatch.setattr(doctor_handshake, "HANDSHAKE_S", 5.0)
    async with cluster(servers=1) as made:
        done = await asyncio.to_thread(doctor_handshake.shake_hands, made.address, "NULL")
    assert done.outcome == "succeeded"


def test_a_server_that_is_gone_when_the_doctor_measures_is_no_rate():
    with peers.zeromq(lambda frame: None) as address:
        line = doctor_server.ServerLine(address)
        assert line.identify()[0] is None
        assert line.rate(0) == 0.0
        line.close()


def test_a_stranger_is_no_workers_incarnation():
    from zkv.wire import INT_MAX
    from zkv_brokers.members import INCARNATIONS_PER_TERM
    from zkv_net.loop import term_number

    later = (term_number() + 50 * 365 * 86_400_000) * INCARNATIONS_PER_TERM
    assert all(later < doctor_server.stranger() <= INT_MAX for _ in range(100))


# --- keys --------------------------------------------------------------------------------------


async def test_a_key_that_is_let_in_reaches_the_broker_and_every_server(
    examined, tmp_path, monkeypatch
):
    keys = Keys(tmp_path)
    keys.make("node2", "worker")
    monkeypatch.setenv("ZKV_KEYS", keys.folder("node2"))
    async with safe(keys, 2) as made:
        await ready(made)
        told = await asyncio.to_thread(examined, made.address)
    assert told.failed == []
    assert told.found("CURVE") == "encrypted, and this process's key is let in"
    assert min(told.checks["throughput"]["figures"]["bytes_per_s"].values()) > 0
    assert told.checks["shared memory"]["outcome"] == "ok"


async def test_no_key_a_strange_one_and_another_brokers(examined, tmp_path, monkeypatch):
    keys = Keys(tmp_path / "these")
    stranger = keys.make("stranger", "worker", add=False)
    others = Keys(tmp_path / "others")
    others.make("node2", "worker")
    # Nothing that is this user's own.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "empty"))
    async with safe(keys) as made:
        told = await asyncio.to_thread(examined, made.address)
        assert told.failed == ["CURVE"]
        assert "lets in nobody without a key" in told.found("CURVE")
        assert "ZKV_KEYS" in told.checks["CURVE"]["means"]

        monkeypatch.setenv("ZKV_KEYS", keys.folder("stranger"))
        told = await asyncio.to_thread(examined, made.address)
        assert told.failed == ["CURVE"]
        assert "does not let this process's key in" in told.found("CURVE")
        assert f"zkv keys add worker stranger {stranger.public}" in told.checks["CURVE"]["means"]
        assert told.found("zkv protocol") == "needs CURVE, which failed"

        monkeypatch.setenv("ZKV_KEYS", others.folder("node2"))
        told = await asyncio.to_thread(examined, made.address)
        assert told.failed == ["CURVE"]
        assert "has another key than" in told.checks["CURVE"]["means"]


async def test_a_broker_without_keys_where_keys_are_in_use(examined, tmp_path, monkeypatch):
    keys = Keys(tmp_path)
    keys.make("node2", "worker")
    monkeypatch.setenv("ZKV_KEYS", keys.folder("node2"))
    with peers.zeromq(lambda frame: None) as address:
        told = await asyncio.to_thread(examined, address)
    assert told.failed == ["CURVE"]
    assert "has no keys, and this process insists" in told.found("CURVE")
    os.chmod(tmp_path / "node2" / "secret.key", 0o644)
    with peers.zeromq(lambda frame: None) as address:
        told = await asyncio.to_thread(examined, address)
    assert "no keys can be used here" in told.found("CURVE")
    assert "chmod 600" in told.checks["CURVE"]["means"]


async def test_keys_of_the_default_folder_are_found(examined, tmp_path, monkeypatch):
    keys = Keys(tmp_path / "zkv")
    # The folder's name is that of its machine here, and "keys" where nobody names one.
    keys.make("keys", "worker")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    # Set and taken away again, so that what the doctor sets does not outlive this test.
    monkeypatch.setenv("ZKV_KEYS", "")
    async with safe(keys) as made:
        await ready(made)
        told = await asyncio.to_thread(examined, made.address)
    assert told.failed == []
    assert told.found("CURVE").startswith("encrypted")


async def test_who_only_measures_may_do_nothing_else_under_keys(tmp_path):
    from zkv.data_messages import Greet, Probe, Push
    from zkv.wire import STRANGERS, ContributionId

    keys = Keys(tmp_path)
    async with safe(keys) as made:
        (server,) = made.servers
        stranger, push = STRANGERS + 1, ContributionId(STRANGERS + 1, 0, 0)
        may = [
            server._senders.may(message, [zmq.Frame(b"route")], zmq.Frame(b"last"))
            for message in (Greet(stranger, 0), Probe(stranger, 1), Push(push, 1, 0, "none", 0))
        ]
    assert may == [True, True, False]


# --- processes ---------------------------------------------------------------------------------


def command(*arguments: str, shell: str = "") -> subprocess.CompletedProcess[str]:
    line = [*ZKV, "doctor", *arguments]
    if shell:
        line = ["sh", "-c", f"{shell} && exec {shlex.join(line)}"]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=30)


@pytest.mark.cluster
def test_the_command_says_in_text_what_is_wrong_and_ends_with_1():
    with peers.closed() as address:
        done = command("--broker", address)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith(f"zkv doctor: {address}, asked from ")
    assert "FAIL    TCP connection" in done.stdout
    assert "        -> Start the broker" in done.stdout
    assert done.stdout.rstrip().endswith("1 failed (TCP connection)")
    assert done.stderr == ""


@pytest.mark.cluster
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's signals and limits")
def test_processes_that_are_well_stopped_and_short_of_descriptors():
    with launched("up", "--servers", "1", "--bind", "tcp://127.0.0.1:0") as roles:
        address = roles.line(r"broker at (tcp://\S+)")[1]
        done = command("--broker", address)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "FAIL" not in done.stdout
        done = command("--broker", address, "--json", shell="ulimit -n 60")
        assert done.returncode == 1, done.stderr
        told = Told(done.stdout)
        assert told.failed == ["file descriptors"]
        assert "at most 60 here (60 if raised)" in told.found("file descriptors")
        broker = min(set(roles.session()) - {roles.process.pid})
        os.kill(broker, signal.SIGSTOP)
        try:
            done = command("--broker", address, "--json")
        finally:
            os.kill(broker, signal.SIGCONT)
        assert done.returncode == 1, done.stderr
        told = Told(done.stdout)
        assert told.failed == ["ZMTP handshake"]
        assert "says nothing" in told.found("ZMTP handshake")
