"""Taps: gradients leave inside the jitted backward pass; what counts is what is handed over."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest
from jax_models import data, jax, jnp, loss_of, mlp, same_bits
from worker_threads import trained

import zkv
from zkv.errors import KeyMismatch, PushRefused
from zkv.jax import attach
from zkv_workers import signals as s

pytestmark = pytest.mark.jax

WIDE = 160
"""A layer of this many inputs and outputs is more than 64 KiB: its weight is a block of its own."""


def on_the_way_back(call: Any) -> Any:
    """An identity in whose backward pass `call` is made, and waited for."""

    def backward(_: None, cotangent: Any) -> Any:
        done = jax.experimental.io_callback(call, jax.ShapeDtypeStruct((), np.bool_), cotangent)
        return (jnp.where(done, cotangent, 0),)

    made = jax.custom_vjp(lambda x: x)
    made.defvjp(lambda x: (x, None), backward)
    return made


def test_the_last_layers_block_is_sent_before_the_backward_pass_reaches_the_first() -> None:
    def body(worker: Any) -> None:
        optimizer = attach([jnp.eye(WIDE)] * 3, worker)
        sent: list[int] = []
        first_is_sent = threading.Event()
        feed = worker._driver.feed

        def watched(event: Any) -> None:
            feed(event)
            if isinstance(event, s.SendBlock):
                sent.append(event.bid)
                first_is_sent.set()

        worker._driver.feed = watched
        met: list[tuple[bool, int]] = []

        def between(_: Any) -> Any:
            met.append((first_is_sent.wait(10), worker.stats()["bytes_up"]))
            return np.True_

        barrier = on_the_way_back(between)

        def loss(params: Any, x: Any) -> Any:
            first, second, third = optimizer.tap(params)
            return jnp.sum(jnp.tanh(jnp.tanh(barrier(jnp.tanh(x @ first)) @ second) @ third))

        with optimizer.batch() as batch:
            gradients = jax.jit(jax.grad(loss))(batch.params, jnp.ones((2, WIDE)))
            jax.block_until_ready(gradients)
            assert optimizer._step.sent[0] == "2"
            assert set(optimizer._step.sent) == {"0", "1", "2"}
            batch.push(gradients)
        # The backward pass did not go on before a block was with the session, on its way.
        ((first_was_sent, bytes_up),) = met
        assert first_was_sent
        assert bytes_up >= 4 * WIDE * WIDE
        assert batch.wait() == "committed"
        assert len(sent) == 3

    trained(body)


def trained_once(
    loss: Any, params: Any, *arguments: Any, jit: bool = True, resent: int = 0, rule: str = ""
) -> Any:
    """One batch of `loss(tap, params, ...)`; assert that it counts like plain gradients.

    Return the new parameters.
    """

    def body(worker: Any) -> Any:
        optimizer = attach(params, worker)
        plain = jax.grad(lambda *given: loss(lambda one: one, *given))(params, *arguments)
        tapped = jax.grad(lambda *given: loss(optimizer.tap, *given))
        with optimizer.batch() as batch:
            gradients = (jax.jit(tapped) if jit else tapped)(batch.params, *arguments)
            batch.push(gradients)
        assert batch.wait() == "committed"
        assert optimizer.resent == resent
        given = optimizer.pull()
        for one, old, gradient in zip(
            *(jax.tree.leaves(tree) for tree in (given, params, plain)), strict=True
        ):
            np.testing.assert_allclose(one, old - gradient, rtol=1e-5, atol=1e-6)
        return given

    (given,) = trained(body, optimizer=rule or "sgd:lr=1")
    return given


def tied(tap: Any, params: Any, x: Any) -> Any:
    params = tap(params)
    return jnp.sum(jnp.tanh(x @ params["w"]) @ params["w"].T) + jnp.sum(params["b"])


W = {"w": jnp.asarray(np.random.default_rng(1).standard_normal((6, 6)), jnp.float32)}
X = jnp.asarray(np.random.default_rng(2).standard_normal((4, 6)), jnp.float32)
STACK = {"w": jnp.stack([W["w"]] * 3)}


@pytest.mark.parametrize("jit", [True, False])
def test_a_leaf_used_twice_is_sent_once_as_the_sum(jit: bool) -> None:
    trained_once(tied, W | {"b": jnp.ones(2)}, X, jit=jit)


def test_a_leaf_without_a_path_to_the_loss_has_a_gradient_of_zero() -> None:
    def loss(tap: Any, params: Any, x: Any) -> Any:
        return jnp.sum(x @ tap(params)["w"])

    given = trained_once(loss, W | {"unused": jnp.ones(3)}, X)
    same_bits(given["unused"], jnp.ones(3))


def rematerialised(tap: Any, params: Any, x: Any) -> Any:
    return jax.checkpoint(lambda params, x: jnp.sum(jnp.tanh(x @ tap(params)["w"])))(params, x)


def scanned(tap: Any, params: Any, x: Any) -> Any:
    stacked = tap(params)["w"]
    return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stacked)[0])


def mapped(tap: Any, params: Any, x: Any) -> Any:
    w = tap(params)["w"]
    return jnp.sum(jax.vmap(lambda one: jnp.tanh(one @ w))(x))


def tapped_in_a_map(tap: Any, params: Any, x: Any) -> Any:
    return jnp.sum(jax.vmap(lambda one: jnp.tanh(one @ tap(params)["w"]))(x))


def tapped_in_a_loop(tap: Any, params: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.scan(lambda x, _: (jnp.tanh(x @ tap(params)["w"]), None), x, None, 3)[0])


@pytest.mark.parametrize(
    ("loss", "params"),
    [(rematerialised, W), (scanned, STACK), (mapped, W), (tapped_in_a_map, W)],
)
def test_checkpoints_loops_and_maps_leave_one_gradient_for_each_leaf(
    loss: Any, params: Any
) -> None:
    trained_once(loss, params, X)


@pytest.mark.parametrize("times", [2, 3])
def test_what_is_tapped_several_times_is_sent_again_whole(times: int) -> None:
    def loss(tap: Any, params: Any, x: Any) -> Any:
        return sum(jnp.sum(jnp.tanh(x @ tap(params)["w"]) * number) for number in range(1, times))

    if times == 2:
        trained_once(loss, W, X)
        trained_once(tapped_in_a_loop, W, X, resent=1)
    else:
        trained_once(loss, W, X, resent=1)


def test_gradients_of_single_samples_are_averaged_by_the_user_and_sent_again_whole(
    caplog: Any,
) -> None:
    def body(worker: Any) -> None:
        optimizer = attach(W, worker)
        one = jax.grad(lambda params, x: jnp.sum(x @ optimizer.tap(params)["w"]))
        computed = jax.jit(jax.vmap(one, in_axes=(None, 0)))
        params, outcomes = optimizer.begin(), list[str]()
        # One that has begun on values which were made of what was given up is cancelled.
        while outcomes.count("committed") < 2 and len(outcomes) < 10:
            each = computed(params, X)
            params = optimizer.step(jax.tree.map(lambda leaf: leaf.mean(0), each))
            outcomes.append(optimizer.last.wait())
        assert set(outcomes) <= {"committed", "cancelled"}
        assert 2 <= optimizer.resent <= len(outcomes)
        optimizer.withdraw()
        by_hand = W["w"] - 2 * jnp.tile(X.mean(0)[:, None], (1, 6))
        np.testing.assert_allclose(optimizer.pull()["w"], by_hand, rtol=1e-5, atol=1e-6)
        assert worker.stats()["outcomes"]["committed"] == 2

    with caplog.at_level(logging.WARNING, "zkv.worker"):
        trained(body, optimizer="sgd:lr=1")
    (told,) = [one.getMessage() for one in caplog.records if "sent again" in one.getMessage()]
    assert "key 'w'" in told


def test_clipped_and_accumulated_gradients_count_as_they_are_handed_over() -> None:
    def body(worker: Any) -> None:
        optimizer = attach(W, worker)
        computed = jax.jit(jax.grad(lambda params, x: jnp.sum(x @ optimizer.tap(params)["w"])))
        params = optimizer.begin()
        clipped = jax.tree.map(lambda leaf: leaf * 0.5, computed(params, X))
        params = optimizer.step(clipped)
        same_bits(params["w"], W["w"] - clipped["w"])
        optimizer.withdraw()
        with optimizer.batch() as batch:
            first, second = computed(batch.params, X[:2]), computed(batch.params, X[2:])
            both = jax.tree.map(jnp.add, first, second)
            batch.push(both)
        assert batch.wait() == "committed"
        same_bits(optimizer.pull()["w"], params["w"] - both["w"])
        assert optimizer.resent == 2

    trained(body, optimizer="sgd:lr=1")


def test_what_was_dealt_out_is_sent_again_with_its_samples() -> None:
    def body(worker: Any) -> None:
        optimizer = attach(W, worker)
        computed = jax.jit(jax.grad(lambda params, x: jnp.mean(x @ optimizer.tap(params)["w"])))
        seen = []
        for batch in optimizer.batches(zkv.data.shard(8, seed=1, size=2, passes=2)):
            with batch:
                gradients = computed(batch.params, X[batch.samples % 4])
                batch.push(jax.tree.map(lambda leaf: leaf * 2, gradients))
                seen += list(batch.samples)
            # What is given up to be sent again takes back a grant ahead, which may have been begun.
            assert batch.wait() == "committed"
        assert sorted(seen) == sorted([*range(8), *range(8)])
        assert optimizer.resent == 8
        assert worker.stats()["samples"] == 16

    trained(body)


class Broken(Exception):
    """A user's own."""


def test_a_failed_backward_pass_withdraws_its_batch_and_the_next_one_works() -> None:
    def body(worker: Any) -> None:
        optimizer = attach([jnp.eye(6), jnp.eye(6)], worker)
        broken = [True]

        def call(_: Any) -> Any:
            if broken[0]:
                raise Broken("on purpose")
            return np.True_

        sometimes = on_the_way_back(call)

        def loss(params: Any, x: Any) -> Any:
            # Behind the tap in the backward pass: what fails is after what is sent.
            first, second = optimizer.tap([params[0], sometimes(params[1])])
            return jnp.sum(jnp.tanh(jnp.tanh(x @ first) @ second))

        computed = jax.jit(jax.grad(loss))
        with (
            pytest.raises(jax.errors.JaxRuntimeError, match="on purpose"),
            optimizer.batch() as batch,
        ):
            jax.block_until_ready(computed(batch.params, X))
        assert batch.outcome == "withdrawn"
        same_bits(optimizer.pull(), [jnp.eye(6), jnp.eye(6)])
        # By steps: the parameters are asked for again, or not.
        params = optimizer.begin()
        with pytest.raises(jax.errors.JaxRuntimeError, match="on purpose"):
            jax.block_until_ready(computed(params, X))
        assert "1" in optimizer._step.sent
        broken[0] = False
        given = computed(params, -X)
        params = optimizer.step(given)
        same_bits(params, [jnp.eye(6) - one for one in given])
        broken[0] = True
        with pytest.raises(jax.errors.JaxRuntimeError, match="on purpose"):
            jax.block_until_ready(computed(params, X))
        broken[0] = False
        params = optimizer.begin()
        params = optimizer.step(computed(params, X))
        assert optimizer.resent == 1
        assert worker.stats()["outcomes"] == {"committed": 2, "discarded": 0, "cancelled": 0}

    trained(body, optimizer="sgd:lr=1")


def test_what_a_tap_cannot_send_is_an_error_that_names_the_key_and_the_reason() -> None:
    def body(worker: Any) -> None:
        optimizer = attach({"w": jnp.ones(300), "b": jnp.ones(())}, worker)
        computed = jax.jit(jax.grad(lambda p, x: jnp.sum(optimizer.tap(p)["w"] * x) + 0 * p["b"]))
        with pytest.raises(PushRefused, match=r"key 'w'.*(NaN|finite)"), optimizer.batch() as batch:
            batch.push(computed(batch.params, jnp.nan))
        assert batch.outcome == "withdrawn"
        params = optimizer.begin()
        transformation = optimizer.transformation()
        state = transformation.init(params)
        update = jax.jit(lambda x, p: transformation.update(computed(p, x), state, p))
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"PushRefused: .*key 'w'"):
            jax.block_until_ready(update(jnp.inf, params))
        params = optimizer.begin()
        jax.block_until_ready(update(1.0, params))
        assert optimizer.last.outcome == "committed"

    trained(body, codec="int8+ef;small=0")


def test_taps_outside_of_a_batch_send_nothing_and_shapes_are_traced_anew() -> None:
    def body(worker: Any) -> None:
        optimizer = attach(mlp(), worker)
        computed = jax.jit(jax.value_and_grad(loss_of(optimizer.tap)))
        plain = jax.jit(jax.value_and_grad(loss_of()))
        params, before = optimizer.pull(), worker.stats()["bytes_up"]
        for count in (3, 4, 3):
            x, y = data(count, 0)
            same_bits(computed(params, x, y), plain(params, x, y))
            assert worker.stats()["bytes_up"] == before
        for count in (3, 4, 3):
            with optimizer.batch(weight=count) as batch:
                _, gradients = computed(batch.params, *data(count, 0))
                batch.push(gradients)
        assert batch.wait() == "committed"
        assert optimizer.resent == 0

    trained(body)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"w": W["w"]}, r"key 'b' is missing"),
        ({"w": W["w"], "b": jnp.ones(2), "c": jnp.ones(1)}, "key 'c' is not part of the model"),
        ({"w": W["w"][0], "b": jnp.ones(2)}, r"key 'w': .*shape \(6, 6\).*given \(6,\)"),
        ({"w": W["w"], "b": jnp.ones(2, "int32")}, r"key 'b': .*dtype float32.*given .*int32"),
    ],
)
def test_other_trees_than_the_models_are_errors_that_name_the_key(given: Any, words: str) -> None:
    def body(worker: Any) -> None:
        optimizer = attach(W | {"b": jnp.ones(2)}, worker)
        transformation = optimizer.transformation()
        with pytest.raises(KeyMismatch, match=words):
            optimizer.tap(given)
        with pytest.raises(KeyMismatch, match=words):
            transformation.init(given)
        with pytest.raises(KeyMismatch, match=words), optimizer.batch() as batch:
            batch.push(given)
        params = optimizer.begin()
        with pytest.raises(KeyMismatch, match=words):
            jax.jit(transformation.update)(given, None, params)

    trained(body)
