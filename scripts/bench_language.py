"""Time to a loss on slow links: a byte-level language model by zkv with codecs, and by DDP.

Part of `scripts/bench_net`. Each of two workers has a machine of its own; zkv's servers are beside
the workers, so both systems have the same machines and links.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench_runs import Failed, Run, run
from machines import ADDRESS, network
from peer_rows import markdown
from peers.task import Case

STEPS, MBIT = 300, 20.0
QUEUE = "burst 32kb latency 100ms"
WORKERS = 2
WAYS = ("ddp", "int8", "topk")
"""Of peers/language.py; the first is what the others are compared with."""
STATED = 2.7
"""Nats of unseen data. Uncompressed training ends at 2.65 after 300 updates."""
SHARE = 6.0
"""Of communication to computing, at least."""
FASTER = {"topk": 5.0, "int8": 3.0}
CLOSE = 0.02
"""Of the final loss without compression."""


def reached_s(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """Return the seconds at which a loss is reached, between two looks on a straight line."""
    for (_, before_s, before), (_, after_s, after) in itertools.pairwise(curve):
        if after <= loss < before:
            return before_s + (after_s - before_s) * (before - loss) / (before - after)
    return curve[0][1] if curve and curve[0][2] <= loss else None


def measure(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Train once each way; return a row for each.

    Raises:
        NoNamespace: machines on slow links cannot be made here.
    """
    if importlib.util.find_spec("torch") is None:
        why = f"PyTorch is not installed in {sys.prefix}: pip install torch"
        print(f"left out: the language model: {why}", file=sys.stderr)
        return []
    told: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        try:
            if way in FASTER:
                # A codec's kernels are compiled once for each machine, which is not what is timed.
                trained(way, 0, 2, asked.congestion)
            done = trained(way, asked.language_mbit, asked.steps, asked.congestion)
        except Failed as error:
            print(f"language model, {way} FAILED: {error}", file=sys.stderr)
            told[way] = {"failed": str(error)}
            continue
        told[way] = {**done.told[0], "noise": done.noise}
        step, seconds, loss = told[way]["curve"][-1]
        print(
            f"language model, {way}: {step} updates in {seconds:.1f} s to a loss of {loss:.3f}",
            file=sys.stderr,
            flush=True,
        )
    return rows(told, asked.language_mbit)


def trained(way: str, mbit: float, steps: int, congestion: str | None) -> Run:
    """Train once. Raises: Failed: it did not come to its end."""
    os.environ["ZKV_BENCH_STEPS"] = str(steps)
    with network(WORKERS, mbit, QUEUE, congestion) as places:
        hosts = [[ADDRESS.format(at + 1), place.enter] for at, place in enumerate(places)]
        servers = 0 if way == "ddp" else WORKERS
        case = Case(way, "tiny1", WORKERS, servers, 1, 2, hosts, hosts)
        return run(case, "language.py", sys.executable)


def rows(told: Mapping[str, Mapping[str, Any]], mbit: float) -> list[dict[str, Any]]:
    """Return a row for each way: seconds to the stated loss, and how much faster than DDP it is.

    With fewer updates than usual the stated loss is out of reach: then it is what DDP ends with.
    """
    base = told.get("ddp", {})
    stated = STATED
    if "curve" in base and reached_s(base["curve"], STATED) is None:
        stated = base["curve"][-1][2] * (1 + CLOSE)
    base_s = reached_s(base["curve"], stated) if "curve" in base else None
    found: list[dict[str, Any]] = []
    for way, of in told.items():
        one: dict[str, Any] = {"system": "gloo" if way == "ddp" else "zkv", "set": "language"}
        one |= {"way": way, "mbit": mbit, "workers": WORKERS, "stated_loss": round(stated, 4)}
        if "failed" in of:
            found.append(one | {"failed": of["failed"]})
            continue
        seconds = reached_s(of["curve"], stated)
        final = of["curve"][-1][2]
        one["seconds"] = None if seconds is None else round(seconds, 2)
        one["faster"] = round(base_s / seconds, 2) if base_s and seconds else None
        one["final_loss"] = round(final, 4)
        one["to_ddp"] = round(final / base["curve"][-1][2] - 1, 4) if "curve" in base else None
        one["update_ms"] = round(1e3 * of["curve"][-1][1] / of["curve"][-1][0], 1)
        for name in ("compute_ms", "comm_ms"):
            one[name] = None if of.get(name) is None else round(of[name], 1)
        one["noise"] = round(of["noise"], 2)
        found.append(one)
    return found


COLUMNS = {
    "way": "way",
    "update_ms": "update, ms",
    "seconds": "to the loss, s",
    "faster": "times DDP's speed",
    "final_loss": "final loss",
    "to_ddp": "to DDP's",
    "compute_ms": "compute, ms",
    "comm_ms": "all-reduce, ms",
    "noise": "noise",
}


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each thing that is wanted of these rows."""
    base = next((one for one in rows if one["way"] == "ddp" and "failed" not in one), None)
    if base is None:
        return []
    share = base["comm_ms"] / base["compute_ms"]
    held = [(f"communication is {share:.1f} times computing", share >= SHARE, f"{SHARE:g}")]
    for one in rows:
        if one["way"] in FASTER and "failed" not in one:
            most = FASTER[one["way"]]
            faster = one["faster"] or 0.0
            held.append(
                (f"{one['way']}: {faster:g} times DDP's speed", faster >= most, f"{most:g}")
            )
            near = f"{one['way']}: the final loss is {100 * one['to_ddp']:+.2f} % of DDP's"
            held.append((near, one["to_ddp"] <= CLOSE, f"{100 * CLOSE:g} % allowed"))
    return [f"{text} (wanted: {want}) {'ok' if ok else 'MISSED'}" for text, ok, want in held]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows in Markdown, and what is wanted of them."""
    if not rows:
        return ""
    about = f"To a loss of {rows[0]['stated_loss']:g} at {rows[0]['mbit']:g} Mbit/s:"
    lines = "\n".join(f"- {line}" for line in verdicts(rows))
    return f"{about}\n\n{markdown(rows, COLUMNS)}\n\n{lines}"
