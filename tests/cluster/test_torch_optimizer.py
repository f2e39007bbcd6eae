"""The optimizer of an attached model: rates, scalers, buffers, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import cluster
from torch_models import mlp, nn, torch, values
from worker_threads import on_threads, worker_of

import zkv
from zkv.errors import KeyMismatch, PushRefused
from zkv.torch import Optimizer, attach
from zkv_workers import torch as below
from zkv_workers import torch_ddp, torch_tensors

pytestmark = pytest.mark.torch


async def run(body: Callable[[Any], Any], *others: Callable[[Any], Any], **options: Any) -> Any:
    options.setdefault("optimizer", "sgd:lr=1")
    async with cluster(1, **options) as made:
        return await on_threads(made, body, *others)


def line() -> Any:
    model = nn.Linear(1, 1)
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    return model


def compute(model: Any) -> None:
    model(torch.ones(1, 1)).sum().backward()


# --- rates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("explicit", [False, True], ids=["loop", "blocks"])
async def test_a_scheduler_of_pytorch_sets_the_rate_for_all(explicit: bool) -> None:
    """Rank 0's rate holds; the others run the same scheduler, and say nothing."""

    def body(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups[0]["lr"] == 1.0
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        calls: list[Any] = []
        tell = worker.set
        worker.set = lambda **settings: (calls.append(settings), tell(**settings))
        expected = 0.0
        for rate in (1.0, 1.0, 0.5, 0.5, 0.25):
            if explicit:
                with optimizer.batch():
                    optimizer.zero_grad()
                    compute(model)
            else:
                optimizer.zero_grad()
                compute(model)
                optimizer.step()
            scheduler.step()
            expected -= rate
            optimizer.last.wait()
            optimizer.pull()
            assert values(model)["bias"][0] == expected
        assert calls == ([{"lr": 0.5}, {"lr": 0.25}] if worker.rank == 0 else [])
        worker.barrier()
        assert worker.status()["optimizer"] == "sgd:lr=0.25"

    await run(body, body)


async def test_set_lr_holds_from_the_next_step() -> None:
    def body(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)
        optimizer.set_lr(3.0)
        compute(model)
        optimizer.step()
        optimizer.last.wait()
        optimizer.pull()
        assert values(model)["bias"][0] == -3

    await run(body)


async def test_there_is_no_state_here_and_one_group() -> None:
    def body(worker: Any) -> None:
        optimizer = attach(line(), worker)
        with pytest.raises(RuntimeError, match=r"state is on the servers.*zkv export"):
            optimizer.state_dict()
        with pytest.raises(RuntimeError, match="state is on the servers"):
            optimizer.load_state_dict({})
        with pytest.raises(RuntimeError, match="one group of parameters"):
            optimizer.add_param_group({"params": [torch.zeros(1)]})

    await run(body)


# --- mixed precision -------------------------------------------------------------------------

SCALE = 2.0**125


def scaled_alone() -> tuple[list[float], dict[str, Any]]:
    """The scales and values of one process: the first steps overflow and are skipped."""
    model = mlp(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=3)
    scales = []
    for turn in range(9):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, turn)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, values(model)


def loss_of(model: Any, turn: int) -> Any:
    return 40.0 * model(torch.full((2, 6), 0.1 * (turn + 1))).square().sum()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("whole", [True, False])
async def test_a_scaler_does_what_it_does_in_one_process(whole: bool, overlap: bool) -> None:
    scales, expected = scaled_alone()
    assert scales[0] < SCALE
    assert max(scales[4:]) > min(scales)

    def body(worker: Any) -> None:
        model = mlp(dtype=torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=3)
        optimizer = attach(model, worker, scaler=scaler, overlap=overlap)
        outcomes = []
        for turn in range(9):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, turn)).backward()
            if whole:
                outcomes.append(optimizer.step())
            else:
                outcomes.append(scaler.step(optimizer))
                scaler.update()
            assert scaler.get_scale() == scales[turn]
        assert outcomes[0] == "withdrawn"
        assert outcomes[-1] in ("pending", "withdrawn")
        optimizer.last.wait()
        optimizer.pull()
        for key, value in values(model).items():
            np.testing.assert_allclose(value, expected[key], rtol=1e-5, atol=1e-7)
        stats = worker.stats()["outcomes"]
        assert stats == {"committed": outcomes.count("pending"), "discarded": 0, "cancelled": 0}

    await run(body, optimizer="sgd:lr=0.1")


async def test_a_scaled_block_steps_the_scaler_too() -> None:
    def body(worker: Any) -> None:
        model = line()
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1)
        optimizer = attach(model, worker, scaler=scaler)
        for factor, scale in ((1e9, SCALE / 2), (1.0, SCALE)):
            with optimizer.batch():
                optimizer.zero_grad()
                scaler.scale(factor * model(torch.ones(1, 1)).sum()).backward()
            assert scaler.get_scale() == scale
        optimizer.last.wait()
        optimizer.pull()
        assert values(model)["bias"][0] == -1

    await run(body)


async def test_clipping_after_unscaling_needs_gradients_that_wait_for_step() -> None:
    def body(worker: Any) -> None:
        model = line()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for overlap in (False, True):
            optimizer = attach(model, worker, scaler=scaler, overlap=overlap)
            optimizer.zero_grad()
            scaler.scale(8 * model(torch.ones(1, 1)).sum()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(model.parameters(), 2.0)
            if overlap:
                with pytest.raises(RuntimeError, match="changed after it was sent"):
                    scaler.step(optimizer)
            else:
                assert scaler.step(optimizer) == "pending"
                scaler.update()
            optimizer.detach()
        assert worker.pull("bias").tolist() == [-2]

    await run(body)


async def test_a_scaler_that_attach_was_not_told_of_is_named() -> None:
    def body(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(1, 1)).sum()).backward()
        with pytest.raises(RuntimeError, match=r"attach\(\.\.\., scaler=scaler\)"):
            scaler.step(optimizer)
        assert optimizer.last.outcome == "withdrawn"

    await run(body)


async def test_autocast_to_bfloat16_trains_float32_parameters() -> None:
    model = mlp(dtype=torch.float32)
    reference = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any, turn: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.full((3, 6), 0.1 * turn)).float().square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    expected = [step(model, reference, turn) for turn in range(8)]

    def body(worker: Any) -> None:
        mine = mlp(dtype=torch.float32)
        optimizer = attach(mine, worker)
        assert [step(mine, optimizer, turn) for turn in range(8)] == pytest.approx(expected)

    await run(body, optimizer="sgd:lr=0.1")


# --- buffers ---------------------------------------------------------------------------------


def normalised() -> Any:
    return nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2, momentum=1.0))


@pytest.mark.parametrize(
    ("way", "means"), [("mean", (1.0, 1.0)), ("rank0", (0.0, 0.0)), ("local", (0.0, 2.0))]
)
async def test_buffers_are_kept_alike_as_was_chosen(way: str, means: tuple[float, float]) -> None:
    def body(worker: Any) -> Any:
        model = normalised()
        optimizer = attach(model, worker, buffers=way)
        found = []
        for turn in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 1)).sum().backward()
            optimizer.step()
            model[1].running_mean.fill_(2.0 * worker.rank)
            model[1].num_batches_tracked.fill_(turn + 5 + 70 * worker.rank)
            optimizer.sync_buffers()
            found.append((model[1].running_mean.tolist()[0], int(model[1].num_batches_tracked)))
        return found

    both = await run(body, body)
    for rank, found in enumerate(both):
        begin = 75 if way == "local" and rank else 5
        assert found == [(means[rank], begin + turn) for turn in range(3)]


async def test_buffers_are_taken_after_the_batch_by_whose_end_they_are_here() -> None:
    def body(worker: Any) -> None:
        model = normalised()
        optimizer = attach(model, worker, buffers_every=2)
        for turn in range(1, 6):
            optimizer.zero_grad()
            model(torch.ones(4, 1)).sum().backward()
            model[1].running_mean.fill_(2.0 * worker.rank + turn)
            optimizer.step()
            waiting = optimizer._buffers._under_way
            # Sent after the second batch and the fourth; taken after the third and the fifth.
            assert len(waiting) == (0 if turn % 2 else 3)
            own = 2.0 * worker.rank + turn
            assert model[1].running_mean[0] == {3: 3.0, 5: 5.0}.get(turn, own)
            for _, one in waiting.values():
                assert one.result(10) == "committed"

    await run(body, body)


@pytest.mark.parametrize("policy", ["asp", "ssp:1", "k-batch-asp:2"])
async def test_buffers_meet_under_policies_that_do_not_wait(policy: str) -> None:
    def body(worker: Any) -> int:
        model = normalised()
        optimizer = attach(model, worker, buffers_every=1)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(4, 1)).sum().backward()
            optimizer.step()
        optimizer.sync_buffers()
        assert torch.isfinite(model[1].running_mean).all()
        return int(model[1].num_batches_tracked)

    found = await run(body, body, policy_text=policy)
    assert found[0] == 4


async def test_a_worker_that_ends_early_holds_no_buffers_up() -> None:
    def body(worker: Any) -> None:
        model = normalised()
        optimizer = attach(model, worker, buffers_every=3)
        for _ in range(3 + 4 * worker.rank):
            optimizer.zero_grad()
            model(torch.ones(4, 1)).sum().backward()
            optimizer.step()
        worker.barrier()

    await run(body, body)


async def test_a_buffer_that_is_not_finite_is_named() -> None:
    def body(worker: Any) -> None:
        model = normalised()
        optimizer = attach(model, worker)
        model[1].running_var.fill_(float("nan"))
        with pytest.raises(PushRefused, match=r"1\.running_var"):
            optimizer.sync_buffers()

    await run(body)


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(TypeError, match=r"buffer 'phase': torch.complex64.*persistent=False"):
        torch_tensors.buffer_array("phase", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"'count' has an integer above 2\*\*53"):
        torch_tensors.buffer_array("count", torch.tensor(2**53 + 1))
    with pytest.raises(KeyMismatch, match=r"'w': shape \(2,\) expected, given \(1, 2\)"):
        torch_tensors.write("w", np.zeros(2), torch.zeros(1, 2))


# --- attach ----------------------------------------------------------------------------------


def shared() -> Any:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    return model


def frozen() -> Any:
    return nn.Linear(2, 2).requires_grad_(False)


BAD: list[tuple[type[Exception], str, Callable[[], Any], dict[str, Any]]] = [
    (TypeError, "takes a torch.nn.Module, not list", list, {}),
    (ValueError, r"'a\.weight' and 'b\.weight' are two parameters in one memory", shared, {}),
    (ValueError, "no parameter of the model requires a gradient", frozen, {}),
    (ValueError, "'weight' has no values yet", lambda: nn.LazyLinear(2), {}),
    (ValueError, "'weight' has no values yet", lambda: nn.Linear(2, 2, device="meta"), {}),
    (TypeError, "complex64 does not travel", lambda: nn.Linear(2, 2, dtype=torch.complex64), {}),
    (ValueError, "buffers='median' is none of mean", line, {"buffers": "median"}),
    (ValueError, "buffers_every=0", line, {"buffers_every": 0}),
    (ValueError, "frozen='cold'", line, {"frozen": "cold"}),
    (ValueError, "weight -1", line, {"weight": -1.0}),
    (TypeError, "no option lr; it has buffers", line, {"lr": 0.1}),
]


async def test_what_cannot_be_attached_is_named_and_leaves_nothing_behind() -> None:
    def body(worker: Any) -> None:
        for kind, words, make, options in BAD:
            with pytest.raises(kind, match=words):
                attach(make(), worker, **options)
        with pytest.raises(TypeError, match=r"takes a worker of zkv\.connect, not str"):
            attach(line(), "tcp://127.0.0.1:5555")
        model = line()
        optimizer = attach(model, worker)
        with pytest.raises(ValueError, match="the worker is attached already"):
            attach(line(), worker)
        compute(model)
        assert optimizer.step() == "pending"

    await run(body)


async def test_a_model_is_attached_once() -> None:
    async with cluster(1) as made, cluster(1) as other:

        def body() -> None:
            with worker_of(made) as worker, worker_of(other) as second:
                model = mlp()
                attach(model, worker)
                for again in (model, model[0], nn.Sequential(nn.Linear(2, 2), model)):
                    with pytest.raises(ValueError, match="is attached already"):
                        attach(again, second)

        import asyncio

        await asyncio.to_thread(body)


async def test_another_workers_model_is_refused_by_key() -> None:
    def body(worker: Any) -> None:
        if worker.rank == 1:
            worker.barrier()
            with pytest.raises(KeyMismatch, match=r"'0\.weight'"):
                attach(mlp(sizes=(6, 9, 3)), worker)
        else:
            attach(mlp(), worker)
            worker.barrier()

    await run(body, body)


async def test_samples_are_dealt_out_to_blocks() -> None:
    def body(worker: Any) -> int:
        model = line()
        optimizer = attach(model, worker)
        count = 0
        for block in optimizer.batches(zkv.data.shard(20, seed=1, size=4, passes=2)):
            with block as batch:
                optimizer.zero_grad()
                compute(model)
                count += len(batch.samples)
        return count

    assert sum(await run(body, body)) == 40


def test_the_face_names_it() -> None:
    """`import zkv` is enough, and what needs torch.distributed is looked for only if asked for."""
    face = zkv.__getattr__("torch")
    assert (face.attach, face.Optimizer, face.Block) == (below.attach, Optimizer, below.Block)
    assert (face.State, face.comm_hook) == (torch_ddp.State, torch_ddp.comm_hook)
    with pytest.raises(AttributeError, match="no attribute 'attache'"):
        _ = face.attache
