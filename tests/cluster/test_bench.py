"""`zkv bench` as it is typed: it measures what it says, ends in time, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from processes import all_ended, launched

from zkv_cli import cluster
from zkv_cli.bench import _buffers, _tell, measured
from zkv_cli.bench_choice import Turn, Variant, variants
from zkv_cli.bench_turns import (
    NoMemory,
    Size,
    TimeOver,
    Turns,
    given_bytes,
    passes,
    settings_of,
    turn_of,
)
from zkv_cli.bench_worker import Task, wrong
from zkv_cli.children import Children, Signalled
from zkv_cli.exits import CommandFailed
from zkv_cli.settings import load

proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="sessions are read from /proc"
)
BYTES = 512 * 1024
SMALL = ("--bytes", "512KiB", "--rounds", "2")
END_S = 5.0
PATIENCE_S = 50.0


# --- whole runs ------------------------------------------------------------------------------


@pytest.mark.cluster
@pytest.mark.timeout(300)
@proc
def test_a_small_run_has_a_row_of_each_variant_and_leaves_nothing() -> None:
    """Its workers have checked the sums, or it would have failed."""
    with launched("bench", *SMALL, "--passes", "1", "--json") as one:
        assert one.end(250) == 0, one.text
        assert one.session() == []
    told = json.loads(one.text)
    assert (told["bytes"], told["workers"], told["servers"], told["rounds"]) == (BYTES, 2, 1, 2)
    assert told["passes"] == 1
    rows = told["rows"]
    shown = [
        Variant(
            row["transport"],
            0 if row["block_bytes"] == 2**20 else row["block_bytes"],
            row["io_threads"],
            row["socket_bytes"],
        )
        for row in rows
    ]
    tells_apart = len({given_bytes(one) for one in (2**20, 2**22)})
    assert shown == variants(BYTES, buffers=(2**20, 2**22)[:tells_apart])
    for row in rows:
        assert row["part"] == row["passes"] == 1
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"]
        assert row["to_default_min"] <= row["to_default"] <= row["to_default_max"]
        assert row["cpu_s_per_gb"] >= 0
        assert row["default"] == (row["verdict"] == "default")
        assert row["default"] <= (row["to_default"] == 1.0)
    assert [one["transport"] for one in told["choices"]] == ["memory", "tcp"]
    assert not any(one["differs"] for one in told["choices"])
    assert all("fewer than 4 passes" in one["words"] for one in told["choices"])
    assert {"cores", "load", "python", "system", "zeromq"} <= told["machine"].keys()


@contextmanager
def on_a_terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run `zkv bench` with a terminal as its standard error; yield it and the terminal's end."""
    near, far = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "zkv_cli", "bench", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=far,
        text=True,
        start_new_session=True,
    )
    os.close(far)
    try:
        yield process, near
    finally:
        process.kill()
        process.communicate()
        os.close(near)


def read_until(terminal: int, word: bytes) -> bytes:
    said = b""
    while word not in said:
        said += os.read(terminal, 4096)
    return said


@pytest.mark.cluster
@proc
def test_a_terminal_sees_what_is_measured_and_an_interrupt_ends_it() -> None:
    with on_a_terminal("--bytes", "512KiB", "--rounds", "10000") as (process, terminal):
        said = read_until(terminal, b"defaults")
        assert said.endswith(b"turn 1 of 40: memory, the defaults")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, out) == (130, "")
        assert read_until(terminal, b"\r\x1b[K") == b"\r\x1b[K"


@pytest.mark.cluster
@proc
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_a_signal_leaves_nothing_running(number: int, code: int) -> None:
    with launched("bench", "--bytes", "512KiB", "--rounds", "10000") as one:
        deadline = time.monotonic() + PATIENCE_S
        # Itself, a broker, a server and two workers.
        while len(pids := one.session()) < 5:
            assert time.monotonic() < deadline, one.said
            assert one.process.poll() is None, one.text
        one.process.send_signal(number)
        assert one.end() == code
        assert all_ended(pids, END_S)
        assert one.text == ""


@pytest.mark.cluster
def test_when_the_time_is_over_it_says_what_to_try() -> None:
    with launched("bench", *SMALL, "--seconds", "1") as one:
        assert one.end() == 1
    assert one.said == [
        "zkv bench: error: not one pass of 8 turns was done within 1 s: try --bytes 10MB, "
        "--rounds 2 or a larger --seconds"
    ]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bytes", "much"], "--bytes: size 'much' is none of"),
        (["--bytes", "4KiB"], "--bytes: a model of 4096 bytes: from 512KiB to 16GiB"),
        (["--workers", "0"], "--workers"),
        (["--passes", "0"], "--passes"),
        (["--seconds", "0"], "--seconds"),
        (["--block", "3"], "--block"),
    ],
)
def test_wrong_use_is_2(arguments: list[str], words: str) -> None:
    with launched("bench", *arguments) as one:
        assert one.end() == 2
    assert words in one.text
    assert "Traceback" not in one.text


@pytest.mark.cluster
@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("variant", [Variant("memory", 2**18), Variant("tcp", 2**18, 2, 2**16)])
def test_a_turn_is_over_when_all_its_processes_are(
    variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Children] = []

    class Known(Children):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr("zkv_cli.bench_turns.Children", Known)
    size = Size(elements=200_001, workers=3, servers=2, rounds=4)
    turn = Turns(size, time.monotonic() + PATIENCE_S).turn(variant)
    assert len(turn.ms) == 4
    assert min(turn.ms) > 0
    assert len(made[0].all) == 6
    assert all(child.ended.is_set() for child in made[0].all)


# --- turns -----------------------------------------------------------------------------------


def test_a_cluster_has_the_defaults_but_for_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a file nor a variable changes what is compared."""
    monkeypatch.chdir(tmp_path)
    plain = load()
    Path("zkv.toml").write_text('[broker]\npolicy = "asp"\n[server]\nshared = "0"\n', "utf-8")
    monkeypatch.setenv("ZKV_BROKER__CODEC", "int8")
    size = Size(1000, 3, 2, 1)
    made = settings_of(Variant("tcp"), size)
    changed = {"bind", "servers", "workers", "optimizer"}
    for name, value in plain.broker.model_dump(exclude=changed).items():
        assert getattr(made.broker, name) == value
    assert made.server == plain.server
    assert (made.broker.servers, made.broker.workers) == (2, 3)
    other = settings_of(Variant("tcp", 2**20, 2, 2**22), size)
    assert other.broker.block_bytes == 2**20
    for section in (other.broker, other.server):
        assert (section.io_threads, section.socket_buffer) == (2, 2**22)


def test_buffers_that_the_system_gives_no_more_of_are_measured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 1024 <= given_bytes(64 * 1024) <= 64 * 1024
    monkeypatch.setattr("zkv_cli.bench_turns.given_bytes", lambda asked: min(asked, 208 * 1024))
    left_out: list[str] = []
    assert _buffers((2**20, 2**22), left_out) == [2**20]
    assert len(left_out) == 1
    assert left_out[0].startswith("socket buffers of 4MiB: the system gives 208KiB at most")
    monkeypatch.setattr("zkv_cli.bench_turns.given_bytes", lambda asked: asked)
    assert _buffers((2**20, 2**22), left_out) == [2**20, 2**22]


def told(**changes: Any) -> dict[str, Any]:
    return {"ms": [3.0, 1.0], "cpu_s": 0.5, "transport": "memory", "wrong": 0} | changes


def test_a_turn_is_of_the_slowest_worker_and_of_all_cpus() -> None:
    both = [told(), told(ms=[2.0, 4.0], cpu_s=0.25)]
    assert turn_of(both, Variant("memory")) == Turn((3.0, 4.0), 0.75)
    assert turn_of([told(), told(cpu_s=None)], Variant("memory")).cpu_s is None


def test_a_turn_that_did_not_do_what_it_should_is_none() -> None:
    with pytest.raises(CommandFailed, match="worker 1: 7 values are not the sums"):
        turn_of([told(), told(wrong=7)], Variant("memory"))
    with pytest.raises(CommandFailed, match="worker 0 has ended without a word"):
        turn_of([{}], Variant("memory"))
    with pytest.raises(CommandFailed, match="worker 1: payloads went through memory, not sockets"):
        turn_of([told(transport="tcp: it is switched off"), told()], Variant("tcp"))
    for transport in ("tcp: no memory can be shared", "memory and tcp"):
        with pytest.raises(NoMemory, match=transport):
            turn_of([told(), told(transport=transport)], Variant("memory"))


def test_wrong_sums_are_counted() -> None:
    """After 5 updates by the mean of 1, 2 and 3."""
    task = Task("", 0, 3, 4, 2, 3, True, 1, 0, 1.0)
    assert wrong(np.full(4, -10, np.float32), task) == 0
    assert wrong(np.float32([-10, -10.01, -9, np.nan]), task) == 3
    assert wrong(np.full(5, -10, np.float32), task) == 4


class Fake(Turns):
    """Turns that take nothing: `fails` are what happens at the turns so numbered."""

    def __init__(self, fails: dict[int, Exception]) -> None:
        super().__init__(Size(1, 1, 1, 1), 0.0)
        self.ran: list[Variant] = []
        self.fails = fails

    def turn(self, variant: Variant) -> Turn:
        self.ran.append(variant)
        if len(self.ran) in self.fails:
            raise self.fails[len(self.ran)]
        return Turn((float(len(self.ran)),))


A, B, C = Variant("memory"), Variant("memory", io_threads=2), Variant("tcp")


def run(fake: Fake, why: list[str]) -> dict[Variant, list[float]]:
    found = passes(fake, [A, B, C], 2, lambda done, variant: None, why.append)
    return {one: [turn.ms[0] for turn in turns] for one, turns in found.items()}


def test_variants_take_turns() -> None:
    fake, why = Fake({}), list[str]()
    assert run(fake, why) == {A: [1.0, 4.0], B: [2.0, 5.0], C: [3.0, 6.0]}
    assert fake.ran == [A, B, C, A, B, C]
    assert why == []


def test_a_pass_that_is_not_whole_does_not_count() -> None:
    assert run(Fake({5: TimeOver()}), []) == {A: [1.0], B: [2.0], C: [3.0]}
    assert run(Fake({3: TimeOver()}), []) == {A: [], B: [], C: []}


def test_without_memory_only_sockets_are_measured() -> None:
    fake, why = Fake({1: NoMemory("tcp: none")}), list[str]()
    assert run(fake, why) == {C: [2.0, 3.0]}
    assert fake.ran == [A, C, C]
    assert why == ["tcp: none"]


class Told:
    """Stands in for `Turns`: settings that are quicker, and the turn at which the time is over."""

    ends_at = 10**9

    def __init__(self, size: Size, deadline: float) -> None:
        self.ran = 0

    def turn(self, variant: Variant) -> Turn:
        self.ran += 1
        if self.ran >= self.ends_at:
            raise TimeOver
        part = 0.8 if variant.transport == "tcp" else 1.0
        return Turn((100 * part ** len(variant.set_),), 0.1)


def test_what_is_quicker_alone_is_measured_again_in_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zkv_cli.bench_turns.Turns", Told)
    found = measured(100 * 10**6, 2, 1, passes=5, rounds=1, seconds=1.0)
    assert [row["part"] for row in found["rows"]].count(2) == 3
    memory, sockets = found["choices"]
    assert (memory["differs"], memory["commands"]) == (False, [])
    assert (sockets["io_threads"], sockets["block_bytes"]) == (2, 2**18)
    assert sockets["socket_bytes"] > 0
    assert sockets["to_default"] == pytest.approx(0.512)
    _tell(found)
    said = capsys.readouterr().out
    assert "what is quicker alone, together:" in said
    assert "\n    zkv broker --block-bytes 256KiB --io-threads 2 --socket-buffer" in said


def test_when_no_time_is_left_for_that_the_best_alone_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zkv_cli.bench_turns.given_bytes", lambda asked: asked)
    monkeypatch.setattr("zkv_cli.bench_turns.Turns", Told)
    monkeypatch.setattr(Told, "ends_at", 5 * 10 + 3 * 3)
    found = measured(100 * 10**6, 2, 1, passes=5, rounds=1, seconds=1.0)
    assert {row["part"] for row in found["rows"]} == {1}
    assert found["left_out"] == ["no time was left to try what is quicker alone together"]
    assert found["choices"][1]["to_default"] == pytest.approx(0.8)
    monkeypatch.setattr(Told, "ends_at", 10)
    with pytest.raises(CommandFailed, match="not one pass of 10 turns was done within 1 s"):
        measured(100 * 10**6, 2, 1, passes=5, rounds=1, seconds=1.0)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Turns take signals over."""
    before = [signal.getsignal(one) for one in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_turn_for_which_there_is_no_time_starts_nothing() -> None:
    with pytest.raises(TimeOver):
        Turns(Size(1, 1, 1, 1), time.monotonic() - 1).turn(C)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("when", ["before", "while it stops"])
def test_a_signal_is_heard_whenever_it_comes(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(Size(1, 1, 1, 1), time.monotonic() + PATIENCE_S)
    started = []

    def start(*given: object, **options: object) -> cluster.Cluster:
        started.append(given)
        return cluster.Cluster("", CHILD, [])

    def stop(*given: object) -> None:
        if when == "while it stops":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(cluster, "start", start)
    monkeypatch.setattr(cluster, "stop", stop)
    monkeypatch.setattr(Turns, "_worker", lambda *given: CHILD)
    monkeypatch.setattr(Turns, "_told", lambda *given: Turn((1.0,)))
    if when == "before":
        turns.events.put(Signalled(signal.SIGINT))
    with pytest.raises(CommandFailed) as caught:
        turns.turn(C)
    assert caught.value.code == 130
    assert bool(started) == (when != "before")


CHILD: Any = SimpleNamespace(pid=7)


def test_a_worker_is_told_what_is_measured() -> None:
    commands: list[Task] = []

    def start(label: str, command: list[str], environment: dict[str, str]) -> None:
        given = json.loads(command[-1])
        commands.append(Task(**given | {"pids": tuple(given["pids"])}))

    children: Any = SimpleNamespace(start=start)
    turns = Turns(Size(1000, 2, 1, 9), time.monotonic() + PATIENCE_S)
    run_of = cluster.Cluster("tcp://127.0.0.1:1", CHILD, [CHILD])
    for rank in (0, 1):
        turns._worker(children, run_of, Variant("tcp", 2**20, 2, 2**22), rank)
    turns._worker(children, run_of, A, 0)
    first, second, third = commands
    assert (first.elements, first.workers, first.rounds, first.rank) == (1000, 2, 9, 0)
    assert (first.memory, first.io_threads, first.socket_bytes) == (False, 2, 2**22)
    assert (third.memory, third.io_threads, third.socket_bytes) == (True, 1, 0)
    # One of them counts what broker and servers use.
    assert (first.pids, second.pids, second.rank) == ((7, 7), (), 1)
