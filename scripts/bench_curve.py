"""What keys cost: a batch over TCP on this machine, with CURVE and without (`scripts/bench_curve
--help`)."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import zkv
from zkv_net.keys import VARIABLE, KeyFolder

MIB = 1024 * 1024
WARM = 2


@contextmanager
def keys(wanted: bool) -> Iterator[None]:
    """Let all processes that are started inside use keys, or none."""
    os.environ.pop(VARIABLE, None)
    with tempfile.TemporaryDirectory(prefix="zkv-bench-") as folder:
        if wanted:
            KeyFolder(Path(folder)).make("broker", ("broker",))
            os.environ[VARIABLE] = folder
        try:
            yield
        finally:
            os.environ.pop(VARIABLE, None)


def batches(mib: int, count: int, servers: int) -> list[float]:
    """Return the seconds of batches that send `mib` MiB up and get as much down, by TCP."""
    params = {f"w{at}": np.zeros(MIB // 4, np.float32) for at in range(mib)}
    spent = []
    with (
        zkv.local(servers=servers, optimizer="sgd:lr=1") as cluster,
        cluster.connect(shared_bytes=0) as worker,
    ):
        worker.init(params)
        for number in range(WARM + count):
            began = time.perf_counter()
            with worker.batch() as batch:
                _ = batch.params
                batch.push_all(params.items())
            batch.wait()
            if number >= WARM:
                spent.append(time.perf_counter() - began)
    return spent


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(prog="scripts/bench_curve", description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="of a model, each way (64)")
    parser.add_argument("--batches", type=int, default=20, help="of one run (20)")
    parser.add_argument("--runs", type=int, default=3, help="of each kind, in turns (3)")
    parser.add_argument("--servers", type=int, default=2, help="(2)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    found: dict[str, list[float]] = {"without keys": [], "with keys": []}
    for _ in range(asked.runs):
        for kind, spent in found.items():
            with keys(kind == "with keys"):
                spent += batches(asked.mib, asked.batches, asked.servers)
    moved = 2 * asked.mib * MIB
    rows = [
        {
            "kind": kind,
            "batch_s": statistics.median(spent),
            "batch_s_min": min(spent),
            "bytes_per_s": moved / statistics.median(spent),
        }
        for kind, spent in found.items()
    ]
    if asked.json:
        print(json.dumps({"mib": asked.mib, "servers": asked.servers, "rows": rows}))
        return
    print(f"{asked.mib} MiB up and down, TCP on loopback, {asked.servers} servers, 1 worker")
    for row in rows:
        print(
            f"{row['kind']:<14} {1000 * float(row['batch_s']):8.1f} ms a batch (best "
            f"{1000 * float(row['batch_s_min']):.1f}), {float(row['bytes_per_s']) / 1e9:.2f} GB/s"
        )
    ratio = float(rows[1]["batch_s"]) / float(rows[0]["batch_s"])
    print(f"with keys a batch takes {ratio:.2f} times as long")


if __name__ == "__main__":
    main()
