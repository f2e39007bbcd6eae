"""`zkv bench`: which ways of moving data are measured, and which one the figures speak for. Pure.

Variants take turns: a pass is one turn of each. A variant is compared with the default of the same
pass, so that what slows the whole machine down for a while, slows both down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from zkv.placement import NEAR_BYTES_PER_S, block_bytes_on

TRANSPORTS = ("memory", "tcp")
"""Payloads go through shared memory, or through sockets."""
BLOCKS = (256 * 1024, 1024 * 1024, 8 * 1024 * 1024)
IO_THREADS = (2,)
BUFFERS = (1024 * 1024, 4 * 1024 * 1024)
LEAST = 0.02
"""A smaller part of the time is no reason to set anything, however sure it is."""
PASSES_LEAST = 4
"""Of fewer the spread is not known: with three, noise alone looks like a gain in one run of four,
with four in one of ten, with five in one of thirty."""
FACTORS = ("block_bytes", "io_threads", "socket_bytes")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of moving data; in bytes, 0: as zkv, or the system, does it by itself."""

    transport: str
    block_bytes: int = 0
    io_threads: int = 1
    socket_bytes: int = 0

    @property
    def default(self) -> Variant:
        """What zkv does by itself with payloads that go the same way."""
        return Variant(self.transport)

    @property
    def set_(self) -> dict[str, int]:
        """What differs from the default."""
        return {
            name: getattr(self, name)
            for name in FACTORS
            if getattr(self, name) != getattr(self.default, name)
        }


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn has taken: milliseconds of each round, those of its slowest worker, and CPU
    seconds of all processes in all rounds (None: not known here)."""

    ms: tuple[float, ...]
    cpu_s: float | None = None


Samples = Mapping[Variant, Sequence[Turn]]
"""The turns of each variant, one of each pass; all have as many."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of a variant, and how it compares: times of a pass are medians of its
    rounds, ratios those of times of the same pass."""

    variant: Variant
    median_ms: float
    low_ms: float
    high_ms: float
    cpu_s_per_gb: float | None
    ratio: float
    ratio_low: float
    ratio_high: float
    passes: int

    @property
    def differs(self) -> int:
        """-1: quicker than what it is compared with by more than the spread; 1: slower; 0: neither,
        or there were too few passes to say so."""
        spread = self.ratio_high - self.ratio_low
        if self.passes < PASSES_LEAST or abs(1 - self.ratio) <= max(LEAST, spread):
            return 0
        return -1 if self.ratio < 1 else 1


@dataclass(frozen=True, slots=True)
class Choice:
    """What to set for payloads that go one way.

    `figures` are those of what was chosen (the default's if nothing is quicker by more than the
    spread), and `nearest` those of the quickest that was not enough, if the default stays.
    """

    figures: Figures
    nearest: Figures | None

    @property
    def differs(self) -> bool:
        """Whether something is to be set."""
        return bool(self.figures.variant.set_)


def default_blocks(total_bytes: int) -> int:
    """Return the size of blocks that zkv takes within a machine for a model of so many bytes."""
    return block_bytes_on(NEAR_BYTES_PER_S, total_bytes)


def variants(
    total_bytes: int, transports: Iterable[str] = TRANSPORTS, buffers: Sequence[int] = BUFFERS
) -> list[Variant]:
    """Return what to measure: for each transport the default, and what differs from it in one.

    Blocks that are no smaller than the model are left out, and buffers of sockets that no payload
    goes through.
    """
    sizes = [one for one in BLOCKS if one < total_bytes and one != default_blocks(total_bytes)]
    found = []
    for transport in transports:
        found += [Variant(transport), *(Variant(transport, one) for one in sizes)]
        found += [Variant(transport, io_threads=one) for one in IO_THREADS]
        if transport == "tcp":
            found += [Variant(transport, socket_bytes=one) for one in buffers]
    return found


def compared(samples: Samples, one: Variant, other: Variant, gigabytes: float) -> Figures:
    """Return a variant's figures, compared with another's. `gigabytes`: gradients of a round, of
    all workers."""
    times = [median(turn.ms) for turn in samples[one]]
    others = [median(turn.ms) for turn in samples[other]]
    ratios = [mine / its for mine, its in zip(times, others, strict=True)]
    costs = [
        turn.cpu_s / (gigabytes * len(turn.ms)) for turn in samples[one] if turn.cpu_s is not None
    ]
    return Figures(
        one,
        median(times),
        min(times),
        max(times),
        median(costs) if len(costs) == len(times) else None,
        median(ratios),
        min(ratios),
        max(ratios),
        len(times),
    )


def figures(samples: Samples, gigabytes: float) -> list[Figures]:
    """Return each variant's figures, compared with its default."""
    return [compared(samples, one, one.default, gigabytes) for one in samples]


def _order(one: Figures) -> tuple[object, ...]:
    """The quickest first; of those that are as quick the one that sets less."""
    what = one.variant
    return one.ratio, len(what.set_), what.io_threads, what.socket_bytes, what.block_bytes


def together(found: Sequence[Figures]) -> list[Variant]:
    """Return what to measure in a second part: where several settings are quicker each by itself,
    the default, the quickest of them, and all of them in one."""
    more: list[Variant] = []
    for transport in dict.fromkeys(one.variant.transport for one in found):
        best: dict[str, Figures] = {}
        for one in sorted(found, key=_order):
            changed = list(one.variant.set_)
            if one.variant.transport == transport and one.differs < 0 and len(changed) == 1:
                best.setdefault(changed[0], one)
        if len(best) > 1:
            all_ = {name: one.variant.set_[name] for name, one in best.items()}
            first = min(best.values(), key=_order).variant
            more += [first.default, first, Variant(transport, **all_)]
    return more


def choices(first: Samples, second: Samples, gigabytes: float) -> list[Choice]:
    """Return what to set for each transport.

    Of what was measured `together`, all settings in one are chosen only if they are quicker than
    the quickest by itself, by more than the spread.
    """
    made = []
    for transport in dict.fromkeys(one.transport for one in first):
        plain = Variant(transport)
        own = [one for one in figures(first, gigabytes) if one.variant.transport == transport]
        again = [one for one in second if one.transport == transport]
        quicker = sorted((one for one in own if one.differs < 0), key=_order)
        if again and quicker:
            alone, all_ = sorted((one for one in again if one.set_), key=lambda one: len(one.set_))
            pays = compared(second, all_, alone, gigabytes).differs < 0
            chosen = compared(second, all_ if pays else alone, plain, gigabytes)
            # What does not show itself again was chance.
            quicker = [chosen] if chosen.differs < 0 else []
        if quicker:
            made.append(Choice(quicker[0], None))
            continue
        rest = sorted((one for one in own if one.variant != plain), key=_order)
        made.append(Choice(compared(first, plain, plain, gigabytes), rest[0] if rest else None))
    return made
