"""What an attached model's backward pass costs more than a plain one's (`scripts/bench_torch
--help`).

Plain and attached passes take turns in one process, so that a machine which is slow for a while is
slow for both: each turn gives one ratio. What the adapter computes is counted in CPU time too,
which others on the machine hardly change.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

try:
    import torch
except ImportError:
    sys.exit("bench_torch needs PyTorch: pip install 'zkv[torch]'")

from instant_peers import InstantWorker
from resnet50 import CLASSES, STAGES, resnet
from zkv.torch import attach

IDLE_TIMEOUT_S = 60.0
TINY = ((4, 1, 1), (8, 1, 2))
"""For a quick look at whether it runs."""


@dataclass
class Pass:
    """Seconds of one forward and backward pass."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    cpu_s: float = 0.0
    """Of all threads of the process, in the backward pass."""
    push_s: float = 0.0
    """CPU of the hooks in the backward pass, on its own thread."""
    io_s: float = 0.0
    """CPU of the I/O thread; of an attached pass until it has nothing to do any more."""

    @property
    def whole_s(self) -> float:
        """Both passes."""
        return self.forward_s + self.backward_s


@dataclass
class Plain:
    """A model of PyTorch's alone."""

    model: Any
    images: Any
    labels: Any

    def run(self) -> Pass:
        """Compute one batch."""
        done = Pass()
        self.model.zero_grad()
        began = time.perf_counter()
        loss = torch.nn.functional.cross_entropy(self.model(self.images), self.labels)
        forwarded, cpu_s = time.perf_counter(), time.process_time()
        loss.backward()
        done.backward_s, done.cpu_s = (
            time.perf_counter() - forwarded,
            time.process_time() - cpu_s,
        )
        done.forward_s = forwarded - began
        return done


@dataclass
class Attached(Plain):
    """The same model, attached."""

    worker: InstantWorker
    optimizer: Any = None

    def __post_init__(self) -> None:
        self.optimizer = attach(self.model, self.worker, buffers="local")

    def run(self) -> Pass:
        """Compute one batch; its end is no part of it, but is over when this returns."""
        idle = self.worker.peers.idle
        done = super().run()
        idle.clear()
        self.optimizer.step()
        if not idle.wait(IDLE_TIMEOUT_S) or self.optimizer.last.wait() != "committed":
            raise SystemExit("the batch did not come to its end")
        return done


@dataclass
class Counted(Attached):
    """The same, with a count of what pushes take. Counting takes time itself: two hooks for each
    gradient, about a quarter of what is counted."""

    _push_s: float = 0.0
    _since: float = 0.0

    def __post_init__(self) -> None:
        # Hooks are called in the order in which they came: these two are around the adapter's.
        self._around(self._before)
        super().__post_init__()
        self._around(self._after)

    def _around(self, hook: Callable[[Any], None]) -> None:
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)

    def _before(self, parameter: Any) -> None:
        self._since = time.thread_time()

    def _after(self, parameter: Any) -> None:
        self._push_s += time.thread_time() - self._since

    def run(self) -> Pass:
        """Compute one batch."""
        self._push_s = 0.0
        done = super().run()
        done.push_s = self._push_s
        return done


Figure = Callable[[Pass], float]
TIMES: dict[str, Figure] = {
    "backward": lambda one: one.backward_s,
    "forward and backward": lambda one: one.whole_s,
    "CPU of backward": lambda one: one.cpu_s,
}
Turn = tuple[Pass, Pass, Pass, Pass]
"""Plain, attached, plain once more, and attached with a count of what pushes take."""
SPENT: dict[str, Callable[[Turn], float]] = {
    "pushes": lambda turn: turn[3].push_s,
    "I/O thread": lambda turn: turn[1].io_s,
    "both": lambda turn: turn[3].push_s + turn[1].io_s,
    "I/O thread idle": lambda turn: turn[2].io_s,
}


def turns(asked: argparse.Namespace) -> list[Turn]:
    """Return the passes of each turn."""
    torch.manual_seed(0)
    stages = TINY if asked.tiny else STAGES
    images = torch.randn(asked.batch, 3, asked.side, asked.side)
    labels = torch.randint(CLASSES, (asked.batch,))
    with InstantWorker() as worker, InstantWorker() as other:
        ways: list[Plain] = [
            Plain(resnet(stages), images, labels),
            Attached(resnet(stages), images, labels, worker),
            Plain(resnet(stages), images, labels),
            Counted(resnet(stages), images, labels, other),
        ]
        for _ in range(asked.warm):
            for way in ways:
                way.run()
        io = time.pthread_getcpuclockid(worker._thread.ident or 0)

        def run(way: Plain) -> Pass:
            before_s = time.clock_gettime(io)
            done = way.run()
            done.io_s = time.clock_gettime(io) - before_s
            return done

        found, chance = [], random.Random(0)
        for at in range(asked.turns):
            order = chance.sample(range(len(ways)), len(ways))
            done = {one: run(ways[one]) for one in order}
            found.append((done[0], done[1], done[2], done[3]))
            if asked.verbose:
                print(at, *found[-1], sep="\n  ", file=sys.stderr, flush=True)
        for way in ways:
            if isinstance(way, Attached):
                way.optimizer.detach()
    return found


def ratios(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the median of each pair's second over its first, and the middle half of them."""
    found = [other / plain for plain, other in pairs]
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return {"ratio": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


def row(what: str, against: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return a row: medians of both sides in ms, and the ratios of the pairs."""
    plain_s, other_s = (statistics.median(side) for side in zip(*pairs, strict=True))
    ms = {"plain_ms": round(1e3 * plain_s, 1), "ms": round(1e3 * other_s, 1)}
    return {"what": what, "against": against, **ms, **ratios(pairs)}


def table(found: Sequence[Turn], threads: int) -> list[dict[str, Any]]:
    """Return a row for each figure."""
    rows = [
        row(what, against, [(of(turn[0]), of(turn[at])) for turn in found])
        for what, of in TIMES.items()
        for against, at in (("attached", 1), ("control", 2))
    ]
    # All threads compute in a pass: what its CPU time would take if each had a core for itself.
    alone_s = min(one.cpu_s for turn in found for one in (turn[0], turn[2])) / threads
    rows += [
        row(f"CPU of {what}", "share", [(alone_s, of(turn)) for turn in found])
        for what, of in SPENT.items()
    ]
    return rows


def main() -> int:
    """Measure, and print it."""
    parser = argparse.ArgumentParser(prog="scripts/bench_torch")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    asked = parser.parse_args()
    if asked.turns < 2 or asked.batch < 1 or asked.side < 1 or asked.warm < 0:
        parser.error("--turns is at least 2, --batch and --side at least 1")
    rows = table(turns(asked), torch.get_num_threads())
    if asked.json:
        print(json.dumps(rows))
        return 0
    columns = {"what": 22, "against": 8, "plain_ms": 9, "ms": 9, "ratio": 8, "low": 8, "high": 8}
    print("  ".join(f"{name:>{wide}}" for name, wide in columns.items()))
    for one in rows:
        print("  ".join(f"{one[name]!s:>{wide}}" for name, wide in columns.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
