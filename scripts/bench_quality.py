"""What codecs do to training (`scripts/bench_quality --help`).

Workers take turns in one process: a task gives gradients, a codec and the wire's payload carry
them, zkv's own sum and update rule apply them. So only a codec differs between two rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from zkv.dtypes import Array
from zkv.optim import init_slots, update
from zkv.optimizer_spec import optimizer
from zkv.sums import weighted_mean
from zkv_codecs.backend import fastest
from zkv_codecs.frames import from_payload, to_payload
from zkv_codecs.packed import State, dense, seed_of
from zkv_codecs.plan import plan

CODECS = (
    "none",
    "fp16",
    "int8",
    "topk:0.01+ef",
    "onebit+ef",
    "ternary",
    "powersgd:4+ef",
)
ADAM = "adam:lr=0.003"
CONTEXT, WIDTH, LAYERS, HEADS = 64, 96, 2, 4
TEXT_BYTES = 3_000_000


class Task(Protocol):
    """What is learned: values by key, gradients of a worker's batch, and a score on unseen data."""

    workers: int
    steps: int
    higher_is_better: bool

    def initial(self) -> dict[str, Array]:
        """Return the first values, float32."""
        ...

    def gradients(self, params: dict[str, Array], worker: int, step: int) -> dict[str, Array]:
        """Return the mean gradients of one batch."""
        ...

    def score(self, params: dict[str, Array]) -> float:
        """Return the accuracy (%) or the loss on the test data."""
        ...


class Digits:
    """The network of `scripts/digits.py`."""

    workers, steps, higher_is_better = 3, 450, True

    def __init__(self, seed: int) -> None:
        from zkv_cli.digits_model import Digits as Learner

        self._learner = Learner(workers=self.workers, seed=seed)

    def initial(self) -> dict[str, Array]:
        """See `Task`."""
        return self._learner.initial()

    def gradients(self, params: dict[str, Array], worker: int, step: int) -> dict[str, Array]:
        """See `Task`."""
        return self._learner.gradients(params, worker, step)[0]

    def score(self, params: dict[str, Array]) -> float:
        """See `Task`."""
        return 100 * self._learner.accuracy(params)


class Text:
    """A byte-level transformer on the sources of Python's standard library."""

    workers, steps, higher_is_better = 2, 300, False
    batch = 16

    def __init__(self, seed: int) -> None:
        import torch

        self._torch = torch
        torch.manual_seed(seed)
        torch.set_num_threads(2)
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        raw = b"".join(file.read_bytes() for file in sources)[:TEXT_BYTES]
        self._data = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
        self._cut = len(self._data) * 9 // 10
        self._seed = seed
        self._model = self._made()

    def _made(self) -> Any:
        nn = self._torch.nn
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        return nn.ModuleDict(
            {
                "byte": nn.Embedding(256, WIDTH),
                "place": nn.Embedding(CONTEXT, WIDTH),
                "body": nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False),
                "head": nn.Linear(WIDTH, 256),
            }
        )

    def initial(self) -> dict[str, Array]:
        """See `Task`."""
        return {k: v.detach().numpy().copy() for k, v in self._model.named_parameters()}

    def _loss(self, at: Any) -> Any:
        torch, model = self._torch, self._model
        windows = torch.stack([self._data[a : a + CONTEXT + 1] for a in at])
        x, y = windows[:, :-1], windows[:, 1:]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = model["byte"](x) + model["place"](torch.arange(CONTEXT))
        logits = model["head"](model["body"](hidden, mask=mask, is_causal=True))
        return torch.nn.functional.cross_entropy(logits.reshape(-1, 256), y.reshape(-1))

    def _load(self, params: dict[str, Array]) -> None:
        with self._torch.no_grad():
            for key, value in self._model.named_parameters():
                value.copy_(self._torch.from_numpy(params[key]))

    def gradients(self, params: dict[str, Array], worker: int, step: int) -> dict[str, Array]:
        """See `Task`."""
        if worker == 0:
            self._load(params)
        chance = np.random.default_rng([self._seed, worker, step])
        self._model.zero_grad()
        self._loss(chance.integers(0, self._cut - CONTEXT - 1, self.batch)).backward()
        return {k: v.grad.numpy().copy() for k, v in self._model.named_parameters()}

    def score(self, params: dict[str, Array]) -> float:
        """See `Task`."""
        self._load(params)
        chance = np.random.default_rng(0)
        with self._torch.no_grad():
            at = chance.integers(self._cut, len(self._data) - CONTEXT - 1, (8, 32))
            return float(np.mean([float(self._loss(some)) for some in at]))


TASKS: dict[str, tuple[type[Any], int]] = {"digits": (Digits, 5), "text": (Text, 3)}


class Run:
    """One training with one codec: its score over bytes and seconds."""

    def __init__(self, task: Task, text: str, steps: int) -> None:
        self.bytes_up = 0
        self.codec_s = 0.0
        self._task, self._plan, self._backend = task, plan(text), fastest()
        self._plan.warm(self._backend)
        self._states: dict[tuple[int, str], State] = {}
        self._rule = optimizer(ADAM)
        params = task.initial()
        slots = {k: init_slots(self._rule.for_key(k)[0], v.reshape(-1)) for k, v in params.items()}
        self.curve: list[tuple[int, int, float]] = []
        for step in range(steps):
            if step % max(1, steps // 10) == 0:
                self.curve.append((step, self.bytes_up, task.score(params)))
            given = [task.gradients(params, worker, step) for worker in range(task.workers)]
            for key, value in params.items():
                means = [
                    self._through(worker, key, one[key], step) for worker, one in enumerate(given)
                ]
                mean = weighted_mean(means, [1.0] * len(means))
                rule, factor = self._rule.for_key(key)
                lr = self._rule.lr_at(step) * factor
                flat, slots[key] = update(
                    rule, value.reshape(-1), slots[key], mean, lr=lr, count=step + 1
                )
                params[key] = flat.reshape(value.shape)
        self.score = task.score(params)
        self.curve.append((steps, self.bytes_up, self.score))

    def _through(self, worker: int, key: str, gradient: Array, step: int) -> Array:
        """Send one gradient as a worker does, and return what a server decodes."""
        codec = self._plan.for_key(key, gradient.size)
        began = time.perf_counter()
        given = dense(gradient)
        state = self._states.get((worker, key)) or codec.start(given.shape)
        seed = seed_of(worker, step, hash_of(key))
        encoded, self._states[worker, key] = codec.encode(given, state, seed, self._backend)
        form, payload = to_payload(encoded, self._backend)
        there = from_payload(encoded.chain.text, form, payload.copy(), given.shape, self._backend)
        values: Array = there.chain.decode(there.packed, self._backend).values
        self.codec_s += time.perf_counter() - began
        self.bytes_up += payload.nbytes
        return values


def hash_of(key: str) -> int:
    """Return a number for a key, the same in every process."""
    return int.from_bytes(key.encode()[-7:], "little")


def measure(
    name: str, codecs: Sequence[str], seeds: int, steps: int | None
) -> list[dict[str, Any]]:
    """Train one task with each codec and seed; return a row for each codec."""
    make, usual = TASKS[name]
    rows: list[dict[str, Any]] = []
    for text in codecs:
        count = steps or make.steps
        began = time.perf_counter()
        runs = [Run(make(seed), text, count) for seed in range(seeds or usual)]
        scores = [run.score for run in runs]
        rows.append(
            {
                "task": name,
                "codec": text,
                "score": statistics.fmean(scores),
                "scores": scores,
                "bytes_per_update": runs[0].bytes_up / count,
                "codec_s": statistics.fmean(run.codec_s for run in runs),
                "wall_s": (time.perf_counter() - began) / len(runs),
                "curve": runs[0].curve,
            }
        )
        row, first = rows[-1], rows[0]
        print(
            f"{name:7} {text:16} {row['score']:9.4f} {row['score'] - first['score']:+9.4f} "
            f"{row['bytes_per_update'] / 1e3:10.1f} kB {row['codec_s']:7.2f} s "
            f"{row['wall_s']:7.1f} s",
            file=sys.stderr,
            flush=True,
        )
    return rows


def plotted(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw each task's score against the bytes that one run has sent, a line per codec."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(6.4 * len(tasks), 4.8), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for row in (row for row in rows if row["task"] == task):
            _, sent, scores = zip(*row["curve"], strict=True)
            axes.plot([max(one, 1) / 1e6 for one in sent], scores, marker=".", label=row["codec"])
        axes.set(xscale="log", xlabel="MB up, all workers", title=task)
        axes.set_ylabel("test accuracy, %" if TASKS[task][0].higher_is_better else "test loss")
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def main() -> None:
    """Measure what was asked for, and print it."""
    parser = argparse.ArgumentParser(prog="scripts/bench_quality")
    parser.add_argument("--task", action="append", choices=list(TASKS))
    parser.add_argument("--codec", action="append")
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    try:
        for text in asked.codec or CODECS:
            plan(text)
    except ValueError as error:
        parser.error(str(error))
    print(
        "task    codec                score to dense  bytes/update   codec     run", file=sys.stderr
    )
    rows = [
        row
        for name in asked.task or TASKS
        for row in measure(name, asked.codec or CODECS, asked.seeds, asked.steps)
    ]
    if asked.plot:
        plotted(rows, asked.plot)
    if asked.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
