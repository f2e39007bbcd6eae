"""A worker process whose memory is limited, for tests: `python limited_worker.py BROKER LIMIT`.

LIMIT is in bytes, on top of what the process has when all is imported and connected. Prints the
losses as JSON. `train` may be called without a limit, too.

The limit is RLIMIT_DATA, which Linux checks for private memory of all kinds (since 4.7) and which
needs no rights, as a cgroup would.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import zkv
from zkv.torch import attach

LAYERS, WIDTH = 48, 512
MODEL_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
BATCHES = 2


class Deep(nn.Module):  # type: ignore[misc]
    """Many layers of a MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return x


def data_bytes() -> int:
    """What RLIMIT_DATA counts at present."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmData in /proc/self/status")


def warm_up(worker: Any) -> None:
    """Have all modules, and every thread before memory is limited: PyTorch's, and ZeroMQ's for
    sending without a copy. The stack of each counts."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.mse_loss(torch.tanh(model(torch.ones(2, 64))), torch.ones(2, 64)).backward()
    optimizer.step()
    worker.init({"warm": np.zeros(2**18, np.float32)}, plain=True)
    worker.pushpull("warm", np.ones(2**18, np.float32))


def limit(nbytes: int) -> None:
    """Let this process have so much memory more, and no more."""
    import resource

    most = data_bytes() + nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        torch.empty(MODEL_BYTES // 2, dtype=torch.uint8)
    except RuntimeError:
        return
    raise RuntimeError("memory is not limited")


def train(worker: Any, *, limited: bool) -> list[float]:
    """The losses; `limited`: the model is never here as a whole."""
    torch.manual_seed(0)
    if limited:
        with torch.device("meta"):
            model = Deep()
        optimizer = attach(model, worker, just_in_time=True)
    else:
        model = Deep()
        optimizer = attach(model, worker)
    losses = []
    for number in range(BATCHES):
        chance = torch.Generator().manual_seed(number)
        x, y = torch.randn(2, 4, WIDTH, generator=chance)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        assert optimizer.step(weight=4) == "pending"
        losses.append(loss.item())
    assert optimizer.last.wait() == "committed"
    return losses


def main() -> None:
    address, nbytes = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    with zkv.connect(address, wait_timeout_s=60) as worker:
        warm_up(worker)
        limit(nbytes)
        print(json.dumps(train(worker, limited=True)))


if __name__ == "__main__":
    main()
