"""Settings over real sockets: rates, rules, clipping, credits, budgets, initial values."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crew import all_begun, begun, crew, end, model, ones, version, work, zeros
from harness import cluster, until

from zkv.aio import AsyncWorker
from zkv.dtypes import Array
from zkv.optimizer_spec import optimizer
from zkv_workers import signals as s

KEYS = {"a": zeros(4), "b": zeros(100_000), "c": zeros(100_000), "d": zeros()}
"""Both servers of two hold some."""


def everywhere(size: Any, value: float) -> Any:
    """Return what a key of this size is filled with."""
    return np.full_like(size, np.float32(value))


async def test_a_new_rate_reaches_every_key_on_every_server() -> None:
    """D40: 0.1, then 0.01 from a named version on; whichever worker sets it, it holds for all."""
    async with cluster(2, optimizer="sgd:lr=0.1") as made, crew(made, 2, KEYS) as workers:
        first, second = await all_begun(workers)
        for batch in (first, second):
            for key, value in KEYS.items():
                batch.push(key, np.ones_like(value))
        await end(first)
        await end(second)
        assert await first.wait() == "committed"
        assert await workers[1].set(lr=0.01) == {"lr": 1}
        after_one = await workers[0].pull()
        for key, value in KEYS.items():
            np.testing.assert_array_equal(after_one[key], everywhere(value, -0.1))
        batches = await all_begun(workers)
        for batch in batches:
            for key, value in KEYS.items():
                batch.push(key, np.ones_like(value))
            await end(batch)
        await batches[0].wait()
        after_two = await workers[0].pull()
        for key in KEYS:
            np.testing.assert_allclose(after_two[key] - after_one[key], -0.01, rtol=1e-5)


async def test_a_rate_that_nobody_waits_for_holds_for_what_is_pushed_after_it() -> None:
    """The other worker's contribution is here: each block would be made as soon as ours comes."""
    async with cluster(2, optimizer="sgd:lr=1.0") as made, crew(made, 2, KEYS) as workers:
        total = 0.0
        for turn in range(1, 9):
            mine, others = await all_begun(workers)
            for key, value in KEYS.items():
                others.push(key, np.ones_like(value))
            await end(others)
            rate, call = 1 / turn, workers[0]._driver.call
            asked = call(lambda token, rate=rate: s.Ask(token, "lr", str(rate)))
            for key, value in KEYS.items():
                mine.push(key, np.ones_like(value))
            await end(mine)
            total += rate
            assert (await asked)["version"] == turn - 1
            assert await mine.wait() == "committed"
        for key, value in (await workers[0].pull()).items():
            np.testing.assert_allclose(value, everywhere(KEYS[key], -total), rtol=1e-5)


async def test_settings_do_not_overtake_one_that_has_to_wait() -> None:
    """Each change writes all of them; the first waits for an update that is foreseen."""
    async with cluster(1, optimizer="sgd:lr=1.0") as made, crew(made, 2, KEYS) as workers:
        mine, others = await all_begun(workers)
        for key, value in KEYS.items():
            others.push(key, np.ones_like(value))
            mine.push(key, np.ones_like(value))
        await end(others)
        assert await workers[1].set(lr=0.5) == {"lr": 1}
        assert "codec" in await workers[0].set(codec="fp16")
        await end(mine)
        assert await mine.wait() == "committed"
        again = await all_begun(workers)
        for batch in again:
            for key, value in KEYS.items():
                batch.push(key, np.ones_like(value))
            await end(batch)
        assert await again[0].wait() == "committed"
        for key, value in (await workers[0].pull()).items():
            np.testing.assert_array_equal(value, everywhere(KEYS[key], -1.5))


async def test_a_new_rate_reaches_plain_keys_too() -> None:
    async with cluster(2, optimizer="sgd:lr=0.1") as made, crew(made, 1, KEYS) as workers:
        for rate, total in ((0.1, -0.1), (0.01, -0.11)):
            await workers[0].set(lr=rate)
            for key, value in KEYS.items():
                assert await workers[0].push(key, np.ones_like(value)) == "committed"
            pulled = await workers[0].pull(list(KEYS))
            for key in KEYS:
                np.testing.assert_allclose(pulled[key], total, rtol=1e-6)


async def test_a_new_rate_never_holds_for_half_an_update() -> None:
    """With clipping an update takes two log entries; the change comes before or after both."""
    text = "sgd:lr=0.5,clip_global_norm=1e6"
    async with cluster(2, optimizer=text) as made, crew(made, 1, KEYS) as workers:
        (worker,) = workers
        before = await worker.pull()
        for turn in range(8):
            async with worker.batch() as batch:
                for key, value in KEYS.items():
                    batch.push(key, np.ones_like(value))
            await worker.set(lr=1.0 if turn % 2 else 0.5)
            await batch.wait()
            after = await worker.pull()
            changes = {float(np.unique(before[key] - after[key]).item()) for key in KEYS}
            assert len(changes) == 1
            before = after


async def test_a_schedule_is_a_function_of_the_version() -> None:
    text = "sgd:lr=1,schedule=warmup:4+cosine:8"
    rates = [optimizer(text).lr_at(at) for at in range(10)]
    assert len(set(rates)) > 5
    async with cluster(2, optimizer=text) as made, crew(made, 1, KEYS) as workers:
        for rate in rates:
            async with workers[0].batch() as batch:
                before = {key: value.copy() for key, value in batch.params.items()}
                for key, value in KEYS.items():
                    batch.push(key, np.ones_like(value))
            await batch.wait()
            after = await workers[0].pull()
            for key in KEYS:
                np.testing.assert_allclose(before[key] - after[key], rate, atol=1e-6)


async def test_rate_and_weight_decay_by_pattern() -> None:
    params = {"body.weight": ones(), "body.bias": ones(), "head.weight": ones(), 7: ones()}
    text = "sgd:lr=0.5,weight_decay=0.5;*.bias:weight_decay=0;head.*:lr=0.1x;7:lr=0x"
    async with cluster(2, optimizer=text) as made, crew(made, 1, params) as workers:
        async with workers[0].batch() as batch:
            for key in params:
                batch.push(key, ones())
        await batch.wait()
        pulled = await workers[0].pull()
        expected = {"body.weight": 0.25, "body.bias": 0.5, "head.weight": 0.925, 7: 1.0}
        for key, value in expected.items():
            np.testing.assert_allclose(pulled[key], value, rtol=1e-6)


async def test_keys_may_have_rules_of_their_own() -> None:
    """One model, one version, three rules: integers are counted, statistics replaced."""
    async with cluster(2, optimizer="sgd:lr=1") as made:

        async def body(worker: AsyncWorker) -> dict[str, Array]:
            await worker.init({"w": zeros()})
            await worker.init({"slow": zeros()}, rule="sgd:lr=0.5")
            await worker.init({"seen": np.zeros(1, np.int64)}, rule="assign", reduce="sum")
            async with worker.batch(weight=1 + worker.rank) as batch:
                batch.push("w", ones())
                batch.push("slow", ones())
                batch.push("seen", np.array([10 + worker.rank]))
            await batch.wait()
            pulled: dict[str, Array] = await worker.pull()
            return pulled

        for pulled in await made.run(body, body):
            assert pulled["w"].tolist() == [-1.0] * 3
            assert pulled["slow"].tolist() == [-0.5] * 3
            assert pulled["seen"].tolist() == [21]
        assert version(made) == 1


@pytest.mark.torch
@pytest.mark.parametrize("servers", [1, 2, 4])
@pytest.mark.parametrize("bound", [0.5, 1e9])
async def test_clipping_over_all_shards_is_that_of_torch(servers: int, bound: float) -> None:
    torch = pytest.importorskip("torch")
    chance = np.random.default_rng(5)
    params = {
        key: chance.normal(size=np.shape(value)).astype(np.float32) for key, value in KEYS.items()
    }
    gradients = [
        {key: chance.normal(size=np.shape(v)).astype(np.float32) for key, v in KEYS.items()}
        for _ in range(3)
    ]
    ours = {key: torch.nn.Parameter(torch.tensor(value)) for key, value in params.items()}
    sgd = torch.optim.SGD(ours.values(), lr=0.1, momentum=0.9)
    text = f"momentum:lr=0.1,momentum=0.9,clip_global_norm={bound}"
    async with cluster(servers, optimizer=text) as made, crew(made, 1, params) as workers:
        for gradient in gradients:
            async with workers[0].batch(weight=8) as batch:
                for key, value in gradient.items():
                    batch.push(key, value)
                    ours[key].grad = torch.tensor(value)
            torch.nn.utils.clip_grad_norm_(list(ours.values()), bound)
            sgd.step()
        assert await batch.wait() == "committed"
        pulled = await workers[0].pull()
    for key, value in ours.items():
        np.testing.assert_allclose(pulled[key], value.detach().numpy(), rtol=1e-6, atol=1e-6)


async def test_clipping_does_not_depend_on_the_number_of_servers() -> None:
    chance = np.random.default_rng(6)
    gradient = {k: chance.normal(size=np.shape(v)).astype(np.float32) for k, v in KEYS.items()}

    async def body(worker: AsyncWorker) -> dict[str, Array]:
        await worker.init(KEYS)
        for _ in range(3):
            async with worker.batch(weight=1 + worker.rank) as batch:
                for key, value in gradient.items():
                    batch.push(key, value * (1 + worker.rank))
        await batch.wait()
        pulled: dict[str, Array] = await worker.pull()
        return pulled

    results = []
    for servers in (1, 2, 4):
        async with cluster(servers, optimizer="sgd:lr=1,clip_global_norm=2") as made:
            results += await made.run(body, body)
    for other in results[1:]:
        for key in KEYS:
            np.testing.assert_allclose(other[key], results[0][key], rtol=1e-6, atol=1e-7)
    norm = np.sqrt(sum(float(np.square(v, dtype=np.float64).sum()) for v in results[0].values()))
    np.testing.assert_allclose(norm, 3 * 2, rtol=1e-5)


async def test_init_reads_a_safetensors_file(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    file = tmp_path / "model.safetensors"
    arrays = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "h": np.ones(3, np.float16)}
    save_file(arrays, file)
    async with cluster(2) as made:
        for given in (file, str(file)):
            async with made.worker() as worker:
                await worker.init(given)
                pulled = await worker.pull()
                assert pulled.keys() == arrays.keys()
                for key, value in arrays.items():
                    assert pulled[key].dtype == value.dtype
                    np.testing.assert_array_equal(pulled[key], value)
                with pytest.raises(FileNotFoundError):
                    await worker.init(tmp_path / "nothing.safetensors")


@pytest.mark.torch
async def test_init_takes_a_state_dict_with_tied_weights() -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(4, 3))
    net[1].weight = net[0].weight
    state = {**net.state_dict(), "half": torch.ones(2, dtype=torch.float16)}
    state["brain"] = torch.linspace(-1, 1, 5).to(torch.bfloat16)
    async with cluster(2) as made, crew(made, 1, state) as workers:
        pulled = await workers[0].pull()
        assert list(pulled) == list(state)
        for key, value in state.items():
            np.testing.assert_array_equal(
                pulled[key].astype(np.float32), value.to(torch.float32).numpy()
            )
        assert str(pulled["brain"].dtype) == "bfloat16"
        gradient = np.ones((3, 4), np.float32)
        async with workers[0].batch() as batch:
            batch.push("1.weight", gradient)
        assert await batch.wait() == "committed"
        pulled = await workers[0].pull()
        np.testing.assert_array_equal(pulled["0.weight"], pulled["1.weight"])
        assert not np.array_equal(pulled["0.weight"], state["0.weight"].numpy())


@pytest.mark.parametrize("route", ["direct", "broker"])
async def test_a_window_smaller_than_any_block_still_lets_everything_through(route: str) -> None:
    """Byte credits: one block at a time may exceed the window alone."""
    params = {"large": zeros(600_000), **{key: zeros(50) for key in range(20)}}
    options = {"window_bytes": 1}
    async with (
        cluster(2, route=route, optimizer="sgd:lr=1", server_options=options) as made,
        crew(made, 2, params, window_bytes=1) as workers,
    ):
        for _ in range(2):
            batches = await all_begun(workers)
            for batch in batches:
                for key, value in params.items():
                    batch.push(key, np.ones_like(value))
                await end(batch)
        assert await batches[0].wait() == "committed"
        for value in (await workers[1].pull()).values():
            assert set(value) == {-2.0}
        await until(
            lambda: not any(workers[0].stats()["bytes_unacknowledged"].values()),
            what="that everything is acknowledged",
        )


async def test_a_budget_for_one_contribution_holds_the_grants_of_the_others() -> None:
    """Rule 11 under ASP: one worker at a time may compute, the others are told why not."""
    options = {"budget_bytes": 4 * 1000}
    async with (
        cluster(1, policy_text="asp", optimizer="sgd:lr=1", server_options=options) as made,
        crew(made, 3, {"w": zeros(1000)}) as workers,
    ):
        waiting = {asyncio.ensure_future(begun(worker)) for worker in workers}
        seen = []
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            (only,) = done
            batch = only.result()
            seen.append(batch.version)
            if len(seen) == 1:
                status = await workers[0].status()
                held = [one["waiting"]["text"] for one in status["workers"] if one["waiting"]]
                assert len(held) == 2
                assert all("room for 1 contributions" in reason for reason in held)
                assert all("--budget" in reason for reason in held)
            await end(batch, ones(1000))
            assert await batch.wait() == "committed"
            if len(seen) < 3:
                # It would be granted the next batch before those who came later.
                await batch._worker.leave()
        assert len(seen) == 3
        assert model(made).sync.version == 3


async def test_the_policy_is_switched_at_a_named_version() -> None:
    """Rule 14: what is complete forms one last update; after that the new policy decides."""
    async with cluster(2, optimizer="sgd:lr=1") as made, crew(made, 3) as workers:
        batches = await all_begun(workers)
        await end(batches[0], ones())
        await until(lambda: model(made).sync.pending, what="that the contribution is held")
        assert await workers[1].set(policy="asp") == {"policy": 1}
        assert await batches[0].wait() == "committed"
        for turn in range(3):
            batch = await work(workers[0])
            assert (await batch.wait(), batch.version) == ("committed", 1 + turn)
        for late in batches[1:]:
            assert not late.cancelled
            await end(late, ones())
            assert await late.wait() == "committed"
        assert version(made) == 6
        assert await workers[2].set(policy="bsp") == {"policy": 6}
        for worker in workers:
            # What was granted before the switch is taken back: heard of before any later answer.
            assert (await worker.evaluate()).version == 6
        batches = await all_begun(workers)
        for batch in batches:
            await end(batch, ones())
        assert [await batch.wait() for batch in batches] == ["committed"] * 3
        assert version(made) == 7
        np.testing.assert_array_equal(await workers[0].pull("w"), -7 * ones())
