"""A DDP group is a worker: with another one it learns what one process learns."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import four_ways
import numpy as np
import pytest
from harness import cluster
from processes import answer_of
from torch_models import mlp, nn, torch
from worker_threads import worker_of

import zkv
from zkv.errors import KeyMismatch, Lost
from zkv.torch import State, comm_hook

pytestmark = pytest.mark.torch

dist = torch.distributed


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as a group of one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def of_four(folder: Path, *addresses: str) -> list[dict[str, Any]]:
    """Run the four processes; return what each has found."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    program = Path(four_ways.__file__)
    environment["PYTHONPATH"] = os.pathsep.join([str(program.parent), environment["PYTHONPATH"]])
    words = [sys.executable, program, folder, *addresses]
    answer_of([str(one) for one in words], folder, environment, 100)
    texts = [(folder / f"{rank}.json").read_text("utf-8") for rank in range(four_ways.SIZE)]
    return [json.loads(text) for text in texts]


def from_all(batches: int) -> tuple[list[float], Any]:
    """The losses of one process on the whole batches, and its model."""
    model = mlp()
    step = four_ways.optimizer_of(model).step
    return four_ways.losses_of(model, batches, slice(None), nullcontext, step), model


@pytest.mark.cluster
@pytest.mark.timeout(150)
def test_groups_with_zkv_between_them_learn_what_one_group_and_one_process_learn(
    tmp_path: Path,
) -> None:
    with (
        zkv.local(servers=2, workers=2, optimizer=four_ways.RULE) as two,
        zkv.local(servers=1, workers=3, optimizer=four_ways.RULE) as three,
    ):
        found = of_four(tmp_path, two.address, three.address)
    for way, batches in four_ways.BATCHES.items():
        losses, model = from_all(batches)
        given = np.mean([one["losses"][way] for one in found], axis=0)
        np.testing.assert_allclose(given, losses, rtol=1e-9, err_msg=way)
        assert losses[-1] < losses[0]
    for one in found:
        for key, value in model.state_dict().items():
            given = np.asarray(one["params"][key])
            np.testing.assert_allclose(given, value.numpy(), rtol=1e-9, err_msg=key)


async def test_a_group_of_one_cancels_withdraws_and_goes_on(alone: None) -> None:
    def body(address: Any) -> None:
        with worker_of(address) as worker:
            model = nn.Linear(1, 1)
            with torch.no_grad():
                for one in model.parameters():
                    one.zero_()
            ddp = nn.parallel.DistributedDataParallel(model)
            state = State(ddp, worker)
            ddp.register_comm_hook(state, comm_hook)

            def batch(then: Any = lambda: None) -> str:
                ddp.zero_grad()
                with state.batch(weight=3) as made:
                    loss = ddp(torch.ones(1, 1)).sum()
                    then()
                    loss.backward()
                return str(made.wait())

            def cancel() -> None:
                state.last._open.cancelled = True

            assert batch() == "committed"
            with pytest.raises(ZeroDivisionError):
                batch(lambda: 1 / 0)
            assert state.last.outcome == "withdrawn"
            batch(cancel)
            assert batch() == "committed"
            state.pull()
            assert model.bias.item() < -1
            loss = ddp(torch.ones(1, 1)).sum()
            with pytest.raises(RuntimeError, match=r"outside of `with state\.batch"):
                loss.backward()

    async with cluster(1, optimizer="sgd:lr=1") as made:
        await asyncio.to_thread(body, made)


async def test_what_is_no_group_is_named(alone: None) -> None:
    def body(address: Any) -> None:
        with worker_of(address) as worker:
            with pytest.raises(TypeError, match="DistributedDataParallel model, not Linear"):
                State(nn.Linear(1, 1), worker)
            ddp = nn.parallel.DistributedDataParallel(mlp())
            with pytest.raises(TypeError, match=r"worker of zkv\.connect, not str"):
                State(ddp, "tcp://127.0.0.1:1")
            with pytest.raises(ValueError, match="rank 0 of the group needs a worker"):
                State(ddp)
            worker.init({"0.bias": np.zeros(2)})
            with pytest.raises(KeyMismatch, match=r"'0\.bias'"):
                State(ddp, worker)

    async with cluster(1) as made:
        await asyncio.to_thread(body, made)


async def test_a_leader_that_fails_is_named_to_its_group(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zkv_workers import torch_ddp

    def failed(tensor: Any, **options: Any) -> None:
        tensor.zero_()

    def body(made: Any) -> None:
        with worker_of(made) as worker:
            ddp = nn.parallel.DistributedDataParallel(mlp())
            state = State(ddp, worker)
            monkeypatch.setattr(torch_ddp.dist, "broadcast", failed)
            state._worker = None  # As in another process, whose leader has said that it failed.
            with pytest.raises(Lost, match="rank 0 of this group could not begin a batch"):
                state.batch().__enter__()

    async with cluster(1) as made:
        await asyncio.to_thread(body, made)
