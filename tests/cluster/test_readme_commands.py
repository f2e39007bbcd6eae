"""The README's block of commands, line by line as written, one session on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import answer_of
from test_readme import README, blocks_of, commands_of

pytestmark = [pytest.mark.cluster, pytest.mark.source]

PATIENCE_S = 60.0


def block_that_begins(*words: str) -> str:
    """Return the README's bash block whose first command begins with these words."""
    for block in blocks_of(README.read_text("utf-8")):
        if block.words == ("bash",):
            first = next(commands_of(block.text))
            if tuple(first[: len(words)]) == words:
                return block.text
    raise AssertionError(f"README.md has no bash block that begins with {' '.join(words)}")


def started(command: list[str]) -> list[str]:
    assert command[0] == "zkv", command
    return [sys.executable, "-m", "zkv_cli", *command[1:]]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[list[list[str]], dict[str, str]]]:
    """The first command runs (`zkv up`, until it says that servers are in); the rest is given."""
    commands = list(commands_of(block_that_begins("zkv", "up")))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ZKV_")}
    # A free port, so that a cluster on the default one does not matter.
    environment["ZKV_BROKER__BIND"] = "tcp://127.0.0.1:0"
    up = subprocess.Popen(
        started(commands[0]),
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert up.stdout is not None
    try:
        address = ""
        for line in up.stdout:
            if "broker at " in line:
                address = line.rsplit("broker at ", 1)[1].split()[0]
                break
        assert address.startswith("tcp://127.0.0.1:"), "zkv up ended without naming its broker"
        yield commands[1:], environment | {"ZKV_BROKER": address}
    finally:
        up.send_signal(signal.SIGTERM)
        up.communicate(timeout=PATIENCE_S)
    assert up.returncode == 143


def program() -> str:
    """Return the README's first python block: what `train.py` may be."""
    return next(
        block.text
        for block in blocks_of(README.read_text("utf-8"))
        if block.words[:1] == ("python",)
    )


def test_the_commands_work_in_the_order_of_the_readme(running, tmp_path):
    commands, environment = running
    (tmp_path / "train.py").write_text(program())
    told: dict[str, str] = {}
    for command in commands:
        answer = answer_of(started(command), tmp_path, environment, PATIENCE_S)
        told[command[1]] = answer
    assert told.keys() == {*("run", "status", "set", "export", "rebalance", "server", "doctor")}
    assert told["run"].count("'committed': 320") == 3
    status = json.loads(told["status"])
    assert (status["version"], status["keys"]) == (320, 2)
    assert "lr" in told["set"]
    assert "imbalance" in told["rebalance"]
    # The load of server 0 before, and none after.
    assert re.search(r"^0 .* -$", told["server"], re.MULTILINE)
    assert (tmp_path / "model.safetensors").stat().st_size > 0


def test_the_simulator_and_the_calculator_answer(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ZKV_")}
    for command in commands_of(block_that_begins("zkv", "simulate")):
        answer = answer_of(started(command), tmp_path, environment, PATIENCE_S)
        assert answer
