"""Two machines: a broker and its servers in one network namespace, the workers in another.

What a machine is stands in `namespaces.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from namespaces import NO_KEYS, OPEN, PATIENCE_S, ZKV, Machine, machine, role

from zkv_net.sockets import split_address

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.netns,
    pytest.mark.source,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's namespaces"),
]

HEAD, FAR = "10.211.1.1", "10.211.1.2"
OTHER_CARD = "10.211.3.1"
NOWHERE = "10.211.9.9"
DIGITS = Path(__file__).resolve().parents[2] / "scripts" / "digits.py"
ADAM = ("--optimizer", "adam:lr=0.003")


@dataclass(frozen=True)
class Network:
    """`head` has a second card and a default route; `far` has one card."""

    head: Machine
    far: Machine


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with machine("zkv-head", tmp_path) as head, machine("zkv-far", tmp_path) as far:
        wire = f"ip link add head netns {head.pid} type veth peer name far netns {far.pid}"
        subprocess.run(wire.split(), check=True)
        head.must("ip link add other type veth peer name none")
        for place, card, address in (
            (head, "head", HEAD),
            (head, "other", OTHER_CARD),
            (far, "far", FAR),
        ):
            place.must(f"ip addr add {address}/24 dev {card}")
            place.must(f"ip link set {card} up")
        head.must("ip link set none up")
        head.must(f"ip route add default via {FAR}")
        yield Network(head, far)


def train(network: Network, broker: str, route: str, folder: Path) -> list[dict[str, Any]]:
    """Train the main job's network with two far workers; return their reports."""
    pytest.importorskip("sklearn", reason="the main job needs scikit-learn")
    program = [str(DIGITS), "--passes", "4"]
    done = network.far.run(
        *ZKV,
        *("run", "--broker", broker, "-n", "2", "--report-dir", str(folder), *program),
        ZKV_ROUTE=route,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"worker-{rank}.json").read_text()) for rank in range(2)]


def check_trained(reports: list[dict[str, Any]], transport: str) -> None:
    """Check that the model learns, and that nothing goes round the network: one kernel holds both
    machines, and one user's processes."""
    assert reports[0]["accuracy"] > 0.9
    assert [report["transport"] for report in reports] == [f"tcp: {transport}"] * 2
    for report in reports:
        # 1437 samples by batches of 32 for 2 workers: 23 rounds in each of 4 passes.
        assert report["outcomes"]["committed"] == report["batches"] == 92


def test_a_wildcard_announces_the_card_that_others_reach(network: Network, tmp_path: Path) -> None:
    head = network.head
    own = head.python("import socket; print(socket.gethostbyname(socket.gethostname()))")
    assert own == "127.0.1.1"
    everywhere = ("--bind", "tcp://0.0.0.0:0", *OPEN)
    with ExitStack() as stack:
        broker = stack.enter_context(role(head, "broker", "--servers", "2", *ADAM, *everywhere))
        for _ in range(2):
            stack.enter_context(role(head, "server", "--broker", broker, *everywhere))
        reports = train(network, broker, "direct", tmp_path)
        servers = network.far.servers(broker)
    check_trained(reports, "it is on another machine")
    assert [split_address(address)[0] for address in (broker, *servers)] == [HEAD] * 3


def test_route_broker_needs_one_address_only(network: Network, tmp_path: Path) -> None:
    far = network.far
    everywhere = ("--bind", "tcp://0.0.0.0:0", *OPEN)
    with role(network.head, "up", "--servers", "2", *ADAM, *everywhere) as broker:
        servers = [split_address(address) for address in far.servers(broker)]
        assert [host for host, _ in servers] == [HEAD] * 2
        for host, port in servers:
            far.must(f"ip rule add ipproto tcp dport {port} to {host} unreachable")
            code = f"import socket; print(socket.socket().connect_ex(({host!r}, {port})))"
            assert far.python(code) != "0", "the test's own wall has a hole"
        reports = train(network, broker, "broker", tmp_path)
    check_trained(reports, "they go through the broker")


def test_advertise_chooses_among_the_cards(network: Network) -> None:
    options = ("--bind", "tcp://0.0.0.0:0", "--advertise", OTHER_CARD, *OPEN)
    with (
        role(network.head, "broker", *options) as broker,
        role(network.head, "server", "--broker", broker, *options) as server,
    ):
        assert [split_address(address)[0] for address in (broker, server)] == [OTHER_CARD] * 2


def test_a_server_at_a_wrong_address_is_named_with_it(network: Network) -> None:
    everywhere = ("--bind", "tcp://0.0.0.0:0", *OPEN)
    code = (
        "import numpy, zkv; worker = zkv.connect(wait_timeout_s=3); "
        "worker.init({'w': numpy.ones(3)})"
    )
    with (
        role(network.head, "broker", *everywhere) as broker,
        role(
            network.head, "server", "--broker", broker, "--advertise", NOWHERE, *everywhere
        ) as server,
    ):
        done = network.far.run(sys.executable, "-c", code, ZKV_BROKER=broker)
    assert done.returncode != 0
    assert server in done.stderr.splitlines()[-1]


SUMS = """
import json, sys, numpy as np, zkv
with zkv.connect(sys.argv[1], rank=int(sys.argv[2]), world=3) as worker:
    worker.init({"w": np.zeros(300_000, np.float32)})
    for _ in range(3):
        with worker.batch() as batch:
            batch.push("w", -np.ones(300_000, np.float32))
    batch.wait()
    print(json.dumps([float(worker.pull("w").sum()), worker.stats()["topology"]]))
"""


@pytest.mark.parametrize("name", ["ring", "hierarchical"])
def test_workers_of_two_machines_add_up_among_themselves(network: Network, name: str) -> None:
    """One beside the broker, which it has to dial by the address that others reach, and two that
    share memory: machines are told apart by their networks, as one kernel holds both."""
    everywhere = ("--bind", "tcp://0.0.0.0:0", *OPEN)
    options = ("--servers", "1", "--workers", "3", "--topology", name, "--optimizer", "sgd:lr=1")
    with role(network.head, "up", *options, *everywhere) as broker:
        assert split_address(broker)[0] == HEAD
        workers = [
            subprocess.Popen(
                place.command(sys.executable, "-c", SUMS, broker, str(rank)),
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **NO_KEYS},
            )
            for rank, place in enumerate((network.head, network.far, network.far))
        ]
        try:
            said = [worker.communicate(timeout=PATIENCE_S)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    found = [json.loads(text) for text in said]
    assert [total for total, _ in found] == [900_000.0] * 3
    figures = [topology for _, topology in found]
    assert [one["updates"] for one in figures] == [3] * 3
    if name == "hierarchical":
        assert [one["bytes_to_workers"] > 0 for one in figures] == [False, True, True]
        assert "memory" in figures[1]["transport"]
    else:
        assert all(one["bytes_to_workers"] for one in figures)
        # Why is known once it has been asked, which three updates need not wait for.
        assert figures[0]["transport"].startswith("tcp: ")


@pytest.mark.parametrize("host", ["0.0.0.0", HEAD])
@pytest.mark.parametrize("who", [["broker"], ["server", "--broker", f"tcp://{HEAD}:5555"]])
def test_an_open_bind_must_be_wanted(network: Network, who: list[str], host: str) -> None:
    done = network.head.run(*ZKV, *who, "--bind", f"tcp://{host}:0")
    assert done.returncode == 2
    assert f"tcp://{host}:0" in done.stderr
    assert "--insecure" in done.stderr


def test_nothing_that_others_cannot_reach_is_announced(network: Network) -> None:
    far_broker = ("--broker", f"tcp://{FAR}:5555")
    loopback = network.head.run(*ZKV, "server", *far_broker)
    network.head.must("ip route del default")
    nowhere = network.head.run(*ZKV, "broker", "--bind", "tcp://0.0.0.0:0", *OPEN)
    wildcard = network.head.run(
        *ZKV, "server", *far_broker, "--bind", "tcp://0.0.0.0:0", "--advertise", "0.0.0.0", *OPEN
    )
    for done, word in ((loopback, "loopback"), (nowhere, "default route"), (wildcard, "wildcard")):
        assert done.returncode == 2, done.stderr
        assert word in done.stderr
        assert "--advertise" in done.stderr


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_blocks_are_cut_to_the_speed_of_the_link(network: Network, codec: str) -> None:
    """With a codec, whose results depend on a block's borders, they are the same on any link."""
    network.far.must("tc qdisc add dev far root tbf rate 100mbit burst 32kb latency 400ms")
    code = "import numpy, zkv; zkv.connect().init({'w': numpy.zeros(700_000, 'float32')})"
    everywhere = ("--bind", "tcp://0.0.0.0:0", *OPEN)
    with role(network.head, "up", "--codec", codec, *everywhere) as broker:
        done = network.far.run(sys.executable, "-c", code, ZKV_BROKER=broker)
        assert done.returncode == 0, done.stderr
        told = network.far.run(*ZKV, "status", "--json", "--broker", broker)
    largest = json.loads(told.stdout)["block_bytes"]
    assert largest == (64 * 1024 if codec == "none" else 1024 * 1024)


# --- zkv doctor --------------------------------------------------------------------------------

UNHEARD = "10.211.5.1"


def examine(
    place: Machine, broker: str, code: int, *more: str, **environment: str
) -> dict[str, dict[str, Any]]:
    """Run `zkv doctor` at a place; return its checks by name."""
    done = place.run(*ZKV, "doctor", "--json", "--broker", broker, *more, **environment)
    assert done.returncode == code, done.stdout + done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def failed(checks: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, check in checks.items() if check["outcome"] == "fail"]


def test_a_doctor_on_another_machine_finds_all_well_and_says_that_nothing_is_encrypted(
    network: Network,
) -> None:
    everywhere = ("--bind", "tcp://0.0.0.0:0", *OPEN)
    with (
        role(network.head, "broker", *everywhere, "--advertise", HEAD) as broker,
        role(network.head, "server", "--broker", broker, *everywhere),
    ):
        checks = examine(network.far, broker, 1, XDG_CONFIG_HOME="/nonexistent", ZKV_INSECURE="0")
        assert failed(checks) == ["CURVE"]
        assert checks["CURVE"]["found"] == "no keys can be used here, and they are needed"
        assert "zkv keys new worker" in checks["CURVE"]["means"]
        checks = examine(network.far, broker, 0, "--insecure")
    assert checks["CURVE"]["outcome"] == "warn"
    assert checks["TCP connection"]["figures"]["from"] == FAR
    assert checks["server 0"]["outcome"] == checks["throughput"]["outcome"] == "ok"
    assert checks["shared memory"]["found"] == "no server is on this machine"


def test_a_doctor_names_a_blocked_route_and_one_whose_answers_get_lost(network: Network) -> None:
    with role(network.head, "broker", "--bind", f"tcp://{HEAD}:0", *OPEN) as broker:
        network.far.must(f"ip route add blackhole {HEAD}/32")
        checks = examine(network.far, broker, 1)
        assert failed(checks) == ["TCP connection"]
        assert f"there is no way to {HEAD}" in checks["TCP connection"]["found"]
        network.far.must(f"ip route del blackhole {HEAD}/32")
        # What leaves from this address arrives, and its answers have no way back: no firewall
        # would look different from here.
        network.head.must("ip route del default")
        network.far.must(f"ip addr add {UNHEARD}/32 dev lo")
        network.far.must(f"ip route replace {HEAD}/32 dev far src {UNHEARD}")
        checks = examine(network.far, broker, 1)
        assert failed(checks) == ["TCP connection"]
        assert "does not answer" in checks["TCP connection"]["found"]
        assert "firewall" in checks["TCP connection"]["means"]


def test_a_doctor_names_a_server_whose_address_cannot_be_reached_and_the_way_round(
    network: Network,
) -> None:
    everywhere = ("--bind", "tcp://0.0.0.0:0", *OPEN)
    with (
        role(network.head, "broker", *everywhere, "--advertise", HEAD) as broker,
        role(
            network.head, "server", "--broker", broker, *everywhere, "--advertise", OTHER_CARD
        ) as server,
    ):
        checks = examine(network.far, broker, 1, "--insecure")
    assert failed(checks) == ["server 0"]
    assert server in checks["server 0"]["found"]
    assert "ZKV_ROUTE=broker" in checks["route broker"]["found"]
