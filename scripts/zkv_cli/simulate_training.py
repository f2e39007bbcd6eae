"""`zkv simulate --train`: policies compared by the time until the model is good enough.

Reads the options of training, lets `zkv.simulated_training` run each policy once for each seed, and
says what came of it as text. It starts no process and does no arithmetic of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from zkv_cli.tables import table

if TYPE_CHECKING:
    from zkv.compute_times import ComputeTimes
    from zkv.network_model import Network
    from zkv.policy import SyncPolicy
    from zkv.simulated_training import Limits, TimeToTarget
    from zkv.simulation_report import SimulationReport

SEEDS_MAX = 1000
TARGET_DEFAULT = 0.97
OPTIMIZER_DEFAULT = "adam:lr=0.003"
PASSES_MAX = 1_000_000
COLUMNS = ("policy", "reached", "time mean", "± std", "min", "max", "updates mean")
NOT_REACHED = "not reached"

Train = Annotated[
    str | None,
    typer.Option("--train", help="Compute real gradients too, of: digits (needs scikit-learn)."),
]
Target = Annotated[
    float | None,
    typer.Option("--target", help="Test accuracy at which training ends (default: 0.97)."),
]
Seeds = Annotated[
    int | None,
    typer.Option("--seeds", help="Train with so many seeds, from --seed on (default: 1)."),
]
Optimizer = Annotated[
    str | None,
    typer.Option("--optimizer", help="What updates do (default: adam:lr=0.003)."),
]
Staleness = Annotated[
    str | None,
    typer.Option("--staleness", help="Of gradients some updates old: none, scale, dc:0.04."),
]
Passes = Annotated[
    int | None,
    typer.Option("--passes", help="Give up after so many passes over the data (default: 30)."),
]


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of training as they were given; None: not given."""

    train: str | None = None
    target: float | None = None
    seeds: int | None = None
    optimizer: str | None = None
    staleness: str | None = None
    passes: int | None = None

    def __post_init__(self) -> None:
        given = [
            f"--{name}"
            for name in ("target", "seeds", "optimizer", "staleness", "passes")
            if getattr(self, name) is not None
        ]
        if self.train is None and given:
            raise ValueError(f"{', '.join(given)}: only with --train digits")
        if self.train not in (None, "digits"):
            raise ValueError(f"--train {self.train[:40]!r}: what can be trained is digits")
        for name, largest in (("seeds", SEEDS_MAX), ("passes", PASSES_MAX)):
            count = getattr(self, name)
            if count is not None and not 1 <= count <= largest:
                raise ValueError(f"--{name} must be 1 to {largest}, given {count}")
        if self.target is not None and not 0.0 < self.target <= 1.0:
            raise ValueError(
                f"--target must be above 0 and at most 1, such as 0.97, given {self.target:g}"
            )


def train_all(
    asked: Asked,
    policies: Sequence[SyncPolicy],
    times: ComputeTimes,
    network: Network,
    limits: Limits,
    trace: bool,
) -> tuple[list[SimulationReport], list[TimeToTarget]]:
    """Train each policy with each seed; returns the first seed's reports, and all seeds' times.

    Seed number n is `times.seed` + n: of the data's split and order, of the first values and of
    random compute times, the same for every policy.

    Raises:
        ValueError: an optimizer or staleness that is none, or more workers than samples.
        ModuleNotFoundError: scikit-learn is not there; the text says what to install.
    """
    from zkv.optimizer_spec import optimizer
    from zkv.simulated_training import summary, train
    from zkv.staleness import staleness
    from zkv_cli.digits_model import Digits

    spec = optimizer(asked.optimizer or OPTIMIZER_DEFAULT)
    stale = staleness(asked.staleness or "none")
    target = TARGET_DEFAULT if asked.target is None else asked.target
    reports, found = [], []
    for policy in policies:
        runs = []
        for seed in range(times.seed, times.seed + (asked.seeds or 1)):
            run = train(
                policy,
                replace(times, seed=seed),
                Digits(workers=len(times.workers), seed=seed),
                spec,
                target=target,
                limits=limits,
                stale=stale,
                network=network,
                trace=trace and seed == times.seed,
            )
            runs.append(run)
        reports.append(runs[0].report)
        found.append(summary(str(policy), target, runs))
    return reports, found


def as_text(found: Sequence[TimeToTarget]) -> str:
    """Return a table with a row for each policy; "not reached" where no seed got there."""
    first = found[0]
    seeds = f"{first.seeds} seed{'s' if first.seeds > 1 else ''}"
    head = f"time to {100 * first.target:g} % test accuracy, {seeds}:"
    if first.seeds > 1:
        head = head.replace(":", " (the figures above are of the first):")
    return "\n".join([head, *table(list(COLUMNS), [_row(one) for one in found])])


def _row(one: TimeToTarget) -> list[str]:
    reached = f"{one.reached} of {one.seeds}"
    if not one.reached:
        best = f"{NOT_REACHED} ({100 * max(one.accuracy):.2f} %)"
        return [one.policy, reached, best, "", "", "", ""]
    return [
        one.policy,
        reached,
        f"{statistics.fmean(one.found):.6g}",
        f"{one.std:.3g}",
        f"{min(one.found):.6g}",
        f"{max(one.found):.6g}",
        f"{one.updates_mean:.1f}",
    ]
