"""The sessions of docs/security.md, typed as they stand on three machines; and what the README says
of several machines is the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from test_readme import README, blocks_of

if TYPE_CHECKING:
    from machines import Machine

machines: Any = pytest.importorskip("machines", reason="scripts are not installed")
ADDRESS, network = machines.ADDRESS, machines.network
pytestmark = [pytest.mark.cluster, pytest.mark.netns, pytest.mark.source]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
PROMPT = re.compile(r"(head|node1|node2)\$ zkv (.*)")
PATIENCE_S = 40.0
PROGRAM = """
import json, os, numpy as np, zkv
with zkv.connect() as worker:
    worker.init({"w": np.zeros(3, np.float32)}, rule="sgd:lr=1")
    for _ in range(5):
        with worker.batch() as batch:
            batch.push("w", -np.ones(3, np.float32))
    batch.wait()
    print("reached", worker.pull("w").tolist(), flush=True)
"""


def sessions() -> list[list[tuple[str, list[str]]]]:
    """What is typed where, block by block."""
    found = []
    for block in blocks_of(PAGE.read_text("utf-8")):
        if block.words == ("console",):
            lines = block.text.splitlines()
            matches = [PROMPT.fullmatch(line) for line in lines]
            assert all(matches), lines
            found.append([(m[1], m[2].split()) for m in matches if m])
    return found


@dataclass
class Place:
    """A machine with a home of its own, and what is typed there."""

    machine: Machine
    home: Path
    known: dict[str, str]
    """What stands for a word of the page: keys and addresses."""
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def _words(self, words: list[str]) -> list[str]:
        text = "\0".join(words)
        for said, meant in self.known.items():
            text = re.sub(rf"\b{re.escape(said)}\b", meant, text)
        return [sys.executable, "-m", "zkv_cli", *text.split("\0")]

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: one for name, one in os.environ.items() if not name.startswith("ZKV_")}
        return kept | {"XDG_CONFIG_HOME": str(self.home), "PYTHONUNBUFFERED": "1"}

    def type(self, words: list[str]) -> str:
        """Type a command that ends, and return what it says."""
        done = subprocess.run(
            self.machine.command(*self._words(words)),
            cwd=self.home,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def start(self, words: list[str]) -> subprocess.Popen[str]:
        """Type a command that goes on."""
        process = subprocess.Popen(
            self.machine.command(*self._words(words)),
            cwd=self.home,
            env=self.environment | {"ZKV_LIFELINE": "stdin"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.running.append(process)
        return process


@contextmanager
def three_machines(folder: Path) -> Iterator[dict[str, Place]]:
    names = ("head", "node1", "node2")
    with ExitStack() as stack:
        made = stack.enter_context(network(3, 0))
        known = {"10.0.0.2": ADDRESS.format(1)}
        places = {}
        for name, one in zip(names, made, strict=True):
            home = folder / name
            home.mkdir()
            (home / "train.py").write_text(PROGRAM)
            one.must(f"ip route add default dev card src {ADDRESS.format(names.index(name) + 1)}")
            places[name] = Place(one, home, known)
        try:
            yield places
        finally:
            for place in places.values():
                for process in place.running:
                    process.kill()
                    process.communicate()


def key_in(text: str) -> str:
    found = re.search(r"public ([0-9a-f]{64})", text)
    assert found, text
    return found[1]


def until_said(process: subprocess.Popen[str], words: str) -> list[str]:
    """Read lines until one has these words; a process that ends without is the test's failure."""
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if words in line:
            return said
    raise AssertionError("".join(said))


def test_the_page_on_three_machines(tmp_path: Path) -> None:
    keys, starting, looking, revoking = sessions()
    with three_machines(tmp_path) as places:
        known = places["head"].known
        for where, words in keys:
            said = places[where].type(words)
            if words[:2] == ["keys", "new"]:
                known[{"head": "BROKER", "node1": "NODE1", "node2": "NODE2"}[where]] = key_in(said)
        assert [words[0] for _, words in starting] == ["broker", "server", "run"]
        # Workers first: the order does not matter.
        (w, run), (s, server), (b, broker) = starting[2], starting[1], starting[0]
        working = places[w].start(run)
        serving = places[s].start(server)
        head = places[b].start(broker)
        for _ in range(2):
            until_said(working, "reached [5.0, 5.0, 5.0]")
        assert working.wait(PATIENCE_S) == 0
        listed, status = (places[where].type(words) for where, words in looking)
        assert known["NODE1"] in listed
        assert "bsp" in status
        # Whoever has no keys at all is told so, and nothing is sent.
        (tmp_path / "empty").mkdir()
        stranger = Place(places["node2"].machine, tmp_path / "empty", known)
        words = ["status", "--broker", "tcp://10.0.0.2:5555"]
        done = subprocess.run(
            stranger.machine.command(*stranger._words(words)),
            env=stranger.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 2
        assert "zkv keys new worker" in done.stderr
        # A key that was revoked.
        places["node2"].home.joinpath("train.py").write_text(
            PROGRAM.replace("range(5)", "range(10**9)")
        )
        working = places[w].start(run)
        until_status(places["head"], status=looking[1][1], workers=2)
        ((where, words),) = revoking
        places[where].type(words)
        until_said(working, "its key was revoked")
        assert working.wait(PATIENCE_S) == 1
        assert serving.poll() is None
        assert head.poll() is None


def until_status(place: Place, status: list[str], workers: int) -> None:
    """Ask until so many workers are in."""
    deadline = time.monotonic() + PATIENCE_S
    while len(json.loads(place.type([*status, "--json"]))["workers"]) < workers:
        assert time.monotonic() < deadline


def test_the_readme_has_the_same_lines() -> None:
    keys, starting, *_ = sessions()
    text = README.read_text("utf-8")
    for where, words in (*keys, *starting):
        assert f"{where}$ zkv {' '.join(words)}\n" in text
