"""The benchmark on limited links: its limits are those of the links, and it leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from processes import INTERRUPTIBLE, alive

bench_net: Any = pytest.importorskip("bench_net", reason="scripts are not installed")
import bench_language  # noqa: E402
import bench_runs  # noqa: E402
import machines  # noqa: E402
from peers import task  # noqa: E402

QUICK = ("--quick", "--rounds", "2", "--no-install", "--json")


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["bench_net", *arguments])
    # This process is the tests'.
    monkeypatch.setattr(bench_net, "end_in_order", lambda: None)
    try:
        return int(bench_net.main())
    except SystemExit as error:
        return int(error.code or 0)


def way(system: str, workers: int, servers: int = 0, place: str = "") -> Any:
    return bench_net.Way(1000.0, "one100", workers, system, servers, place)


@pytest.mark.parametrize(
    ("case", "times"),
    [
        (way("gloo", 2), 1.0),
        (way("gloo", 4), 1.5),
        (way("zkv", 4, 4, "own"), 1.0),
        (way("zkv", 4, 2, "own"), 2.0),
        (way("zkv", 2, 1, "own"), 2.0),
        (way("zkv", 2, 2, "workers"), 1.0),
        (way("zkv", 4, 4, "workers"), 1.5),
        # One of two workers has the server: it serves the other.
        (way("zkv", 2, 1, "workers"), 1.0),
        (way("zkv", 4, 1, "workers"), 3.0),
    ],
)
def test_the_limit_is_that_of_the_busiest_link(case: Any, times: float) -> None:
    assert bench_net.busiest(case) == times
    # 100 MB at 1 Gbit/s, of which TCP has 956 Mbit/s.
    assert bench_net.limit_ms(case) == pytest.approx(836.5 * times, rel=1e-3)


def measured(case: Any, median_ms: float) -> dict[str, Any]:
    told = [{"ms": [median_ms], "cpu_s": 0.1}] * case.workers
    row: dict[str, Any] = bench_net.row(case, [bench_runs.Run(told, 0.0)])
    return row


def test_ratios_are_to_gloo_on_the_same_links_and_to_the_limit() -> None:
    rows = bench_net.with_ratios(
        [
            measured(way("zkv", 4, 4, "own"), 1000.0),
            measured(way("zkv", 2, 2, "workers"), 900.0),
            measured(way("gloo", 4), 1300.0),
            measured(way("gloo", 2), 840.0),
        ]
    )
    assert [one["to_gloo"] for one in rows] == [0.769, 1.071, 1.0, 1.0]
    held = [(one["what"], one["ratio"], one["met"]) for one in bench_net.targets(rows)]
    assert held == [
        ("zkv, servers on own hosts, to limit", 1.196, True),
        ("zkv, servers on own hosts, to gloo", 0.769, True),
        ("zkv, servers on workers' hosts, to gloo", 1.071, False),
    ]
    text = bench_net.tables(rows)
    assert "| 1,000 | one100 | 4 | zkv | own | 1,000 |" in text


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "net.png"
    bench_net.plotted([measured(way("zkv", 2, 2, "own"), 900.0)], file)
    assert file.read_bytes().startswith(b"\x89PNG")


CURVE = [(0, 0.0, 5.0), (10, 10.0, 3.0), (20, 20.0, 2.6)]


def test_the_stated_loss_is_reached_between_two_looks() -> None:
    assert bench_language.reached_s(CURVE, 2.7) == pytest.approx(17.5)
    assert bench_language.reached_s(CURVE, 2.5) is None
    assert bench_language.reached_s(CURVE[2:], 2.7) == 20.0


def test_language_rows_are_held_against_ddp() -> None:
    base = {"curve": CURVE, "compute_ms": 20.0, "comm_ms": 140.0, "noise": 0.0}
    quick = [(step, seconds / 4, loss) for step, seconds, loss in CURVE]
    quicker = [(step, seconds / 8, loss * 1.03) for step, seconds, loss in CURVE]
    told = {
        "ddp": base,
        "int8": {"curve": quick, "noise": 0.0},
        "topk": {"curve": quicker, "noise": 0.0},
    }
    rows = bench_language.rows(told, 20.0)
    # The last reaches 2.7 at 19.466 s of 3.09 and 2.678, eight times as fast.
    assert [one["faster"] for one in rows] == [1.0, 4.0, 7.19]
    assert [one["seconds"] for one in rows[:2]] == [17.5, pytest.approx(4.375, abs=0.01)]
    assert bench_language.verdicts(rows) == [
        "communication is 7.0 times computing (wanted: 6) ok",
        "int8: 4 times DDP's speed (wanted: 3) ok",
        "int8: the final loss is +0.00 % of DDP's (wanted: 2 % allowed) ok",
        f"topk: {rows[2]['faster']:g} times DDP's speed (wanted: 5) ok",
        "topk: the final loss is +3.00 % of DDP's (wanted: 2 % allowed) MISSED",
    ]
    failed = bench_language.rows({**told, "topk": {"failed": "why"}}, 20.0)
    assert failed[2]["failed"] == "why"
    assert "to the loss" in bench_language.table(failed)


@pytest.mark.parametrize(
    "arguments",
    [("--peers", "mxnet"), ("--mbit", "0"), ("--places", "moon"), ("--what", "all")],
)
def test_wrong_use_is_2(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    assert ended(monkeypatch, *arguments) == 2


def test_without_namespaces_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: Any) -> Any:
        raise machines.NoNamespace("run this as root on Linux")

    monkeypatch.setattr(bench_net, "network", refused)
    assert ended(monkeypatch, "--what", "links", "--peers", "sockets", *QUICK) == 2
    assert "run this as root on Linux" in capsys.readouterr().err


@pytest.mark.netns
@pytest.mark.cluster
@pytest.mark.timeout(180)
@pytest.mark.torch
@pytest.mark.parametrize("peers", ["zkv", "gloo,sockets"])
def test_all_run_on_links(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], peers: str
) -> None:
    pytest.importorskip("torch")
    small = ("--what", "links", "--mbit", "500", "--sets", "one1", "--workers", "2")
    assert ended(monkeypatch, *small, "--peers", peers, *QUICK) == 0
    rows = json.loads(capsys.readouterr().out)
    found = [(one["system"], one["servers_on"], one["servers"]) for one in rows]
    assert found == [
        one
        for one in [
            ("zkv", "own", 2),
            ("zkv", "workers", 2),
            ("gloo", "-", 0),
            ("sockets", "own", 2),
            ("sockets", "workers", 2),
        ]
        if one[0] in peers
    ]
    for one in rows:
        # 1 MB at 500 Mbit/s, of which TCP has 478.
        assert one["limit_ms"] == pytest.approx(16.73, abs=0.01)
        assert one["min_ms"] <= one["median_ms"] <= one["max_ms"]
        assert one["to_limit"] == pytest.approx(one["median_ms"] / one["limit_ms"], rel=0.01)


@pytest.mark.netns
def test_cards_are_limited_at_both_ends_and_gone_afterwards() -> None:
    with machines.network(2, 7.0, bench_net.QUEUE, "reno") as places:
        for place in places:
            assert "tbf" in place.must("tc qdisc show dev card")
            assert "rate 7Mbit" in place.must("tc qdisc show dev card")
        # Who refuses a connection can be reached.
        other = machines.ADDRESS.format(2)
        code = f"import socket; print(socket.socket().connect_ex(({other!r}, 9)))"
        asked = places[0].command(sys.executable, "-c", code)
        told = subprocess.run(asked, capture_output=True, text=True, timeout=30)
        assert told.stdout.strip() == str(errno.ECONNREFUSED)
        assert {place.congestion() for place in places} == {"reno"}
    for place in places:
        with pytest.raises(machines.NoNamespace):
            place.must("true")


@pytest.mark.netns
@pytest.mark.cluster
@pytest.mark.torch
@pytest.mark.timeout(180)
def test_the_language_model_learns_all_ways(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uncompressed top-k aside, so that no kernel has to be compiled: int8 shows that zkv's part
    does what DDP's does."""
    pytest.importorskip("torch")
    monkeypatch.setattr(bench_language, "WAYS", ("ddp", "int8"))
    monkeypatch.setattr(bench_language, "FASTER", {})
    quick = ("--what", "language", "--steps", "4", "--language-mbit", "400")
    assert ended(monkeypatch, *quick, "--json") == 0
    ddp, int8 = json.loads(capsys.readouterr().out)
    assert (ddp["way"], int8["way"]) == ("ddp", "int8")
    assert ddp["compute_ms"] > 0
    assert ddp["comm_ms"] > 0
    # The same samples, rule and schedule: only rounding differs.
    assert abs(int8["to_ddp"]) < 1e-3
    assert ddp["final_loss"] < 5.6


@pytest.mark.netns
@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_neither_processes_nor_namespaces(number: signal.Signals) -> None:
    program = Path(bench_net.__file__)
    words = ["--what", "links", "--peers", "sockets", "--mbit", "50", "--sets", "one50"]
    process = subprocess.Popen(
        [
            *INTERRUPTIBLE,
            sys.executable,
            str(program),
            *words,
            "--workers",
            "2",
            "--rounds",
            "1000",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(os.environ),
    )
    below: list[int] = []
    try:
        while sum(map(is_worker, below)) < 2:
            assert process.poll() is None
            below = task.descendants(process.pid)
        # A holder of each namespace: four machines and the switch.
        assert sum(own_network(pid) for pid in below if is_holder(pid)) == 5
        process.send_signal(number)
        process.wait(timeout=30)
        left = [pid for pid in below if alive(pid)]
    finally:
        process.kill()
        process.wait()
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert left == []


def words_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_worker(pid: int) -> bool:
    return b"\0--worker\0" in words_of(pid)


def is_holder(pid: int) -> bool:
    return words_of(pid) == b"cat\0"


def own_network(pid: int) -> bool:
    return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
