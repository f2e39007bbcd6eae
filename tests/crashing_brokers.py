"""Runs of the simulated cluster in which the broker dies and goes on, of each kind of work."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from drawn_runs import drawn
from simcluster import Options, Sim, simulate
from simtables import simulate_tables, with_tables

_STREAMED: dict[str, Any] = {
    "policy": "bsp",
    "streaming": True,
    "staleness": "none",
    "codec_down": "none",
    "optimizer": "adam:lr=0.1",
}
_SUMMED: dict[str, Any] = {**_STREAMED, "codec": "none", "workers": 3}
KINDS: dict[str, dict[str, Any]] = {
    "streaming": {**_STREAMED, "layer_s": 0.02},
    "prefetch": {"staleness": "none", "prefetch": 1},
    "on demand": {"on_demand": (0, 2), "staleness": "none"},
    "samples": {"samples": 97},
    "ring": {**_SUMMED, "topology": "ring"},
    "hierarchical": {**_SUMMED, "topology": "hierarchical"},
    "moves": {"moves": 4, "rebalances": 1, "adds": 1, "drains": 1, "batches": 10},
    "tables": {},
    "snapshots": {"snapshots": 3, "every": "0.3s", "broken_disk": 0.1, "batches": 10},
}


def crashing(seed: int, kind: str = "", **fixed: Any) -> Options:
    """Draw a run of a kind of work whose broker dies up to three times."""
    chance = random.Random(seed)
    faults = {
        "broker_crashes": chance.choice((1, 2, 3)),
        "broker_down_s": chance.choice((0.05, 0.5, 1.5)),
    }
    if kind == "tables":
        return replace(with_tables(seed), **{**faults, **fixed})
    made = drawn(seed, **{**KINDS.get(kind, {}), **faults, **fixed})
    return replace(made, servers=max(2, made.servers)) if kind == "moves" else made


def run(seed: int, kind: str = "", **fixed: Any) -> Sim:
    """Run one, and check all laws."""
    options = crashing(seed, kind, **fixed)
    return simulate_tables(seed, options) if kind == "tables" else simulate(seed, options)
