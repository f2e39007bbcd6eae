"""`zkv run --record` and `zkv replay --check`, with real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

PROGRAM = """
import numpy as np
import zkv
with zkv.connect() as worker:
    worker.init({"w": np.zeros(5, np.float32)})
    for number in range(6):
        with worker.batch() as batch:
            batch.push("w", np.full(5, number + worker.rank, np.float32))
    worker.barrier()
"""


def zkv_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("ZKV_")}
    command = [sys.executable, "-m", "zkv_cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=kept, check=False
    )


def test_a_recorded_run_replays_and_a_changed_one_does_not(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    folder = tmp_path / "life"
    ran = zkv_command(
        *("run", "-n", "2", "--servers", "2", "--policy", "bsp"),
        *("--record", str(folder), str(tmp_path / "train.py")),
    )
    assert ran.returncode == 0, ran.stderr
    told = zkv_command("replay", str(folder), "--check", "--json")
    assert told.returncode == 0, told.stderr
    lives = json.loads(told.stdout)["recordings"]
    assert sorted(life["role"] for life in lives.values()) == ["broker", "server", "server"]
    assert {life["version"] for life in lives.values() if life["role"] == "broker"} == {6}
    assert all(life["same"] for life in lives.values())

    (broker,) = folder.glob("broker-*.rec")
    whole = bytearray(broker.read_bytes())
    whole[-5] ^= 1
    broker.write_bytes(bytes(whole))
    wrong = zkv_command("replay", str(folder), "--check")
    assert wrong.returncode == 1
    assert broker.name in wrong.stderr
    assert "OTHER BITS" in wrong.stdout


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    wrong = zkv_command("replay", str(tmp_path))
    assert wrong.returncode == 1
    assert str(tmp_path) in wrong.stderr
