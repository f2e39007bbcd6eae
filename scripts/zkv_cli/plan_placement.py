"""`zkv plan placement`: imbalance and fan-out of blocks on servers, and what a placement changes.

Of loads that are typed, or of the model of a recorded run. What calculates is imported only in the
command, so that `zkv --help` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zkv.errors import ConfigError
from zkv_cli import units as u
from zkv_cli.exits import say
from zkv_cli.plan import Json, planning, tell
from zkv_cli.tables import table

if TYPE_CHECKING:
    from zkv.placements import Placement

MOVES_SHOWN = 20


def placement(
    loads: Annotated[
        str | None,
        typer.Option("--loads", help="Load of each block: 40,25,10 (p1, p2, p3) or a=40,b=25."),
    ] = None,
    servers: Annotated[
        int | None,
        typer.Option("--servers", help="Servers, counted from 0 (of --record: its own)."),
    ] = None,
    assign: Annotated[
        str | None,
        typer.Option("--assign", help="Each block's server: 0,0,1 (default: by turns, i mod S)."),
    ] = None,
    request: Annotated[
        str | None, typer.Option("--request", help="Blocks that are asked for together: p1,p5,p7.")
    ] = None,
    change: Annotated[
        str | None,
        typer.Option("--placement", help="Compare with this placement, such as by_load;blocks=2."),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option("--sizes", help="Bytes of each block: 4MB,1MB (default: as its load)."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option("--record", help="The model of a run instead: what zkv run --record left."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Imbalance and fan-out of a placement, before and after a change."""
    with planning("placement"):
        wanted = _placement(change)
        if record is not None:
            if loads is not None or assign is not None or sizes is not None or request is not None:
                raise ConfigError("--record has blocks of its own: leave out what describes others")
            _recorded(record, servers, wanted, as_json)
        elif loads is None or servers is None:
            raise ConfigError("give --loads and --servers, or a run's --record")
        else:
            by_block = u.option("--loads", _loads, loads)
            nbytes = by_block if sizes is None else _sizes(list(by_block), sizes)
            figures = _figures(by_block, servers, assign, request)
            if wanted is None:
                tell(figures, _lines(by_block, figures), as_json)
                return
            figures |= _after(by_block, nbytes, figures, wanted)
            if as_json:
                tell(figures, [], as_json)
            else:
                say("\n".join(_compared(by_block, figures)))


def _placement(text: str | None) -> Placement | None:
    from zkv.placements import placement as read

    return None if text is None else u.option("--placement", read, text)


def _loads(text: str) -> dict[str, float]:
    """Return load by block; a block without a name is p1, p2, ... by its place in the list."""
    found: dict[str, float] = {}
    for at, part in enumerate(text.split(","), start=1):
        name, equals, load = part.rpartition("=")
        block = name.strip() if equals else f"p{at}"
        if not block or block in found:
            raise ValueError(f"block {block!r} stands twice or has no name in {text!r}")
        found[block] = u.number(load)
    return found


def _assignment(blocks: Sequence[str], text: str) -> dict[str, int]:
    servers = u.option("--assign", lambda listed: u.each(u.count, listed), text)
    if len(servers) != len(blocks):
        raise ConfigError(f"--assign: {len(servers)} servers for {len(blocks)} blocks of --loads")
    return dict(zip(blocks, servers, strict=True))


def _sizes(blocks: Sequence[str], text: str) -> dict[str, float]:
    sizes = u.option("--sizes", lambda listed: u.each(u.size_bytes, listed), text)
    if len(sizes) != len(blocks):
        raise ConfigError(f"--sizes: {len(sizes)} sizes for {len(blocks)} blocks of --loads")
    return dict(zip(blocks, map(float, sizes), strict=True))


def _figures(
    by_block: Mapping[str, float], servers: int, assign: str | None, request: str | None
) -> dict[str, Any]:
    from zkv import aggregation_costs as costs

    assignment = costs.round_robin(by_block, servers)
    if assign is not None:
        assignment = _assignment(list(by_block), assign)
    wanted = None if request is None else [one.strip() for one in request.split(",")]
    return {
        "servers": servers,
        "assignment": assignment,
        **_held(by_block, assignment, servers),
        "imbalance_min": costs.load_imbalance_min(by_block, servers),
        "request": wanted,
        "fan_out": None if wanted is None else costs.fan_out(assignment, wanted),
    }


def _held(
    by_block: Mapping[str, float], assignment: Mapping[str, int], servers: int
) -> dict[str, Any]:
    from zkv import aggregation_costs as costs

    held = costs.server_loads(by_block, assignment, servers)
    return {
        "server_loads": held,
        "mean_load": sum(held) / servers,
        "busiest_load": max(held),
        "imbalance": costs.load_imbalance(by_block, assignment, servers),
    }


def _lines(by_block: Mapping[str, float], f: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = []
    for server, load in enumerate(f["server_loads"]):
        held = [block for block, at in f["assignment"].items() if at == server]
        parts = " + ".join(f"{block} {u.plain(by_block[block])}" for block in held) or "nothing"
        lines.append((f"server {server}", f"{parts} = {u.plain(load)}" if held else parts))
    least = u.plain(f["imbalance_min"])
    lines.append(("imbalance", f"{_ratio(f)} (no placement can be below {least})"))
    if f["request"] is not None:
        lines.append(
            ("fan-out", f"{', '.join(f['request'])}: {f['fan_out']} of {f['servers']} servers")
        )
    return lines


def _ratio(f: Mapping[str, Any]) -> str:
    return f"{u.plain(f['busiest_load'])} / {u.plain(f['mean_load'])} = {u.plain(f['imbalance'])}"


def _after(
    by_block: Mapping[str, float],
    nbytes: Mapping[str, float],
    before: Mapping[str, Any],
    wanted: Placement,
) -> dict[str, Any]:
    """Return the figures under a placement, and what moves."""
    from zkv import aggregation_costs as costs
    from zkv.assignment import assign, reason
    from zkv.fitting import Piece
    from zkv.wishes import Wishes

    servers = before["servers"]
    pieces = [Piece(block, nbytes[block], load) for block, load in by_block.items()]
    wishes = Wishes(wanted, servers, by_block)
    chosen = assign(pieces, servers, wanted, wishes=wishes)
    assignment = dict(zip(by_block, chosen, strict=True))
    fan_out = None if before["request"] is None else costs.fan_out(assignment, before["request"])
    return {
        "placement": wanted.text,
        "after": {
            "assignment": assignment,
            **_held(by_block, assignment, servers),
            "fan_out": fan_out,
        },
        "moved": [
            {
                "block": block,
                "load": by_block[block],
                "from": before["assignment"][block],
                "to": server,
                "why": reason(wishes, block),
            }
            for block, server in assignment.items()
            if server != before["assignment"][block]
        ],
    }


def _compared(by_block: Mapping[str, float], f: Mapping[str, Any]) -> list[str]:
    """Return the servers before and after as a table, both ratios, and what moves and why."""
    after = f["after"]

    def held(of: Mapping[str, Any], server: int) -> str:
        parts = [block for block, at in of["assignment"].items() if at == server]
        return ", ".join(parts) or "nothing"

    rows = [
        (
            str(server),
            u.plain(f["server_loads"][server]),
            u.plain(after["server_loads"][server]),
            held(f, server),
            held(after, server),
        )
        for server in range(f["servers"])
    ]
    least = u.plain(f["imbalance_min"])
    lines = [
        f"placement  {f['placement']}",
        *table(("server", "load before", "after", "blocks before", "after"), rows),
        f"imbalance  {_ratio(f)} before, {_ratio(after)} after (no placement can be below {least})",
    ]
    if f["request"] is not None:
        lines.append(
            f"fan-out    {', '.join(f['request'])}: {f['fan_out']} of {f['servers']} servers "
            f"before, {after['fan_out']} after"
        )
    moved = sum(one["load"] for one in f["moved"])
    head = (
        f"moves      {len(f['moved'])} of {len(by_block)} blocks, {u.plain(moved)} of "
        f"{u.plain(sum(by_block.values()))} of the load"
    )
    return [*lines, head, *_moves(f["moved"], "block", "load", u.plain)]


def _moves(
    moved: Sequence[Mapping[str, Any]], what: str, much: str, text: Callable[[float], str]
) -> list[str]:
    """Return a table of what moves, the first of it."""
    if not moved:
        return []
    rows = [
        (str(one[what]), text(one[much]), str(one["from"]), str(one["to"]), one["why"])
        for one in moved[:MOVES_SHOWN]
    ]
    more = len(moved) - MOVES_SHOWN
    rest = [f"and {more} more: --json"] if more > 0 else []
    return [*table((what, much, "from", "to", "why"), rows), *rest]


def _recorded(record: Path, servers: int | None, wanted: Placement | None, as_json: bool) -> None:
    from zkv_brokers.recorded_blocks import recorded_blocks

    if servers is not None and servers < 1:
        raise ConfigError(f"--servers: a model lies on at least 1 server, given {servers}")
    try:
        figures = recorded_blocks(record, wanted, servers)
    except OSError as error:
        raise ConfigError(f"--record: {record} cannot be read: {error.strerror}") from error
    if as_json:
        tell(figures, [], as_json)
    else:
        say("\n".join(_of_a_run(figures)))


def _of_a_run(f: Mapping[str, Any]) -> list[str]:
    """Return a run's servers as a table, before and after, and which keys move and why."""
    before, after = f["before"], f["after"]
    size = u.size_text
    sides = [before, after] if after is not None else [before]
    columns = ["server"]
    for name in ("", " after")[: len(sides)]:
        columns += [f"bytes{name}", f"blocks{name}", f"load{name}"]
    rows = []
    for server in range(max(len(side["servers"]) for side in sides)):
        row = [str(server)]
        for side in sides:
            there = server < len(side["servers"])
            held = side["servers"][server] if there else None
            row += (
                [size(held["value_bytes"]), str(held["blocks"]), size(held["load"])]
                if held
                else ["-"] * 3
            )
        rows.append(row)
    lines = [
        f"placement  {' -> '.join(side['placement'] for side in sides)}",
        *table(columns, rows),
    ]
    for what, key in (("of bytes", "imbalance"), ("of load", "load_imbalance")):
        lines.append(f"imbalance  {' -> '.join(u.plain(side[key]) for side in sides)} {what}")
    for what, key in (("a batch", "batch"), ("a key", "key_mean")):
        told = " -> ".join(u.plain(side["fan_out"][key]) for side in sides)
        lines.append(f"fan-out    {told} servers for {what}")
    if after is None:
        return lines
    total = sum(held["value_bytes"] for held in before["servers"])
    moved = sum(one["bytes"] for one in f["moved"])
    count = len(f["moved"])
    head = f"moves      {size(moved)} of {size(total)}, of {count} key{'s' * (count != 1)}"
    return [*lines, head, *_moves(f["moved"], "key", "bytes", size)]
