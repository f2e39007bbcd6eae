"""Machines of their own on this one: network namespaces with a host name and a hosts file each.

The namespaces have no names. A process holds each, and ends with its standard input, so that
nothing is left behind however the tests end.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ZKV = [sys.executable, "-m", "zkv_cli"]
PATIENCE_S = 50
END_S = 5
OPEN = ("--insecure", "--log-level", "warning")
NO_KEYS = {"ZKV_INSECURE": "1"}
"""For who dials; `test_keys_safe_live.py` has keys."""
# The machine's own name is an address of loopback, as many installers write it.
HOLD = 'mount --bind "$1" /etc/hosts; echo "$2" >/proc/sys/kernel/hostname; echo ready; exec cat'


@dataclass(frozen=True)
class Machine:
    """A network namespace, with a host name and a hosts file of its own."""

    pid: int

    def command(self, *argv: str) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--", *argv]

    def run(self, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*argv),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
            env={**os.environ, **NO_KEYS, **environment},
        )

    def must(self, line: str) -> str:
        done = self.run(*line.split())
        assert done.returncode == 0, f"{line}: {done.stderr}"
        return done.stdout

    def python(self, code: str) -> str:
        done = self.run(sys.executable, "-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def servers(self, broker: str) -> list[str]:
        """Ask a broker for the addresses of its servers."""
        done = self.run(*ZKV, "status", "--json", "--broker", broker)
        assert done.returncode == 0, done.stderr
        return [server["address"] for server in json.loads(done.stdout)["servers"]]


@contextmanager
def machine(name: str, folder: Path) -> Iterator[Machine]:
    hosts = folder / f"{name}.hosts"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    holder = subprocess.Popen(
        ["unshare", "--net", "--mount", "--uts", "--", "sh", "-ec", HOLD, "sh", str(hosts), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        made = Machine(holder.pid)
        made.must("ip link set lo up")
        yield made
    finally:
        holder.kill()
        holder.communicate()


@contextmanager
def role(place: Machine, *arguments: str, **environment: str) -> Iterator[str]:
    """Run a command of `zkv` at a place; yield the address that it announces."""
    process = subprocess.Popen(
        place.command(*ZKV, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Its standard input is a lifeline: it ends with these tests, even if they are killed.
        env={**os.environ, "ZKV_LIFELINE": "stdin", "PYTHONUNBUFFERED": "1", **environment},
    )
    said: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            found = re.search(r"(?:broker|server) at (tcp://\S+)", line)
            if found:
                yield found[1]
                break
        else:
            raise AssertionError("".join(said))
    finally:
        process.terminate()
        try:
            process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
