"""How zkv's cost grows with keys, workers, sizes and servers, and what a server needs of memory
(`scripts/bench_scale --help`)."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_options import above_zero, positive, some
from bench_runs import Failed, Run, end_in_order, quiet_run
from machines import loopback
from peer_rows import markdown
from peers.task import Case, sizes

LINEAR = 1.1
"""An exponent up to which cost is linear or better: measured ones scatter."""
FITTED = 3
"""Of the largest points: what is the same for all would hide how small ones grow."""


@dataclass(frozen=True)
class Sweep:
    """One number that grows, and the cases of it."""

    points: tuple[int, ...]
    quick: tuple[int, ...]
    program: str
    case: Callable[[int], Case]
    unit: str
    grows: bool = True
    """Cost may grow with it, at most so fast; else it is only shown."""


def _keys(count: int) -> Case:
    return Case("memory", f"tiny{count}", 2, 1, 8 if count < 10_000 else 4, 3)


def _size(kilobytes: int) -> Case:
    return Case("memory", f"kb{kilobytes}", 1, 1, 8 if kilobytes <= 2**17 else 2, 3)


SWEEPS = {
    "keys": Sweep(
        (10, 100, 1000, 10_000, 100_000), (10, 100, 300), "with_zkv.py", _keys, "of 1 KB"
    ),
    "workers": Sweep(
        (1, 2, 4, 8, 16, 32, 64),
        (1, 2, 5),
        "light.py",
        lambda count: Case("light", "tiny4", count, 1, 20, 5),
        "light clients",
    ),
    "size": Sweep(
        (1, 32, 1024, 2**15, 2**17, 2**19, 2**21),
        (1, 32, 256),
        "with_zkv.py",
        _size,
        "KB",
    ),
    "servers": Sweep(
        (1, 2, 4, 8),
        (1, 2),
        "with_zkv.py",
        lambda count: Case("memory", "resnet50", 2, count, 8, 3),
        "servers, ResNet-50",
        grows=False,
    ),
}
STATES = {"sgd:lr=0.1": 0, "momentum:lr=0.1": 1, "adam:lr=0.001": 2}
"""Rules, and how many arrays of the parameters' size each keeps beside them."""
MEMORY = ((1, "sgd:lr=0.1", ""), (2, "sgd:lr=0.1", ""), (4, "sgd:lr=0.1", ""),
          (2, "momentum:lr=0.1", ""), (2, "adam:lr=0.001", ""), (4, "adam:lr=0.001", ""),
          (2, "sgd:lr=0.1", "int8"), (2, "adam:lr=0.001", "int8"))  # fmt: skip
"""Workers, the rule, and the codec down."""
EMPTY = "tiny4"
"""A model that needs hardly any memory: what is left is what a server needs anyway."""
NEEDED = 9
"""Times a tensor's size: what all processes of a run with one worker hold together."""


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """Return b of cost = a * n^b through the largest points, by least squares of logarithms."""
    used = sorted(points)[-FITTED:]
    if len(used) < 2:
        return None
    at = [math.log(n) for n, _ in used]
    of = [math.log(cost) for _, cost in used]
    middle, mean = statistics.fmean(at), statistics.fmean(of)
    across = sum((x - middle) ** 2 for x in at)
    return sum((x - middle) * (y - mean) for x, y in zip(at, of, strict=True)) / across


def available_bytes() -> int:
    """Return what memory is free for new processes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return 0


def swept(name: str, asked: argparse.Namespace, words: Sequence[str]) -> list[dict[str, Any]]:
    """Measure one sweep; points that do not fit here are named and left out. After one that fails
    come no larger ones: it is named in `asked.failed`."""
    sweep = SWEEPS[name]
    rows = []
    for n in asked.points or (sweep.quick if asked.quick else sweep.points):
        case = sweep.case(n)
        needed = NEEDED * 4 * sum(sizes(case.tensors)) * (case.workers if name == "keys" else 1)
        if needed > available_bytes():
            say(f"left out: {name} {n}: it needs {needed / 2**30:.0f} GB of memory")
            continue
        if rows and time.monotonic() > asked.end:
            say(f"left out: {name} {n}: the time is up")
            continue
        try:
            done = quiet_run(case, sweep.program, sys.executable, words, asked.again)
        except Failed as error:
            say(f"{name} {n} FAILED: {error}")
            asked.failed.append(f"{name} {n}")
            break
        rows.append(row(name, n, done))
        say(f"{name} {n}: {rows[-1]['median_ms']:.2f} ms{loud(done)}")
    grown = exponent([(one["n"], one["median_ms"]) for one in rows])
    for one in rows:
        one["exponent"] = None if grown is None else round(grown, 2)
    return rows


def row(name: str, n: int, done: Run) -> dict[str, Any]:
    """Return a row: a round takes as long as its slowest worker."""
    took_ms = [max(one) for one in zip(*(told["ms"] for told in done.told), strict=True)]
    return {
        "sweep": name,
        "n": n,
        "unit": SWEEPS[name].unit,
        "median_ms": round(statistics.median(took_ms), 3),
        "min_ms": round(min(took_ms), 3),
        "max_ms": round(max(took_ms), 3),
        "each_us": round(1e3 * statistics.median(took_ms) / n, 3),
        "noise": round(done.noise, 2),
    }


def remembered(asked: argparse.Namespace, words: Sequence[str]) -> list[dict[str, Any]]:
    """Measure a server's peak memory for some rules, codecs and numbers of workers; one that fails
    is named in `asked.failed`."""
    found = []
    for workers, rule, down in MEMORY[1:2] if asked.quick else MEMORY:
        what = f"memory {rule} {down or 'none'} {workers} workers"
        told = []
        try:
            for tensors in ("one8" if asked.quick else "one100", EMPTY):
                case = Case(f"{rule}|{down}", tensors, workers, 1, 4, 2)
                told += quiet_run(case, "memory.py", sys.executable, words, 0).told[:1]
        except Failed as error:
            say(f"{what} FAILED: {error}")
            asked.failed.append(what)
            continue
        found.append(memory_row(rule, down, workers, *told))
        say(f"{what}: {found[-1]['ratio']:.2f} of the bound")
    return found


def memory_row(
    rule: str, down: str, workers: int, whole: Mapping[str, Any], empty: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a row: a server's peak above that of one with hardly a model, all that it maps of
    others' memory included, against 2 (parameters + state) + contributions in flight + with a
    codec down one residual for each worker."""
    parameters = 1e-6 * whole["model_bytes"]
    state = STATES[rule] * parameters
    flight = workers * parameters
    residuals = flight if down else 0.0
    bound = 2 * (parameters + state) + flight + residuals
    peak, idle = (1024e-6 * one["peak_kb"] for one in (whole, empty))
    return {
        "sweep": "memory",
        "n": workers,
        "rule": rule,
        "codec_down": down or "none",
        "parameters_mb": round(parameters, 1),
        "state_mb": round(state, 1),
        "contributions_mb": round(flight, 1),
        "residuals_mb": round(residuals, 1),
        "bound_mb": round(bound, 1),
        "peak_mb": round(peak - idle, 1),
        "idle_mb": round(idle, 1),
        "shared_mb": round(1024e-6 * whole["shared_kb"], 1),
        "ratio": round((peak - idle) / bound, 3),
    }


def say(text: str) -> None:
    """Tell the one who waits, who reads the table elsewhere."""
    print(text, file=sys.stderr, flush=True)


def loud(done: Run) -> str:
    """Say that other work was at it, if it was."""
    return "" if done.quiet else f", but other work used {done.noise:.2f} cores"


COLUMNS = {
    "n": "n",
    "median_ms": "median, ms",
    "min_ms": "min",
    "max_ms": "max",
    "each_us": "µs for each",
    "noise": "noise",
}
MEMORY_COLUMNS = {
    "n": "workers",
    "rule": "rule",
    "codec_down": "codec down",
    "parameters_mb": "parameters",
    "state_mb": "state",
    "contributions_mb": "contributions",
    "residuals_mb": "residuals",
    "bound_mb": "bound, MB",
    "peak_mb": "measured, MB",
    "ratio": "of the bound",
    "shared_mb": "of it shared",
    "idle_mb": "without a model",
}


def verdict(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what a sweep shows, in words."""
    grown = rows[-1]["exponent"]
    if grown is None:
        return "too few points to fit"
    if not SWEEPS[name].grows:
        return f"cost ~ n^{grown:.2f}"
    return f"cost ~ n^{grown:.2f}: " + (
        "linear or better" if grown <= LINEAR else "MORE THAN LINEAR"
    )


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table in Markdown for each sweep."""
    parts = []
    for name in dict.fromkeys(one["sweep"] for one in rows):
        some_rows = [one for one in rows if one["sweep"] == name]
        if name == "memory":
            parts.append(f"**memory of a server**\n\n{markdown(some_rows, MEMORY_COLUMNS)}")
        else:
            head = f"**{name} ({some_rows[0]['unit']})**: {verdict(name, some_rows)}"
            parts.append(f"{head}\n\n{markdown(some_rows, COLUMNS)}")
    return "\n\n".join(parts)


def plotted(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw each sweep's cost on logarithmic scales, with a line of linear growth, and save it."""
    from matplotlib.figure import Figure

    names = [name for name in SWEEPS if any(one["sweep"] == name for one in rows)]
    figure = Figure(figsize=(3.6 * len(names), 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        mine = [one for one in rows if one["sweep"] == name]
        n, cost = [one["n"] for one in mine], [one["median_ms"] for one in mine]
        low = [one["median_ms"] - one["min_ms"] for one in mine]
        high = [one["max_ms"] - one["median_ms"] for one in mine]
        axes.errorbar(n, cost, yerr=(low, high), marker="o", capsize=2)
        if SWEEPS[name].grows:
            line = [cost[-1] * one / n[-1] for one in n]
            axes.plot(n, line, color="0.6", linestyle="--", label="linear")
            axes.legend(fontsize=8)
        axes.set(xscale="log", yscale="log", ylim=(0.5 * min(cost), 2 * max(cost)))
        axes.set_title(verdict(name, mine), fontsize=8)
        axes.set_xlabel(f"{name} ({mine[0]['unit']})", fontsize=9)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("milliseconds of a round")
    figure.savefig(file, dpi=90)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what is asked for.

    Raises:
        SystemExit: wrong use.
    """
    parser = argparse.ArgumentParser(prog="scripts/bench_scale")
    known = [*SWEEPS, "memory"]

    def sweep(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text} is no sweep: choose of {', '.join(known)}")
        return text

    parser.add_argument("--sweeps", type=some(sweep), default=known)
    parser.add_argument("--again", type=int, default=1)
    parser.add_argument("--minutes", type=above_zero, default=10.0)
    parser.add_argument("--points", type=some(positive))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args(arguments)
    if asked.again < 0:
        parser.error("--again is not below 0")
    if asked.points and (len(asked.sweeps) != 1 or asked.sweeps == ["memory"]):
        parser.error("--points are those of one sweep: name it, as in --sweeps keys")
    if asked.quick:
        asked.again = 0
    asked.failed = []
    asked.end = time.monotonic() + 60 * asked.minutes
    return asked


def main() -> int:
    """Measure what was asked for, and print it."""
    asked = parsed(sys.argv[1:])
    end_in_order()
    rows: list[dict[str, Any]] = []
    with loopback() as (words, where):
        say(f"all run in {where}")
        for name in asked.sweeps:
            rows += remembered(asked, words) if name == "memory" else swept(name, asked, words)
    print(json.dumps(rows) if asked.json else tables(rows))
    if asked.plot and any(one["sweep"] != "memory" for one in rows):
        plotted(rows, asked.plot)
    return 1 if asked.failed else 0


if __name__ == "__main__":
    sys.exit(main())
