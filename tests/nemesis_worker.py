"""A worker whose contributions can be counted one by one: 4^rank at an index of their own.

It says on standard output, a line each and at once, what it begins, what it finishes and what
became of it; whoever has started it draws conclusions. It checks what it is granted against what
it was told before. SIGTERM: it finishes what it has begun, and leaves. An end of standard input
ends it.

    K clock number                             it asks to be let in
    J clock number                             it is a member, and has the keys
    S clock index version own-clock            a batch begins
    F clock index own-clock                    it is about to be finished
    O clock index outcome                      what became of it
    E clock error                              it is no member any more; it joins again
    B clock text                               what it was granted cannot be
    L clock                                    it has left
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import deque
from typing import Any

import numpy as np

import zkv
from zkv.errors import Lost

KEYS = ("a", "b")
"""Each server has one of them: a contribution is in both, or in none."""
OPEN_MAX = 4
"""Batches that are finished and not settled."""
JOINS_MAX = 50
WAIT_S = 30.0


def say(kind: str, *what: object) -> None:
    """Say something so that it is said even if this process is killed at once."""
    line = " ".join([kind, f"{time.monotonic():.6f}", *map(str, what)])
    os.write(1, line.encode() + b"\n")


class Counts:
    """What was contributed, and what is known of it."""

    def __init__(self, rank: int, size: int, first: int, again: list[int]) -> None:
        self.rank, self.size = rank, size
        self.next, self.again = first, deque(again)
        self.open: list[tuple[int, Any]] = []
        self.since = np.full(size, np.iinfo(np.int64).max)
        """The update that each index counts since, where that is known."""

    def index(self) -> int | None:
        """Return what to contribute next; None: there is no room."""
        if self.again:
            return self.again.popleft()
        if self.next >= self.size:
            return None
        self.next += 1
        return self.next - 1

    def settle(self, wait_s: float = 0.0) -> None:
        """Say what became of batches, in order; wait so long for each."""
        still = []
        for index, batch in self.open:
            if wait_s and batch.outcome == "pending":
                try:
                    batch.wait(wait_s)
                except zkv.ZkvError as error:
                    say("O", index, "pending", type(error).__name__)
                    continue
            outcome = batch.outcome
            if outcome == "pending":
                still.append((index, batch))
                continue
            self.settled(index, batch, outcome)
        self.open = still

    def settled(self, index: int, batch: Any, outcome: str) -> None:
        say("O", index, outcome)
        if outcome == "committed":
            self.since[index] = batch.update
        elif outcome in ("cancelled", "discarded"):
            self.again.append(index)

    def lose(self) -> None:
        """This membership has ended: of what is open nothing will be heard."""
        for index, batch in self.open:
            outcome = batch.outcome
            if outcome == "pending":
                say("O", index, "pending", "lost")
            else:
                self.settled(index, batch, outcome)
        self.open = []

    def check(self, version: int, values: dict[str, Any]) -> None:
        """Look at what a batch was granted."""
        counts = [values[key].astype(np.int64) for key in KEYS]
        for at in np.flatnonzero(counts[0] != counts[1])[:3]:
            found = [int(one[at]) for one in counts]
            say("B", f"version {version}: index {at} is {found[0]} here and {found[1]} there")
        own = counts[0] // 4**self.rank % 4
        for at in np.flatnonzero(own > 1)[:3]:
            say("B", f"version {version}: own index {at} counts {own[at]} times")
        for at in np.flatnonzero((self.since <= version) & (own != 1))[:3]:
            since = self.since[at]
            say("B", f"version {version}: index {at}, of update {since}, counts {own[at]}")


def train(worker: Any, counts: Counts, rate: float, stop: threading.Event) -> None:
    """Contribute until told to stop, so often a second at most."""
    begins = time.monotonic()
    while not stop.is_set():
        counts.settle(WAIT_S if len(counts.open) >= OPEN_MAX else 0.0)
        index = counts.index()
        if index is None:
            stop.wait(0.05)
            continue
        batch = worker.batch()
        with batch:
            clock = batch.clock
            say("S", index, batch.version, clock)
            values = {key: batch.params[key] for key in KEYS}
            counts.check(batch.version, values)
            gradient = np.zeros(counts.size, np.float32)
            gradient[index] = -(4.0**counts.rank)
            for key in KEYS:
                batch.push(key, gradient)
            say("F", index, clock)
        counts.open.append((index, batch))
        begins = max(begins + 1 / rate, time.monotonic() - 0.2)
        stop.wait(max(0.0, begins - time.monotonic()))


def main(told: dict[str, Any]) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    threading.Thread(target=_ends_with_stdin, daemon=True).start()
    counts = Counts(told["rank"], told["size"], told["first"], told["again"])
    for joins in range(JOINS_MAX):
        if stop.is_set():
            break
        say("K", joins)
        try:
            with zkv.connect(
                told["broker"],
                rank=counts.rank,
                world=told["world"],
                insecure=True,
                broker_lost_s=told["lost_s"],
            ) as worker:
                first = {key: np.zeros(counts.size, np.float32) for key in KEYS}
                worker.init(first, reduce="sum", rule="sgd:lr=1")
                say("J", joins)
                train(worker, counts, told["rate"], stop)
                counts.settle(WAIT_S / 10)
                counts.lose()
        except Lost as error:
            say("E", type(error).__name__, error)
            counts.lose()
    say("L")


def _ends_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(9)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
