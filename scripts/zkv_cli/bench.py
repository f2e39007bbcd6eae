"""`zkv bench`: measures on this machine how blocks, I/O threads and socket buffers are best set."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zkv_cli.exits import CommandFailed, reporting, say

if TYPE_CHECKING:
    from zkv_cli.bench_choice import Samples, Turn, Variant
    from zkv_cli.bench_turns import Turns

BYTES_LEAST, BYTES_MOST = 512 * 1024, 16 * 2**30
FULL = {"passes": 5, "rounds": 8, "seconds": 300.0}
QUICK = {"passes": 4, "rounds": 3, "seconds": 120.0}
BUSY = 0.5
"""Load by others for each core, from which on it is worth a word."""


def bench(
    size_text: Annotated[
        str, typer.Option("--bytes", help="The model's size, such as 100MB or 512KiB.")
    ] = "100MB",
    workers: Annotated[int, typer.Option(min=1, max=64, help="How many workers push.")] = 2,
    servers: Annotated[int, typer.Option(min=1, max=64, help="How many servers sum.")] = 1,
    passes: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Turns of each variant (default: 5).")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Rounds of a turn (default: 8).")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, max=86_400, help="No longer than that, in seconds (default: 300)."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="4 passes of 3 rounds, and 120 seconds at most.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure blocks, I/O threads and socket buffers on this machine, and say what to set.

    A round is a push, the sum over all workers, an update and a pull, under BSP. Variants take
    turns, each with a broker, servers and workers of its own on loopback, first with payloads
    through memory and then through sockets. It takes no more than --seconds, and then what
    processes need to end: a pass that is not whole by then does not count.
    """
    usual = QUICK if quick else FULL
    given = {"passes": passes, "rounds": rounds, "seconds": seconds}
    asked: dict[str, Any] = usual | {name: one for name, one in given.items() if one is not None}
    with reporting("bench"):
        total = _size(size_text)
        told = measured(total, workers, servers, **asked)
        if as_json:
            say(json.dumps(told, ensure_ascii=False))
        else:
            _tell(told)


def _size(text: str) -> int:
    from zkv.errors import ConfigError
    from zkv.sizes import exact, size
    from zkv_cli.units import option

    total = option("--bytes", size, text)
    if not BYTES_LEAST <= total <= BYTES_MOST:
        raise ConfigError(
            f"--bytes: a model of {total} bytes: from {exact(BYTES_LEAST)} to {exact(BYTES_MOST)}"
        )
    return total // 4 * 4


def measured(
    total: int, workers: int, servers: int, *, passes: int, rounds: int, seconds: float
) -> dict[str, Any]:
    """Return all that was found, as plain data.

    Raises:
        CommandFailed: a process has failed, a sum is wrong, a signal came, or the time was not
            enough for one pass.
    """
    from zkv_cli import bench_choice as choice
    from zkv_cli import bench_report as report
    from zkv_cli.bench_turns import Size, Turns

    machine = _machine()
    left_out: list[str] = []
    turns = Turns(Size(total // 4, workers, servers, rounds), time.monotonic() + seconds)
    variants = choice.variants(total, buffers=_buffers(choice.BUFFERS, left_out))
    with _Progress() as progress:
        first = _part(turns, variants, passes, progress, left_out)
        if not first or not all(first.values()):
            raise CommandFailed(
                f"not one pass of {len(variants)} turns was done within {seconds:g} s: try "
                "--bytes 10MB, --rounds 2 or a larger --seconds"
            )
        gigabytes = total * workers / 1e9
        figures = choice.figures(first, gigabytes)
        more = choice.together(figures)
        second: Samples = _part(turns, more, passes, progress, left_out) if more else {}
    if any(len(some) < choice.PASSES_LEAST for some in second.values()):
        left_out.append("no time was left to try what is quicker alone together")
        second = {}
    chosen = choice.choices(first, second, gigabytes)
    return {
        **{"bytes": total, "workers": workers, "servers": servers, "rounds": rounds},
        "passes": len(next(iter(first.values()))),
        "machine": machine,
        "left_out": left_out,
        "rows": [
            *report.rows(figures, 1, total),
            *report.rows(choice.figures(second, gigabytes), 2, total),
        ],
        "choices": [report.plain_choice(one, total) for one in chosen],
        "advice": [line for one in chosen for line in report.advice(one)],
    }


def _part(
    turns: Turns,
    variants: Sequence[Variant],
    passes: int,
    progress: _Progress,
    left_out: list[str],
) -> Mapping[Variant, Sequence[Turn]]:
    from zkv_cli import bench_turns

    return bench_turns.passes(
        turns,
        variants,
        passes,
        progress.of(len(variants) * passes),
        lambda why: left_out.append(f"payloads do not go through memory here: {why}"),
    )


def _buffers(wanted: Sequence[int], left_out: list[str]) -> list[int]:
    """Return the sizes of socket buffers that the system tells apart."""
    from zkv.sizes import exact
    from zkv_cli.bench_turns import given_bytes

    asked: dict[int, int] = {}
    for one in wanted:
        got = given_bytes(one)
        if got in asked:
            left_out.append(
                f"socket buffers of {exact(one)}: the system gives {exact(got)} at most "
                "(net.core.wmem_max and rmem_max on Linux)"
            )
        asked.setdefault(got, one)
    return list(asked.values())


def _machine() -> dict[str, Any]:
    import zmq

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": cores,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "zeromq": zmq.zmq_version(),
    }


def _tell(told: Mapping[str, Any]) -> None:
    from zkv_cli.bench_report import as_table
    from zkv_cli.units import size_text

    machine = told["machine"]
    say(
        f"rounds of {size_text(told['bytes'])}: {told['workers']} workers, {told['servers']} "
        f"servers, {machine['cores']} cores; {told['passes']} passes of {told['rounds']} rounds"
    )
    for part, title in ((1, ""), (2, "what is quicker alone, together:")):
        plain = [one for one in told["rows"] if one["part"] == part]
        if plain:
            say("\n".join(["", *([title] if title else []), *as_table(plain)]))
    say("")
    if (machine["load"] or 0) > BUSY * (machine["cores"] or 1):
        say(f"Other work was under way (load {machine['load']}), which widens the spread.")
    for line in told["left_out"]:
        say(f"Left out: {line}.")
    for line in told["advice"]:
        say(line)


class _Progress:
    """A line on a terminal that says what is measured; nothing anywhere else."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._write("")

    def of(self, total: int) -> Callable[[int, Variant], None]:
        """Return what tells of `total` turns."""

        def show(done: int, variant: Variant) -> None:
            from zkv_cli.bench_report import THROUGH, words

            what = words(variant) or "the defaults"
            self._write(f"turn {done + 1} of {total}: {THROUGH[variant.transport]}, {what}")

        return show

    def _write(self, text: str) -> None:
        if self._shown:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
