"""An attached JAX model learns what plain optax learns, in blocks, by steps and by updates."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from jax_models import data, jax, jnp, loss_of, mlp, optax, same_bits
from worker_threads import trained

from zkv.jax import attach

pytestmark = pytest.mark.jax

BATCHES = 50
SIZES = (5, 3)
"""Samples of each batch of the two workers."""

RULES = {
    "sgd:lr=0.1": lambda: optax.sgd(0.1),
    "momentum:lr=0.05,momentum=0.9": lambda: optax.sgd(0.05, momentum=0.9),
    "adam:lr=0.01": lambda: optax.adam(0.01),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.1)),
}


@cache
def alone(rule: str) -> list[float]:
    """The losses of plain optax on the whole batches."""
    transformation = RULES[rule]()

    def train(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of())(params, x, y)
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params, step = mlp(), jax.jit(train)
    state, losses = transformation.init(params), []
    for number in range(BATCHES):
        params, state, loss = step(params, state, *data(sum(SIZES), number))
        losses.append(float(loss))
    return losses


def parts(rank: int, number: int) -> tuple[Any, Any]:
    begin = sum(SIZES[:rank])
    x, y = data(sum(SIZES), number)
    return x[begin : begin + SIZES[rank]], y[begin : begin + SIZES[rank]]


def by_blocks(worker: Any) -> list[float]:
    optimizer = attach(mlp(), worker)
    computed = jax.jit(jax.value_and_grad(loss_of(optimizer.tap)))
    losses = []
    for number in range(BATCHES):
        x, y = parts(worker.rank, number)
        with optimizer.batch(weight=len(x)) as batch:
            loss, gradients = computed(batch.params, x, y)
            assert len(optimizer._step.sent) == 4
            batch.push(gradients)
        losses.append(float(loss) * len(x))
    assert batch.wait() == "committed"
    assert optimizer.resent == 0
    return losses


def by_steps(worker: Any) -> list[float]:
    optimizer = attach(mlp(), worker)
    computed = jax.jit(jax.value_and_grad(loss_of(optimizer.tap)))
    params, losses = optimizer.begin(), []
    for number in range(BATCHES):
        x, y = parts(worker.rank, number)
        loss, gradients = computed(params, x, y)
        params = optimizer.step(gradients, weight=len(x), loss=loss)
        losses.append(float(loss) * len(x))
    assert optimizer.last.wait() == "committed"
    return losses


def by_updates(worker: Any) -> list[float]:
    optimizer = attach(mlp(), worker)
    transformation = optimizer.transformation()
    computed = jax.jit(jax.value_and_grad(loss_of()))
    params = optimizer.begin()
    state, losses = transformation.init(params), []
    for number in range(BATCHES):
        x, y = parts(worker.rank, number)
        loss, gradients = computed(params, x, y)
        updates, state = transformation.update(gradients, state, params, weight=len(x), value=loss)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss) * len(x))
    assert int(state.version) == BATCHES
    return losses


@pytest.mark.parametrize(
    ("loop", "rule"),
    [
        *((by_blocks, rule) for rule in list(RULES)[:3]),
        (by_steps, "adam:lr=0.01"),
        (by_updates, "sgd:lr=0.1"),
    ],
)
def test_two_workers_learn_what_optax_learns_from_the_whole_batches(rule: str, loop: Any) -> None:
    both = trained(loop, loop, servers=2, optimizer=rule)
    given = np.sum(both, axis=0) / sum(SIZES)
    np.testing.assert_allclose(given, alone(rule), rtol=0, atol=1e-5)


def trained_in_jit(optimizer: Any, before: Any) -> Any:
    """A whole training step in one jitted function, its buffers donated."""
    chained = optax.chain(before, optimizer.transformation())

    def train(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of(optimizer.tap))(params, x, y)
        updates, state = chained.update(gradients, state, params, weight=len(x), value=loss)
        return optax.apply_updates(params, updates), state, loss

    return chained, jax.jit(train, donate_argnums=(0, 1))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_applied_updates_are_the_servers_values_bit_for_bit_in_a_jitted_step(
    dtype: str,
) -> None:
    def body(worker: Any) -> None:
        optimizer = attach(mlp(jnp.dtype(dtype)), worker)
        chained, train = trained_in_jit(optimizer, optax.identity())
        params = optimizer.begin()
        state = chained.init(params)
        for number in range(20):
            params, state, _ = train(params, state, *data(8, number, jnp.dtype(dtype)))
            same_bits(params, optimizer.pull())
        assert optimizer.resent == 0
        assert worker.stats()["outcomes"]["committed"] == 20

    trained(body, servers=2, optimizer="adam:lr=0.01")


def test_what_is_before_it_in_a_chain_works_on_the_gradients() -> None:
    def body(worker: Any) -> list[float]:
        optimizer = attach(mlp(), worker)
        chained = optax.chain(optax.clip_by_global_norm(0.3), optimizer.transformation())

        def train(params: Any, state: Any, x: Any, y: Any) -> Any:
            # Without taps, as these would send what is not clipped.
            loss, gradients = jax.value_and_grad(loss_of())(params, x, y)
            updates, state = chained.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, loss

        params, step = optimizer.begin(), jax.jit(train)
        state, losses = chained.init(params), []
        for number in range(BATCHES):
            params, state, loss = step(params, state, *data(sum(SIZES), number))
            losses.append(float(loss))
        return losses

    (given,) = trained(body, servers=2, optimizer="sgd:lr=0.1")
    np.testing.assert_allclose(given, alone("clipped"), rtol=0, atol=1e-5)


def test_multi_steps_around_it_is_an_error_that_says_so() -> None:
    def body(worker: Any) -> None:
        optimizer = attach(mlp(), worker)
        several = optax.MultiSteps(optimizer.transformation(), every_k_schedule=3)
        params = optimizer.begin()
        gradients = jax.tree.map(jnp.ones_like, params)
        updates, state = several.update(gradients, several.init(params), params)
        params = optax.apply_updates(params, updates)
        # optax computes the update in each of its steps and throws it away: all would count.
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"StaleValues: key 'layers/0/.'.*Multi"
        ):
            several.update(gradients, state, params)
        params = optimizer.begin()
        optimizer.step(gradients)
        assert worker.stats()["outcomes"]["committed"] == 2

    trained(body)


def test_a_loop_of_steps_may_be_one_scan() -> None:
    def body(worker: Any) -> None:
        optimizer = attach(mlp(), worker)
        transformation = optimizer.transformation()
        params = optimizer.begin()
        x, y = data(8, 0)

        def one(carry: Any, _: None) -> Any:
            params, state = carry
            gradients = jax.grad(loss_of(optimizer.tap))(params, x, y)
            updates, state = transformation.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), None

        whole = jax.jit(lambda *carry: jax.lax.scan(one, carry, None, length=5)[0])
        params, state = whole(params, transformation.init(params))
        assert int(state.version) == 5
        assert optimizer.resent == 0
        same_bits(params, optimizer.pull())

    trained(body, servers=1, optimizer="adam:lr=0.01")


def test_keys_are_the_paths_of_the_leaves_and_the_first_workers_values_count() -> None:
    def body(worker: Any) -> None:
        shared = jnp.full(3, float(worker.rank + 1))
        given = {"a": shared, "b": (shared, {"c": [jnp.zeros((2, 2))]})}
        optimizer = attach(given, worker)
        worker.barrier()
        assert set(worker.pull()) == {"a", "b/0", "b/1/c/0"}
        params = optimizer.pull()
        assert float(params["a"][0]) in (1.0, 2.0)
        same_bits(params["a"], params["b"][0])
        with optimizer.batch() as batch:
            # One array in two places is two parameters, as in JAX.
            batch.push({"a": shared * 0, "b": (shared * 0 + 1, {"c": [jnp.zeros((2, 2))]})})
        assert batch.wait() == "committed"
        after = optimizer.pull()
        same_bits(after["a"], params["a"])
        assert np.all(np.asarray(after["b"][0]) == np.asarray(params["a"]) - 1)

    trained(body, body, servers=1, optimizer="sgd:lr=1")


def test_a_model_may_be_one_array() -> None:
    def body(worker: Any) -> None:
        optimizer = attach(jnp.ones(3), worker)
        params = optimizer.begin()
        params = optimizer.step(jnp.ones(3))
        same_bits(params, jnp.zeros(3))
        assert set(worker.pull()) == {"params"}

    trained(body, servers=1, optimizer="sgd:lr=1")
