"""Times overlap of computing and sending on slow links (`scripts/bench_overlap --help`).

Each process has a network namespace of its own, whose one card is limited both ways; the namespaces
have no names and end with this process. Computing is a timed wait, as on a GPU: real computing
would compete for the cores with what is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from machines import ADDRESS, Machine, NoNamespace, network

LAYERS, ENTRIES = 20, 131_072
"""512 KiB of float32 in each layer: a block of its own."""
WORKERS, SERVERS = 2, 2
WIDTH, SAMPLES = 362, 768
"""Of the PyTorch model's layers, which have as many entries, and of its batches."""
FORWARD = 1 / 3
"""Of the time to compute; the rest is backward."""
SHARES = ((60, 40), (40, 60), (50, 50), (90, 10))
"""Computing to communication, in per cent."""
MODES = {
    "overlap": {},
    "fifo": {"ZKV_FIFO": "1"},
    "serial": {},
    "prefetch": {"ZKV_PREFETCH": "1"},
    "torch-overlap": {},
    "torch-serial": {},
}
"""Ways to send, and the variables that tell processes of them."""
WARM = 2
ZKV = [sys.executable, "-m", "zkv_cli"]
PATIENCE_S = 300


# --- one worker ----------------------------------------------------------------------------------


def train(mode: str, compute_s: float, batches: int) -> list[float]:
    """Return the seconds from each batch's begin to the next one's, of one worker."""
    import numpy as np

    import zkv

    keys = [f"layer{at:02}" for at in range(LAYERS)]
    gradient = np.ones(ENTRIES, np.float32)
    forward_s, backward_s = compute_s * FORWARD / LAYERS, compute_s * (1 - FORWARD) / LAYERS
    begun: list[float] = []
    with zkv.connect() as worker:
        worker.init({key: np.zeros(ENTRIES, np.float32) for key in keys})
        for _ in range(batches + WARM + 1):
            with worker.batch() as batch:
                begun.append(time.perf_counter())
                if mode == "serial":
                    _ = batch.params
                for key in keys:
                    _ = batch[key]
                    time.sleep(forward_s)
                for key in reversed(keys):
                    time.sleep(backward_s)
                    if mode != "serial":
                        batch.push(key, gradient)
                if mode == "serial":
                    for key in reversed(keys):
                        batch.push(key, gradient)
            if mode == "serial":
                batch.wait()
    return [after - before for before, after in itertools.pairwise(begun)][WARM:]


def train_torch(mode: str, batches: int) -> list[float]:
    """Return what `train` does, of a PyTorch model that computes on one core."""
    import torch

    import zkv
    from zkv.torch import attach

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers: list[Any] = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers)
    samples = torch.randn(SAMPLES, WIDTH)
    overlaps = mode != "torch-serial"
    begun: list[float] = []
    with zkv.connect() as worker:
        optimizer = attach(model, worker, overlap=overlaps, early=overlaps)
        for _ in range(batches + WARM + 1):
            begun.append(time.perf_counter())
            model(samples).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if not overlaps:
                optimizer.last.wait()
    return [after - before for before, after in itertools.pairwise(begun)][WARM:]


def run(places: list[Machine], mode: str, compute_s: float, batches: int) -> float:
    """Return the mean seconds of a batch over the workers of one run."""
    options = ("--servers", str(SERVERS), "--workers", str(WORKERS), "--optimizer", "sgd:lr=0.1")
    with ExitStack() as stack:
        broker = stack.enter_context(role(places, 0, mode, "broker", *options))
        for at in range(SERVERS):
            stack.enter_context(role(places, at, mode, "server", "--broker", broker))
        workers = [
            subprocess.Popen(
                places[SERVERS + rank].command(
                    sys.executable, __file__, "--worker", mode, repr(compute_s), str(batches)
                ),
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **MODES[mode], "ZKV_BROKER": broker, "RANK": str(rank),
                     "WORLD_SIZE": str(WORKERS), "ZKV_INSECURE": "1"},
            )
            for rank in range(WORKERS)
        ]  # fmt: skip
        told = [worker.communicate(timeout=PATIENCE_S)[0] for worker in workers]
    times = [json.loads(text) for text in told]
    return sum(map(sum, times)) / sum(map(len, times))


@contextmanager
def role(places: list[Machine], at: int, mode: str, *arguments: str) -> Iterator[str]:
    """Run a command of `zkv` at a place; yield the address that it announces."""
    own = ("--bind", f"tcp://{ADDRESS.format(at + 1)}:0", "--insecure", "--log-level", "warning")
    process = subprocess.Popen(
        places[at].command(*ZKV, *arguments, *own),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **MODES[mode], "ZKV_LIFELINE": "stdin", "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            found = re.search(r"(?:broker|server) at (tcp://\S+)", line)
            if found:
                yield found[1]
                break
        else:
            raise SystemExit(f"zkv {arguments[0]} did not start")
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


# --- the table -----------------------------------------------------------------------------------


def measure(
    mbit: float, batches: int, shares: Sequence[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each share of computing and each mode."""
    hosts = SERVERS + WORKERS
    with network(hosts, mbit) as slow, network(hosts, 0) as instant:
        comm_s = run(slow, "overlap", 0.0, batches)
        for compute, communication in shares:
            wanted_s = comm_s * compute / communication
            compute_s = run(instant, "overlap", wanted_s, batches)
            for mode in ("overlap", "fifo", "serial", "prefetch"):
                batch_s = run(slow, mode, wanted_s, batches)
                yield row(f"{compute}:{communication}", mode, compute_s, comm_s, batch_s)
        if importlib.util.find_spec("torch") is None:
            print("no row with PyTorch, which is not installed", file=sys.stderr)
            return
        compute_s = run(instant, "torch-overlap", 0.0, batches)
        for mode in ("overlap", "serial"):
            batch_s = run(slow, f"torch-{mode}", 0.0, batches)
            yield row("torch", mode, compute_s, comm_s, batch_s)


def row(share: str, mode: str, compute_s: float, comm_s: float, batch_s: float) -> dict[str, Any]:
    """Return a row of the table."""
    return {
        "share": share,
        "compute_ms": round(1e3 * compute_s, 1),
        "comm_ms": round(1e3 * comm_s, 1),
        "mode": mode,
        "batch_ms": round(1e3 * batch_s, 1),
        "ideal_ms": round(1e3 * max(compute_s, comm_s), 1),
    }


def share(text: str) -> tuple[int, int]:
    """Read computing to communication, as in 60:40."""
    compute, communication = map(int, text.split(":"))
    return compute, communication


def main() -> None:
    """Measure, and print it."""
    if sys.argv[1:2] == ["--worker"]:
        mode, compute_s, batches = sys.argv[2:]
        if mode.startswith("torch"):
            print(json.dumps(train_torch(mode, int(batches))))
        else:
            print(json.dumps(train(mode, float(compute_s), int(batches))))
        return
    parser = argparse.ArgumentParser(prog="scripts/bench_overlap")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mbit", type=float, default=400.0)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--share", action="append", type=share, metavar="COMPUTE:COMM")
    asked = parser.parse_args()
    rows = []
    columns = ("share", "mode", "compute_ms", "comm_ms", "batch_ms", "ideal_ms")
    if not asked.json:
        print("  ".join(f"{column:>10}" for column in columns), " to ideal", flush=True)
    try:
        for one in measure(asked.mbit, asked.batches, asked.share or SHARES):
            rows.append(one)
            if not asked.json:
                ratio = one["batch_ms"] / one["ideal_ms"]
                cells = "  ".join(f"{one[column]!s:>10}" for column in columns)
                print(f"{cells}  {ratio:8.2f}", flush=True)
    except NoNamespace as error:
        raise SystemExit(str(error)) from error
    if asked.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
