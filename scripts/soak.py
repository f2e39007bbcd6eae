"""Breaks clusters for hours, real and simulated (`scripts/soak --help`)."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("nemesis", "simulation", "mutants")
RUN_S = 60.0
"""Faults of one run of the nemesis, in seconds: its workers' contributions have room for that."""
PATIENCE_S = 240.0
IDLE = 3
MUTANTS = (
    "tests/cluster/test_simulated.py",
    "tests/cluster/test_simulated_broker.py",
    "tests/cluster/test_simulated_streaming.py",
    "tests/cluster/test_simulated_moves.py",
    "tests/cluster/test_simulated_snapshots.py",
    "tests/cluster/test_simulated_topologies.py",
    "tests/cluster/test_simulated_on_demand.py",
    "tests/cluster/test_simulated_unchanged.py",
)


@dataclass
class Found:
    """What was done and what went wrong."""

    done: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    idle: int = 0

    def count(self, what: str, number: int = 1) -> None:
        """Count something that was done."""
        self.done[what] = self.done.get(what, 0) + number

    def fails(self, text: str, again: str) -> None:
        """Note a failure, and say at once how to see it again."""
        self.failures.append(f"{text}\n  again: {again}")
        print(f"FAILED: {self.failures[-1]}", flush=True)


def nemesis(found: Found, policy: str, minutes: float, partition_s: float, seed: int) -> None:
    """Run the nemesis under a policy, again and again, with other seeds."""
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        seconds = min(RUN_S, max(10.0, until - time.monotonic()))
        cut_s = partition_s if seconds > partition_s else 0.0
        words = ["tests/nemesis.py", "--policy", policy, "--seed", str(seed)]
        words += ["--seconds", f"{seconds:g}", "--partition", f"{cut_s:g}"]
        done = _run(words)
        found.count("runs of the nemesis")
        print(done.stdout, flush=True)
        if done.returncode == IDLE:
            found.idle += 1
        elif done.returncode:
            found.fails(f"{policy}, seed {seed}", f"python {' '.join(words)}")
        seed += 1


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    try:
        return subprocess.run(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        told = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        told += f"\nnot over after {PATIENCE_S:g} s"
        return subprocess.CompletedProcess(command, 1, told)


def simulation(found: Found, policy: str, seeds: int, seed: int) -> None:
    """Run the simulated cluster under a policy: plain faults, and a broker that dies."""
    from crashing_brokers import run as crashing
    from drawn_runs import drawn
    from simcluster import simulate

    kinds: dict[str, tuple[Callable[[int], object], str]] = {
        "simulated runs": (
            lambda one: simulate(one, drawn(one, policy=policy)),
            "from drawn_runs import drawn; from simcluster import simulate; "
            "simulate({0}, drawn({0}, policy={1!r}))",
        ),
        "simulated runs whose broker dies": (
            lambda one: crashing(one, policy=policy),
            "from crashing_brokers import run; run({0}, policy={1!r})",
        ),
    }
    for name, (run, again) in kinds.items():
        began = time.monotonic()
        for one in range(seed, seed + seeds):
            try:
                run(one)
            except Exception as error:
                why = f"{name}, {policy}, seed {one}: {type(error).__name__}: {error}"[:2000]
                code = again.format(one, policy)
                found.fails(why, f'PYTHONPATH=.:codecs:workers:brokers:tests python -c "{code}"')
            found.count(name)
        took = time.monotonic() - began
        print(f"{name}, {policy}: seeds {seed} to {seed + seeds - 1} in {took:.0f} s", flush=True)


def mutants(found: Found) -> None:
    """Remove each rule that tests know of: it must be caught within 200 seeds."""
    for path in MUTANTS:
        words = ["-m", "pytest", "-q", path, "-k", "without_this_rule or mutant or caught"]
        done = subprocess.run([sys.executable, *words], cwd=ROOT, check=False)
        found.count("files of broken variants")
        # 5: none of them has one.
        if done.returncode not in (0, 5):
            found.fails(f"a variant in {path} is not caught", f"python {' '.join(words)}")


def main(arguments: list[str]) -> int:
    """Do what was asked, print what was found, and return the exit code."""
    from nemesis import POLICIES

    parser = argparse.ArgumentParser(prog="scripts/soak", add_help=False)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--partition", type=float, default=10.0)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--policy", action="append", choices=POLICIES)
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    asked = parser.parse_args(arguments)
    if asked.minutes < 0 or asked.partition < 0 or asked.seeds < 1:
        parser.error("--minutes and --partition are 0 or more, --seeds is 1 or more")
    print(f"seed {asked.seed}", flush=True)
    found = Found()
    parts, policies = asked.only or PARTS, asked.policy or POLICIES
    for policy in policies if "nemesis" in parts else ():
        nemesis(found, policy, asked.minutes, asked.partition, asked.seed)
    for policy in policies if "simulation" in parts else ():
        simulation(found, policy, asked.seeds, asked.seed)
    if "mutants" in parts:
        mutants(found)
    for name, number in found.done.items():
        print(f"{number:8} {name}")
    if found.idle:
        print(f"{found.idle:8} of them prove nothing: this machine had other things to do")
    print(f"{len(found.failures):8} failures")
    for text in found.failures:
        print(text)
    return 1 if found.failures else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
