"""Models of PyTorch and JAX whose run goes back to a snapshot: the error is raised once, where a
batch begins or ends, and training goes on with the values of the snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Cluster, cluster
from worker_threads import on_threads

from zkv import control as c
from zkv.errors import RolledBack
from zkv_cli.ask import TOKEN, ask

STEPS = 6


def went_back(made: Cluster) -> int:
    """Have the run go back to its only snapshot; return that one's version."""
    return int(ask(made.address, c.GoBack(TOKEN), 20.0)["version"])


def taken(made: Cluster) -> int:
    return int(ask(made.address, c.TakeSnapshot(TOKEN), 20.0)["version"])


async def run(folder: Path, body: Any) -> Any:
    options = {"snapshot_dir": str(folder), "optimizer": "momentum:lr=0.5,momentum=0.5"}
    async with cluster(2, **options) as made:
        (found,) = await on_threads(made, lambda worker: body(worker, made))
        return found


@pytest.mark.torch
@pytest.mark.one_loop
async def test_a_torch_model_gets_the_values_of_the_snapshot_and_goes_on(tmp_path: Path) -> None:
    torch_models = pytest.importorskip("torch_models")
    attach = pytest.importorskip("zkv.torch").attach

    def body(worker: Any, made: Cluster) -> tuple[Any, int]:
        model = torch_models.line()
        optimizer = attach(model, worker)
        told = 0
        optimizer.set_lr(0.25)
        done, went = 0, False
        while done < STEPS:
            try:
                optimizer.zero_grad()
                torch_models.compute(model, 0.25 * (1 + done % 3))
                if done == 4 and not went:
                    # In the middle of a batch, whose gradients are sent already.
                    went = True
                    assert went_back(made) == 2
                outcome = optimizer.step()
                assert outcome == "pending"
            except RolledBack as error:
                told += 1
                done = error.version
                continue
            optimizer.last.wait()
            done += 1
            if done == 2 and not went:
                assert taken(made) == 2
        optimizer.pull()
        return {key: value.copy() for key, value in torch_models.values(model).items()}, told

    def straight(worker: Any, made: Cluster) -> Any:
        model = torch_models.line()
        optimizer = attach(model, worker)
        optimizer.set_lr(0.25)
        for done in range(STEPS):
            optimizer.zero_grad()
            torch_models.compute(model, 0.25 * (1 + done % 3))
            optimizer.step()
            optimizer.last.wait()
        optimizer.pull()
        return {key: value.copy() for key, value in torch_models.values(model).items()}

    found, told = await run(tmp_path / "a", body)
    wanted = await run(tmp_path / "b", straight)
    assert told == 1
    for key, value in wanted.items():
        assert np.array_equal(found[key], value), key


@pytest.mark.jax
@pytest.mark.one_loop
async def test_a_jax_model_gets_the_values_of_the_snapshot_and_goes_on(tmp_path: Path) -> None:
    jax_models = pytest.importorskip("jax_models")
    attach = pytest.importorskip("zkv.jax").attach
    jax = jax_models.jax

    def trains(worker: Any, made: Cluster, *, back: bool) -> tuple[Any, int]:
        optimizer = attach(jax_models.mlp(), worker)
        computed = jax.jit(jax.value_and_grad(jax_models.loss_of(optimizer.tap)))
        told, done, went = 0, 0, not back
        while done < STEPS:
            x, y = jax_models.data(5, done)
            try:
                with optimizer.batch(weight=5) as batch:
                    _, gradients = computed(batch.params, x, y)
                    if done == 4 and not went:
                        went = True
                        assert went_back(made) == 2
                    batch.push(gradients)
            except RolledBack as error:
                told += 1
                done = error.version
                continue
            batch.wait()
            done += 1
            if done == 2 and back and not told:
                assert taken(made) == 2
        return worker.evaluate().params, told

    found, told = await run(tmp_path / "a", lambda *given: trains(*given, back=True))
    wanted, _ = await run(tmp_path / "b", lambda *given: trains(*given, back=False))
    assert told == 1
    for key, value in wanted.items():
        assert np.array_equal(found[key], value), key
