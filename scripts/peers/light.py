"""Many light clients of one broker: a few processes with many asyncio workers each."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import task

import zkv

KEYS, ELEMENTS = 4, 256
PROCESSES = 4


async def client(case: task.Case, rank: int, at: str, took_ms: list[float]) -> None:
    """Train a small model; the first client of a process writes down what rounds took."""
    values = {f"w{number}": np.zeros(ELEMENTS, np.float32) for number in range(KEYS)}
    gradients = {key: np.full_like(one, rank + 1) for key, one in values.items()}
    async with zkv.aio.connect(at, rank=rank, world=case.workers) as worker:
        await worker.init(values)
        for number in range(case.warm + case.rounds):
            began = time.perf_counter()
            async with worker.batch() as batch:
                _ = batch.params
                batch.push_all(gradients.items())
            if await batch.wait() != "committed":
                raise SystemExit(f"client {rank}: a batch was {batch.outcome}")
            if number >= case.warm:
                took_ms.append(1e3 * (time.perf_counter() - began))
            if number == 0:
                found = await worker.pull("w0")
                if not np.allclose(found, -(case.workers + 1) / 2):
                    raise SystemExit(f"client {rank}: {found[0]} is not the mean of all")


def work(case: task.Case, process: int, at: str) -> task.Told:
    """Be every fourth client."""
    ranks = range(process, case.workers, PROCESSES)

    async def together() -> list[list[float]]:
        taken: list[list[float]] = [[] for _ in ranks]
        jobs = [client(case, rank, at, mine) for rank, mine in zip(ranks, taken)]
        await asyncio.gather(*jobs)
        return taken

    return {"ms": asyncio.run(together())[0], "cpu_s": 0.0}


def drive(case: task.Case) -> list[Any]:
    """Run a cluster and the processes of its clients."""
    with zkv.local(servers=case.servers, policy="bsp", optimizer="sgd:lr=1") as cluster:
        count = min(PROCESSES, case.workers)
        clients = [task.started(case, "worker", at, cluster.address) for at in range(count)]
        return task.told_by(clients, "light clients")


if __name__ == "__main__":
    task.main(drive, work)
