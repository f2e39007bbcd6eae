"""Times the seven policies on the digits, live and simulated (`scripts/bench_policies --help`).

It runs in two roles. Started by hand it is the driver: it starts `zkv run` for each policy and
seed, and `zkv simulate` once, and prints the table. As the worker of such a run (`ZKV_BENCH` names
the folder of results) it runs `digits.py` unchanged, with a `zkv.connect` that stretches each batch
to a set time, looks at the accuracy of each version that its worker is granted, and ends the run
once the target is reached.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import zkv
from zkv_cli.digits_model import Digits

FOLDER = Path(__file__).resolve().parent
POLICIES = ("bsp", "asp", "ssp:1", "k-bsp:2", "k-batch-bsp:2", "k-asp:2", "k-batch-asp:2")
WORKERS = 3
LAST_KEY = "b1"
"""What `digits.py` pushes last: until then the batch is stretched."""
OPTIMIZER = "adam:lr=0.003"
RUN_TIMEOUT_S = 180.0
SLICE_S = 0.001


class Pace:
    """What all batches of one worker share: how long they take, and what has been seen.

    Every rank looks at the versions that it is granted, since under most policies each goes to
    somebody. Times are of the machine's monotonic clock, which its processes share.
    """

    def __init__(self, rank: int, seed: int) -> None:
        self.folder = Path(os.environ["ZKV_BENCH"])
        self.rank = rank
        self.batch_s = float(os.environ["ZKV_BENCH_BATCH_S"])
        if rank == WORKERS - 1:
            self.batch_s *= float(os.environ["ZKV_BENCH_FACTOR"])
        self.target = float(os.environ["ZKV_BENCH_TARGET"])
        self.learner = Digits(workers=WORKERS, seed=seed)
        self.began_s = 0.0

    @property
    def done(self) -> bool:
        """Whether somebody has reached the target."""
        return any(self.folder.glob("reached-*.json"))

    def look(self, version: int, model: dict[Any, Any]) -> None:
        """Note when this worker began, and when the target is reached."""
        now_s = time.monotonic()
        self.began_s = self.began_s or now_s
        accuracy = self.learner.accuracy(model)
        if accuracy >= self.target and not self.done:
            plain = {"at_s": now_s, "began_s": self.began_s, "updates": version}
            partial = self.folder / f"reached-{self.rank}.part"
            partial.write_text(json.dumps(plain))
            partial.rename(partial.with_suffix(".json"))


class PacedBatch:
    """A batch that takes as long as its worker's pace says, unless it is cancelled."""

    def __init__(self, batch: Any, pace: Pace) -> None:
        self._batch = batch
        self._pace = pace
        self._begun = 0.0

    def __enter__(self) -> PacedBatch:
        self._batch.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool:
        return bool(self._batch.__exit__(*error))

    @property
    def params(self) -> dict[Any, Any]:
        """The model; its arrival is the batch's beginning."""
        model: dict[Any, Any] = self._batch.params
        self._begun = time.monotonic()
        self._pace.look(self._batch.version, model)
        return model

    def push(self, key: str, gradient: Any) -> None:
        """Push; the last one of a batch waits for the pace."""
        if key == LAST_KEY:
            end = self._begun + self._pace.batch_s
            while not self._batch.cancelled and (left := end - time.monotonic()) > 0:
                time.sleep(min(left, SLICE_S))
        self._batch.push(key, gradient)


class PacedWorker:
    """A worker whose batches are paced, and which ends once the target is reached."""

    def __init__(self, worker: Any, seed: int) -> None:
        self._worker = worker
        self._seed = seed

    def __enter__(self) -> PacedWorker:
        self._worker.__enter__()
        self._pace = Pace(self._worker.rank, self._seed)
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._worker.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def batch(self, **options: Any) -> PacedBatch:
        """Return the next batch; ends the program when there is no need for one."""
        if self._pace.done:
            raise SystemExit(0)
        return PacedBatch(self._worker.batch(**options), self._pace)


def work(arguments: list[str]) -> None:
    """Run `digits.py` as a paced worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_known_args(arguments)[0].seed
    connect = zkv.connect
    zkv.connect = lambda: PacedWorker(connect(), seed)
    sys.argv = [str(FOLDER / "digits.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def live(policy: str, seed: int, asked: argparse.Namespace) -> dict[str, Any] | None:
    """Run once; returns when the target was reached (seconds, updates), None if it was not."""
    with tempfile.TemporaryDirectory(prefix="zkv-bench-") as folder:
        command = [sys.executable, "-m", "zkv_cli", "run", "-n", str(WORKERS), "--policy", policy]
        command += ["--optimizer", OPTIMIZER, __file__, "--seed", str(seed)]
        variables = {
            "ZKV_BENCH": folder,
            "ZKV_BENCH_BATCH_S": str(asked.batch_s),
            "ZKV_BENCH_FACTOR": str(asked.factor),
            "ZKV_BENCH_TARGET": str(asked.target),
        }
        subprocess.run(
            command,
            env={**os.environ, **variables},
            stdout=subprocess.DEVNULL,
            timeout=RUN_TIMEOUT_S,
            check=True,
        )
        found = [json.loads(file.read_text()) for file in Path(folder).glob("reached-*.json")]
    if not found:
        return None
    first = min(found, key=lambda one: one["at_s"])
    # All ranks begin with the same grant, when the last of them is there.
    return {"time_s": first["at_s"] - first["began_s"], "updates": first["updates"]}


def simulated(asked: argparse.Namespace) -> dict[str, Any]:
    """Simulate all policies; returns `time_to_target` by policy."""
    slow = f"{asked.batch_s * asked.factor:g}"
    compute = ",".join([f"{asked.batch_s:g}"] * (WORKERS - 1) + [slow])
    command = [sys.executable, "-m", "zkv_cli", "simulate", "--compute", compute, "--json"]
    command += ["--train", "digits", "--target", str(asked.target), "--seeds", str(asked.seeds)]
    command += ["--optimizer", OPTIMIZER]
    for policy in asked.policy:
        command += ["--policy", policy]
    print(f"simulated: zkv {' '.join(command[3:])}", file=sys.stderr, flush=True)
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {run["policy"]: run["time_to_target"] for run in json.loads(out)["policies"]}


def figures(times: list[float], updates: list[float], seeds: int) -> str:
    """Two cells of the table: seconds with their spread, and updates."""
    if not times:
        return "not reached | "
    std = statistics.stdev(times) if len(times) > 1 else 0.0
    some = "" if len(times) == seeds else f" ({len(times)} of {seeds})"
    return f"{statistics.fmean(times):.2f} ± {std:.2f}{some} | {statistics.fmean(updates):.0f}"


def load() -> str:
    """How busy the machine is: runnable processes over the last minute, where that is known."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def main() -> None:
    """Print the table, and the machine's load before and after."""
    parser = argparse.ArgumentParser(prog="scripts/bench_policies")
    parser.add_argument("--target", type=float, default=0.97)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch-s", type=float, default=0.03)
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--policy", action="append")
    asked = parser.parse_args()
    asked.policy = asked.policy or list(POLICIES)
    before = load()
    alone = simulated(asked)
    print("| policy | live, s | updates | simulated, s | updates |")
    print("|---|---|---|---|---|", flush=True)
    for policy in asked.policy:
        runs = [live(policy, seed, asked) for seed in range(asked.seeds)]
        found = [run for run in runs if run is not None]
        cells = figures(
            [run["time_s"] for run in found], [run["updates"] for run in found], asked.seeds
        )
        told = alone[policy]
        reached = [one for one in told["times"] if one is not None]
        virtual = figures(reached, [told["updates_mean"]] if reached else [], asked.seeds)
        print(f"| {policy} | {cells} | {virtual} |", flush=True)
    print(f"\nload average (1 min): {before} before, {load()} after; {os.cpu_count()} cores")


if __name__ == "__main__":
    try:
        work(sys.argv[1:]) if "ZKV_BENCH" in os.environ else main()
    except subprocess.SubprocessError as failed:
        sys.exit(f"scripts/bench_policies: error: {failed}")
