"""zkv and others at one task: gradients to a sum, and the result to all (`scripts/bench_peers
--help`)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bench_options import above_zero, positive, set_name, some
from bench_runs import Failed, Run, end_in_order, quiet_run
from machines import loopback
from peer_places import PEERS, Missing, interpreter
from peer_rows import plotted, row, tables, targets, with_ratios
from peers.task import SETS, Case

ROUNDS = {"tiny": 40, "": 12}
"""By how a set's name begins: short rounds need more of them."""
QUICK_ROUNDS, QUICK_TURNS, QUICK_MINUTES = 3, 1, 4.0
COLUMNS = {
    "system": 13,
    "transport": 10,
    "set": 9,
    "workers": 8,
    "servers": 8,
    "median_ms": 10,
    "min_ms": 9,
    "max_ms": 9,
    "cpu_s_per_gb": 13,
    "to_gloo": 8,
    "runs": 5,
    "noise": 6,
}


class Key(NamedTuple):
    """What is measured in a row."""

    tensors: str
    workers: int
    servers: int
    peer: str


def say(text: str) -> None:
    """Tell the one who waits, who reads the table elsewhere."""
    print(text, file=sys.stderr, flush=True)


def keys(asked: argparse.Namespace) -> list[Key]:
    """Return what is to be measured, those next to each other that are compared."""
    found = []
    # If the time is up before the end, the first cases of each are there.
    for servers in asked.servers:
        for workers in asked.workers:
            for tensors in asked.sets:
                for name in asked.peers:
                    peer = PEERS[name]
                    fewest, most = peer.workers
                    again = servers != asked.servers[0] and not peer.servers
                    if fewest <= workers <= most and servers <= peer.servers_max and not again:
                        found.append(Key(tensors, workers, servers, name))
    return found


def measure(
    asked: argparse.Namespace, pythons: dict[str, str], enter: Sequence[str]
) -> tuple[dict[Key, list[Run]], dict[str, str]]:
    """Let all take turns, until there are enough or the time is up; return runs, and why some
    peers failed."""
    todo = keys(asked)
    runs: dict[Key, list[Run]] = {key: [] for key in todo}
    wrong: dict[str, str] = {}
    end = time.monotonic() + 60 * asked.minutes
    for turn in range(asked.turns):
        for number, key in enumerate(todo):
            if number and time.monotonic() > end:
                left = ", ".join(" ".join(map(str, one)) for one in todo[number:])
                say(f"{asked.minutes:g} minutes are over; left out in turn {turn + 1}: {left}")
                return runs, wrong
            if f"{key.peer} at {key.tensors}" in wrong:
                continue
            case = Case(key.peer, key.tensors, key.workers, key.servers, rounds_of(asked, key))
            try:
                program, python = PEERS[key.peer].program, pythons[key.peer]
                # Time that is up is not spent on more of the same.
                again = asked.again if time.monotonic() < end else 0
                done = quiet_run(case, program, python, enter, again)
            except Failed as error:
                wrong[f"{key.peer} at {key.tensors}"] = str(error)
                say(f"{' '.join(map(str, key))} FAILED: {error}")
                continue
            runs[key].append(done)
            last = row(key.peer, key.tensors, key.workers, key.servers, [done])
            loud = "" if done.quiet else f", but other work used {done.noise:.2f} cores"
            progress = f"turn {turn + 1}, {number + 1} of {len(todo)}"
            name = f"{key.peer} {key.tensors} {key.workers}w {key.servers}s"
            say(f"{progress}: {name}: {last['median_ms']:.2f} ms{loud}")
    return runs, wrong


def rounds_of(asked: argparse.Namespace, key: Key) -> int:
    """Return how many rounds of a run count."""
    given: int = asked.rounds
    return given or next(count for begin, count in ROUNDS.items() if key.tensors.startswith(begin))


def installed(asked: argparse.Namespace) -> tuple[dict[str, str], dict[str, str]]:
    """Return each peer's Python, and why others are left out."""
    pythons, missing = {}, {}
    for name in asked.peers:
        try:
            pythons[name] = interpreter(name, PEERS[name], install=not asked.no_install)
        except Missing as error:
            missing[name] = str(error)
            say(f"left out: {name}: {error}")
    return pythons, missing


def peer_name(text: str) -> str:
    """Read a peer's name."""
    if text not in PEERS:
        raise argparse.ArgumentTypeError(f"{text} is no peer: choose of {', '.join(PEERS)}")
    return text


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what is asked for.

    Raises:
        SystemExit: wrong use.
    """
    parser = argparse.ArgumentParser(prog="scripts/bench_peers")

    parser.add_argument("--peers", type=some(peer_name), default=list(PEERS))
    parser.add_argument("--sets", type=some(set_name), default=list(SETS))
    parser.add_argument("--workers", type=some(positive), default=[2, 4, 1])
    parser.add_argument("--servers", type=some(positive), default=[1])
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--turns", type=positive, default=3)
    parser.add_argument("--again", type=int, default=2)
    parser.add_argument("--minutes", type=above_zero, default=14.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-install", action="store_true")
    parser.add_argument("--host-network", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args(arguments)
    if asked.rounds < 0 or asked.again < 0:
        parser.error("--rounds and --again are not below 0")
    if asked.quick:
        asked.rounds, asked.turns, asked.again = asked.rounds or QUICK_ROUNDS, QUICK_TURNS, 0
        asked.minutes = min(asked.minutes, QUICK_MINUTES)
    return asked


def printed(rows: Sequence[dict[str, Any]], asked: argparse.Namespace) -> None:
    """Print the rows as they were asked for."""
    if asked.json:
        print(json.dumps(rows))
    elif asked.table:
        print(tables(rows))
    else:
        print(" ".join(f"{name:>{wide}}" for name, wide in COLUMNS.items()))
        for one in rows:
            print(" ".join(f"{one[name]!s:>{wide}}" for name, wide in COLUMNS.items()))
    for one in targets(rows) if not asked.table else ():
        verdict = "ok" if one["met"] else "MISSED"
        line = f"{one['what']}, {one['set']}, {one['workers']} workers: {one['ratio']:g} "
        print(f"{line}(at most {one['most']:g}) {verdict}", file=sys.stderr if asked.json else None)


def main() -> int:
    """Measure what was asked for, and print it."""
    asked = parsed(sys.argv[1:])
    end_in_order()
    pythons, _ = installed(asked)
    asked.peers = [name for name in asked.peers if name in pythons]
    with ExitStack() as stack:
        words: list[str] = []
        where = "this machine's own network, as it is"
        if not asked.host_network:
            words, where = stack.enter_context(loopback())
        say(f"all run in {where}")
        runs, wrong = measure(asked, pythons, words)
    found = [row(key.peer, *key[:3], of) for key, of in runs.items() if of]
    rows = [one | {"where": where} for one in with_ratios(found)]
    printed(rows, asked)
    if asked.plot and rows:
        plotted(rows, asked.plot)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
