"""What a step of an attached model does when it is accumulated, cancelled, broken or odd."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import cluster
from torch_models import compute, line, mlp, nn, torch, values
from worker_threads import on_threads

from zkv.errors import Cancelled, Closed, KeyMismatch, StaleValues
from zkv.spans import Spans
from zkv.torch import attach

pytestmark = pytest.mark.torch

SGD = "sgd:lr=1"


def newest(optimizer: Any, model: Any) -> dict[str, float]:
    optimizer.last.wait()
    optimizer.pull()
    return {key: round(float(value.ravel()[0]), 6) for key, value in values(model).items()}


class Broken(torch.autograd.Function):
    """A function whose backward pass raises while `broken` is set."""

    broken = True

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if Broken.broken:
            raise ZeroDivisionError("the user's own")
        return grad


async def run(body: Callable[[Any], Any], *others: Callable[[Any], Any], **options: Any) -> Any:
    options.setdefault("optimizer", SGD)
    async with cluster(1, **options) as made:
        return await on_threads(made, body, *others)


# --- accumulation, skipped keys --------------------------------------------------------------


@pytest.mark.parametrize("last_outside", [True, False])
async def test_accumulated_gradients_are_sent_once(last_outside: bool) -> None:
    def body(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)
        for turn in range(1, 3):
            optimizer.zero_grad()
            with optimizer.no_sync():
                compute(model, 0.25)
                compute(model, 0.5)
                assert not optimizer._step.sent
                if not last_outside:
                    compute(model, 0.25)
            if last_outside:
                compute(model, 0.25)
                assert optimizer._step.sent
            optimizer.step()
            assert newest(optimizer, model) == {"weight": -turn, "bias": -turn}

    await run(body)


async def test_a_trace_has_the_passes_of_each_batch_and_copies_are_not_traced() -> None:
    def body(worker: Any) -> None:
        spans = worker._ledger.spans = Spans(time.monotonic)
        model = line()
        optimizer = attach(model, worker)
        compute(model)
        optimizer.step()
        copied = copy.deepcopy(model)
        for _ in range(2):
            with optimizer.no_sync():
                compute(model, 0.5)
        copied(torch.ones(1, 1))
        optimizer.step()
        passes = [one for one in spans.kept if one.name in ("forward", "backward")]
        (first,) = [one for one in spans.kept if one.name == "compute" and one.about["batch"] == 1]
        assert [(one.name, one.about["batch"]) for one in passes] == [
            (name, batch) for batch in (1, 2, 2) for name in ("forward", "backward")
        ]
        times = [at for one in passes for at in (one.start_s, one.end_s)]
        assert times == sorted(times)
        assert first.start_s <= times[0] <= times[3] <= first.end_s
        optimizer.detach()
        assert not model._forward_hooks

    await run(body)


async def test_a_second_gradient_in_one_batch_is_named_and_withdraws_it() -> None:
    def body(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)
        compute(model)
        with pytest.raises(RuntimeError, match=r"key '(bias|weight)'.*second.*no_sync"):
            compute(model)
        assert optimizer.step() == "withdrawn"
        optimizer.zero_grad()
        compute(model)
        optimizer.step()
        assert newest(optimizer, model) == {"weight": -1, "bias": -1}
        assert worker.stats()["outcomes"]["committed"] == 1

    await run(body)


async def test_without_overlap_all_backward_passes_of_a_step_are_one_gradient() -> None:
    def body(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker, overlap=False)
        compute(model)
        compute(model)
        norm = nn.utils.clip_grad_value_(model.parameters(), 1.5)
        assert norm is None
        optimizer.step()
        assert newest(optimizer, model) == {"weight": -1.5, "bias": -1.5}

    await run(body)


async def test_d19_a_parameter_has_no_gradient_on_one_worker() -> None:
    """The skipped key counts as zero in the mean; nobody waits for it."""

    def body(worker: Any) -> None:
        model = nn.ModuleDict({"a": line(), "b": line()})
        optimizer = attach(model, worker)
        for turn in range(1, 3):
            optimizer.zero_grad()
            compute(model["a"])
            if worker.rank == 0:
                compute(model["b"])
            optimizer.step()
            found = newest(optimizer, model)
            assert found == {"a.weight": -turn, "a.bias": -turn} | {
                key: -turn / 2 for key in ("b.weight", "b.bias")
            }

    await run(body, body)


async def test_d08_gradients_may_be_overwritten_as_soon_as_step_returns() -> None:
    def body(worker: Any) -> None:
        model = nn.Linear(512, 600, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        optimizer = attach(model, worker)
        for turn in range(1, 11):
            optimizer.zero_grad()
            model(torch.ones(1, 512)).sum().backward()
            optimizer.step()
            model.weight.grad.fill_(99.0)
            optimizer.last.wait()
            optimizer.pull()
            np.testing.assert_array_equal(values(model)["weight"], -turn)

    await run(body)


async def test_d08_a_gradient_that_is_changed_before_step_is_named() -> None:
    """It has left already, so a change would be lost without a word."""

    def body(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)
        compute(model, 8.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(RuntimeError, match=r"key '\w+'.*changed after it was sent.*overlap"):
            optimizer.step()
        assert optimizer.last.outcome == "withdrawn"
        optimizer.zero_grad()
        compute(model)
        optimizer.step()
        assert newest(optimizer, model) == {"weight": -1, "bias": -1}

    await run(body)


def test_d41_a_gradient_on_a_device_is_read_in_the_order_of_pytorchs_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stand-ins for CuPy and for a tensor: no sooner than it is there, and before it is changed."""
    import cupy_on_cpu

    from zkv_workers import torch_tensors

    class Stream:
        cuda_stream = 7

    class OnDevice:
        layout, dtype, device = torch.strided, torch.float32, torch.device("cuda", 1)

        def detach(self) -> OnDevice:
            return self

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch_tensors.importlib.util, "find_spec", lambda name: object())
    grad = OnDevice()
    with cupy_on_cpu.installed() as machine:
        with torch_tensors.in_order_of(grad):
            assert machine.current == (1, 7)
            assert torch_tensors.gradient_of(grad, None) is grad
        assert machine.current == (0, 0)
        assert machine.order.waiters == set()
        with torch_tensors.in_order_of(torch.zeros(1)):
            assert machine.current == (0, 0)


def test_cupy_is_looked_for_only_for_a_gradient_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """To search all of sys.path takes longer than all the rest of a small gradient's push."""
    from zkv_workers import torch_tensors

    def find_spec(name: str) -> None:
        raise AssertionError(f"{name} is looked for")

    monkeypatch.setattr(torch_tensors.importlib.util, "find_spec", find_spec)
    grad = torch.arange(3.0)
    with torch_tensors.in_order_of(grad):
        assert torch_tensors.gradient_of(grad, 2.0).tolist() == [0.0, 2.0, 4.0]


# --- cancelled and broken --------------------------------------------------------------------


async def test_a_cancelled_batch_is_computed_in_vain_and_reported() -> None:
    """k-bsp:1 of two workers: the update happens without the one that is still computing."""

    def slow(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)
        optimizer.zero_grad()
        loss = model(torch.ones(1, 1)).sum()
        worker.evaluate()
        told.wait(10)
        while not optimizer.last.cancelled:
            worker.status()  # Each answer is one turn of the broker.
        loss.backward()
        assert optimizer.step() == "cancelled"
        assert optimizer.last.wait() == "cancelled"
        optimizer.zero_grad()
        compute(model)
        assert optimizer.step() == "pending"
        assert optimizer.last.wait() == "committed"

    def quick(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)
        compute(model)
        optimizer.step()
        assert optimizer.last.wait() == "committed"
        told.set()

    import threading

    told = threading.Event()
    await run(slow, quick, policy_text="k-bsp:1")


def cancelled_batches(worker: Any, where: str) -> Any:
    """Let the next batch be cancelled before its values come ("begin", "values") or its gradients
    go ("push"): what the policy does, without another worker."""
    whole = worker.batch

    def batch(weight: float | None = 1.0) -> Any:
        made = whole(weight)
        enter = made.__enter__

        class Cut(type(made)):  # type: ignore[misc]
            def __enter__(self) -> Any:
                enter()
                if where == "begin":
                    self._open.cancelled, self._open.ahead = True, False
                return self

            def push_all(self, gradients: Any, **options: Any) -> None:
                if where == "push":
                    self._open.cancelled = True
                super().push_all(gradients, **options)

        made.__class__ = Cut
        worker.batch = whole
        return made

    worker.batch = batch


@pytest.mark.parametrize("where", ["begin", "push"])
async def test_wherever_a_batch_is_cancelled_the_loop_goes_on(where: str) -> None:
    def body(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)
        for turn in range(3):
            if turn == 1:
                cancelled_batches(worker, where)
            optimizer.zero_grad()
            compute(model)
            assert optimizer.step() == ("cancelled" if turn == 1 else "pending")
        assert newest(optimizer, model)["bias"] < 0

    await run(body)


async def test_a_batch_in_vain_that_is_given_up_is_followed_by_another() -> None:
    """The user's own exception comes out of a forward pass on a torn model, and skips step()."""

    def body(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)
        cancelled_batches(worker, "begin")
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.ones(1, 7))
        first = optimizer.last
        assert optimizer._step.vain
        optimizer.zero_grad()
        compute(model)
        assert optimizer.last is not first
        assert optimizer.step() == "pending"
        assert newest(optimizer, model)["bias"] == -1

    await run(body)


@pytest.mark.parametrize("where", ["begin", "push"])
async def test_a_block_is_left_where_its_batch_is_cancelled(where: str) -> None:
    def body(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)
        reached = []
        for turn in range(3):
            if turn == 1:
                cancelled_batches(worker, where)
            with optimizer.batch(weight=2) as batch:
                optimizer.zero_grad()
                compute(model)
                reached.append(turn)
            if turn != 1:
                assert batch.wait() == "committed"
        assert reached == [0, 2]

    await run(body)


@pytest.mark.parametrize("zeroed", [True, False])
async def test_an_exception_in_the_backward_pass_withdraws_the_batch(zeroed: bool) -> None:
    def body(worker: Any) -> None:
        model = nn.Sequential(line(), line(1.0))
        optimizer = attach(model, worker)
        Broken.broken = True
        hidden = Broken.apply(model[0](torch.ones(1, 1)))
        loss = model[1](hidden).sum() + model[0].weight.sum() * 0
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        assert "1.bias" in optimizer._step.sent
        first = optimizer.last
        if zeroed:
            optimizer.zero_grad()
        else:
            for one in model.parameters():
                one.grad = None
        compute(model)
        assert first.outcome == "withdrawn"
        optimizer.step()
        assert newest(optimizer, model)["1.bias"] == 0.0
        assert worker.stats()["outcomes"] == {"committed": 1, "discarded": 0, "cancelled": 0}

    await run(body)


async def test_an_exception_in_the_forward_pass_leaves_a_batch_that_the_next_one_uses() -> None:
    def body(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)
        for _ in range(2):
            optimizer.zero_grad()
            with pytest.raises(RuntimeError, match="shape"):
                model(torch.ones(1, 7))
        compute(model)
        optimizer.step()
        assert newest(optimizer, model) == {"weight": -1, "bias": -1}
        assert optimizer.last.number == 1

    await run(body)


async def test_an_exception_in_a_block_withdraws_its_batch_and_goes_on() -> None:
    def body(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)

        def block(then: Callable[[], Any]) -> None:
            with optimizer.batch():
                compute(model)
                then()

        with pytest.raises(ZeroDivisionError):
            block(lambda: 1 / 0)
        assert optimizer.last.outcome == "withdrawn"
        with pytest.raises(RuntimeError, match="cannot be set to zero"):
            block(optimizer.zero_grad)
        assert optimizer.last.outcome == "withdrawn"
        optimizer.zero_grad()
        with optimizer.batch():
            compute(model)
        assert newest(optimizer, model) == {"weight": -1, "bias": -1}

    await run(body)


async def test_a_step_that_is_left_out_is_withdrawn_by_zero_grad() -> None:
    def body(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)
        compute(model, 5.0)
        optimizer.zero_grad()  # The user did not like the loss.
        compute(model)
        optimizer.zero_grad(set_to_none=False)
        compute(model, 2.0)
        optimizer.step()
        assert newest(optimizer, model) == {"weight": -2, "bias": -2}

    await run(body)


# --- odd uses --------------------------------------------------------------------------------


async def test_misuse_is_named() -> None:
    def body(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)
        with pytest.raises(RuntimeError, match="step\\(\\) without a batch"):
            optimizer.step()
        with torch.no_grad():
            model(torch.ones(1, 1))  # An evaluation begins no batch.
        assert optimizer.last is None
        loss = nn.functional.linear(torch.ones(1, 1), model.weight).sum()
        with pytest.raises(RuntimeError, match="'weight': a gradient came while no batch is open"):
            loss.backward()
        optimizer.zero_grad()
        compute(model)
        with pytest.raises(RuntimeError, match="a batch is open"):
            optimizer.pull()
        with pytest.raises(RuntimeError, match="open already"), optimizer.batch():
            pass
        optimizer.step()
        with optimizer.batch():
            optimizer.zero_grad()
            compute(model)
            optimizer.step()  # As a framework may; the block has nothing left to do.
        assert newest(optimizer, model) == {"weight": -2, "bias": -2}

    await run(body)


async def test_a_closure_computes_first() -> None:
    def body(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)

        def closure() -> str:
            optimizer.zero_grad()
            compute(model)
            return "the loss"

        for _ in range(2):
            assert optimizer.step(closure) == "the loss"
        assert newest(optimizer, model) == {"weight": -2, "bias": -2}

    await run(body)


async def test_a_changed_model_is_named() -> None:
    def body(worker: Any) -> None:
        model = nn.Sequential(line(), line())
        optimizer = attach(model, worker)
        kept = model[1]
        model[1] = line()
        with pytest.raises(RuntimeError, match=r"changed after attach: key '1\.weight'"):
            compute(model)
        model[1] = kept
        model[0].weight.data = torch.zeros(1, 2)
        with pytest.raises(KeyMismatch, match=r"'0\.weight': shape \(1, 1\) expected, given"):
            compute(model)
        model[0].weight.data = torch.zeros(1, 1, dtype=torch.float64)
        with pytest.raises(KeyMismatch, match=r"'0\.weight': dtype float32 expected"):
            compute(model)
        model[0].weight.data = torch.zeros(1, 1)
        compute(model)
        optimizer.step()
        del model[1]
        with pytest.raises(RuntimeError, match=r"key '1\.weight' is no longer part"):
            compute(model)

    await run(body)


async def test_a_parameter_that_was_frozen_and_has_a_gradient_is_named() -> None:
    def body(worker: Any) -> None:
        model = line()
        model.bias.requires_grad_(False)
        optimizer = attach(model, worker)
        model.bias.requires_grad_(True)
        compute(model)
        with pytest.raises(RuntimeError, match="'bias' has a gradient, but was frozen"):
            optimizer.step()
        assert optimizer.last.outcome == "withdrawn"

    await run(body)


async def test_a_worker_that_was_closed_or_forked_is_named() -> None:
    def body(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)
        worker._pid += 1  # What a child process sees after a fork.
        with pytest.raises(Closed, match="connect again after a fork"):
            compute(model)
        worker._pid -= 1
        model(torch.ones(1, 1)).sum().backward()
        worker._pid += 1
        with pytest.raises(Closed, match="after a fork"):
            optimizer.step()
        worker._pid -= 1
        optimizer.zero_grad()
        compute(model)
        worker.close()
        with pytest.raises(Closed, match="has left"):
            optimizer.step()
        optimizer.detach()

    await run(body)


async def test_a_second_thread_is_named() -> None:
    import threading

    def body(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)
        errors: list[str] = []

        def other() -> None:
            try:
                model(torch.ones(1, 1))
            except RuntimeError as error:
                errors.append(str(error))

        model(torch.ones(1, 1)).sum().backward()
        thread = threading.Thread(target=other, name="evaluation")
        thread.start()
        thread.join(10)
        assert "'evaluation' while a batch is open" in errors[0]
        optimizer.step()
        assert newest(optimizer, model) == {"weight": -1, "bias": -1}

    await run(body)


async def test_detach_leaves_a_model_of_plain_pytorch() -> None:
    def body(worker: Any) -> None:
        model = mlp()
        optimizer = attach(model, worker)
        for turn in range(2):
            model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
            if not turn:
                optimizer.step()
        optimizer.detach()
        assert optimizer.last.outcome == "withdrawn"
        assert not any(one._forward_pre_hooks for one in model.modules())
        assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
        assert {type(one) for one in model.parameters()} == {nn.Parameter}
        model.zero_grad()
        model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
        with pytest.raises(RuntimeError, match="without a batch"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="detached"), optimizer.batch():
            pass
        optimizer.detach()
        again = attach(model, worker)
        with torch.no_grad():
            model[0].weight.zero_()
        again.pull()
        assert model[0].weight.abs().sum() > 0

    await run(body)


async def test_copies_and_pickles_of_a_model_are_not_attached() -> None:
    def body(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)
        with optimizer.batch():
            model(torch.ones(1, 1))  # The first batch shows whose hooks are run.
        optimizer._begin(worker.batch(), explicit=False)
        assert type(model.weight) is not nn.Parameter
        copied = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for other in (copied, loaded):
            assert {type(one) for one in other.parameters()} == {nn.Parameter}
            other(torch.ones(1, 1)).sum().backward()
            assert other.weight.grad.tolist() == [[1.0]]
        assert not optimizer._step.sent
        optimizer.step()
        replica = model._replicate_for_data_parallel()  # It shares the hooks.
        replica.weight, replica.bias = torch.zeros(1, 1), torch.zeros(1)
        replica(torch.ones(1, 1))
        assert optimizer._step is None

    await run(body)


async def test_code_outside_of_python_cannot_send_a_gradient_of_old_values() -> None:
    def body(worker: Any) -> None:
        model = nn.ModuleDict({"a": line(), "b": line()})
        optimizer = attach(model, worker)
        for _ in range(2):
            optimizer.zero_grad()
            (model["a"](torch.ones(1, 1)) + model["b"](torch.ones(1, 1))).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        out = model["a"](torch.ones(1, 1))
        with torch._C.DisableTorchFunctionSubclass():  # As compiled code does not ask.
            out = out + torch._C._nn.linear(torch.ones(1, 1), model["b"].weight)
        with pytest.raises(StaleValues, match=r"'b\.weight'"):
            out.sum().backward()
        assert optimizer.step() == "withdrawn"
        optimizer.zero_grad()
        out = model["a"](torch.ones(1, 1))
        with torch._C.DisableTorchFunctionSubclass():
            out = out + torch._C._nn.linear(torch.ones(1, 1), model["b"].weight)
        out.sum().backward()
        assert optimizer.step() == "pending"
        assert newest(optimizer, model)["b.weight"] == -3

    await run(body)


async def test_cancelled_reaches_a_block_from_an_own_use_of_the_batch() -> None:
    def body(worker: Any) -> None:
        model = line()
        optimizer = attach(model, worker)
        after = []
        with optimizer.batch() as batch:
            raise Cancelled("as batch.params does")
        after.append(batch)
        optimizer.zero_grad()
        with optimizer.batch():
            compute(model)
        assert newest(optimizer, model) == {"weight": -1, "bias": -1}

    await run(body)
