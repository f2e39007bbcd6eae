"""A broker, servers and workers as processes on machines of their own, and what is done to them.

It starts again whoever ends, and keeps what everybody has said. It decides nothing: what is done
comes from a plan (`nemesis_faults`), what it means from checks (`nemesis_checks`).
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path

from nemesis_birth import deliver
from nemesis_checks import Said, said
from nemesis_faults import BROKER, Layout
from nemesis_places import Places

PORT = 5555
BEAT = "50ms"
WORKER_LOST_S, MEMBER_LOST_S = 1.0, 30.0
"""A cut of seconds is to evict workers, and to end nobody."""
LOOK_S = 0.002
END_S = 10.0
WORKER = Path(__file__).with_name("nemesis_worker.py")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a cluster is started with. `rate`: batches a second of each worker, at most."""

    policy: str
    folder: Path
    size: int = 2_048
    """Contributions that a worker can make."""
    rate: float = 75.0
    extra: tuple[str, ...] = ()
    """More words for the broker."""
    main: tuple[str, ...] = ("-m", "zkv_cli")
    """What Python runs as `zkv`; see `nemesis_birth.born`."""
    worker: tuple[str, ...] = (str(WORKER),)


class Process:
    """A process of the cluster: one life of somebody, at the place that a process holds."""

    def __init__(self, name: str, life: int, place: int, words: list[str], errors: Path) -> None:
        self.name, self.life = name, life
        self.expected = False
        """Whether its end is somebody's doing here."""
        itself, self.lifeline = Pipe(duplex=False)
        heard, said = Pipe(duplex=False)
        self.process = deliver(place, (itself, said), errors, words)
        for stream in (itself, said):
            stream.close()
        self.lines = os.fdopen(os.dup(heard.fileno()), encoding="utf-8", errors="replace")
        heard.close()
        # Its code can be read once; several threads want to know.
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    @property
    def ended(self) -> bool:
        return self.code is not None

    @property
    def code(self) -> int | None:
        """Its exit code, or the signal that has ended it, negative; None: it runs."""
        with self._lock:
            code: int | None = self.process.exitcode
            return code

    def wait(self, patience_s: float = END_S) -> bool:
        """Wait for its end, so long at most; return whether it has ended."""
        wait([self.process.sentinel], patience_s)
        return self.ended

    def send(self, number: int) -> None:
        """Send a signal, if it is still there."""
        with suppress(ProcessLookupError):
            if not self.ended:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.expected = True
        self.send(signal.SIGKILL)
        self.wait()

    def figures(self) -> tuple[int, int]:
        """Return its open descriptors, and its memory in KiB."""
        fds = len(os.listdir(f"/proc/{self.pid}/fd"))
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return fds, int(line.split()[1])
        return fds, 0


class Cluster:
    """Everybody, by name; what workers have said, by rank; and what else was noticed."""

    def __init__(self, settings: Settings, layout: Layout, places: Places) -> None:
        self.settings, self.layout, self.places = settings, layout, places
        self.processes: dict[str, Process] = {}
        self.histories: dict[int, list[Said]] = {at: [] for at in range(len(layout.workers))}
        self.settled = 0
        """Contributions whose end was told."""
        self.strange: list[str] = []
        self.starts: dict[str, int] = defaultdict(int)
        self._news = threading.Condition()
        self._readers: list[threading.Thread] = []
        self._lines: dict[str, list[str]] = defaultdict(list)
        self.address = f"tcp://{places.addresses[BROKER]}:{PORT}"
        self.journal = settings.folder / "disk"

    # --- starting ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start everybody, and wait until all workers are members."""
        self.start(BROKER)
        self.wait_line(BROKER, "broker at")
        for name in (*self.layout.servers, *self.layout.workers):
            self.start(name)
        self.wait_for(lambda: all(self._said(rank, "O") for rank in self.histories), "all to begin")

    def _said(self, rank: int, kind: str) -> bool:
        return any(one.kind == kind for one in self.histories[rank])

    def start(self, name: str) -> Process:
        """Start somebody, again or for the first time."""
        place = self.places.machines[name]
        words = self._words(name)
        life = self.starts[name]
        self.starts[name] += 1
        errors = self.settings.folder / f"{name}.log"
        made = Process(name, life, place.pid, words, errors)
        self.processes[name] = made
        reader = threading.Thread(target=self._read, args=(made,), daemon=True)
        self._readers.append(reader)
        reader.start()
        return made

    def _words(self, name: str) -> list[str]:
        settings, layout = self.settings, self.layout
        if name == BROKER:
            return [
                *(*settings.main, "broker", "--bind", self.address, "--insecure"),
                *("--servers", str(len(layout.servers)), "--workers", str(len(layout.workers))),
                *("--policy", settings.policy, "--beat", BEAT, "--journal", str(self.journal)),
                *("--worker-lost", str(WORKER_LOST_S), "--server-lost", str(MEMBER_LOST_S)),
                *settings.extra,
            ]
        if name in layout.servers:
            bind = f"tcp://{self.places.addresses[name]}:0"
            return [
                *(*settings.main, "server", "--broker", self.address, "--bind", bind),
                *("--insecure", "--name", name, "--broker-lost", str(MEMBER_LOST_S)),
            ]
        told = {
            "broker": self.address,
            "rank": layout.workers.index(name),
            "world": len(layout.workers),
            "size": settings.size,
            "rate": settings.rate,
            "lost_s": MEMBER_LOST_S,
            **self._resume(layout.workers.index(name)),
        }
        return [*settings.worker, json.dumps(told)]

    def _resume(self, rank: int) -> dict[str, object]:
        """Return where a worker goes on: its next index, and those that are known not to count."""
        first, again = 0, dict[int, bool]()
        for one in self.histories[rank]:
            if one.kind in ("S", "F", "O"):
                index = int(one.words[0])
                first = max(first, index + 1)
                again[index] = one.kind == "O" and one.words[1] in ("cancelled", "discarded")
        return {"first": first, "again": [index for index, open_ in again.items() if open_]}

    # --- hearing -------------------------------------------------------------------------------

    def _read(self, process: Process) -> None:
        for line in process.lines:
            with self._news:
                if process.name in self.layout.workers:
                    rank = self.layout.workers.index(process.name)
                    self._heard(rank, process, line.rstrip("\n"))
                else:
                    self._lines[process.name].append(line.rstrip("\n"))
                self._news.notify_all()
        process.lines.close()
        process.wait()
        with self._news:
            if not process.expected:
                self.strange.append(f"{process.name} ended by itself with {process.code}")
            self._news.notify_all()

    def _heard(self, rank: int, process: Process, line: str) -> None:
        try:
            heard = said(line, process.life)
            self.histories[rank].append(heard)
            self.settled += heard.kind == "O" and heard.words[1] != "pending"
        except ValueError:
            # A kill may leave half a line; nobody writes one otherwise.
            if not process.expected:
                self.strange.append(f"worker {rank} said {line!r}")

    def wait_for(self, holds: Callable[[], bool], what: str, patience_s: float = 30.0) -> float:
        """Wait until it holds; return when that was.

        Raises:
            TimeoutError: it does not within that time.
        """
        deadline = time.monotonic() + patience_s
        with self._news:
            while not holds():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"{what}: not within {patience_s:g} s")
                self._news.wait(min(left, 0.25))
            return time.monotonic()

    def said(self, name: str, words: str) -> int:
        """Return how often somebody has logged these words."""
        log = self.settings.folder / f"{name}.log"
        return log.read_text(errors="replace").count(words) if log.exists() else 0

    def pause(self, seconds: float) -> None:
        """Let time pass until somebody says something, so long at most."""
        with self._news:
            self._news.wait(seconds)

    def wait_line(self, name: str, begins: str) -> None:
        """Wait for somebody's first line that begins so, since it was started last."""
        process, had = self.processes[name], self._lines[name]
        self.wait_for(
            lambda: any(line.startswith(begins) for line in had) or process.ended,
            f"{name} to say {begins!r}",
        )

    # --- ending --------------------------------------------------------------------------------

    def stop_worker(self, name: str, patience_s: float = END_S) -> float | None:
        """SIGTERM; return after how long it has ended in good order, in seconds; None: not so."""
        process = self.processes[name]
        process.expected = True
        began = time.monotonic()
        process.send(signal.SIGTERM)
        if not process.wait(patience_s):
            self.strange.append(f"{name} has not ended {patience_s:g} s after SIGTERM")
            process.kill()
            return None
        if process.code:
            self.strange.append(f"{name} ended with {process.code} after SIGTERM")
        return time.monotonic() - began

    def end(self) -> None:
        """SIGTERM for all that are left, and wait; who does not end is killed, and noted."""
        # The first server that goes ends the run, for the others too.
        for process in self.processes.values():
            process.expected = True
        for name in (*self.layout.workers, *self.layout.servers, BROKER):
            process = self.processes.get(name)
            if process is None or process.ended:
                continue
            process.expected = True
            process.send(signal.SIGCONT)
            process.send(signal.SIGTERM)
            if not process.wait():
                self.strange.append(f"{name} has not ended {END_S:g} s after SIGTERM at the end")
                process.kill()
        for reader in self._readers:
            reader.join(END_S)

    def kill_all(self) -> None:
        """Leave nothing behind."""
        for process in self.processes.values():
            process.expected = True
            process.send(signal.SIGKILL)
        for process in self.processes.values():
            process.wait()
            process.lifeline.close()
        for reader in self._readers:
            reader.join(END_S)
