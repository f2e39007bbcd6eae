"""Machines that can be cut off from each other: network namespaces on one bridge.

A cut is a neighbour's wrong hardware address: what is sent there is lost without a word, in one
direction, and nothing but `ip` is needed for it. Some machines are on wires that a relay carries
(`nemesis_relay`), which loses and delays as it is told.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from nemesis_relay import MTU, Rules

from machines import Machine, machine

SUBNET = "10.213.1."
NOWHERE = "02:00:00:00:00:01"
"""No card has this address."""
RELAY = Path(__file__).with_name("nemesis_relay.py")
END_S = 5.0


class Places:
    """Machines by name, with their addresses, on one switch."""

    def __init__(
        self, machines: Mapping[str, Machine], relay: subprocess.Popen[str], lossy: Sequence[str]
    ) -> None:
        self.machines = dict(machines)
        self.addresses = {name: f"{SUBNET}{at + 1}" for at, name in enumerate(machines)}
        self.lossy = tuple(lossy)
        self._relay = relay
        self._cuts: set[tuple[str, str]] = set()

    def cut(self, pairs: Sequence[tuple[str, str]]) -> None:
        """From here on nothing of what the first of each pair sends reaches the second."""
        self._neighbours(
            [one for one in pairs if one not in self._cuts],
            "neigh replace {} lladdr " + NOWHERE + " dev card nud permanent",
        )
        self._cuts |= set(pairs)

    def mend(self, pairs: Sequence[tuple[str, str]]) -> None:
        """End those cuts."""
        self._neighbours([one for one in pairs if one in self._cuts], "neigh del {} dev card")
        self._cuts -= set(pairs)

    def _neighbours(self, pairs: Sequence[tuple[str, str]], line: str) -> None:
        for source in sorted({source for source, _ in pairs}):
            lines = [line.format(self.addresses[b]) for a, b in pairs if a == source]
            # Its own exit code is that of the last line: each of them must have worked.
            done = subprocess.run(
                self.machines[source].command("ip", "-batch", "-"),
                input="\n".join(lines) + "\n",
                text=True,
                capture_output=True,
            )
            if done.returncode:
                raise RuntimeError(f"ip in {source}: {lines}: {done.stderr}")

    def limit(self, name: str, mbit: float) -> None:
        """What this machine sends is so much a second; 0: as much as it likes."""
        place = self.machines[name]
        if mbit:
            place.must(
                f"tc qdisc replace dev card root tbf rate {mbit:g}mbit burst 32kb latency 100ms"
            )
        else:
            place.must("tc qdisc del dev card root")

    def treat(self, name: str, rules: Rules) -> None:
        """Change what happens to all that a machine on a relay's wire sends and gets."""
        assert self._relay.stdin is not None
        told = {"link": self.lossy.index(name), **asdict(rules)}
        self._relay.stdin.write(json.dumps(told) + "\n")
        self._relay.stdin.flush()


@contextmanager
def places(names: Sequence[str], lossy: Sequence[str], seed: int) -> Iterator[Places]:
    """Yield machines of these names; those in `lossy` are on the relay's wires."""
    with ExitStack() as stack:
        switch = stack.enter_context(machine())
        switch.must("ip link add switch type bridge")
        switch.must(f"ip link set switch mtu {MTU} up")
        made = {name: stack.enter_context(machine()) for name in names}
        for at, (name, place) in enumerate(made.items()):
            if name in lossy:
                continue
            wire = f"ip link add card netns {place.pid} mtu {MTU} type veth peer name port{at}"
            switch.must(f"{wire} netns {switch.pid} mtu {MTU}")
            place.must(f"ip addr add {SUBNET}{at + 1}/24 dev card")
            place.must("ip link set card up")
            switch.must(f"ip link set port{at} master switch up")
        order = list(made)
        wired = [(made[name].pid, f"{SUBNET}{order.index(name) + 1}/24") for name in lossy]
        told = {"switch": switch.pid, "seed": seed, "places": wired}
        relay = subprocess.Popen(
            [sys.executable, str(RELAY), json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(_ended, relay)
        assert relay.stdout is not None
        if relay.stdout.readline() != "wired\n":
            raise RuntimeError("the relay could not be wired; what it said is above")
        yield Places(made, relay, lossy)


def _ended(relay: subprocess.Popen[str]) -> None:
    relay.kill()
    relay.communicate(timeout=END_S)
