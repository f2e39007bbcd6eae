"""Times recoveries from kills, cuts and SIGTERM (`scripts/bench_recovery --help`).

All times are of this machine's one clock, which every process prints what it does by.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from machines import ADDRESS, Machine, NoNamespace, network

ZKV = [sys.executable, "-m", "zkv_cli"]
WORKERS, SERVERS, VALUES = 2, 2, 1_000
QUIET = ("--log-level", "error")
WORKER_LOST_S = 1.0
PATIENCE_S = 30.0
TARGETS_S = {
    "broker restart": 0.5,
    "worker rejoin": 1.0,
    "partition healed": 2.0,
    "worker drain": 5.0,
    "failover": 1.0,
}
"""What is wanted, in seconds."""
NOWHERE = "02:00:00:00:00:01"
"""No card has this address: what is sent there is lost without a word."""
STEADY = 20
"""Batches between two kills."""


def train(address: str, rank: int, keys: int, lost_s: float) -> None:
    """Train until SIGTERM, and print when each batch is finished."""
    import numpy as np

    import zkv

    ends = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ends.set())
    print("knocks", time.time(), flush=True)
    who = {"rank": rank, "world": WORKERS}
    with zkv.connect(address, **who, insecure=True, broker_lost_s=lost_s) as worker:
        worker.init({f"k{at}": np.ones(VALUES, np.float32) for at in range(keys)})
        while not ends.is_set():
            with worker.batch() as batch:
                for key, value in batch.params.items():
                    batch.push(key, value)
            print("batch", time.time(), flush=True)


class Process:
    """A process, and what it has printed, line by line."""

    def __init__(self, *command: str) -> None:
        self.began = time.time()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def line(self, begins: str, holds: Callable[[str], bool] = lambda line: True) -> str:
        """Return the next line that begins so and for which that holds; TimeoutError if none
        comes."""
        deadline = time.time() + PATIENCE_S
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.time()))
            except queue.Empty:
                raise TimeoutError(f"no {begins!r} within {PATIENCE_S:g} s") from None
            if line.startswith(begins) and holds(line):
                return line

    def batch_after(self, when: float) -> float:
        """Return when the first batch was finished after this time."""
        return float(self.line("batch", lambda line: float(line.split()[1]) > when).split()[1])

    def kill(self) -> float:
        """Kill it; return when."""
        now = time.time()
        self.end(signal.SIGKILL)
        return now

    def end(self, number: int) -> None:
        """Send a signal, and wait for the end."""
        self._process.send_signal(number)
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Run:
    """A cluster that trains. On `machines` (one for broker and servers, one for each worker), if
    there are any, else on loopback; a worker is lost after `lost_s`."""

    def __init__(
        self,
        folder: str,
        asked: argparse.Namespace,
        lost_s: float,
        machines: Sequence[Machine] = (),
    ) -> None:
        host = ADDRESS.format(1) if machines else "127.0.0.1"
        self.address = f"tcp://{host}:{_port()}"
        self._bind = ("--bind", f"tcp://{host}:0", "--insecure")
        self._folder, self._asked, self._lost_s = folder, asked, lost_s
        self._machines = machines
        self.broker = self._broker()
        self.broker.line("broker at")
        self.servers = [self._server() for _ in range(SERVERS)]
        self.workers = [self._worker(rank) for rank in range(WORKERS)]

    def _at(self, place: int, *command: str) -> Process:
        """Start a command on a machine."""
        return Process(*(self._machines[place].command(*command) if self._machines else command))

    def _broker(self) -> Process:
        words = ("--bind", self.address, "--servers", str(SERVERS), "--workers", str(WORKERS))
        lost = ("--worker-lost", str(self._lost_s), "--beat", self._asked.beat, "--insecure")
        replicas = ("--replicas", str(self._asked.replicas)) if self._asked.replicas else ()
        more = (*lost, *replicas, "--journal", self._folder, *QUIET)
        return self._at(0, *ZKV, "broker", *words, *more)

    def _server(self) -> Process:
        return self._at(0, *ZKV, "server", "--broker", self.address, *self._bind, *QUIET)

    def _worker(self, rank: int) -> Process:
        numbers = (str(rank), str(self._asked.keys), str(max(10.0, self._lost_s)))
        return self._at(1 + rank, sys.executable, __file__, "--train", self.address, *numbers)

    def steady(self) -> None:
        """Wait until all train."""
        for worker in self.workers:
            for _ in range(STEADY):
                worker.batch_after(time.time())

    def restart_broker(self) -> dict[str, float]:
        """Kill the broker and start it again; return seconds."""
        self.broker.kill()
        self.broker = self._broker()
        self.broker.line("broker at")
        up = time.time()
        after = min(worker.batch_after(up) for worker in self.workers)
        return {"broker start": up - self.broker.began, "broker restart": after - up}

    def restart_worker(self) -> dict[str, float]:
        """Kill a worker and start one with its rank; return seconds."""
        died = self.workers[1].kill()
        fresh = self.workers[1] = self._worker(1)
        knocked = float(fresh.line("knocks").split()[1])
        rejoined = fresh.batch_after(knocked)
        # What was under way when it died may still have been finished.
        others = self.workers[0].batch_after(died + 0.1)
        return {
            "worker start": knocked - fresh.began,
            "worker rejoin": rejoined - knocked,
            "others": others - died,
        }

    def drain_worker(self) -> dict[str, float]:
        """SIGTERM for a worker: it finishes and leaves. Start one with its rank; return seconds."""
        began = time.time()
        self.workers[1].end(signal.SIGTERM)
        took = time.time() - began
        self.workers[1] = self._worker(1)
        self.workers[1].line("knocks")
        return {"worker drain": took}

    def fail_over(self) -> dict[str, float]:
        """Kill a server that has a copy elsewhere, and start another; return seconds."""
        died = self.servers[-1].kill()
        after = self.workers[0].batch_after(died + 0.1)
        self.servers[-1] = self._server()
        return {"failover": after - died}

    def partition(self) -> dict[str, float]:
        """Cut a worker off from all others, both ways, and mend it; return seconds since then."""
        here, there = self._machines[0], self._machines[2]
        ways = ((here, ADDRESS.format(3)), (there, ADDRESS.format(1)))
        for place, address in ways:
            place.must(f"ip neigh replace {address} lladdr {NOWHERE} dev card nud permanent")
        time.sleep(self._asked.partition)
        for place, address in ways:
            place.must(f"ip neigh del {address} dev card")
        healed = time.time()
        return {"partition healed": self.workers[1].batch_after(healed) - healed}

    def end(self) -> None:
        """End all processes."""
        for worker in self.workers:
            worker.kill()
        for one in (*self.servers, self.broker):
            one.end(signal.SIGTERM)


def _port() -> int:
    """Return a free port whose successor is free too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


@contextmanager
def training(
    asked: argparse.Namespace, lost_s: float = WORKER_LOST_S, machines: Sequence[Machine] = ()
) -> Iterator[Run]:
    """Run a cluster, and end it."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder, asked, lost_s, machines)
        try:
            run.steady()
            yield run
        finally:
            run.end()


def measure(asked: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the median and the worst of each time, in milliseconds."""
    found: dict[str, list[float]] = {}

    def repeat(run: Run, action: Callable[[], dict[str, float]], times: int) -> None:
        for _ in range(times):
            for name, seconds in action().items():
                found.setdefault(name, []).append(1000 * seconds)
            run.steady()

    with training(asked) as run:
        repeat(run, run.restart_broker, asked.times)
        repeat(run, run.restart_worker, asked.times)
        repeat(run, run.drain_worker, asked.times)
        if asked.replicas:
            repeat(run, run.fail_over, asked.times)
    if asked.partition:
        try:
            with (
                network(3, 0) as machines,
                training(asked, 2 * asked.partition + 5, machines) as run,
            ):
                repeat(run, run.partition, asked.cuts)
        except NoNamespace as error:
            print(f"bench_recovery: no partition: {error}", file=sys.stderr)
    return {
        name: {"median_ms": round(median(each), 1), "worst_ms": round(max(each), 1)}
        for name, each in found.items()
    }


def main(arguments: list[str]) -> int:
    """Measure and print; return the exit code."""
    if arguments[:1] == ["--train"]:
        train(arguments[1], int(arguments[2]), int(arguments[3]), float(arguments[4]))
        return 0
    parser = argparse.ArgumentParser(prog="scripts/bench_recovery", add_help=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--keys", type=int, default=20)
    parser.add_argument("--beat", default="0.5s")
    parser.add_argument("--partition", type=float, default=10.0)
    parser.add_argument("--cuts", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=0)
    asked = parser.parse_args(arguments)
    if min(asked.times, asked.keys, asked.cuts) < 1:
        parser.error("--times, --keys and --cuts are 1 or more")
    if min(asked.partition, asked.replicas) < 0:
        parser.error("--partition and --replicas are 0 or more")
    try:
        figures = measure(asked)
    except TimeoutError as error:
        print(f"bench_recovery: {error}", file=sys.stderr)
        return 1
    if asked.json:
        told = {"times": asked.times, "keys": asked.keys, "beat": asked.beat}
        targets = {name: 1000 * wanted for name, wanted in TARGETS_S.items()}
        print(json.dumps({**told, "figures": figures, "targets_ms": targets}))
        return 0
    print(f"{'':16} {'median':>9} {'worst':>9} {'wanted':>9}   beats {asked.beat} apart")
    for name, one in figures.items():
        wanted = f"{1000 * TARGETS_S[name]:6.0f} ms" if name in TARGETS_S else ""
        print(f"{name:16} {one['median_ms']:6.0f} ms {one['worst_ms']:6.0f} ms {wanted:>9}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    raise SystemExit(main(sys.argv[1:]))
