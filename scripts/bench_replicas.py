"""What copies on other servers cost: batches with `--replicas 1` and without
(`scripts/bench_replicas --help`)."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

import zkv

MIB = 1024 * 1024
WARM = 3
LIMIT_S = 120.0
WORKER = """
import json, sys, time
import numpy as np
import zkv

address, rank, mib, count, shared = sys.argv[1], *map(int, sys.argv[2:])
options = {} if shared else {"shared_bytes": 0}
params = {f"w{at}": np.zeros(4 * 262144, np.float32) for at in range(mib // 4)}
spent = []
with zkv.connect(address, rank=rank, **options) as worker:
    worker.init(params)
    gradients = {key: np.ones_like(value) for key, value in params.items()}
    for number in range(count):
        began = time.perf_counter()
        with worker.batch() as batch:
            batch.params
            batch.push_all(gradients.items())
        batch.wait()
        spent.append(time.perf_counter() - began)
print(json.dumps(spent))
"""
"""A worker is a process of its own, as it would be."""


def batches(asked: argparse.Namespace, transport: str, replicas: int) -> list[float]:
    """Return the seconds of one run's batches, of each the slowest worker's."""
    settings = {"servers": asked.servers, "workers": asked.workers, "replicas": replicas}
    count, shared = str(WARM + asked.batches), str(int(transport == "memory"))
    with zkv.local(optimizer="sgd:lr=1", **settings) as cluster:
        command = [sys.executable, "-c", WORKER, cluster.address]
        workers = [
            subprocess.Popen(
                [*command, str(rank), str(asked.mib), count, shared],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(asked.workers)
        ]
        told = [json.loads(worker.communicate(timeout=LIMIT_S)[0]) for worker in workers]
    return [max(of) for of in zip(*told, strict=True)][WARM:]


def measured(asked: argparse.Namespace, transport: str) -> list[dict[str, Any]]:
    """Return a row for each kind of run."""
    found: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(asked.runs):
        for replicas, spent in found.items():
            spent += batches(asked, transport, replicas)
    plain = statistics.median(found[0])
    return [
        {
            "transport": transport,
            "replicas": replicas,
            "batch_s": statistics.median(spent),
            "batch_s_min": min(spent),
            "throughput": plain / statistics.median(spent),
        }
        for replicas, spent in found.items()
    ]


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(prog="scripts/bench_replicas", description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="of a model, each way (64)")
    parser.add_argument("--batches", type=int, default=20, help="of one run (20)")
    parser.add_argument("--runs", type=int, default=3, help="of each kind, in turns (3)")
    parser.add_argument("--servers", type=int, default=2, help="(2)")
    parser.add_argument("--workers", type=int, default=2, help="(2)")
    parser.add_argument("--transport", choices=("memory", "tcp"), help="one of them (both)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    kinds = [asked.transport] if asked.transport else ["memory", "tcp"]
    rows = [row for kind in kinds for row in measured(asked, kind)]
    if asked.json:
        print(json.dumps(rows))
        return
    print(f"{asked.mib} MiB up and down, {asked.workers} workers, {asked.servers} servers, bsp")
    for row in rows:
        print(
            f"{row['transport']:<7} replicas {row['replicas']}: {1000 * row['batch_s']:7.1f} ms a "
            f"batch (best {1000 * row['batch_s_min']:.1f}), throughput {row['throughput']:.2f}"
        )


if __name__ == "__main__":
    main()
