"""A cluster's status as text for a person. Pure: the plain data of `zkv status --json` comes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zkv_cli import time_report
from zkv_cli.report import bytes_text

SERVER_COLUMNS = ("server", "address", "host", "pid", "holds", "blocks", "load", "heard")
WORKER_COLUMNS = ("worker", "name", "host", "pid", "clock", "heard", "payloads", "waits for")
CODEC_COLUMNS = ("key", "codec", "before", "after", "encoding", "decoding", "kept back", "why")
KEYS_SHOWN = 20
SAMPLE_COLUMNS = ("worker", "counted", "part", "skipped", "returned")


def as_text(status: Mapping[str, Any]) -> str:
    """Return a status as a few lines and two tables."""
    lines = [
        f"broker     {status['broker']}",
        f"policy     {status['policy']}",
        f"optimizer  {status['optimizer']}",
        f"version    {status['version']}, {status['keys']} keys",
        *_placement(status),
        *_topology(status["topology"]),
        *_replicas(status.get("replicas")),
        *map(_rows, status.get("tables", ())),
    ]
    codecs = [("up", status["codec"]), ("down", status["codec_down"])]
    if any(text != "none" for _, text in codecs):
        lines.append("codecs     " + ", ".join(f"{text} {way}" for way, text in codecs))
    if status["codec_chosen"]:
        lines.append(f"           now {status['codec_chosen']}: {status['codec_why']}")
    lines += _snapshots(status.get("snapshots"))
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
    named = [(f"worker {one['number']}", one["time"]) for one in status["workers"] if "time" in one]
    if split := time_report.lines(named):
        lines += ["", *split]
    if status["codecs"]:
        lines += ["", *_codecs(status["codecs"])]
    if status["data"]:
        lines += ["", *_samples(status["data"])]
    return "\n".join(lines)


def _placement(status: Mapping[str, Any]) -> list[str]:
    """Return how evenly servers are loaded, and how many of them are asked."""
    fan_out = status["fan_out"]
    lines = [
        f"placement  {status['placement']}; busiest server over the mean: "
        f"{status['imbalance']:g} of bytes, {status['load_imbalance']:g} of load",
        f"fan-out    a batch {fan_out['batch']} of {status['servers_wanted']} servers, "
        f"a key {fan_out['key_mean']:g} (at most {fan_out['key_max']})",
    ]
    if status.get("measured_s"):
        over = f"{status['measured_imbalance']:g} over the last {status['measured_s']:.0f} s"
        lines.append(f"measured   busiest server over the mean: {over}")
    lines += _moves(status.get("moves"))
    apart = [f"{group} {count}" for group, count in fan_out["together"].items()]
    return [*lines, *(["           together: " + ", ".join(apart)] if apart else [])]


def _snapshots(snapshots: Mapping[str, Any] | None) -> list[str]:
    """Return when the last snapshot was taken, and what went wrong since."""
    if not snapshots or not snapshots["dir"]:
        return []
    last, words = snapshots["last"], [f"in {snapshots['dir']}"]
    if last is not None:
        size = bytes_text(last["bytes"])
        words.append(f"the last of version {last['version']}, {size}, {last['ago_s']:.0f} s ago")
    else:
        words.append("none was taken yet")
    words += [f"every {snapshots['every']}"] if snapshots["every"] else []
    words += [f"waiting: {snapshots['waits_for']}"] if snapshots["waits_for"] else []
    if snapshots["taking"]:
        waits = ", ".join(f"server {index}" for index in snapshots["missing"])
        words.append(f"one is being written{' by ' if waits else ''}{waits}")
    failed = snapshots["failed"]
    more = [f"           THE LAST TRY FAILED: {failed}"] if failed else []
    back = snapshots.get("gone_back") or {"times": 0}
    if back["times"]:
        times = "once" if back["times"] == 1 else f"{back['times']} times"
        last = back["last"]
        more.append(
            f"           gone back {times}, to version {last['version']} ({last['undone']} updates "
            f"lost): {last['why']}"
        )
    return ["snapshots  " + "; ".join(words), *more]


def _topology(topology: Mapping[str, Any]) -> list[str]:
    """Return how gradients come together, unless each worker sends its own to the servers."""
    if topology["name"] == "servers":
        return []
    told = f"topology   {topology['name']}"
    if topology["updates"] or topology["came_apart"]:
        told += f": {topology['updates']} updates, {topology['came_apart']} came apart"
    return [told, *([f"           to servers: {topology['why']}"] if topology["why"] else [])]


def _replicas(replicas: Mapping[str, Any] | None) -> list[str]:
    """Return of how many blocks there are copies that could take over, if there are to be any."""
    if not replicas or not replicas["wanted"]:
        return []
    told = f"replicas   {replicas['standing_by']} of {replicas['blocks']} blocks have a copy"
    there = sum(replicas["bytes"].values())
    told += f" that stands by ({bytes_text(there)})"
    lost = replicas["taken_over"]
    return [told + (f"; copies of {lost} lost servers have taken over" if lost else "")]


def _moves(moves: Mapping[str, Any] | None) -> list[str]:
    """Return what is moving, and whom that waits for."""
    if not moves or not (moves["moving"] or moves["waiting"] or moves["draining"]):
        return []
    one = (
        [f"{len(moves['moving'])} blocks are moving ({moves['stage']})"] if moves["moving"] else []
    )
    if moves["waits_for"]:
        whom = ", ".join(f"worker {number}" for number in moves["waits_for"])
        one.append(f"waiting for what {whom} began before")
    one += [f"{moves['waiting']} are to follow"] if moves["waiting"] else []
    one += [f"server {index} is drained" for index in moves["draining"]]
    return ["moves      " + ", ".join(one)]


def _rows(one: Mapping[str, Any]) -> str:
    """Return what a table of rows has."""
    bound = f" of {one['rows']}" if one["rows"] else ""
    return (
        f"table      {one['key']}: {one['rows_held']}{bound} rows of {one['dim']} {one['dtype']} "
        f"({bytes_text(one['bytes_held'])} with state) on {len(one['servers'])} servers"
    )


def _server_row(server: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(server["index"]),
        server["address"],
        server["host"],
        str(server["pid"]),
        bytes_text(server["value_bytes"]),
        str(server["blocks"]),
        bytes_text(server["load"]),
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
        worker["transport"] or "-",
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


def _codecs(keys: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each key that codecs have encoded, the largest ones."""
    before, after = (sum(one[name] for one in keys) for name in ("bytes_before", "bytes_after"))
    rows = [
        (
            str(one["key"]),
            "/".join(one["codecs"]),
            bytes_text(one["bytes_before"]),
            bytes_text(one["bytes_after"]),
            f"{one['encode_s']:.3g} s",
            f"{one['decode_s']:.3g} s",
            f"{one['residual_norm']:.3g}",
            one["why"].partition(": ")[2] or "-",
        )
        for one in keys[:KEYS_SHOWN]
    ]
    head = f"codecs: {bytes_text(before)} of gradients were sent as {bytes_text(after)}"
    more = len(keys) - len(rows)
    rest = [f"and {more} smaller keys: zkv status --json"] if more > 0 else []
    return [head, *table(CODEC_COLUMNS, rows), *rest]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (columns, *rows)
    ]
