"""`zkv rebalance`, `zkv server add` and `zkv server drain` as a person types them, beside a run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENCE_S, Launched, answer_of, free_address, launched, program

from zkv_cli.ask import ask_status

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="sessions are read from /proc"),
]

TRAINS = """
import hashlib, sys
from pathlib import Path
import numpy as np
import zkv

number, last, folder = 0, int(sys.argv[1]), Path(sys.argv[2])
with zkv.connect() as worker:
    worker.init({f"k{at}": np.full(60_000, at, np.float32) for at in range(8)})
    while not last or number < last:
        if not last and (folder / "last").exists():
            last = int((folder / "last").read_text())
        elif not last and worker.rank == 0 and (folder / "stop").exists():
            # The others are one batch ahead at most.
            (folder / "soon").write_text(str(number + 5))
            (folder / "soon").rename(folder / "last")
        number += 1
        chance = np.random.default_rng([worker.rank, number])
        with worker.batch() as batch:
            params = batch.params
            for at in range(8):
                if at in (0, 2, 4) or number % 8 == at:
                    noise = chance.standard_normal(60_000).astype(np.float32)
                    batch.push(f"k{at}", params[f"k{at}"] * np.float32(0.1) + noise)
        if number == 10:
            print("begun", flush=True)
    worker.barrier()
    model = worker.pull()
    bits = b"".join(model[key].tobytes() for key in sorted(model))
    print("digest", hashlib.sha256(bits).hexdigest(), flush=True)
    worker.barrier()
"""
HERE = dict(os.environ)
ZKV = [sys.executable, "-m", "zkv_cli"]


def awaited(address: str, holds: Any, what: str) -> dict[str, Any]:
    """Ask for the status until it is as wanted."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        status = ask_status(address, 10.0)
        if holds(status):
            return status
        assert time.monotonic() < deadline, f"{what} did not come: {status['moves']}"


def cluster(bind: str) -> Any:
    options = ("--servers", "2", "--workers", "2", "--optimizer", "momentum:lr=0.1,momentum=0.9")
    return launched("up", *options, "--bind", bind)


def digests(run: Launched) -> set[str]:
    return {run.line(r"digest (\w+)").group(1) for _ in range(2)}


def test_a_rebalance_under_hot_keys_a_server_more_and_one_less_change_no_bit(
    tmp_path: Path,
) -> None:
    script, bind = program(tmp_path, TRAINS), free_address()
    env = {"ZKV_BROKER": bind}
    with (
        cluster(bind) as up,
        launched("run", "-n", "2", script, "0", str(tmp_path), env=env) as run,
    ):
        up.line("2 servers are in")
        run.line("begun")
        awaited(bind, lambda status: status["measured_imbalance"] > 1.3, "an uneven load")
        said = answer_of([*ZKV, "rebalance", "--broker", bind, "--measure", "2"], tmp_path, HERE)
        print(said)
        found = re.search(r"imbalance  ([\d.]+) before, ([\d.]+) planned", said)
        after = re.search(r"measured   .* since: imbalance ([\d.]+)", said)
        assert found is not None
        assert after is not None
        before, planned, measured = float(found[1]), float(found[2]), float(after[1])
        assert before > 1.3
        assert planned < before - 0.2
        assert measured < before - 0.1
        with launched("server", "add", "--name", "late", "--broker", bind) as late:
            late.line("server 2 of 3 is in")
            awaited(bind, lambda s: len(s["servers"]) == 3 and s["servers"][2]["blocks"], "a share")
            awaited(bind, lambda status: status["moves"]["stage"] == "idle", "the moves' end")
            said = answer_of([*ZKV, "server", "drain", "0", "--broker", bind], tmp_path, HERE)
            assert re.search(r"done       \d blocks moved", said)
            up.line("server 0 was drained, and has ended")
            assert "late" in str(ask_status(bind, 10.0)["servers"])
            (tmp_path / "stop").touch()
            moved = digests(run)
            assert run.end() == 0
    batches = (tmp_path / "last").read_text()
    bind = free_address()
    env = {"ZKV_BROKER": bind}
    with cluster(bind) as up, launched("run", "-n", "2", script, batches, ".", env=env) as run:
        assert digests(run) == moved
        assert len(moved) == 1


def test_the_last_server_and_one_that_is_not_there_are_refused_in_one_line(tmp_path: Path) -> None:
    bind = free_address()
    with launched("up", "--servers", "1", "--bind", bind) as up:
        up.line("1 server is in")
        for arguments, words in (
            (("server", "drain", "0"), "is the last server that takes blocks"),
            (("server", "drain", "nobody"), "there is no server 'nobody'; servers are 0 ("),
            (("rebalance",), "no load was measured yet"),
            (("rebalance", "--move", "w=7"), "there is no server '7'"),
        ):
            done = subprocess.run(
                [*ZKV, *arguments, "--broker", bind],
                capture_output=True,
                text=True,
                check=False,
                timeout=PATIENCE_S,
            )
            assert done.returncode == 1
            assert words in done.stderr
            assert "Traceback" not in done.stderr
        misused = subprocess.run(
            [*ZKV, "rebalance", "--move", "w", "--broker", bind],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        assert misused.returncode == 2
        assert "--move 'w' is not PATTERN=SERVER" in misused.stderr
