"""The digits network, trained by workers whose gradients are quantised, under a virtual clock.

The codecs are NumPy quantisers of their own, after the definitions of the codec reference, so that
what adaptive precision decides on is real rounding of real gradients. A step takes the seconds that
its bytes take on the link, the kernels' seconds and a fixed time to compute; nothing here measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zkv.dtypes import Array
from zkv_cli.digits_model import Digits, backward, forward

WORKERS = 2
BATCH = 32
RATE = 0.2
BLOCK = 256
EVERY = 10
"""Steps between two looks at the loss of the whole training set."""
MBIT = 1e6 / 8
"""Bytes per second."""


def _blocks(values: Array) -> Array:
    return np.pad(values, (0, -values.size % BLOCK)).reshape(-1, BLOCK)


def _levels(values: Array, most: int) -> Array:
    """Round to `most` steps of each block's largest magnitude."""
    rows = _blocks(values)
    top = np.abs(rows).max(axis=1, keepdims=True)
    scale = np.float32(most) / np.where(top > 1.5e-36, top, np.inf)
    return (np.rint(rows * scale) * (top / np.float32(most))).reshape(-1)[: values.size]


def _ternary(values: Array, _: np.random.Generator) -> Array:
    rows = _blocks(values)
    top = np.abs(rows).max(axis=1, keepdims=True)
    sent = 2 * np.abs(rows) > top
    return (np.sign(rows) * top * sent).reshape(-1)[: values.size]


def _onebit(values: Array, _: np.random.Generator) -> Array:
    rows = _blocks(values)
    mean = np.abs(rows).mean(axis=1, keepdims=True)
    return np.where(np.signbit(rows), -mean, mean).reshape(-1)[: values.size]


def _top(values: Array, _: np.random.Generator) -> Array:
    count = max(1, math.ceil(0.01 * values.size))
    at = np.argpartition(np.abs(values), values.size - count)[values.size - count :]
    sent = np.zeros_like(values)
    sent[at] = values[at].astype(np.float16)
    return sent


def _half(values: Array, _: np.random.Generator) -> Array:
    return values.astype(np.float16).astype(np.float32)


QUANTISERS: dict[str, Callable[[Array, np.random.Generator], Array]] = {
    "none": lambda values, _: values,
    "fp16": _half,
    "int8+ef": lambda values, _: _levels(values, 127),
    "int4+ef": lambda values, _: _levels(values, 7),
    "ternary+ef": _ternary,
    "onebit+ef": _onebit,
    "topk:0.01+fp16+ef": _top,
}

BITS_PER_ELEMENT = {
    "none": 32.0,
    "fp16": 16.0,
    "int8+ef": 8.125,
    "int4+ef": 4.125,
    "ternary+ef": 2.125,
    "onebit+ef": 1.125,
    "topk:0.01+fp16+ef": 0.01 * (16 + 16.05),
}
"""Wire sizes of the codec reference, sections 1 and 1.1 (blocks of 256; 16-bit offsets)."""


@dataclass(slots=True)
class Training:
    """A run in progress: `step(codecs)` makes one step, with a codec for each key."""

    seed: int = 0
    rate: float = RATE
    quantisers: dict[str, Callable[[Array, np.random.Generator], Array]] = field(
        default_factory=lambda: QUANTISERS
    )
    steps: int = 0
    _model: dict[str, Array] = field(init=False)
    _residuals: list[dict[str, Array]] = field(init=False)
    _learner: Any = field(init=False)
    _chance: np.random.Generator = field(init=False)
    owed: dict[str, float] = field(default_factory=dict)
    """By key: norm of a worker's residual relative to that of its gradient, in the last step."""

    def __post_init__(self) -> None:
        self._learner = Digits(workers=WORKERS, seed=self.seed, batch=BATCH)
        self._model = self._learner.initial()
        self._chance = np.random.default_rng(self.seed)
        self._residuals = [
            {key: np.zeros(value.size, np.float32) for key, value in self._model.items()}
            for _ in range(WORKERS)
        ]

    @property
    def sizes(self) -> dict[str, int]:
        """Elements by key."""
        return {key: value.size for key, value in self._model.items()}

    def step(self, codecs: dict[str, str]) -> float:
        """Make one step; return the mean loss of the batches, before it."""
        total = {key: np.zeros(value.size, np.float32) for key, value in self._model.items()}
        losses = []
        for rank in range(WORKERS):
            some = self._learner._orders[rank].batch(self.steps)
            x, y = self._learner._x[some], self._learner._y[some]
            losses.append(_loss(self._model, x, y))
            for key, gradient in backward(self._model, x, y).items():
                given = gradient.reshape(-1) + self._residuals[rank][key]
                sent = self.quantisers[codecs[key]](given, self._chance)
                total[key] += sent
                # What fp16 cuts off is lost; the others feed back.
                left = given - sent if codecs[key] != "fp16" else np.zeros_like(sent)
                self._residuals[rank][key] = left
                if rank == 0:
                    norm = float(np.linalg.norm(gradient)) or 1.0
                    self.owed[key] = float(np.linalg.norm(given - sent)) / norm
        for key, value in self._model.items():
            value = value - np.float32(self.rate / WORKERS) * total[key].reshape(value.shape)
            self._model[key] = value
        self.steps += 1
        return float(np.mean(losses))

    def loss(self) -> float:
        """Return the mean loss of the whole training set."""
        return _loss(self._model, self._learner._x, self._learner._y)


def _loss(model: dict[str, Array], x: Array, y: Array) -> float:
    _, logits = forward(model, x)
    logits = logits - logits.max(axis=1, keepdims=True)
    log_sums = np.log(np.exp(logits).sum(axis=1))
    return float((log_sums - logits[np.arange(len(y)), y]).mean())


@dataclass(slots=True)
class Clock:
    """Seconds of steps: computing, the kernels, and the bytes on a link, one after the other."""

    link: float
    """Bytes per second."""
    compute_s: float = 2e-3
    kernel_s: dict[str, float] = field(default_factory=dict)
    """Seconds per element to encode and decode, by codec."""
    now: float = 0.0

    def bytes_of(self, sizes: dict[str, int], codecs: dict[str, str]) -> float:
        """Return what one worker pushes."""
        return sum(BITS_PER_ELEMENT[codecs[key]] * n / 8 for key, n in sizes.items())

    def step(self, sizes: dict[str, int], codecs: dict[str, str]) -> float:
        """Let a step pass; return its seconds."""
        kernels = sum(self.kernel_s.get(codecs[key], 0.0) * n for key, n in sizes.items())
        took = self.compute_s + kernels + self.bytes_of(sizes, codecs) / self.link
        self.now += took
        return took
