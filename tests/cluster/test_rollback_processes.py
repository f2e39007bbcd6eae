"""Servers that are killed, as a person or a launcher deals with it: another one is started, or the
others go on; and a cluster that is told to go back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from harness import cluster
from processes import answer_of, free_address, launched

import zkv
from zkv import control as c
from zkv_cli.ask import TOKEN, ask
from zkv_cli.tables import as_text

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="sessions are read from /proc"),
]

ZKV = [sys.executable, "-m", "zkv_cli"]
ADAM = ("--optimizer", "adam:lr=0.1")
LAST = 16


def train(
    address: str, then: dict[int, Callable[[zkv.Worker], None]]
) -> tuple[bytes, list[zkv.RolledBack]]:
    """Train to a version, and do something at some on the way, once; return the bits of the model,
    and what the worker was told."""
    told: list[zkv.RolledBack] = []
    with zkv.connect(address, rank=0) as worker:
        worker.init({f"k{at}": np.zeros(30_000, np.float32) for at in range(4)})
        number = 0
        while number < LAST:
            try:
                with worker.batch() as batch:
                    chance = np.random.default_rng(batch.version)
                    for key, value in batch.params.items():
                        noise = chance.standard_normal(30_000).astype(np.float32)
                        batch.push(key, value * np.float32(0.1) + noise)
                batch.wait()
                number = batch.version + 1
                then.pop(number, lambda worker: None)(worker)
            except zkv.RolledBack as error:
                told.append(error)
                number = error.version
        model = worker.pull()
    return b"".join(model[f"k{at}"].tobytes() for at in range(4)), told


def take(worker: zkv.Worker) -> str:
    """Take a snapshot; return its name."""
    return str(ask(worker.status()["broker"], c.TakeSnapshot(TOKEN), 20.0)["name"])


def kill(worker: zkv.Worker, index: int) -> None:
    servers = {one["index"]: one["pid"] for one in worker.status()["servers"]}
    os.kill(servers[index], signal.SIGKILL)


@pytest.fixture(scope="module")
def straight() -> bytes:
    """The bits of a run that loses nobody."""

    async def alone() -> bytes:
        async with cluster(2, optimizer="adam:lr=0.1") as made:
            return (await asyncio.to_thread(train, made.address, {}))[0]

    return asyncio.run(alone())


def test_another_server_is_started_in_the_place_of_a_killed_one(
    tmp_path: Path, straight: bytes
) -> None:
    bind, folder = free_address(), str(tmp_path / "snaps")
    with ExitStack() as stack:
        broker = ("broker", "--bind", bind, "--servers", "2", "--journal", "none", *ADAM)
        stack.enter_context(launched(*broker, "--snapshot-dir", folder)).line("broker at")
        for _ in range(2):
            stack.enter_context(launched("server", "--broker", bind)).line("is in")

        def fails(worker: zkv.Worker) -> None:
            kill(worker, 1)
            stack.enter_context(launched("server", "--broker", bind)).line("server 1 of 2 is in")

        then = {5: lambda worker: take(worker), 9: fails}
        bits, told = train(bind, then)
    assert bits == straight
    assert [(one.version, one.undone) for one in told] == [(5, 4)]


def test_zkv_up_starts_a_killed_server_again_and_zkv_restore_goes_back(
    tmp_path: Path, straight: bytes
) -> None:
    bind, names = free_address(), []
    command = ("up", "--servers", "2", *ADAM, "--bind", bind, "--snapshot-dir", str(tmp_path / "s"))
    with launched(*command) as up:
        up.line("2 servers are in")

        def goes_back(worker: zkv.Worker) -> None:
            asks = [*ZKV, "restore", names[0], "--broker", bind]
            said = json.loads(answer_of([*asks, "--json"], tmp_path, dict(os.environ)))
            assert (said["version"], said["undone"]) == (3, 10)

        def fails(worker: zkv.Worker) -> None:
            kill(worker, 0)
            up.line("server 0 .* was ended by SIGKILL")
            up.line("it was started again, as pid")

        bits, told = train(
            bind,
            {3: lambda worker: names.append(take(worker)), 9: fails, 13: goes_back},
        )
        assert bits == straight
        assert [one.version for one in told] == [3, 3]
        assert "zkv restore" in str(told[1])
        said = as_text(ask(bind, c.Status(TOKEN), 10.0))
        assert "gone back 2 times, to version 3 (10 updates lost)" in said
