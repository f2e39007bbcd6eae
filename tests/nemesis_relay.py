"""A network that loses, delays, doubles and reorders: Ethernet frames carried by a process.

Kernels without netem have no other. For each place, a card of its own (TAP) is made there and a
port of the switch's bridge for it, and what goes into one comes out of the other, by the rules of
the moment. Rules are lines of JSON on standard input: {"link": 0, "loss": 0.2, "delay_s": 0.02,
"jitter_s": 0.02, "double": 0.05}. Jitter reorders. It ends with its standard input.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME_BYTES_MAX = 65_536
FRAMES_PER_TURN = 64
QUEUE_MAX = 4_096
"""A switch's buffer: what comes in addition is lost."""
MTU = 9_000


@dataclass
class Rules:
    """What happens to frames of one link, both ways. Shares from 0 to 1, times in seconds."""

    loss: float = 0.0
    delay_s: float = 0.0
    jitter_s: float = 0.0
    double: float = 0.0

    def dues(self, now: float, chance: random.Random) -> list[float]:
        """Return when a frame comes out: not at all, once, or twice."""
        if self.loss and chance.random() < self.loss:
            return []
        copies = 2 if self.double and chance.random() < self.double else 1
        return [now + self.delay_s + self.jitter_s * chance.random() for _ in range(copies)]


@dataclass
class Link:
    """Two cards, and the rules between them."""

    ends: tuple[int, int]
    rules: Rules = field(default_factory=Rules)


def enter(pid: int) -> None:
    """Go over to the network namespace of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as place:
        if libc.setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"the network namespace of process {pid}")


def card(name: str, *lines: str) -> int:
    """Make a card in this namespace, and return the descriptor of its wire."""
    wire = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(wire, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    for line in (f"ip link set {name} mtu {MTU}", *lines, f"ip link set {name} up"):
        subprocess.run(line.split(), check=True)
    return wire


class Relay:
    """All links of one switch."""

    def __init__(self, links: list[Link], seed: int) -> None:
        self._links = links
        self._chance = random.Random(seed)
        self._late: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._look = selectors.DefaultSelector()
        for link in links:
            for source, target in (link.ends, link.ends[::-1]):
                self._look.register(source, selectors.EVENT_READ, (link, target))
        self._look.register(sys.stdin.fileno(), selectors.EVENT_READ, None)

    def run(self) -> None:
        """Carry frames until standard input ends."""
        while True:
            now = time.monotonic()
            pause = max(0.0, self._late[0][0] - now) if self._late else None
            for key, _ in self._look.select(pause):
                if key.data is None:
                    if not self._told():
                        return
                else:
                    self._carry(key.fd, *key.data)
            now = time.monotonic()
            while self._late and self._late[0][0] <= now:
                _, _, target, frame = heapq.heappop(self._late)
                _write(target, frame)

    def _carry(self, source: int, link: Link, target: int) -> None:
        for _ in range(FRAMES_PER_TURN):
            try:
                frame = os.read(source, FRAME_BYTES_MAX)
            except BlockingIOError:
                return
            if link.rules == Rules():
                _write(target, frame)
                continue
            now = time.monotonic()
            for due in link.rules.dues(now, self._chance):
                if due <= now:
                    _write(target, frame)
                elif len(self._late) < QUEUE_MAX:
                    self._count += 1
                    heapq.heappush(self._late, (due, self._count, target, frame))

    def _told(self) -> bool:
        # Unbuffered: a line that lay in a buffer would not wake the selector.
        text = os.read(sys.stdin.fileno(), 65_536).decode()
        for line in text.splitlines():
            told = json.loads(line)
            link = self._links[told.pop("link")]
            link.rules = Rules(**told)
        return bool(text)


def _write(target: int, frame: bytes) -> None:
    try:
        os.write(target, frame)
    except OSError:
        # The kernel's queue is full, or the card is down: lost, as on any wire.
        return


def main(switch: int, seed: int, places: list[tuple[int, str]]) -> None:
    """Wire places (a process of each, and its address) to a switch, say so, and carry frames."""
    links = []
    for at, (pid, address) in enumerate(places):
        enter(pid)
        near = card("card", f"ip addr add {address} dev card")
        enter(switch)
        far = card(f"far{at}", f"ip link set far{at} master switch")
        links.append(Link((near, far)))
    print("wired", flush=True)
    Relay(links, seed).run()


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    main(told["switch"], told["seed"], [tuple(one) for one in told["places"]])
