"""Draws a few batches of a trace of `zkv trace run` (`python scripts/plot_trace.py --help`).

Each track is a row, each span a bar, an arrow leads from a block's send to the sum that it is in.
Perfetto shows the same and much more; this is for pages.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Patch

COLOURS = {
    "wait": "#c9c9c9",
    "compute": "#9ecae1",
    "push": "#3182bd",
    "encode": "#756bb1",
    "send": "#fdae6b",
    "grant": "#fdd0a2",
    "sum": "#31a354",
    "turn": "#de2d26",
    "batch": "#e7e1ef",
}
WORDS = {
    "wait": "wait for a grant, or for values",
    "compute": "compute (block entered to left)",
    "push": "push of a key",
    "encode": "encode a block",
    "send": "send: socket to acknowledgement",
    "grant": "send of a granted block",
    "sum": "sum and update of a commit",
    "turn": "turn of the broker (black: commit)",
    "batch": "batch: granted to settled",
}
DARK = ("push", "encode", "sum", "turn")
LETTER_SHARE = 0.0045
"""What a letter takes of the picture's width: a bar without room for its name has none."""
ROUNDING_US = 1e-6
Event = dict[str, Any]
Place = tuple[int, int]


class Rows:
    """Where spans are drawn: some rows for each track, of them one for each lane and depth."""

    def __init__(self, events: list[Event], seen: list[Event]) -> None:
        process = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        self.labels: list[tuple[str, str, int, int]] = []
        """(process, track, first row, rows), from the top."""
        self.count = 0
        self._first: dict[Place, int] = {}
        self._depth: dict[int, int] = {}
        tracks = defaultdict(list)
        for event in seen:
            if event["ph"] in "Xi":
                tracks[event["pid"], event["tid"]].append(event)
        for event in events:
            place = (event["pid"], event.get("tid", 0))
            if event["name"] == "thread_name" and place in tracks:
                whose, name = process[event["pid"]].split(" (")[0], event["args"]["name"]
                self._add(place, whose, re.sub(r" \d+$", "", name), tracks[place])

    def _add(self, place: Place, whose: str, track: str, spans: list[Event]) -> None:
        open_ends: list[float] = []
        deepest = 0
        for span in spans:
            while open_ends and open_ends[-1] <= span["ts"] + ROUNDING_US:
                open_ends.pop()
            self._depth[id(span)] = 0 if span["ph"] == "i" else len(open_ends)
            open_ends.append(span["ts"] + span.get("dur", 0.0))
            deepest = max(deepest, self._depth[id(span)])
        self._first[place] = self.count
        rows = deepest + 1
        if self.labels and self.labels[-1][:2] == (whose, track):
            _, _, first, before = self.labels.pop()
            self.labels.append((whose, track, first, before + rows))
        else:
            self.labels.append((whose, track, self.count, rows))
        self.count += rows

    def of(self, event: Event) -> int:
        """Return the row of a span, an instant, or an arrow's end."""
        return self._first[event["pid"], event["tid"]] + self._depth.get(id(event), 0)


def window_of(events: list[Event], first: int, batches: int) -> tuple[float, float]:
    """Return the time in which these versions come about: from the sum before to the last one.

    Raises:
        SystemExit: the trace does not have them.
    """
    ends: dict[int, float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X" and event["name"].startswith("sum "):
            version = int(event["name"].split()[1])
            ends[version] = max(ends[version], event["ts"] + event["dur"])
    try:
        return ends.pop(first - 1), ends.pop(first + batches - 1)
    except KeyError as error:
        raise SystemExit(f"the trace has no sum for version {error}") from error


def draw(plain: dict[str, Any], first: int, batches: int, title: str = "") -> Any:
    """Return a figure of the batches that lead to versions `first` … `first + batches - 1`."""
    events = plain["traceEvents"]
    start, stop = window_of(events, first, batches)
    margin = (stop - start) * 0.04
    start, stop = start - margin, stop + margin
    seen = [
        e for e in events
        if e["ph"] in "Xisf" and e["ts"] < stop and e["ts"] + e.get("dur", 0.0) > start
    ]  # fmt: skip
    rows = Rows(events, seen)
    figure, axes = plt.subplots(figsize=(15, 0.235 * rows.count + 1.6), layout="constrained")
    for event in seen:
        if event["ph"] in "Xi":
            bar(axes, event, rows.of(event), start, stop)
    arrows(axes, seen, rows, start)
    for (owner, *_), (after, _, first_row, _) in itertools.pairwise(rows.labels):
        same = owner == after
        axes.axhline(first_row - 0.5, color="#bbbbbb" if same else "#333333", linewidth=0.8)
    middles = [first_row + (count - 1) / 2 for _, _, first_row, count in rows.labels]
    axes.set_yticks(middles, [f"{whose}: {track}" for whose, track, *_ in rows.labels])
    axes.set_ylim(rows.count - 0.5, -0.5)
    axes.set_xlim(0, (stop - start) / 1e3)
    axes.set_xlabel("milliseconds on the broker's clock")
    axes.grid(visible=True, axis="x", alpha=0.3)
    handles = [Patch(facecolor=COLOURS[kind], label=words) for kind, words in WORDS.items()]
    figure.legend(handles=handles, ncols=5, loc="outside lower center", fontsize=9, frameon=False)
    worst = max(one["clock_error_s"] or 0.0 for one in plain["otherData"]["processes"]) * 1e3
    versions = f"versions {first} to {first + batches - 1}"
    axes.set_title(f"{title}{versions}; clocks agree within {worst:.2f} ms", fontsize=11)
    return figure


def bar(axes: Axes, event: Event, row: int, start: float, stop: float) -> None:
    """Draw a span with its name, if that has room, or an instant."""
    kind = event["name"].split()[0]
    if event["ph"] == "i":
        if kind == "commit":
            axes.plot((event["ts"] - start) / 1e3, row, "v", color="black", markersize=5)
        return
    left, width = (event["ts"] - start) / 1e3, event["dur"] / 1e3
    colour = COLOURS.get(kind, "#dddddd")
    axes.barh(row, width, 0.86, left, color=colour, edgecolor="white", linewidth=0.4)
    begin, end = max(event["ts"], start), min(event["ts"] + event["dur"], stop)
    words = event["name"].split()
    for text in (event["name"], words[0] if kind == "wait" else words[min(1, len(words) - 1)]):
        if (end - begin) / (stop - start) > LETTER_SHARE * len(text):
            axes.text(
                ((begin + end) / 2 - start) / 1e3,
                row,
                text,
                ha="center",
                va="center_baseline",
                fontsize=7.5,
                color="white" if kind in DARK else "black",
            )
            break


def arrows(axes: Axes, seen: list[Event], rows: Rows, start: float) -> None:
    """Draw the arrows of which both ends are seen."""
    starts = {event["id"]: event for event in seen if event["ph"] == "s"}
    for event in seen:
        if event["ph"] == "f" and event["id"] in starts:
            ends = [((e["ts"] - start) / 1e3, rows.of(e)) for e in (starts[event["id"]], event)]
            arrow = FancyArrowPatch(
                *ends, arrowstyle="->", mutation_scale=8, linewidth=0.6, color="#7f3b08", alpha=0.6
            )
            axes.add_patch(arrow)


def main() -> None:
    """Draw what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="what `zkv trace run` has written")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    parser.add_argument("--first", type=int, default=40, help="version (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=3, help="how many (default: %(default)s)")
    parser.add_argument("--title", default="", help="what the run was")
    args = parser.parse_args()
    plain = json.loads(args.trace.read_text("utf-8"))
    title = f"{args.title}: " if args.title else ""
    draw(plain, args.first, args.batches, title).savefig(args.picture, dpi=110)


if __name__ == "__main__":
    main()
