"""A cluster's status as text for a person. Pure: the plain data of `zkv status --json` comes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zkv_cli.report import bytes_text

SERVER_COLUMNS = ("server", "address", "host", "pid", "holds", "heard")
WORKER_COLUMNS = ("worker", "name", "host", "pid", "clock", "heard", "waits for")
SAMPLE_COLUMNS = ("worker", "counted", "part", "skipped", "returned")


def as_text(status: Mapping[str, Any]) -> str:
    """Return a status as a few lines and two tables."""
    lines = [
        f"broker     {status['broker']}",
        f"policy     {status['policy']}",
        f"optimizer  {status['optimizer']}",
        f"version    {status['version']}, {status['keys']} keys",
    ]
    codecs = [("up", status["codec"]), ("down", status["codec_down"])]
    if any(text != "none" for _, text in codecs):
        lines.append("codecs     " + ", ".join(f"{text} {way}" for way, text in codecs))
    if status["failed"]:
        lines.append(f"FAILED     {status['failed']}")
    if status["waiting"]:
        lines.append(f"waiting    {status['waiting'].removeprefix('waiting ')}")
    lines += ["", f"servers: {len(status['servers'])} of {status['servers_wanted']}"]
    if status["servers"]:
        lines += table(SERVER_COLUMNS, [_server_row(one) for one in status["servers"]])
    lines += ["", f"workers: {len(status['workers'])}"]
    if status["workers"]:
        lines += table(WORKER_COLUMNS, [_worker_row(one) for one in status["workers"]])
    if status["data"]:
        lines += ["", *_samples(status["data"])]
    return "\n".join(lines)


def _server_row(server: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(server["index"]),
        server["address"],
        server["host"],
        str(server["pid"]),
        bytes_text(server["value_bytes"]),
        f"{server['last_heard_s']:.1f} s ago",
    )


def _worker_row(worker: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        "observer" if worker["observer"] else str(worker["number"]),
        worker["name"],
        worker["host"],
        str(worker["pid"]),
        str(worker["clock"]),
        f"{worker['last_heard_s']:.1f} s ago",
        worker["waiting"]["text"] if worker["waiting"] else "-",
    )


def _samples(data: Mapping[str, Any]) -> list[str]:
    """Return how far the samples are dealt out, and what became of each worker's."""
    passes = "without end" if data["passes"] is None else f"of {data['passes']}"
    # A pass is in "coverage" from its first draw until all of it is settled.
    settled = data["coverage"].get(str(data["pass"]), 1.0 if data["workers"] else 0.0)
    counted = sum(share["counted"] for share in data["workers"].values())
    rows = [
        (
            number,
            str(share["counted"]),
            f"{share['counted'] / counted:.1%}" if counted else "-",
            str(share["skipped"]),
            str(share["returned"]),
        )
        for number, share in data["workers"].items()
    ]
    head = f"samples: pass {data['pass']} {passes}, {settled:.1%} of {data['n']} settled"
    return [head, *table(SAMPLE_COLUMNS, rows)] if rows else [head]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (columns, *rows)
    ]
