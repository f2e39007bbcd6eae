"""One process of a DDP group that is one worker of a cluster (a program for test_torch_ddp).

Arguments: the broker, the group's store (a file), this process's rank in the group and its size.
It prints the losses of its part of each batch and the last parameters, as JSON. The worker is the
first of two; its part of each batch comes first.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext

from torch_models import data, mlp, nn, torch

import zkv
from zkv.torch import State, comm_hook

dist = torch.distributed

BATCHES = 12
EACH = 4
"""Samples of each process in each batch."""


def main() -> None:
    broker, store, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    with zkv.connect(broker, rank=0, world=2) if rank == 0 else nullcontext() as worker:
        # Several buckets, so that some are reduced while others are computed.
        ddp = nn.parallel.DistributedDataParallel(mlp(), bucket_cap_mb=0.0002)
        state = State(ddp, worker)
        ddp.register_comm_hook(state, comm_hook)
        losses = []
        for number in range(BATCHES):
            x, y = (one[rank * EACH : (rank + 1) * EACH] for one in data(EACH * (size + 1), number))
            ddp.zero_grad()
            with state.batch(weight=EACH * size):
                loss = nn.functional.mse_loss(ddp(x), y)
                loss.backward()
            losses.append(loss.item())
        if state.last is not None:
            assert state.last.wait() == "committed"
        state.pull()
        params = {key: one.tolist() for key, one in ddp.module.state_dict().items()}
        print(json.dumps({"losses": losses, "params": params}))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
