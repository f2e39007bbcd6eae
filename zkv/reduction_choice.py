"""Which strategy combines gradients on several devices soonest, by what their links are measured to
carry.

Pure: figures in, a choice with its reasons out. `zkv_workers.probe` measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from zkv.reduction import CPU, InParts, Move, OnCpu, OneDevice, Plan, Ring, Strategy, plan

RINGS_MAX = 7
"""With more devices not every ring is tried: there are (n − 1)! of them."""
WORTH = 0.97
"""A strategy that comes later in the list has to be faster by this factor."""


@dataclass(frozen=True, slots=True)
class Link:
    """What one direction between two places carries."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.latency_s >= 0:
            raise ValueError(
                "a link carries more than 0 bytes/s after at least 0 s, given "
                f"{self.bytes_per_s!r} bytes/s after {self.latency_s!r} s"
            )

    def seconds(self, nbytes: float) -> float:
        """Return how long so many bytes take."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a machine: one for each ordered pair of devices, and to and from the `CPU`.

    `crowding`: how many times longer a move takes while all devices send at once (1: a switch with
    full bandwidth; n: all of them share one link).
    """

    devices: int
    between: Mapping[tuple[int, int], Link]
    crowding: float = 1.0

    def __post_init__(self) -> None:
        if not self.crowding >= 1:
            raise ValueError(f"crowding is at least 1, given {self.crowding!r}")
        for source in range(CPU, self.devices):
            for target in range(CPU, self.devices):
                if source != target and (source, target) not in self.between:
                    raise ValueError(
                        f"the link from {_place(source)} to {_place(target)} is missing"
                    )

    def took(self, move: Move, nbytes: int, moves: int) -> float:
        """Return the seconds of a move in a step of so many moves."""
        link = self.between[move.source, move.target]
        share = (moves - 1) / max(1, self.devices - 1)
        return link.latency_s + nbytes / link.bytes_per_s * (1 + (self.crowding - 1) * share)


def uniform(devices: int, bytes_per_s: float, latency_s: float = 0.0) -> Links:
    """Return equal links between all places."""
    places = range(CPU, devices)
    pairs = [(one, two) for one in places for two in places if one != two]
    return Links(devices, dict.fromkeys(pairs, Link(bytes_per_s, latency_s)))


@dataclass(frozen=True, slots=True)
class Choice:
    """The strategy that is expected to take the least time, and what the others would take."""

    strategy: Strategy
    seconds: tuple[tuple[Strategy, float], ...]
    """Of each strategy that was compared."""
    why: str


def choose(links: Links, nbytes: int, *, spread: bool = True) -> Choice:
    """Return the strategy that combines gradients of so many bytes soonest.

    `spread`: whether every device needs the sum. A strategy of more moves has to be faster by 3 %.

    Raises:
        ValueError: nbytes is negative.
    """
    asked = _asked(links, nbytes)
    if links.devices == 1:
        return Choice(OneDevice(), ((OneDevice(), 0.0),), "there is one device, so nothing moves")
    seconds = tuple(
        (one, _planned(one, links, nbytes).seconds(1, links.took, spread=spread)) for one in asked
    )
    best, least = seconds[0]
    for strategy, spent_s in seconds[1:]:
        if spent_s < least * WORTH:
            best, least = strategy, spent_s
    told = ", ".join(f"{one} {_ms(spent_s)}" for one, spent_s in seconds)
    slowest = _slowest(_planned(best, links, nbytes), links, spread)
    why = f"{nbytes} bytes on {links.devices} devices, {best}: {told}; {slowest}"
    return Choice(best, seconds, why)


def _asked(links: Links, nbytes: int) -> list[Strategy]:
    """Return what is compared: the best root, the CPU, parts, the best ring."""
    roots = [OneDevice(root) for root in range(links.devices)]
    root = min(roots, key=lambda one: _planned(one, links, nbytes).seconds(1, links.took))
    return [root, InParts(), Ring(ring(links)), OnCpu()]


def ring(links: Links) -> tuple[int, ...]:
    """Return the ring whose slowest link is the fastest, from device 0; () for 0, 1, 2, ...

    Of more than 7 devices only that order is looked at.
    """
    if not 3 <= links.devices <= RINGS_MAX:
        return ()
    found = min(
        ((0, *rest) for rest in permutations(range(1, links.devices))),
        key=lambda one: _ring_cost(one, links),
    )
    return () if found == tuple(range(links.devices)) else found


def _ring_cost(along: Sequence[int], links: Links) -> float:
    hops = zip(along, (*along[1:], along[0]), strict=True)
    return max(1 / links.between[hop].bytes_per_s for hop in hops)


def _planned(strategy: Strategy, links: Links, nbytes: int) -> Plan:
    return plan(strategy, links.devices, nbytes)


def _slowest(chosen: Plan, links: Links, spread: bool) -> str:
    carried = chosen.carried(spread=spread)
    hop = max(carried, key=lambda one: carried[one] / links.between[one].bytes_per_s)
    speed = links.between[hop].bytes_per_s / 1e9
    crowd = f", {links.crowding:.2g} times slower when all send" if links.crowding > 1 else ""
    return (
        f"the busiest link is from {_place(hop[0])} to {_place(hop[1])}: {carried[hop]} bytes at "
        f"{speed:.3g} GB/s{crowd}"
    )


def _place(number: int) -> str:
    return "the CPU" if number == CPU else f"device {number}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
