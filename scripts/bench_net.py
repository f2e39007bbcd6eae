"""zkv and others on links that are limited (`scripts/bench_net --help`).

Each worker has a machine of its own, a network namespace whose one card is limited both ways;
servers are on machines of their own or on the workers'.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_language
from bench_options import above_zero, positive, set_name, some
from bench_runs import Failed, Run, end_in_order, quiet_run
from machines import ADDRESS, GOODPUT, Machine, NoNamespace, network
from peer_places import PEERS, Missing, interpreter
from peer_rows import markdown
from peers.task import Case, sizes

QUEUE = "burst 128kb latency 20ms"
"""Of each card: enough for a full rate, and no more than a real switch would hold."""
WARM = 2
PROGRAMS = {"zkv": "memory", "gloo": "gloo", "sockets": "sockets"}
"""A system's peer of `scripts/bench_peers`; servers beside a worker share memory with it."""
PLACES = ("own", "workers")
"""Where servers are: on machines of their own, or on the workers'."""
HOSTS = {"own": "own", "workers": "workers'"}
WHAT = ("links", "language")
DEFAULT_SETS = {1000.0: "one100"}
SLOW_SET = "one20"


@dataclass(frozen=True)
class Way:
    """One way to do the task on one network."""

    mbit: float
    tensors: str
    workers: int
    system: str
    servers: int = 0
    place: str = ""

    @property
    def text(self) -> str:
        """Return it in words."""
        servers = f", {self.servers} servers on {HOSTS[self.place]} hosts" if self.servers else ""
        return f"{self.mbit:g} Mbit/s {self.tensors} {self.workers} workers {self.system}{servers}"


def busiest(way: Way) -> float:
    """Return how many times one worker's gradients the busiest card carries, in one direction.

    A ring all-reduce sends 2(N-1)/N of them. With servers on machines of their own a worker sends
    and receives all once, and a server its part from and to each worker. A server on a worker's
    machine spares that worker its part, and adds the others'.
    """
    w, s = way.workers, way.servers
    if not s:
        return 2 * (w - 1) / w
    if way.place == "own":
        return max(1.0, w / s)
    return max(1.0 - 1 / s + (w - 1) / s, 1.0 if s < w else 0.0)


def limit_ms(way: Way) -> float:
    """Return the milliseconds in which a link can carry a round: what TCP leaves of its rate."""
    return 1e3 * 32 * sum(sizes(way.tensors)) * busiest(way) / (way.mbit * 1e6 * GOODPUT)


def ways(asked: argparse.Namespace) -> list[Way]:
    """Return what is to be measured, those next to each other that are compared."""
    found = []
    for mbit in asked.mbit:
        for tensors in asked.sets or [DEFAULT_SETS.get(mbit, SLOW_SET)]:
            for workers in asked.workers:
                for system in asked.peers:
                    if not PEERS[PROGRAMS[system]].servers:
                        found.append(Way(mbit, tensors, workers, system))
                        continue
                    # As many servers as workers: the case in which neither's links are the limit.
                    for place in asked.places:
                        found.append(Way(mbit, tensors, workers, system, workers, place))
    return found


def row(way: Way, runs: Sequence[Run]) -> dict[str, Any]:
    """Return a row: a round takes as long as its slowest worker."""
    took_ms = [max(one) for r in runs for one in zip(*(t["ms"] for t in r.told), strict=True)]
    gigabytes = 4e-9 * sum(sizes(way.tensors)) * way.workers * len(runs[0].told[0]["ms"])
    cpu_s = statistics.median(sum(one["cpu_s"] for one in run.told) for run in runs)
    median = statistics.median(took_ms)
    return {
        "mbit": way.mbit,
        "system": way.system,
        "transport": "tcp",
        "servers_on": way.place or "-",
        "set": way.tensors,
        "workers": way.workers,
        "servers": way.servers,
        "median_ms": round(median, 2),
        "min_ms": round(min(took_ms), 2),
        "max_ms": round(max(took_ms), 2),
        "cpu_s_per_gb": round(cpu_s / gigabytes, 3),
        "limit_ms": round(limit_ms(way), 2),
        "to_limit": round(median / limit_ms(way), 3),
        "runs": len(runs),
        "noise": round(max(run.noise for run in runs), 2),
        "quiet": all(run.quiet for run in runs),
    }


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with `to_gloo`, each one's median to gloo's on the same links."""

    def alike(one: dict[str, Any]) -> tuple[Any, ...]:
        return one["mbit"], one["set"], one["workers"]

    base = {alike(one): one["median_ms"] for one in rows if one["system"] == "gloo"}
    return [
        one
        | {"to_gloo": round(one["median_ms"] / base[alike(one)], 3) if alike(one) in base else None}
        for one in rows
    ]


TARGETS = (
    # Workers, where servers are, the field, and what it is to be at most: 100 MB at 1 Gbit/s.
    (4, "own", "to_limit", 1.20),
    (4, "own", "to_gloo", 0.80),
    (2, "workers", "to_gloo", 1.05),
)


def targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each target that these rows can be held against."""
    found = []
    for workers, place, field, most in TARGETS:
        for one in rows:
            at = (one["system"], one["mbit"], one["set"], one["workers"], one["servers_on"])
            if at == ("zkv", 1000.0, "one100", workers, place) and one[field] is not None:
                found.append(
                    {
                        "what": f"zkv, servers on {HOSTS[place]} hosts, {field.replace('_', ' ')}",
                        "workers": workers,
                        "ratio": one[field],
                        "most": most,
                        "met": one[field] <= most,
                    }
                )
    return found


def hosts(way: Way, places: Sequence[Machine]) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return the machines of workers, and of servers."""
    known = [[ADDRESS.format(at + 1), place.enter] for at, place in enumerate(places)]
    servers = known[way.workers :] if way.place == "own" else known
    return known[: way.workers], servers[: way.servers]


def measure(asked: argparse.Namespace, pythons: dict[str, str]) -> tuple[list[Any], bool]:
    """Let all take turns; return rows, and whether one has failed."""
    runs: dict[Way, list[Run]] = {way: [] for way in ways(asked)}
    failed: set[Way] = set()
    end = time.monotonic() + 60 * asked.minutes
    for turn in range(asked.turns):
        for way in runs:
            if way in failed:
                continue
            if any(runs.values()) and time.monotonic() > end:
                say(f"left out in turn {turn + 1}, as the time is up: {way.text}")
                continue
            count = way.workers + (way.servers if way.place == "own" else 0)
            with network(count, way.mbit, QUEUE, asked.congestion) as places:
                if not any(runs.values()):
                    say(f"links: TCP's congestion control is {places[0].congestion()}")
                name = PROGRAMS[way.system]
                sizes_of = (way.tensors, way.workers, way.servers, asked.rounds, WARM)
                case = Case(name, *sizes_of, *hosts(way, places))
                try:
                    done = quiet_run(
                        case, PEERS[name].program, pythons[way.system], (), asked.again
                    )
                except Failed as error:
                    say(f"{way.text} FAILED: {error}")
                    failed.add(way)
                    continue
            runs[way].append(done)
            last = row(way, [done])
            loud = "" if done.quiet else f", but other work used {done.noise:.2f} cores"
            say(f"turn {turn + 1}: {way.text}: {last['median_ms']:.0f} ms, "
                f"{last['to_limit']:.2f} of the limit{loud}")  # fmt: skip
    return with_ratios([row(way, of) for way, of in runs.items() if of]), bool(failed)


def say(text: str) -> None:
    """Tell the one who waits, who reads the table elsewhere."""
    print(text, file=sys.stderr, flush=True)


COLUMNS = {
    "mbit": "Mbit/s",
    "set": "set",
    "workers": "workers",
    "system": "system",
    "servers_on": "servers on hosts",
    "median_ms": "median, ms",
    "min_ms": "min",
    "max_ms": "max",
    "limit_ms": "limit",
    "to_limit": "to limit",
    "to_gloo": "to gloo",
    "cpu_s_per_gb": "CPU s/GB",
    "noise": "noise",
}
HELD = {"what": "ratio", "workers": "workers", "ratio": "measured", "most": "wanted at most"}


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows, and what they are held against, in Markdown."""
    parts = [markdown(rows, COLUMNS)]
    if held := targets(rows):
        parts.append(markdown(held, {**HELD, "met": "met"}))
    return "\n\n".join(parts)


def plotted(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw rounds beside the limits of their links, a panel for each rate and number of workers."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((one["mbit"], one["set"], one["workers"]) for one in rows))
    figure = Figure(figsize=(4.4 * len(panels), 3.2), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        some_rows = [one for one in rows if (one["mbit"], one["set"], one["workers"]) == panel]
        names = [
            one["system"] + (f",\n{HOSTS[one['servers_on']]} hosts" if one["servers"] else "")
            for one in some_rows
        ]
        colors = ["C0" if one["system"] == "zkv" else "0.7" for one in some_rows]
        axes.barh(names, [one["median_ms"] for one in some_rows], color=colors)
        limits = [one["limit_ms"] for one in some_rows]
        axes.scatter(limits, names, marker="|", s=260, color="C3", zorder=3, label="link's limit")
        axes.invert_yaxis()
        axes.set_title(f"{panel[0]:g} Mbit/s, {panel[1]}, {panel[2]} workers", fontsize=10)
        axes.tick_params(labelsize=8)
        axes.set_xlabel("milliseconds of a round", fontsize=8)
        axes.margins(x=0.15)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside upper right")
    figure.savefig(file, dpi=90)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what is asked for.

    Raises:
        SystemExit: wrong use.
    """
    parser = argparse.ArgumentParser(prog="scripts/bench_net")

    def one_of(names: Sequence[str]) -> Any:
        def taken(text: str) -> str:
            if text not in names:
                raise argparse.ArgumentTypeError(f"{text}: choose of {', '.join(names)}")
            return text

        return some(taken)

    parser.add_argument("--what", type=one_of(WHAT), default=list(WHAT))
    parser.add_argument("--peers", type=one_of(list(PROGRAMS)), default=list(PROGRAMS))
    parser.add_argument("--mbit", type=some(above_zero), default=[100.0, 1000.0])
    parser.add_argument("--sets", type=some(set_name))
    parser.add_argument("--workers", type=some(positive), default=[2, 4])
    parser.add_argument("--places", type=one_of(PLACES), default=list(PLACES))
    parser.add_argument("--rounds", type=positive, default=4)
    parser.add_argument("--turns", type=positive, default=2)
    parser.add_argument("--again", type=int, default=1)
    parser.add_argument("--minutes", type=above_zero, default=8.0)
    parser.add_argument("--congestion")
    parser.add_argument("--steps", type=positive, default=bench_language.STEPS)
    parser.add_argument("--language-mbit", type=above_zero, default=bench_language.MBIT)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-install", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args(arguments)
    if asked.again < 0:
        parser.error("--again is not below 0")
    if asked.quick:
        asked.rounds, asked.turns, asked.again = 2, 1, 0
        asked.sets = asked.sets or [SLOW_SET]
        asked.steps = min(asked.steps, 60)
    return asked


def installed(asked: argparse.Namespace) -> dict[str, str]:
    """Return each system's Python, and name those that are left out."""
    pythons = {}
    for system in asked.peers:
        name = PROGRAMS[system]
        try:
            pythons[system] = interpreter(name, PEERS[name], install=not asked.no_install)
        except Missing as error:
            say(f"left out: {system}: {error}")
    return pythons


def main() -> int:
    """Measure what was asked for, and print it."""
    asked = parsed(sys.argv[1:])
    end_in_order()
    rows: list[dict[str, Any]] = []
    failed = False
    try:
        if "links" in asked.what:
            pythons = installed(asked)
            asked.peers = list(pythons)
            rows, failed = measure(asked, pythons)
        spoken = bench_language.measure(asked) if "language" in asked.what else []
    except NoNamespace as error:
        say(str(error))
        return 2
    if asked.json:
        print(json.dumps([*rows, *spoken]))
    else:
        print(
            "\n\n".join([tables(rows)] * bool(rows) + [bench_language.table(spoken)] * bool(spoken))
        )
    if asked.plot and rows:
        plotted(rows, asked.plot)
    return 1 if failed or any("failed" in one for one in spoken) else 0


if __name__ == "__main__":
    sys.exit(main())
