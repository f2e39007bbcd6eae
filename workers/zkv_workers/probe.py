"""Measures what the links between this process's devices carry, for the choice of a strategy.

Copies of two sizes give a link's latency and its speed; one step of a ring, in which all devices
send at once, tells how much they are in each other's way. The least of some repetitions counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zkv.reduction import CPU, Strategy
from zkv.reduction_choice import Choice, Link, Links, choose
from zkv_workers import devices, lanes
from zkv_workers.reducing import HOST_SITE, Site, carry

SMALL_BYTES = 64 * 2**10
LARGE_BYTES = 4 * 2**20
REPEAT = 3
LEAST_S = 1e-9
"""A clock may not see a small copy at all."""


def fitted(small: tuple[int, float], large: tuple[int, float]) -> Link:
    """Return the link on which copies of two sizes took so long: (bytes, seconds) of each.

    The slope between them is the speed. Where the large one took no longer than the small one,
    its own time is.
    """
    (few, few_s), (many, many_s) = small, large
    slope = (many_s - few_s) / (many - few)
    if slope <= 0:
        return Link(many / max(many_s, LEAST_S))
    return Link(1 / slope, max(0.0, few_s - few * slope))


@dataclass(slots=True)
class _Bench:
    """Places with room to send from and to receive in."""

    sites: dict[int, Site]
    given: dict[int, Any]
    into: dict[int, Any]
    clock: Callable[[], float]
    repeat: int

    def seconds(self, hops: Sequence[tuple[int, int]], nbytes: int) -> float:
        """Return how long it takes until all of these copies are done, begun at once."""
        found = []
        for _ in range(self.repeat):
            HOST_SITE.after([site.mark() for site in self.sites.values()])
            began = self.clock()
            for source, target in hops:
                given, into = self.given[source][:nbytes], self.into[target][:nbytes]
                carry(given, self.sites[source], into, self.sites[target])
            HOST_SITE.after([self.sites[target].mark() for _, target in hops])
            found.append(self.clock() - began)
        return min(found)


def measure(
    homes: Sequence[int],
    *,
    clock: Callable[[], float] = time.perf_counter,
    large_bytes: int = LARGE_BYTES,
    repeat: int = REPEAT,
) -> Links:
    """Return what the links between these devices carry, and those to and from the host.

    `homes`: the numbers of the devices (`devices.HOST` for an array in the host's memory that
    stands in for one); the same one may come more than once. `clock`: seconds.
    """
    sites: dict[int, Site] = {CPU: HOST_SITE}
    for at, home in enumerate(homes):
        host = home == devices.HOST
        sites[at] = HOST_SITE if host else lanes.CudaSite(home, lanes.side(home, at))
    rooms = [{at: _room(site, large_bytes) for at, site in sites.items()} for _ in range(2)]
    bench = _Bench(sites, rooms[0], rooms[1], clock, repeat)
    between = {}
    small_bytes = min(SMALL_BYTES, large_bytes // 2)
    for hop in ((one, two) for one in sites for two in sites if one != two):
        # The first copy between two devices opens the way.
        bench.seconds([hop], small_bytes)
        small, large = (bench.seconds([hop], nbytes) for nbytes in (small_bytes, large_bytes))
        between[hop] = fitted((small_bytes, small), (large_bytes, large))
    return Links(len(homes), between, _crowding(bench, len(homes), large_bytes))


def _room(site: Site, nbytes: int) -> Any:
    with site.here():
        made = site.xp.empty(nbytes, np.uint8)
        made.fill(0)
        return made


def _crowding(bench: _Bench, count: int, nbytes: int) -> float:
    """Return how many times longer a copy takes while all devices send to the next one."""
    if count < 2:
        return 1.0
    hops = [(at, (at + 1) % count) for at in range(count)]
    alone = max(bench.seconds([hop], nbytes) for hop in hops)
    return max(1.0, bench.seconds(hops, nbytes) / max(alone, LEAST_S))


_lock = threading.Lock()
_known: dict[tuple[int, ...], Links] = {}


def links(homes: Sequence[int]) -> Links:
    """Return what `measure` does; these devices are measured once."""
    with _lock:
        if tuple(homes) not in _known:
            _known[tuple(homes)] = measure(homes)
        return _known[tuple(homes)]


def chosen(homes: Sequence[int], nbytes: int, *, spread: bool = True) -> Choice:
    """Return the strategy for so many bytes on these devices, and why it is that one."""
    return choose(links(homes), nbytes, spread=spread)


def strategy_for(homes: Sequence[int], nbytes: int, *, spread: bool = True) -> Strategy:
    """Return the strategy of `chosen`."""
    return chosen(homes, nbytes, spread=spread).strategy


def forget() -> None:
    """Measure anew (for tests: devices are new)."""
    with _lock:
        _known.clear()
