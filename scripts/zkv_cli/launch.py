"""`zkv up` and `zkv run`: processes on this machine, watched until they end or are told to.

One queue has all that happens; one thread reads it. Knows processes and what they print, and
nothing of the messages between them, but for one look at a broker's status when a server has died.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zkv.errors import ConfigError, ZkvError
from zkv_cli import cluster as c
from zkv_cli import guard, run_report
from zkv_cli.ask import ask_status
from zkv_cli.children import Child, Children, Ended, Line, Signalled
from zkv_cli.exits import FAILED, SIGNAL_BASE, say
from zkv_cli.settings import RunSection, Settings
from zkv_net import tracing
from zkv_net.sockets import is_loopback, split_address

WORKER_GRACE_S = 2.0
"""How long workers may take to end once they were asked to."""
NOTICED_S = 0.25
"""How often a broker is asked whether it has noticed that a server is gone."""
STATUS_TIMEOUT_S = 1.0
TELL_S = 0.5
"""What a broker gets to tell the workers of it."""


@dataclass(frozen=True, slots=True)
class Job:
    """What `zkv run` starts: a command, how many times, and as which ranks of how many.

    `report` is the folder for the workers' files, `table` whether a report is told at the end,
    `as_json` whether that is all that standard output gets, and `trace` the folder for spans.
    """

    command: tuple[str, ...]
    count: int
    first_rank: int
    world: int
    report: Path | None = None
    table: bool = False
    as_json: bool = False
    trace: Path | None = None

    @property
    def ranks(self) -> range:
        """The ranks of this machine's workers."""
        return range(self.first_rank, self.first_rank + self.count)


def run_up(settings: Settings) -> int:
    """Run a cluster until a signal, or until one of its processes ends; return the exit code.

    Raises:
        ConfigError: a process has refused its settings, such as a port in use.
        CommandFailed: a process ended by itself; it is named.
    """
    events: c.Events = queue.SimpleQueue()
    children = Children(events.put)
    c.signals_to(events, children)
    cluster = None
    try:
        cluster = c.start(children, events, settings)
        for line in joining(cluster.address, settings):
            say(line)
        while True:
            match events.get():
                case Line(_, "stderr", _) as said:
                    c.forward(said)
                case Signalled(number):
                    return SIGNAL_BASE + number
                case Ended(child) if c.drained(child, cluster):
                    say(f"zkv up: {child.label} was drained, and has ended")
                case Ended(child) if (again := c.revived(children, cluster, child)) is not None:
                    say(f"zkv up: {child.obituary()}", error=True)
                    say(f"zkv up: it was started again, as pid {again.pid}", error=True)
                case Ended(child):
                    say(f"zkv up: {child.obituary()}", error=True)
                    return _after_death(child, cluster, events, settings)
    finally:
        c.stop(children, cluster)


def joining(address: str, settings: Settings) -> list[str]:
    """Return what `zkv up` says when all servers are in."""
    count = settings.broker.servers
    some = "1 server is" if count == 1 else f"{count} servers are"
    server, worker = c.join_commands(address, insecure=settings.broker.insecure)
    del server
    lines = [f"zkv up: {some} in; policy {settings.broker.policy}; broker at {address}"]
    if is_loopback(split_address(address)[0]):
        port = split_address(address)[1]
        lines += [
            f"join from this machine: {worker}",
            f"join from another machine: not possible, as {address} is loopback; make keys (zkv "
            f"keys new broker) and start with --bind tcp://0.0.0.0:{port}, or, if everybody in the "
            "network is trusted, with --insecure too",
        ]
    else:
        lines += [
            f"join from another machine: {worker}",
            "machines that share the work take their own ranks: "
            "zkv run ... -n 2 --first-rank 0 --world 4, and -n 2 --first-rank 2 --world 4",
        ]
    return lines


def _after_death(child: Child, cluster: c.Cluster, events: c.Events, settings: Settings) -> int:
    """Keep the broker until it has told the workers which server is gone."""
    if child is cluster.broker:
        return FAILED
    deadline = time.monotonic() + settings.broker.server_lost_s + 1.0
    told = False
    while time.monotonic() < deadline and not told:
        told = _noticed(cluster.address)
        code = _stop_signal(events, TELL_S if told else NOTICED_S)
        if code:
            return code
    return FAILED


def _noticed(address: str) -> bool:
    try:
        return bool(ask_status(address, 1.0)["failed"])
    except ZkvError:
        return True


def _stop_signal(events: c.Events, timeout_s: float) -> int:
    """Forward lines for a while; return the exit code of a signal that came meanwhile, else 0."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            event = events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return 0
        match event:
            case Line(_, "stderr", _):
                c.forward(event)
            case Signalled(number):
                return SIGNAL_BASE + number


def run_job(settings: Settings, job: Job) -> int:
    """Run workers, with a cluster of their own unless a broker is named; return the exit code.

    Raises:
        ConfigError: the command does not exist, or a process has refused its settings.
        CommandFailed: the cluster did not come up.
    """
    command = runnable(job.command)
    with ExitStack() as stack:
        if job.table and job.report is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="zkv-run-"))
            job = replace(job, report=Path(folder))
        if job.report is not None:
            job.report.mkdir(parents=True, exist_ok=True)
        return _run(settings, job, command)


def _run(settings: Settings, job: Job, command: list[str]) -> int:
    events: c.Events = queue.SimpleQueue()
    traced = {} if job.trace is None else {tracing.VARIABLE: str(job.trace.resolve())}
    children = Children(events.put, traced)
    c.signals_to(events, children)
    cluster = None
    try:
        address = settings.join.broker
        report = _Reporting(job, address)
        if address is None:
            cluster = c.start(children, events, for_job(settings, job))
            address = cluster.address
        report.begin()
        workers = [
            children.start(
                f"worker {rank}",
                [sys.executable, "-S", "-E", guard.__file__, *command],
                environment(job, at, address) | told(settings.run),
                captured=job.count > 1 or job.as_json,
            )
            for at, rank in enumerate(job.ranks)
        ]
        watch = _Watch(events, children, workers, cluster, settings, job.as_json)
        code = watch.until_done()
        report.tell(address)
        return code
    finally:
        c.stop(children, cluster)


def patience(section: RunSection) -> dict[str, str]:
    """The variables that say when a worker explains a wait, and when it gives up; "" for none."""
    named = {
        "ZKV_NARRATE_AFTER_S": section.narrate_after_s,
        "ZKV_WAIT_TIMEOUT_S": section.stall_timeout_s,
    }
    return {name: f"{value:g}" for name, value in named.items() if value is not None}


def told(section: RunSection) -> dict[str, str]:
    """The variables by which workers hear what `[run]` says."""
    numbers = {"ZKV_IO_THREADS": section.io_threads, "ZKV_SOCKET_BYTES": section.socket_buffer}
    given = {name: str(value) for name, value in numbers.items() if value is not None}
    return patience(section) | given


class _Reporting:
    """Tells at the end of a job what each worker's time has gone into, if that is wanted."""

    def __init__(self, job: Job, joined: str | None) -> None:
        self._job = job
        # A broker that was there before us has counted others before us.
        self._before = _status(joined) if job.table and joined is not None else None
        self._ages: dict[int, int] = {}
        self._began, self._since = time.time(), time.monotonic()

    def begin(self) -> None:
        """The workers are about to be started."""
        if self._job.table and self._job.report is not None:
            self._ages = run_report.prepare(self._job.report, self._job.ranks)
        self._began, self._since = time.time(), time.monotonic()

    def tell(self, address: str) -> None:
        """The workers have ended, the broker has not been told to."""
        job = self._job
        if not job.table or job.report is None:
            return
        wall_s = time.monotonic() - self._since
        lives, warnings = run_report.read(job.report, job.ranks, self._ages)
        run = run_report.live_run(
            lives,
            _status(address),
            self._before,
            began=self._began,
            wall_s=wall_s,
            warnings=warnings,
        )
        plain = run_report.plain_of(run)
        say(json.dumps(plain, ensure_ascii=False) if job.as_json else run_report.as_text(run))


def _status(address: str) -> dict[str, Any] | None:
    try:
        return ask_status(address, STATUS_TIMEOUT_S)
    except ZkvError:
        return None


def runnable(command: tuple[str, ...]) -> list[str]:
    """Return the command as it is started: a `.py` file with this Python, else a program.

    Raises:
        ConfigError: there is no such file or program.
    """
    if command[0].endswith(".py"):
        if not Path(command[0]).is_file():
            raise ConfigError(f"{command[0]}: there is no such file in {Path.cwd()}")
        return [sys.executable, *command]
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]}: there is no such program")
    return list(command)


def for_job(settings: Settings, job: Job) -> Settings:
    """The settings of a job's own cluster, where they are not set otherwise.

    Any free port, all workers awaited, and only warnings, so that the workers' words stand out.
    """
    changes: dict[str, object] = {}
    if "bind" not in settings.broker.model_fields_set:
        changes["bind"] = "tcp://127.0.0.1:0"
    if "workers" not in settings.broker.model_fields_set:
        changes["workers"] = job.world
    update: dict[str, object] = {"broker": settings.broker.model_copy(update=changes)}
    if "level" not in settings.log.model_fields_set:
        update["log"] = settings.log.model_copy(update={"level": "warning"})
    return settings.model_copy(update=update)


def environment(job: Job, at: int, address: str) -> dict[str, str]:
    """The variables of the worker number `at` of this machine, named as torchrun names them."""
    rank = job.first_rank + at
    variables = {
        "ZKV_BROKER": address,
        "ZKV_NAME": f"worker-{rank}",
        "RANK": str(rank),
        "LOCAL_RANK": str(at),
        "WORLD_SIZE": str(job.world),
        "LOCAL_WORLD_SIZE": str(job.count),
        "PYTHONUNBUFFERED": "1",
    }
    if job.count > 1 and "OMP_NUM_THREADS" not in os.environ:
        # Every worker would start a thread for each core, and all would wait for each other.
        variables["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // job.count))
    if job.report is not None:
        variables["ZKV_REPORT"] = str(job.report.resolve())
    return variables


@dataclass(slots=True)
class _Watch:
    """Watches a job: passes lines on, and decides who is asked to end, when, and the exit code."""

    events: c.Events
    children: Children
    workers: list[Child]
    cluster: c.Cluster | None
    settings: Settings
    silent: bool = False
    """Whether standard output is kept for something else than the workers' words."""
    code: int = 0
    signal_next: int = 0
    deadline: float | None = None
    running: set[int] = field(default_factory=set)

    def until_done(self) -> int:
        """Return the exit code once all workers have ended."""
        self.running = {worker.pid for worker in self.workers}
        while self.running:
            try:
                left = None if self.deadline is None else self.deadline - time.monotonic()
                event = self.events.get(timeout=None if left is None else max(0.0, left))
            except queue.Empty:
                self._escalate()
                continue
            match event:
                case Line():
                    self._pass_on(event)
                case Signalled(number):
                    self.code = SIGNAL_BASE + number
                    self._ask_to_end(number)
                case Ended(child):
                    self._ended(child)
        return self.code

    def _pass_on(self, line: Line) -> None:
        if line.child in self.workers:
            say(f"[{line.child.label}] {line.text}", error=self.silent or line.stream == "stderr")
        elif line.stream == "stderr":
            c.forward(line)

    def _ended(self, child: Child) -> None:
        self.running.discard(child.pid)
        ours = child in self.workers
        drained = c.drained(child, self.cluster)
        if (ours and child.code == 0) or drained or self.signal_next:
            return
        say(f"zkv run: {child.obituary()}", error=True)
        if not ours and (again := c.revived(self.children, self.cluster, child)) is not None:
            say(f"zkv run: it was started again, as pid {again.pid}", error=True)
            return
        if self.code == 0:
            self.code = (child.code or FAILED) if ours else FAILED
            grace_s = self.settings.run.grace_s
            if self.cluster is not None and child in self.cluster.servers:
                # The workers learn from the broker that it is gone, and can say what they lost.
                grace_s += self.settings.broker.server_lost_s
            self.deadline = time.monotonic() + grace_s

    def _ask_to_end(self, number: int) -> None:
        for worker in self.workers:
            worker.signal(number)
        self.signal_next = signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM
        self.deadline = time.monotonic() + WORKER_GRACE_S

    def _escalate(self) -> None:
        """Somebody was given time, and it is over: ask, and then do not ask."""
        if self.signal_next:
            for worker in self.workers:
                worker.kill()
            self.deadline = None
        else:
            slow = ", ".join(w.label for w in self.workers if w.pid in self.running)
            say(f"zkv run: stopping {slow}", error=True)
            self._ask_to_end(signal.SIGTERM)
