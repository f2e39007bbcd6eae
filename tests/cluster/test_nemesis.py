"""Real processes on machines of their own, killed, stopped, cut off and slowed down as a seed says:
no acknowledged contribution is lost, none counts twice, and all go on when it is over.

Two runs at a time, as they wait more than they compute. `scripts/soak` does it for hours.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("machines", reason="scripts are not installed")
from nemesis import POLICIES

pytestmark = [pytest.mark.cluster, pytest.mark.netns, pytest.mark.source]

PROGRAM = Path(__file__).resolve().parents[1] / "nemesis.py"
SEED = os.environ.get("ZKV_NEMESIS_SEED", "7")
SECONDS, BROKEN_SECONDS = "8.5", "4"
AT_ONCE = 2
COPIES = ("--kill-servers", "--broker-option=--replicas", "--broker-option=1")
"""Two servers, each with copies of the other's blocks, may die in turn."""
RUN_S = 100.0
IDLE = 3
"""The exit code of a run that has moved too little."""
BROKEN = {
    "told_early": "lost: counts 0, was told committed",
    "forgets_turns": "wrong: ",
    "word_is_enough": "wrong: ",
}
"""Rules that are removed, and what has to be told then."""


@dataclass(frozen=True)
class Told:
    """What a run has printed, and its exit code."""

    code: int
    text: str


def run(*words: str) -> Told:
    """Run it; once more if it proves nothing, as where something else takes the time."""
    told = run_once(*words)
    return run_once(*words) if told.code == IDLE else told


def run_once(*words: str) -> Told:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--seed", SEED, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    return Told(done.returncode, done.stdout)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Told]]]:
    """All runs that tests ask for, under way."""
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = {
            name: pool.submit(run, "--seconds", SECONDS, "--policy", name, *COPIES)
            for name in POLICIES
            if any(one.get("policy") == name and "runs" not in one for one in asked)
        }
        found |= {
            name: pool.submit(run, "--seconds", BROKEN_SECONDS, "--policy", "asp", "--break", name)
            for name in BROKEN
            if any(one.get("rule") == name for one in asked)
        }
        yield found
        for one in found.values():
            one.cancel()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_acknowledged_is_lost_or_doubled_whoever_dies_and_whatever_is_cut(
    runs: dict[str, Future[Told]], policy: str
) -> None:
    told = runs[policy].result()
    print(told.text)
    assert told.code == 0, told.text
    assert f"{policy}, seed {SEED}: nothing wrong" in told.text


@pytest.mark.timeout(400)
@pytest.mark.parametrize("rule", BROKEN)
def test_a_zkv_without_this_rule_is_caught(runs: dict[str, Future[Told]], rule: str) -> None:
    told = runs[rule].result()
    assert told.code == 1, told.text
    assert BROKEN[rule] in told.text
    assert f"again: python tests/nemesis.py --policy asp --seconds {BROKEN_SECONDS}" in told.text
