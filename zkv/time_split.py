"""Where a worker's time goes: each moment is booked to one part, so that the parts add up.

Pure: a clock comes in, and whoever does something says when it begins and ends. What is entered
may overlap and may be left in any order (a gradient is encoded while the block computes): the
innermost kind counts, by the order of `Part`. It must not know batches, sockets or threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any

from msgspec import Meta

from zkv.wire import Frozen, Text, UInt

ROWS_KEPT = 64
"""Batches of which each has its own figures; older ones are in the sums only."""
REASONS_MAX = 8
OWN = "its own contribution is on its way to the servers"
FATE = "the program waits for what becomes of a batch"
UNTOLD = "too short for the broker to say why"
OTHERS = "other reasons"

Seconds = Annotated[float, Meta(ge=0, le=1e12)]


class Part(IntEnum):
    """What a moment may be: of those that are entered the last one here counts."""

    DATA = 0
    """Outside of blocks: loading data, and all else that the program does there."""
    COMPUTE = 1
    BETWEEN = 2
    """In the block of a local round, between its batches: counts as DATA."""
    CALLS = 3
    """In other calls of zkv, such as `pull` or `barrier`."""
    WAIT = 4
    """For a grant, or for the fate of a batch."""
    ENCODE = 5
    """Gradients are copied, encoded and handed over, and the caller waits for it."""
    COMMUNICATION = 6
    """The values of a grant that has come are waited for."""


PARTS = ("data", "compute", "encode", "communication", "calls", "wait")
"""The names of what adds up to a worker's time, in the order in which they are told."""
_BOOKED = (0, 1, 0, 4, 5, 2, 3)
"""By `Part`: its place in PARTS."""
_WAIT = PARTS.index("wait")
_ENCODE = PARTS.index("encode")
_WAITING = int(Part.WAIT)


class Spent(Frozen, frozen=True):
    """The sum over a worker's batches, in seconds: from its first request to its last block's end.

    `data_s` to `wait_s` add up to `wall_s`. `encode_beside_s` is on another thread meanwhile.
    `waits` is `wait_s` by reason, the longest first, and `peak_mib` the most memory that the
    process has had in RAM, in MiB (0: not known).
    """

    batches: UInt
    wall_s: Seconds
    data_s: Seconds
    compute_s: Seconds
    encode_s: Seconds
    communication_s: Seconds
    calls_s: Seconds
    wait_s: Seconds
    encode_beside_s: Seconds = 0.0
    peak_mib: Seconds = 0.0
    waits: Annotated[tuple[tuple[Text, Seconds], ...], Meta(max_length=REASONS_MAX)] = ()

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON, rounded to microseconds."""
        plain = {name: getattr(self, name) for name in self.__struct_fields__}
        plain = {k: round(v, 6) if isinstance(v, float) else v for k, v in plain.items()}
        return plain | {"waits": {reason: round(s, 6) for reason, s in self.waits}}


@dataclass(slots=True)
class _On:
    """Enters a part, and leaves it; may be used again, also within itself."""

    meter: Meter
    part: int

    def __enter__(self) -> None:
        self.meter.enter(self.part)

    def __exit__(self, *error: object) -> None:
        self.meter.leave(self.part)


@dataclass(slots=True)
class _Row:
    """One batch so far: seconds by place in PARTS, and of those that were waited, by reason."""

    parts: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))
    waits: dict[str, float] = field(default_factory=dict)


class Meter:
    """Books one worker's time. `clock` gives seconds; `lock` guards it where several threads
    enter and leave.

    It begins when `Part.WAIT` is entered for the first time: what is before that, such as
    importing and loading a whole data set, is no batch's.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        lock: AbstractContextManager[Any] | None = None,
        rows_kept: int = ROWS_KEPT,
    ) -> None:
        self.clock = clock
        self.batches = 0
        self._lock = nullcontext() if lock is None else lock
        self._open = [0] * len(Part)
        self._open[Part.DATA] = 1
        self._now = 0
        self._since: float | None = None
        self._row = _Row()
        self._sum = _Row()
        self._rows: deque[tuple[float, ...]] = deque(maxlen=rows_kept)
        self._beside_s = 0.0
        self._encoded_s = 0.0
        self._on = tuple(_On(self, int(part)) for part in Part)

    def on(self, part: Part) -> AbstractContextManager[None]:
        """Return what enters a part, and leaves it when its block ends."""
        return self._on[part]

    def enter(self, part: int) -> None:
        """Something of this kind begins."""
        with self._lock:
            self._open[part] += 1
            if self._since is None and part == _WAITING:
                self._since = self.clock()
            if part > self._now:
                self._book()
                self._now = part

    def leave(self, part: int) -> None:
        """Something of this kind ends."""
        with self._lock:
            left = self._open
            left[part] -= 1
            if part == self._now and not left[part]:
                self._book()
                while not left[part]:
                    part -= 1
                self._now = part

    @contextmanager
    def awaiting_fate(self) -> Iterator[None]:
        """The program waits for what becomes of a batch."""
        self.enter(Part.WAIT)
        try:
            yield
        finally:
            self.leave(Part.WAIT)
            self.explain_fate()

    def explain_fate(self) -> None:
        """Say that was waited for the fate of a batch since the last explanation."""
        self.explain(FATE)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """The block of a batch is being left: what is done in it is ENCODE, then it is over."""
        self.enter(Part.ENCODE)
        try:
            yield
        finally:
            self.leave(Part.ENCODE)
            self.batch_over()

    @property
    def part(self) -> int:
        """What is booked at present."""
        return self._now

    def encoded(self, seconds: float) -> None:
        """So much of the time since the last switch was ENCODE: for what is too short and too
        frequent to be entered and left."""
        # Without the lock: at worst some microseconds are booked elsewhere, and none twice.
        self._encoded_s += seconds

    def _book(self) -> None:
        if self._since is None:
            return
        now = self.clock()
        passed_s, self._since = now - self._since, now
        if self._encoded_s:
            encoded_s = min(self._encoded_s, passed_s)
            self._encoded_s = 0.0
            self._row.parts[_ENCODE] += encoded_s
            passed_s -= encoded_s
        self._row.parts[_BOOKED[self._now]] += passed_s

    def explain(self, reason: str, own_s: float = 0.0) -> None:
        """Say why was waited since the last explanation: for `own_s` seconds of it for this
        worker's own contribution, for the rest because of `reason` ("": nobody knows)."""
        with self._lock:
            self._book()
            row = self._row
            left_s = max(0.0, row.parts[_WAIT] - sum(row.waits.values()))
            own_s = min(max(own_s, 0.0), left_s)
            for why, spent_s in ((OWN, own_s), (reason or UNTOLD, left_s - own_s)):
                if spent_s > 0:
                    row.waits[why] = row.waits.get(why, 0.0) + spent_s

    def beside(self, seconds: float) -> None:
        """Note encoding on another thread; only one thread may call it."""
        self._beside_s += seconds

    def batch_over(self) -> None:
        """The block of a batch is left: what was booked since the last one is this batch's."""
        with self._lock:
            self._book()
            row, self._row = self._row, _Row()
            self.batches += 1
            self._rows.append(tuple(row.parts))
            for at, spent_s in enumerate(row.parts):
                self._sum.parts[at] += spent_s
            told_s = 0.0
            for why, spent_s in row.waits.items():
                told_s += spent_s
                known = why in self._sum.waits or len(self._sum.waits) < REASONS_MAX - 2
                name = why if known or why == UNTOLD else OTHERS
                self._sum.waits[name] = self._sum.waits.get(name, 0.0) + spent_s
            if row.parts[_WAIT] > told_s:
                left_s = row.parts[_WAIT] - told_s
                self._sum.waits[UNTOLD] = self._sum.waits.get(UNTOLD, 0.0) + left_s

    @property
    def rows(self) -> list[tuple[float, ...]]:
        """The latest batches, oldest first: seconds of each of PARTS."""
        return list(self._rows)

    def spent(self, peak_mib: float = 0.0) -> Spent:
        """Return the sum over all batches whose block was left."""
        with self._lock:
            by_part = dict(zip(PARTS, self._sum.parts, strict=True))
            waits = sorted(self._sum.waits.items(), key=lambda one: -one[1])
            return Spent(
                batches=self.batches,
                wall_s=sum(by_part.values()),
                **{f"{name}_s": max(0.0, spent_s) for name, spent_s in by_part.items()},
                encode_beside_s=self._beside_s,
                peak_mib=peak_mib,
                waits=tuple(waits),
            )


def shares(split: Mapping[str, Any]) -> dict[str, float]:
    """Return each part's share of the wall time of a plain `Spent`; all 0 if there was none."""
    whole = sum(float(split[f"{name}_s"]) for name in PARTS)
    return {name: float(split[f"{name}_s"]) / whole if whole else 0.0 for name in PARTS}


def added(splits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return several plain splits of one worker as one: sums, and the highest peak."""
    waits: dict[str, float] = {}
    for split in splits:
        for reason, spent_s in split["waits"].items():
            waits[reason] = waits.get(reason, 0.0) + float(spent_s)
    names = ("batches", "wall_s", *(f"{name}_s" for name in PARTS), "encode_beside_s")
    plain: dict[str, Any] = {name: sum(split[name] for split in splits) for name in names}
    peak = max((split["peak_mib"] for split in splits), default=0.0)
    return plain | {"peak_mib": peak, "waits": waits}


def line(split: Mapping[str, Any]) -> str:
    """Say a plain split in one line: shares of the time, and the most memory."""
    told = shares(split)
    words = {"calls": "other calls"}
    parts = [
        f"{words.get(name, name)} {told[name]:.1%}"
        for name in PARTS
        if name != "calls" or told[name] >= 0.0005
    ]
    batches = split["batches"]
    each = f" of {split['wall_s'] / batches * 1e3:.3g} ms" if batches else ""
    peak = f"; memory {split['peak_mib']:.0f} MiB at most" if split["peak_mib"] else ""
    return f"{batches:,} batch{'' if batches == 1 else 'es'}{each}: {', '.join(parts)}{peak}"
