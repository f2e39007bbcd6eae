"""What users do by mistake, in both faces: named at once, and what comes next works."""

from __future__ import annotations

import asyncio
import gc
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crew import crew, ones, work
from harness import cluster
from worker_threads import on_threads, trained

import zkv
from zkv.errors import ConfigError
from zkv.policy import bsp
from zkv_brokers.broker import Broker, BrokerConfig
from zkv_brokers.server import Server, ServerConfig

SGD = "sgd:lr=1"


async def test_one_batch_is_open_at_a_time() -> None:
    async with cluster(1, optimizer=SGD) as made, crew(made, 1) as (worker,):
        with pytest.raises(RuntimeError, match="a batch of this worker is open already"):
            async with worker.batch() as outer, worker.batch():
                pass
        assert outer.outcome == "withdrawn"
        both = await asyncio.gather(work(worker), work(worker), return_exceptions=True)
        (refused,) = [one for one in both if isinstance(one, RuntimeError)]
        assert "one thread (or task) at a time" in str(refused)
        # What was granted ahead of the withdrawn batch's update is taken back, and may cancel one.
        outcomes = [await (await work(worker)).wait()]
        if outcomes == ["cancelled"]:
            outcomes.append(await (await work(worker)).wait())
        assert outcomes[-1] == "committed"
        assert (await worker.pull("w")).tolist() == [-2.0] * 3


async def test_one_batch_is_open_at_a_time_in_blocking_code_too() -> None:
    def body(worker: Any) -> None:
        worker.init({"w": np.zeros(3, np.float32)})

        def one() -> str:
            with worker.batch() as batch:
                batch.push("w", ones())
            return str(batch.wait())

        told: list[BaseException] = []

        def other() -> None:
            try:
                one()
            except RuntimeError as error:
                told.append(error)

        with worker.batch() as outer:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(10)
            with pytest.raises(RuntimeError, match="open already"), worker.batch():
                pass
            outer.push("w", ones())
        assert "open already: leave its block" in str(told[0])
        # Each in its turn, threads may share a worker.
        thread = threading.Thread(target=one)
        thread.start()
        thread.join(10)
        assert one() == "committed"
        assert worker.pull("w").tolist() == [-3.0] * 3

    async with cluster(1, optimizer=SGD) as made:
        await on_threads(made, body)


async def test_what_is_said_of_a_batch_after_its_block_is_an_error() -> None:
    async with cluster(1, optimizer=SGD) as made, crew(made, 1) as (worker,):
        batch = await work(worker)
        for late in (
            lambda: batch.push("w", ones()),
            lambda: batch.set_weight(3),
            lambda: batch.set_loss(0.5),
        ):
            with pytest.raises(RuntimeError, match="batch 1 is over: its gradients"):
                late()
        assert await batch.wait() == "committed"
        assert batch["w"].tolist() == [0.0] * 3


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("servers", [1, 2])
async def test_keys_may_be_added_while_an_update_is_on_its_way(servers: int, plain: bool) -> None:
    """Servers know such keys before they have their values, and the model goes on without them."""
    async with cluster(servers, optimizer=SGD) as made, crew(made, 1) as (worker,):
        await (await work(worker)).wait()
        for turn in range(1, 5):
            more = {f"{turn} {part}": np.full(40_000, turn, np.float32) for part in range(3)}
            batch = await work(worker)
            _, second = await asyncio.gather(worker.init(more, plain=plain), work(worker))
            assert [await one.wait() for one in (batch, second)] == ["committed"] * 2
            assert (await worker.pull("w")).tolist() == [-1.0 - 2 * turn] * 3
            assert set(await worker.pull(f"{turn} 2")) == {turn}
        assert list((await worker.evaluate()).params) == ["w"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefetch": "1"}, "prefetch='1'"),
        ({"rank": "0"}, "rank='0' is no int of at least 0"),
        ({"rank": 1.5}, "rank=1.5"),
        ({"rank": -2}, "rank=-2"),
        ({"world": "2"}, "world='2'"),
        ({"window_bytes": 0}, "window_bytes=0 is no int of at least 1"),
        ({"name": 3}, "name=3 is no str"),
        ({"connect_timeout_s": -1}, "connect_timeout_s=-1 is no number of seconds above 0"),
        ({"connect_timeout_s": float("nan")}, "connect_timeout_s=nan"),
        ({"wait_timeout_s": "5"}, "wait_timeout_s='5'"),
        ({"route": "both"}, "route 'both'"),
    ],
)
def test_options_of_connect_are_checked_before_anything_is_waited_for(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        zkv.connect("tcp://127.0.0.1:1", **options)
    with pytest.raises(ConfigError, match=words):
        zkv.aio.connect("tcp://127.0.0.1:1", **options)


async def test_what_cannot_start_leaves_nothing_that_is_waited_for(tmp_path: Path) -> None:
    """A context of ZeroMQ that is collected with a socket open is waited for without end."""
    config = BrokerConfig(bsp(), bind="tcp://127.0.0.1:0")
    record = tmp_path / "no such folder" / "life.rec"
    wrong = [
        (replace(config, codec_down="int8+ef"), ValueError),
        (replace(config, record=record), OSError),
    ]
    for given, error in wrong:
        broker = Broker(given)
        with pytest.raises(error):
            broker.start()
        assert broker._context.closed
    server = Server(ServerConfig("tcp://127.0.0.1:1", record=record))
    with pytest.raises(OSError, match="no such folder"):
        server.start()
    assert server._context.closed
    del broker, server
    gc.collect()


@pytest.mark.torch
@pytest.mark.parametrize("just_in_time", [False, True])
def test_a_weight_or_loss_that_is_none_withdraws_the_batch(just_in_time: bool) -> None:
    torch = pytest.importorskip("torch")
    from zkv.torch import attach

    def body(worker: Any) -> None:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = attach(model, worker, just_in_time=just_in_time)
        wrong: list[dict[str, Any]] = [{"weight": float("nan")}, {"weight": -1}, {"loss": "none"}]
        for said in wrong:
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            with pytest.raises(ValueError, match=r"weight|float"):
                optimizer.step(**said)
            assert optimizer.last.outcome == "withdrawn"
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        assert optimizer.last.wait() == "committed"
        assert worker.pull("weight").tolist() == [[-1.0]]

    trained(body, optimizer=SGD)


@pytest.mark.torch
@pytest.mark.parametrize("just_in_time", [False, True])
def test_another_model_after_the_first_batch_is_refused_by_key(just_in_time: bool) -> None:
    torch = pytest.importorskip("torch")
    from zkv.errors import KeyMismatch
    from zkv.torch import attach

    def body(worker: Any) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = attach(model, worker, just_in_time=just_in_time)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.detach()
        words = r"key 'other.weight' is no part of the model .* \('weight', 'bias'\) are fixed"
        for _ in range(2):
            with pytest.raises(KeyMismatch, match=words):
                attach(
                    torch.nn.ModuleDict({"other": torch.nn.Linear(2, 1)}),
                    worker,
                    just_in_time=just_in_time,
                )

    trained(body, optimizer=SGD)


@pytest.mark.torch
def test_options_of_attach_are_of_their_kind() -> None:
    torch = pytest.importorskip("torch")
    from zkv.torch import attach

    def body(worker: Any) -> None:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"buffers_every": "3"}, "buffers_every='3' is no int"),
            ({"just_in_time": True, "ahead": "1"}, "ahead='1' is no int"),
            ({"just_in_time": True, "init": 3}, "init=3 is no function"),
        ]
        for options, words in wrong:
            with pytest.raises(TypeError, match=words):
                attach(torch.nn.Linear(1, 1), worker, **options)
        attach(torch.nn.Linear(1, 1), worker)

    trained(body)


@pytest.mark.jax
def test_a_weight_or_loss_that_is_none_withdraws_a_batch_of_jax() -> None:
    jnp = pytest.importorskip("jax").numpy
    from zkv.errors import KeyMismatch
    from zkv.jax import attach

    def body(worker: Any) -> None:
        optimizer = attach({"w": jnp.zeros(1)}, worker)
        gradients = {"w": jnp.ones(1)}

        def block(weight: float) -> str:
            with optimizer.batch() as batch:
                batch.push(gradients)
                batch.set_weight(weight)
            return str(batch.wait())

        with pytest.raises(ValueError, match="weight nan"):
            block(float("nan"))
        assert optimizer.last.outcome == "withdrawn"
        for said in ({"weight": -1}, {"loss": "none"}):
            optimizer.begin()
            with pytest.raises(ValueError, match=r"weight|float"):
                optimizer.step(gradients, **said)
            assert optimizer.last.outcome == "withdrawn"
        assert block(1.0) == "committed"
        assert optimizer.pull()["w"].tolist() == [-1.0]
        optimizer.close()
        with pytest.raises(KeyMismatch, match=r"key 'other' is no part of the model"):
            attach({"other": jnp.zeros(1)}, worker)

    trained(body, optimizer=SGD)
