"""Ray: parameter servers and workers are actors, and arrays go through its object store."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import ray
import task

STORE_BYTES = 2 * 2**30


@ray.remote(num_cpus=0)
class Server:
    """Sums a round's gradients; everybody's call ends when the last one's are in."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.sums: list[Any] = []
        self.count = 0
        self.done: asyncio.Future[Any] | None = None

    async def push(self, tensors: list[Any]) -> Any:
        """Add a worker's tensors; return where the sums are, in a list so that it travels as is."""
        if self.done is None:
            self.done = asyncio.get_running_loop().create_future()
        done = self.done
        if self.count:
            for mine, one in zip(self.sums, tensors, strict=True):
                np.add(mine, one, out=mine)
        else:
            self.sums = [np.array(one) for one in tensors]
        self.count += 1
        if self.count == self.workers:
            done.set_result(ray.put(self.sums))
            self.count, self.done = 0, None
        return [await done]


@ray.remote(num_cpus=0)
class Worker:
    """Sends gradients that are there already."""

    def run(self, text: str, rank: int, servers: list[Any]) -> task.Told:
        """Do a worker's part of a case."""
        case = task.Case(**task.json.loads(text))
        given = task.gradients(task.sizes(case.tensors), rank)
        results = [np.empty_like(one) for one in given]
        owned = [list(range(len(given)))[at :: len(servers)] for at in range(len(servers))]
        owned = [one for one in owned if one]

        def once() -> None:
            pending = [
                server.push.remote(ray.put([given[number] for number in numbers]))
                for server, numbers in zip(servers, owned)
            ]
            for one, numbers in zip(pending, owned):
                (where,) = ray.get(one)
                for number, summed in zip(numbers, ray.get(where)):
                    np.copyto(results[number], summed)

        told = task.timed(case, rank, once, lambda: task.check(results, case))
        return {"version": ray.__version__, **told}


def drive(case: task.Case) -> list[task.Told]:
    """Start Ray on this machine, and the actors."""
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.path.dirname(__file__)})
    ray.init(
        address="local",
        num_cpus=case.workers + case.servers,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        log_to_driver=False,
        logging_level="error",
        _node_ip_address="127.0.0.1",
    )
    try:
        servers = [Server.remote(case.workers) for _ in range(case.servers)]
        workers = [Worker.remote() for _ in range(case.workers)]
        pending = [
            worker.run.remote(case.text(), rank, servers) for rank, worker in enumerate(workers)
        ]
        told: list[task.Told] = ray.get(pending, timeout=task.PATIENCE_S)
    finally:
        ray.shutdown()
    return told


if __name__ == "__main__":
    task.main(drive)
