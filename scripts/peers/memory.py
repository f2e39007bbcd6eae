"""What a server needs of memory: its peak while workers train, against what it holds.

The peer's name is the optimizer and the codec down, with a bar between them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import task

import zkv


def kilobytes(pid: int, field: str) -> int:
    """Return a figure of /proc/PID/status, in KB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0])


def work(case: task.Case, rank: int, at: str) -> task.Told:
    """Train for some rounds."""
    gradients = {
        f"w{n}": np.ones(size, np.float32) for n, size in enumerate(task.sizes(case.tensors))
    }
    with zkv.connect(at, rank=rank, world=case.workers) as worker:
        worker.init({key: np.zeros_like(one) for key, one in gradients.items()})
        for _ in range(case.warm + case.rounds):
            with worker.batch() as batch:
                _ = batch.params
                batch.push_all(gradients.items())
            if batch.wait() != "committed":
                raise SystemExit(f"worker {rank}: a batch was {batch.outcome}")
        worker.barrier()
    return {"ms": [], "cpu_s": 0.0}


def drive(case: task.Case) -> list[Any]:
    """Run a cluster and workers; tell of its only server when they are done."""
    rule, _, down = case.peer.partition("|")
    with zkv.local(servers=1, policy="bsp", optimizer=rule, codec_down=down or None) as cluster:
        pid = int(cluster.servers[0].pid)
        told = task.crew(case, cluster.address)
        peak = kilobytes(pid, "VmHWM")
        told[0].update(peak_kb=peak, shared_kb=kilobytes(pid, "RssShmem"))
        told[0]["model_bytes"] = 4 * sum(task.sizes(case.tensors))
    return told


if __name__ == "__main__":
    task.main(drive, work)
