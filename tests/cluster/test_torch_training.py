"""An attached PyTorch model learns what one process learns; whatever a model has travels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import cluster
from torch_models import data, mlp, nn, seeded, torch, values
from worker_threads import on_threads

from zkv.torch import attach

pytestmark = pytest.mark.torch

BATCHES = {"sgd": 200, "momentum": 60, "adam": 60, "adamw": 60}
"""By rule; DDP learns the same as one process for as many (test_torch_ddp)."""
SIZES = (5, 3)
"""Samples of each batch of the two workers."""

RULES = {
    "sgd:lr=0.1": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum:lr=0.05,momentum=0.9,weight_decay=0.01": lambda params: torch.optim.SGD(
        params, lr=0.05, momentum=0.9, weight_decay=0.01
    ),
    "adam:lr=0.01": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw:lr=0.01,weight_decay=0.1": lambda params: torch.optim.AdamW(
        params, lr=0.01, weight_decay=0.1
    ),
}


def parts(number: int) -> tuple[Any, Any]:
    """The samples of all workers in one batch."""
    return data(sum(SIZES), seed=number)


def batches_of(rule: str) -> int:
    return BATCHES[rule.partition(":")[0]]


def alone(rule: str) -> list[float]:
    """The losses of one process on the whole batches."""
    model = mlp()
    optimizer = RULES[rule](model.parameters())
    losses = []
    for number in range(batches_of(rule)):
        x, y = parts(number)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def together(worker: Any, batches: int, *, explicit: bool = False, **options: Any) -> list[float]:
    """This worker's losses on its part of each batch, times its samples."""
    model = mlp()
    optimizer = attach(model, worker, **options)
    begin = sum(SIZES[: worker.rank])
    mine = slice(begin, begin + SIZES[worker.rank])
    losses = []
    for number in range(batches):
        x, y = (one[mine] for one in parts(number))
        if explicit:
            with optimizer.batch(weight=len(x)):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
        else:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            assert optimizer.step(weight=len(x)) == "pending"
        losses.append(loss.item() * len(x))
    assert optimizer.last.wait() == "committed"
    return losses


@pytest.mark.parametrize("explicit", [False, True], ids=["loop", "blocks"])
@pytest.mark.parametrize("rule", RULES)
async def test_two_workers_learn_what_one_process_learns_from_the_whole_batches(
    rule: str, explicit: bool
) -> None:
    def body(worker: Any) -> list[float]:
        return together(worker, batches_of(rule), explicit=explicit)

    async with cluster(2, optimizer=rule) as made:
        both = await on_threads(made, body, body)
    given = np.sum(both, axis=0) / sum(SIZES)
    np.testing.assert_allclose(given, alone(rule), rtol=1e-5)


def plain_loop(worker: Any) -> dict[str, Any]:
    """The same without hooks: all values first, all gradients after the backward pass."""
    model = mlp(dtype=torch.float32, sizes=(6, 150, 150, 3))
    worker.init(model.state_dict())
    for number in range(6):
        x, y = (one.float() for one in data(4, seed=10 * number + worker.rank))
        with worker.batch(weight=4) as batch:
            model.load_state_dict({k: torch.from_numpy(v) for k, v in batch.params.items()})
            model.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            for key, one in model.named_parameters():
                batch.push(key, one.grad.numpy())
    batch.wait()
    return dict(worker.pull())


def hooked_loop(worker: Any, **options: Any) -> dict[str, Any]:
    model = mlp(dtype=torch.float32, sizes=(6, 150, 150, 3))
    optimizer = attach(model, worker, weight=4, **options)
    for number in range(6):
        x, y = (one.float() for one in data(4, seed=10 * number + worker.rank))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    optimizer.last.wait()
    optimizer.pull()
    pulled = dict(worker.pull())
    for key, value in values(model).items():
        np.testing.assert_array_equal(value, pulled[key])
    return pulled


async def test_overlapped_or_not_the_bits_are_the_same() -> None:
    found = []
    ways = [{}, {"overlap": False}, {"early": False}]
    for way in [None, *ways]:

        def body(worker: Any, way: Any = way) -> dict[str, Any]:
            return plain_loop(worker) if way is None else hooked_loop(worker, **way)

        async with cluster(2, optimizer="adam:lr=0.01") as made:
            found += await on_threads(made, body, body)
    for one in found[1:]:
        assert one.keys() == found[0].keys()
        for key, value in found[0].items():
            assert one[key].tobytes() == value.tobytes(), key


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
async def test_parameters_of_every_floating_type_are_trained(name: str) -> None:
    pytest.importorskip("ml_dtypes")
    dtype = getattr(torch, name)

    def body(worker: Any) -> None:
        model = nn.Linear(4, 4, bias=False).to(dtype)
        with torch.no_grad():
            model.weight.copy_(torch.eye(4))
        memory = model.weight.data_ptr()
        optimizer = attach(model, worker)
        for turn in range(3):
            x = torch.ones(1, 4, dtype=dtype)
            assert model(x).sum().item() == 4 - 16 * 0.25 * turn
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model.weight.data_ptr() == memory

    async with cluster(1, optimizer="sgd:lr=0.25") as made:
        await on_threads(made, body)


class Tied(nn.Module):
    """An embedding whose weight is the head's too, as a function or as a module."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.middle = nn.Linear(4, 4)
        self.head = None if functional else nn.Linear(4, 5, bias=False)
        if self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(self, x: Any) -> Any:
        hidden = torch.tanh(self.middle(self.embedding(x)))
        if self.head is None:
            return nn.functional.linear(hidden, self.embedding.weight)
        return self.head(hidden)


@pytest.mark.parametrize("functional", [False, True])
async def test_d24_tied_weights_are_one_key_with_one_gradient(functional: bool) -> None:
    def model() -> Any:
        with seeded(3):
            return Tied(functional).double()

    x = torch.arange(5)
    mine = model()
    torch_optimizer = torch.optim.SGD(mine.parameters(), lr=0.5)
    for _ in range(4):
        torch_optimizer.zero_grad()
        mine(x).square().mean().backward()
        torch_optimizer.step()

    def body(worker: Any) -> None:
        other = model()
        optimizer = attach(other, worker)
        for _ in range(4):
            optimizer.zero_grad()
            other(x).square().mean().backward()
            optimizer.step()
        optimizer.last.wait()
        optimizer.pull()
        assert sorted(worker.pull()) == ["embedding.weight", "middle.bias", "middle.weight"]
        for key, value in values(mine).items():
            np.testing.assert_allclose(values(other)[key], value, rtol=1e-6)

    async with cluster(2, optimizer="sgd:lr=0.5") as made:
        await on_threads(made, body)


async def test_frozen_parameters_and_buffers_begin_as_the_first_workers() -> None:
    def model(rank: int) -> Any:
        made = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        with torch.no_grad():
            for one in made[0].parameters():
                one.requires_grad_(False).fill_(rank + 1)
            made[1].running_mean.fill_(rank + 1)
            made[1].num_batches_tracked.fill_(rank + 5)
        made.register_buffer("mask", torch.tensor([rank == 0, True]))
        made.register_buffer("scratch", torch.full((2,), float(rank)), persistent=False)
        return made

    def body(frozen: str) -> Any:
        def run(worker: Any) -> Any:
            own = model(worker.rank)
            if worker.rank == 1:
                worker.barrier()
            optimizer = attach(own, worker, frozen=frozen, buffers="local")
            if worker.rank == 0:
                worker.barrier()
            keys = set(worker.pull())
            optimizer.detach()
            return own, keys

        return run

    for frozen, expected in (("first", 1), ("local", 2)):
        async with cluster(1) as made:
            _, (second, keys) = await on_threads(made, body(frozen), body(frozen))
        assert float(second[0].weight.detach()[0, 0]) == expected
        assert second[1].running_mean.tolist() == [1, 1, 1]
        assert int(second[1].num_batches_tracked) == 5
        assert second.mask.tolist() == [True, True]
        assert second.scratch.tolist() == [1, 1]
        assert keys == {"1.weight", "1.bias", "2.weight", "2.bias"}


async def test_strided_and_sparse_ones_travel_too() -> None:
    """A convolution in channels_last, whose memory is no run of elements; a sparse gradient."""

    def body(worker: Any) -> None:
        model = nn.ModuleDict(
            {
                "conv": nn.Conv2d(3, 4, 2, bias=False).to(memory_format=torch.channels_last),
                "embedding": nn.Embedding(4, 2, sparse=True),
            }
        )
        assert not model["conv"].weight.is_contiguous()
        first = values(model)
        optimizer = attach(model, worker)
        for turn in range(1, 3):
            optimizer.zero_grad()
            ones = torch.ones(1, 3, 2, 2).to(memory_format=torch.channels_last)
            rows = model["embedding"](torch.tensor([1, 1]))
            (model["conv"](ones).sum() + rows.sum()).backward()
            optimizer.step()
            optimizer.last.wait()
            optimizer.pull()
            moved = first["conv.weight"] - turn
            np.testing.assert_allclose(values(model)["conv.weight"], moved, rtol=1e-6)
            moved = first["embedding.weight"] - np.array([[0], [2], [0], [0]]) * turn
            np.testing.assert_allclose(values(model)["embedding.weight"], moved, rtol=1e-6)

    async with cluster(1, optimizer="sgd:lr=1") as made:
        await on_threads(made, body)
