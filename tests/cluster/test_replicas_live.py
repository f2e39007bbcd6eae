"""Servers that die while their blocks have copies: real processes, killed by SIGKILL."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import zkv
from zkv.errors import ConfigError, KeyMismatch, Refused
from zkv_cli.ask import ask_status

pytestmark = pytest.mark.cluster
SIZE = 200_000
WAIT_S = 20.0


def until(what: str, done: Callable[[], bool]) -> None:
    """Wait until something holds, for at most `WAIT_S`."""
    limit = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < limit, f"{what} did not come within {WAIT_S} s"
        threading.Event().wait(0.02)


def replicas_of(cluster: zkv.LocalCluster) -> dict[str, Any]:
    """Return what the status says of copies."""
    found: dict[str, Any] = ask_status(cluster.address, WAIT_S)["replicas"]
    return found


def all_stand_by(cluster: zkv.LocalCluster) -> bool:
    told = replicas_of(cluster)
    return told["blocks"] > 0 and told["standing_by"] == told["blocks"]


@contextmanager
def another_server(cluster: zkv.LocalCluster) -> Iterator[None]:
    """Start a server for the one that was lost, as one would in a shell."""
    command = [sys.executable, "-m", "zkv_cli", "server", "--broker", cluster.address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield
    finally:
        process.terminate()
        process.communicate(timeout=WAIT_S)


def train(cluster: zkv.LocalCluster, batches: int, kill: Callable[[], None] | None) -> Any:
    """Train two workers; kill a server when both are in the middle. Return values and outcomes."""
    started = threading.Barrier(3 if kill else 2)
    outcomes: list[list[str]] = [[], []]
    found: list[Any] = []

    def loop(rank: int) -> None:
        rng = np.random.default_rng(rank)
        with cluster.connect(rank=rank) as worker:
            worker.init({key: np.zeros(SIZE, np.float32) for key in "abcd"})
            for number in range(batches):
                with worker.batch() as batch:
                    for key, value in batch.params.items():
                        noise = rng.standard_normal(SIZE, dtype=np.float32)
                        batch.push(key, value * np.float32(0.01) + noise)
                if number == batches // 3:
                    started.wait(WAIT_S)
                batch.wait()
                outcomes[rank].append(batch.outcome)
            found.append({key: worker.pull(key) for key in "abcd"})

    threads = [threading.Thread(target=loop, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    if kill:
        started.wait(WAIT_S)
        kill()
    for thread in threads:
        thread.join(3 * WAIT_S)
        assert not thread.is_alive()
    return found[0], outcomes


SETTINGS: dict[str, Any] = {"servers": 2, "workers": 2, "optimizer": "momentum:lr=0.01"}


def test_bsp_ends_with_the_bits_of_a_run_in_which_no_server_died() -> None:
    with zkv.local(**SETTINGS) as cluster:
        straight, _ = train(cluster, 24, None)
    with zkv.local(**SETTINGS, replicas=1) as cluster:
        lost, outcomes = train(cluster, 24, lambda: cluster.kill_server(0, signal.SIGKILL))
        assert replicas_of(cluster)["taken_over"] == 1
    assert outcomes == [["committed"] * 24] * 2
    for key, value in straight.items():
        assert lost[key].tobytes() == value.tobytes()


def test_each_server_may_die_in_turn_when_another_one_has_come() -> None:
    settings = {**SETTINGS, "policy": "asp", "workers": 1, "replicas": 1}
    with zkv.local(**settings) as cluster, cluster.connect() as worker:
        worker.init({key: np.zeros(SIZE, np.float32) for key in "abcd"})

        def committed(count: int) -> int:
            done = 0
            for _ in range(count):
                with worker.batch() as batch:
                    for key in "abcd":
                        batch.push(key, np.full(SIZE, -100.0, np.float32))
                batch.wait()
                done += batch.outcome == "committed"
            return done

        assert committed(3) == 3
        cluster.kill_server(0, signal.SIGKILL)
        with another_server(cluster):
            assert committed(3) == 3
            until("a copy of each block", lambda: all_stand_by(cluster))
            cluster.kill_server(1, signal.SIGKILL)
            assert committed(3) == 3
            assert replicas_of(cluster)["taken_over"] == 2
            assert {len(worker.pull(key)) for key in "abcd"} == {SIZE}


def test_a_server_that_is_told_to_end_hands_over() -> None:
    settings = {**SETTINGS, "workers": 1, "replicas": 1}
    with zkv.local(**settings) as cluster, cluster.connect() as worker:
        worker.init({key: np.zeros(SIZE, np.float32) for key in "vw"})
        with worker.batch() as batch:
            for key in "vw":
                batch.push(key, np.ones(SIZE, np.float32))
        batch.wait()
        before = worker.pull()
        cluster.kill_server(1, signal.SIGTERM)
        after = worker.pull()
        assert all(after[key].tobytes() == before[key].tobytes() for key in before)


def test_what_cannot_be_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="give --servers 2 or more"):
        zkv.local(servers=1, replicas=1).start()
    refused = pytest.raises((Refused, KeyMismatch), match="have no copies on other servers")
    with zkv.local(servers=2, replicas=1) as cluster, cluster.connect() as worker, refused:
        worker.init({"w": np.zeros(4, np.float32)}, tables={"t": zkv.Table(8)})
