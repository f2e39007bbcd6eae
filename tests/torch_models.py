"""PyTorch models for tests, and blocking workers that train them, each on a thread of its own.

It knows the attached face and the harness; it must not know messages or machines.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from harness import Cluster

import zkv
from zkv.dtypes import Array

torch = pytest.importorskip("torch")
nn = torch.nn


_drawing = threading.Lock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw a model's parameters inside: PyTorch's chance is one for all threads."""
    with _drawing:
        torch.manual_seed(seed)
        yield


def mlp(seed: int = 0, dtype: Any = None, sizes: tuple[int, ...] = (6, 8, 3)) -> Any:
    """A perceptron, the same for the same seed."""
    layers: list[Any] = []
    with seeded(seed):
        for n_in, n_out in pairwise(sizes):
            layers += [nn.Linear(n_in, n_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(torch.float64 if dtype is None else dtype)


def data(count: int, seed: int = 1) -> tuple[Any, Any]:
    """Inputs (count, 6) and targets (count, 3), float64."""
    chance = np.random.default_rng(seed)
    x = chance.standard_normal((count, 6))
    y = np.sin(x[:, :3]) + 0.1 * chance.standard_normal((count, 3))
    return torch.from_numpy(x), torch.from_numpy(y)


def values(model: Any) -> dict[str, Array]:
    """Copies of a model's parameters."""
    return {key: one.detach().float().numpy().copy() for key, one in model.named_parameters()}


@contextmanager
def worker_of(made: Cluster, rank: int = 0, world: int = 1, **options: Any) -> Iterator[Any]:
    options.setdefault("wait_timeout_s", 15.0)
    with zkv.connect(made.address, rank=rank, world=world, **options) as worker:
        yield worker


async def on_threads(made: Cluster, *bodies: Callable[[Any], Any], **options: Any) -> list[Any]:
    """Run each body with a worker of its own, ranks 0, 1, ...; return their results."""

    def one(rank: int, body: Callable[[Any], Any]) -> Any:
        with worker_of(made, rank, len(bodies), **options) as worker:
            return body(worker)

    threads = (asyncio.to_thread(one, rank, body) for rank, body in enumerate(bodies))
    return list(await asyncio.gather(*threads))
