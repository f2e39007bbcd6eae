"""The optimizer of an attached JAX model: its batches' fates, and what it refuses."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from jax_models import jax, jnp, same_bits
from processes import answer_of
from worker_threads import trained

from zkv.errors import KeyMismatch, StaleValues
from zkv.jax import attach

pytestmark = pytest.mark.jax

W = {"w": jnp.ones(3), "b": jnp.zeros(())}
ONES = jax.tree.map(jnp.ones_like, W)


def test_an_update_without_this_batch_cancels_it_in_a_block_and_in_a_step() -> None:
    begun, gone_on = threading.Barrier(2, timeout=20), threading.Barrier(2, timeout=20)

    def slow(worker: Any) -> None:
        optimizer = attach(W, worker)
        computed = jax.jit(jax.grad(lambda p: jnp.sum(optimizer.tap(p)["w"]) + p["b"]))
        optimizer.begin()
        begun.wait()
        gone_on.wait()
        params = optimizer.step(ONES)
        assert optimizer.last.wait() == "cancelled"
        same_bits(params["w"], jnp.zeros(3))
        optimizer.withdraw()
        with optimizer.batch() as batch:
            params = batch.params
            begun.wait()
            gone_on.wait()
            gradients = computed(params)
            batch.push(gradients)
            pytest.fail("a cancelled batch leaves its block")
        assert batch.wait() == "cancelled"
        with optimizer.batch() as batch:
            same_bits(batch.params["w"], -jnp.ones(3))
            batch.push(computed(batch.params))
        assert batch.wait() == "committed"
        assert optimizer.resent == 0

    def quick(worker: Any) -> None:
        optimizer = attach(W, worker)
        for _ in range(2):
            with optimizer.batch() as batch:
                begun.wait()
                batch.push(ONES)
            assert batch.wait() == "committed"
            gone_on.wait()

    trained(slow, quick, policy_text="k-batch-bsp:1", optimizer="sgd:lr=1")


def test_a_worker_that_leaves_with_a_batch_begun_holds_nobody_back() -> None:
    def steps(worker: Any, count: int) -> Any:
        optimizer = attach(W, worker)
        params = optimizer.begin()
        for _ in range(count):
            params = optimizer.step(ONES)
        return params

    _, params = trained(
        lambda worker: steps(worker, 2), lambda worker: steps(worker, 5), optimizer="sgd:lr=1"
    )
    same_bits(params["w"], jnp.full(3, -4.0))


def test_workers_with_a_batch_begun_meet_at_a_barrier_and_go_on() -> None:
    def body(worker: Any) -> Any:
        optimizer = attach(W, worker)
        optimizer.begin()
        params = optimizer.step(ONES)
        worker.barrier()
        same_bits(optimizer.pull(), params)
        return optimizer.step(ONES)

    for params in trained(body, body, optimizer="sgd:lr=1"):
        same_bits(params["w"], jnp.full(3, -1.0))


def test_none_is_no_gradient_on_this_worker_and_counts_as_zero() -> None:
    def body(worker: Any) -> Any:
        optimizer = attach(W, worker)
        optimizer.begin()
        return optimizer.step(ONES | {"w": None} if worker.rank else ONES)

    for params in trained(body, body, optimizer="sgd:lr=1"):
        same_bits(params, {"w": jnp.full(3, 0.5), "b": jnp.asarray(-1.0)})


def test_a_block_wants_its_gradients_once() -> None:
    def body(worker: Any) -> None:
        optimizer = attach(W, worker)
        with pytest.raises(RuntimeError, match="without its gradients"), optimizer.batch() as batch:
            pass
        assert batch.outcome == "withdrawn"
        with optimizer.batch() as batch:
            batch.push(ONES)
            with pytest.raises(RuntimeError, match="handed over already"):
                batch.push(ONES)
        assert batch.wait() == "committed"
        # What was refused was not handed over, so it may be put right.
        with optimizer.batch() as batch:
            with pytest.raises(KeyMismatch, match="key 'w'"):
                batch.push(ONES | {"w": jnp.ones(3, "float16")})
            batch.push(ONES)
        assert batch.wait() == "committed"
        with pytest.raises(RuntimeError, match="inside its block"):
            optimizer.batch().push(ONES)

    trained(body)


def test_calls_in_the_wrong_order_say_what_to_do() -> None:
    def body(worker: Any) -> None:
        optimizer = attach(W, worker)
        with pytest.raises(RuntimeError, match=r"params = optimizer.begin\(\)"):
            optimizer.step(ONES)
        transformation = optimizer.transformation()
        with pytest.raises(RuntimeError, match=r"params = optimizer.begin\(\)"):
            transformation.update(ONES, None, W)
        with pytest.raises(ValueError, match="needs the parameters"):
            transformation.update(ONES, None)
        with optimizer.batch() as batch:
            for call in (optimizer.begin, optimizer.withdraw, lambda: optimizer.step(ONES)):
                with pytest.raises(RuntimeError, match=r"block|begin"):
                    call()
            batch.push(ONES)
        params = optimizer.begin()
        with pytest.raises(RuntimeError, match=r"optimizer.withdraw\(\)"), optimizer.batch():
            pass
        with pytest.raises(StaleValues, match="key 'w'"):
            transformation.update(ONES, None, params | {"w": params["w"] + 1})
        params = optimizer.begin()
        with pytest.raises(ValueError, match="Cannot `vmap` ordered IO callback"):
            jax.vmap(lambda one: transformation.update(ONES | {"b": one}, None, params))(
                jnp.ones(3)
            )
        optimizer.close()
        with pytest.raises(RuntimeError, match="closed"):
            optimizer.begin()

    trained(body)


def test_two_threads_at_a_time_are_an_error_and_one_after_the_other_are_none() -> None:
    waiting = threading.Event()

    def first(worker: Any) -> None:
        optimizer = attach(W, worker)
        whole = worker._next_grant

        def told() -> Any:
            waiting.set()
            return whole()

        worker._next_grant = told
        other = threading.Thread(target=optimizer.begin)
        other.start()
        assert waiting.wait(20)
        with pytest.raises(RuntimeError, match="another thread"):
            optimizer.begin()
        let_in.set()
        other.join(20)
        assert not other.is_alive()
        optimizer.step(ONES)

    def second(worker: Any) -> None:
        optimizer = attach(W, worker)
        # The first worker's batch begins when this one's does: both are needed at the start.
        assert let_in.wait(20)
        optimizer.begin()
        optimizer.step(ONES)

    let_in = threading.Event()
    trained(first, second)


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        ({}, ValueError, "nothing to train"),
        ({"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)}, ValueError, "two parameters .*'a/b'"),
        ({"n": jnp.arange(3)}, TypeError, "key 'n': int32 is not trained"),
        ({"z": jnp.ones(2, "complex64")}, TypeError, "key 'z': complex64 is not trained"),
        ({"f": len}, TypeError, "key 'f': attach takes arrays, not builtin"),
    ],
)
def test_what_is_no_model_is_named(params: Any, error: Any, words: str) -> None:
    def body(worker: Any) -> None:
        with pytest.raises(error, match=words):
            attach(params, worker)

    trained(body)


def test_a_worker_is_attached_once_and_again_when_it_was_closed() -> None:
    def body(worker: Any) -> None:
        with pytest.raises(TypeError, match="not int"):
            attach(W, 3)  # type: ignore[arg-type]
        optimizer = attach(W, worker)
        with pytest.raises(ValueError, match="attached already"):
            attach(W, worker)
        optimizer.close()
        attach(W, worker).begin()

    trained(body)


def test_another_workers_model_is_refused_by_key() -> None:
    def body(worker: Any) -> None:
        if worker.rank == 0:
            attach(W, worker)
        worker.barrier()
        if worker.rank == 1:
            with pytest.raises(KeyMismatch, match="key 'w'"):
                attach(W | {"w": jnp.ones(4)}, worker)

    trained(body, body)


MEMBER = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax_models import data, loss_of, mlp, same_bits
from worker_threads import trained
from zkv.jax import attach

assert len(jax.devices()) == 2

def plain():
    params, transformation = mlp(np.float64), optax.adam(0.01)
    state, losses = transformation.init(params), []
    @jax.jit
    def train(params, state, x, y):
        loss, gradients = jax.value_and_grad(loss_of())(params, x, y)
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss
    for number in range(10):
        params, state, loss = train(params, state, *data(8, number, np.float64))
        losses.append(float(loss))
    return losses

mesh = Mesh(np.array(jax.devices()), ("d",))
by_rows = NamedSharding(mesh, P("d"))

def sharded(params_as):
    def body(worker):
        params = jax.device_put(mlp(np.float64, (6, 8, 4)), params_as)
        optimizer = attach(params, worker)
        def loss(params, x, y):
            return loss_of(optimizer.tap)(params, x, jnp.pad(y, ((0, 0), (0, 1))))
        computed = jax.jit(jax.value_and_grad(loss))
        losses = []
        for number in range(3):
            with optimizer.batch(weight=8) as batch:
                assert batch.params["layers"][0]["w"].sharding == params["layers"][0]["w"].sharding
                x, y = jax.device_put(data(8, number, np.float64), by_rows)
                value, gradients = computed(batch.params, x, y)
                batch.push(gradients)
            losses.append(float(value))
        assert batch.wait() == "committed"
        assert optimizer.resent == 0
        return losses
    return trained(body, optimizer="adam:lr=0.01")[0]

def double(worker):
    optimizer = attach(mlp(np.float64), worker)
    transformation = optimizer.transformation()
    @jax.jit
    def train(params, state, x, y):
        loss, gradients = jax.value_and_grad(loss_of(optimizer.tap))(params, x, y)
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss
    params, losses = optimizer.begin(), []
    state = transformation.init(params)
    for number in range(10):
        params, state, loss = train(params, state, *data(8, number, np.float64))
        losses.append(float(loss))
    same_bits(params, optimizer.pull())
    assert optimizer.resent == 0
    return losses

def mapped(worker):
    # Each device's part of the samples has a gradient of its own, so the mean is sent again whole.
    optimizer = attach({"w": jnp.ones(3)}, worker)
    def loss(params, x):
        return jnp.sum(optimizer.tap(params)["w"] * x)
    averaged = jax.pmap(
        lambda params, x: jax.lax.pmean(jax.grad(loss)(params, x), "d"), "d", in_axes=(None, 0)
    )
    params = optimizer.begin()
    both = averaged(params, jnp.asarray([[1.0, 2, 3], [3, 2, 1]]))
    params = optimizer.step({"w": both["w"][0]})
    same_bits(params["w"], jnp.full(3, -1.0))
    assert optimizer.resent == 1

(given,) = trained(double, optimizer="adam:lr=0.01")
np.testing.assert_allclose(given, plain(), rtol=1e-12)
np.testing.assert_allclose(sharded(NamedSharding(mesh, P())), sharded(by_rows), rtol=1e-12)
trained(mapped, optimizer="sgd:lr=1")
print("passed")
"""


def test_float64_and_several_devices_are_computed_in_a_process_of_their_own(tmp_path: Path) -> None:
    environment = os.environ | {
        "JAX_ENABLE_X64": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": os.pathsep.join([*map(str, sys.path), os.environ.get("PYTHONPATH", "")]),
    }
    said = answer_of([sys.executable, "-c", MEMBER], tmp_path, environment, timeout_s=50)
    assert said.split() == ["passed"]
