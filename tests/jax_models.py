"""JAX models for tests; knows nothing of workers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from zkv.dtypes import Array

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy


def mlp(dtype: Any = np.float32, sizes: tuple[int, ...] = (6, 8, 3)) -> Any:
    """A perceptron's parameters, always the same."""
    chance = np.random.default_rng(0)
    return {
        "layers": [
            {
                "w": jnp.asarray(chance.standard_normal((n_in, n_out)) / n_in**0.5, dtype),
                "b": jnp.zeros(n_out, dtype),
            }
            for n_in, n_out in pairwise(sizes)
        ]
    }


def data(count: int, seed: int, dtype: Any = np.float32) -> tuple[Array, Array]:
    """Inputs (count, 6) and targets (count, 3)."""
    chance = np.random.default_rng(seed)
    x = chance.standard_normal((count, 6))
    y = np.sin(x[:, :3]) + 0.1 * chance.standard_normal((count, 3))
    return x.astype(dtype), y.astype(dtype)


def loss_of(tap: Callable[[Any], Any] = lambda params: params) -> Callable[..., Any]:
    """The mean square error of a perceptron whose parameters are tapped."""

    def loss(params: Any, x: Any, y: Any) -> Any:
        layers = tap(params)["layers"]
        for layer in layers[:-1]:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean((x @ layers[-1]["w"] + layers[-1]["b"] - y) ** 2)

    return loss


def same_bits(tree: Any, other: Any) -> None:
    """Assert that two pytrees have the same leaves, bit for bit."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for one, two in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        one, two = np.asarray(one), np.asarray(two)
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert one.tobytes() == two.tobytes()
