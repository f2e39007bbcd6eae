"""What a training run did, told three ways: text for a person, a dict for JSON, a plot.

For the demo, which collects one report per worker and the run's own figures. Everything is a pure
function of the values given, apart from `write_plot`, which writes the one file it is told to.
This module must not know how a run is started, nor anything of sockets, brokers or policies.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zkv_cli import time_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNITS = ("B", "kB", "MB", "GB", "TB")
COLUMNS = ("worker", "batches", "committed", "lost", "wait", "compute", "up", "down", "last loss")


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker's account of a run.

    `batches` counts the batches that it began. `outcomes` counts them by fate ("committed",
    "discarded", "cancelled"). `loss` holds a pair (seconds, mean loss of the batch) per finished
    batch; the seconds are of one clock that all workers share. `accuracy` is the share of the test
    set that is classified right, 0 to 1, or None where this worker did not evaluate.
    """

    rank: int
    name: str
    batches: int
    outcomes: Mapping[str, int]
    wait_s: float
    compute_s: float
    bytes_up: int
    bytes_down: int
    loss: tuple[tuple[float, float], ...]
    accuracy: float | None = None
    time: Mapping[str, Any] | None = None
    """Where its time went: `worker.stats()["time"]`."""

    @property
    def committed(self) -> int:
        """Batches that are part of the model."""
        return self.outcomes.get("committed", 0)

    @property
    def lost(self) -> int:
        """Batches that were computed, wholly or in part, and are not part of the model."""
        return self.outcomes.get("cancelled", 0) + self.outcomes.get("discarded", 0)


@dataclass(frozen=True, slots=True)
class RunReport:
    """A whole run: its configuration, its figures, and its workers in the order of their ranks."""

    policy: str
    servers: int
    workers: int
    updates: int
    wall_s: float
    route: str
    reports: tuple[WorkerReport, ...]

    @property
    def accuracy(self) -> float | None:
        """Test accuracy, 0 to 1, of the worker of lowest rank that evaluated; None if none did."""
        return next((r.accuracy for r in self.reports if r.accuracy is not None), None)

    @property
    def bytes_up(self) -> int:
        """Bytes that all workers sent."""
        return sum(report.bytes_up for report in self.reports)

    @property
    def bytes_down(self) -> int:
        """Bytes that all workers received."""
        return sum(report.bytes_down for report in self.reports)


def run_report(run: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]) -> RunReport:
    """Collect a run's figures and its workers' dicts; times of losses then count from the first.

    Raises ValueError when a field is missing, a rank appears twice, or a worker's report is
    missing (a worker that failed before it could write one); the message names whose.
    """
    reports = sorted((_worker_report(plain) for plain in workers), key=lambda r: r.rank)
    expected = list(range(int(_field(run, "workers", "the run"))))
    found = [report.rank for report in reports]
    if found != expected:
        raise ValueError(
            f"reports of workers with ranks {found}, expected one each of {expected}: "
            "look at the output of the worker that is missing, or empty the report folder first"
        )
    start = min((time for report in reports for time, _ in report.loss), default=0.0)
    return RunReport(
        policy=str(_field(run, "policy", "the run")),
        servers=int(_field(run, "servers", "the run")),
        workers=len(expected),
        updates=int(_field(run, "updates", "the run")),
        wall_s=float(_field(run, "wall_s", "the run")),
        route=str(_field(run, "route", "the run")),
        reports=tuple(
            replace(report, loss=tuple((time - start, value) for time, value in report.loss))
            for report in reports
        ),
    )


def _worker_report(plain: Mapping[str, Any]) -> WorkerReport:
    whose = f"worker {plain.get('rank', 'of unknown rank')}"
    rank = int(_field(plain, "rank", whose))
    accuracy = plain.get("accuracy")
    return WorkerReport(
        rank=rank,
        name=str(plain.get("name") or rank),
        batches=int(_field(plain, "batches", whose)),
        outcomes={str(k): int(v) for k, v in _field(plain, "outcomes", whose).items()},
        wait_s=float(_field(plain, "wait_s", whose)),
        compute_s=float(_field(plain, "compute_s", whose)),
        bytes_up=int(_field(plain, "bytes_up", whose)),
        bytes_down=int(_field(plain, "bytes_down", whose)),
        loss=tuple((float(time), float(value)) for time, value in _field(plain, "loss", whose)),
        accuracy=None if accuracy is None else float(accuracy),
        time=plain.get("time"),
    )


def _field(plain: Mapping[str, Any], name: str, whose: str) -> Any:
    if name not in plain:
        raise ValueError(f"the report of {whose} has no {name!r}; it has {sorted(plain)}")
    return plain[name]


def to_plain(run: RunReport) -> dict[str, Any]:
    """Return a dict that `json.dumps` takes: the run's figures, the totals, then each worker's."""
    return {
        "accuracy": run.accuracy,
        "policy": run.policy,
        "route": run.route,
        "servers": run.servers,
        "workers": run.workers,
        "updates": run.updates,
        "wall_s": run.wall_s,
        "bytes_up": run.bytes_up,
        "bytes_down": run.bytes_down,
        "reports": [
            {**asdict(report), "loss": [list(pair) for pair in report.loss]}
            for report in run.reports
        ],
    }


def bytes_text(count: int) -> str:
    """Return a count of bytes in decimal units with three digits, e.g. 1.50 kB for 1500."""
    value = float(count)
    for unit in UNITS:
        # 999.5 and more would be shown with a fourth digit.
        if value < 999.5 or unit == UNITS[-1]:
            break
        value /= 1000
    if unit == "B":
        return f"{count} B"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def headline(run: RunReport) -> str:
    """Say in two lines how well the model does, and what it took."""
    if run.accuracy is None:
        accuracy = "not evaluated"
    else:
        accuracy = f"{run.accuracy:.4f}"
    return (
        f"test accuracy {accuracy} after {_count(run.updates, 'update')} in {run.wall_s:.1f} s\n"
        f"policy {run.policy}, {_count(run.workers, 'worker')}, {_count(run.servers, 'server')}, "
        f"route {run.route}; {bytes_text(run.bytes_up)} up, {bytes_text(run.bytes_down)} down"
    )


def _count(count: int, noun: str, plural: str = "") -> str:
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def rows(run: RunReport) -> list[tuple[str, ...]]:
    """Return one row of texts per worker, in the order of COLUMNS."""
    return [
        (
            report.name,
            f"{report.batches:,}",
            f"{report.committed:,}",
            f"{report.lost:,}",
            f"{report.wait_s:.2f} s",
            f"{report.compute_s:.2f} s",
            bytes_text(report.bytes_up),
            bytes_text(report.bytes_down),
            f"{report.loss[-1][1]:.4f}" if report.loss else "–",
        )
        for report in run.reports
    ]


def text(run: RunReport, *, tty: bool, width: int = 100) -> str:
    """Say what happened: the headline and a table, one row per worker.

    With `tty` the table is drawn by rich, with colour, within `width` columns; without, it is
    plain ASCII-separated columns that a log or a pipe keeps readable.
    """
    table = _rich_table(run, width) if tty else _plain_table(run)
    split = time_report.lines((one.name, one.time) for one in run.reports)
    return "\n".join([f"{headline(run)}\n\n{table}", *(["", *split] if split else [])])


def _plain_table(run: RunReport) -> str:
    lines = [COLUMNS, *rows(run)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(wide) if index == 0 else cell.rjust(wide)
            for index, (cell, wide) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _rich_table(run: RunReport, width: int) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows(run):
        # Text and not str: a name with square brackets is not rich's markup.
        table.add_row(*(Text(cell) for cell in row))
    # Written to a string: the caller decides where text goes, this module does not print.
    target = io.StringIO()
    Console(file=target, force_terminal=True, width=width).print(table)
    return target.getvalue().strip("\n")


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and up to `window` - 1 values before it; same length.

    Raises ValueError when `window` is below 1.
    """
    if window < 1:
        raise ValueError(f"window {window} is below 1: 1 leaves the values as they are")
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


def write_plot(run: RunReport, path: Path, *, window: int = 15) -> None:
    """Write `figure(run)` as a PNG to `path`, whatever its suffix.

    Raises what `figure` raises, and OSError when the file cannot be written.
    """
    figure(run, window=window).savefig(path, format="png")


def figure(run: RunReport, *, window: int = 15) -> Figure:
    """Draw the loss in nats against the time in seconds, one line per worker.

    The losses of single batches lie faintly behind the line, which is their running mean over
    `window` batches. Needs matplotlib (the extra `demo`): ModuleNotFoundError says so.
    """
    try:
        # The object face, without pyplot: no display is looked for and no global state is left.
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a plot needs matplotlib: pip install 'zkv[demo]'", name=error.name
        ) from error

    drawn = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = drawn.subplots()
    for index, report in enumerate(run.reports):
        times = [time for time, _ in report.loss]
        losses = [value for _, value in report.loss]
        colour = f"C{index % 10}"
        axes.plot(times, losses, color=colour, alpha=0.2, linewidth=0.8)
        # `zkv run` calls its workers worker-0, worker-1, ...; other names need the word.
        name = report.name if report.name.startswith("worker") else f"worker {report.name}"
        label = f"{name} ({_count(report.batches, 'batch', 'batches')})"
        axes.plot(times, smooth(losses, window), color=colour, linewidth=1.8, label=label)
    positive = any(value > 0 for report in run.reports for _, value in report.loss)
    axes.set_yscale("log" if positive else "linear")
    axes.set_xlabel("time since the first batch (s)")
    axes.set_ylabel(f"training loss (nats, mean of {window} batches)")
    axes.set_title(headline(run).replace("; ", "\n", 1), fontsize=10)
    axes.grid(visible=True, which="major", alpha=0.3)
    if run.reports:
        axes.legend()
    return drawn
