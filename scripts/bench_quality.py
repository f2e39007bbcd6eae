"""What codecs do to training (`scripts/bench_quality --help`).

A task gives gradients, a worker's encoder and the wire's payload carry them, zkv's own sum and
update rule apply them (`virtual_training`). So only a codec differs between two rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training_tasks import Digits, Text
from virtual_training import MBIT, Costs, Link, Training
from zkv.optimizer_spec import optimizer
from zkv_codecs.plan import plan

CODECS = (
    "none",
    "fp16",
    "int8",
    "topk:0.01+ef",
    "onebit+ef",
    "ternary",
    "powersgd:4+ef",
    "auto",
)
POINTS = 0.5
"""Of accuracy that a codec may lose on the digits: the mean of all seeds, against dense."""
LOSS_SHARE = 0.02
"""Of the loss on the text that one of KEPT may add, the same way."""
KEPT = ("int8", "onebit+ef", "topk:0.01+ef")
LOOKS = 20
"""At the loss in one run."""
TASKS: dict[str, tuple[Any, int]] = {"digits": (Digits, 5), "text": (Text, 3)}


def trained(
    task: Any, text: str, steps: int, link: Link, costs: Costs, rule: str
) -> dict[str, Any]:
    """Train once; return the loss over bytes and seconds, and what it ended with."""
    run = Training(task, text, [link] * task.workers, costs, rule=rule)
    every = max(1, steps // LOOKS)
    curve = [(0, 0, 0.0, task.loss(run.params))]
    while run.steps < steps:
        run.step()
        if run.steps % every == 0 or run.steps == steps:
            curve.append((run.steps, run.bytes_up, run.now_s, task.loss(run.params)))
    return {
        "loss": curve[-1][3],
        "accuracy": task.accuracy(run.params),
        "bytes": run.bytes_up,
        "seconds": run.now_s,
        "curve": curve,
        "codecs": dict(Counter(run.codecs[-1].values())),
    }


def measure(
    name: str, codecs: Sequence[str], seeds: int, steps: int | None, link: Link, rule: str
) -> list[dict[str, Any]]:
    """Train one task with each codec and seed; return a row for each codec."""
    make, usual = TASKS[name]
    rows: list[dict[str, Any]] = []
    costs = Costs()
    for text in codecs:
        count = steps or make.steps
        began = time.perf_counter()
        runs = [
            trained(make(seed), text, count, link, costs, rule) for seed in range(seeds or usual)
        ]
        accuracies = [run["accuracy"] for run in runs if run["accuracy"] is not None]
        row = {
            "task": name,
            "codec": text,
            "loss": statistics.fmean(run["loss"] for run in runs),
            "losses": [run["loss"] for run in runs],
            "accuracy": statistics.fmean(accuracies) if accuracies else None,
            "accuracies": accuracies,
            "bytes_per_update": statistics.fmean(run["bytes"] for run in runs) / count,
            "seconds": statistics.fmean(run["seconds"] for run in runs),
            "wall_s": (time.perf_counter() - began) / len(runs),
            "curve": runs[0]["curve"],
            "codecs": runs[0]["codecs"],
        }
        rows.append(row)
        accuracy = "       " if row["accuracy"] is None else f"{row['accuracy']:6.2f}%"
        print(
            f"{name:7} {text:16} {row['loss']:9.4f} {accuracy} "
            f"{row['bytes_per_update'] / 1e3:10.1f} kB {row['seconds']:9.2f} s "
            f"{row['wall_s']:7.1f} s",
            file=sys.stderr,
            flush=True,
        )
    return rows


def targets(rows: Sequence[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Return a line for each target that these rows can be held against, and whether it is met."""
    found = []
    for row in rows:
        dense = next((r for r in rows if (r["task"], r["codec"]) == (row["task"], "none")), None)
        if dense is None or row is dense:
            continue
        if row["accuracy"] is not None:
            more, limit, unit = row["accuracy"] - dense["accuracy"], POINTS, "points"
            met, bound = more >= -POINTS, f"{POINTS:g} allowed"
        else:
            more, limit, unit = 100 * (row["loss"] / dense["loss"] - 1), 100 * LOSS_SHARE, "%"
            met, bound = more <= limit, f"{limit:g} allowed"
            if row["codec"] not in KEPT:
                met, bound = True, "no target"
        verdict = "ok" if met else "MISSED"
        if bound == "no target":
            verdict = "reported"
        line = f"{row['task']} {row['codec']}: {more:+.2f} {unit} of dense, {bound}: {verdict}"
        found.append((line, met))
    return found


def plotted(rows: Sequence[dict[str, Any]], file: Path, mbit: float) -> None:
    """Draw each task's loss (of the first seed) against bytes and seconds, a line per codec."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(11, 4.2 * len(tasks)), layout="constrained")
    both = figure.subplots(len(tasks), 2, squeeze=False)
    for pair, task in zip(both, tasks, strict=True):
        mine = [row for row in rows if row["task"] == task]
        for at, row in enumerate(mine):
            _, sent, seconds, losses = zip(*row["curve"][1:], strict=True)
            style = {
                "label": row["codec"],
                "color": f"C{at}",
                "linewidth": 2.2 if row["codec"] in ("none", "auto") else 1.3,
                "linestyle": "--" if row["codec"] == "auto" else "-",
            }
            pair[0].plot([one / 1e6 for one in sent], losses, **style)
            pair[1].plot(seconds, losses, **style)
        # What an untrained model loses would leave no room for how the rest differ.
        losses = mine[0]["curve"]
        top = 1.05 * losses[min(3, len(losses) - 1)][3]
        low = 0.97 * min(look[3] for row in mine for look in row["curve"])
        pair[0].set(xscale="log", xlabel="MB up, all workers", title=f"{task}: bytes")
        pair[1].set(xlabel=f"seconds at {mbit:g} Mbit/s (virtual)", title=f"{task}: time")
        for axes in pair:
            axes.set(ylabel="test loss, nats", yscale="log", ylim=(low, max(top, 1.01 * low)))
            axes.grid(alpha=0.3, which="both")
            axes.yaxis.set_minor_formatter("{x:g}")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.tick_params(which="minor", labelsize=7)
        pair[1].legend(fontsize=8)
    figure.savefig(file, dpi=80)


def main() -> None:
    """Measure what was asked for, and print it."""
    parser = argparse.ArgumentParser(prog="scripts/bench_quality")
    parser.add_argument("--task", action="append", choices=list(TASKS))
    parser.add_argument("--codec", action="append")
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rule", default="")
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    try:
        for text in asked.codec or CODECS:
            plan(text)
        optimizer(asked.rule or "sgd")
    except ValueError as error:
        parser.error(str(error))
    if asked.mbit <= 0:
        parser.error(f"--mbit {asked.mbit:g}: a link carries more than 0 Mbit/s")
    print(
        "task    codec                 loss accuracy  bytes/update    virtual     run",
        file=sys.stderr,
    )
    rows = [
        row
        for name in asked.task or TASKS
        for row in measure(
            name,
            asked.codec or CODECS,
            asked.seeds,
            asked.steps,
            Link(asked.mbit * MBIT),
            asked.rule,
        )
    ]
    if asked.plot:
        plotted(rows, asked.plot, asked.mbit)
    if asked.json:
        print(json.dumps(rows))
    found = targets(rows)
    for line, _ in found:
        print(line, file=sys.stderr if asked.json else sys.stdout)
    sys.exit(0 if all(met for _, met in found) else 1)


if __name__ == "__main__":
    main()
