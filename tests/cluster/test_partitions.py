"""Networks that break between two of the cluster's machines, both ways or one way, and heal: no
contribution is lost or counts twice, whoever waits says for whom, and all goes on by itself.

Three machines on one wire. A cut is silent: what one machine sends to another goes to a card that
nobody has, so connections stay open and know of nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from namespaces import NO_KEYS, ZKV, Machine, machine
from processes import PATIENCE_S, Launched

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.netns,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's namespaces"),
]

NAMES = ("broker", "server", "worker")
AT = {name: f"10.211.7.{number}" for number, name in enumerate(NAMES, start=1)}
NOBODY = "02:00:00:00:00:99"
PATIENT = ("--insecure", "--log-level", "info")
TRAINS = """
import logging, signal, sys, numpy as np, zkv
logging.basicConfig(format="%(message)s")
told, ends = [], []
signal.signal(signal.SIGUSR1, lambda *_: ends.append(True))
patient = {"broker_lost_s": 60.0, "wait_timeout_s": 60.0}
with zkv.connect(sys.argv[1], narrate_after_s=0.5, narrate_every_s=0.5, **patient) as worker:
    worker.init({"w": np.zeros(20_000, np.float32)}, rule="sgd:lr=1")
    while not ends:
        with worker.batch() as batch:
            batch.push("w", -np.ones(20_000, np.float32))
        told.append(batch.wait())
        print("at", len(told), flush=True)
    w = worker.pull("w")
    print("ended", told.count("committed"), len(told), w.min(), w.max(), flush=True)
"""


@contextmanager
def wired(folder: Path) -> Iterator[dict[str, Machine]]:
    """Three machines, joined by a switch in the first one."""
    with ExitStack() as stack:
        made = {name: stack.enter_context(machine(f"zkv-{name}", folder)) for name in NAMES}
        hub = made["broker"]
        hub.must("ip link add wire type bridge")
        hub.must("ip link set wire up")
        for name, place in made.items():
            if place is not hub:
                ends = f"type veth peer name wire netns {place.pid}"
                hub.must(f"ip link add to-{name} {ends}")
                hub.must(f"ip link set to-{name} master wire up")
                place.must("ip link set wire up")
            place.must(f"ip addr add {AT[name]}/24 dev wire")
        yield made


@contextmanager
def cut(places: dict[str, Machine], ways: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Nothing that the first of each pair sends to the second arrives."""
    for source, target in ways:
        places[source].must(f"ip neigh replace {AT[target]} lladdr {NOBODY} dev wire nud permanent")
    try:
        yield
    finally:
        for source, target in ways:
            places[source].must(f"ip neigh del {AT[target]} dev wire")


@contextmanager
def running(place: Machine, *command: str) -> Iterator[Launched]:
    """A process at a place."""
    one = Launched(*place.command(*command), env=NO_KEYS)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait(PATIENCE_S)


def both(one: str, other: str) -> tuple[tuple[str, str], ...]:
    return ((one, other), (other, one))


SILENT = "nothing is heard of"
SERVER, BROKER = (
    r"server 0 \('\S+' at tcp://10\.211\.7\.2:\d+",
    r"the broker at tcp://10\.211\.7\.1:",
)
CUTS = {
    "worker and server": (both("worker", "server"), SERVER),
    "worker to server": ((("worker", "server"),), rf"{SERVER}.* owes an answer"),
    "server to worker": ((("server", "worker"),), rf"{SERVER}.* owes an answer"),
    "broker and server": (both("broker", "server"), rf"{SILENT} {SERVER}"),
    "broker to server": ((("broker", "server"),), rf"{SILENT} {SERVER}"),
    "worker to broker": ((("worker", "broker"),), rf"{SILENT} {BROKER}"),
}


def goes_on(worker: Launched) -> None:
    """Wait until the batches after the present one are settled, too."""
    for _ in range(3):
        worker.line(r"^at \d+")


def dialled_from(place: Machine, broker: str) -> set[str]:
    """The ports from which a machine is connected with the broker's control port, as its own
    kernel knows them."""
    said = place.must(f"ss -Htn state established dst {broker.removeprefix('tcp://')}")
    return {line.split()[2].rpartition(":")[2] for line in said.splitlines()}


def test_row_12_and_13_what_is_cut_is_named_and_goes_on_when_it_heals(tmp_path: Path) -> None:
    """Row 13 cut by cut: one way is as bad as both, as TCP needs answers. Row 12 at the end: a
    connection of which neither end hears any more is found by its heartbeats, and the worker comes
    back with another one."""
    with wired(tmp_path) as places, ExitStack() as stack:

        def start(name: str, *command: str) -> Launched:
            return stack.enter_context(running(places[name], *command))

        lost = ("--worker-lost", "60", "--server-lost", "60")
        bind = ("--bind", f"tcp://{AT['broker']}:0", *PATIENT)
        address = start("broker", *ZKV, "broker", *bind, *lost).line(r"broker at (tcp://\S+)")[1]
        bind = ("--bind", f"tcp://{AT['server']}:0", *PATIENT)
        server = start("server", *ZKV, "server", "--broker", address, "--broker-lost", "60", *bind)
        server.line("is in")
        worker = start("worker", sys.executable, "-c", TRAINS, address)
        goes_on(worker)
        for ways, named in CUTS.values():
            with cut(places, ways):
                worker.line(f"waiting for .*{named}")
            goes_on(worker)
        before = dialled_from(places["worker"], address)
        assert before
        with cut(places, both("worker", "broker")):
            while dialled_from(places["worker"], address):
                worker.line(f"waiting for .*{SILENT} {BROKER}")
        goes_on(worker)
        after = dialled_from(places["worker"], address)
        assert after
        assert not after & before
        os.kill(worker.process.pid, signal.SIGUSR1)
        committed, batches, low, high = worker.line("ended (.*)")[1].split()
        assert committed == batches
        # Every contribution adds one: none is lost, none counts twice.
        assert float(low) == float(high) == int(committed)
        assert worker.end() == 0
