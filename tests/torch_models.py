"""PyTorch models for tests; knows nothing of workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

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


def line(value: float = 0.0) -> Any:
    """One weight and one bias: with inputs of ones, both gradients are 1 for each output."""
    model = nn.Linear(1, 1)
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(value)
    return model


def compute(model: Any, scale: float = 1.0) -> None:
    (scale * model(torch.ones(1, 1)).sum()).backward()
