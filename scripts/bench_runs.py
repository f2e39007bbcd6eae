"""One case of a benchmark as a tree of processes: run, watched for other work, and ended whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer_places import PROGRAMS
from peers.task import Case

PATIENCE_S = 300.0
ENDS_S = 10
NOISE_CORES = 0.2
"""Cores that other work may use during a run that counts."""
RUN = "ZKV_BENCH_RUN"
"""Marks every process of a run, whoever starts it."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Run:
    """What one run of a case told."""

    told: list[dict[str, Any]]
    """Of each worker."""
    noise: float
    """Cores that other work used meanwhile."""

    @property
    def quiet(self) -> bool:
        """Nothing else of note ran."""
        return self.noise < NOISE_CORES


class Failed(Exception):
    """A case did not come to its end; the text has its last words."""


def busy_s() -> float:
    """Return the CPU seconds of all processes of this machine."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split(None, 4)[1:4])
    return (user + nice + system) / TICKS_PER_S


def run(case: Case, program: str, python: str, enter: Sequence[str] = ()) -> Run:
    """Run a peer's program on a case; `enter`: words that make it run in a namespace.

    Raises:
        Failed: it ended with an error, or not in time. Nothing of it is left then.
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, RUN: mark, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if python != sys.executable:
        del environment["PYTHONPATH"]
    began_s, began_busy_s = time.monotonic(), busy_s()
    began_own_s = _children_s()
    process = subprocess.Popen(
        [*enter, python, str(PROGRAMS / program), "--drive", case.text()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # A Ctrl-C is this process's, which ends the run in order.
        start_new_session=True,
    )
    try:
        said, wrong = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"it was not done after {PATIENCE_S:g} s") from None
    finally:
        _end(process, mark)
    took_s = time.monotonic() - began_s
    if process.returncode:
        lines = [line for line in wrong.splitlines() if line.strip()]
        raise Failed("\n".join(lines[-12:]) or f"exit code {process.returncode}")
    other_s = busy_s() - began_busy_s - (_children_s() - began_own_s)
    return Run(json.loads(said.splitlines()[-1]), max(0.0, other_s / took_s))


def _children_s() -> float:
    """Return the CPU seconds of this process, and of those below it that have ended."""
    return sum(os.times()[:4])


def _end(process: subprocess.Popen[str], mark: str) -> None:
    """End a run's program in order, and what is left of the run however it is."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_S)
    for pid in marked(mark):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def marked(mark: str) -> list[int]:
    """Return the processes of a run."""
    sought = f"{RUN}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if sought in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
    return found


def end_in_order() -> None:
    """Make SIGTERM end this process as Ctrl-C does: what it has started ends first."""

    def ended(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, ended)


def quiet_run(
    case: Case, program: str, python: str, enter: Sequence[str] = (), again: int = 2
) -> Run:
    """Return a run without other work, or the least disturbed of as many as are allowed.

    Raises:
        Failed: as `run`.
    """
    best = run(case, program, python, enter)
    for _ in range(again):
        if best.quiet:
            break
        best = min(best, run(case, program, python, enter), key=lambda one: one.noise)
    return best
