"""`zkv.jax`: a JAX model that is trained by a cluster, by blocks or by a transformation of optax.

The parameters are a pytree of floating-point arrays; each leaf is a key, named by its path
("layers/0/w"). Rule and state are on the servers. Taps send each gradient from inside the jitted
backward pass; without them all leave when they are handed over.
"""

from __future__ import annotations

import weakref
from typing import Any

from zkv_workers.blocking import Worker
from zkv_workers.faces import check_trained
from zkv_workers.jax_optimizer import Block as Block
from zkv_workers.jax_optimizer import Optimizer as Optimizer
from zkv_workers.jax_transformation import SyncState as SyncState
from zkv_workers.jax_tree import survey
from zkv_workers.model import check_weight

_attached: weakref.WeakKeyDictionary[Worker, weakref.ref[Optimizer]] = weakref.WeakKeyDictionary()


def attach(params: Any, worker: Worker, *, weight: float = 1.0) -> Optimizer:
    """Give a model to the cluster; return the optimizer for its loop.

    The first worker's values count, so take the parameters to compute on from the optimizer. The
    servers' rule is theirs to configure (`zkv up --optimizer "adam:lr=0.001"`).

    Args:
        params: a pytree of arrays, all of them to be trained. Where its leaves lie, their values
            are put.
        worker: from `zkv.connect`; it trains this one model.
        weight: of how many samples a batch is, where nothing else is said.

    Raises:
        TypeError: a leaf is no array or not trained, or no blocking worker; the key is named.
        ValueError: no leaves, two of one key, or the worker is attached already.
        KeyMismatch: other workers have another model; the key and both specs are named.
    """
    if not isinstance(worker, Worker):
        raise TypeError(f"attach takes a worker of zkv.connect, not {type(worker).__name__}")
    held = _attached[worker]() if worker in _attached else None
    if held is not None and not held.closed:
        raise ValueError(
            "the worker is attached already; call optimizer.close() first, or put several models "
            "into one pytree and attach that"
        )
    tree, values = survey(params)
    worker.init(values)
    check_trained(worker._driver, values)
    made = Optimizer(tree, worker, check_weight(weight))
    _attached[worker] = weakref.ref(made)
    return made
