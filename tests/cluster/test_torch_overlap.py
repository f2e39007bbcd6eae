"""Gradients leave inside the backward pass; forward passes begin on the first layer's values."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from harness import cluster
from torch_models import nn, seeded, torch, values
from worker_threads import on_threads

from zkv.errors import PushRefused
from zkv.placement import BLOCK_BYTES
from zkv.torch import attach
from zkv_workers import signals as s

pytestmark = pytest.mark.torch

WIDE = 160
"""A layer of this many inputs and outputs is more than 64 KiB: its weight is a block of its own."""


def wide(layers: int = 3) -> Any:
    with seeded(0):
        return nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(layers)))


async def test_gradients_are_with_the_session_before_the_backward_pass_ends() -> None:
    def body(worker: Any) -> None:
        model = wide()
        seen: list[int] = []
        first_is_there = threading.Event()
        feed = worker._driver.feed

        def watched(event: Any) -> None:
            feed(event)
            if isinstance(event, s.SendBlock):
                seen.append(event.bid)
                first_is_there.set()

        worker._driver.feed = watched
        met: list[tuple[bool, int]] = []
        model[0].weight.register_post_accumulate_grad_hook(
            lambda _: met.append((first_is_there.wait(10), len(optimizer._step.sent)))
        )
        optimizer = attach(model, worker)
        model(torch.ones(2, WIDE)).sum().backward()
        # The last layer's block was sent, and two of three gradients had been handed over.
        assert met == [(True, 2)]
        assert list(optimizer._step.sent) == ["2.weight", "1.weight", "0.weight"]
        optimizer.step()
        assert optimizer.last.wait() == "committed"
        assert len(set(seen)) == 3

    async with cluster(1) as made:
        await on_threads(made, body)


async def test_small_gradients_leave_together_and_all_of_them_with_the_backward_pass() -> None:
    """A part is a sixteenth of 20 layers: two of them."""

    def body(worker: Any) -> None:
        model = wide(20)
        fed: list[int] = []
        all_are_there = threading.Event()
        feed = worker._driver.feed

        def watched(*events: Any) -> None:
            feed(*events)
            fed.append(sum(isinstance(event, s.SendBlock) for event in events))
            if sum(fed) == 20:
                all_are_there.set()

        worker._driver.feed = watched
        optimizer = attach(model, worker)
        fed.clear()
        model(torch.ones(2, WIDE)).sum().backward()
        assert all_are_there.wait(10)
        assert [count for count in fed if count] == [2] * 10
        optimizer.step()
        assert optimizer.last.wait() == "committed"

    # Each layer has a block of its own.
    async with cluster(1, block_bytes=BLOCK_BYTES) as made:
        await on_threads(made, body)


@pytest.mark.parametrize("explicit", [False, True])
async def test_a_gradient_that_is_refused_at_the_end_of_the_backward_pass_is_named(
    explicit: bool,
) -> None:
    """Of 20 layers and a small one in front, whose gradient waits for no other."""

    def body(worker: Any) -> None:
        model = nn.Sequential(nn.Linear(1, WIDE, bias=False), *wide(20))
        optimizer = attach(model, worker)

        def backward() -> None:
            model(torch.ones(1, 1)).sum().backward()

        def spoiled() -> None:
            if explicit:
                with optimizer.batch():
                    backward()
            else:
                backward()

        before = {key: one.clone() for key, one in model.state_dict().items()}
        spoiler = model[0].weight.register_hook(lambda grad: grad * float("nan"))
        with pytest.raises(PushRefused, match=r"'0\.weight': element 0 of the gradient is nan"):
            spoiled()
        spoiler.remove()
        withdrawn = optimizer.last
        optimizer.zero_grad()
        assert withdrawn.outcome == "withdrawn"
        backward()
        optimizer.step()
        assert optimizer.last.wait() == "committed"
        optimizer.pull()
        assert all(bool(torch.isfinite(one).all()) for one in model.state_dict().values())
        assert any(not torch.equal(one, before[key]) for key, one in model.state_dict().items())

    async with cluster(1, codec="int8;small=0") as made:
        await on_threads(made, body)


class Arrivals:
    """Stands between an optimizer and its batches: values come when the test says so.

    Reading one that has not come fails at once, where the real batch would wait.
    """

    def __init__(self, worker: Any, here: set[str]) -> None:
        self.here = here
        self.log: list[str] = []
        arrivals, whole = self, worker.batch

        def batch(weight: float = 1.0) -> Any:
            made = whole(weight)

            class Slow(type(made)):  # type: ignore[misc]
                def read_into(self, key: Any, out: Any) -> None:
                    assert key in arrivals.here, f"{key} was waited for too early"
                    arrivals.log.append(key)
                    super().read_into(key, out)

            made.__class__ = Slow
            return made

        worker.batch = batch


async def test_the_first_layer_is_computed_before_the_last_values_have_come() -> None:
    def body(worker: Any) -> None:
        model = wide()
        optimizer = attach(model, worker)
        arrivals = Arrivals(worker, {"0.weight", "1.weight", "2.weight"})

        def computed(module: Any, args: Any, out: Any) -> None:
            name = next(name for name, one in model.named_children() if one is module)
            arrivals.log.append(f"computed {name}")
            arrivals.here.add(f"{int(name) + 1}.weight")

        for one in model:
            one.register_forward_hook(computed)
        for turn in range(2):
            arrivals.log.clear()
            if turn:
                arrivals.here = {"0.weight"}
            optimizer.zero_grad()
            model(torch.ones(2, WIDE)).sum().backward()
            optimizer.step()
            layers = [[f"{one}.weight", f"computed {one}"] for one in range(3)]
            in_turn = [step for one in layers for step in one]
            # In the first batch all is waited for at first, as nothing is known of the modules.
            assert arrivals.log == (in_turn if turn else sorted(in_turn))

    async with cluster(1) as made:
        await on_threads(made, body)


async def test_early_false_waits_for_all_values_when_a_batch_begins() -> None:
    def body(worker: Any) -> None:
        model = wide()
        optimizer = attach(model, worker, early=False)
        arrivals = Arrivals(worker, {"0.weight", "1.weight", "2.weight"})
        for _ in range(3):
            arrivals.log.clear()
            optimizer.zero_grad()
            out = model[0](torch.ones(2, WIDE))  # No hook: the model itself is not called.
            assert not arrivals.log
            out = model(torch.ones(2, WIDE))
            assert len(arrivals.log) == 3
            out.sum().backward()
            optimizer.step()

    async with cluster(1) as made:
        await on_threads(made, body)


class Shuffled(nn.Module):
    """Modules whose parameters are used in an order that changes, as modules or as functions."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.a, self.b, self.c = (nn.Linear(4, 4).double() for _ in range(3))
            self.rnn = nn.GRU(4, 4, batch_first=True).double()
            self.never = nn.Linear(4, 4).double()

    def forward(self, x: Any, turn: int) -> Any:
        linear = nn.functional.linear
        out = linear(x, self.never.weight)
        if turn % 2:
            out = linear(out, self.c.weight, self.c.bias) + self.b.bias
        for one in (self.a, self.b, self.c)[:: -1 if turn == 3 else 1]:
            out = torch.tanh(one(out))
        return self.rnn(out[None])[0]


async def test_parameters_used_out_of_order_are_never_of_an_earlier_batch() -> None:
    """Also where a bias is used as a function before its module, which autograd cannot notice."""
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)
    mine = Shuffled()
    reference = torch.optim.SGD(mine.parameters(), lr=0.5)
    expected = []
    for turn in range(6):
        reference.zero_grad()
        loss = mine(x, turn).square().mean()
        loss.backward()
        reference.step()
        expected.append(loss.item())

    def body(worker: Any) -> None:
        model = Shuffled()
        optimizer = attach(model, worker)
        losses = []
        for turn in range(6):
            optimizer.zero_grad()
            loss = model(x, turn).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
        assert optimizer._at_once == {"never.weight", "never.bias"}

    async with cluster(2, optimizer="sgd:lr=0.5") as made:
        await on_threads(made, body)


async def test_autograd_notices_a_parameter_that_was_used_before_its_values_came() -> None:
    def body(worker: Any) -> None:
        model = wide(2)
        optimizer = attach(model, worker)
        x = torch.ones(2, WIDE)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer._begin(worker.batch(), explicit=False)
        with torch._C.DisableTorchFunctionSubclass():  # As compiled code does not ask.
            early = torch._C._nn.linear(x.clone().requires_grad_(), model[1].weight)
        late = model(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (early.sum() + late.sum()).backward()

    async with cluster(1) as made:
        await on_threads(made, body)


@pytest.mark.parametrize("reentrant", [True, False])
async def test_checkpointed_modules_run_again_inside_the_backward_pass(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def body(worker: Any) -> None:
        model = wide(3)
        optimizer = attach(model, worker)
        first = values(model)
        x = torch.ones(2, WIDE, requires_grad=True)
        for _ in range(2):
            optimizer.zero_grad()
            out = model[0](x)
            for one in (model[1], model[2]):
                out = checkpoint(one, out, use_reentrant=reentrant)
            out.sum().backward()
            assert len(optimizer._step.sent) == 3
            assert optimizer.step() == "pending"
        assert optimizer.last.wait() == "committed"
        optimizer.pull()
        assert all((values(model)[key] != one).any() for key, one in first.items())

    async with cluster(1, optimizer="sgd:lr=0.01") as made:
        await on_threads(made, body)


async def test_a_compiled_model_waits_for_all_values_at_once() -> None:
    def losses(model: Any, call: Any, optimizer: Any) -> list[float]:
        found = []
        for turn in range(4):
            optimizer.zero_grad()
            loss = call(torch.full((3, WIDE), 0.1 * turn)).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    mine = wide()
    expected = losses(mine, mine, torch.optim.SGD(mine.parameters(), lr=0.1))

    def body(worker: Any) -> None:
        model = wide()
        optimizer = attach(model, worker, early=False)
        compiled = torch.compile(model, backend="eager")
        assert losses(model, compiled, optimizer) == pytest.approx(expected, rel=1e-5)

    async with cluster(1, optimizer="sgd:lr=0.1") as made:
        await on_threads(made, body)
