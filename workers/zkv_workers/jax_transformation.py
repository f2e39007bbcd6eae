"""The face of optax: an update that the servers make, as a gradient transformation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback

from zkv.dtypes import Array
from zkv_workers.jax_tree import Tree
from zkv_workers.jax_updates import update_dtype

Change = Callable[
    [Mapping[str, Any], Mapping[str, Any], Any, Any], tuple[Array, Mapping[str, Array]]
]
"""Takes gradients, parameters (by key), weight and loss; gives the new version and the changes."""


class SyncState(NamedTuple):
    """The state of the transformation; all that counts is on the servers."""

    version: Any
    """The model version of the parameters that the updates lead to; int32, -1 before the first."""


def transformation(tree: Tree, change: Change, change_beside: Change) -> Any:
    """Return an `optax.GradientTransformationExtraArgs`, described at `Optimizer.transformation`.

    `change_beside` is called in place of `change` in jitted functions, on one of JAX's threads.
    """

    def init(params: Any) -> SyncState:
        tree.named("params", params)
        return SyncState(jnp.asarray(-1, jnp.int32))

    def update(
        updates: Any,
        state: SyncState,
        params: Any = None,
        *,
        weight: Any = None,
        value: Any = None,
        **extra: Any,
    ) -> tuple[Any, SyncState]:
        del state, extra
        if params is None:
            raise ValueError("zkv needs the parameters: tx.update(gradients, state, params)")
        operands = (tree.named("gradients", updates), tree.named("params", params), weight, value)
        if any(isinstance(one, jax.core.Tracer) for one in jax.tree_util.tree_leaves(operands)):
            version, changes = io_callback(change_beside, _results(tree), *operands, ordered=True)
            return tree.tree_of(changes), SyncState(version)
        version, changes = change(*operands)
        return tree.placed(changes), SyncState(jnp.asarray(version))

    return optax.GradientTransformationExtraArgs(init, update)


def _results(tree: Tree) -> Any:
    """Return shapes and dtypes of what a `Change` gives."""
    changes = {
        key: jax.ShapeDtypeStruct(shape, update_dtype(dtype))
        for key, shape, dtype in zip(tree.keys, tree.shapes, tree.dtypes, strict=True)
    }
    return jax.ShapeDtypeStruct((), np.int32), changes
