"""What simulated runs did, for a person: text, a table that compares them, and a picture.

Pure apart from `write_plot`, which writes the one file it is told to. This module must not know how
a run is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zkv.compute_times import Time
from zkv.simulation_report import SimulationReport, ratio
from zkv_cli.report import bytes_text
from zkv_cli.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    "policy",
    "time",
    "updates",
    "arrived",
    "applied",
    "pending",
    "cancelled",
    "busy",
    "useful",
    "transfer",
    "waiting",
    "staleness max / mean",
    "up",
    "down",
)
WORKER_COLUMNS = (
    "worker",
    "arrived",
    "applied",
    "share",
    "pending",
    "cancelled",
    "time lost",
    "busy",
    "useful",
    "transfer",
    "waiting",
    "up",
    "down",
)
OPTIONAL = ("transfer", "up", "down")
WORKERS_SHOWN = 32
STALENESS_SHOWN = 30
COLOURS = {
    "compute": "#4c78a8",
    "cancelled": "#e45756",
    "transfer": "#f2b134",
    "waiting": "#e3e3e3",
}
NAMES = {
    "compute": "computes",
    "cancelled": "cancelled work",
    "transfer": "transfers",
    "waiting": "waits",
}


def as_text(report: SimulationReport) -> str:
    """Say what one run did: its sums, then a row for each worker."""
    lost = report.total("cancelled")
    shown = [str(one) for one in report.staleness[:STALENESS_SHOWN]]
    more = len(report.staleness) - len(shown)
    in_order = " ".join(shown) + (f" and {more} more" if more else "")
    lines = [
        f"{report.policy} through {time_text(report.time)}: "
        f"{_count(len(report.update_times), 'update')}",
        f"contributions  {report.total('arrived')} arrived, {report.total('applied')} applied, "
        f"{len(report.pending)} pending; {_count(lost, 'batch', 'batches')} cancelled, "
        f"{time_text(report.total('cancelled_time'))} of work lost",
        f"workers' time  busy {percent(report.busy_share)}, "
        f"useful {percent(report.useful_share)}, "
        f"transfer {percent(report.share('transfer'))}, "
        f"waiting {percent(report.share('waiting'))}",
        f"staleness      max {report.staleness_max}, mean {float(report.staleness_mean):.4g}"
        + (f"; in order {in_order}" if shown else ""),
        f"bytes          {bytes_text(report.total('bytes_up'))} up, "
        f"{bytes_text(report.total('bytes_down'))} down",
        "",
        *_table(WORKER_COLUMNS, _worker_rows(report)),
    ]
    if len(report.accounts) > WORKERS_SHOWN:
        lines.append(f"and {len(report.accounts) - WORKERS_SHOWN} more; --json has them all")
    return "\n".join(lines)


def _worker_rows(report: SimulationReport) -> list[tuple[str, ...]]:
    return [
        (
            str(one.worker),
            str(one.arrived),
            str(one.applied),
            percent(ratio(one.applied, report.total("applied"))),
            str(one.pending),
            str(one.cancelled),
            time_text(one.cancelled_time),
            percent(ratio(one.busy, report.time)),
            percent(ratio(one.useful, report.time)),
            time_text(one.transfer),
            time_text(one.waiting),
            bytes_text(one.bytes_up),
            bytes_text(one.bytes_down),
        )
        for one in report.accounts[:WORKERS_SHOWN]
    ]


def comparison(reports: Sequence[SimulationReport]) -> str:
    """Return a table with a row for each run; transfer and waiting are sums over the workers."""
    rows = [
        (
            report.policy,
            time_text(report.time),
            str(len(report.update_times)),
            str(report.total("arrived")),
            str(report.total("applied")),
            str(len(report.pending)),
            str(report.total("cancelled")),
            percent(report.busy_share),
            percent(report.useful_share),
            time_text(report.total("transfer")),
            time_text(report.total("waiting")),
            f"{report.staleness_max} / {float(report.staleness_mean):.2f}",
            bytes_text(report.total("bytes_up")),
            bytes_text(report.total("bytes_down")),
        )
        for report in reports
    ]
    return "\n".join(_table(COLUMNS, rows))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table without the columns of communication where there is none."""
    kept = [
        at
        for at, column in enumerate(columns)
        if column not in OPTIONAL or any(row[at] not in ("0", "0 B") for row in rows)
    ]
    return table([columns[at] for at in kept], [[row[at] for at in kept] for row in rows])


def time_text(time: Time) -> str:
    """A time in six digits at most: "0.333333", "15"."""
    return f"{float(time):.6g}"


def percent(share: Time) -> str:
    """A share such as "66.67 %"."""
    return f"{100 * float(share):.2f} %"


def _count(count: int, noun: str, plural: str = "") -> str:
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def write_plot(reports: Sequence[SimulationReport], path: Path) -> None:
    """Write `figure(reports)` as a PNG to `path`, whatever its suffix.

    Raises what `figure` raises, and OSError when the file cannot be written.
    """
    figure(reports).savefig(path, format="png")


def figure(reports: Sequence[SimulationReport]) -> Figure:
    """Draw what each worker did when, one panel for each run, with updates as vertical lines.

    The runs must have kept their trace. At most WORKERS_SHOWN workers are drawn. Needs matplotlib
    (the extra `demo`): ModuleNotFoundError says so.
    """
    try:
        # The object face, without pyplot: no display is looked for and no global state is left.
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a plot needs matplotlib: pip install 'zkv[demo]'", name=error.name
        ) from error

    rows = max(min(len(report.accounts), WORKERS_SHOWN) for report in reports)
    height = 0.75 + len(reports) * (0.75 + 0.24 * rows)
    drawn = Figure(figsize=(11, height), dpi=110, layout="constrained")
    panels = drawn.subplots(len(reports), 1, squeeze=False, sharex=True)[:, 0]
    for axes, report in zip(panels, reports, strict=True):
        _panel(axes, report)
    panels[-1].set_xlabel("time")
    drawn.legend(handles=_legend(reports), loc="outside upper center", ncols=5, frameon=False)
    return drawn


def _panel(axes: Any, report: SimulationReport) -> None:
    shown = report.accounts[:WORKERS_SHOWN]
    rank = {account.worker: at for at, account in enumerate(shown)}
    bars: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for span in report.spans:
        if span.worker in rank:
            bar = (float(span.begin), float(span.end - span.begin))
            bars.setdefault((span.kind, rank[span.worker]), []).append(bar)
    for (kind, at), of_one in bars.items():
        # A light edge keeps one batch apart from the next.
        edge = "none" if kind == "waiting" or len(of_one) > 200 else "white"
        axes.broken_barh(
            of_one, (at - 0.4, 0.8), facecolor=COLOURS[kind], edgecolor=edge, linewidth=1.4
        )
    dense = len(report.update_times) > 150
    for time in report.update_times:
        axes.axvline(float(time), color="black", linewidth=0.3 if dense else 0.9, zorder=3)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(0, float(report.time) * 1.005)
    axes.set_yticks(range(len(shown)), [f"worker {account.worker}" for account in shown])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    hidden = len(report.accounts) - len(shown)
    title = (
        f"{report.policy}: {_count(len(report.update_times), 'update')}, "
        f"busy {percent(report.busy_share)}, useful {percent(report.useful_share)}, "
        f"mean staleness {float(report.staleness_mean):.2f}"
    )
    axes.set_title(
        title + (f" (first {len(shown)} of {len(shown) + hidden} workers)" if hidden else ""),
        loc="left",
        fontsize=10,
    )


def _legend(reports: Sequence[SimulationReport]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    seen = {span.kind for report in reports for span in report.spans}
    patches = [
        Patch(facecolor=COLOURS[kind], label=NAMES[kind]) for kind in COLOURS if kind in seen
    ]
    # A short upright stroke, as in the panels.
    stroke = Line2D(
        [], [], color="black", marker="|", linestyle="none", markersize=11, label="update"
    )
    return [*patches, stroke]
