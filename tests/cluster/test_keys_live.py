"""Keys over real sockets: their range, their order, and who may read them before they exist."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from crew import crew, ones, work, zeros
from harness import Cluster, cluster, until

from zkv.aio import AsyncWorker
from zkv.dtypes import Array
from zkv.errors import UnknownKey, WaitTimeout


async def test_large_integers_are_keys_of_their_own() -> None:
    """D01: no key is cut to 32 bits, and none is mixed up with its text."""
    keys: list[Any] = [2**32 + 2, 2**31, 2**31 - 1, 2**63 - 1, 0, "2147483648", "0"]
    params = {key: np.full(100, at, np.float32) for at, key in enumerate(keys)}
    async with cluster(2) as made, crew(made, 1, params) as workers:
        with pytest.raises(UnknownKey, match="unknown key 2;"):
            await workers[0].pull(2)
        for at, key in enumerate(keys):
            assert set(await workers[0].pull(key)) == {float(at)}
        for at, key in enumerate(keys):
            await workers[0].push(key, np.full(100, 10.0 + at, np.float32))
        pulled = await workers[0].pull(keys)
        assert [pulled[key][0] for key in keys] == [10.0 + at for at in range(len(keys))]


async def test_the_order_in_which_keys_are_named_does_not_matter() -> None:
    """D02: [w, b] on one worker and [b, w] on the other are the same model."""
    w, b = zeros(12).reshape(4, 3), zeros(3)

    async def body(worker: AsyncWorker) -> dict[str, Array]:
        order = {"w": w, "b": b} if worker.rank == 0 else {"b": b, "w": w}
        await worker.init(order)
        async with worker.batch() as batch:
            for key, value in order.items():
                batch.push(key, value + (1 if key == "w" else 2))
        await batch.wait()
        pulled: dict[str, Array] = await worker.pull()
        return pulled

    async with cluster(2, optimizer="sgd:lr=1") as made:
        for pulled in await made.run(body, body):
            np.testing.assert_array_equal(pulled["w"], -np.ones((4, 3)))
            np.testing.assert_array_equal(pulled["b"], -2 * np.ones(3))


@pytest.mark.parametrize("turn", range(5))
async def test_a_pull_before_the_first_init_waits_for_it(turn: int) -> None:
    """D03: faster workers pull first; they get the initial values, and the servers stay up."""
    async with cluster(3) as made:
        workers = [made.worker(rank, world=3) for rank in range(3)]
        await asyncio.gather(*(worker.connect() for worker in workers))
        pulls = [asyncio.ensure_future(worker.pull("w")) for worker in workers[1:]]
        # A reply of the broker shows that it has what was sent before.
        await asyncio.gather(*(worker.status() for worker in workers[1:]))
        assert not any(pull.done() for pull in pulls)
        await workers[0].init({"w": np.full(50, turn, np.float32)})
        for value in await asyncio.gather(*pulls):
            assert set(value) == {float(turn)}
        with pytest.raises(UnknownKey, match="'v'"):
            await workers[1].pull("v")
        await asyncio.gather(*(worker.close() for worker in workers))


async def test_a_pull_of_what_is_never_initialised_ends() -> None:
    async with cluster(1) as made, made.worker(0, wait_timeout_s=0.3) as worker:
        with pytest.raises(WaitTimeout, match="pull of 'w'"):
            await worker.pull("w")


async def test_keys_in_any_script_and_of_the_longest_length() -> None:
    keys = ["größe", "重み", "λ/β.0 [x]", "a\nb\x00c", "x" * 255, " ", "🦆"]
    params = {key: np.full(2, at, np.float32) for at, key in enumerate(keys)}
    async with cluster(2, optimizer="sgd:lr=1") as made, crew(made, 1, params) as workers:
        pulled = await workers[0].pull()
        assert list(pulled) == keys
        batch = await work(workers[0], ones(2), "重み")
        assert await batch.wait() == "committed"
        assert (await workers[0].pull("重み")).tolist() == [0.0, 0.0]
        assert (await workers[0].pull("größe")).tolist() == [0.0, 0.0]
        assert (await workers[0].pull("🦆")).tolist() == [6.0, 6.0]


async def test_more_keys_can_be_added_while_training() -> None:
    """What comes after the first batch is pushed by itself: the model's set of keys is fixed."""
    async with cluster(2, optimizer="sgd:lr=1") as made, crew(made, 1) as workers:
        await (await work(workers[0])).wait()
        await workers[0].init({"more": ones(5)}, rule="assign")
        assert await workers[0].push("more", 3 * ones(5)) == "committed"
        assert (await workers[0].pull("more")).tolist() == [3.0] * 5
        batch = await work(workers[0])
        assert await batch.wait() == "committed"
        assert (await workers[0].pull("w")).tolist() == [-2.0] * 3


@pytest.mark.parametrize("policy", ["bsp", "k-bsp:2", "ssp:0", "asp"])
async def test_a_barrier_and_the_push_of_a_plain_key_do_not_wait_for_each_other(
    policy: str,
) -> None:
    """Worker 0 pushes a key and then goes to the barrier in which worker 1 waits."""
    options = {"plain": True, "rule": "sgd:lr=1"}
    async with (
        cluster(1, policy_text=policy) as made,
        crew(made, 2, {"n": zeros()}, init_options=options) as (one, two),
    ):
        for turn in range(1, 4):
            if turn > 1:  # Out of the barrier, both take part again.
                pushed = [worker.push("n", ones()) for worker in (one, two)]
                assert await asyncio.gather(*pushed) == ["committed"] * 2
            waiting = asyncio.ensure_future(two.barrier())
            await until(lambda: barriers(made) == 1, what="that worker 1 is in the barrier")
            assert await one.push("n", ones()) == "committed"
            await one.barrier()
            await waiting
        total = await one.pull("n")
    assert total.tolist() == [-7.0] * 3


def barriers(made: Cluster) -> int:
    """How many workers wait in a barrier."""
    assert made.broker.router is not None
    return sum(bool(w.barrier_token) for w in made.broker.router.members.training())
