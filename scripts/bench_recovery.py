"""Times recoveries from SIGKILL (`scripts/bench_recovery --help`).

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

ZKV = [sys.executable, "-m", "zkv_cli"]
WORKERS, SERVERS, VALUES = 2, 2, 1_000
QUIET = ("--log-level", "error")
WORKER_LOST_S = 1.0
PATIENCE_S = 30.0
STEADY = 20
"""Batches between two kills."""


def train(address: str, rank: int, keys: int) -> None:
    """Train until a signal ends this process, and print when each batch is finished."""
    import numpy as np

    import zkv

    print("knocks", time.time(), flush=True)
    with zkv.connect(address, rank=rank, world=WORKERS) as worker:
        worker.init({f"k{at}": np.ones(VALUES, np.float32) for at in range(keys)})
        while True:
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
    """A cluster that trains."""

    def __init__(self, folder: str, keys: int) -> None:
        self.address = f"tcp://127.0.0.1:{_port()}"
        self._folder, self._keys = folder, keys
        self.broker = self._broker()
        self.broker.line("broker at")
        server = (*ZKV, "server", "--broker", self.address, *QUIET)
        self.servers = [Process(*server) for _ in range(SERVERS)]
        self.workers = [self._worker(rank) for rank in range(WORKERS)]

    def _broker(self) -> Process:
        words = ("--bind", self.address, "--servers", str(SERVERS), "--workers", str(WORKERS))
        lost = ("--worker-lost", str(WORKER_LOST_S))
        return Process(*ZKV, "broker", *words, *lost, "--journal", self._folder, *QUIET)

    def _worker(self, rank: int) -> Process:
        numbers = (str(rank), str(self._keys))
        return Process(sys.executable, __file__, "--train", self.address, *numbers)

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
def training(keys: int) -> Iterator[Run]:
    """Run a cluster, and end it."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder, keys)
        try:
            run.steady()
            yield run
        finally:
            run.end()


def measure(times: int, keys: int) -> dict[str, dict[str, float]]:
    """Return the median and the worst of each time, in milliseconds."""
    found: dict[str, list[float]] = {}
    with training(keys) as run:
        for action in (run.restart_broker, run.restart_worker):
            for _ in range(times):
                for name, seconds in action().items():
                    found.setdefault(name, []).append(1000 * seconds)
                run.steady()
    return {
        name: {"median_ms": round(median(each), 1), "worst_ms": round(max(each), 1)}
        for name, each in found.items()
    }


def main(arguments: list[str]) -> int:
    """Measure and print; return the exit code."""
    if arguments[:1] == ["--train"]:
        train(arguments[1], int(arguments[2]), int(arguments[3]))
        return 0
    parser = argparse.ArgumentParser(prog="scripts/bench_recovery", add_help=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--keys", type=int, default=20)
    asked = parser.parse_args(arguments)
    if min(asked.times, asked.keys) < 1:
        parser.error("--times and --keys are 1 or more")
    try:
        figures = measure(asked.times, asked.keys)
    except TimeoutError as error:
        print(f"bench_recovery: {error}", file=sys.stderr)
        return 1
    if asked.json:
        print(json.dumps({"times": asked.times, "keys": asked.keys, "figures": figures}))
        return 0
    print(f"{'':16} {'median':>9} {'worst':>9}   of {asked.times}")
    for name, one in figures.items():
        print(f"{name:16} {one['median_ms']:6.0f} ms {one['worst_ms']:6.0f} ms")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    raise SystemExit(main(sys.argv[1:]))
