"""The end of `zkv trace run`: what each process has left becomes one file, and is told in words."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from zkv.alignment import Alignment
from zkv.errors import ConfigError
from zkv.spans import Span
from zkv_cli import time_report
from zkv_cli.exits import say
from zkv_cli.trace_events import Process, document
from zkv_net.tracing import FORMAT


class _Head(msgspec.Struct, frozen=True):
    """The first line of a process's file."""

    format: str
    role: str
    number: int
    name: str
    host: str
    pid: int
    dropped: int
    alignment: Alignment | None
    incarnation: int = 0


_head = msgspec.json.Decoder(_Head)
_span = msgspec.json.Decoder(Span)


def check_writable(path: Path) -> None:
    """Find out before a run whether its trace can be written.

    Raises:
        ConfigError: the folder does not exist, or takes no files.
    """
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder; name a file in it")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--output {path}: there is no folder {path.parent} that can be written")


def finish(
    folder: Path, output: Path, ranks: Iterable[int], servers: int, *, silent: bool = False
) -> None:
    """Put the files of a folder together, and say what came of it; nothing, if there are none.

    `servers`: how many were started, together with a broker; 0: those of the run were not.
    `silent`: standard output is kept for something else.
    """
    processes, troubles = read(folder)
    if not processes:
        say("zkv trace run: nobody has left any spans, so there is no trace", error=True)
        return
    missing = [*troubles, *absent(processes, ranks, servers)]
    plain = document(processes, missing)
    _write(output, plain)
    for line in words(output, plain):
        say(line, error=silent)


def _write(output: Path, plain: dict[str, Any]) -> None:
    """Write the file; it is complete or not there."""
    with tempfile.NamedTemporaryFile(dir=output.parent, delete=False) as part:
        try:
            part.write(msgspec.json.encode(plain))
            part.close()
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(part.name, 0o666 & ~umask)
            os.replace(part.name, output)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part.name)
            raise


def read(folder: Path) -> tuple[list[Process], list[str]]:
    """Return what the processes have left in a folder, and what cannot be read of it."""
    found, troubles = [], []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            first, *lines = path.read_bytes().splitlines()
            head = _head.decode(first)
            if head.format != FORMAT:
                raise ValueError(f"its format is {head.format!r}, not {FORMAT!r}")
            spans = [_span.decode(line) for line in lines]
        except (OSError, ValueError, RecursionError) as error:
            troubles.append(f"{path.name} cannot be read: {error}")
            continue
        about = msgspec.structs.asdict(head)
        del about["format"]
        found.append(Process(spans=spans, **about))
    return found, troubles


def absent(processes: Sequence[Process], ranks: Iterable[int], servers: int) -> list[str]:
    """Return what is not in a trace: processes that left nothing, and spans that were dropped."""
    here = {(one.role, one.number) for one in processes}
    wanted = [("worker", rank) for rank in ranks]
    wanted += [("server", number) for number in range(servers)]
    if servers:
        wanted.append(("broker", 0))
    gone = [
        f"{role} {number}: it was killed, or never connected, so its spans are missing"
        for role, number in wanted
        if (role, number) not in here
    ]
    if not servers:
        gone.append("the broker and its servers: they were not started here")
    dropped = [
        f"{one.label}: its first {one.dropped:,} spans were dropped to make room for later ones"
        for one in processes
        if one.dropped
    ]
    adrift = [
        f"{one.label}: no round trip to the broker was completed, so its clock is not aligned"
        for one in processes
        if one.alignment is None
    ]
    return gone + dropped + adrift


def words(output: Path, plain: dict[str, Any]) -> list[str]:
    """Return what a person is told of a trace."""
    about = plain["otherData"]
    events = sum(event["ph"] != "M" for event in plain["traceEvents"])
    arrows = sum(event["ph"] == "s" for event in plain["traceEvents"])
    lines = [
        f"zkv trace run: {output} has {events:,} events of {len(about['processes'])} processes, "
        f"{arrows:,} pushes with an arrow to their sum",
        "clocks, beside the broker's:",
    ]
    for one in about["processes"]:
        if one["process"] == "broker":
            continue
        if one["clock_error_s"] is None:
            lines.append(f"  {one['process']}: not aligned")
            continue
        lines.append(
            f"  {one['process']}: {one['clock_offset_s'] * 1e3:+.3f} ms, give or take "
            f"{one['clock_error_s'] * 1e3:.3f} ms (the shortest of {one['round_trips']} round "
            "trips)"
        )
    lines += time_report.lines((one["process"], one["time"]) for one in about["processes"])
    lines += [f"missing: {text}" for text in about["missing"]]
    return [
        *lines,
        f"open it: drop {output} on https://ui.perfetto.dev, or load it in chrome://tracing",
    ]
