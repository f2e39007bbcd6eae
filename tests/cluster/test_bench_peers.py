"""The benchmark against others: it measures what it says, of whom it says, and leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from processes import INTERRUPTIBLE, alive

bench_peers: Any = pytest.importorskip("bench_peers", reason="scripts are not installed")
import bench_runs  # noqa: E402
import machines  # noqa: E402
import peer_places  # noqa: E402
import peer_rows  # noqa: E402
from peers import task  # noqa: E402

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
FIELDS = {
    "system", "transport", "set", "workers", "servers", "median_ms", "min_ms", "max_ms",
    "cpu_s_per_gb",
}  # fmt: skip
QUICK = ("--rounds", "1", "--turns", "1", "--again", "0", "--no-install", "--json")


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["bench_peers", *arguments])
    # This process is the tests'.
    monkeypatch.setattr(bench_peers, "end_in_order", lambda: None)
    try:
        return int(bench_peers.main())
    except SystemExit as error:
        return int(error.code or 0)


def test_a_row_is_of_the_slowest_worker_and_of_all_bytes() -> None:
    """Two runs of two workers and two rounds; a tensor of 1 KB is 256 elements, 1,000 of them."""
    runs = [
        bench_runs.Run(
            [{"ms": [1.0, 5.0], "cpu_s": 0.5}, {"ms": [3.0, 2.0], "cpu_s": 0.25}], noise=0.3
        ),
        bench_runs.Run([{"ms": [4.0, 4.0], "cpu_s": 1.0}] * 2, noise=0.1),
    ]
    row = peer_rows.row("memory", "tiny1000", 2, 3, runs)
    assert (row["system"], row["transport"], row["servers"]) == ("zkv", "memory", 3)
    assert (row["median_ms"], row["min_ms"], row["max_ms"]) == (4.0, 3.0, 5.0)
    # The median of 0.75 and 2 seconds, for 2 workers' 2 rounds of 1.024 MB.
    assert row["cpu_s_per_gb"] == pytest.approx(1.375 / (4 * 1.024e-3), abs=1e-3)
    assert (row["noise"], row["quiet"], row["runs"]) == (0.3, False, 2)
    assert peer_rows.row("gloo", "tiny1000", 2, 3, runs)["servers"] == 0


def table(**medians: float) -> list[dict[str, Any]]:
    """Rows of ResNet-50 with 2 workers."""
    found = []
    for peer, median in medians.items():
        took = [{"ms": [median], "cpu_s": 0.1}] * 2
        name = peer.replace("_", "-")
        found.append(peer_rows.row(name, "resnet50", 2, 1, [bench_runs.Run(took, 0.0)]))
    return found


def test_ratios_are_of_medians_and_held_against_what_is_wanted() -> None:
    rows = peer_rows.with_ratios(table(memory=60, tcp=120, gloo=100, mxnet=400, broker=300))
    assert [one["to_gloo"] for one in rows] == [0.6, 1.2, 1.0, 4.0, 3.0]
    held = {one["what"]: (one["ratio"], one["met"]) for one in peer_rows.targets(rows)}
    assert held == {
        "zkv memory / gloo": (0.6, True),
        "zkv memory / mxnet": (0.15, True),
        "zkv tcp / mxnet": (0.3, True),
        "zkv broker / zkv tcp": (2.5, False),
        # 0.2 s for 2 workers' 102.2 MB.
        "zkv memory, CPU s/GB": (0.978, False),
        "zkv tcp, CPU s/GB": (0.978, False),
    }
    assert peer_rows.with_ratios(table(memory=60))[0]["to_gloo"] is None


def test_the_table_is_markdown_with_the_quickest_first() -> None:
    text = peer_rows.tables(peer_rows.with_ratios(table(gloo=100, memory=60)))
    lines = text.splitlines()
    assert lines[0] == "**resnet50, 2 workers**"
    assert lines[4].startswith("| zkv | memory | 1 | 60 |")
    assert lines[5].startswith("| gloo | tcp | 0 | 100 |")
    assert "| zkv memory / gloo | resnet50 | 2 | 0.6 | 0.65 | yes |" in lines


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "peers.png"
    peer_rows.plotted(table(gloo=100, memory=60), file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_sums_that_are_wrong_are_seen() -> None:
    case = task.Case("sockets", "tiny3", 2, 1, 1)
    right = [task.pattern(256) * 3 for _ in range(3)]
    task.check(right, case)
    task.check([one / 2 for one in right], case, mean=True)
    right[1][255] += 1
    with pytest.raises(SystemExit, match="tensor 1 is not the sum"):
        task.check(right, case)
    with pytest.raises(SystemExit, match="2 tensors came back"):
        task.check([right[0], right[2]], case)


def test_buckets_are_those_of_25_mb() -> None:
    assert task.buckets([5_000_000, 1_000_000, 1_000_000, 1, 9_000_000, 1]) == [
        [0, 1], [2, 3], [4], [5]
    ]  # fmt: skip


@pytest.mark.torch
def test_the_shapes_are_resnet_50s() -> None:
    pytest.importorskip("torch")
    from resnet50 import resnet

    assert task.sizes("resnet50") == [one.numel() for one in resnet().parameters()]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--peers", "mpi2"), "mpi2 is no peer"),
        (("--sets", "huge"), "huge: a set is"),
        (("--sets", "one0"), "one0: a set is"),
        (("--turns", "0"), "no whole number above 0"),
        (("--workers", "many"), "many"),
        (("--minutes", "0"), "0 is no number above 0"),
    ],
)
def test_wrong_use_is_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    assert ended(monkeypatch, *arguments) == 2
    assert said in capsys.readouterr().err


def test_only_what_makes_sense_is_run() -> None:
    asked = bench_peers.parsed(["--sets", "one1", "--workers", "1,2,4", "--servers", "1,2"])
    found = bench_peers.keys(asked)
    assert {key.workers for key in found if key.peer == "mpi"} == {2}
    assert {key.workers for key in found if key.peer == "gloo"} == {2, 4}
    # Without servers their number makes no difference, and Redis is one process.
    assert {key.servers for key in found if key.peer in ("mpi", "gloo", "redis")} == {1}
    assert {key.servers for key in found if key.peer == "sockets"} == {1, 2}


def test_a_missing_peer_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("ZKV_BENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert ended(monkeypatch, "--peers", "mpi,redis,mxnet", "--host-network", *QUICK) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == []
    assert "mpi: mpirun is not installed: apt-get install openmpi-bin libopenmpi-dev" in said.err
    assert "redis: redis-server is not installed: apt-get install redis-server" in said.err
    assert f"mxnet: it has no environment in {tmp_path / 'mxnet'} yet" in said.err
    with pytest.raises(peer_places.Missing, match=r"needs Python 3\.8, which is not here"):
        peer_places.interpreter("mxnet", peer_places.PEERS["mxnet"])


def test_a_foreign_folder_is_not_made_an_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ZKV_BENCH_CACHE", str(tmp_path))
    peer = peer_places.Peer("with_x.py", "tcp", environment="x", modules=("absent_module",))
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.tex").write_text("mine")
    with pytest.raises(peer_places.Missing, match="is no environment"):
        peer_places.interpreter("x", peer)
    assert (tmp_path / "x" / "thesis.tex").exists()


def test_when_the_time_is_up_the_rest_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first case is run however short the time."""
    done = bench_runs.Run([{"ms": [1.0], "cpu_s": 0.1}] * 2, 0.0)
    monkeypatch.setattr(bench_peers, "quiet_run", lambda *_: done)
    words = ("--peers", "sockets", "--sets", "tiny3,tiny4", "--workers", "2", "--minutes", "1e-9")
    assert ended(monkeypatch, *words, "--host-network", *QUICK) == 0
    said = capsys.readouterr()
    assert [one["set"] for one in json.loads(said.out)] == ["tiny3"]
    assert "left out in turn 1: tiny4 2 1 sockets" in said.err


@LINUX
@pytest.mark.cluster
@pytest.mark.timeout(180)
def test_zkv_and_plain_sockets_take_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = ("--peers", "arena,memory,tcp,broker,sockets")
    small = ("--sets", "tiny20", "--workers", "2", "--servers", "2")
    assert ended(monkeypatch, *peers, *small, *QUICK) == 0
    said = capsys.readouterr()
    rows = json.loads(said.out)
    assert [(one["system"], one["transport"], one["servers"]) for one in rows] == [
        ("zkv", "arena", 2),
        ("zkv", "memory", 2),
        ("zkv", "tcp", 2),
        ("zkv", "broker", 2),
        ("sockets", "tcp", 2),
    ]
    for one in rows:
        assert one.keys() >= FIELDS
        assert 0 < one["min_ms"] <= one["median_ms"] <= one["max_ms"]
        assert one["cpu_s_per_gb"] > 0
        assert one["where"] in said.err


@LINUX
@pytest.mark.cluster
@pytest.mark.timeout(180)
@pytest.mark.torch
@pytest.mark.parametrize(
    "others", ["gloo,gloo-buckets", "torch-rpc", "mpi,mpi-flat", "mxnet", "ray", "redis"]
)
def test_others_take_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], others: str
) -> None:
    """Of those without PyTorch, whose environments are there: none is made here."""
    pytest.importorskip("torch")
    names = others.split(",")
    small = ("--sets", "tiny20", "--workers", "2")
    assert ended(monkeypatch, "--peers", others, *small, *QUICK) == 0
    said = capsys.readouterr()
    found = [one["system"] for one in json.loads(said.out)]
    assert found == [name for name in names if f"left out: {name}:" not in said.err]
    if "torch" in peer_places.PEERS[names[0]].modules:
        assert found == names


@LINUX
@pytest.mark.cluster
def test_a_peer_that_fails_is_named_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its worker fails while its server waits; nothing of it is left."""
    whole = (bench_runs.PROGRAMS / "with_sockets.py").read_text()
    broken = whole.replace(
        "def work(", "def work(*_):\n    raise SystemExit('no luck')\n\n\ndef _w("
    )
    assert broken != whole
    (tmp_path / "broken.py").write_text(broken)
    (tmp_path / "task.py").write_text((bench_runs.PROGRAMS / "task.py").read_text())
    own = peer_places.Peer(str(tmp_path / "broken.py"), "tcp")
    monkeypatch.setitem(peer_places.PEERS, "broken", own)
    marks = recorded_marks(monkeypatch)
    small = ("--sets", "tiny3", "--workers", "2")
    assert ended(monkeypatch, "--peers", "broken,sockets", *small, *QUICK) == 1
    said = capsys.readouterr()
    assert "broken FAILED" in said.err
    assert "no luck" in said.err
    assert [one["system"] for one in json.loads(said.out)] == ["sockets"]
    assert len(marks) == 2
    assert [bench_runs.marked(mark) for mark in marks] == [[], []]


def recorded_marks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    ending = bench_runs._end

    def noted(process: Any, mark: str) -> None:
        assert bench_runs.marked(mark) or process.poll() is not None
        found.append(mark)
        ending(process, mark)

    monkeypatch.setattr(bench_runs, "_end", noted)
    return found


@LINUX
@pytest.mark.netns
@pytest.mark.cluster
def test_a_run_in_a_namespace_has_its_congestion_control_and_no_network() -> None:
    with machines.loopback() as (words, where):
        assert words[0] == "nsenter"
        told = subprocess.run([*words, "ip", "-o", "link"], capture_output=True, text=True)
        assert [line.split()[1] for line in told.stdout.splitlines()] == ["lo:"]
        used = subprocess.run(
            [*words, "cat", str(machines.CONGESTION)], capture_output=True, text=True
        )
        assert f"of its own, {used.stdout.strip()}" in where
    ended_too = subprocess.run([*words, "true"], capture_output=True)
    assert ended_too.returncode != 0


def test_without_a_namespace_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> Any:
        raise machines.NoNamespace("not allowed")

    monkeypatch.setattr(machines, "machine", refused)
    with machines.loopback() as (words, where):
        assert words == []
        assert "loopback as it is" in where
        assert "not allowed" in where


@LINUX
@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_whole(tmp_path: Path, number: signal.Signals) -> None:
    """Interrupted while workers run: none of the run's processes is left, nor is a namespace."""
    program = Path(bench_peers.__file__)
    words = ["--peers", "sockets", "--sets", "one50", "--workers", "2", "--rounds", "100000"]
    process = subprocess.Popen(
        [*INTERRUPTIBLE, sys.executable, str(program), *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ZKV_BENCH_CACHE": str(tmp_path)},
    )
    below: list[int] = []
    try:
        assert process.stderr is not None
        assert "all run in" in process.stderr.readline()
        while sum(map(worker_of_sockets, below)) < 2:
            assert process.poll() is None
            below = task.descendants(process.pid)
        process.send_signal(number)
        process.communicate(timeout=30)
        left = [pid for pid in below if alive(pid)]
    finally:
        process.kill()
        process.wait()
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert process.returncode != 0
    assert left == []


def worker_of_sockets(pid: int) -> bool:
    try:
        return b"\0--worker\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
