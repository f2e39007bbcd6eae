"""Prefetch, just-in-time values, codecs, policies, samples and local rounds, two at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import cluster
from worker_threads import on_threads, trained

import zkv
from zkv.errors import Refused

BATCHES, RATE = 10, 0.1
SGD = f"sgd:lr={RATE}"
ONCE_DELAYED = [0, *range(BATCHES - 1)]
"""The versions that batches compute on: each is older by one than it could be."""


def prefetched(*bodies: Callable[[Any], Any], servers: int = 1, **options: Any) -> list[Any]:
    async def run() -> list[Any]:
        async with cluster(servers, **options) as made:
            return await on_threads(made, *bodies, prefetch=1)

    return asyncio.run(run())


# --- prefetch ------------------------------------------------------------------------------------


def delayed() -> list[float]:
    """The losses of one process whose gradients are of the parameters before the last update."""
    from torch_models import data, mlp, nn, torch

    model = mlp()
    versions = [[one.detach().clone() for one in model.parameters()]]
    losses = []
    for number in range(BATCHES):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), versions[-2:][0], strict=True):
                parameter.copy_(value)
        x, y = data(8, seed=number)
        model.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        both = zip(versions[-1], model.parameters(), strict=True)
        versions.append([value - RATE * parameter.grad for value, parameter in both])
    return losses


def part_of(explicit: bool, **options: Any) -> Callable[[Any], list[float]]:
    """A worker's losses on its part (five and three samples) of each batch, times its samples."""
    from torch_models import data, mlp, nn

    from zkv.torch import attach

    def body(worker: Any) -> list[float]:
        mine = slice(0, 5) if worker.rank == 0 else slice(5, 8)
        model = mlp()
        optimizer = attach(model, worker, **options)
        losses, versions = [], []
        for number in range(BATCHES):
            x, y = (one[mine] for one in data(8, seed=number))
            optimizer.zero_grad()
            if explicit:
                with optimizer.batch(weight=len(x)):
                    loss = nn.functional.mse_loss(model(x), y)
                    loss.backward()
            else:
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                assert optimizer.step(weight=len(x)) == "pending"
            losses.append(loss.item() * len(x))
            versions.append(optimizer.last.version)
        assert optimizer.last.wait() == "committed"
        assert versions == ONCE_DELAYED
        assert worker.stats()["staleness"] == {"0": 1, "1": BATCHES - 1}
        return losses

    return body


@pytest.mark.torch
@pytest.mark.parametrize("ways", [({}, {}), ({"overlap": False}, {"early": False})], ids=str)
@pytest.mark.parametrize("explicit", [True, False], ids=["blocks", "loop"])
def test_an_attached_model_learns_what_one_process_learns_one_update_late(
    explicit: bool, ways: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    pytest.importorskip("torch")
    bodies = [part_of(explicit, **way) for way in ways]
    both = prefetched(*bodies, servers=2, optimizer=SGD)
    np.testing.assert_allclose(np.sum(both, axis=0) / 8, delayed(), rtol=1e-12)


@pytest.mark.torch
def test_prefetch_with_just_in_time_values_is_refused_by_name() -> None:
    pytest.importorskip("torch")
    with pytest.raises(
        Refused, match="just in time hold none to begin on: connect with prefetch=0"
    ):
        prefetched(part_of(explicit=False, just_in_time=True), optimizer=SGD)


@pytest.mark.jax
@pytest.mark.parametrize("loop", ["blocks", "steps", "transformation"])
def test_jax_computes_on_the_values_before_the_last_update_to_the_bit(loop: str) -> None:
    jax = pytest.importorskip("jax")
    import optax

    from zkv.jax import attach

    jnp = jax.numpy
    start = np.arange(1.0, 4.0, dtype=np.float32)

    def body(worker: Any) -> list[Any]:
        optimizer = attach({"w": jnp.asarray(start)}, worker)
        computed = jax.jit(jax.grad(lambda p: 0.5 * jnp.sum(optimizer.tap(p)["w"] ** 2)))
        seen = []
        if loop == "blocks":
            for _ in range(BATCHES):
                with optimizer.batch() as batch:
                    seen.append(batch.params["w"])
                    batch.push(computed(batch.params))
            return [np.asarray(one) for one in seen]
        params = optimizer.begin()
        transformation = optimizer.transformation()
        for _ in range(BATCHES):
            seen.append(params["w"])
            if loop == "steps":
                params = optimizer.step(computed(params))
            else:
                updates, _ = transformation.update(computed(params), None, params)
                params = optax.apply_updates(params, updates)
        assert optimizer.resent == 0
        optimizer.withdraw()
        return [np.asarray(one) for one in seen]

    values = [start]
    for _ in range(BATCHES):
        values.append(values[-1] - np.float32(0.5) * values[-2:][0])
    expected = [start, *values[: BATCHES - 1]]
    for found in prefetched(body, body, optimizer="sgd:lr=0.5"):
        np.testing.assert_array_equal(found, expected)


def test_local_rounds_begin_on_the_values_of_the_round_before() -> None:
    """Each round takes what it begins on a quarter of the way to 1."""

    def body(worker: Any) -> None:
        worker.init({"w": np.zeros(2)})
        versions = []
        with worker.local(h=2) as local:
            for number in range(2 * BATCHES):
                with local.batch(weight=4) as batch:
                    batch.params["w"] += 0.125 * (1 - start_of(local, batch))
                if number % 2:
                    versions.append(local.last.version)
        assert local.last.wait() == "committed"
        assert versions == ONCE_DELAYED
        values = [0.0]
        for _ in range(BATCHES):
            values.append(values[-1] + 0.25 * (1 - values[-2:][0]))
        np.testing.assert_allclose(worker.pull("w"), values[-1], rtol=1e-12)

    starts: dict[int, Any] = {}

    def start_of(local: Any, batch: Any) -> Any:
        return starts.setdefault(
            (threading.get_ident(), local.last.number), batch.params["w"].copy()
        )

    prefetched(body, body, optimizer="sgd:lr=1")


@pytest.mark.parametrize("policy", ["bsp", "asp", "k-bsp:1"])
@pytest.mark.parametrize("local", [False, True], ids=["batches", "rounds"])
def test_each_sample_counts_once_per_pass(policy: str, local: bool) -> None:
    n, passes = 22, 2

    def body(worker: Any) -> None:
        worker.init({"w": np.zeros(n)}, reduce="sum", rule="sgd:lr=1")
        data = zkv.data.shard(n, seed=1, size=4, passes=passes)
        if local:
            with worker.local(h=2) as rounds:
                for batch in rounds.batches(data):
                    with batch:
                        batch.params["w"][batch.samples] -= 1
            return
        for batch in worker.batches(data):
            with batch:
                hot = np.zeros(n)
                hot[batch.samples] = 1
                batch.push("w", hot)

    async def run() -> Any:
        async with cluster(1, policy_text=policy) as made:
            await on_threads(made, body, body, prefetch=1)
            async with made.worker(observer=True) as observer:
                return await observer.pull("w")

    assert asyncio.run(run()).tolist() == [-float(passes)] * n


# --- with codecs ---------------------------------------------------------------------------------

WIDE = (6, 200, 200, 3)
CODECS = {"codec": "int8+ef", "codec_down": "int8"}


def wide(worker: Any, batches: int = 8, **options: Any) -> dict[str, Any]:
    """Train something of which codecs take blocks; return what the servers have."""
    from torch_models import data, mlp, nn, torch

    from zkv.torch import attach

    model = mlp(dtype=torch.float32, sizes=WIDE)
    optimizer = attach(model, worker, **options)
    for number in range(batches):
        x, y = (one.float() for one in data(4, seed=2 * number + worker.rank))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    optimizer.last.wait()
    outcomes = worker.stats()["outcomes"]
    assert sum(outcomes.values()) == batches
    assert outcomes["discarded"] == 0
    return dict(worker.evaluate().params)


@pytest.mark.torch
def test_codecs_both_ways_cut_off_little_of_a_prefetched_run() -> None:
    pytest.importorskip("torch")
    exact = prefetched(wide, wide, optimizer=SGD)[0]
    given = prefetched(wide, wide, optimizer=SGD, **CODECS)
    for key, value in exact.items():
        np.testing.assert_array_equal(given[0][key], given[1][key])
        np.testing.assert_allclose(given[0][key], value, atol=2e-3)
    assert any((given[0][key] != value).any() for key, value in exact.items())


@pytest.mark.torch
@pytest.mark.parametrize("policy", ["bsp", "asp", "k-bsp:1", "k-batch-bsp:1", "ssp:1"])
def test_just_in_time_values_with_codecs_under_policies_that_cancel_or_do_not_wait(
    policy: str,
) -> None:
    pytest.importorskip("torch")

    def body(worker: Any) -> dict[str, Any]:
        return wide(worker, just_in_time=True)

    given = trained(body, body, policy_text=policy, optimizer=SGD, **CODECS)
    assert all(np.isfinite(value).all() for one in given for value in one.values())
    if policy == "bsp":
        # Such workers are sent what the others' deltas lead to.
        ordinary = trained(wide, wide, optimizer=SGD, **CODECS)
        for key, value in ordinary[0].items():
            np.testing.assert_array_equal(given[0][key], value)


@pytest.mark.torch
def test_buffers_of_a_just_in_time_model_are_those_of_an_ordinary_one() -> None:
    pytest.importorskip("torch")
    from torch_models import nn, seeded, torch

    from zkv.torch import attach

    def body(just_in_time: bool) -> Callable[[Any], Any]:
        def run(worker: Any) -> Any:
            with seeded(0):
                model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
            optimizer = attach(model, worker, just_in_time=just_in_time)
            for number in range(6):
                chance = torch.Generator().manual_seed(2 * number + worker.rank)
                optimizer.zero_grad()
                model(torch.randn(6, 2, generator=chance)).square().mean().backward()
                optimizer.step()
                optimizer.sync_buffers()
            optimizer.last.wait()
            model.eval()
            worker.barrier()
            if not just_in_time:
                optimizer.pull()
            with torch.no_grad():
                out = model(torch.ones(4, 2))
            return [one.tolist() for one in (*model.buffers(), out)]

        return run

    found = trained(body(True), body(True), optimizer=SGD)
    assert found[0] == found[1]
    assert found == trained(body(False), body(False), optimizer=SGD)
