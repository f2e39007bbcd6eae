"""A parameter server on torch.distributed.rpc: a worker sends the gradients of a server's tensors
in one call, whose answer comes when the last worker's are in."""

from __future__ import annotations

import os
import threading
from typing import Any

import task
import torch
import torch.distributed.rpc as rpc

PATIENCE_S = 200


class Sums:
    """A server's part: one round's sums, and who waits for them."""

    def __init__(self, workers: int) -> None:
        self.workers, self.lock = workers, threading.Lock()
        self.sums: list[torch.Tensor] = []
        self.waiting: list[Any] = []

    def add(self, tensors: list[torch.Tensor]) -> Any:
        """Add one worker's; return a future of the sums."""
        future: Any = torch.futures.Future()
        with self.lock:
            if self.sums:
                for mine, one in zip(self.sums, tensors, strict=True):
                    mine.add_(one)
            else:
                self.sums = tensors
            self.waiting.append(future)
            if len(self.waiting) < self.workers:
                return future
            done, waiting = self.sums, self.waiting
            self.sums, self.waiting = [], []
        for one in waiting:
            one.set_result(done)
        return future


HERE: dict[str, Sums] = {}


@rpc.functions.async_execution
def push(tensors: list[torch.Tensor]) -> Any:
    """Run on a server."""
    return HERE["sums"].add(tensors)


def joined(case: task.Case, name: str, rank: int, at: str) -> None:
    """Become a member; servers come first."""
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=at, rpc_timeout=PATIENCE_S)
    rpc.init_rpc(
        name, rank=rank, world_size=case.servers + case.workers, rpc_backend_options=options
    )


def serve(case: task.Case, index: int, at: str) -> None:
    """Sum until the workers are done."""
    HERE["sums"] = Sums(case.workers)
    joined(case, f"server{index}", index, at)
    rpc.shutdown()


def work(case: task.Case, rank: int, at: str) -> task.Told:
    """Send gradients that are there already."""
    joined(case, f"worker{rank}", case.servers + rank, at)
    given = [torch.from_numpy(one) for one in task.gradients(task.sizes(case.tensors), rank)]
    results = [torch.empty_like(one) for one in given]
    owned: list[list[int]] = [[] for _ in range(case.servers)]
    load = [0] * case.servers
    for number in sorted(range(len(given)), key=lambda one: -len(given[one])):
        server = load.index(min(load))
        load[server] += len(given[number])
        owned[server].append(number)
    owned = [one for one in owned if one]

    def once() -> None:
        pending = [
            rpc.rpc_async(f"server{server}", push, args=([given[number] for number in numbers],))
            for server, numbers in enumerate(owned)
        ]
        for one, numbers in zip(pending, owned, strict=True):
            for number, summed in zip(numbers, one.wait(), strict=True):
                results[number].copy_(summed)

    told = task.timed(case, rank, once, lambda: task.check([r.numpy() for r in results], case))
    rpc.shutdown()
    return {"version": torch.__version__, **told}


def drive(case: task.Case) -> list[task.Told]:
    """Run servers and workers."""
    at = f"tcp://127.0.0.1:{task.free_port()}"
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"})
    servers = [task.started(case, "server", index, at) for index in range(case.servers)]
    told = task.crew(case, at)
    for server in servers:
        server.communicate(timeout=PATIENCE_S)
    return told


if __name__ == "__main__":
    task.main(drive, work, serve)
