"""`zkv simulate --samples`: how often each sample gets into the model, and from which worker.

Reads the options of the assignment and says as text what came of it; `zkv.sample_shares` counts. It
starts no process and does no arithmetic of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, cast

import typer

from zkv_cli.tables import table

if TYPE_CHECKING:
    from zkv.sample_shares import Assignment, SamplesReport, Way

BATCH_DEFAULT = 32
COLUMNS = ("policy", "min", "mean", "max", "never", "smallest share", "largest share")
WORKER_COLUMNS = ("worker", "counted", "share", "skipped", "returned")
TIMES_SHOWN = 12
WAYS_SAID = {
    "retry": "one pool, what did not count is handed out again",
    "skip": "one pool, what did not count is skipped",
    "fixed": "a part for each worker, what did not count is skipped",
}

Samples = Annotated[
    int | None,
    typer.Option("--samples", help="Count how often each of so many samples gets into the model."),
]
Batch = Annotated[
    int | None, typer.Option("--batch", help="Samples in a batch of --samples (default: 32).")
]
Assign = Annotated[
    str | None,
    typer.Option(
        "--assign",
        help="How batches of --samples are assigned: retry (default: one pool, the samples of a "
        "cancelled batch are handed out again), skip (they are not), fixed (each worker its part).",
    ),
]


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of samples as they were given, and --train; None: not given."""

    samples: int | None = None
    batch: int | None = None
    assign: str | None = None
    train: str | None = None

    def __post_init__(self) -> None:
        given = [f"--{name}" for name in ("batch", "assign") if getattr(self, name) is not None]
        if self.samples is None and given:
            raise ValueError(f"{', '.join(given)}: only with --samples, as in --samples 1000")
        if self.samples is not None and self.train is not None:
            raise ValueError(
                f"--samples {self.samples}: not with --train, which deals out samples of its own; "
                "leave out one of the two"
            )

    def assignment(self, seed: int) -> Assignment | None:
        """Return the assignment, None if there is none; ValueError names what is out of range."""
        if self.samples is None:
            return None
        from zkv.sample_shares import Assignment

        batch = BATCH_DEFAULT if self.batch is None else self.batch
        way = cast("Way", self.assign or "retry")
        return Assignment(self.samples, batch, way, seed)


def as_text(policies: Sequence[str], found: Sequence[SamplesReport]) -> str:
    """Say what became of the samples: of one policy in full, of several in a row for each."""
    how = found[0].assignment
    head = f"{how.samples} samples in batches of {how.batch}, {how.way}: {WAYS_SAID[how.way]}"
    if len(found) == 1:
        return "\n".join([head, *_in_full(found[0])])
    rows = [_row(policy, one) for policy, one in zip(policies, found, strict=True)]
    return "\n".join([head, *table(COLUMNS, rows)])


def _row(policy: str, one: SamplesReport) -> tuple[str, ...]:
    from zkv_cli.simulation_views import percent

    figures = (str(one.least), f"{float(one.mean):.2f}", str(one.most), str(one.never))
    return (policy, *figures, percent(min(one.parts)), percent(max(one.parts)))


def _in_full(one: SamplesReport) -> list[str]:
    from zkv_cli.simulation_views import WORKERS_SHOWN, percent

    shown = [f"{times}: {count}" for times, count in islice(one.histogram.items(), TIMES_SHOWN)]
    more = len(one.histogram) - len(shown)
    if more:
        shown.append(f"and {more} more")
    by_rank = zip(one.workers, one.shares, one.parts, strict=True)
    rows = [
        (str(worker), str(own.counted), percent(part), str(own.skipped), str(own.returned))
        for worker, own, part in islice(by_rank, WORKERS_SHOWN)
    ]
    hidden = len(one.workers) - len(rows)
    return [
        f"a sample counts  min {one.least}, mean {float(one.mean):.4g}, max {one.most}; "
        f"{one.never} never",
        f"times: samples   {', '.join(shown)}",
        "",
        *table(WORKER_COLUMNS, rows),
        *([f"and {hidden} more; --json has them all"] if hidden else []),
    ]
