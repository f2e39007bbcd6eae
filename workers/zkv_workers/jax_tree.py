"""Between a JAX model's pytree and keys with arrays: names, checks, copies in and out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zkv.dtypes import Array, dtype_of
from zkv.errors import KeyMismatch


@dataclass(frozen=True, slots=True)
class Tree:
    """A model's pytree: what it is made of, leaf by leaf, under each leaf's key."""

    structure: Any
    keys: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype[Any], ...]
    shardings: tuple[Any, ...]
    """Where each leaf lies; None: where JAX puts it."""

    def named(self, what: str, tree: Any) -> dict[str, Any]:
        """Return a tree's leaves by key; None stays None. Works on what is traced, too.

        Raises:
            KeyMismatch: keys, a shape or a dtype are not the model's; the key is named.
        """
        flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
        given = {key_of(path): leaf for path, leaf in flat}
        missing = [key for key in self.keys if key not in given]
        unknown = [key for key in given if key not in self.keys and given[key] is not None]
        if missing or unknown:
            key = (missing or unknown)[0]
            problem = "is missing" if missing else "is not part of the model"
            raise KeyMismatch(
                f"key {key!r} {problem}: {what} must have the structure of the attached parameters"
            )
        for key, shape, dtype in zip(self.keys, self.shapes, self.dtypes, strict=True):
            leaf = given[key]
            if leaf is None:
                continue
            found = (tuple(np.shape(leaf)), np.dtype(jnp.result_type(leaf)))
            if found != (shape, dtype):
                raise KeyMismatch(
                    f"key {key!r}: {what} must have shape {shape} and dtype {dtype}, "
                    f"given {found[0]} and {found[1]}"
                )
        return {key: given[key] for key in self.keys}

    def tree_of(self, leaves: Mapping[str, Any]) -> Any:
        """Return the pytree with these leaves."""
        return jax.tree_util.tree_unflatten(self.structure, [leaves[key] for key in self.keys])

    def placed(self, arrays: Mapping[Any, Any]) -> Any:
        """Return the pytree of arrays of JAX with these values, each where its leaf lies."""
        pairs = zip(self.keys, self.shardings, strict=True)
        return self.tree_of({key: jax.device_put(arrays[key], where) for key, where in pairs})


def key_of(path: Any) -> str:
    """Return a leaf's key, such as "layers/0/w"; of a model that is one array: "params"."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "params"


def survey(params: Any) -> tuple[Tree, dict[str, Array]]:
    """Look at a model; return its tree and copies of its values by key.

    Raises:
        TypeError: a leaf is no array, or of a dtype that is not trained; the key is named.
        ValueError: there are no leaves, or two have one key.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(params)
    if not flat:
        raise ValueError("the parameters have no arrays, so there is nothing to train")
    values: dict[str, Array] = {}
    shardings = []
    for path, leaf in flat:
        key = key_of(path)
        if key in values:
            raise ValueError(f"two parameters have the key {key!r}; rename one of them")
        try:
            array = jnp.asarray(leaf)
        except (TypeError, ValueError) as error:
            raise TypeError(f"key {key!r}: attach takes arrays, not {type(leaf).__name__}") from (
                error
            )
        # A copy: one array in two places is two parameters here, and no tie.
        values[key] = np.array(array, order="C")
        _check_dtype(key, values[key])
        shardings.append(leaf.sharding if isinstance(leaf, jax.Array) else None)
    made = Tree(
        structure,
        tuple(values),
        tuple(one.shape for one in values.values()),
        tuple(one.dtype for one in values.values()),
        tuple(shardings),
    )
    return made, values


def _check_dtype(key: str, array: Array) -> None:
    try:
        trained = dtype_of(array).floating
    except TypeError:
        trained = False
    if not trained:
        raise TypeError(
            f"key {key!r}: {array.dtype} is not trained; give attach the floating-point "
            "parameters alone, and the rest to your loss function beside them"
        )


def on_host(leaves: Mapping[str, Any]) -> dict[str, Array | None]:
    """Return leaves as NumPy's arrays, waited for; those that lie in the host's memory as views."""
    return {key: None if leaf is None else np.asarray(leaf) for key, leaf in leaves.items()}
