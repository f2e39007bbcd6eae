"""The table at the end of `zkv run --report`: what a live run did, in the fields of `zkv simulate`.

Each worker leaves its own figures in the report folder as it closes (`figures-RANK-LIFE.json`), its
program may leave losses and an accuracy (`worker-RANK.json`), and the broker tells what it has
applied. Here these become one account for each worker. This module must not know how a run is
started, nor how anybody is asked.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zkv.simulation_report import Account, SimulationReport, ratio, to_plain
from zkv_cli import time_report
from zkv_cli.report import bytes_text
from zkv_cli.simulation_views import percent
from zkv_cli.tables import table

COLUMNS = (
    "worker",
    "applied",
    "late",
    "pending",
    "cancelled",
    "compute",
    "useful",
    "lost",
    "communication",
    "waiting",
    "up",
    "down",
    "loss",
)
_SENSELESS = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What a file leads to that is no report."""
COUNTS = ("applied", "late", "cancelled", "discarded")
Update = tuple[int, int, float]
"""(version, staleness, when it was heard of)."""


@dataclass(frozen=True, slots=True)
class Life:
    """What one worker says of itself, all its lives together. Times in seconds, sizes in bytes.

    `outcomes` counts its batches by fate, `loss` has the first and the last that its program told.
    """

    rank: int
    compute_s: float = 0.0
    useful_s: float = 0.0
    cancelled_s: float = 0.0
    wait_s: float = 0.0
    communication_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    updates: tuple[Update, ...] = ()
    loss: tuple[float, float] | None = None
    accuracy: float | None = None
    times: tuple[Mapping[str, Any], ...] = ()
    """What each life says of where its time went (`zkv_cli.time_report`)."""

    @property
    def waiting_s(self) -> float:
        """Waiting for a batch, less the part in which its model was on its way."""
        return max(0.0, self.wait_s - self.communication_s)


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A live run as a `SimulationReport`, and what only a live run has.

    `counts` are the broker's by rank: applied, late, cancelled, discarded.
    """

    report: SimulationReport
    version: int
    lives: tuple[Life, ...]
    counts: Mapping[int, Mapping[str, int]]
    staleness: Mapping[int, int]
    times: Mapping[str, Any]
    """Where the time went: see `time_report.plain_of`."""


def prepare(folder: Path, ranks: Iterable[int]) -> dict[int, int]:
    """Remove what earlier workers of these ranks have left; return the ages of programs' reports.

    A program's report that has the same age (in ns) at the end is of an earlier run.
    """
    ages = {}
    for rank in ranks:
        for old in folder.glob(f"figures-{rank}-*"):
            old.unlink(missing_ok=True)
        own = folder / f"worker-{rank}.json"
        if own.is_file():
            ages[rank] = own.stat().st_mtime_ns
    return ages


def read(
    folder: Path, ranks: Iterable[int], ages: Mapping[int, int]
) -> tuple[list[Life], list[str]]:
    """Return what these workers and their programs have left, and what is missing or unreadable."""
    lives, warnings = [], []
    for rank in ranks:
        life, found = Life(rank), False
        for path in sorted(folder.glob(f"figures-{rank}-*.json")):
            try:
                life, found = _lived(life, json.loads(path.read_text("utf-8"))), True
            except _SENSELESS as error:
                warnings.append(f"{path.name} cannot be read: {type(error).__name__}: {error}")
        if not found:
            warnings.append(
                f"worker {rank} has left no figures: it was killed, or it never connected"
            )
        own = folder / f"worker-{rank}.json"
        if own.is_file() and own.stat().st_mtime_ns != ages.get(rank):
            try:
                life = _told(life, json.loads(own.read_text("utf-8")))
            except _SENSELESS as error:
                warnings.append(f"{own.name} cannot be read: {type(error).__name__}: {error}")
        lives.append(life)
    return lives, warnings


def _lived(life: Life, plain: Mapping[str, Any]) -> Life:
    """Add one life's figures."""
    names = ("compute_s", "useful_s", "cancelled_s", "wait_s", "communication_s")
    sums: dict[str, Any] = {name: getattr(life, name) + float(plain[name]) for name in names}
    sums |= {name: getattr(life, name) + int(plain[name]) for name in ("bytes_up", "bytes_down")}
    heard = tuple((int(v), int(age), float(at)) for v, age, at in plain["updates"])
    outcomes = life.outcomes + Counter({k: int(v) for k, v in plain["outcomes"].items()})
    told = time_report.of_life(plain)
    times = life.times if told is None else (*life.times, told)
    return replace(life, **sums, updates=life.updates + heard, outcomes=outcomes, times=times)


def _told(life: Life, plain: Mapping[str, Any]) -> Life:
    """Add what a program says: "loss" (numbers, or pairs of a time and a number), "accuracy"."""
    losses = [float(one[-1] if isinstance(one, list) else one) for one in plain.get("loss") or ()]
    accuracy = plain.get("accuracy")
    return replace(
        life,
        loss=(losses[0], losses[-1]) if losses else None,
        accuracy=None if accuracy is None else float(accuracy),
    )


def live_run(
    lives: Sequence[Life],
    after: Mapping[str, Any] | None,
    before: Mapping[str, Any] | None,
    *,
    began: float,
    wall_s: float,
    warnings: Sequence[str] = (),
) -> LiveRun:
    """Put together what the workers and the broker say.

    Args:
        lives: one for each worker.
        after: the broker's status when the workers had ended; None: it did not answer, and what
            the workers were told counts.
        before: its status before they began, if it had a life before them: it is subtracted.
        began: when they were started, in seconds of the clock of `Life.updates`.
        wall_s: from there to the end of the last one, in seconds.
        warnings: what is to be said with it.
    """
    told = list(warnings)
    if after is None:
        told.append("the broker did not answer any more: counts are what workers were told")
    counts = {life.rank: _counts(life, after, before) for life in lives}
    pending = Counter(after["pending"] if after is not None else ())
    in_order = sorted((v, life.rank, age) for life in lives for v, age, _ in life.updates)
    report = SimulationReport(
        policy=str(after["policy"]) if after is not None else "unknown",
        time=wall_s,
        accounts=tuple(_account(life, counts[life.rank], pending[life.rank]) for life in lives),
        update_times=_update_times(lives, began),
        staleness=tuple(age for _, _, age in in_order),
        pending=tuple((wall_s, life.rank) for life in lives for _ in range(pending[life.rank])),
        contributions=(),
        cancels=(),
        spans=(),
        warnings=tuple(told),
    )
    version = (
        int(after["version"]) if after is not None else max((v for v, *_ in in_order), default=0)
    )
    ages = Counter(report.staleness)
    if after is not None:
        # Who left before its last batch was settled was never told, but the broker knows.
        ages = _ages(lives, after)
        ages.subtract(_ages(lives, before or {}))
    times = time_report.plain_of(
        [time_report.of_worker(life.times) for life in lives], after, before
    )
    staleness = dict(sorted((+ages).items()))
    return LiveRun(report, version, tuple(lives), counts, staleness, times)


def _ages(lives: Sequence[Life], status: Mapping[str, Any]) -> Counter[int]:
    """Return how many applied contributions of these workers were how many updates old."""
    ages: Counter[int] = Counter()
    for life in lives:
        told = status.get("contributions", {}).get(str(life.rank), {}).get("staleness", {})
        ages.update({int(age): int(count) for age, count in told.items()})
    return ages


def _update_times(lives: Sequence[Life], began: float) -> tuple[float, ...]:
    """Return when the updates that anybody heard of had happened at the latest, rising.

    An update has happened before every later one was heard of, whoever was told first.
    """
    times: dict[int, float] = {}
    for life in lives:
        for version, _, at in life.updates:
            times[version] = min(at, times.get(version, at))
    latest, found = math.inf, []
    for version in sorted(times, reverse=True):
        latest = min(latest, times[version])
        found.append(max(0.0, latest - began))
    return tuple(reversed(found))


def _counts(
    life: Life, after: Mapping[str, Any] | None, before: Mapping[str, Any] | None
) -> dict[str, int]:
    if after is None:
        found = life.outcomes
        return {
            "applied": found["committed"],
            "late": 0,
            "cancelled": found["cancelled"],
            "discarded": found["discarded"],
        }
    new = after["contributions"].get(str(life.rank), {})
    old = (before or {}).get("contributions", {}).get(str(life.rank), {})
    return {name: int(new.get(name, 0)) - int(old.get(name, 0)) for name in COUNTS}


def _account(life: Life, counts: Mapping[str, int], pending: int) -> Account:
    return Account(
        worker=life.rank,
        arrived=counts["applied"] + counts["late"] + counts["discarded"] + pending,
        applied=counts["applied"],
        pending=pending,
        cancelled=counts["cancelled"],
        busy=life.compute_s,
        transfer=life.communication_s,
        waiting=life.waiting_s,
        useful=life.useful_s,
        cancelled_time=life.cancelled_s,
        bytes_up=life.bytes_up,
        bytes_down=life.bytes_down,
    )


def plain_of(run: LiveRun) -> dict[str, Any]:
    """Return a dict for JSON: the fields of `zkv simulate`, and beside them those of a live run.

    `time` is `wall_s`, `busy` is `compute_s` and `transfer` is `communication_s`. Nobody knows when
    a pending contribution came, so its time is null. `loss` has each worker's first and last, null
    where its program told none.
    """
    plain = to_plain(run.report)
    return plain | {
        "pending_contributions": [
            {"time": None, "worker": worker} for _, worker in run.report.pending
        ],
        "wall_s": round(float(run.report.time), 3),
        "version": run.version,
        "compute_s": [life.compute_s for life in run.lives],
        "communication_s": [life.communication_s for life in run.lives],
        "late": [run.counts[life.rank]["late"] for life in run.lives],
        "discarded": [run.counts[life.rank]["discarded"] for life in run.lives],
        "staleness_histogram": {str(age): count for age, count in run.staleness.items()},
        "loss": [
            None if life.loss is None else {"first": life.loss[0], "last": life.loss[1]}
            for life in run.lives
        ],
        "accuracy": [life.accuracy for life in run.lives],
        **run.times,
    }


def as_text(run: LiveRun) -> str:
    """Say it to a person: the sums, a row for each worker, and what is missing."""
    report = run.report
    updates = len(report.update_times)
    known = [life.accuracy for life in run.lives if life.accuracy is not None]
    lines = [
        f"{report.policy}: {updates:,} update{'' if updates == 1 else 's'} in "
        f"{float(report.time):.2f} s, version {run.version}"
        + (f", accuracy {known[0]:.4f}" if known else ""),
        f"workers' time  busy {percent(report.busy_share)}, "
        f"useful {percent(report.useful_share)}, "
        f"communication {percent(report.share('transfer'))}, "
        f"waiting {percent(report.share('waiting'))}",
        f"staleness      max {report.staleness_max}, mean {float(report.staleness_mean):.4g}; "
        "by age "
        + (", ".join(f"{age}: {count:,}" for age, count in run.staleness.items()) or "none"),
        "",
        *table(COLUMNS, _rows(run)),
    ]
    named = [f"worker {life.rank}" for life in run.lives]
    split = time_report.lines(zip(named, run.times["time"], strict=True))
    lines += ["", *split] if split else []
    return "\n".join([*lines, *(f"note: {one}" for one in report.warnings)])


def _rows(run: LiveRun) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for one, life in zip(run.report.accounts, run.lives, strict=True):
        rows.append(
            (
                str(one.worker),
                f"{one.applied:,}",
                f"{run.counts[one.worker]['late']:,}",
                f"{one.pending:,}",
                f"{one.cancelled:,}",
                f"{float(one.busy):.2f} s",
                percent(ratio(one.useful, one.busy)),
                f"{float(one.cancelled_time):.2f} s",
                f"{float(one.transfer):.2f} s",
                f"{float(one.waiting):.2f} s",
                bytes_text(one.bytes_up),
                bytes_text(one.bytes_down),
                "-" if life.loss is None else f"{life.loss[0]:.4g} to {life.loss[1]:.4g}",
            )
        )
    return rows
