"""Two real tasks for measuring codecs: handwritten digits, and text on a small transformer.

A task gives first values, gradients and losses. It knows no codec, no link and no clock.
"""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from zkv.dtypes import Array
from zkv_cli.digits_model import Digits as Learner

ADAM = "adam:lr=0.003"
CONTEXT, WIDTH, HEADS = 64, 96, 4
TEXT_BYTES = 3_000_000
THREADS = 1
"""Of torch: times and the last bits of sums then do not depend on how many cores are free."""


class Task(Protocol):
    """What is learned: values by key, gradients of a worker's batch, and scores on unseen data."""

    workers: int
    steps: int
    rule: str
    """The optimizer, as text."""
    compute_s: float
    """Seconds of one worker's gradient on a quiet core."""

    def initial(self) -> dict[str, Array]:
        """Return the first values, float32."""
        ...

    def gradients(
        self, params: dict[str, Array], worker: int, step: int
    ) -> tuple[dict[str, Array], float]:
        """Return the mean gradients of one batch, and its mean loss. Steps rise."""
        ...

    def loss(self, params: dict[str, Array]) -> float:
        """Return the mean loss (nats) of data that nobody trains on."""
        ...

    def accuracy(self, params: dict[str, Array]) -> float | None:
        """Return how much of that data is named rightly (%), where it is to be named."""
        ...


class Digits:
    """The network of `scripts/digits.py`: 38,410 parameters, batches of 32."""

    workers, steps = 3, 450
    rule = ADAM
    compute_s = 1.3e-4

    def __init__(self, seed: int) -> None:
        self._learner = Learner(workers=self.workers, seed=seed)

    def initial(self) -> dict[str, Array]:
        """See `Task`."""
        return self._learner.initial()

    def gradients(
        self, params: dict[str, Array], worker: int, step: int
    ) -> tuple[dict[str, Array], float]:
        """See `Task`."""
        given, _ = self._learner.gradients(params, worker, step)
        return given, self._learner.loss(params, worker, step)

    def loss(self, params: dict[str, Array]) -> float:
        """See `Task`."""
        return self._learner.test_loss(params)

    def accuracy(self, params: dict[str, Array]) -> float | None:
        """See `Task`."""
        return 100 * self._learner.accuracy(params)


@lru_cache(maxsize=1)
def _bytes() -> Any:
    """Return the sources of Python's own standard library as one tensor of bytes."""
    import torch

    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    raw = b"".join(file.read_bytes() for file in sources)[:TEXT_BYTES]
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()


class Text:
    """A byte-level transformer on the sources of Python's standard library.

    Pre-norm blocks 96 wide with 4 heads, contexts of 64 bytes. The last tenth of the bytes is what
    is tested on: some places in it, the same for all.
    """

    workers, steps = 2, 300
    rule = "sgd:lr=0.25,schedule=warmup:20+cosine:300"
    compute_s = 22e-3
    layers, batch = 2, 16
    """279,232 parameters."""
    looks = 8
    """Batches of 32 places that it is tested on."""

    def __init__(self, seed: int) -> None:
        import torch

        self._torch = torch
        torch.manual_seed(seed)
        torch.set_num_threads(THREADS)
        self._data = _bytes()
        self._cut = len(self._data) * 9 // 10
        self._seed = seed
        self._model = self._made()
        self._mask = torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT)

    def _made(self) -> Any:
        nn = self._torch.nn
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        return nn.ModuleDict(
            {
                "byte": nn.Embedding(256, WIDTH),
                "place": nn.Embedding(CONTEXT, WIDTH),
                "body": nn.TransformerEncoder(layer, self.layers, enable_nested_tensor=False),
                "head": nn.Linear(WIDTH, 256),
            }
        )

    def initial(self) -> dict[str, Array]:
        """See `Task`."""
        return {k: v.detach().numpy().copy() for k, v in self._model.named_parameters()}

    def _places(self, worker: int, step: int) -> Array:
        chance = np.random.default_rng([self._seed, worker, step])
        return chance.integers(0, self._cut - CONTEXT - 1, self.batch)

    def _windows(self, at: Any) -> Any:
        return self._torch.stack([self._data[a : a + CONTEXT + 1] for a in at])

    def windows(self, worker: int, step: int) -> Any:
        """Return the bytes of one batch: (samples, CONTEXT + 1), a tensor of int64."""
        return self._windows(self._places(worker, step))

    def _loss(self, at: Any) -> Any:
        torch, model = self._torch, self._model
        windows = self._windows(at)
        x, y = windows[:, :-1], windows[:, 1:]
        hidden = model["byte"](x) + model["place"](torch.arange(CONTEXT))
        logits = model["head"](model["body"](hidden, mask=self._mask, is_causal=True))
        return torch.nn.functional.cross_entropy(logits.reshape(-1, 256), y.reshape(-1))

    def _load(self, params: dict[str, Array]) -> None:
        with self._torch.no_grad():
            for key, value in self._model.named_parameters():
                value.copy_(self._torch.from_numpy(params[key]))

    def gradients(
        self, params: dict[str, Array], worker: int, step: int
    ) -> tuple[dict[str, Array], float]:
        """See `Task`."""
        self._load(params)
        self._model.zero_grad()
        loss = self._loss(self._places(worker, step))
        loss.backward()
        return {k: v.grad.numpy().copy() for k, v in self._model.named_parameters()}, float(
            loss.detach()
        )

    def loss(self, params: dict[str, Array]) -> float:
        """See `Task`."""
        self._load(params)
        chance = np.random.default_rng(0)
        with self._torch.no_grad():
            at = chance.integers(self._cut, len(self._data) - CONTEXT - 1, (self.looks, 32))
            return float(np.mean([float(self._loss(some)) for some in at]))

    def accuracy(self, params: dict[str, Array]) -> float | None:
        """See `Task`: a loss is all there is."""
        return None


class SmallText(Text):
    """The same of one layer, batches of 8 and another optimizer: for many runs."""

    rule = ADAM
    compute_s = 6.7e-3
    layers, batch, looks = 1, 8, 4
    """167,392 parameters."""
