"""How long each batch takes each simulated worker: constants, lists, random times, or a trace.

Times are exact wherever the input is: decimals become integers or fractions, never floats. Random
times come from a seed alone, and the n-th batch of a worker takes the same time under every policy,
so that policies are compared on the same luck. This module must not know what a policy is, when a
batch begins, or where a trace file lies.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

Time = Fraction | float
"""Seconds (or any other unit, where nothing is transferred); an int counts as exact."""

FORMS = (
    "2,5,7",
    "64*exp:mean=1",
    "lognormal:mean=1,sigma=0.5",
    "gamma:mean=1,shape=4",
    "3/3/9 (these in turn)",
)
WORKERS_MAX = 1_000_000
_SMALLEST, _LARGEST = 1e-12, 1e12
_NUMBER_CHARACTERS_MAX = 60
_DRAWS = 64
_PARAMETERS = {"exp": ("mean",), "lognormal": ("mean", "sigma"), "gamma": ("mean", "shape")}
_REPEATED = re.compile(r"([0-9]{1,9})\*(.+)", re.ASCII)


def exact(text: str) -> Time:
    """The number that a decimal text means, exactly: an int if it is whole, else a Fraction.

    Raises ValueError unless it is 0 or its size is within 1e-12 to 1e12.

    >>> exact("5"), exact("0.1"), exact("2e3")
    (5, Fraction(1, 10), 2000)
    """
    try:
        size = abs(float(text))
        # The range also bounds the exponent, and so the work of making the fraction.
        bounded = len(text) <= _NUMBER_CHARACTERS_MAX and _SMALLEST <= size <= _LARGEST
        value = Fraction(text) if bounded else None
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not a number such as 2 or 0.25") from None
    if size == 0 and set(text.lower().partition("e")[0]) <= set("+-0._ "):
        return 0
    if value is None:
        raise ValueError(f"{text[:40]} is out of range: 0, or {_SMALLEST:g} to {_LARGEST:g}")
    return int(value) if value.denominator == 1 else value


@dataclass(frozen=True, slots=True)
class InTurn:
    """These times one after the other, then again from the first; one of them is a constant."""

    values: tuple[Time, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("no compute time is given")
        for value in self.values:
            if not 0 < value < math.inf:
                raise ValueError(f"compute time {value} must be above 0")

    def draw(self, generator: np.random.Generator) -> Iterator[Time]:
        """Yield the time of each batch; the generator is not used."""
        del generator
        return itertools.cycle(self.values)


@dataclass(frozen=True, slots=True)
class Random:
    """Independent times of one distribution with this mean.

    `law` is "exp" (density exp(-t/mean)/mean), "lognormal" (`shape` is sigma, the standard
    deviation of ln t, whose mean is ln(mean) - sigma^2/2) or "gamma" (`shape` is its shape a, with
    scale mean/a). `shape` means nothing to "exp".
    """

    law: str
    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        if self.law not in _PARAMETERS:
            raise ValueError(f"{self.law[:40]!r} is none of {', '.join(_PARAMETERS)}")
        for name, value in zip(_PARAMETERS[self.law], (self.mean, self.shape), strict=False):
            if not 0 < value < math.inf:
                raise ValueError(f"{self.law}: {name} must be above 0, given {value:g}")

    def draw(self, generator: np.random.Generator) -> Iterator[Time]:
        """Yield the time of each batch."""
        tiny = float(np.finfo(np.float64).tiny)
        while True:
            if self.law == "exp":
                times = generator.exponential(self.mean, _DRAWS)
            elif self.law == "lognormal":
                centre = math.log(self.mean) - self.shape**2 / 2
                times = generator.lognormal(centre, self.shape, _DRAWS)
            else:
                times = generator.gamma(self.shape, self.mean / self.shape, _DRAWS)
            # A draw may round to 0, and a batch takes time.
            yield from np.maximum(times, tiny).tolist()


@dataclass(frozen=True, slots=True)
class ComputeTimes:
    """The compute times of a whole cluster.

    `by_worker` holds a rule for each worker, `workers` their numbers, both in the same order; the
    numbers rise.
    """

    by_worker: tuple[InTurn | Random, ...]
    workers: tuple[int, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.workers:
            raise ValueError("no worker is given: a simulation needs at least one")
        if len(self.workers) > WORKERS_MAX:
            raise ValueError(f"{len(self.workers)} workers are more than {WORKERS_MAX}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, given {self.seed}")
        rising = list(self.workers) == sorted(set(self.workers))
        if not rising or self.workers[0] < 0 or len(self.by_worker) != len(self.workers):
            raise ValueError("worker numbers must rise, from 0 or more, with one rule for each")

    @property
    def exact(self) -> bool:
        """Whether every time is an integer or a fraction."""
        return not any(
            isinstance(rule, Random) or any(isinstance(value, float) for value in rule.values)
            for rule in self.by_worker
        )

    def streams(self) -> dict[int, Iterator[Time]]:
        """The times of each worker's batches, from the first; the same at every call."""
        streams = {}
        for worker, rule in zip(self.workers, self.by_worker, strict=True):
            streams[worker] = rule.draw(np.random.default_rng((self.seed, worker)))
        return streams


def compute_times(text: str, *, seed: int = 0) -> ComputeTimes:
    """Read compute times; the workers are numbered 1, 2, ... as they are listed.

    A comma separates workers. Each is a number, numbers taken in turn ("3/3/9"), or a distribution
    ("exp:mean=1" or "exp:1", "lognormal:mean=1,sigma=0.5", "gamma:mean=1,shape=4"), and "64*" in
    front makes 64 of it. Raises ValueError that names the worker and lists the forms.

    >>> compute_times("2,2*5").by_worker == (InTurn((2,)), InTurn((5,)), InTurn((5,)))
    True
    """
    rules: list[InTurn | Random] = []
    for part in _parts(text):
        repeated = _REPEATED.fullmatch(part)
        count, rule = (int(repeated[1]), repeated[2]) if repeated else (1, part)
        if not 1 <= count <= WORKERS_MAX - len(rules):
            raise ValueError(f"{part[:40]!r}: 1 to {WORKERS_MAX} workers, given {count}")
        try:
            rules += [_rule(rule)] * count
        except ValueError as error:
            whose = f"worker {len(rules) + 1}, {part[:40]!r}"
            raise ValueError(f"{whose}: {error}; forms are {'; '.join(FORMS)}") from None
    return ComputeTimes(tuple(rules), tuple(range(1, len(rules) + 1)), seed)


def _parts(text: str) -> list[str]:
    """The workers' texts: "sigma=0.5" after a comma belongs to the one before it."""
    parts: list[str] = []
    for part in (piece.strip() for piece in text.split(",")):
        if parts and "=" in part and ":" not in part:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def _rule(text: str) -> InTurn | Random:
    law, colon, rest = text.partition(":")
    if not colon:
        return InTurn(tuple(exact(value) for value in text.split("/")))
    if law not in _PARAMETERS:
        raise ValueError(f"{law[:40]!r} is none of {', '.join(_PARAMETERS)}")
    names = _PARAMETERS[law]
    given: dict[str, float] = {}
    for position, piece in enumerate(rest.split(",")):
        name, equals, value = piece.partition("=")
        if not equals:
            name, value = names[min(position, len(names) - 1)], piece
        if name not in names or name in given:
            raise ValueError(f"{law} takes {' and '.join(names)}, each once, not {piece[:40]!r}")
        given[name] = float(exact(value))
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(f"{law} needs {' and '.join(missing)} too")
    return Random(law, *(given[name] for name in names))


def read_trace(text: str, *, name: str = "trace") -> tuple[ComputeTimes, tuple[str, ...]]:
    """Read the compute times that a live run recorded; returns them and warnings.

    The text is JSON lines, one for each computed batch, in any order:
    {"worker": 0, "batch": 1, "compute_s": 0.12}. Other fields are ignored. A worker's times are
    taken in the order of its batches, then again from the first. A last line that is torn, because
    the run ended while it was written, is named in a warning and left out.

    Raises ValueError that names the line when any other is not of that form, or none is left.
    """
    lines = [(at, line) for at, line in enumerate(text.split("\n"), start=1) if line.strip()]
    recorded: dict[int, list[tuple[int, Time]]] = {}
    warnings: list[str] = []
    for at, line in lines:
        try:
            # Numbers stay texts until their size is known.
            plain = json.loads(line, parse_float=_Digits, parse_int=_Digits)
        except (ValueError, RecursionError):
            if at != lines[-1][0]:
                raise ValueError(f"{name}, line {at}: not JSON: {line[:60]!r}") from None
            warnings.append(f"{name}, line {at}: the last line is torn and is ignored")
            continue
        worker, batch, time = _trace_line(plain, f"{name}, line {at}")
        recorded.setdefault(worker, []).append((batch, time))
    if not recorded:
        expected = '{"worker": 0, "batch": 1, "compute_s": 0.12}'
        raise ValueError(f"{name}: no batch is recorded in it; a line looks like {expected}")
    workers = tuple(sorted(recorded))
    rules = []
    for worker in workers:
        in_order = sorted(recorded[worker], key=lambda entry: entry[0])
        rules.append(InTurn(tuple(time for _, time in in_order)))
    return ComputeTimes(tuple(rules), workers), tuple(warnings)


class _Digits(str):
    """A number of a JSON text, as it is written there."""


def _trace_line(plain: Any, where: str) -> tuple[int, int, Time]:
    if not isinstance(plain, dict):
        raise ValueError(f"{where}: an object is expected, given {str(plain)[:40]!r}")
    values: list[Time] = []
    for field in ("worker", "batch", "compute_s"):
        given = plain.get(field)
        if not isinstance(given, _Digits):
            raise ValueError(f"{where}: {field} must be a number, given {str(given)[:40]}")
        try:
            values.append(exact(given))
        except ValueError as error:
            raise ValueError(f"{where}: {field}: {error}") from None
    worker, batch, time = values
    for field, number in (("worker", worker), ("batch", batch)):
        if not isinstance(number, int) or number < 0:
            raise ValueError(f"{where}: {field} must be a whole number from 0, given {number}")
    if time <= 0:
        raise ValueError(f"{where}: compute_s must be above 0, given {time}")
    return int(worker), int(batch), time
