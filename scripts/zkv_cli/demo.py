"""The main job: a cluster of processes on this machine that trains `scripts/digits.py`.

`scripts/demo` makes the environment and starts this. It starts a broker, servers and workers,
watches them until the workers end, and tells what happened, or who failed. It must not know what
the workers compute: they are a program, and their reports are files.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from zkv.errors import ConfigError, ZkvError
from zkv_cli import cluster as c
from zkv_cli import guard, settings
from zkv_cli.ask import ask_status
from zkv_cli.children import Child, Children, Ended, Line, Signalled
from zkv_cli.exits import SIGNAL_BASE, CommandFailed, reporting, say
from zkv_cli.launch import Job, environment, for_job, runnable
from zkv_cli.report import RunReport, run_report, text, to_plain, write_plot

SCRIPT = Path(__file__).resolve().parent.parent / "digits.py"
NEEDED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}
WORKER_GRACE_S = 1.0
"""What workers get to end in good order once they are told to."""
STATUS_TIMEOUT_S = 5.0
LOST_TIMEOUT_S = 1.0
TABLE_COLUMNS = 100


class Route(StrEnum):
    """How data travels between workers and servers."""

    direct = "direct"
    broker = "broker"


@dataclass(frozen=True, slots=True)
class Run:
    """What is run: the cluster, and the worker's program with its seed."""

    policy: str = "bsp"
    optimizer: str = "adam:lr=0.003"
    workers: int = 3
    servers: int = 2
    route: str = "direct"
    seed: int = 0
    codec: str = "none"
    script: Path = SCRIPT

    def settings(self) -> settings.Settings:
        """Return the cluster's settings; raises ConfigError that lists all mistakes."""
        flags = {
            ("broker", "policy"): self.policy,
            ("broker", "optimizer"): self.optimizer,
            ("broker", "codec"): self.codec,
            ("broker", "servers"): self.servers,
            ("broker", "bind"): "tcp://127.0.0.1:0",
            ("broker", "workers"): self.workers,
            ("log", "level"): "error",
        }
        return settings.load(flags)


DEFAULT = Run()


def train(run: Run) -> RunReport:
    """Run the whole job and return what happened; all its processes have ended by then.

    The wall time, in seconds, is from the start of the broker to the end of the last worker.

    Raises:
        ConfigError: a setting is wrong, or the worker's program is not there.
        CommandFailed: somebody failed, who is named, or a signal asked to stop.
    """
    with tempfile.TemporaryDirectory(prefix="zkv-demo-") as folder:
        reports = Path(folder)
        program = (str(run.script), "--seed", str(run.seed))
        job = Job(program, run.workers, 0, run.workers, reports)
        figures = _processes(run, job)
        found = [json.loads(file.read_text("utf-8")) for file in reports.glob("worker-*.json")]
        try:
            return run_report(figures, found)
        except ValueError as error:
            raise CommandFailed(str(error)) from error


def _processes(run: Run, job: Job) -> dict[str, Any]:
    """Run the job's processes and return the figures of the run as a whole."""
    command = runnable(job.command)
    wanted = for_job(run.settings(), job)
    events: c.Events = queue.SimpleQueue()
    children = Children(events.put)
    c.signals_to(events, children)
    began = time.monotonic()
    cluster = None
    try:
        cluster = c.start(children, events, wanted)
        status = ask_status(cluster.address, STATUS_TIMEOUT_S)
        for line in introduction(run, cluster, status):
            say(line, error=True)
        workers = [
            children.start(
                f"worker {rank}",
                [sys.executable, "-S", "-E", guard.__file__, *command],
                {**environment(job, rank, cluster.address), "ZKV_ROUTE": run.route},
            )
            for rank in range(job.count)
        ]
        names = server_names(cluster, status)
        _Watch(events, children, workers, cluster, names, wanted).until_done()
        wall_s = time.monotonic() - began
        status = ask_status(cluster.address, STATUS_TIMEOUT_S)
    finally:
        c.stop(children, cluster)
    return {
        "policy": status["policy"],
        "servers": run.servers,
        "workers": run.workers,
        "updates": status["version"],
        "wall_s": round(wall_s, 3),
        "route": run.route,
    }


def introduction(run: Run, cluster: c.Cluster, status: Mapping[str, Any]) -> list[str]:
    """Return who is there, for a person who watches, or who wants to stop one of them."""
    lines = [f"zkv demo: broker at {cluster.address} (pid {cluster.broker.pid})"]
    lines += [
        f"zkv demo: server {server['index']} at {server['address']} (pid {server['pid']})"
        for server in status["servers"]
    ]
    return [
        *lines,
        f"zkv demo: training with {run.workers} worker{'s' if run.workers > 1 else ''}, "
        f"policy {status['policy']}, optimizer {status['optimizer']}, route {run.route}",
    ]


def server_names(cluster: c.Cluster, status: Mapping[str, Any]) -> dict[int, str]:
    """Return what to call each server when it has failed, by its pid: index, name and address."""
    known = {server["index"]: server for server in status["servers"]}
    return {
        child.pid: f"server {index} ({known[index]['name']} at {known[index]['address']})"
        for index, child in enumerate(cluster.servers)
        if index in known
    }


@dataclass(slots=True)
class _Watch:
    """Waits for the workers' end; once somebody fails, the others may still say what they saw."""

    events: c.Events
    children: Children
    workers: Sequence[Child]
    cluster: c.Cluster
    names: Mapping[int, str]
    settings: settings.Settings
    failure: str = ""
    deadline: float | None = None
    running: set[int] = field(default_factory=set)

    def until_done(self) -> None:
        """Return once all workers have succeeded.

        Raises:
            CommandFailed: a process failed, or a signal came; no worker runs any more.
        """
        self.running = {worker.pid for worker in self.workers}
        while self.running:
            try:
                left = None if self.deadline is None else self.deadline - time.monotonic()
                event = self.events.get(timeout=None if left is None else max(0.0, left))
            except queue.Empty:
                break
            match event:
                case Line():
                    # Standard output is for the result alone.
                    c.forward(event)
                case Signalled(number):
                    self.children.stop(self.workers, WORKER_GRACE_S, number)
                    name = signal.Signals(number).name
                    raise CommandFailed(f"ended by {name}", SIGNAL_BASE + number)
                case Ended(child):
                    self._ended(child)
        if self.failure:
            self.children.stop(self.workers, WORKER_GRACE_S)
            raise CommandFailed(self.failure)

    def _ended(self, child: Child) -> None:
        worker = child.pid in self.running
        self.running.discard(child.pid)
        if self.failure or (worker and child.code == 0):
            return
        child.label = self.names.get(child.pid, child.label)
        self.failure = self._lost() or child.obituary()
        grace_s = self.settings.run.grace_s
        if child in self.cluster.servers:
            # The broker notices by its silence, and tells the workers, who can say what they lost.
            grace_s += self.settings.broker.server_lost_s
        self.deadline = time.monotonic() + grace_s
        say(f"zkv demo: {self.failure}", error=True)

    def _lost(self) -> str:
        """Return whom the broker misses: whoever ended first may only have been told of it."""
        if self.cluster.broker.gone:
            return ""
        try:
            return str(ask_status(self.cluster.address, LOST_TIMEOUT_S)["failed"] or "")
        except ZkvError:
            return ""


def check(run: Run, plot: Path | None) -> None:
    """Find what would fail only after the training.

    Raises:
        ConfigError: a package or the worker's program is missing, or the plot has no folder.
    """
    missing = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"the demo needs {' and '.join(missing)}: pip install 'zkv[demo]', "
            "or start scripts/demo, which does it"
        )
    if not run.script.is_file():
        raise ConfigError(f"{run.script} is not there: start scripts/demo of a source tree")
    if plot is not None and (plot.is_dir() or not plot.absolute().parent.is_dir()):
        raise ConfigError(f"--plot {plot}: give a file in a folder that exists, as in loss.png")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    policy: Annotated[
        str, typer.Option(help="When contributions become an update: bsp, asp, ssp:S, k-bsp:K, ...")
    ] = DEFAULT.policy,
    optimizer: Annotated[
        str, typer.Option(help="What servers do with gradients.")
    ] = DEFAULT.optimizer,
    workers: Annotated[
        int, typer.Option(min=1, help="How many workers compute.")
    ] = DEFAULT.workers,
    servers: Annotated[
        int, typer.Option(min=1, help="How many servers hold the model.")
    ] = DEFAULT.servers,
    route: Annotated[Route, typer.Option(help="How data travels.")] = Route.direct,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Of the split, the values and the order.")
    ] = DEFAULT.seed,
    codec: Annotated[
        str, typer.Option(help="How gradients are compressed, such as topk:0.01+int8+ef.")
    ] = DEFAULT.codec,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write loss against time as a PNG.")] = None,
) -> None:
    """Train a network on handwritten digits with a whole cluster on this machine."""
    run = Run(policy, optimizer, workers, servers, route.value, seed, codec)
    with reporting("demo"):
        try:
            check(run, plot)
            report = train(run)
            if plot is not None:
                write_plot(report, plot)
        except (ZkvError, OSError) as error:
            if as_json:
                told = str(error) or "ended by a signal"
                say(json.dumps({"error": told}, ensure_ascii=False))
            raise
        if as_json:
            plain = {"optimizer": optimizer, "seed": seed, "codec": codec, **to_plain(report)}
            say(json.dumps(plain, ensure_ascii=False))
        else:
            say(text(report, tty=sys.stdout.isatty(), width=TABLE_COLUMNS))


if __name__ == "__main__":
    app(prog_name="scripts/demo")
