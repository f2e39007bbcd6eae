"""What all peers do: gradients of a set of tensors are summed, and every worker has the sums.

A peer's program is started three ways: `--drive CASE` starts the rest and prints a list with what
each worker tells, `--worker CASE RANK AT` is one worker, `--server CASE INDEX AT` one server. A
case is JSON. Runs on Python 3.8 too, as one of the peers needs that, with NumPy and nothing else.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence

import numpy as np

WARM = 4
"""Rounds that do not count; at least 2."""
SETS = ("one100", "resnet50", "tiny1000")
BUCKET_BYTES = 25 * 2**20
"""Of DistributedDataParallel."""
LOOKED_AT = 1_000_000
"""Elements at a time; a multiple of the pattern."""
PATIENCE_S = 240.0
ROOT = "ZKV_BENCH_ROOT"
"""Names the process below which everything belongs to the case."""
SET_SUBREAPER, SET_PARENT_DEATH = 36, 1
"""Of prctl(2)."""
Told = Dict[str, Any]
"""What a worker tells: `ms` of each round that counts; of rank 0 `cpu_s` of all processes."""


class Case(NamedTuple):
    """One run of one peer."""

    peer: str
    tensors: str
    workers: int
    servers: int
    rounds: int
    warm: int = WARM
    worker_hosts: Sequence[Sequence[Any]] = ()
    """Of each worker its machine: its address, and the words before a command that runs there."""
    server_hosts: Sequence[Sequence[Any]] = ()

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps(self._asdict())

    def host(self, role: str, at: int) -> tuple[str, list[str]]:
        """Return the address of a worker's or a server's machine, and the words that enter it."""
        hosts = self.worker_hosts if role == "worker" else self.server_hosts
        return (hosts[at][0], list(hosts[at][1])) if hosts else ("127.0.0.1", [])


# --- the tensors -----------------------------------------------------------------------------


def resnet50() -> list[int]:
    """Return the elements of ResNet-50's 161 tensors, as `resnet50.py` has them."""
    found = [64 * 3 * 49, 64, 64]
    n_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for at in range(blocks):
            n_out = 4 * width
            for n_from, n_to, side in ((n_in, width, 1), (width, width, 3), (width, n_out, 1)):
                found += [n_from * n_to * side * side, n_to, n_to]
            if at == 0:
                found += [n_in * n_out, n_out, n_out]
            n_in = n_out
    return [*found, 1000 * n_in, 1000]


def sizes(name: str) -> list[int]:
    """Return the elements of each tensor of a set, which are float32.

    `resnet50`; `oneN`: one tensor of N MB; `kbN`: one of N KB; `tinyN`: N tensors of 1 KB.

    Raises:
        ValueError: there is no such set.
    """
    if name == "resnet50":
        return resnet50()
    prefix = name.rstrip("0123456789")
    count = int(name[len(prefix) :] or 0)
    if prefix == "one" and count:
        return [count * 250_000]
    if prefix == "kb" and count:
        return [count * 256]
    if prefix == "tiny" and count:
        return [256] * count
    raise ValueError(
        f"{name}: a set is resnet50, oneN (N MB), kbN (N KB) or tinyN (N tensors of 1 KB)"
    )


def pattern(size: int) -> Any:
    """Return what rank 0 has for a gradient: small integers, whose sums are exact."""
    return np.tile(np.arange(1, 6, dtype=np.float32), size // 5 + 1)[:size]


def gradients(given: Sequence[int], rank: int) -> list[Any]:
    """Return a worker's gradients."""
    found = [pattern(size) for size in given]
    for one in found:
        one *= np.float32(rank + 1)
    return found


def check(found: Sequence[Any], case: Case, *, mean: bool = False, sign: int = 1) -> None:
    """See that these are the sums (or means) over all workers, times `sign`.

    Raises:
        SystemExit: they are not.
    """
    factor = sign * case.workers * (case.workers + 1) / 2 / (case.workers if mean else 1)
    part = pattern(LOOKED_AT) * np.float32(factor)
    for number, (one, size) in enumerate(zip(found, sizes(case.tensors))):
        flat = np.asarray(one).reshape(-1)
        pieces = range(0, max(1, size), LOOKED_AT)
        # Piece by piece, as a second array of 2 GB may not be at hand.
        if len(flat) != size or not all(
            np.array_equal(flat[at : at + LOOKED_AT], part[: size - at]) for at in pieces
        ):
            raise SystemExit(f"{case.peer}: tensor {number} is not the sum over all workers")
    if len(found) != len(sizes(case.tensors)):
        raise SystemExit(f"{case.peer}: {len(found)} tensors came back")


def buckets(given: Sequence[int]) -> list[list[int]]:
    """Return numbers of tensors, those of one of DistributedDataParallel's buckets together."""
    found: list[list[int]] = [[]]
    filled = 0
    for number, size in enumerate(given):
        if found[-1] and filled + 4 * size > BUCKET_BYTES:
            found.append([])
            filled = 0
        found[-1].append(number)
        filled += 4 * size
    return found


# --- in a worker -----------------------------------------------------------------------------


def descendants(root: int) -> list[int]:
    """Return the processes below one, that one left out."""
    below: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                below.setdefault(parent, []).append(int(folder.name))
    return _below(below, root)


def _below(below: dict[int, list[int]], root: int) -> list[int]:
    found = []
    for one in below.get(root, []):
        found += [one, *_below(below, one)]
    return found


def cpu_of(pids: Sequence[int]) -> float:
    """Return the CPU seconds that processes have used; of those that are gone, none."""
    spent = 0.0
    for pid in pids:
        with suppress(OSError):
            # The clock that clock_getcpuclockid(3) returns.
            spent += time.clock_gettime((~pid << 3) | 2)
    return spent


def timed(case: Case, rank: int, once: Callable[[], None], checked: Callable[[], None]) -> Told:
    """Return the milliseconds of each round, and at rank 0 the CPU seconds of all processes for
    these rounds.

    `checked` is called after the first round, which does not count.
    """
    took_ms = []
    cpu_s = 0.0
    root = int(os.environ[ROOT])
    for at in range(case.warm + case.rounds):
        # Looking takes a moment, so it is done before the last round that does not count.
        if at == case.warm - 1 and rank == 0:
            cpu_s = -cpu_of(descendants(root))
        began = time.perf_counter()
        once()
        took_ms.append(1e3 * (time.perf_counter() - began))
        if at == 0:
            checked()
    if rank == 0:
        cpu_s += cpu_of(descendants(root))
    return {"ms": took_ms[case.warm :], "cpu_s": cpu_s * case.rounds / (case.rounds + 1)}


# --- in the program that drives a case -------------------------------------------------------


def started(
    case: Case,
    role: str,
    at: int,
    where: str,
    environment: Optional[dict[str, str]] = None,
    before: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Start this program as a worker or a server; `before`: words before its command."""
    _, enter = case.host(role, at)
    program = [sys.executable, sys.argv[0], f"--{role}", case.text(), str(at), where]
    return subprocess.Popen(
        [*enter, *before, *program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        universal_newlines=True,
        env={**os.environ, **(environment or {})},
    )


def told_by(processes: Sequence[subprocess.Popen[str]], who: str) -> list[Told]:
    """Wait for workers, and return what they tell, in their order.

    Raises:
        SystemExit: one of them has failed, or all took too long.
    """
    deadline = time.monotonic() + PATIENCE_S
    said = []
    for rank, one in enumerate(processes):
        try:
            said.append(one.communicate(timeout=max(0.1, deadline - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{who}: worker {rank} was not done after {PATIENCE_S:g} s") from None
        if one.returncode:
            raise SystemExit(f"{who}: worker {rank} has failed (exit code {one.returncode})")
    return [json.loads(one.splitlines()[-1]) for one in said]


def crew(case: Case, where: str, environment: Optional[dict[str, str]] = None) -> list[Told]:
    """Start all workers, and return what they tell."""
    workers = [started(case, "worker", rank, where, environment) for rank in range(case.workers)]
    return told_by(workers, case.peer)


def listening(server: subprocess.Popen[str]) -> str:
    """Return the first line that a server says: where it listens.

    Raises:
        SystemExit: it has ended instead.
    """
    assert server.stdout is not None
    line = server.stdout.readline().strip()
    if not line:
        raise SystemExit(f"a server has ended instead of listening (exit code {server.wait()})")
    return line


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody listens at now."""
    import socket

    with socket.socket() as free:
        free.bind((host, 0))
        return int(free.getsockname()[1])


def _end(signum: int, frame: Any) -> None:
    raise SystemExit(f"ended by signal {signum}")


def _adopt() -> None:
    """Become the parent of all that is started below, whoever starts it, and end with the parent
    of this process."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(SET_SUBREAPER, 1, 0, 0, 0)
        libc.prctl(SET_PARENT_DEATH, signal.SIGTERM, 0, 0, 0)


def end_all_below() -> None:
    """Kill what was started below this process, and wait for it."""
    deadline = time.monotonic() + 10
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def main(
    drive: Callable[[Case], list[Told]],
    work: Optional[Callable[[Case, int, str], Told]] = None,
    serve: Optional[Callable[[Case, int, str], None]] = None,
) -> None:
    """Be what the arguments say."""
    role, text = sys.argv[1], sys.argv[2]
    case = Case(**json.loads(text))
    if role == "--worker" and work is not None:
        print(json.dumps(work(case, int(sys.argv[3]), sys.argv[4])), flush=True)
    elif role == "--server" and serve is not None:
        serve(case, int(sys.argv[3]), sys.argv[4])
    elif role == "--drive":
        _adopt()
        signal.signal(signal.SIGTERM, _end)
        os.environ[ROOT] = str(os.getpid())
        try:
            told = drive(case)
        finally:
            end_all_below()
        print(json.dumps(told), flush=True)
    else:
        raise SystemExit(f"{role}: this peer has no such part")
