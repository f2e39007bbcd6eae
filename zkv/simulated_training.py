"""Training under a virtual clock: real gradients, on the model that each grant was given on.

`Training` listens to what a synchroniser decides. A started batch gets the worker's next samples
and keeps the model as it is then; an update computes the gradients of its contributions on those
models and applies their weighted mean with zkv's own rules, exactly as servers do. A model lives as
long as an open grant or a pending contribution was given on it. This module must not know what is
learned (that is a `Learner`), how time passes, or where anything is printed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from zkv.compute_times import ComputeTimes, Time
from zkv.dtypes import Array
from zkv.network_model import Network
from zkv.optim import clip_factor, init_slots, square_sum, update
from zkv.optimizer_spec import OptimizerSpec
from zkv.policy import SyncPolicy
from zkv.simulation_report import SimulationReport
from zkv.simulator import Simulation
from zkv.staleness import Staleness
from zkv.sums import divided, tree_sum, weighted
from zkv.sync import Action, Cancel, Commit, Discard, Start

NOTHING = Staleness()
"""Stale gradients count as they are."""

PASSES_DEFAULT = 30
"""As many passes as the live example makes."""

Model = Mapping[str, Array]
"""Values by key. They are never written to: an update makes new arrays."""


class Learner(Protocol):
    """What is learned, by workers of the ranks 0, 1, ..."""

    def initial(self) -> Model:
        """Return the first model, float32 or float64."""
        ...

    def gradients(self, model: Model, rank: int, batch: int) -> tuple[Model, float]:
        """Return the mean gradients of a worker's batch (0, 1, ...), and its count of samples."""
        ...

    def accuracy(self, model: Model) -> float:
        """Return the share of the test samples that the model gets right, 0 to 1."""
        ...

    @property
    def samples(self) -> int:
        """How many samples one pass over the data has."""
        ...


@dataclass(frozen=True, slots=True)
class _Batch:
    """An open grant or a pending contribution: the worker's batch, and the model of its grant."""

    number: int
    version: int
    model: Model


class Training:
    """A model that is updated as a synchroniser decides; `hear` is its one way in.

    `ranks` are the learner's ranks by worker number, `stale` says what happens to gradients that
    are some updates old. Raises ValueError if it drops any: the simulator does not.
    """

    def __init__(
        self,
        learner: Learner,
        spec: OptimizerSpec,
        ranks: Mapping[int, int],
        stale: Staleness = NOTHING,
    ) -> None:
        if stale.bound is not None:
            raise ValueError(f"staleness {stale}: drop is not simulated; give scale, dc:L or both")
        self.model: Model = dict(learner.initial())
        self.version = 0
        self.samples = 0.0
        """How many samples the updates so far have used."""
        self._learner = learner
        self._spec = spec
        self._stale = stale
        self._ranks = dict(ranks)
        self._slots = {
            key: init_slots(spec.for_key(key)[0], value.reshape(-1))
            for key, value in self.model.items()
        }
        self._begun = dict.fromkeys(ranks, 0)
        self._batches: dict[tuple[int, int], _Batch] = {}

    @property
    def models_kept(self) -> int:
        """How many different models are in memory, the current one included."""
        return len({id(self.model)} | {id(batch.model) for batch in self._batches.values()})

    def hear(self, action: Action) -> None:
        """Carry out one decision. Decisions must come in their order."""
        match action:
            case Start(worker, grant, _):
                self._batches[worker, grant] = _Batch(self._begun[worker], self.version, self.model)
                self._begun[worker] += 1
            case Cancel(worker, grant) | Discard(worker, grant):
                # Its samples are skipped, as by a live worker whose loop goes on.
                self._batches.pop((worker, grant), None)
            case Commit():
                self._commit(action)

    def _commit(self, commit: Commit) -> None:
        gradients: list[Model] = []
        batches: list[_Batch] = []
        weights: list[float] = []
        # They stand sorted by worker and grant, which is the order of a server's sum.
        for one in commit.contributions:
            batch = self._batches.pop((one.worker, one.grant))
            rank = self._ranks[one.worker]
            gradient, weight = self._learner.gradients(batch.model, rank, batch.number)
            gradients.append(gradient)
            batches.append(batch)
            weights.append(weight)
        samples = float(np.sum(np.asarray(weights, dtype=np.float64)))
        means: dict[str, Array] = {}
        for key in self.model:
            total = tree_sum(self._terms(key, gradients, batches, weights), len(gradients))
            assert total is not None
            means[key] = divided(total, samples)
        self._clip(means)
        self.model = {key: self._updated(key, mean) for key, mean in means.items()}
        self.version = commit.version
        self.samples += samples

    def _terms(
        self,
        key: str,
        gradients: Sequence[Model],
        batches: Sequence[_Batch],
        weights: Sequence[float],
    ) -> Callable[[int], Array]:
        """Return the terms of one key's sum, flat: weighted, and treated for their staleness."""

        def term(at: int) -> Array:
            gradient, batch = gradients[at][key].reshape(-1), batches[at]
            if self._stale.compensation:
                then = batch.model[key].reshape(-1)
                now = self.model[key].reshape(-1)
                gradient = self._stale.compensated(gradient, now, then)
            # The divisor stays, so that what is stale moves the model less.
            return weighted(
                gradient, weights[at] * self._stale.factor(self.version - batch.version)
            )

        return term

    def _clip(self, means: dict[str, Array]) -> None:
        bound = self._spec.clip_global_norm
        if bound is None:
            return
        factor = clip_factor(math.fsum(square_sum(mean) for mean in means.values()), bound)
        if factor != 1.0:
            for key, mean in means.items():
                means[key] = mean * mean.dtype.type(factor)

    def _updated(self, key: str, gradient: Array) -> Array:
        rule, lr_factor = self._spec.for_key(key)
        value, self._slots[key] = update(
            rule,
            self.model[key].reshape(-1),
            self._slots[key],
            gradient,
            lr=self._spec.lr_at(self.version) * lr_factor,
            count=self.version + 1,
        )
        return value.reshape(self.model[key].shape)


@dataclass(frozen=True, slots=True)
class Trained:
    """What one run came to: `time` and `updates` at the target, None if it was not reached."""

    report: SimulationReport
    time: Time | None
    updates: int | None
    accuracy: float
    """Of the last model."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a run ends if it does not reach its target; None: no such limit."""

    passes: int = PASSES_DEFAULT
    until: Time | None = None
    updates: int | None = None

    def __post_init__(self) -> None:
        if self.passes < 1:
            raise ValueError(f"passes must be at least 1, given {self.passes}")


def train(
    policy: SyncPolicy,
    times: ComputeTimes,
    learner: Learner,
    spec: OptimizerSpec,
    *,
    target: float,
    limits: Limits,
    stale: Staleness = NOTHING,
    network: Network | None = None,
    trace: bool = False,
) -> Trained:
    """Run until the test accuracy is at least `target` (0 to 1), or a limit is met.

    The accuracy is looked at after each update, which takes no virtual time. The time is that of
    the decision to update: a server's time for that update is not in it. `limits.passes` is
    counted in samples applied: the run ends once that many passes over the data are in the model.

    Raises ValueError for a target that is not above 0 and at most 1, and what `Training` raises.
    """
    if not 0.0 < target <= 1.0:
        raise ValueError(f"target must be above 0 and at most 1, such as 0.97, given {target:g}")
    ranks = {worker: at for at, worker in enumerate(times.workers)}
    training = Training(learner, spec, ranks, stale)
    simulation = Simulation(policy, times, network=network, trace=trace, listener=training.hear)
    accuracy, reached = learner.accuracy(training.model), False
    while training.samples < limits.passes * learner.samples:
        made = training.version
        if limits.updates is not None and made >= limits.updates:
            break
        simulation.run(until=limits.until, updates=made + 1)
        if training.version == made:
            break  # The time is up.
        accuracy = learner.accuracy(training.model)
        if accuracy >= target:
            reached = True
            break
    report = simulation.report()
    if not reached:
        return Trained(report, None, None, accuracy)
    return Trained(report, simulation.now, training.version, accuracy)


@dataclass(frozen=True, slots=True)
class TimeToTarget:
    """The runs of one policy with several seeds: times and updates of those that reached it."""

    policy: str
    target: float
    seeds: int
    times: tuple[float | None, ...]
    """By seed; None: not reached."""
    updates: tuple[int | None, ...]
    accuracy: tuple[float, ...]
    """Of the last model, by seed."""

    @property
    def found(self) -> tuple[float, ...]:
        """The times of the seeds that reached the target."""
        return tuple(time for time in self.times if time is not None)

    @property
    def reached(self) -> int:
        """How many seeds reached the target."""
        return len(self.found)

    @property
    def std(self) -> float:
        """The sample standard deviation of the times (n - 1); 0 for a single one."""
        return statistics.stdev(self.found) if self.reached > 1 else 0.0

    @property
    def updates_mean(self) -> float:
        """The mean number of updates at the target; raises StatisticsError if none reached it."""
        return statistics.fmean(count for count in self.updates if count is not None)

    def to_plain(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` takes; figures of no run are None."""
        found = self.found
        return {
            "target": self.target,
            "seeds": self.seeds,
            "reached": self.reached,
            "mean": statistics.fmean(found) if found else None,
            "std": self.std if found else None,
            "min": min(found, default=None),
            "max": max(found, default=None),
            "updates_mean": self.updates_mean if found else None,
            "times": list(self.times),
            "accuracy": list(self.accuracy),
        }


def summary(policy: str, target: float, runs: Sequence[Trained]) -> TimeToTarget:
    """Put the runs of one policy together, one for each seed."""
    return TimeToTarget(
        policy,
        target,
        len(runs),
        tuple(None if run.time is None else float(run.time) for run in runs),
        tuple(run.updates for run in runs),
        tuple(run.accuracy for run in runs),
    )
