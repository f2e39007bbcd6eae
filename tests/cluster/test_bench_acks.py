"""scripts/bench_acks counts what it repeats, and what is repeated changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.source]
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_acks.py"


def test_receipts_and_lookups_are_repeated_in_every_other_turn() -> None:
    few = ("--mib", "4", "--pairs", "4", "--batches", "2", "--json")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *few], capture_output=True, text=True, timeout=50, check=False
    )
    # Of so few batches nothing is known; 1 says that they cost too much.
    assert done.returncode in (0, 1), done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["payloads"] for row in rows] == ["tcp", "memory"]
    for row in rows:
        # A receipt for what each of two workers has sent, and for what each was sent, at least; a
        # look at each of their blocks, and at the end of each batch.
        assert row["receipts"] >= 2
        assert row["lookups"] >= 2 * (4 + 1)
        assert set(row["shares"]) == {"wall", "processor"}
