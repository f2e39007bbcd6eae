"""Does what a plan says to a cluster of processes, and undoes it; counts what was done."""

from __future__ import annotations

import heapq
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence

from nemesis_cluster import Cluster, Process
from nemesis_faults import BROKER, Fault
from nemesis_relay import Rules

FILL_BYTES = 256 * 1024 * 1024
"""More than any disk of a run has."""
REVIVE_S = 0.05
STAND_BY = "blocks have copies that stand by"


class Acts:
    """The doing of one plan. `done` counts kills, cuts and the rest; `drains_s` are how long
    workers took from SIGTERM to their end."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self.done: Counter[str] = Counter()
        self.drains_s: list[float] = []
        self._draining: dict[str, float] = {}
        self._copies = 0
        """How often the broker had said that there were copies, when a server was killed last."""

    def run(self, faults: Sequence[Fault], seconds: float) -> None:
        """Do all of it, and return when everything is undone."""
        began = time.monotonic()
        for fault in faults:
            self._at(began + fault.at_s, lambda one=fault: self._do(one))
        self._at(began + seconds, lambda: None)
        while self._due:
            due, _, act = heapq.heappop(self._due)
            while (left := due - time.monotonic()) > 0:
                self._cluster.pause(min(left, REVIVE_S))
                self.revive()
            act()
        for name in self._cluster.layout.everybody:
            self._cluster.processes[name].send(signal.SIGCONT)
        self.revive()

    def _at(self, when: float, act: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._due, (when, self._number, act))

    def _later(self, pause_s: float, act: Callable[[], None]) -> None:
        self._at(time.monotonic() + pause_s, act)

    def revive(self) -> None:
        """Start workers again that have ended by themselves or after a SIGTERM."""
        for name in self._cluster.layout.workers:
            process = self._cluster.processes[name]
            if not process.ended:
                continue
            if name in self._draining:
                self.drains_s.append(time.monotonic() - self._draining.pop(name))
                if process.code:
                    told = f"{name} ended with {process.code} after SIGTERM"
                    self._cluster.strange.append(told)
                self._cluster.start(name)
            elif not process.expected:
                self._cluster.start(name)

    def _do(self, fault: Fault) -> None:
        {
            "kill": self._kill,
            "fill": self._fill,
            "term": self._term,
            "stop": self._stop,
            "cut": self._cut,
            "treat": self._treat,
            "limit": self._limit,
        }[fault.kind](fault)

    def _kill(self, fault: Fault) -> None:
        (name,) = fault.targets
        if name in self._cluster.layout.servers:
            copies = self._cluster.said(BROKER, STAND_BY)
            if copies == self._copies:
                # Copies are for one loss at a time: until there are such again, a worker dies.
                name = self._cluster.layout.workers[self.done["kills"] % 2]
            else:
                self._copies = copies
                self.done["server kills"] += 1
        process = self._cluster.processes[name]
        process.kill()
        self._draining.pop(name, None)
        self.done["kills"] += 1
        if name == BROKER:
            self.done["broker kills"] += 1
        self._again(process, fault.for_s)

    def _again(self, process: Process, pause_s: float) -> None:
        def start() -> None:
            # Somebody else may have started it meanwhile.
            if self._cluster.processes[process.name] is process:
                self._cluster.start(process.name)

        self._later(pause_s, start)

    def _fill(self, fault: Fault) -> None:
        """The journal's disk is full: the broker ends rather than promise what it may forget."""
        filler = self._cluster.journal / "filler"
        process = self._cluster.processes[BROKER]
        process.expected = True
        with filler.open("wb", buffering=0) as file:
            try:
                for _ in range(FILL_BYTES // 65_536):
                    file.write(bytes(65_536))
            except OSError:
                self.done["full disks"] += 1

        def make_room() -> None:
            filler.unlink()
            process.kill()
            self._cluster.start(BROKER)

        self.done["kills"] += 1
        self._later(0.3 + fault.for_s, make_room)

    def _term(self, fault: Fault) -> None:
        (name,) = fault.targets
        process = self._cluster.processes[name]
        if process.ended:
            return  # It has died in the place of a server.
        process.expected = True
        process.send(signal.SIGTERM)
        self._draining[name] = time.monotonic()
        self.done["SIGTERM"] += 1

    def _stop(self, fault: Fault) -> None:
        (name,) = fault.targets
        process = self._cluster.processes[name]
        process.send(signal.SIGSTOP)
        self.done["SIGSTOP"] += 1
        self._later(fault.for_s, lambda: process.send(signal.SIGCONT))

    def _cut(self, fault: Fault) -> None:
        places, pairs = self._cluster.places, fault.pairs
        self.done["cuts"] += 1
        if not fault.gap_s:
            places.cut(pairs)
            self._later(fault.for_s, lambda: places.mend(pairs))
            return
        for at, pair in enumerate(pairs):
            self._later(at * fault.gap_s, lambda one=pair: places.cut([one]))
        for at, number in enumerate(fault.mends):
            pause_s = len(pairs) * fault.gap_s + fault.for_s + at * fault.gap_s
            self._later(pause_s, lambda one=pairs[number]: places.mend([one]))

    def _treat(self, fault: Fault) -> None:
        (name,) = fault.targets
        self._cluster.places.treat(name, Rules(*fault.values))
        self.done["losses and delays"] += 1
        self._later(fault.for_s, lambda: self._cluster.places.treat(name, Rules()))

    def _limit(self, fault: Fault) -> None:
        (name,) = fault.targets
        self._cluster.places.limit(name, fault.values[0])
        self.done["limits"] += 1
        self._later(fault.for_s, lambda: self._cluster.places.limit(name, 0))
