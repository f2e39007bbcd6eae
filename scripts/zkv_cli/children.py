"""Child processes of a launcher: started, listened to, and ended with all that they started.

Each child leads a process group of its own, so that a terminal's Ctrl-C reaches the launcher alone,
which passes it on once and in order, and so that a group is ended as a whole. What children say and
that they ended comes as events. This module must not know what the children are for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from zkv_cli.guard import exit_code

LINES_KEPT = 20
KILL_WAIT_S = 1.0
POSIX = sys.platform != "win32"


@dataclass(frozen=True, slots=True)
class Line:
    """A child has said a line on `stream`, "stdout" or "stderr"."""

    child: Child
    stream: str
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A child has ended; `child.code` is how."""

    child: Child


@dataclass(frozen=True, slots=True)
class Signalled:
    """This process was told to end."""

    number: int


Event = Line | Ended | Signalled


class Child:
    """One child process. `label` names it to a person; `tail` has its last lines."""

    def __init__(self, label: str, process: subprocess.Popen[str]) -> None:
        self.label = label
        self.process = process
        self.tail: deque[str] = deque(maxlen=LINES_KEPT)
        self.ended = threading.Event()
        self.gone = False
        """Whether it has ended, though its last lines may still be on their way."""
        self.code: int | None = None
        """The exit code as a shell shows it; None while it runs."""

    @property
    def pid(self) -> int:
        """Its process id, which is its process group's too."""
        return self.process.pid

    def signal(self, number: int) -> None:
        """Send a signal to its whole process group; does nothing once it has ended."""
        if self.gone:
            return
        try:
            if POSIX:
                os.killpg(self.pid, number)
            else:
                self.process.terminate()
        except (ProcessLookupError, PermissionError):
            return

    def kill(self) -> None:
        """End its whole group at once."""
        self.signal(signal.SIGKILL if POSIX else signal.SIGTERM)

    def obituary(self) -> str:
        """Return how it ended and, indented, its last lines."""
        code = self.code if self.code is not None else 0
        how = f"ended with exit code {code}"
        if code > 128 and POSIX:
            with contextlib.suppress(ValueError):
                how = f"was ended by {signal.Signals(code - 128).name} (exit code {code})"
        said = "".join(f"\n    {line}" for line in list(self.tail)[-LINES_KEPT:])
        return f"{self.label} (pid {self.pid}) {how}" + (f"; its last lines:{said}" if said else "")


class Children:
    """The children of one launcher. `notify` is called with events, from several threads.

    `variables` are in the environment of every child.
    """

    def __init__(
        self, notify: Callable[[Event], None], variables: Mapping[str, str] | None = None
    ) -> None:
        self.notify = notify
        self._variables = variables or {}
        self.all: list[Child] = []

    def start(
        self,
        label: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        captured: bool = True,
    ) -> Child:
        """Start a process with a lifeline as its standard input.

        Args:
            label: what to call it in messages.
            command: program and arguments.
            environment: variables on top of this process's own.
            captured: whether its output comes as `Line` events; else it has this process's own.

        Raises:
            OSError: the program cannot be started.
        """
        output = subprocess.PIPE if captured else None
        options: dict[str, Any] = {"process_group": 0} if POSIX else {}
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, **self._variables, **(environment or {})},
            text=True,
            encoding="utf-8",
            errors="replace",
            **options,
        )
        child = Child(label, process)
        self.all.append(child)
        pumps = []
        for stream, name in ((process.stdout, "stdout"), (process.stderr, "stderr")):
            if stream is not None:
                pumps.append(threading.Thread(target=self._pump, args=(child, stream, name)))
        waiter = threading.Thread(target=self._wait, args=(child, pumps))
        for thread in (*pumps, waiter):
            thread.daemon = True
            thread.start()
        return child

    def _pump(self, child: Child, stream: IO[str], name: str) -> None:
        with stream:
            for line in stream:
                text = line.rstrip("\n")
                child.tail.append(text)
                self.notify(Line(child, name, text))

    def _wait(self, child: Child, pumps: Iterable[threading.Thread]) -> None:
        if hasattr(os, "waitid"):
            # Not yet reaped, it keeps its number: the group that is killed is its own for certain.
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            child.kill()
            child.gone = True
        code = child.process.wait()
        child.gone = True
        for pump in pumps:
            # Somebody who left the group may still hold the pipe.
            pump.join(KILL_WAIT_S)
        child.code = exit_code(code)
        child.ended.set()
        if child.process.stdin is not None:
            child.process.stdin.close()
        self.notify(Ended(child))

    def stop(self, some: Iterable[Child], grace_s: float, number: int = signal.SIGTERM) -> None:
        """End some children: a signal, and after `grace_s` seconds an end without asking."""
        children = list(some)
        for child in children:
            child.signal(number)
        wait_for(children, grace_s)
        for child in children:
            child.kill()
        wait_for(children, KILL_WAIT_S)

    def kill(self) -> None:
        """End all children at once."""
        for child in self.all:
            child.kill()


def wait_for(children: Iterable[Child], timeout_s: float) -> bool:
    """Wait until all of these have ended, at most `timeout_s`; return whether they have."""
    deadline = time.monotonic() + timeout_s
    return all([child.ended.wait(max(0.0, deadline - time.monotonic())) for child in children])
