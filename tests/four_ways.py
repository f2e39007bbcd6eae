"""Four processes that train one model in three ways (a program for test_torch_ddp).

Arguments: a folder, the broker of a cluster of two workers and that of one of three. First the four
are one DDP group, without zkv; then two groups of two with zkv between them; then a group of two
and two workers by themselves. Each writes into the folder, as JSON, the losses of its part of each
batch, by way, and the parameters of the last way. They are forks of one process, which has imported
PyTorch once for all four.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from torch_models import data, mlp, nn, torch

import zkv
from zkv.torch import State, attach, comm_hook

dist = torch.distributed

BATCHES = {"ddp": 200, "groups": 60, "mixed": 12}
EACH = 4
"""Samples of each process in each batch."""
SIZE = 4
RULE = "momentum:lr=0.1,momentum=0.9"


def optimizer_of(model: Any) -> Any:
    """PyTorch's own, which does what RULE says."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def losses_of(
    model: Any,
    batches: int,
    part: slice,
    batch: Callable[[], AbstractContextManager[Any]],
    step: Callable[[], Any],
) -> list[float]:
    """Train on a part of each batch; return its losses."""
    losses = []
    for number in range(batches):
        x, y = (one[part] for one in data(EACH * SIZE, number))
        model.zero_grad()
        with batch():
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
        step()
        losses.append(loss.item())
    return losses


def ddp_of(group: Any = None) -> Any:
    # Several buckets, so that some are reduced while others are computed.
    return nn.parallel.DistributedDataParallel(mlp(), process_group=group, bucket_cap_mb=0.0002)


def in_group(worker: Any, group: Any, way: str, part: slice) -> tuple[list[float], Any]:
    model = ddp_of(group)
    state = State(model, worker)
    model.register_comm_hook(state, comm_hook)
    weight = EACH * state.size
    losses = losses_of(model, BATCHES[way], part, lambda: state.batch(weight), lambda: None)
    if state.last is not None:
        assert state.last.wait() == "committed"
    state.pull()
    return losses, model.module


def by_itself(worker: Any, way: str, part: slice) -> tuple[list[float], Any]:
    model = mlp()
    optimizer = attach(model, worker, weight=EACH)
    losses = losses_of(model, BATCHES[way], part, nullcontext, optimizer.step)
    assert optimizer.last.wait() == "committed"
    optimizer.pull()
    return losses, model


def member(folder: Path, rank: int, brokers: list[str]) -> None:
    store = dist.FileStore(str(folder / "store"), SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    part = slice(rank * EACH, (rank + 1) * EACH)
    ddp, found = ddp_of(), {}
    found["ddp"] = losses_of(ddp, BATCHES["ddp"], part, nullcontext, optimizer_of(ddp).step)
    leads, half = rank % 2 == 0, rank // 2
    with zkv.connect(brokers[0], rank=half, world=2) if leads else nullcontext() as worker:
        found["groups"], _ = in_group(worker, halves[half], "groups", part)
        dist.barrier()
    alone = half == 1
    number = rank - 1 if alone else 0
    with zkv.connect(brokers[1], rank=number, world=3) if rank != 1 else nullcontext() as worker:
        if alone:
            found["mixed"], model = by_itself(worker, "mixed", part)
        else:
            found["mixed"], model = in_group(worker, halves[0], "mixed", part)
        dist.barrier()
    params = {key: one.tolist() for key, one in model.state_dict().items()}
    text = json.dumps({"losses": found, "params": params})
    (folder / f"{rank}.json").write_text(text, "utf-8")
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    # DDP imports it when it is first used, which takes a second.
    import_module("torch._dynamo")
    folder, brokers = Path(sys.argv[1]), sys.argv[2:4]
    forks = multiprocessing.get_context("fork")
    runs = [forks.Process(target=member, args=(folder, rank, brokers)) for rank in range(SIZE)]
    for one in runs:
        one.start()
    for one in runs:
        one.join()
    sys.exit(max(abs(one.exitcode or 0) for one in runs))


if __name__ == "__main__":
    main()
