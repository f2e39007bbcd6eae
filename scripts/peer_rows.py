"""What `scripts/bench_peers` makes of its runs: rows, ratios, tables and a picture. Measures
nothing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_runs import Run
from peer_places import PEERS
from peers.task import sizes

BASELINE = "gloo"
Row = dict[str, Any]
LARGE = ("one100", "resnet50")


def row(peer: str, tensors: str, workers: int, servers: int, runs: Sequence[Run]) -> Row:
    """Return a row of the table: a round takes as long as its slowest worker.

    `cpu_s_per_gb` is of all processes, for each GB of gradients of all workers: the median run's.
    `noise`: cores that other work used, in the worst run.
    """
    took_ms = [
        max(of_round)
        for run in runs
        for of_round in zip(*(one["ms"] for one in run.told), strict=True)
    ]
    gigabytes = 4e-9 * sum(sizes(tensors)) * workers * len(runs[0].told[0]["ms"])
    cpu_s = statistics.median(sum(one["cpu_s"] for one in run.told) for run in runs)
    known = PEERS[peer]
    return {
        "system": known.known_as(peer),
        "transport": known.transport,
        "set": tensors,
        "workers": workers,
        "servers": servers if known.servers else 0,
        "median_ms": round(statistics.median(took_ms), 3),
        "min_ms": round(min(took_ms), 3),
        "max_ms": round(max(took_ms), 3),
        "cpu_s_per_gb": round(cpu_s / gigabytes, 3),
        "runs": len(runs),
        "noise": round(max(run.noise for run in runs), 2),
        "quiet": all(run.quiet for run in runs),
        "version": runs[0].told[0].get("version", ""),
    }


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with `to_gloo`, each one's median to that of gloo's flat all-reduce."""
    base = {
        (one["set"], one["workers"]): one["median_ms"] for one in rows if one["system"] == BASELINE
    }
    found = []
    for one in rows:
        gloo = base.get((one["set"], one["workers"]))
        found.append(one | {"to_gloo": round(one["median_ms"] / gloo, 3) if gloo else None})
    return found


@dataclass(frozen=True)
class Target:
    """A ratio that zkv wants to stay below, between medians of one table."""

    transport: str
    against: str
    """A system, or a transport of zkv's own."""
    sets: tuple[str, ...]
    workers: int
    most: float


TARGETS = (
    Target("arena", "gloo", LARGE, 2, 0.30),
    Target("arena", "gloo", LARGE, 4, 0.22),
    Target("memory", "gloo", LARGE, 2, 0.65),
    Target("memory", "gloo", LARGE, 4, 0.50),
    Target("memory", "mxnet", LARGE, 2, 0.20),
    Target("memory", "mxnet", LARGE, 4, 0.20),
    Target("memory", "mpi", LARGE, 2, 1.1),
    Target("tcp", "sockets", ("resnet50",), 2, 1.35),
    Target("tcp", "gloo-buckets", ("resnet50",), 2, 1.33),
    Target("tcp", "mxnet", ("resnet50",), 2, 0.60),
    Target("tcp", "ray", ("resnet50",), 2, 0.50),
    Target("tcp", "gloo-buckets", ("tiny1000",), 2, 0.35),
    Target("tcp", "mxnet", ("tiny1000",), 2, 0.02),
    Target("tcp", "ray", ("tiny1000",), 2, 0.08),
    Target("broker", "tcp", ("resnet50",), 2, 2.2),
)
CPU_TARGETS = {"tcp": 0.60, "memory": 0.20, "arena": 0.07}
"""CPU seconds per GB of ResNet-50's gradients, 2 workers and 1 server."""


def targets(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each target that these rows can be held against (those of one server):
    `what`, `set`, `workers`, `ratio`, `most`, `met`."""
    medians: dict[tuple[str, str, int], float] = {}
    found: list[Row] = []
    for one in rows:
        if one["servers"] <= 1:
            names = [one["system"]] if one["system"] != "zkv" else [f"zkv {one['transport']}"]
            for name in names:
                medians[name, one["set"], one["workers"]] = one["median_ms"]
    for target in TARGETS:
        own = target.against in ("tcp", "memory")
        against = f"zkv {target.against}" if own else target.against
        for tensors in target.sets:
            mine = medians.get((f"zkv {target.transport}", tensors, target.workers))
            other = medians.get((against, tensors, target.workers))
            if mine is not None and other is not None:
                what = f"zkv {target.transport} / {against}"
                found.append(_held(what, tensors, target.workers, mine / other, target.most))
    for one in rows:
        at = (one["system"], one["set"], one["workers"], one["servers"])
        most = CPU_TARGETS.get(one["transport"])
        if at == ("zkv", "resnet50", 2, 1) and most is not None:
            what = f"zkv {one['transport']}, CPU s/GB"
            found.append(_held(what, "resnet50", 2, one["cpu_s_per_gb"], most))
    return found


def _held(what: str, tensors: str, workers: int, ratio: float, most: float) -> Row:
    return {
        "what": what,
        "set": tensors,
        "workers": workers,
        "ratio": round(ratio, 3),
        "most": most,
        "met": ratio <= most,
    }


def markdown(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Return rows as a table; `columns`: a field's name to its heading."""
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    for one in rows:
        lines.append("| " + " | ".join(cell(one.get(name)) for name in columns) + " |")
    return "\n".join(lines)


def cell(value: Any) -> str:
    """Return a value as a table shows it: numbers with three places that count."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


PLAIN = {
    "system": "system",
    "transport": "transport",
    "servers": "servers",
    "median_ms": "median, ms",
    "min_ms": "min",
    "max_ms": "max",
    "cpu_s_per_gb": "CPU s/GB",
    "to_gloo": "to gloo",
    "noise": "noise",
}
HELD = {
    "what": "ratio",
    "set": "set",
    "workers": "workers",
    "ratio": "measured",
    "most": "wanted at most",
    "met": "met",
}


def tables(rows: Sequence[Row]) -> str:
    """Return a table in Markdown for each set and number of workers, and one of the ratios."""
    parts = []
    for tensors, workers in dict.fromkeys((one["set"], one["workers"]) for one in rows):
        some = [one for one in rows if (one["set"], one["workers"]) == (tensors, workers)]
        some.sort(key=lambda one: one["median_ms"])
        count = f"{workers} worker{'s' if workers > 1 else ''}"
        parts.append(f"**{tensors}, {count}**\n\n{markdown(some, PLAIN)}")
    held = targets(rows)
    if held:
        parts.append(f"**Ratios of medians, one server**\n\n{markdown(held, HELD)}")
    return "\n\n".join(parts)


def plotted(rows: Sequence[Row], file: Path) -> None:
    """Draw a bar for each system, a panel for each set and number of workers, and save it."""
    from matplotlib.figure import Figure

    sets = list(dict.fromkeys(one["set"] for one in rows))
    counts = list(dict.fromkeys(one["workers"] for one in rows))
    most = max(
        sum((one["set"], one["workers"]) == (name, count) for one in rows)
        for name in sets
        for count in counts
    )
    size = (4.6 * len(counts) + 1, (0.24 * most + 1.1) * len(sets) + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(sets), len(counts), squeeze=False)
    for line, tensors in zip(panels, sets, strict=True):
        for axes, workers in zip(line, counts, strict=True):
            some = [one for one in rows if (one["set"], one["workers"]) == (tensors, workers)]
            some.sort(key=lambda one: -one["median_ms"])
            _bars(axes, some)
            axes.set_title(f"{tensors}, {workers} worker{'s' if workers > 1 else ''}", fontsize=10)
    figure.supxlabel("milliseconds of a round: median, with shortest and longest", fontsize=9)
    figure.savefig(file, dpi=90)


def _bars(axes: Any, some: Sequence[Row]) -> None:
    names = []
    for one in some:
        name = one["system"] if one["system"] != "zkv" else f"zkv {one['transport']}"
        names.append(f"{name}, {one['servers']} servers" if one["servers"] > 1 else name)
    medians = [one["median_ms"] for one in some]
    low = [one["median_ms"] - one["min_ms"] for one in some]
    high = [one["max_ms"] - one["median_ms"] for one in some]
    colors = ["C0" if one["system"] == "zkv" else "0.7" for one in some]
    axes.barh(names, medians, color=colors, xerr=(low, high), ecolor="0.35", capsize=2)
    axes.set_xscale("log")
    axes.grid(axis="x", alpha=0.3, which="both")
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_formatter("{x:g}")
    if some:
        axes.set_xlim(0.5 * min(one["min_ms"] for one in some), None)
