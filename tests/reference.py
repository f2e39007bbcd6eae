"""Training in one process, with the project's own sums and rules: what a cluster must equal.

It knows arrays and optimizers; it must not know brokers, servers, sockets or event loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import zkv
from zkv.dtypes import Array, dtype_of, narrow, stored_view, user_view, widen
from zkv.optim import init_slots, update
from zkv.optimizer_spec import optimizer

Key = str | int
Arrays = Mapping[Key, Any]


class Reference:
    """A model that is updated as BSP does it: contributions in worker order, then the rule.

    A key that no worker has pushed (absent, or None) is left alone; one that some have not pushed
    counts as zero with full weight. Halves keep a float32 master copy.
    """

    def __init__(self, params: Arrays, text: str) -> None:
        self._spec = optimizer(text)
        self._dtypes = {key: dtype_of(np.asarray(value)) for key, value in params.items()}
        self._shapes = {key: np.shape(value) for key, value in params.items()}
        self._stored: dict[Key, Array] = {}
        self._wide: dict[Key, Array] = {}
        self._slots: dict[Key, tuple[Array, ...]] = {}
        self._counts = dict.fromkeys(params, 0)
        for key, value in params.items():
            dtype = self._dtypes[key]
            self._stored[key] = stored_view(np.asarray(value), dtype).copy()
            self._wide[key] = widen(self._stored[key], dtype).copy()
            self._slots[key] = init_slots(self._spec.rule, self._wide[key])
        self.version = 0

    def params(self) -> dict[Key, Array]:
        """Return the values as users see them; fresh arrays."""
        return {
            key: user_view(stored.copy(), self._dtypes[key]).reshape(self._shapes[key])
            for key, stored in self._stored.items()
        }

    def update(self, contributions: Sequence[Arrays], weights: Sequence[float]) -> None:
        """Apply one update out of the gradients of all workers, in their order."""
        lr = self._spec.lr_at(self.version)
        for key, dtype in self._dtypes.items():
            pushed = [one.get(key) for one in contributions]
            if all(gradient is None for gradient in pushed):
                continue
            zero = np.zeros_like(self._wide[key])
            flat = [zero if g is None else widen(stored_view(g, dtype), dtype) for g in pushed]
            mean = zkv.weighted_mean(flat, weights)
            rule, lr_factor = self._spec.for_key(key)
            self._counts[key] += 1
            self._wide[key], self._slots[key] = update(
                rule,
                self._wide[key],
                self._slots[key],
                mean,
                lr=lr * lr_factor,
                count=self._counts[key],
            )
            self._stored[key] = narrow(self._wide[key], dtype)
        self.version += 1


def assert_same_bits(given: Arrays, expected: Arrays) -> None:
    """Check that two models have the same keys, dtypes, shapes and bits."""
    assert list(given) == list(expected)
    for key, array in expected.items():
        assert given[key].dtype == array.dtype, key
        assert given[key].shape == array.shape, key
        assert given[key].tobytes() == array.tobytes(), f"key {key!r} differs"
