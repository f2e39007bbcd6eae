"""zkv and others at one task: gradients to a sum, and the result to all (`scripts/bench_peers
--help`).

This file is the program of each worker as well: the parent starts it again for each of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import zkv

WARM = 4
"""Rounds that do not count."""
PATIENCE_S = 300
BUCKET_BYTES = 25 * 2**20
BASELINE = "gloo"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SETS = ("one100", "resnet50", "tiny1000")
Told = dict[str, Any]
"""What a worker tells: `ms` of each round that counts, `cpu_s` of its own, `bytes` of gradients."""


def sizes(name: str) -> list[int]:
    """Return the elements of each tensor of a set, which are float32."""
    if name == "one100":
        return [25_000_000]
    if name == "tiny1000":
        return [256] * 1000
    from resnet50 import resnet

    return [parameter.numel() for parameter in resnet().parameters()]


# --- in a worker -----------------------------------------------------------------------------


def timed(rounds: int, once: Callable[[], None], others_cpu_s: Callable[[], float]) -> Told:
    """Return the milliseconds of each round, and CPU seconds of this and other processes."""
    took_ms = []
    cpu_s = 0.0
    for at in range(WARM + rounds):
        if at == WARM:
            cpu_s = -time.process_time() - others_cpu_s()
        began = time.perf_counter()
        once()
        took_ms.append(1e3 * (time.perf_counter() - began))
    cpu_s += time.process_time() + others_cpu_s()
    return {"ms": took_ms[WARM:], "cpu_s": cpu_s}


def cpu_of(pids: Sequence[int]) -> float:
    """Return the CPU seconds that processes have used."""
    spent = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        spent += int(fields[11]) + int(fields[12])
    return spent / TICKS_PER_S


def zkv_worker(transport: str, given: Sequence[int], rank: int, at: str, rounds: int) -> Told:
    """Train with gradients that are there already."""
    world = int(os.environ["WORLD_SIZE"])
    shared = {} if transport == "memory" else {"shared_bytes": 0}
    values = {f"w{number}": np.zeros(size, np.float32) for number, size in enumerate(given)}
    gradients = {key: np.ones_like(one) for key, one in values.items()}
    with zkv.connect(at, rank=rank, world=world, **shared) as worker:
        worker.init(values)
        pids = [int(one["pid"]) for one in worker.status()["servers"]]
        pids.append(int(os.environ["BROKER_PID"]))

        def once() -> None:
            with worker.batch() as batch:
                _ = batch.params
                batch.push_all(gradients.items())
            if batch.wait() != "committed":
                raise SystemExit(f"worker {rank}: a batch was {batch.outcome}")

        told = timed(rounds, once, lambda: cpu_of(pids) if rank == 0 else 0.0)
        used = worker.stats()["transport"]
        if not used.startswith(transport):
            raise SystemExit(f"payloads went through {used}, not through {transport}")
    return told


def gloo_worker(peer: str, given: Sequence[int], rank: int, at: str, rounds: int) -> Told:
    """Reduce gradients that are there already."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=at, rank=rank, world_size=world)
    flat = torch.ones(sum(given))
    cuts = [flat] if peer == "gloo" else list(flat.split(BUCKET_BYTES // 4))

    def once() -> None:
        for one in [dist.all_reduce(cut, async_op=True) for cut in cuts]:
            one.wait()
        # As long as it is a sum of ones it stays finite.
        flat.fill_(1.0) if not bool(torch.isfinite(flat[0])) else None

    told = timed(rounds, once, lambda: 0.0)
    dist.destroy_process_group()
    return told


# --- in the parent ---------------------------------------------------------------------------


def crew(peer: str, tensors: str, workers: int, at: str, rounds: int, about: Told) -> list[Told]:
    """Run a process for each worker, and return what they tell.

    Raises:
        SystemExit: one of them has failed.
    """
    environment = {**os.environ, "WORLD_SIZE": str(workers), **about}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [
                        sys.executable,
                        __file__,
                        "--worker",
                        peer,
                        tensors,
                        str(rank),
                        at,
                        str(rounds),
                    ],
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )
            for rank in range(workers)
        ]
        stack.callback(lambda: [one.kill() for one in started])
        said = [one.communicate(timeout=PATIENCE_S)[0] for one in started]
        if any(one.returncode for one in started):
            raise SystemExit(f"{peer}: a worker has failed")
    return [json.loads(one.splitlines()[-1]) for one in said]


def one_run(peer: str, tensors: str, workers: int, servers: int, rounds: int) -> list[Told]:
    """Return what each worker tells of one system."""
    if peer.startswith(BASELINE):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            at = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        return crew(peer, tensors, workers, at, rounds, {})
    with zkv.local(servers=servers, policy="bsp", optimizer="sgd:lr=0.1") as cluster:
        broker = {"BROKER_PID": str(cluster.processes[0].pid)}
        return crew(peer, tensors, workers, cluster.address, rounds, broker)


def row(
    peer: str, tensors: str, workers: int, servers: int, runs: Sequence[list[Told]]
) -> dict[str, Any]:
    """Return a row of the table: a round takes as long as its slowest worker."""
    took_ms = [
        max(of_round) for run in runs for of_round in zip(*(one["ms"] for one in run), strict=True)
    ]
    gigabytes = 4e-9 * sum(sizes(tensors)) * workers * len(runs[0][0]["ms"])
    cpu_s = statistics.median(sum(one["cpu_s"] for one in run) for run in runs)
    return {
        "system": "zkv" if peer in ("memory", "tcp") else peer,
        "transport": peer if peer in ("memory", "tcp") else "tcp",
        "set": tensors,
        "workers": workers,
        "servers": 0 if peer.startswith(BASELINE) else servers,
        "median_ms": round(statistics.median(took_ms), 2),
        "min_ms": round(min(took_ms), 2),
        "max_ms": round(max(took_ms), 2),
        "cpu_s_per_gb": round(cpu_s / gigabytes, 3),
    }


def table(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows, those of one set and number of workers together."""
    for tensors in asked.sets:
        for workers in asked.workers:
            cases = [(peer, n) for peer in asked.peers for n in asked.servers]
            cases = [case for case in cases if not case[0].startswith(BASELINE)] + [
                (peer, 0) for peer in asked.peers if peer.startswith(BASELINE)
            ]
            runs: dict[tuple[str, int], list[list[Told]]] = {case: [] for case in cases}
            for _ in range(asked.repeat):
                for peer, servers in cases:
                    told = one_run(peer, tensors, workers, servers, asked.rounds)
                    runs[peer, servers].append(told)
            rows = [row(peer, tensors, workers, n, runs[peer, n]) for peer, n in cases]
            gloo = next((one["median_ms"] for one in rows if one["system"] == BASELINE), None)
            for one in rows:
                yield one | {"to_gloo": round(one["median_ms"] / gloo, 3) if gloo else None}


PEERS: dict[str, Callable[[str, Sequence[int], int, str, int], Told]] = {
    "memory": zkv_worker,
    "tcp": zkv_worker,
    "gloo": gloo_worker,
    "gloo-buckets": gloo_worker,
}
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
}


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what is asked for.

    Raises:
        SystemExit: wrong use.
    """
    parser = argparse.ArgumentParser(prog="scripts/bench_peers")

    def names(of: Sequence[str]) -> Callable[[str], list[str]]:
        def taken(text: str) -> list[str]:
            given = text.split(",")
            if unknown := sorted(set(given) - set(of)):
                parser.error(f"{', '.join(unknown)}: choose of {', '.join(of)}")
            return given

        return taken

    def numbers(text: str) -> list[int]:
        return [int(one) for one in text.split(",") if int(one) > 0] or [1]

    parser.add_argument("--peers", type=names(list(PEERS)), default=list(PEERS))
    parser.add_argument("--sets", type=names(SETS), default=list(SETS))
    parser.add_argument("--workers", type=numbers, default=[1, 2, 4])
    parser.add_argument("--servers", type=numbers, default=[1])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.rounds < 1 or asked.repeat < 1:
        parser.error("--rounds and --repeat are at least 1")
    return asked


def installed(asked: argparse.Namespace) -> None:
    """Leave out what cannot be run here, and say so."""
    if importlib.util.find_spec("torch") is None:
        gone = [peer for peer in asked.peers if peer.startswith(BASELINE)]
        asked.peers = [peer for peer in asked.peers if peer not in gone]
        without = [*gone, *(["the set resnet50"] if "resnet50" in asked.sets else [])]
        asked.sets = [name for name in asked.sets if name != "resnet50"]
        if without:
            print(f"left out, as PyTorch is not installed: {', '.join(without)}", file=sys.stderr)


def main() -> int:
    """Measure, and print it; or be one worker."""
    if sys.argv[1:2] == ["--worker"]:
        peer, tensors, rank, at, rounds = sys.argv[2:]
        print(json.dumps(PEERS[peer](peer, sizes(tensors), int(rank), at, int(rounds))))
        return 0
    asked = parsed(sys.argv[1:])
    installed(asked)
    rows = []
    if not asked.json:
        print(" ".join(f"{name:>{wide}}" for name, wide in COLUMNS.items()))
    for one in table(asked):
        rows.append(one)
        if not asked.json:
            cells = [f"{one[name]!s:>{wide}}" for name, wide in COLUMNS.items()]
            print(" ".join(cells), flush=True)
    if asked.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
