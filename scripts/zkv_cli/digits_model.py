"""The network of `scripts/digits.py` as a learner in one process: values, batches, gradients.

Data, first values, the order of samples and the arithmetic are those of the live worker on NumPy,
so that a simulated worker of a rank computes what the live one of that rank computes. The live
worker does not use this module, as a program that is read must stand alone. This module must not
know policies, versions or time. It needs scikit-learn (the extra `demo`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from zkv.dtypes import Array

HIDDEN = 512
CLASSES = 10
PIXELS = 64
TEST_SHARE = 0.2
TRAIN = "digits"
"""What `zkv simulate --train` calls it."""


@lru_cache(maxsize=8)
def _split(seed: int) -> tuple[Array, Array, Array, Array]:
    """Return training images, test images, training labels, test labels.

    Images are float32, (samples, 64), from 0 to 1. Raises ModuleNotFoundError that says what to
    install.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "--train digits needs scikit-learn: pip install 'zkv[demo]'", name=error.name
        ) from error
    x, y = load_digits(return_X_y=True)
    parts: list[Any] = train_test_split(
        np.float32(x / 16), y, test_size=TEST_SHARE, stratify=y, random_state=seed
    )
    return parts[0], parts[1], parts[2], parts[3]


def forward(model: dict[str, Array], x: Array) -> tuple[Array, Array]:
    """Return the hidden layer, (samples, 512), and the logits, (samples, 10)."""
    hidden = np.maximum(x @ model["w1"] + model["b1"], 0)
    return hidden, hidden @ model["w2"] + model["b2"]


def backward(model: dict[str, Array], x: Array, y: Array) -> dict[str, Array]:
    """Return the mean gradients of the cross-entropy, by key, float32."""
    hidden, logits = forward(model, x)
    log_q = logits - logits.max(axis=1, keepdims=True)
    log_q -= np.log(np.exp(log_q).sum(axis=1, keepdims=True))
    delta = (np.exp(log_q) - np.eye(CLASSES, dtype=np.float32)[y]) / len(y)
    below = (delta @ model["w2"].T) * (hidden > 0)
    return {
        "w1": x.T @ below,
        "b1": below.sum(axis=0),
        "w2": hidden.T @ delta,
        "b2": delta.sum(axis=0),
    }


def cross_entropy(model: dict[str, Array], x: Array, y: Array) -> float:
    """Return the mean cross-entropy, in nats."""
    _, logits = forward(model, x)
    logits = logits - logits.max(axis=1, keepdims=True)
    log_sums = np.log(np.exp(logits).sum(axis=1))
    return float((log_sums - logits[np.arange(len(y)), y]).mean())


@dataclass(slots=True)
class _Order:
    """One worker's order of samples: a fresh permutation of its shard for each pass."""

    shard: Array
    count: int
    generator: np.random.Generator
    at: int = 0
    """How many passes were drawn."""
    batches: list[Array] = field(default_factory=list)

    def batch(self, number: int) -> Array:
        """Return the samples of this worker's batch; ValueError for one of a pass gone by."""
        wanted, place = divmod(number, self.count)
        if wanted < self.at - 1:
            raise ValueError(f"batch {number} is of pass {wanted}, and pass {self.at} was drawn")
        while self.at <= wanted:
            self.batches = np.array_split(self.generator.permutation(self.shard), self.count)
            self.at += 1
        return self.batches[place]


class Digits:
    """The learner: `workers` of them share the training images, in batches of about `batch`.

    `seed` is that of the split, the first values and the order of samples, as of the live worker.
    Raises ModuleNotFoundError without scikit-learn, ValueError for more workers than images or a
    batch below 1.
    """

    def __init__(self, *, workers: int, seed: int = 0, batch: int = 32) -> None:
        self._x, self._x_test, self._y, self._y_test = _split(seed)
        if not 1 <= workers <= len(self._x):
            raise ValueError(f"{workers} workers: 1 to {len(self._x)}, an image for each at least")
        if batch < 1:
            raise ValueError(f"a batch has at least 1 image, given {batch}")
        generator = np.random.default_rng(seed)
        first = {
            "w1": generator.normal(0, (2 / PIXELS) ** 0.5, (PIXELS, HIDDEN)),
            "b1": np.zeros(HIDDEN),
            "w2": generator.normal(0, (2 / HIDDEN) ** 0.5, (HIDDEN, CLASSES)),
            "b2": np.zeros(CLASSES),
        }
        self._initial = {key: value.astype(np.float32) for key, value in first.items()}
        count = -(-len(self._x) // (workers * batch))
        state = generator.bit_generator.state
        self._orders = []
        for rank in range(workers):
            # Each live worker draws the values too, and then its own order from the same state.
            own = np.random.default_rng(seed)
            own.bit_generator.state = state
            self._orders.append(_Order(np.arange(len(self._x))[rank::workers], count, own))

    @property
    def samples(self) -> int:
        """How many images one pass has."""
        return len(self._x)

    def initial(self) -> dict[str, Array]:
        """Return the first values by key, float32."""
        return dict(self._initial)

    def gradients(self, model: Any, rank: int, batch: int) -> tuple[dict[str, Array], float]:
        """Return the mean gradients of a worker's batch (from 0), and its count of images.

        Batches of one rank are asked for in rising order; some may be left out.
        """
        some = self._orders[rank].batch(batch)
        return backward(model, self._x[some], self._y[some]), float(len(some))

    def loss(self, model: Any, rank: int, batch: int) -> float:
        """Return the mean cross-entropy, in nats, of a worker's batch that was asked for last."""
        some = self._orders[rank].batch(batch)
        return cross_entropy(model, self._x[some], self._y[some])

    def test_loss(self, model: Any) -> float:
        """Return the mean cross-entropy, in nats, of the test images."""
        return cross_entropy(model, self._x_test, self._y_test)

    def accuracy(self, model: Any) -> float:
        """Return the share of the test images that the model names rightly, 0 to 1."""
        _, logits = forward(model, self._x_test)
        return float((logits.argmax(axis=1) == self._y_test).mean())
