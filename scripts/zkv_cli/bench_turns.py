"""`zkv bench`: turns, each with processes of its own: a broker, servers and workers.

Every wait ends when the time is over. Knows processes, and nothing of what the figures mean.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from zkv.errors import ClusterNotReady
from zkv_cli import cluster as c
from zkv_cli.bench_choice import Turn, Variant
from zkv_cli.bench_worker import OPTIMIZER, Task
from zkv_cli.children import Child, Children, Ended, Line, Signalled
from zkv_cli.exits import SIGNAL_BASE, CommandFailed
from zkv_cli.guard import LIFELINE
from zkv_cli.settings import (
    BrokerSection,
    JoinSection,
    LogSection,
    RunSection,
    ServerSection,
    Settings,
)

WARM = 3
"""Rounds that do not count: memory is touched for the first time, kernels are compiled."""


class NoMemory(Exception):
    """Payloads do not go through memory here; the text says why."""


class TimeOver(Exception):
    """There is no time left for this turn."""


@dataclass(frozen=True, slots=True)
class Size:
    """What all turns have in common. `elements` are float32."""

    elements: int
    workers: int
    servers: int
    rounds: int


def given_bytes(asked: int) -> int:
    """Return how much of a buffer the system gives to a connection that asks for so much."""
    with socket.socket() as one:
        options = (socket.SO_SNDBUF, socket.SO_RCVBUF)
        for option in options:
            one.setsockopt(socket.SOL_SOCKET, option, asked)
        got = min(one.getsockopt(socket.SOL_SOCKET, option) for option in options)
    # Linux tells twice as much, as it counts its own bookkeeping in.
    return min(asked, got // 2 if sys.platform == "linux" else got)


def settings_of(variant: Variant, size: Size) -> Settings:
    """Return a cluster's settings: the defaults, whatever files and variables say, but for what is
    measured."""
    sockets = {"io_threads": variant.io_threads, "socket_buffer": variant.socket_bytes}
    return Settings.model_construct(
        broker=BrokerSection.model_validate(
            {
                "bind": "tcp://127.0.0.1:0",
                "servers": size.servers,
                "workers": size.workers,
                "optimizer": OPTIMIZER,
                "block_bytes": variant.block_bytes,
                **sockets,
            }
        ),
        server=ServerSection.model_validate(sockets),
        join=JoinSection(),
        run=RunSection(),
        log=LogSection(level="error"),
    )


@dataclass(slots=True)
class Turns:
    """Runs turns of one `size`, until `deadline` (of `time.monotonic`)."""

    size: Size
    deadline: float
    events: c.Events = field(default_factory=queue.SimpleQueue)
    """Those of the turn before."""

    def turn(self, variant: Variant) -> Turn:
        """Return what one turn has taken; all its processes have ended.

        Raises:
            CommandFailed: a process has failed, who is named, a sum is wrong, or a signal came.
            NoMemory: this machine's processes do not share memory.
            TimeOver: it was given up at the deadline.
        """
        events: c.Events = queue.SimpleQueue()
        children = Children(events.put)
        c.signals_to(events, children)
        # Those that came before this turn's queue heard of them.
        _end_if_told(self.events)
        self.events = events
        cluster = None
        try:
            cluster = self._cluster(children, events, variant)
            workers = [
                self._worker(children, cluster, variant, rank) for rank in range(self.size.workers)
            ]
            told = self._told(events, workers, variant)
        finally:
            c.stop(children, cluster)
        _end_if_told(events)
        return told

    def _cluster(self, children: Children, events: c.Events, variant: Variant) -> c.Cluster:
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeOver
        timeout_s = min(left_s, c.START_TIMEOUT_S)
        try:
            settings = settings_of(variant, self.size)
            return c.start(children, events, settings, quiet=True, timeout_s=timeout_s)
        except ClusterNotReady:
            if timeout_s == left_s:
                raise TimeOver from None
            raise

    def _worker(self, children: Children, cluster: c.Cluster, variant: Variant, rank: int) -> Child:
        watched = (cluster.broker, *cluster.servers) if rank == 0 else ()
        task = Task(
            broker=cluster.address,
            rank=rank,
            workers=self.size.workers,
            elements=self.size.elements,
            warm=WARM,
            rounds=self.size.rounds,
            memory=variant.transport == "memory",
            io_threads=variant.io_threads,
            socket_bytes=variant.socket_bytes,
            patience_s=max(1.0, self.deadline - time.monotonic()),
            pids=tuple(child.pid for child in watched),
        )
        command = [sys.executable, "-m", "zkv_cli.bench_worker"]
        return children.start(
            f"worker {rank}",
            [*command, json.dumps(dataclasses.asdict(task))],
            {LIFELINE: "stdin", "PYTHONUNBUFFERED": "1"},
        )

    def _told(self, events: c.Events, workers: Sequence[Child], variant: Variant) -> Turn:
        """Wait until all workers have ended, and return what they tell."""
        said: dict[int, str] = {}
        running = {worker.pid for worker in workers}
        while running:
            try:
                event = events.get(timeout=max(0.0, self.deadline - time.monotonic()))
            except queue.Empty:
                raise TimeOver from None
            match event:
                case Line(child, "stdout", text) if child in workers:
                    said[child.pid] = text
                case Ended(child) if child.code == 0 and child in workers:
                    running.discard(child.pid)
                case Ended(child):
                    raise CommandFailed(child.obituary())
                case Signalled(number):
                    raise CommandFailed("", SIGNAL_BASE + number)
        return turn_of([json.loads(said.get(worker.pid, "{}")) for worker in workers], variant)


def turn_of(told: Sequence[dict[str, object]], variant: Variant) -> Turn:
    """Return a turn from what its workers tell; raises as `Turns.turn` does."""
    for rank, one in enumerate(told):
        if one.keys() < {"ms", "cpu_s", "transport", "wrong"}:
            raise CommandFailed(f"worker {rank} has ended without a word")
        if one["wrong"]:
            raise CommandFailed(
                f"worker {rank}: {one['wrong']} values are not the sums of what was pushed "
                f"({variant}); please report this"
            )
        transport = str(one["transport"])
        if variant.transport == "memory" and transport != "memory":
            raise NoMemory(transport)
        if variant.transport == "tcp" and not transport.startswith("tcp"):
            raise CommandFailed(f"worker {rank}: payloads went through {transport}, not sockets")
    ms = zip(*(_floats(one["ms"]) for one in told), strict=True)
    costs = [one["cpu_s"] for one in told]
    known = [float(cost) for cost in costs if isinstance(cost, int | float)]
    return Turn(
        tuple(max(of_round) for of_round in ms),
        sum(known) if len(known) == len(costs) else None,
    )


def _floats(values: object) -> list[float]:
    return [float(one) for one in values] if isinstance(values, list) else []


def _end_if_told(events: c.Events) -> None:
    """Raise CommandFailed if a signal is among what nobody has looked at."""
    while True:
        try:
            event = events.get_nowait()
        except queue.Empty:
            return
        if isinstance(event, Signalled):
            raise CommandFailed("", SIGNAL_BASE + event.number)


def passes(
    turns: Turns,
    variants: Sequence[Variant],
    count: int,
    progress: Callable[[int, Variant], None],
    without: Callable[[str], None],
) -> dict[Variant, list[Turn]]:
    """Run passes, a turn of each variant in each, and return the turns of those that are whole.

    `progress(done, variant)` is called before a turn. If no memory is shared, variants that need
    it are left out, and `without(why)` is called. A pass that the time is not enough for does not
    count, so that all variants have as many turns, taken beside each other.
    """
    done = 0
    left = list(variants)
    whole: dict[Variant, list[Turn]] = {one: [] for one in left}
    for _ in range(count):
        now: dict[Variant, Turn] = {}
        for variant in list(left):
            if variant not in left:
                continue
            progress(done, variant)
            try:
                now[variant] = turns.turn(variant)
            except NoMemory as why:
                without(str(why))
                left = [one for one in left if one.transport != "memory"]
            except TimeOver:
                return {one: whole[one] for one in left}
            done += 1
        for variant, turn in now.items():
            whole[variant].append(turn)
    return {one: whole[one] for one in left}
