"""`zkv rebalance` and `zkv server drain`: asks a broker to move blocks, and tells how it goes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from zkv import control as c
from zkv.errors import ConfigError
from zkv_cli.ask import TOKEN, ask, ask_status
from zkv_cli.exits import CommandFailed, say
from zkv_cli.report import bytes_text
from zkv_cli.tables import table

MOVES_SHOWN = 20
POLL_S = 0.2
TELL_EVERY_S = 2.0


def run(
    address: str,
    message: c.Rearrange,
    *,
    as_json: bool,
    timeout_s: float,
    wait_s: float,
    measure_s: float,
) -> None:
    """Ask for a plan, print it, and wait until it is carried out (unless it is dry).

    `wait_s` is for the moves, `measure_s` for figures of the load after them, in seconds.

    Raises:
        CommandFailed: not all blocks have moved, or not in time; the text says why.
        ZkvError: the broker refused, or does not answer within `timeout_s`.
    """
    before = ask_status(address, timeout_s)["moves"] if not message.dry else {}
    plan = ask(address, message, timeout_s)
    if not as_json:
        say("\n".join(lines_of(plan)))
    if not message.dry:
        plan |= _carried_out(address, plan, before, timeout_s, wait_s, measure_s, as_json)
    if as_json:
        say(json.dumps(plan, ensure_ascii=False, indent=2))


def lines_of(plan: Mapping[str, Any]) -> list[str]:
    """Return a plan as text: servers before and after, the imbalance, and what moves and why."""
    measured = plan["of"] == "measured"
    what = f"measured for {plan['seconds']:g} s" if measured else "bytes of values: none measured"
    before, after = plan["loads_before"], plan["loads_after"]
    servers = sorted({*before, *after}, key=int)
    rows = [(one, _load(before.get(one)), _load(after.get(one))) for one in servers]
    moves = plan["moves"]
    lines = [
        f"load       {what}",
        *table(("server", "load before", "after"), rows),
        f"imbalance  {plan['imbalance_before']:g} before, {plan['imbalance_after']:g} planned "
        "(busiest server over the mean)",
        f"moves      {len(moves)} of {plan['blocks']} blocks, {bytes_text(int(plan['bytes']))} of "
        f"{bytes_text(int(plan['of_bytes']))}",
    ]
    found = [_row(one) for one in moves[:MOVES_SHOWN]]
    if found:
        lines += table(("block", "key", "load", "from", "to", "why"), found)
    more = len(moves) - MOVES_SHOWN
    return [*lines, *([f"and {more} more: --json"] if more > 0 else [])]


def _load(load: float | None) -> str:
    return "-" if load is None else bytes_text(round(load))


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    others = f" and {one['more_keys']} more" if one["more_keys"] else ""
    key, load = f"{one['key']}{others}", bytes_text(round(one["load"]))
    return (str(one["block"]), key, load, str(one["from"]), str(one["to"]), one["why"])


def _carried_out(
    address: str,
    plan: Mapping[str, Any],
    before: Mapping[str, Any],
    timeout_s: float,
    wait_s: float,
    measure_s: float,
    quiet: bool,
) -> dict[str, Any]:
    """Wait for the moves, and then for a look at the load; return what came of them."""
    began = time.monotonic()
    status = _awaited(address, plan, timeout_s, began + wait_s, quiet)
    took_s = time.monotonic() - began
    moved = status["moves"]["moved"] - before["moved"]
    given_up = _since(status["moves"]["given_up"], before["given_up"])
    after = status
    until = time.monotonic() + measure_s
    while moved and plan["of"] == "measured" and time.monotonic() < until:
        time.sleep(POLL_S)
        after = ask_status(address, timeout_s)
    measured = after["measured_imbalance"] if moved and after is not status else None
    if not quiet:
        say(f"done       {moved} blocks moved in {took_s:.1f} s")
    if not quiet and measured is not None:
        say(f"measured   {after['measured_s']:g} s since: imbalance {measured:g}")
    if given_up:
        why = "; ".join(f"{count} blocks: {why}" for why, count in given_up.items())
        raise CommandFailed(f"some blocks stay where they were: {why}")
    return {"moved": moved, "took_s": round(took_s, 3), "imbalance_measured": measured}


def _since(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {
        why: count - before.get(why, 0) for why, count in now.items() if count > before.get(why, 0)
    }


def _awaited(
    address: str, plan: Mapping[str, Any], timeout_s: float, deadline: float, quiet: bool
) -> dict[str, Any]:
    """Return the status once the moves are over, and a drained server has gone."""
    told = time.monotonic()
    while True:
        status = ask_status(address, timeout_s)
        text = what_is_left(status, plan["server"] if plan["action"] == "drain" else None)
        if not text:
            return status
        now = time.monotonic()
        if now >= deadline:
            raise CommandFailed(f"not done in time, and it goes on: {text}; see zkv status")
        if now - told >= TELL_EVERY_S and not quiet:
            told = now
            say(text, error=True)
        time.sleep(POLL_S)


def what_is_left(status: Mapping[str, Any], drained: int | None) -> str:
    """Return what is not done yet; "" if all is. `drained`: a server that is to go."""
    moves = status["moves"]
    waits = ", ".join(f"worker {number}" for number in moves["waits_for"])
    behind = f", waiting for batches of {waits} that were begun before" if waits else ""
    if moves["moving"]:
        count = len(moves["moving"]) + moves["waiting"]
        return f"{count} blocks are to move ({moves['stage']}{behind})"
    if moves["waiting"]:
        return f"{moves['waiting']} blocks are to move"
    if drained is not None and any(one["index"] == drained for one in status["servers"]):
        return f"server {drained} owns nothing, and still sends what was granted before{behind}"
    return ""


def request(action: str, server: str = "", keys: tuple[str, ...] = (), *, dry: bool) -> c.Rearrange:
    """Return what to ask a broker for."""
    return c.Rearrange(TOKEN, action, server, keys, dry)


def requests(keys: Sequence[str], *, dry: bool) -> list[c.Rearrange]:
    """Return what to ask for: to move keys (PATTERN=SERVER each), or (none) to level the load.

    Raises:
        ConfigError: a text is not of that form.
    """
    if not keys:
        return [request("rebalance", dry=dry)]
    by_server: dict[str, list[str]] = {}
    for text in keys:
        pattern, _, server = text.rpartition("=")
        if not pattern or not server:
            raise ConfigError(f"--move {text!r} is not PATTERN=SERVER, as in embed.*=1")
        by_server.setdefault(server, []).append(pattern)
    return [request("move", server, tuple(some), dry=dry) for server, some in by_server.items()]
