"""A model that its workers do not hold learns what it learns otherwise, bit for bit."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import cluster
from torch_models import compute, line, nn, seeded, torch
from torch_shapes import LAYERS, MODELS, deep, loss_of
from worker_threads import on_threads, trained

from zkv.errors import KeyMismatch
from zkv.placement import BUCKET_BYTES
from zkv.torch import attach
from zkv_workers import torch_layers

# Not before what is above has seen that PyTorch is here.
limited_worker = pytest.importorskip("limited_worker")

pytestmark = pytest.mark.torch

ADAM = "adam:lr=0.01"
BATCHES = 4


def body(
    make: Callable[[], Any], *, meta: tuple[int, ...] = (), batches: int = BATCHES, **options: Any
) -> Callable[[Any], list[float]]:
    """A worker's losses; those of these ranks build the model on the meta device."""

    def run(worker: Any) -> list[float]:
        with seeded(0):
            if worker.rank in meta:
                with torch.device("meta"):
                    model = make()
            else:
                model = make()
            state = torch.get_rng_state()
        losses = []
        with seeded(0):
            if worker.rank not in meta:
                torch.set_rng_state(state)
            optimizer = attach(model, worker, weight=4, **options)
        for number in range(batches):
            optimizer.zero_grad()
            loss = loss_of(model, 10 * number + worker.rank)
            loss.backward()
            assert optimizer.step() == "pending"
            if options:
                assert optimizer.memory.held_bytes == 0
                assert all(one.grad is None for one in model.parameters())
            losses.append(loss.item())
        assert optimizer.last.wait() == "committed"
        return losses

    return run


JIT: dict[str, Any] = {"just_in_time": True}


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_the_losses_are_those_of_an_ordinary_model(kind: str, ahead: int) -> None:
    make = MODELS[kind]
    ordinary = _ordinary(kind)
    both = [body(make, ahead=ahead, **JIT)] * 2
    assert trained(*both, servers=2, optimizer=ADAM) == ordinary


_known: dict[str, list[Any]] = {}


def _ordinary(kind: str) -> list[Any]:
    if kind not in _known:
        _known[kind] = trained(*[body(MODELS[kind])] * 2, servers=2, optimizer=ADAM)
    return _known[kind]


@pytest.mark.parametrize("meta", [(0, 1), (0,), (1,)], ids=["both", "first", "second"])
def test_a_model_on_the_meta_device_has_the_same_first_values(meta: tuple[int, ...]) -> None:
    """They are made layer by layer, in the order in which the modules would be made."""
    found = trained(*[body(deep, meta=meta, **JIT)] * 2, servers=2, optimizer=ADAM)
    assert found == _ordinary("deep")


def test_workers_of_both_kinds_train_together() -> None:
    both = [body(deep, meta=(0,), **JIT), body(deep)]
    assert trained(*both, servers=2, optimizer=ADAM) == _ordinary("deep")


@pytest.mark.parametrize(
    "options",
    [
        {"policy_text": "ssp:1", "optimizer": "sgd:lr=0.01,clip_global_norm=1.0"},
        {"codec_down": "topk:0.1", "codec": "int8+ef"},
        {"codec_down": "lz4"},
    ],
    ids=str,
)
def test_whatever_the_cluster_is_set_to(options: dict[str, Any]) -> None:
    """One worker, for whom even deltas come out the same: it is sent what they lead to."""
    one = {"servers": 2, "optimizer": ADAM, **options}
    (given,) = trained(body(deep, batches=2, **JIT), **one)
    (expected,) = trained(body(deep, batches=2), **one)
    if "topk" in options.get("codec_down", ""):
        np.testing.assert_allclose(given, expected, rtol=1e-5)
    else:
        assert given == expected


def test_a_checkpoint_saves_nothing_but_its_inputs() -> None:
    """Hooks of layers leave to a checkpoint what it has hooks for: else it would be of no use."""

    class OnlyLayers(MODELS["checkpointed"]):  # type: ignore[misc]
        def block(self, hidden: Any) -> Any:
            return self.norm(self.inner(hidden))

    computed: list[bool] = []

    def run(worker: Any) -> None:
        model = OnlyLayers()
        model.inner.register_forward_hook(
            lambda *_: computed.append(torch._C._current_graph_task_id() != -1)
        )
        attach(model, worker, **JIT)
        loss_of(model, 0).backward()

    trained(run)
    assert computed == [False, False, True, True]


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_no_more_layers_are_here_than_the_one_in_use_and_those_ahead(ahead: int) -> None:
    """Counted at the begin of every forward and backward of a layer: memory of parameters, and
    blocks that have arrived for it."""

    def run(worker: Any) -> list[int]:
        model = deep()
        optimizer = attach(model, worker, ahead=ahead, **JIT)
        counted = []

        def count(*_: Any) -> None:
            blocks = list(worker._driver.session.made.cycle.blocks.values())
            stored = [one.storage.nbytes() for one in optimizer.memory._places.values()]
            counted.append(sum(stored) + sum(one.nbytes for one in blocks))

        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(count)
                module.register_full_backward_hook(count)
        for number in range(3):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()
        largest = max(optimizer.memory.nbytes(one.keys) for one in optimizer._survey.owners)
        assert optimizer.memory.held_bytes_max == largest
        # A block of small keys brings all of them.
        assert max(counted) <= (ahead + 2) * largest + BUCKET_BYTES
        return counted

    (counted,) = trained(run)
    assert len(counted) == 3 * 2 * LAYERS


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits all private memory")
def test_a_model_of_four_times_the_memory_limit_learns_the_same() -> None:
    rule = "momentum:lr=0.1,momentum=0.9"

    async def limited() -> list[float]:
        async with cluster(1, optimizer=rule) as made:
            script = str(Path(__file__).parents[1] / "limited_worker.py")
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, script, made.address, str(limited_worker.MODEL_BYTES // 4)),
                stdout=asyncio.subprocess.PIPE,
            )
            out, _ = await asyncio.wait_for(process.communicate(), 120)
            assert process.returncode == 0
            found: list[float] = json.loads(out)
            return found

    def unlimited(worker: Any) -> list[float]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # As in the other process: sums may depend on it.
        try:
            return limited_worker.train(worker, limited=False)
        finally:
            torch.set_num_threads(threads)

    assert [asyncio.run(limited())] == trained(unlimited, optimizer=rule)


def test_gradients_wait_in_the_worker_only_as_far_as_there_is_room() -> None:
    def run(worker: Any) -> None:
        model = deep()
        optimizer = attach(model, worker, **JIT)
        optimizer._room_bytes, optimizer._every_bytes = 0, 1
        aside, asked = worker._driver.session.aside, []
        take = aside.take

        def heard(event: Any, now: float) -> None:
            asked.append(event)
            take(event, now)

        aside.take = heard
        loss_of(model, 0).backward()
        optimizer.step()
        assert [one.nbytes for one in asked] == [0] * len(list(model.parameters()))

    trained(run)


# --- what else a loop does -----------------------------------------------------------------------


def one_worker(run: Callable[[Any], None], **options: Any) -> None:
    trained(run, **{"optimizer": "sgd:lr=1", **options})


def newest(worker: Any, optimizer: Any) -> dict[str, float]:
    optimizer.last.wait()
    return {key: float(value.reshape(-1)[0]) for key, value in worker.pull().items()}


def test_between_batches_a_forward_pass_without_gradients_reads_the_newest_values() -> None:
    def run(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker, **JIT)
        for turn in range(3):
            with torch.no_grad():
                assert float(model(torch.ones(1, 1))) == -2 * turn
            assert optimizer.memory.held_bytes == 0
            optimizer.zero_grad()
            compute(model)
            with torch.no_grad():
                model(torch.ones(1, 1))
            optimizer.step()
            optimizer.last.wait()
        assert worker.stats()["outcomes"]["committed"] == 3

    one_worker(run)


def test_values_that_are_not_here_are_named_wherever_they_are_looked_for() -> None:
    def run(worker: Any) -> None:
        model = line(1.0)
        optimizer = attach(model, worker, **JIT)
        for use in (
            lambda: model.weight + 1,
            model.state_dict,
            lambda: model.weight.numpy(force=True),
            lambda: nn.functional.linear(torch.ones(1, 1), model.weight),
        ):
            with pytest.raises(RuntimeError, match=r"key 'weight' has no values here.*worker.pull"):
                use()
        assert "without values here, of shape (1, 1)" in repr(model.weight)
        assert tuple(model.weight.shape) == (1, 1)
        assert model.weight.grad is None
        assert model.weight.numel() == 1
        for named in (optimizer.pull, optimizer.state_dict):
            with pytest.raises(RuntimeError, match=r"worker.pull\(keys\) reads some of it"):
                named()
        assert worker.pull("weight").tolist() == [[1.0]]
        with pytest.raises(RuntimeError, match="keeps no gradients, so it cannot accumulate"):
            optimizer.no_sync()

    one_worker(run)


def test_a_parameter_that_is_used_outside_of_its_layer_is_here_for_the_rest_of_the_batch() -> None:
    def run(worker: Any) -> None:
        model = line(1.0)
        optimizer = attach(model, worker, **JIT)
        with optimizer.batch():
            loss = nn.functional.linear(torch.ones(1, 1), model.weight)
            kept = model.weight.detach().numpy()  # NumPy keeps that memory.
            assert optimizer.memory.held_bytes == 4
            (loss * loss).backward()
        assert optimizer.memory.held_bytes == 0
        assert kept.tolist() == [[1.0]]
        with optimizer.batch():
            compute(model)
        assert newest(worker, optimizer) == {"weight": -2.0, "bias": 0.0}

    one_worker(run)


def test_a_second_backward_pass_is_named() -> None:
    def run(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker, **JIT)
        first, second = (model(torch.ones(1, 1)).sum() for _ in range(2))
        first.backward()
        with pytest.raises(RuntimeError, match=r"second gradient.*add the losses up"):
            second.backward()
        assert optimizer.step() == "withdrawn"
        optimizer.zero_grad()
        (model(torch.ones(1, 1)) + model(torch.ones(1, 1))).sum().backward()
        assert optimizer.step() == "pending"
        assert newest(worker, optimizer) == {"weight": -2.0, "bias": -2.0}

    one_worker(run)


def test_what_has_no_gradient_in_a_backward_pass_is_given_back_at_its_end() -> None:
    def run(worker: Any) -> None:
        model = line(1.0)
        optimizer = attach(model, worker, **JIT)
        x = torch.ones(1, 1, requires_grad=True)
        loss = model(x).sum()
        torch.autograd.grad(loss, x, retain_graph=True)
        assert optimizer.memory.held_bytes == 0
        loss.backward()
        optimizer.step()
        assert newest(worker, optimizer) == {"weight": 0.0, "bias": 0.0}

    one_worker(run)


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (0, []),
        (1, [["1.weight", "1.bias"], ["2.weight", "2.bias"], ["1.weight"]]),
        (2, [["1.weight", "1.bias", "2.weight", "2.bias"], ["1.weight"]]),
    ],
)
def test_what_comes_next_is_asked_for_ahead(ahead: int, expected: list[list[str]]) -> None:
    """Backward passes need weights alone, and of the first layer not even that."""

    def run(worker: Any) -> None:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        optimizer = attach(model, worker, ahead=ahead, **JIT)
        asked: list[list[str]] = []
        want = optimizer._layers.want
        optimizer._layers.want = lambda keys: (asked.append(keys), want(keys))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert asked == expected

    one_worker(run)


def test_a_layer_that_is_not_next_after_all_is_not_kept() -> None:
    class Branches(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.taken = [0, 1, 2]

        def forward(self, x: Any) -> Any:
            for one in self.taken:
                x = self.parts[one](x)
            return x

    def run(worker: Any) -> None:
        model = Branches()
        optimizer = attach(model, worker, **JIT)
        forgotten: list[str] = []
        forget = optimizer._layers.forget
        optimizer._layers.forget = lambda keys: (forgotten.extend(keys), forget(keys))
        for taken in ([0, 1, 2], [0, 2]):
            model.taken = taken
            optimizer.zero_grad()
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            assert forgotten == ([] if 1 in taken else ["parts.1.weight", "parts.1.bias"])
        optimizer.last.wait()

    one_worker(run)


def test_a_graph_of_an_earlier_batch_is_named() -> None:
    def run(worker: Any) -> None:
        model = nn.Sequential(line(1.0), line(1.0))
        optimizer = attach(model, worker, **JIT)
        old = model(torch.ones(1, 1)).sum()
        compute(model)
        optimizer.step()
        model(torch.ones(1, 1))
        with pytest.raises(RuntimeError, match=r"key '1.weight': .* graph of an earlier batch"):
            old.backward()

    one_worker(run)


def test_a_saved_tensor_that_is_changed_in_place_is_an_error_as_ever() -> None:
    class Twice(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Any) -> Any:
            found = torch.exp(x * self.weight)
            found.mul_(2)
            return found

    def run(worker: Any) -> None:
        model = Twice()
        attach(model, worker, **JIT)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(torch.ones(1)).sum().backward()

    one_worker(run)


@pytest.mark.parametrize("explicit", [True, False])
def test_an_exception_in_a_pass_withdraws_the_batch_and_gives_memory_back(explicit: bool) -> None:
    class Broken(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(context: Any, grad: Any) -> Any:
            raise ZeroDivisionError

    def run(worker: Any) -> None:
        model = nn.Sequential(line(), line(1.0))
        optimizer = attach(model, worker, **JIT)

        def broken() -> None:
            model[1](Broken.apply(model[0](torch.ones(1, 1)))).sum().backward()

        def attempt(fails: Callable[[], Any]) -> None:
            if explicit:
                with optimizer.batch():
                    fails()
            else:
                fails()

        for fails, error in (
            (broken, ZeroDivisionError),
            (lambda: model(torch.ones(1, 7)), RuntimeError),
        ):
            with pytest.raises(error):
                attempt(fails)
            optimizer.zero_grad()
            assert optimizer.memory.held_bytes == 0
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        compute(model)
        assert optimizer.step() == "pending"
        assert newest(worker, optimizer) == {
            "0.weight": -1.0,
            "0.bias": -1.0,
            "1.weight": 1.0,
            "1.bias": 0.0,
        }

    one_worker(run)


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("after", ["forward", "nothing"])
async def test_a_cancelled_batch_is_left_or_computed_in_vain(after: str, explicit: bool) -> None:
    """k-bsp:1 of two workers: the update happens without the one that is still computing."""
    told = threading.Event()

    def slow(worker: Any) -> None:
        model = nn.Sequential(line(), line(1.0))
        optimizer = attach(model, worker, **JIT)

        def cancelled(batch: Any) -> None:
            worker.evaluate()
            told.wait(10)
            while not batch.cancelled:
                worker.status()  # Each answer is one turn of the broker.

        if explicit:
            with optimizer.batch() as batch:
                loss = model(torch.ones(1, 1)).sum() if after == "forward" else None
                cancelled(batch)
                (model(torch.ones(1, 1)).sum() if loss is None else loss).backward()
                raise AssertionError("the block was not left")
        else:
            loss = model(torch.ones(1, 1)).sum()
            cancelled(optimizer.last)
            (loss if after == "forward" else model(torch.ones(1, 1)).sum()).backward()
            assert optimizer.step() == "cancelled"
        assert optimizer.last.wait() == "cancelled"
        assert optimizer.memory.held_bytes == 0
        optimizer.zero_grad()
        compute(model)
        assert optimizer.step() == "pending"
        assert optimizer.last.wait() == "committed"

    def quick(worker: Any) -> None:
        model = nn.Sequential(line(), line(1.0))
        optimizer = attach(model, worker)
        compute(model)
        optimizer.step()
        assert optimizer.last.wait() == "committed"
        told.set()

    async with cluster(1, optimizer="sgd:lr=1", policy_text="k-bsp:1") as made:
        await on_threads(made, slow, quick)


def test_frozen_parameters_and_buffers_are_here_as_ever() -> None:
    def run(worker: Any) -> None:
        model = nn.Sequential(line(1.0), nn.BatchNorm1d(1, affine=False), line(1.0))
        model[0].requires_grad_(False)
        optimizer = attach(model, worker, **JIT)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([[1.0], [3.0]])).sum().backward()
            optimizer.step()
        assert float(model[0].weight) == 1.0
        assert float(model[1].running_mean) > 0
        assert newest(worker, optimizer)["2.bias"] == -3.0

    one_worker(run)


def test_a_model_is_attached_once_and_a_second_time_disturbs_nothing() -> None:
    def run(worker: Any) -> None:
        model = line(1.0)
        optimizer = attach(model, worker, **JIT)
        for options in ({}, JIT):
            with pytest.raises(ValueError, match="is attached already"):
                attach(model, worker, **options)
            with pytest.raises(RuntimeError, match="has no values here"):
                model.weight + 1
        compute(model)
        optimizer.step()
        assert newest(worker, optimizer) == {"weight": 0.0, "bias": 0.0}

    one_worker(run)


def test_a_detached_model_may_be_attached_again() -> None:
    def run(worker: Any) -> None:
        model = line(1.0)
        for turn in range(2):
            optimizer = attach(model, worker, **JIT)
            compute(model)
            optimizer.step()
            assert newest(worker, optimizer) == {"weight": -float(turn), "bias": -float(turn)}
            optimizer.detach()
            assert not model._forward_hooks
            with pytest.raises(RuntimeError, match="has no values here"):
                model.weight + 1

    one_worker(run)


def test_what_cannot_be_done_just_in_time_is_refused_by_name() -> None:
    class Own(nn.Parameter):  # type: ignore[misc]
        pass

    class Bare(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, device="meta"))

    def own() -> Any:
        model = line()
        model.weight = Own(torch.ones(1, 1))
        return model

    def scripted() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.jit.script(line())

    def shared() -> Any:
        model = nn.Sequential(line(), line())
        model[1].weight = nn.Parameter(model[0].weight.detach().t())
        return model

    def frozen() -> Any:
        return nn.Linear(1, 1, device="meta").requires_grad_(False)

    def run(worker: Any) -> None:
        refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
            (line(), {"scaler": torch.amp.GradScaler("cpu")}, ValueError, "a scaler looks at all"),
            (line(), {"overlap": False}, ValueError, "overlap=False keeps the whole"),
            (line(), {"early": False}, ValueError, "early=False keeps the whole"),
            (line(), {"ahead": -1}, ValueError, "ahead=-1: it counts layers"),
            (nn.DataParallel(line()), {}, TypeError, "the model is a DataParallel"),
            (scripted(), {}, TypeError, "the model is a ScriptModule"),
            (Bare(), {}, ValueError, r"module '' \(Bare\) .* no reset_parameters\(\)"),
            (own(), {}, ValueError, "key 'weight' is a Own"),
            (nn.LazyLinear(3), {}, ValueError, "key 'weight' is a UninitializedParameter"),
            (nn.Sequential(frozen(), line()), {}, ValueError, "'0.weight' is frozen and on the"),
            (3, {}, TypeError, "attach takes a torch.nn.Module, not int"),
            (shared(), {}, ValueError, "are two parameters in one memory"),
        ]
        for model, options, error, text in refused:
            with pytest.raises(error, match=text):
                attach(model, worker, **{**JIT, **options})
        for option in ({"ahead": 2}, {"init": print}):
            with pytest.raises(ValueError, match="only with just_in_time=True"):
                attach(line(), worker, **option)
        with pytest.raises(ValueError, match="on the meta device"):
            attach(nn.Linear(1, 1, device="meta"), worker)

        def init(module: Any) -> None:
            module.scale.fill_(5.0)

        attach(Bare(), worker, init=init, **JIT)
        assert worker.pull("scale").tolist() == [5.0]

    one_worker(run)


def test_if_the_first_worker_cannot_make_all_values_the_next_one_makes_them() -> None:
    asked = threading.Event()

    def first(worker: Any) -> None:
        def init(module: Any) -> None:
            module.reset_parameters()
            if module.out_features == 3:
                asked.set()
                raise ZeroDivisionError

        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 3))
        with pytest.raises(ZeroDivisionError):
            attach(model, worker, init=init, **JIT)
        # Its memory is gone, and PyTorch would read it without a look.
        with pytest.raises(RuntimeError, match=r"'0.weight' has no values: .* and then failed"):
            model(torch.ones(1, 1))

    def second(worker: Any) -> None:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 3))
        asked.wait(10)
        attach(model, worker, init=lambda module: module.weight.fill_(2.0), **JIT)
        assert worker.pull("1.weight").tolist() == [[2.0, 2.0]] * 3

    trained(first, second)


def test_a_pytorch_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_layers, "top_hooks", None)

    def run(worker: Any) -> None:
        with pytest.raises(RuntimeError, match="just_in_time needs PyTorch"):
            attach(line(), worker, **JIT)

    one_worker(run)


def test_a_model_that_differs_is_refused_by_key() -> None:
    def first(worker: Any) -> None:
        attach(nn.Linear(2, 1, device="meta"), worker, **JIT)
        worker.barrier()

    def second(worker: Any) -> None:
        worker.barrier()
        with pytest.raises(KeyMismatch, match=r"key 'weight'.*shape is \(1, 2\), given \(1, 3\)"):
            attach(nn.Linear(3, 1, device="meta"), worker, **JIT)

    trained(first, second)
