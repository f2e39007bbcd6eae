"""The benchmark of growth: what it fits, what it leaves out and says so, and that all run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

bench_scale: Any = pytest.importorskip("bench_scale", reason="scripts are not installed")
import bench_runs  # noqa: E402
import machines  # noqa: E402
import peer_places  # noqa: E402

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["bench_scale", *arguments])
    # This process is the tests'.
    monkeypatch.setattr(bench_scale, "end_in_order", lambda: None)
    try:
        return int(bench_scale.main())
    except SystemExit as error:
        return int(error.code or 0)


def test_the_exponent_is_that_of_the_largest_points() -> None:
    """What is the same for all points hides how small ones grow."""
    assert bench_scale.exponent([(n, 5.0 * n**2) for n in (1, 10, 100)]) == pytest.approx(2.0)
    fixed = [(n, 1000.0 + n) for n in (1, 10, 100)]
    assert bench_scale.exponent(fixed) < 0.1
    grown = [*fixed, *[(n, float(n)) for n in (10**5, 10**6, 10**7)]]
    assert bench_scale.exponent(grown) == pytest.approx(1.0)
    assert bench_scale.exponent([(10, 3.0)]) is None


def rows_of(name: str, exponent: float) -> list[dict[str, Any]]:
    done = bench_runs.Run([{"ms": [10.0, 30.0, 20.0], "cpu_s": 0.0}], 0.1)
    return [bench_scale.row(name, n, done) | {"exponent": exponent} for n in (10, 100)]


def test_more_than_linear_is_said() -> None:
    assert bench_scale.verdict("keys", rows_of("keys", 0.98)).endswith("linear or better")
    assert bench_scale.verdict("keys", rows_of("keys", 1.31)).endswith("MORE THAN LINEAR")
    # More servers may well be quicker or slower: it is shown, not judged.
    assert bench_scale.verdict("servers", rows_of("servers", 1.31)) == "cost ~ n^1.31"
    text = bench_scale.tables(rows_of("keys", 1.31))
    assert "| 10 | 20 | 10 | 30 | 2,000 | 0.1 |" in text


def test_a_servers_memory_is_held_against_what_it_holds() -> None:
    """8 MB of parameters, Adam's two arrays beside them, 2 workers, and a codec down."""
    whole = {"peak_kb": 150_000, "shared_kb": 40_000, "model_bytes": 8_000_000}
    empty = {"peak_kb": 70_000, "shared_kb": 20_000, "model_bytes": 4096}
    row = bench_scale.memory_row("adam:lr=0.001", "int8", 2, whole, empty)
    assert row["bound_mb"] == 2 * (8 + 16) + 2 * 8 + 2 * 8
    # 80,000 KB of 1,024 bytes: what is shared is memory too.
    assert row["peak_mb"] == pytest.approx(81.9, abs=0.05)
    assert row["ratio"] == pytest.approx(81.92 / 80, abs=1e-3)
    assert row["shared_mb"] == pytest.approx(41.0, abs=0.05)
    assert bench_scale.memory_row("sgd:lr=0.1", "", 2, whole, empty)["bound_mb"] == 32
    assert "| 2 | adam:lr=0.001 | int8 |" in bench_scale.tables([row])


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "scale.png"
    bench_scale.plotted([*rows_of("keys", 1.0), *rows_of("servers", 1.0)], file)
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [("--sweeps", "moons"), ("--points", "3"), ("--sweeps", "memory", "--points", "3"),
     ("--minutes", "-1"), ("--again", "-1")],
)  # fmt: skip
def test_wrong_use_is_2(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    assert ended(monkeypatch, *arguments) == 2


def no_namespace() -> Any:
    raise machines.NoNamespace("not needed here")


def test_what_does_not_fit_or_comes_too_late_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machines, "machine", no_namespace)
    done = bench_runs.Run([{"ms": [1.0], "cpu_s": 0.0}], 0.0)
    monkeypatch.setattr(bench_scale, "quiet_run", lambda *_: done)
    monkeypatch.setattr(bench_scale, "available_bytes", lambda: 10 << 20)
    assert ended(monkeypatch, "--sweeps", "size", "--points", "1,1024,2097152", "--json") == 0
    said = capsys.readouterr()
    assert [one["n"] for one in json.loads(said.out)] == [1, 1024]
    assert "left out: size 2097152: it needs 18 GB of memory" in said.err
    assert ended(monkeypatch, "--sweeps", "keys", "--minutes", "1e-9", "--json") == 0
    said = capsys.readouterr()
    assert [one["n"] for one in json.loads(said.out)] == [10]
    assert "left out: keys 100: the time is up" in said.err


def test_a_point_that_fails_ends_its_sweep_and_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machines, "machine", no_namespace)
    done = bench_runs.Run([{"ms": [1.0], "cpu_s": 0.0}], 0.0)

    def run(case: Any, *_: Any) -> Any:
        if case.tensors == "tiny100":
            raise bench_runs.Failed("no luck")
        return done

    monkeypatch.setattr(bench_scale, "quiet_run", run)
    assert ended(monkeypatch, "--sweeps", "keys,workers", "--quick", "--json") == 1
    said = capsys.readouterr()
    found = [(one["sweep"], one["n"]) for one in json.loads(said.out)]
    assert found == [("keys", 10), ("workers", 1), ("workers", 2), ("workers", 5)]
    assert "keys 100 FAILED: no luck" in said.err


@LINUX
@pytest.mark.cluster
@pytest.mark.timeout(180)
@pytest.mark.parametrize("sweep", ["keys", "workers", "size", "memory"])
def test_all_sweeps_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sweep: str
) -> None:
    points = () if sweep == "memory" else ("--points", "1,6")
    assert ended(monkeypatch, "--sweeps", sweep, "--quick", *points, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {one["sweep"] for one in rows} == {sweep}
    if sweep == "memory":
        (row,) = rows
        assert (row["n"], row["bound_mb"]) == (2, 32)
        # A server that held less than the model and a contribution would have measured nothing.
        assert row["peak_mb"] > 16
    else:
        assert [one["n"] for one in rows] == [1, 6]
        assert all(0 < one["min_ms"] <= one["median_ms"] <= one["max_ms"] for one in rows)
        assert all(one["exponent"] is not None for one in rows)


def test_the_servers_sweep_has_more_servers() -> None:
    sweep = bench_scale.SWEEPS["servers"]
    assert [sweep.case(n).servers for n in sweep.points] == [1, 2, 4, 8]
    assert [bench_scale.SWEEPS["workers"].case(n).workers for n in (1, 64)] == [1, 64]
    for one in bench_scale.SWEEPS.values():
        assert (peer_places.PROGRAMS / one.program).exists()
