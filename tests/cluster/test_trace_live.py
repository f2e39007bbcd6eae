"""`zkv trace run` with real processes: one whole file of all of them, whatever happens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from zkv_brokers.replay import replay
from zkv_workers.encoding import LONG

pytestmark = pytest.mark.cluster

PATIENCE_S = 50.0
BATCHES = 4
TRAIN = f"""
import numpy as np, zkv
with zkv.connect() as worker:
    worker.init({{"large": np.zeros({3 * LONG}, "f4"), "b": np.zeros(5, "f4")}})
    for _ in range({BATCHES}):
        with worker.batch() as batch:
            for key, value in batch.params.items():
                batch.push(key, value + 1)
        batch.wait()
    worker.barrier()
"""
FAILS = """
import os, signal, numpy as np, zkv
with zkv.connect() as worker:
    worker.init({"w": np.zeros(5, "f4")})
    with worker.batch() as batch:
        batch.push("w", batch["w"] + 1)
    batch.wait()
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with worker.batch() as batch:
        batch.push("w", batch["w"] + 1)
    batch.wait()
"""
ASYNC = """
import asyncio, numpy as np, zkv.aio
async def main():
    async with zkv.aio.connect() as worker:
        await worker.init({"w": np.zeros(5, "f4")})
        async with worker.batch(early=True) as batch:
            await batch.arrived("w")
            batch.push("w", batch["w"] + 1)
        await batch.wait()
asyncio.run(main())
"""
Events = list[dict[str, Any]]


def traced(folder: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(program, "utf-8")
    kept = {name: text for name, text in os.environ.items() if not name.startswith("ZKV_")}
    command = [sys.executable, "-m", "zkv_cli", "trace", "run", *options, "--", "train.py"]
    return subprocess.run(
        command, cwd=folder, env=kept, capture_output=True, text=True, timeout=PATIENCE_S
    )


def tracks(events: Events) -> dict[tuple[str, str], Events]:
    """The spans and instants by process and track."""
    process = {
        e["pid"]: e["args"]["name"].split(" (")[0] for e in events if e["name"] == "process_name"
    }
    track = {
        (e["pid"], e["tid"]): (process[e["pid"]], e["args"]["name"])
        for e in events
        if e["name"] == "thread_name"
    }
    found = defaultdict(list)
    for event in events:
        if event["ph"] in "Xi":
            found[track[event["pid"], event["tid"]]].append(event)
    return dict(found)


def names(events: Events) -> set[str]:
    return {re.sub(r" \d+", "", event["name"]) for event in events}


def test_a_run_leaves_one_trace_of_everybody_in_order(tmp_path):
    done = traced(
        tmp_path, TRAIN, "-n", "2", "--servers", "2", "--codec", "fp16", "--record", "life"
    )
    assert done.returncode == 0, done.stderr
    plain = json.loads((tmp_path / "zkv-trace.json").read_text("utf-8"))
    events, about = plain["traceEvents"], plain["otherData"]
    found = tracks(events)
    for worker in ("worker 0", "worker 1"):
        training = {"compute", "prepare codecs", "wait for a grant", "push b", "push large"}
        training |= {"other call", "wait for the fate of a batch"}
        assert training <= names(found[worker, "training"])
        assert names(found[worker, "encoder"]) == {"encode"}
        assert "send" in names(found[worker, "network"])
        settled = [event["name"] for event in found[worker, "batches"]]
        assert settled == [f"batch {number} committed" for number in range(1, BATCHES + 1)]
    for server in ("server 0", "server 1"):
        sums = [event["name"] for event in found[server, "updates"]]
        assert sums == [f"sum {version}" for version in range(1, BATCHES + 1)]
        assert "grant" in names(found[server, "network"])
    broker = found["broker", "turns"]
    assert names(broker) == {"turn", "grant", "commit"}
    assert sum(event["name"] == "commit" for event in broker) == BATCHES
    check_arrows(events, about, blocks=2 * BATCHES * 2)
    for track in found.values():
        check_nesting(track)
    assert about["missing"] == []
    for one in about["processes"]:
        assert one["dropped"] == 0
        assert one["process"] == "broker" or one["round_trips"] > 0
        if one["process"] != "broker":
            error = f"give or take {one['clock_error_s'] * 1e3:.3f} ms (the shortest of "
            assert re.search(rf"  {one['process']}: [+-][\d.]+ ms, {re.escape(error)}", done.stdout)
    assert "zkv-trace.json has" in done.stdout
    assert "where the time goes, by batch" in done.stdout
    for name in ("worker 0", "worker 1"):
        assert f"\n{name}  {BATCHES} batches of " in done.stdout
        (split,) = [one["time"] for one in about["processes"] if one["process"] == name]
        assert split["batches"] == BATCHES
        # Each batch's fate was waited for, and at the end the others.
        assert split["wait_s"] > 0
    assert about["processes"][0]["time"] is None
    assert "ui.perfetto.dev" in done.stdout
    # What is asked of the broker's clock changes nothing that is decided.
    lives = [replay(path) for path in (tmp_path / "life").glob("*.rec")]
    assert [life.same for life in lives] == [True] * 3


def check_arrows(events: Events, about: dict[str, Any], *, blocks: int) -> None:
    """No sum is before the send of what is in it, give or take what the clocks may be wrong."""
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) >= blocks
    assert starts.keys() == ends.keys()
    error_us = {one["pid"]: one["clock_error_s"] * 1e6 for one in about["processes"]}
    for number, start in starts.items():
        end = ends[number]
        assert end["ts"] >= start["ts"] - error_us[start["pid"]] - error_us[end["pid"]]


def check_nesting(track: Events) -> None:
    open_ends: list[float] = []
    for event in track:
        start, end = event["ts"], event["ts"] + event.get("dur", 0.0)
        while open_ends and open_ends[-1] <= start + 1e-6:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 1e-6, event
        open_ends.append(end)


def test_a_killed_worker_is_missing_and_the_others_are_not(tmp_path):
    """The one that is killed leaves nothing; the other is told to end, and leaves its spans."""
    done = traced(tmp_path, FAILS, "-n", "2", "--grace", "0.2", "--output", "t.json")
    assert done.returncode == 137, done.stderr
    plain = json.loads((tmp_path / "t.json").read_text("utf-8"))
    text = "worker 1: it was killed, or never connected, so its spans are missing"
    assert plain["otherData"]["missing"] == [text]
    assert f"missing: {text}" in done.stdout
    found = tracks(plain["traceEvents"])
    assert {process for process, _ in found} == {"broker", "server 0", "worker 0"}
    assert "compute" in names(found["worker 0", "training"])


def test_a_worker_of_asyncio_is_traced_too(tmp_path):
    done = traced(tmp_path, ASYNC)
    assert done.returncode == 0, done.stderr
    plain = json.loads((tmp_path / "zkv-trace.json").read_text("utf-8"))
    found = tracks(plain["traceEvents"])
    training = names(found["worker 0", "training"])
    assert {"compute", "wait for a grant", "push w"} <= training
    assert [event["name"] for event in found["worker 0", "batches"]] == ["batch 1 committed"]


def test_a_run_that_cannot_begin_says_so_and_leaves_no_trace(tmp_path):
    done = traced(tmp_path, TRAIN, "--policy", "nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert not (tmp_path / "zkv-trace.json").exists()
