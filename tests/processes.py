"""Commands of `zkv` as real processes, for tests that kill, stop and interrupt them.

Every launcher gets a session of its own, so that "nothing is left" is a statement about a session.
It knows how to start, hear and end processes, and nothing of what they are.
"""

from __future__ import annotations

import os
import queue
import random
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PATIENCE_S = 30.0


INTERRUPTIBLE = (
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL);"
    "os.execv(sys.argv[1], sys.argv[1:])",
)
"""Before a program's own command, Python's first: a background job of a shell ignores SIGINT, and
hands that on. (A function between fork and exec would do, but JAX warns of it.)"""


def alive(pid: int) -> bool:
    """Whether a process is there and has not ended: one that nobody has reaped yet has."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return not state.exists() or state.read_text().rpartition(") ")[2][0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


class Launched:
    """A process with a session of its own, whose lines can be awaited."""

    def __init__(self, *command: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | (env or {}),
        )
        self.said: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._pump = threading.Thread(target=self._read, daemon=True)
        self._pump.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    @property
    def text(self) -> str:
        return "\n".join(self.said)

    def line(self, pattern: str) -> re.Match[str]:
        """Wait for a line in which `pattern` is found."""
        while True:
            try:
                line = self._lines.get(timeout=PATIENCE_S)
            except queue.Empty:
                pytest.fail(f"no line with {pattern!r}; said so far:\n{self.text}")
            if line is None:
                pytest.fail(f"ended without a line with {pattern!r}; said:\n{self.text}")
            self.said.append(line)
            match = re.search(pattern, line)
            if match:
                return match

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for its end and return the exit code; everything it said is in `text`."""
        code = self.process.wait(timeout_s)
        while (line := self._lines.get(timeout=PATIENCE_S)) is not None:
            self.said.append(line)
        return code

    def session(self) -> list[int]:
        """The processes of its session that run."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                _, _, fields = stat.read_text().rpartition(")")
            except (FileNotFoundError, ProcessLookupError):
                continue
            state, _, _, session = fields.split()[:4]
            if int(session) == self.process.pid and state not in "ZX":
                found.append(int(stat.parent.name))
        return found


@contextmanager
def launched(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Launched]:
    """Run `zkv` with these arguments; afterwards nothing of its session is alive."""
    one = Launched(sys.executable, "-m", "zkv_cli", *arguments, env=env)
    try:
        yield one
    finally:
        for pid in one.session():
            os.kill(pid, signal.SIGKILL)
        one.process.wait(PATIENCE_S)


def answer_of(
    command: list[str], folder: Path, env: dict[str, str], timeout_s: float = PATIENCE_S
) -> str:
    """Run a command in a folder to its end; return what it printed. Its failure is the test's."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    said = f"{shlex.join(command)}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, said
    return done.stdout


def all_ended(pids: list[int], timeout_s: float) -> bool:
    """Wait until these processes have ended, whoever reaps them."""
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with os.fdopen(descriptor):
            left = max(0.0, deadline - time.monotonic())
            if not select.select([descriptor], [], [], left)[0]:
                return False
    return True


def quiet_port() -> int:
    """A free port whose successor is free too, as a broker that is told its port takes both.

    It lies below the ports that the system gives to connections and to those who ask for any: with
    one of those, another test's connection may have it before the broker.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(100):
        port = random.randrange(20_000, lowest - 1)
        try:
            with socket.socket() as first, socket.socket() as second:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
        except OSError:
            continue
        return port
    pytest.fail(f"100 pairs of ports tried below {lowest}, and none is free")


def free_address() -> str:
    """An address at which nobody listens, nor will unless told so."""
    return f"tcp://127.0.0.1:{quiet_port()}"


def program(folder: Path, text: str, name: str = "train.py") -> str:
    path = folder / name
    path.write_text(text, "utf-8")
    return str(path)
