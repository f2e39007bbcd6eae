"""Break a cluster of real processes on purpose, and look whether it keeps its promises.

    python tests/nemesis.py --policy asp --seconds 8 --seed 7

A broker, two servers and four workers run on machines of their own (network namespaces). Calm,
then faults drawn from the seed, then calm again: contributions must flow before and after, and in
the end the model counts each one as its worker was told. Prints a report; its exit code is 1 if
something is wrong, 3 if the run proves nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from nemesis_acts import Acts
from nemesis_broken import PROGRAM as BROKEN
from nemesis_broken import RULES
from nemesis_checks import (
    beyond_slack,
    committed_after,
    contradictions,
    outcomes,
    rate,
    wrong_counts,
)
from nemesis_cluster import Cluster, Settings
from nemesis_faults import BROKER, CUTS_LEAST, KILLS_LEAST, Fault, Layout, plan
from nemesis_places import places

POLICIES = (
    *("bsp", "asp", "ssp:2", "k-bsp:2", "k-batch-bsp:3", "k-asp:2"),
    "k-batch-asp:3",
)
FLOW_LEAST = 200.0
"""Contributions a second, before and after: a run that idles proves nothing."""
CALM_PATIENCE_S = 15.0
FLOW_COUNT = 240
"""Contributions over which that is measured."""
PROGRESS_S = 15.0
DISK_BYTES = 24 * 1024 * 1024
FDS_MORE, KIB_MORE = 24, 128 * 1024
"""By how much a process may have more of them after the faults than before."""
SHM = Path("/dev/shm")
READS = """
import json, sys
import zkv
with zkv.connect(sys.argv[1], observer=True, insecure=True) as worker:
    worker.init({key: __import__("numpy").zeros(int(sys.argv[2]), "float32") for key in "ab"},
                reduce="sum", rule="sgd:lr=1")
    model = worker.pull(["a", "b"])
    print(json.dumps([model[key].tolist() for key in ("a", "b")]))
"""


@dataclass
class Report:
    """What a run has found. `wrong`: promises broken; `idle`: why it proves nothing."""

    policy: str
    seed: int
    seconds: float
    wrong: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def code(self) -> int:
        return 1 if self.wrong else 3 if self.idle else 0

    def __str__(self) -> str:
        replay = f"--policy {self.policy} --seconds {self.seconds:g} --seed {self.seed}"
        verdict = {0: "nothing wrong", 1: "WRONG", 3: "proves nothing"}[self.code]
        lines = [f"{self.policy}, seed {self.seed}: {verdict}"]
        lines += [f"  {name}: {value}" for name, value in self.figures.items()]
        lines += [f"  wrong: {one}" for one in self.wrong[:30]]
        lines += [f"  idle: {one}" for one in self.idle]
        if self.code:
            lines.append(f"  again: python tests/nemesis.py {replay}")
        return "\n".join(lines)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a disk of a few megabytes there, for this process and those that it starts."""
    folder.mkdir()
    words = ("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder))
    subprocess.run(words, check=True)
    try:
        yield
    finally:
        # Who writes there may end a moment later than its socket closes.
        subprocess.run(("umount", "--lazy", str(folder)), check=True)


def own_mounts() -> None:
    """From here on what is mounted is seen by this process and its children alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private_all = 0x00020000, 0x40000 | 0x4000
    if libc.unshare(new_mounts) or libc.mount(None, b"/", None, private_all, None):
        raise OSError(ctypes.get_errno(), "mounts of its own")


class Run:
    """One run: calm, faults, calm, and the verdict."""

    def __init__(self, cluster: Cluster, report: Report) -> None:
        self.cluster, self.report = cluster, report

    def whole(self, faults: list[Fault]) -> None:
        """Do all of it."""
        cluster, figures = self.cluster, self.report.figures
        cluster.begin()
        self._flows("before")
        before = self._resources()
        acts = Acts(cluster)
        began = time.monotonic()
        acts.run(faults, self.report.seconds)
        healed = time.monotonic()
        figures["faults"] = dict(acts.done) | {"in_s": round(healed - began, 1)}
        figures["during_per_s"] = round(rate(began, healed, cluster.histories))
        figures["drains_s"] = [round(one, 2) for one in acts.drains_s]
        self._progress(healed)
        self._flows("after")
        self._compare(before, self._resources())
        for name in cluster.layout.workers:
            took = cluster.stop_worker(name)
            if took is not None:
                figures.setdefault("stops_s", []).append(round(took, 2))
        self._judge()
        for name, least in (("kills", KILLS_LEAST), ("cuts", CUTS_LEAST)):
            if acts.done[name] < least and faults:
                self.report.idle.append(f"{acts.done[name]} {name}, at least {least} are wanted")

    def _flows(self, when: str) -> None:
        """Wait until enough contributions flow."""
        cluster, flow = self.cluster, 0.0
        deadline = time.monotonic() + CALM_PATIENCE_S
        while flow < FLOW_LEAST and time.monotonic() < deadline:
            began, had = time.monotonic(), cluster.settled
            try:
                ended = cluster.wait_for(
                    lambda enough=had + FLOW_COUNT: cluster.settled >= enough, "flow", 3.0
                )
            except TimeoutError:
                ended = time.monotonic()
            flow = max(flow, (cluster.settled - had) / (ended - began))
        self.report.figures[f"{when}_per_s"] = round(flow)
        if flow < FLOW_LEAST:
            self.report.idle.append(
                f"{flow:.0f} contributions a second {when} the faults, at least {FLOW_LEAST:g}"
            )

    def _progress(self, healed: float) -> None:
        cluster = self.cluster
        try:
            cluster.wait_for(
                lambda: None not in committed_after(healed, cluster.histories).values(),
                "each worker to commit after the faults",
                PROGRESS_S,
            )
        except TimeoutError as error:
            self.report.wrong.append(str(error))
        took = committed_after(healed, cluster.histories)
        self.report.figures["progress_s"] = {
            rank: None if one is None else round(one, 2) for rank, one in took.items()
        }

    def _resources(self) -> dict[str, tuple[int, int]]:
        layout = self.cluster.layout
        return {name: self.cluster.processes[name].figures() for name in (BROKER, *layout.servers)}

    def _compare(
        self, before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]
    ) -> None:
        self.report.figures["fds, MiB"] = {
            name: [f"{fds}>{after[name][0]}", f"{kib // 1024}>{after[name][1] // 1024}"]
            for name, (fds, kib) in before.items()
        }
        for name, (fds, kib) in before.items():
            now_fds, now_kib = after[name]
            if now_fds > fds + FDS_MORE:
                self.report.wrong.append(f"{name} had {fds} descriptors and has {now_fds}")
            if now_kib > kib + KIB_MORE:
                self.report.wrong.append(f"{name} had {kib} KiB and has {now_kib}")

    def _judge(self) -> None:
        report, cluster = self.report, self.cluster
        model = self._model()
        histories = cluster.histories
        for history in histories.values():
            # What a dead process had said is read at leisure.
            history.sort(key=lambda one: one.at)
        report.figures["outcomes"] = outcomes(histories)
        for rank, history in histories.items():
            report.wrong += contradictions(rank, history)
            for key, values in model.items():
                report.wrong += [f"{key}: {one}" for one in wrong_counts(rank, history, values)]
        name, _, number = report.policy.partition(":")
        if name == "ssp":
            report.wrong += beyond_slack(int(number), histories)

    def _model(self) -> dict[str, Any]:
        cluster = self.cluster
        words = (sys.executable, "-c", READS, cluster.address, str(cluster.settings.size))
        place = cluster.places.machines[cluster.layout.workers[-1]]
        done = subprocess.run(
            place.command(*words), capture_output=True, text=True, timeout=30, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the model cannot be read: {done.stderr[-2000:]}")
        a, b = json.loads(done.stdout)
        return {"a": np.asarray(a, np.float32), "b": np.asarray(b, np.float32)}


def nemesis(
    policy: str, seed: int, seconds: float, layout: Layout, *, cut_s: float = 0.0, **more: Any
) -> Report:
    """Run once, and return what was found. `more`: of `Settings`."""
    report = Report(policy, seed, seconds)
    faults = plan(seed, seconds, layout, cut_s=cut_s)
    with tempfile.TemporaryDirectory(prefix="zkv-nemesis-") as name:
        folder = Path(name)
        with small_disk(folder / "disk"), places(layout.everybody, layout.lossy, seed) as made:
            settings = Settings(policy, folder, **more)
            size = int(settings.rate * (seconds + CALM_PATIENCE_S))
            cluster = Cluster(replace(settings, size=max(settings.size, size)), layout, made)
            try:
                Run(cluster, report).whole(faults)
                cluster.end()
            except (TimeoutError, RuntimeError, OSError) as error:
                report.wrong.append(f"{type(error).__name__}: {error}")
            finally:
                cluster.kill_all()
            report.wrong += cluster.strange
            report.wrong += _left_behind(cluster)
            report.wrong += _tracebacks(folder)
    return report


def _tracebacks(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.glob("*.log")):
        text = path.read_text(errors="replace")
        if "Traceback (most recent call last)" in text:
            at = text.index("Traceback (most recent call last)")
            found.append(f"{path.stem} has said:\n{text[at : at + 2500]}")
    return found


def _left_behind(cluster: Cluster) -> list[str]:
    """Return what is left in shared memory of this run's processes."""
    pids = {str(process.pid) for process in cluster.processes.values()}
    left = [
        path.name for path in SHM.iterdir() if pids & set(path.name.replace("-", "_").split("_"))
    ]
    return [f"left in {SHM}: {name}" for name in left]


def layout_of(servers: int, workers: int, *, servers_die: bool = False) -> Layout:
    """Return who there is: two workers are on wires that lose frames. (A server's would carry so
    much that the relay took the time of who is tested.)"""
    names = tuple(f"server{at}" for at in range(servers))
    ranks = tuple(f"worker{at}" for at in range(workers))
    return Layout(names, ranks, ranks[:2], servers_die)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", choices=POLICIES, default="asp")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--seconds", type=float, default=8.0, help="of faults")
    parser.add_argument("--partition", type=float, default=0.0, help="seconds of one longer cut")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kill-servers", action="store_true", help="kill and restart servers too")
    parser.add_argument("--broker-option", action="append", default=[], help="one more word")
    parser.add_argument("--break", dest="rule", choices=RULES, help="remove a rule of zkv first")
    parser.add_argument("--plan", action="store_true", help="print the faults, and do nothing")
    asked = parser.parse_args(arguments)
    layout = layout_of(asked.servers, asked.workers, servers_die=asked.kill_servers)
    print(f"seed {asked.seed}", flush=True)
    if asked.plan:
        for fault in plan(asked.seed, asked.seconds, layout, cut_s=asked.partition):
            print(fault)
        return 0
    own_mounts()
    broken: dict[str, Any] = {}
    if asked.rule:
        broken = {"main": (BROKEN, asked.rule), "worker": (BROKEN, asked.rule, "worker")}
    report = nemesis(
        asked.policy,
        asked.seed,
        asked.seconds,
        layout,
        cut_s=asked.partition,
        extra=tuple(asked.broker_option),
        **broken,
    )
    print(report)
    return report.code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
