"""Network namespaces as machines: one of their own for a fair loopback, or some on slow links.

They have no names: a process holds each, and ends with its standard input, so that nothing is left
behind however who made them ends. Knows nothing of what runs in them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
FAIR = "reno"
"""A child namespace may choose it, and on loopback it is as fast as any."""
ADDRESS = "10.212.1.{}"
ENDS_S = 10
GOODPUT = 1448 / 1514
"""Of a link's bits: what TCP leaves of Ethernet's frames, with its timestamps."""


class NoNamespace(Exception):
    """A network namespace cannot be made here; the text says why."""


@dataclass(frozen=True)
class Machine:
    """A network namespace, held open by a process."""

    pid: int
    root: bool = True
    """It belongs to this user namespace; else to one of its own, which is entered as well."""

    @property
    def enter(self) -> list[str]:
        """The words before a command that make it run there, under the same process number."""
        user = [] if self.root else ["--user", "--preserve-credentials"]
        return ["nsenter", f"--target={self.pid}", *user, "--net", "--"]

    def command(self, *argv: str) -> list[str]:
        """Return a command that runs there."""
        return [*self.enter, *argv]

    def must(self, line: str) -> str:
        """Run a command there that has to succeed, and return what it says."""
        done = subprocess.run(self.command(*line.split()), capture_output=True, text=True)
        if done.returncode:
            raise NoNamespace(f"{line}: {done.stderr.strip()}")
        return done.stdout

    def congestion(self, name: str | None = None) -> str:
        """Return how TCP controls congestion there, after choosing it if one is named."""
        if name:
            asked = self.command("sh", "-c", f"echo {name} >{CONGESTION}")
            # Not every kernel allows it; which one holds is what is returned.
            subprocess.run(asked, capture_output=True)
        return self.must(f"cat {CONGESTION}").strip()


@contextmanager
def machine() -> Iterator[Machine]:
    """Yield a fresh namespace; it is gone afterwards.

    Raises:
        NoNamespace: none can be made.
    """
    root = os.geteuid() == 0
    own = ["--net"] if root else ["--user", "--map-root-user", "--net"]
    try:
        holder = subprocess.Popen(
            ["unshare", *own, "--", "sh", "-c", "echo ready; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Who made it ends it: a Ctrl-C that it got itself would pull the floor away too early.
            start_new_session=True,
        )
    except OSError as error:
        raise NoNamespace(f"a network namespace cannot be made here: {error}") from error
    try:
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            said = holder.stderr.read().strip()
            raise NoNamespace(f"a network namespace cannot be made here (as root it can): {said}")
        made = Machine(holder.pid, root)
        made.must("ip link set lo up")
        yield made
    finally:
        holder.kill()
        with suppress(subprocess.TimeoutExpired):
            holder.communicate(timeout=ENDS_S)


@contextmanager
def loopback() -> Iterator[tuple[list[str], str]]:
    """Yield the words that enter a namespace with nothing but loopback, and what it is; where none
    can be made, no words, and this machine's loopback as it is."""
    with ExitStack() as stack:
        try:
            place = stack.enter_context(machine())
            told = f"a network namespace of its own, {place.congestion(FAIR)}"
            words = place.enter
        except NoNamespace as error:
            known = CONGESTION.read_text().strip() if CONGESTION.exists() else "unknown"
            words, told = [], f"loopback as it is, {known} ({error})"
        yield words, told


@contextmanager
def network(
    count: int, mbit: float, limit: str = "burst 64kb latency 200ms", congestion: str | None = None
) -> Iterator[list[Machine]]:
    """Yield so many machines on one switch, whose cards send and receive `mbit` a second each.

    Machine i has the address `ADDRESS.format(i + 1)` on a card named `card`. 0 Mbit/s: unlimited.

    Raises:
        NoNamespace: they cannot be made here.
    """
    with ExitStack() as stack:
        switch = stack.enter_context(machine())
        if not switch.root:
            # Namespaces of different user namespaces cannot be wired together from outside.
            raise NoNamespace("machines on links are network namespaces: run this as root on Linux")
        switch.must("ip link add switch type bridge")
        switch.must("ip link set switch up")
        found = []
        for at in range(count):
            place = stack.enter_context(machine())
            wire = f"ip link add card netns {place.pid} type veth peer name port{at}"
            switch.must(f"{wire} netns {switch.pid}")
            place.must(f"ip addr add {ADDRESS.format(at + 1)}/24 dev card")
            switch.must(f"ip link set port{at} master switch")
            for one, card in ((place, "card"), (switch, f"port{at}")):
                one.must(f"ip link set {card} up")
                if mbit:
                    one.must(f"tc qdisc add dev {card} root tbf rate {mbit:g}mbit {limit}")
            if congestion:
                place.congestion(congestion)
            found.append(place)
        yield found
