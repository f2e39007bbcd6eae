"""How many bits an element of a gradient is sent with, decided anew as training goes on.

A controller is a frozen value. What it has seen is a state, which its owner keeps: after each step
`observe(state, seen)` gives the next state and the width to use from then on. No clock and no
global chance: the owner measures, and a controller that draws is given a seed. So equal
observations give equal widths, in a replay too.

Here are the widths, a schedule and a heuristic; `zkv_codecs.bits_learned` has the one that learns,
`zkv_codecs.bits_spec` reads them from text.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

WIDTHS = (2, 4, 8, 16, 32)
CODECS = {2: "ternary+ef", 4: "int4+ef", 8: "int8+ef", 16: "fp16", 32: "none"}
"""The codec of each width, as text. What narrow ones cut off is fed back: without that, fewer bits
are lost bits."""

EVERY = 10
"""Steps between two decisions: one step's loss is mostly noise."""
FALL_MAX = 1.0
"""No window counts for more, in either direction: a factor of e."""
STEPS_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class Observation:
    """What one step gave: its loss, the bytes pushed in it, and the seconds from the step before.

    The loss may be of a batch, of any sign, NaN or infinite (training has broken down).

    Raises:
        ValueError: seconds that are not within 1e-12 and 1e12, or bytes not within 0 and 1e18.
    """

    loss: float
    nbytes: float
    seconds: float

    def __post_init__(self) -> None:
        if not 1e-12 <= self.seconds <= 1e12:
            raise ValueError(f"seconds={self.seconds}: a step takes 1e-12 to 1e12 seconds")
        if not 0 <= self.nbytes <= 1e18:
            raise ValueError(f"nbytes={self.nbytes}: a step pushes 0 to 1e18 bytes")


@dataclass(frozen=True, slots=True)
class Window:
    """Sums over the steps since the last decision."""

    steps: int = 0
    loss: float = 0.0
    nbytes: float = 0.0
    seconds: float = 0.0

    def add(self, seen: Observation) -> Window:
        """Return the window with one step more."""
        return Window(
            self.steps + 1,
            self.loss + seen.loss,
            self.nbytes + seen.nbytes,
            self.seconds + seen.seconds,
        )

    def full(self, every: int) -> bool:
        """Whether it is time to decide: after `every` steps, or at once if a loss is no number."""
        return self.steps >= every or not math.isfinite(self.loss)

    @property
    def mean_loss(self) -> float:
        """Mean of the losses."""
        return self.loss / self.steps

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.seconds / self.steps


EMPTY = Window()


def fall(before: float, after: float) -> float:
    """Return how far a loss fell: ln(before / after), within ±1.

    Losses that are not both above 0 (a log-likelihood) have no such ratio: the fall relative to the
    larger magnitude then, which is nearly the same for small falls. NaN or Inf after: −1.
    """
    if not math.isfinite(after):
        return -FALL_MAX
    if before > 0 and after > 0:
        fell = math.log(before) - math.log(after)
    else:
        largest = max(abs(before), abs(after))
        fell = before / largest - after / largest if largest else 0.0
    return max(-FALL_MAX, min(FALL_MAX, fell))


def neighbour(bits: int, by: int) -> int:
    """Return the width `by` places further on, or the last one there is."""
    return WIDTHS[max(0, min(len(WIDTHS) - 1, WIDTHS.index(bits) + by))]


def check_every(every: int) -> None:
    """Raise ValueError unless this is a number of steps between decisions."""
    if not 1 <= every <= STEPS_MAX:
        raise ValueError(f"bits: every={every}: decide every 1 to {STEPS_MAX} steps")


@dataclass(frozen=True, slots=True)
class BitState:
    """What a controller remembers: the width in use, the steps seen, and why that width."""

    bits: int
    why: str
    step: int = 0

    @property
    def codec(self) -> str:
        """Text of the codec of this width."""
        return CODECS[self.bits]


S = TypeVar("S", bound=BitState)


class BitController(ABC, Generic[S]):
    """Chooses a width from what was observed: a frozen dataclass, equal if its parameters are."""

    @property
    def needs_loss(self) -> bool:
        """Whether steps whose loss nobody has told are of no use."""
        return True

    @property
    @abstractmethod
    def text(self) -> str:
        """What `zkv_codecs.bits_spec.controller` reads as this controller."""

    def __str__(self) -> str:
        return self.text

    @abstractmethod
    def start(self) -> S:
        """Return the state before the first step; `state.bits` is the first step's width."""

    @abstractmethod
    def observe(self, state: S, seen: Observation) -> tuple[S, int]:
        """Return the next state, and the width of the next step: one of `WIDTHS`."""

    def explain(self, state: S) -> str:
        """Return one sentence that says why the current width was chosen."""
        return f"{state.bits} bits since {state.why}."


@dataclass(frozen=True, slots=True)
class Schedule(BitController[BitState]):
    """Widths by step: `points` are (first step, bits), rising from step 0.

    Raises:
        ValueError: no point at step 0, steps that do not rise, or a width that is none.
    """

    points: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.points]
        if not steps or steps[0] != 0 or steps != sorted(set(steps)):
            raise ValueError(
                f"bits: a schedule's steps rise from 0, given {steps}; write 32@0,8@100,4@1000"
            )
        for step, bits in self.points:
            if bits not in WIDTHS:
                widths = ", ".join(map(str, WIDTHS))
                raise ValueError(f"bits: {bits}@{step}: no such width; there are {widths}")

    @property
    def needs_loss(self) -> bool:
        """See `BitController.needs_loss`: steps are only counted."""
        return False

    @property
    def text(self) -> str:
        """See `BitController.text`."""
        return "bits:schedule=" + ",".join(f"{bits}@{step}" for step, bits in self.points)

    def start(self) -> BitState:
        """See `BitController.start`."""
        return self._at(0)

    def observe(self, state: BitState, seen: Observation) -> tuple[BitState, int]:
        """See `BitController.observe`. Only the count of steps matters."""
        after = self._at(state.step + 1)
        return after, after.bits

    def _at(self, step: int) -> BitState:
        since, bits = next(point for point in reversed(self.points) if point[0] <= step)
        return BitState(bits, f"step {since}, as the schedule says", step)


KEEP = 0.5
"""This share of the former rate is as fast: rates are that uncertain, and fall in training."""
SHORTER = 0.95
"""A step is shorter if it takes less than this share of the former time."""
SETTLE = 2
"""Windows until a rate is of one width alone: the first after a change is measured against the
window before it, which had the former width."""
PATIENCE_MAX = 32
"""Windows: even a width that failed often is tried again, as gradients change."""


@dataclass(frozen=True, slots=True)
class Trial(BitState):
    """State of `Heuristic`. Rates are falls of the loss per second of wall time."""

    window: Window = EMPTY
    last: Window | None = None
    """The window before, if the loss was a number."""
    settled: int = 0
    """Windows at this width."""
    stalled: int = 0
    """Windows in a row in which the loss did not fall."""
    wait: int = 0
    """Windows until a narrower width is tried."""
    patience: int = 2
    """How long to wait after the next trial that fails."""
    wider: tuple[float, float] | None = None
    """While a narrower width is on trial: rate and seconds per step at the wider one."""


@dataclass(frozen=True, slots=True)
class Heuristic(BitController[Trial]):
    """Goes down one width while the loss falls as fast per second, and up when it stalls.

    It starts at 32 bits: the first gradients are the largest, and there has to be something exact
    to compare with. After two windows at a width the rate is known: the fall of the loss between
    two windows of `every` steps, per second. Then the next narrower width is tried, and kept after
    two windows if (a) a step has become shorter, as fewer bits that save no time only cost
    precision, and (b) the rate is at least half of the former: it is that uncertain. Otherwise it
    goes back up and waits before the next trial: 2 windows, and twice as long after each failure,
    so that a width that is too narrow costs less and less. If the loss has not fallen for two
    windows in a row it goes up one width and waits too: rounding may be as large as the gradients.
    NaN or Inf: back to 32.
    """

    every: int = EVERY

    def __post_init__(self) -> None:
        check_every(self.every)

    @property
    def text(self) -> str:
        """See `BitController.text`."""
        return "bits:heuristic" + ("" if self.every == EVERY else f",every={self.every}")

    def start(self) -> Trial:
        """See `BitController.start`."""
        return Trial(WIDTHS[-1], "step 0: training begins with exact gradients")

    def observe(self, state: Trial, seen: Observation) -> tuple[Trial, int]:
        """See `BitController.observe`."""
        state = replace(state, step=state.step + 1, window=state.window.add(seen))
        if state.window.full(self.every):
            state = self._decide(state)
        return state, state.bits

    def _decide(self, state: Trial) -> Trial:
        last, now = state.last, state.window
        if not math.isfinite(now.loss):
            why = "the loss is no number"
            return self._back(replace(state, last=None), WIDTHS[-1], why)
        state = replace(state, window=EMPTY, last=now, settled=state.settled + 1)
        if last is None:
            return state
        fell = fall(last.mean_loss, now.mean_loss)
        state = replace(state, stalled=0 if fell > 0 else state.stalled + 1)
        if state.stalled >= 2:
            why = "the loss had not fallen for two windows"
            return self._back(state, neighbour(state.bits, 1), why)
        if state.settled < SETTLE:
            return state
        rate = fell / ((last.seconds + now.seconds) / 2)
        if state.wider is not None:
            return self._judge(state, rate, now.step_s)
        if state.wait:
            return replace(state, wait=state.wait - 1)
        return self._down(state, rate, now.step_s)

    def _judge(self, state: Trial, rate: float, step_s: float) -> Trial:
        """Keep a width on trial, or go back."""
        assert state.wider is not None
        before, before_s = state.wider
        if step_s >= SHORTER * before_s:
            why = f"{state.bits} bits made a step no shorter ({step_s:.3g} s)"
            return self._back(replace(state, patience=PATIENCE_MAX), neighbour(state.bits, 1), why)
        if rate < KEEP * before:
            why = f"at {state.bits} bits the loss fell by {rate:.3g}/s, before by {before:.3g}/s"
            return self._back(state, neighbour(state.bits, 1), why)
        return self._down(replace(state, patience=2), rate, step_s)

    def _down(self, state: Trial, rate: float, step_s: float) -> Trial:
        bits = neighbour(state.bits, -1)
        if bits == state.bits:
            return replace(state, wider=None)
        why = f"step {state.step}: at {state.bits} bits the loss fell by {rate:.3g}/s, as hoped"
        return replace(state, bits=bits, why=why, settled=0, wider=(rate, step_s))

    def _back(self, state: Trial, bits: int, why: str) -> Trial:
        return replace(
            state,
            bits=bits,
            why=f"step {state.step}: {why}",
            window=EMPTY,
            settled=0,
            stalled=0,
            wait=state.patience,
            patience=min(PATIENCE_MAX, 2 * state.patience),
            wider=None,
        )
