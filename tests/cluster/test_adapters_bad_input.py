"""Bad input to attached models whose values come just in time, and to taps: as for the others."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from worker_threads import trained

SGD = "sgd:lr=1"


def line(value: float = 0.0) -> Any:
    """Return `torch_models.line`, read late: PyTorch may not be here."""
    import torch_models

    return torch_models.line(value)


def just_in_time(body: Any, *others: Any, **options: Any) -> list[Any]:
    pytest.importorskip("torch")
    return trained(body, *others, **{"optimizer": SGD, **options})


def attached(model: Any, worker: Any) -> Any:
    from zkv.torch import attach

    return attach(model, worker, just_in_time=True)


def compute(model: Any) -> None:
    import torch_models

    torch_models.compute(model)


def newest(optimizer: Any, worker: Any) -> dict[str, float]:
    assert optimizer.last.wait() == "committed"
    return {key: float(value.reshape(-1)[0]) for key, value in worker.pull().items()}


@pytest.mark.torch
def test_d19_a_parameter_has_no_gradient_on_one_worker() -> None:
    """The skipped key counts as zero in the mean; nobody waits for it."""

    def body(worker: Any) -> None:
        from torch_models import nn, torch

        class Sum(nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = line(), line()

            def forward(self, x: Any) -> Any:
                return self.a(x) + (self.b(x) if worker.rank == 0 else torch.zeros(1))

        model = Sum()
        optimizer = attached(model, worker)
        for turn in range(1, 3):
            optimizer.zero_grad()
            compute(model)
            optimizer.step()
            found = newest(optimizer, worker)
            assert found == {"a.weight": -turn, "a.bias": -turn} | {
                key: -turn / 2 for key in ("b.weight", "b.bias")
            }
            worker.barrier()

    just_in_time(body, body)


@pytest.mark.torch
def test_d08_gradients_may_be_overwritten_as_soon_as_backward_returns() -> None:
    """Somebody has kept them, and writes into them while they are on their way."""

    def body(worker: Any) -> None:
        from torch_models import nn, torch

        model = nn.Sequential(nn.Linear(512, 600, bias=False), nn.Linear(600, 1, bias=False))
        with torch.no_grad():
            model[0].weight.zero_()
            model[1].weight.fill_(1.0)
        kept: list[Any] = []
        model[0].weight.register_post_accumulate_grad_hook(lambda one: kept.append(one.grad))
        optimizer = attached(model, worker)
        for turn in range(1, 6):
            optimizer.zero_grad()
            # The second layer's weight has a gradient of zero for as long as the first's is zero.
            model[0](torch.ones(1, 512)).sum().backward()
            kept[-1].fill_(99.0)
            optimizer.step()
            assert optimizer.last.wait() == "committed"
            np.testing.assert_array_equal(worker.pull("0.weight"), -turn)
        assert len(kept) == 5

    just_in_time(body)


@pytest.mark.torch
def test_other_memory_modules_and_threads_are_named_and_the_next_batch_works() -> None:
    def body(worker: Any) -> None:
        from torch_models import nn, torch

        model = nn.Sequential(line(), line(1.0))
        optimizer = attached(model, worker)
        with pytest.raises(RuntimeError, match=r"key '0\.weight' has no values here"):
            model[0].weight.data = torch.zeros(1, 2)
        with pytest.raises(RuntimeError, match=r"key '0\.weight' has no values here"):
            model.to(torch.float64)
        kept, model[1] = model[1], line()
        with pytest.raises(RuntimeError, match=r"changed after attach: key '1\.weight'"):
            compute(model)
        model[1] = kept
        told: list[str] = []

        def other() -> None:
            try:
                model(torch.ones(1, 1))
            except RuntimeError as error:
                told.append(str(error))

        loss = model(torch.ones(1, 1)).sum()
        thread = threading.Thread(target=other, name="evaluation")
        thread.start()
        thread.join(10)
        assert "'evaluation' while a batch is open" in told[0]
        loss.backward()
        optimizer.step()
        assert newest(optimizer, worker)["0.bias"] == -1.0
        assert optimizer.memory.held_bytes == 0

    just_in_time(body)


@pytest.mark.jax
def test_d08_what_taps_hand_over_is_read_before_xla_uses_its_memory_again() -> None:
    """Codes of large gradients are made beside the caller, while the backward pass goes on."""
    jax = pytest.importorskip("jax")
    from jax_models import same_bits

    from zkv.jax import attach

    jnp = jax.numpy
    chance = np.random.default_rng(0)
    start = [jnp.asarray(chance.standard_normal((320, 320)) / 18, jnp.float32) for _ in range(6)]
    x = jnp.asarray(chance.standard_normal((8, 320)), jnp.float32)

    def body(tapped: bool) -> Any:
        def run(worker: Any) -> Any:
            optimizer = attach(start, worker)
            tap = optimizer.tap if tapped else lambda params: params

            def loss(params: Any) -> Any:
                out = x
                for one in tap(params):
                    out = jnp.tanh(out @ one)
                return jnp.sum(out**2)

            computed = jax.jit(jax.grad(loss))
            for _ in range(4):
                with optimizer.batch() as batch:
                    batch.push(computed(batch.params))
            assert batch.wait() == "committed"
            assert optimizer.resent == 0
            return optimizer.pull()

        return run

    ways = [
        trained(body(tapped), optimizer=SGD, codec="int8+ef;small=0") for tapped in (True, False)
    ]
    same_bits(*(one for (one,) in ways))


@pytest.mark.jax
def test_d24_one_array_in_two_leaves_is_two_parameters() -> None:
    """JAX's arrays do not change, so one of them in two places is no tie, as it is for optax."""
    jax = pytest.importorskip("jax")
    from zkv.jax import attach

    jnp = jax.numpy

    def body(worker: Any) -> None:
        shared = jnp.zeros(3)
        optimizer = attach({"a": shared, "b": shared}, worker)
        with optimizer.batch() as batch:
            batch.push({"a": jnp.ones(3), "b": jnp.full(3, 2.0)})
        assert batch.wait() == "committed"
        found = optimizer.pull()
        assert (found["a"].tolist(), found["b"].tolist()) == ([-1.0] * 3, [-2.0] * 3)

    trained(body, optimizer=SGD)
