"""A DDP group is a worker: with another one it learns what one process learns."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ddp_member import BATCHES, EACH
from harness import cluster
from processes import answer_of
from torch_models import data, mlp, nn, torch
from worker_threads import worker_of

import zkv
from zkv.errors import KeyMismatch, Lost
from zkv.torch import State, attach, comm_hook

pytestmark = pytest.mark.torch

dist = torch.distributed
MEMBER = Path(__file__).resolve().parent.parent / "ddp_member.py"
SIZE = 2


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as a group of one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def member(address: str, folder: Path, rank: int) -> dict[str, Any]:
    """Run one process of the group; return what it has printed."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(MEMBER.parent), environment["PYTHONPATH"]])
    words = [sys.executable, MEMBER, address, folder / "group", rank, SIZE]
    text = answer_of([str(one) for one in words], folder, environment, 100)
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def single(address: str) -> dict[str, Any]:
    """The second worker, which is no group: it computes the last part of each batch."""
    with zkv.connect(address, rank=1, world=2, connect_timeout_s=90) as worker:
        model = mlp()
        optimizer = attach(model, worker, weight=EACH)
        losses = []
        for number in range(BATCHES):
            x, y = (one[SIZE * EACH :] for one in data(EACH * (SIZE + 1), number))
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        optimizer.last.wait()
        optimizer.pull()
        return {"losses": losses, "params": model.state_dict()}


@pytest.mark.cluster
@pytest.mark.timeout(150)
def test_a_group_of_two_and_a_single_worker_learn_what_one_process_learns(tmp_path: Path) -> None:
    with (
        zkv.local(servers=2, workers=2, optimizer="momentum:lr=0.1,momentum=0.9") as made,
        ThreadPoolExecutor() as threads,
    ):
        address = made.address
        runs = [threads.submit(member, address, tmp_path, rank) for rank in range(SIZE)]
        runs.append(threads.submit(single, address))
        found = [one.result() for one in runs]
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for number in range(BATCHES):
        x, y = data(EACH * (SIZE + 1), number)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose(np.mean([one["losses"] for one in found], axis=0), losses, rtol=1e-9)
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
