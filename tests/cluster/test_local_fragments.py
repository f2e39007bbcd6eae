"""Local SGD by fragments: a part of the model is contributed at a time, to the bits of one process
that does the same."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from crew import crew, pool
from harness import cluster, until
from worker_threads import on_threads

import zkv
from zkv.dtypes import Array
from zkv.errors import ConfigError
from zkv.optim import init_slots, rule, update
from zkv.sums import weighted_mean

LR, SIZE = 0.125, 20_000
SIZES = {"a": SIZE, "b": SIZE, "c": SIZE, "d": 5}
PARTS = {1: ["abcd"], 2: ["ac", "bd"], 3: ["ad", "b", "c"]}
"""What numbers of fragments divide them into: each key that is not small is 160 kB."""
OUTER = {"sgd:lr=1": ("sgd", 1.0), "nesterov:lr=0.5,momentum=0.9": ("nesterov", 0.5)}


def start() -> dict[str, Array]:
    return {
        key: np.random.default_rng(at).standard_normal(size)
        for at, (key, size) in enumerate(SIZES.items())
    }


def compute(rank: int, number: int, values: dict[str, Array]) -> None:
    """One local batch: each key's change depends on its values, the worker and the batch."""
    for at, value in enumerate(values.values()):
        value -= LR * (value * 0.5 + (rank + 1) * (number % 5 + at))


def weight_of(rank: int, number: int) -> float:
    return 1.0 + rank + number % 2


class OneProcess:
    """All workers and the server of a run under BSP."""

    def __init__(self, fragments: int, *, delay: int = 0, mixing: float = 0.0, outer: str) -> None:
        self.parts, self.delay, self.mixing = PARTS[fragments], delay, mixing
        self.name, self.lr = OUTER[outer]
        self.models = [start()]
        self.slots = {key: init_slots(rule(self.name), v) for key, v in self.models[0].items()}
        self.counts = dict.fromkeys(SIZES, 0)
        self.workers: dict[int, Any] = {}

    def join(self, rank: int) -> None:
        """A worker has no values of its own yet."""
        self.workers[rank] = None

    def _begin(self, rank: int, version: int) -> tuple[Any, Any, Any]:
        count, values = len(self.parts), self.models[version]
        if self.workers[rank] is None or count == 1:
            own, begun = ({key: v.copy() for key, v in values.items()} for _ in range(2))
            self.workers[rank] = [version, own, begun, [0.0] * count]
        before, own, begun, weights = self.workers[rank]
        for at in {one % count for one in range(before, version)}:
            for key in self.parts[at]:
                own[key] = own[key] * self.mixing + values[key] * (1 - self.mixing)
                begun[key] = values[key].copy()
            weights[at] = 0.0
        self.workers[rank][0] = version
        return own, begun, weights

    def round(self, batches: dict[int, range]) -> None:
        """Make one update, of these local batches of each worker."""
        granted = len(self.models) - 1
        at, changes, total = granted % len(self.parts), [], []
        for rank, numbers in sorted(batches.items()):
            own, begun, weights = self._begin(rank, max(0, granted - self.delay))
            for number in numbers:
                compute(rank, number, own)
                weights[:] = [one + weight_of(rank, number) for one in weights]
            changes.append({key: begun[key] - own[key] for key in self.parts[at]})
            total.append(weights[at])
        model = dict(self.models[-1])
        for key in self.parts[at]:
            self.counts[key] += 1
            mean = weighted_mean([change[key] for change in changes], total)
            model[key], self.slots[key] = update(
                rule(self.name),
                model[key],
                self.slots[key],
                mean,
                lr=self.lr,
                count=self.counts[key],
            )
        self.models.append(model)


def trains(h: int, rounds: int, length: int, **options: Any) -> Any:
    def body(worker: Any) -> Any:
        worker.init(start())
        with worker.local(h=h, **options) as local:
            for number in range(rounds * length):
                with local.batch(weight=weight_of(worker.rank, number)) as batch:
                    compute(worker.rank, number, batch.params)
            last = local.last
        last.wait()
        return worker.evaluate().params, worker.stats()

    return body


async def run(
    body: Any, servers: int = 2, prefetch: int = 0, outer: str = "sgd:lr=1", workers: int = 2
) -> list[Any]:
    async with cluster(servers, optimizer=outer) as made:
        return await on_threads(made, *[body] * workers, prefetch=prefetch)


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize(
    ("fragments", "prefetch", "mixing"),
    [(1, 0, 0.0), (2, 0, 0.0), (3, 0, 0.0), (2, 1, 0.0), (3, 1, 0.0), (2, 1, 0.5), (3, 0, 0.25)],
)
def test_a_run_is_that_of_one_process(
    fragments: int, prefetch: int, mixing: float, outer: str
) -> None:
    length, rounds = 2, 7
    body = trains(length * fragments, rounds, length, fragments=fragments, mixing=mixing)
    told = asyncio.run(run(body, prefetch=prefetch, outer=outer))
    one = OneProcess(fragments, delay=prefetch, mixing=mixing, outer=outer)
    for rank in range(2):
        one.join(rank)
    for number in range(rounds):
        numbers = range(number * length, (number + 1) * length)
        one.round({0: numbers, 1: numbers})
    for params, stats in told:
        assert stats["outcomes"]["committed"] == rounds
        for key, value in one.models[-1].items():
            np.testing.assert_array_equal(params[key], value)
