"""scripts/bench_replicas measures batches with copies and without, in turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.source]

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_replicas.py"


def test_each_kind_is_measured() -> None:
    words = ("--mib", "4", "--batches", "2", "--runs", "1", "--transport", "memory", "--json")
    told = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    plain, copies = json.loads(told.stdout)
    assert [row["replicas"] for row in (plain, copies)] == [0, 1]
    assert plain["throughput"] == 1.0
    assert copies["throughput"] == plain["batch_s"] / copies["batch_s"]
    assert copies["batch_s_min"] <= copies["batch_s"]
