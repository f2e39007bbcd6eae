"""The benchmark against others: it measures what it says, of whom it says."""

from __future__ import annotations

import json
from typing import Any

import pytest

bench_peers: Any = pytest.importorskip("bench_peers", reason="scripts are not installed")


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["bench_peers", *arguments])
    try:
        return int(bench_peers.main())
    except SystemExit as error:
        return int(error.code or 0)


def test_a_row_is_of_the_slowest_worker_and_of_all_bytes() -> None:
    """Two runs of two workers and two rounds; a tensor of 1 KB is 256 elements, 1,000 of them."""
    runs = [
        [{"ms": [1.0, 5.0], "cpu_s": 0.5}, {"ms": [3.0, 2.0], "cpu_s": 0.25}],
        [{"ms": [4.0, 4.0], "cpu_s": 1.0}, {"ms": [4.0, 4.0], "cpu_s": 1.0}],
    ]
    row = bench_peers.row("memory", "tiny1000", 2, 3, runs)
    assert (row["system"], row["transport"], row["servers"]) == ("zkv", "memory", 3)
    assert (row["median_ms"], row["min_ms"], row["max_ms"]) == (4.0, 3.0, 5.0)
    # The median of 0.75 and 2 seconds, for 2 workers' 2 rounds of 1.024 MB.
    assert row["cpu_s_per_gb"] == pytest.approx(1.375 / (4 * 1.024e-3), abs=1e-3)


@pytest.mark.parametrize(
    "arguments",
    [("--peers", "mpi2"), ("--sets", "huge"), ("--rounds", "0"), ("--workers", "many")],
)
def test_wrong_use_is_2(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    assert ended(monkeypatch, *arguments) == 2


@pytest.mark.cluster
@pytest.mark.torch
def test_all_take_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    quick = ("--sets", "tiny1000", "--workers", "2", "--rounds", "1", "--repeat", "1", "--json")
    assert ended(monkeypatch, *quick) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(one["system"], one["transport"]) for one in rows] == [
        ("zkv", "memory"),
        ("zkv", "tcp"),
        ("gloo", "tcp"),
        ("gloo-buckets", "tcp"),
    ]
    assert all(0 < one["min_ms"] <= one["median_ms"] <= one["max_ms"] for one in rows)
    assert rows[2]["to_gloo"] == 1.0
