"""Learning-rate schedules: what the base rate is multiplied by at each version of the model.

A schedule is a value; `factor` is a pure function of it and the version. This module must not know
update rules, keys, clocks or how the version came about.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

__all__ = ["Constant", "Cosine", "Schedule", "Steps", "factor", "schedule"]

FORMS = "constant, cosine:1000, cosine:1000:0.1, steps:30,60:0.1, each also after warmup:5+"
"""The valid text forms, for messages."""

GAMMA = 0.1
"""The decay of `steps` where none is given, as in torch.optim.lr_scheduler.MultiStepLR."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Factor 1 at every version."""

    def __str__(self) -> str:
        return "constant"


@dataclass(frozen=True, slots=True)
class Cosine:
    """Half a cosine from 1 down to `floor` over `versions` versions, then `floor` for good.

    Loshchilov and Hutter, SGDR, 2017, equation 5, without restarts. `versions` >= 1; 0 <= `floor`
    <= 1.
    """

    versions: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_count("cosine", self.versions)
        if not 0.0 <= self.floor <= 1.0:
            raise ValueError(
                f"cosine: floor {self.floor!r} is out of range; needed: 0 <= floor <= 1"
            )
        object.__setattr__(self, "floor", float(self.floor) + 0.0)

    def __str__(self) -> str:
        return f"cosine:{self.versions}" + (f":{self.floor!r}" if self.floor else "")


@dataclass(frozen=True, slots=True)
class Steps:
    """Factor `gamma` to the power of how many of the versions `at` have been reached.

    `at` is not empty, rises strictly and begins at 1 or later; 0 < `gamma` <= 1.
    """

    at: tuple[int, ...]
    gamma: float = GAMMA

    def __post_init__(self) -> None:
        if not self.at:
            raise ValueError("steps: no version is given; write for example steps:30,60:0.1")
        for version in self.at:
            _check_count("steps", version)
        if any(later <= earlier for earlier, later in zip(self.at, self.at[1:], strict=False)):
            raise ValueError(f"steps: the versions {self.at} must rise; sort them and drop repeats")
        if not 0.0 < self.gamma <= 1.0:
            raise ValueError(f"steps: gamma {self.gamma!r} is out of range; needed: 0 < gamma <= 1")
        object.__setattr__(self, "gamma", float(self.gamma))

    def __str__(self) -> str:
        return f"steps:{','.join(map(str, self.at))}:{self.gamma!r}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A linear warm-up over the first `warmup` versions (0: none), followed by `body`.

    The body begins when the warm-up ends and counts its versions from there: warmup:5+cosine:1000
    reaches the floor at version 1005, and warmup:5+steps:30 decays at version 35.
    """

    body: Constant | Cosine | Steps = field(default_factory=Constant)
    warmup: int = 0

    def __post_init__(self) -> None:
        if self.warmup != 0:
            _check_count("warmup", self.warmup)

    def __str__(self) -> str:
        """The text that `schedule` reads back as this value."""
        return f"warmup:{self.warmup}+{self.body}" if self.warmup else str(self.body)


def factor(schedule: Schedule, version: int) -> float:
    """The factor, from 0 to 1, on the base rate for the update that is applied to `version`.

    `version` is the version before the update, 0 for the first. In a warm-up over W versions it is
    (version + 1) / W, so that the first update already moves and version W - 1 has the full rate.
    Raises ValueError for a negative version.
    """
    if version < 0:
        raise ValueError(f"version {version} is negative; the first update is applied to version 0")
    if version < schedule.warmup:
        return (version + 1) / schedule.warmup
    return _body_factor(schedule.body, version - schedule.warmup)


def _body_factor(body: Constant | Cosine | Steps, version: int) -> float:
    match body:
        case Constant():
            return 1.0
        case Cosine(versions, floor):
            if version >= versions:
                return floor
            share = 0.5 * (1.0 + math.cos(math.pi * (version / versions)))
            # Rounding must not carry the sum past either end.
            return min(1.0, max(floor, share + floor * (1.0 - share)))
        case Steps(at, gamma):
            return gamma ** bisect_right(at, version)


def schedule(text: str) -> Schedule:
    """Read a schedule: `"constant"`, `"cosine:1000:0.1"`, `"warmup:5+steps:30,60:0.1"`.

    Raises ValueError that names the part that is wrong and the valid forms.
    """
    parts = [part.strip() for part in text.split("+")]
    warmup = 0
    if parts[0].partition(":")[0] == "warmup":
        warmup = _count(text, parts[0].partition(":")[2])
        _check_count("warmup", warmup)
        parts = parts[1:] or ["constant"]
    if len(parts) != 1:
        raise ValueError(
            f"schedule {text!r}: one warm-up may stand before one other part; valid: {FORMS}"
        )
    return Schedule(_body(text, parts[0]), warmup)


def _body(text: str, part: str) -> Constant | Cosine | Steps:
    name, *fields = part.split(":")
    match name, fields:
        case "constant", []:
            return Constant()
        case "cosine", [versions]:
            return Cosine(_count(text, versions))
        case "cosine", [versions, floor]:
            return Cosine(_count(text, versions), _number(text, floor))
        case "steps", [at]:
            return Steps(_counts(text, at))
        case "steps", [at, gamma]:
            return Steps(_counts(text, at), _number(text, gamma))
    raise ValueError(f"schedule {text!r}: {part!r} is not a schedule; valid: {FORMS}")


def _counts(text: str, part: str) -> tuple[int, ...]:
    return tuple(_count(text, number) for number in part.split(","))


def _count(text: str, part: str) -> int:
    try:
        return int(part)
    except ValueError:
        raise ValueError(
            f"schedule {text!r}: {part!r} is not a whole number; valid: {FORMS}"
        ) from None


def _number(text: str, part: str) -> float:
    try:
        return float(part)
    except ValueError:
        raise ValueError(f"schedule {text!r}: {part!r} is not a number; valid: {FORMS}") from None


def _check_count(name: str, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(
            f"{name}: {count!r} is not a number of versions; needed: a whole number >= 1"
        )
