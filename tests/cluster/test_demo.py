"""The main job, as a person starts it: it learns, says what happened, and names who failed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import alive

pytest.importorskip("sklearn", reason="the demo needs scikit-learn")
pytest.importorskip("matplotlib", reason="the demo needs matplotlib")

from zkv_cli.ask import ask_status
from zkv_cli.demo import SCRIPT

pytestmark = [pytest.mark.cluster, pytest.mark.source]

SCRIPTS = SCRIPT.parent
COMMAND = [sys.executable, "-m", "zkv_cli.demo"]
PATIENCE_S = 50
UNDER_WAY = 10
"""Updates after which a run counts as under way: 450 make the whole of it."""


class Demo:
    """A demo that runs: its broker's address, and the pids of all its processes by their names."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        self.pids: dict[str, int] = {}
        self.addresses: dict[str, str] = {}

    def under_way(self) -> Demo:
        """Return once workers have made some updates."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            found = re.match(r"zkv demo: (broker|server \d+) at (tcp://\S+) \(pid (\d+)\)", line)
            if found:
                self.addresses[found[1]] = found[2]
                self.pids[found[1]] = int(found[3])
            if "training with" in line:
                break
        deadline = time.monotonic() + PATIENCE_S
        status: dict[str, Any] = {"version": 0}
        while status["version"] < UNDER_WAY:
            assert self.process.poll() is None, "".join(self.said)
            assert time.monotonic() < deadline, f"no updates come: {status}"
            status = ask_status(self.addresses["broker"], PATIENCE_S)
        self.pids |= {f"worker {w['number']}": w["pid"] for w in status["workers"]}
        return self

    def end(self) -> tuple[int, dict[str, Any], str]:
        """Wait for the end; return the exit code, the JSON object, and what standard error got."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, json.loads(out), "".join(self.said) + err

    def left(self) -> list[str]:
        """The names of the processes that are still there."""
        return [name for name, pid in self.pids.items() if alive(pid)]


@contextmanager
def demo(*arguments: str) -> Iterator[Demo]:
    process = subprocess.Popen(
        [*COMMAND, "--json", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Demo(process)
    finally:
        # Its children notice the end of their launcher by themselves.
        process.kill()
        process.communicate()


def test_it_learns_and_says_what_happened(tmp_path: Path) -> None:
    plot = tmp_path / "loss.png"
    with demo("--seed", "3", "--plot", str(plot)) as running:
        code, told, said = running.end()
    assert code == 0, said
    assert told["accuracy"] >= 0.97
    figures = {name: told[name] for name in ("policy", "route", "servers", "workers", "seed")}
    assert figures == {"policy": "bsp", "route": "direct", "servers": 2, "workers": 3, "seed": 3}
    # 1437 samples by batches of 32 for 3 workers: 15 rounds in each of 30 passes.
    assert told["updates"] == 450
    assert [worker["rank"] for worker in told["reports"]] == [0, 1, 2]
    gradient_bytes = 4 * (64 * 512 + 512 + 512 * 10 + 10)
    for worker in told["reports"]:
        assert worker["batches"] == worker["outcomes"]["committed"] == len(worker["loss"]) == 450
        assert worker["bytes_up"] >= 450 * gradient_bytes
        assert worker["bytes_down"] >= 450 * gradient_bytes
        assert worker["wait_s"] > 0
        assert worker["loss"][-1][1] < 0.1 < worker["loss"][0][1]
    assert told["bytes_up"] == sum(worker["bytes_up"] for worker in told["reports"])
    assert told["wall_s"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("victim", ["server 1", "worker 2", "broker"])
def test_who_was_killed_is_named_and_nobody_is_left(victim: str) -> None:
    with demo() as started:
        running = started.under_way()
        os.kill(running.pids[victim], signal.SIGKILL)
        code, told, said = running.end()
    assert code == 1, said
    assert set(told) == {"error"}
    assert re.match(rf"{victim} .*was ended by SIGKILL \(exit code 137\)", told["error"])
    if victim == "server 1":
        assert running.addresses[victim] in told["error"]
        # The workers were told by the broker, and say it in their own words.
        assert re.search(r"worker \d\] .*ServerLost: .*server 1\b", said)
    assert f"zkv demo: error: {told['error']}" in said
    assert running.left() == []


def test_a_server_that_hangs_is_named_and_not_those_who_miss_it() -> None:
    with demo() as started:
        running = started.under_way()
        os.kill(running.pids["server 0"], signal.SIGSTOP)
        code, told, said = running.end()
    assert code == 1, said
    assert re.match(r"server 0 .* is lost: .*nothing was heard of it", told["error"])
    assert running.addresses["server 0"] in told["error"]
    assert running.left() == []


def test_an_interrupt_ends_everything() -> None:
    with demo() as started:
        running = started.under_way()
        running.process.send_signal(signal.SIGINT)
        code, told, _ = running.end()
    assert (code, told) == (130, {"error": "ended by SIGINT"})
    assert len(running.pids) == 6
    assert running.left() == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--policy", "bps"], "k-batch-asp:K"),
        (["--optimizer", "adma"], "adma"),
        (["--route", "detour"], "detour"),
        (["--workers", "0"], "--workers"),
        (["--plot", "no/such/folder/loss.png"], "no/such/folder"),
    ],
)
def test_wrong_use_is_named_before_anything_starts(arguments: list[str], word: str) -> None:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert word in done.stderr
    assert "zkv demo: broker at" not in done.stderr
    assert done.stdout == ""


def test_help_needs_no_installation_and_has_every_option(tmp_path: Path) -> None:
    environment = {**os.environ, "ZKV_VENV": str(tmp_path / "venv"), "TERMINAL_WIDTH": "100"}
    helped = [
        subprocess.run(
            [*command, "--help"], capture_output=True, text=True, check=True, env=environment
        ).stdout
        for command in ([str(SCRIPTS / "demo")], COMMAND)
    ]
    assert not (tmp_path / "venv").exists()
    ours, its = (set(re.findall(r"--[a-z]+", text)) for text in helped)
    assert ours == its


def test_the_worker_is_read_in_one_sitting() -> None:
    lines = SCRIPT.read_text("utf-8").splitlines()
    assert len(lines) <= 70
    assert max(map(len, lines)) <= 100
