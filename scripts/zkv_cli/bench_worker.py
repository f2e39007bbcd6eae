"""A worker of `zkv bench`: a program that pushes gradients which are there already, and tells what
its rounds took, as one line of JSON. The servers' sums are checked at the end."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import zkv
from zkv_cli.guard import watch_lifeline

OPTIMIZER = "sgd:lr=1"
"""A round's update is the mean of the gradients."""
CLOSE = 1e-4
"""What a sum may differ by, as a part of it; one lost contribution is a hundred times more."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker does. `pids` are the processes whose CPU seconds it counts beside its own."""

    broker: str
    rank: int
    workers: int
    elements: int
    warm: int
    rounds: int
    memory: bool
    io_threads: int
    socket_bytes: int
    patience_s: float
    pids: tuple[int, ...] = ()


def cpu_of(pids: Sequence[int]) -> float | None:
    """Return the CPU seconds that processes have used; None: the system does not say."""
    spent = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        spent += int(fields[11]) + int(fields[12])
    return spent / os.sysconf("SC_CLK_TCK") if pids else 0.0


def work(task: Task) -> dict[str, Any]:
    """Return `ms` of each round that counts, `cpu_s` of them, `transport`, and `wrong`: how many
    elements of the model are not what they have to be."""
    gradients = {"w": np.full(task.elements, task.rank + 1, np.float32)}
    options: Any = {} if task.memory else {"shared_bytes": 0}
    with zkv.connect(
        task.broker,
        name=f"bench-{task.rank}",
        rank=task.rank,
        world=task.workers,
        route="direct",
        prefetch=0,
        connect_timeout_s=task.patience_s,
        wait_timeout_s=task.patience_s,
        io_threads=task.io_threads,
        socket_bytes=task.socket_bytes,
        **options,
    ) as worker:
        worker.init({"w": np.zeros(task.elements, np.float32)})

        def once() -> None:
            with worker.batch() as batch:
                _ = batch.params
                batch.push_all(gradients.items())
            if batch.wait() != "committed":
                raise SystemExit(f"worker {task.rank}: a batch was {batch.outcome}")

        for _ in range(task.warm):
            once()
        took_ms = []
        before = cpu_of(task.pids)
        own = time.process_time()
        for _ in range(task.rounds):
            began = time.perf_counter()
            once()
            took_ms.append(1e3 * (time.perf_counter() - began))
        own = time.process_time() - own
        after = cpu_of(task.pids)
        others = None if before is None or after is None else after - before
        return {
            "ms": took_ms,
            "cpu_s": None if others is None else own + others,
            "transport": worker.stats()["transport"],
            "wrong": wrong(np.asarray(worker.evaluate().params["w"]), task),
        }


def wrong(values: np.ndarray[Any, Any], task: Task) -> int:
    """Return how many values are not the updates' sum: each is the mean of 1, 2, ..., workers."""
    expected = -(task.warm + task.rounds) * (task.workers + 1) / 2
    if values.shape != (task.elements,):
        return task.elements
    return int(np.count_nonzero(~(np.abs(values - expected) <= CLOSE * abs(expected))))


def main() -> int:
    """Do what the argument says, and tell it."""
    watch_lifeline()
    given = json.loads(sys.argv[1])
    print(json.dumps(work(Task(**given | {"pids": tuple(given["pids"])}))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
