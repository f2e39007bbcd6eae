"""Spans of several processes, on the broker's clock, as events of Chrome's trace format.

The format is that of "Trace Event Format" (Google, 2016), as chrome://tracing and Perfetto read it:
"X" is a span, "i" an instant, "M" a name, "s" and "f" the two ends of an arrow, all times in
microseconds. Perfetto wants spans of one track not to overlap in part, track numbers that no two
processes share, and an arrow's ends within spans. Pure: no file and no clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zkv.alignment import Alignment
from zkv.span_split import split
from zkv.spans import APART, TRACKS, Span, lanes

ROLES = ("broker", "server", "worker", "observer")
"""From top to bottom."""


@dataclass(frozen=True, slots=True)
class Process:
    """What one process has left. `alignment` leads from its clock to the broker's; None: unknown.

    `pid` is the operating system's; `dropped` spans had to make room for newer ones.
    """

    role: str
    number: int
    name: str
    host: str
    pid: int
    spans: Sequence[Span]
    alignment: Alignment | None
    dropped: int = 0
    incarnation: int = 0

    @property
    def label(self) -> str:
        """What it is called: `worker 0`."""
        return self.role if self.role == "broker" else f"{self.role} {self.number}"

    def at_ns(self, seconds: float) -> int:
        """Return a time of its own clock as the broker's, in whole nanoseconds."""
        offset_s = 0.0 if self.alignment is None else self.alignment.offset_s
        # Each by itself: their sum may have more digits than a float.
        return round(seconds * 1e9) + round(offset_s * 1e9)


@dataclass(slots=True)
class _Document:
    """Events so far. An arrow's ends are kept by its name, until both are known."""

    origin_ns: int
    workers: Mapping[int, int]
    names: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    outs: dict[str, dict[str, Any]] = field(default_factory=dict)
    intos: dict[str, dict[str, Any]] = field(default_factory=dict)
    tid: int = 0

    def add(self, pid: int, process: Process) -> None:
        """Add a process's names and spans."""
        name = f"{process.label} ({process.name}, pid {process.pid})"
        self._name(pid, None, "process_name", name=name)
        self._name(pid, None, "process_sort_index", sort_index=pid)
        by_track: dict[str, list[Span]] = defaultdict(list)
        for span in process.spans:
            by_track[span.track].append(span)
        for track in sorted(by_track, key=_place):
            self._track(pid, process, track, by_track[track])

    def _name(self, pid: int, tid: int | None, kind: str, **arguments: Any) -> None:
        whose: dict[str, Any] = {"pid": pid} if tid is None else {"pid": pid, "tid": tid}
        self.names.append({"ph": "M", "name": kind, **whose, "args": arguments})

    def _track(self, pid: int, process: Process, track: str, spans: Sequence[Span]) -> None:
        times = [_times(process, span) for span in spans]
        found = lanes(times, nested=track not in APART)
        first = self.tid + 1
        self.tid += max(found) + 1
        for lane in range(max(found) + 1):
            name = track if lane == 0 else f"{track} {lane + 1}"
            self._name(pid, first + lane, "thread_name", name=name)
            self._name(pid, first + lane, "thread_sort_index", sort_index=first + lane)
        for span, (start, end), lane in zip(spans, times, found, strict=True):
            self._event(pid, first + lane, span, start - self.origin_ns, end - self.origin_ns)

    def _event(self, pid: int, tid: int, span: Span, start: int, end: int) -> None:
        arguments = dict(span.about)
        if arguments.get("incarnation") in self.workers:
            arguments["worker"] = self.workers[arguments.pop("incarnation")]
        where = {"pid": pid, "tid": tid, "ts": start / 1000}
        shape = {"ph": "i", "s": "t"} if span.end_s is None else {"ph": "X"}
        event = {**shape, "name": span.name, "cat": span.track, **where, "args": arguments}
        if span.end_s is not None:
            event["dur"] = (end - start) / 1000
        self.events.append(event)
        self.outs |= dict.fromkeys(span.out, where)
        self.intos |= dict.fromkeys(span.into, where)

    def arrows(self) -> Iterator[dict[str, Any]]:
        """Yield the ends of each arrow of which both are known."""
        both = [name for name in self.outs if name in self.intos]
        for number, name in enumerate(both, 1):
            same = {"name": "push", "cat": "push", "id": number}
            yield {"ph": "s", **same, **self.outs[name]}
            yield {"ph": "f", "bp": "e", **same, **self.intos[name]}


def document(processes: Sequence[Process], missing: Sequence[str] = ()) -> dict[str, Any]:
    """Return the trace as plain data for JSON: names first, then all else in the order of time.

    `missing` says in words what is not in it. The earliest event is at 0.
    """
    ordered = sorted(processes, key=lambda one: (ROLES.index(one.role), one.number, one.pid))
    starts = [process.at_ns(span.start_s) for process in ordered for span in process.spans]
    workers = {one.incarnation: one.number for one in ordered if one.incarnation}
    made = _Document(min(starts, default=0), workers)
    for pid, process in enumerate(ordered, 1):
        made.add(pid, process)
    # Of two that begin together the longer one holds the other, and an arrow ends in what is open.
    made.events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    events = [*made.events, *made.arrows()]
    events.sort(key=lambda event: event["ts"])
    return {
        "traceEvents": made.names + events,
        "displayTimeUnit": "ms",
        "otherData": {
            "clock": "the broker's; 0 is the earliest event",
            "origin_s": made.origin_ns / 1e9,
            "processes": [_about(pid, process) for pid, process in enumerate(ordered, 1)],
            "missing": list(missing),
        },
    }


def _about(pid: int, process: Process) -> dict[str, Any]:
    known = process.alignment
    return {
        "pid": pid,
        "process": process.label,
        "name": process.name,
        "host": process.host,
        "os_pid": process.pid,
        "spans": len(process.spans),
        "dropped": process.dropped,
        "clock_offset_s": None if known is None else known.offset_s,
        "clock_error_s": None if known is None else known.error_s,
        "round_trips": 0 if known is None else known.round_trips,
        "time": split(process.spans).to_plain() if process.role == "worker" else None,
    }


def _times(process: Process, span: Span) -> tuple[int, int]:
    start = process.at_ns(span.start_s)
    return start, start if span.end_s is None else max(start, process.at_ns(span.end_s))


def _place(track: str) -> tuple[int, str]:
    return (TRACKS.index(track) if track in TRACKS else len(TRACKS), track)
