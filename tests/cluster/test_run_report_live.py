"""`zkv run --report` and `--json`, `--narrate-after` and `--stall-timeout`, with real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

PATIENCE_S = 40.0
TRAIN = """
import sys, numpy as np, zkv
with zkv.connect() as worker:
    worker.init({"w": np.zeros(1000, np.float32)})
    for _ in range(6):
        with worker.batch() as batch:
            batch.push("w", np.ones(1000, np.float32))
    batch.wait()
    worker.barrier()
print("trained", flush=True)
"""
STALLS = """
import threading, numpy as np, zkv
with zkv.connect() as worker:
    worker.init({"w": np.zeros(4, np.float32)})
    with worker.batch() as batch:
        if worker.rank == 1:
            threading.Event().wait()
        batch.push("w", np.ones(4, np.float32))
    try:
        batch.wait()
    except zkv.errors.WaitTimeout as error:
        print("first", error, flush=True)
    with worker.batch():
        pass
"""


def run(folder: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    path = folder / "train.py"
    path.write_text(program, "utf-8")
    kept = {name: text for name, text in os.environ.items() if not name.startswith("ZKV_")}
    return subprocess.run(
        [sys.executable, "-m", "zkv_cli", "run", "-n", "2", *options, str(path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=kept,
        check=False,
    )


def test_a_run_ends_with_one_object_in_the_fields_of_simulate(tmp_path):
    done = run(tmp_path, TRAIN, "--json", "--report-dir", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    plain = json.loads(done.stdout)
    assert done.stderr.count("trained") == 2
    assert (plain["policy"], plain["version"], plain["workers"]) == ("bsp", 6, [0, 1])
    assert plain["applied"] == plain["arrived"] == [6, 6]
    assert plain["staleness"] == [0] * 12
    assert plain["staleness_histogram"] == {"0": 12}
    assert len(plain["updates"]) == 6
    assert plain["updates"] == sorted(plain["updates"])
    assert 0 < plain["updates"][0] < plain["updates"][-1] < plain["wall_s"]
    assert (plain["pending"], plain["cancelled"]["count"], plain["warnings"]) == (0, 0, [])
    # One of the two has sent the initial values.
    assert sorted(plain["bytes_up"]) == [24_000, 28_000]
    assert plain["useful"] == plain["compute_s"]
    for name in ("busy_share", "useful_share", "waiting_share", "transfer_share"):
        assert 0 <= plain[name] <= 1
    for worker in range(2):
        spent = sum(plain[name][worker] for name in ("busy", "transfer", "waiting"))
        assert 0 < spent <= plain["wall_s"]
    for split in plain["time"]:
        assert split["batches"] == 6
        parts = ("data", "compute", "encode", "communication", "calls", "wait")
        assert abs(sum(split[f"{part}_s"] for part in parts) - split["wall_s"]) < 1e-5
    assert [len(one["rows"]) for one in plain["time_by_batch"]] == [6, 6]
    assert [server["index"] for server in plain["servers"]] == [0]
    told = subprocess.run(
        [sys.executable, "-m", "zkv_cli", "plan", "advise", "--json", "-"],
        input=done.stdout,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    advice = json.loads(told.stdout)
    assert abs(sum(advice["shares"].values()) - 1) < 1e-9
    assert (advice["workers"], advice["servers"], len(advice["remedies"])) == (2, 1, 11)
    left = sorted(path.name[:10] for path in (tmp_path / "out").iterdir())
    assert left == ["figures-0-", "figures-1-"]


def test_a_run_ends_with_one_table_and_leaves_nothing(tmp_path):
    done = run(tmp_path, TRAIN, "--report", "--policy", "asp")
    assert done.returncode == 0, done.stderr
    *_, head, first, second, _, where, one, two = done.stdout.splitlines()
    assert where == "where the time goes, by batch"
    for line, name in ((one, "worker 0"), (two, "worker 1")):
        assert line.startswith(f"{name}  6 batches of ")
        assert re.search(r"data .*%, compute .*%, wait .*%; memory \d+ MiB at most$", line)
    assert head.split()[:3] == ["worker", "applied", "late"]
    assert [row.split()[:2] for row in (first, second)] == [["0", "6"], ["1", "6"]]
    assert "asp: 12 updates in" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_stalled_worker_explains_its_wait_and_then_names_the_guilty(tmp_path):
    options = ("--narrate-after", "0.6", "--stall-timeout", "1.5", "--grace", "0.2", "--report")
    done = run(tmp_path, STALLS, *options)
    assert done.returncode == 1
    told = done.stderr
    assert re.search(r"first the fate of batch 1 did not come.* worker 1 \('worker-1'", done.stdout)
    assert re.search(r"\[worker 0\] waiting for the fate of batch 1: .*'worker-1'", told)
    assert "[worker 0] waiting for the next batch for" in told
    assert "WaitTimeout: the next batch did not come within 1." in told
    assert "worker-1" in told.rpartition("WaitTimeout")[2]
    # Who was ended by a signal has left nothing, and that is said.
    assert "note: worker 1 has left no figures" in done.stdout
