"""How gradients on several devices of one machine become one sum: four strategies, as plans.

A plan says which part moves from which device to which, in which step, and whether it is added
there or takes the place of what was there. Devices are numbered from 0, `CPU` is the host's memory.
This module must not know arrays: `zkv_workers.reducing` carries plans out, `zkv.reduction_choice`
chooses one.

The strategies are those of the key-value store page ("Parameter Synchronization Strategies"): on
one device, on the CPU, in parts, around a ring. For M bytes on n devices with links of B bytes/s
they take 2(n − 1)M/B, 2nM/B, and twice 2(n − 1)(M/n)/B (`zkv.aggregation_costs`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

CPU = -1
DEVICES_MAX = 64


@dataclass(frozen=True, slots=True)
class Move:
    """A part goes from one place to another; a place is a device or `CPU`."""

    part: int
    source: int
    target: int
    adds: bool
    """Whether it is added to what is there."""


Step = tuple[Move, ...]
"""Moves that happen at once: each place sends at most one part, and receives at most one."""


@dataclass(frozen=True, slots=True)
class OneDevice:
    """All is summed on the device `root`, in turn: its own first, the others in their order."""

    root: int = 0

    def __str__(self) -> str:
        return f"on device {self.root}"

    def parts(self, devices: int) -> int:
        """Return in how many parts the gradient is cut."""
        return 1

    def order(self, part: int, devices: int) -> tuple[int, ...]:
        """Return the devices in the order in which a part is summed, from the left."""
        return (self.root, *self._others(devices))

    def sums(self, devices: int) -> tuple[Step, ...]:
        """Return the steps after which each part is summed up somewhere."""
        return tuple((Move(0, one, self.root, True),) for one in self._others(devices))

    def spread(self, devices: int) -> tuple[Step, ...]:
        """Return the steps after which every device has every part."""
        return tuple((Move(0, self.root, one, False),) for one in self._others(devices))

    def _others(self, devices: int) -> list[int]:
        return [one for one in range(devices) if one != self.root]


@dataclass(frozen=True, slots=True)
class OnCpu:
    """All is summed in the host's memory, in the devices' order."""

    def __str__(self) -> str:
        return "on the CPU"

    def parts(self, devices: int) -> int:
        """See `OneDevice.parts`."""
        return 1

    def order(self, part: int, devices: int) -> tuple[int, ...]:
        """See `OneDevice.order`."""
        return tuple(range(devices))

    def sums(self, devices: int) -> tuple[Step, ...]:
        """See `OneDevice.sums`."""
        return tuple((Move(0, one, CPU, one > 0),) for one in range(devices))

    def spread(self, devices: int) -> tuple[Step, ...]:
        """See `OneDevice.spread`."""
        return tuple((Move(0, CPU, one, False),) for one in range(devices))


@dataclass(frozen=True, slots=True)
class InParts:
    """Part p is summed on device p: its own first, then those of devices p + 1, p + 2, ..., round.

    In each step every device sends one part and receives one.
    """

    def __str__(self) -> str:
        return "in parts"

    def parts(self, devices: int) -> int:
        """See `OneDevice.parts`."""
        return devices

    def order(self, part: int, devices: int) -> tuple[int, ...]:
        """See `OneDevice.order`."""
        return tuple((part + step) % devices for step in range(devices))

    def sums(self, devices: int) -> tuple[Step, ...]:
        """See `OneDevice.sums`."""
        return tuple(
            tuple(Move(part, (part + step) % devices, part, True) for part in range(devices))
            for step in range(1, devices)
        )

    def spread(self, devices: int) -> tuple[Step, ...]:
        """See `OneDevice.spread`."""
        return tuple(
            tuple(Move(part, part, (part + step) % devices, False) for part in range(devices))
            for step in range(1, devices)
        )


@dataclass(frozen=True, slots=True)
class Ring:
    """Part i begins at the ring's place i and goes round: each device adds its own and sends it on.

    `along`: the devices in the ring's order; () for 0, 1, 2, ... Only neighbours talk. The order of
    sums, and so the bits, are those of `InParts` where the ring's order is the devices'.
    """

    along: tuple[int, ...] = ()

    def __str__(self) -> str:
        names = "-".join(map(str, self.along))
        return f"around the ring {names}" if names else "around a ring"

    def parts(self, devices: int) -> int:
        """See `OneDevice.parts`."""
        return devices

    def order(self, part: int, devices: int) -> tuple[int, ...]:
        """See `OneDevice.order`."""
        ring = self._ring(devices)
        return tuple(ring[(part + step) % devices] for step in range(devices))

    def sums(self, devices: int) -> tuple[Step, ...]:
        """See `OneDevice.sums`."""
        return tuple(self._round(devices, step, True) for step in range(devices - 1))

    def spread(self, devices: int) -> tuple[Step, ...]:
        """See `OneDevice.spread`."""
        return tuple(
            self._round(devices, step, False) for step in range(devices - 1, 2 * devices - 2)
        )

    def _round(self, devices: int, step: int, adds: bool) -> Step:
        """Return one step: part i goes from its `step`-th place on the ring to the next."""
        ring = self._ring(devices)
        return tuple(
            Move(part, ring[(part + step) % devices], ring[(part + step + 1) % devices], adds)
            for part in range(devices)
        )

    def _ring(self, devices: int) -> tuple[int, ...]:
        return self.along or tuple(range(devices))


Strategy = OneDevice | OnCpu | InParts | Ring


@dataclass(frozen=True, slots=True)
class Plan:
    """What a strategy does with gradients of so many elements on so many devices."""

    strategy: Strategy
    devices: int
    bounds: tuple[int, ...]
    """Where parts begin and end, in elements: part p is [bounds[p], bounds[p + 1])."""
    sums: tuple[Step, ...]
    spread: tuple[Step, ...]

    @property
    def size(self) -> int:
        """Elements of the gradient."""
        return self.bounds[-1]

    def elements(self, part: int) -> int:
        """Return how many elements a part has."""
        return self.bounds[part + 1] - self.bounds[part]

    def order(self, part: int) -> tuple[int, ...]:
        """Return the devices in the order in which a part is summed, from the left."""
        return self.strategy.order(part, self.devices)

    def owner(self, part: int) -> int:
        """Return where a part's sum is once the `sums` are done."""
        if isinstance(self.strategy, Ring):
            return self.order(part)[-1]
        return CPU if isinstance(self.strategy, OnCpu) else self.order(part)[0]

    def carried(self, *, spread: bool = True) -> Counter[tuple[int, int]]:
        """Return how many elements go over each link, by (source, target)."""
        moved: Counter[tuple[int, int]] = Counter()
        for step in (*self.sums, *(self.spread if spread else ())):
            for move in step:
                moved[move.source, move.target] += self.elements(move.part)
        return moved

    def seconds(
        self, itemsize: int, took: Callable[[Move, int, int], float], *, spread: bool = True
    ) -> float:
        """Return the time of all steps in turn; each takes as long as its slowest move.

        `took(move, nbytes, moves)`: the seconds of a move of so many bytes in a step of so many
        moves.
        """
        steps = (*self.sums, *(self.spread if spread else ()))
        return sum(
            max(took(move, itemsize * self.elements(move.part), len(step)) for move in step)
            for step in steps
        )


def even(size: int, parts: int) -> tuple[int, ...]:
    """Return the bounds of parts as equal as can be: the first `size % parts` have one more."""
    least, more = divmod(size, parts)
    return tuple(least * part + min(part, more) for part in range(parts + 1))


def at_cuts(cuts: Sequence[int], parts: int) -> tuple[int, ...]:
    """Return the bounds of parts that begin only at `cuts`, as equal as these allow.

    `cuts`: 0, increasing positions, and the size; a part between two equal bounds is empty. So a
    block that is encoded as a whole lies in one part.
    """
    size, bounds = cuts[-1], [0]
    for part in range(1, parts):
        wanted = size * part / parts
        nearest = min(cuts, key=lambda cut: abs(cut - wanted))
        bounds.append(max(bounds[-1], nearest))
    return (*bounds, size)


def plan(strategy: Strategy, devices: int, size: int, cuts: Sequence[int] | None = None) -> Plan:
    """Return what a strategy does with `size` elements on so many devices.

    `cuts`: parts begin only there (see `at_cuts`).

    Raises:
        ValueError: no devices or too many, a negative size, or a strategy that names devices that
            there are not.
    """
    if not 1 <= devices <= DEVICES_MAX:
        raise ValueError(f"devices must be from 1 to {DEVICES_MAX}, given {devices}")
    if size < 0:
        raise ValueError(f"size must not be negative, given {size}")
    if isinstance(strategy, OneDevice) and not 0 <= strategy.root < devices:
        raise ValueError(f"{strategy}: with {devices} devices the root is from 0 to {devices - 1}")
    along = strategy.along if isinstance(strategy, Ring) else ()
    if along and sorted(along) != list(range(devices)):
        raise ValueError(f"{strategy}: it must name each of {devices} devices once")
    parts = strategy.parts(devices)
    bounds = even(size, parts) if cuts is None else at_cuts(cuts, parts)
    if bounds[-1] != size or any(low > high for low, high in pairwise(bounds)):
        raise ValueError(f"cuts must go from 0 up to the size, {size}, given {list(cuts or ())}")
    return Plan(strategy, devices, bounds, strategy.sums(devices), strategy.spread(devices))
