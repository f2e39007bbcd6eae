"""A width that is learned while training goes on: a small table, as in MQGrad.

MQGrad (Cui et al., ICTIR 2018, arXiv:1804.08066) sees the choice of bits as a Markov decision
process: the state is made of recent changes of the loss, an action is a number of bits, and the
policy is learned during the training that it serves. Reward and table here are ours.

State: whether the loss rose, about stood, or fell in the last window. Action: a
width, for one window of steps. Reward: the fall of the (log-)loss per second of wall time.

One run has some fifty windows, and the fall within one is mostly noise, while seconds hardly vary.
So the two parts of the reward are kept apart, and each is estimated as well as it can be:

- Falls per step: the mean over all windows, which is known well, as falls add up to what the loss
  fell by altogether; and in the table how much better or worse each width was than the windows just
  before. That counts only as far as it is beyond two standard errors: nothing is said against a
  width, or for it, on little evidence, and a disaster is seen at once. Old windows fade.
- Seconds per step: those that were measured; for widths that were not, the line compute +
  bytes / link through those that were (least squares). So a wide one need not be paid for to learn
  that it is slow.

The width of the largest expected fall per second is used, the widest of those within 5 % (precision
that costs nothing is kept). At times, less and less often, a neighbour of it is tried instead,
unless it is expected to be so much slower that only chance could speak for it.

What is known of widths beforehand is what their codecs keep back. Under a rule that divides by a
root mean square of gradients that costs steps (`zkv_codecs.late`), and has to be known before: what
a few noisy windows leave in a running mean of a thousand steps slows all windows after them alike,
so no comparison of windows shows it. A width that was not in use yet counts by the most that this
may cost, as with `auto`.

It starts with the narrowest width that costs hardly a step under any rule: who asks for few bits
has a slow link, and what is done in the first steps is not made up for later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from zkv_codecs.bits import (
    EMPTY,
    EVERY,
    WIDTHS,
    BitController,
    BitState,
    Observation,
    Window,
    check_every,
    fall,
    neighbour,
)
from zkv_codecs.late import LATE, late_under, most_steps_for_one, steps_for_one

NEAR = 0.05
KEPT_BACK = {2: 1.3, 4: 0.16, 8: 0.01, 16: 0.0, 32: 0.0}
"""By width: the norm of the residual, in gradients. Measured on two models (docs/codecs.md)."""
FIRST = min(bits for bits, kept in KEPT_BACK.items() if steps_for_one(kept, LATE) <= 1 + NEAR)
SECOND_AT = 2
"""Decisions until another width is tried for its seconds: the third window is the first whose fall
there is another to hold against, so it tells of both."""
FADE = 0.98
"""A window counts for this much of the one after it."""
FADE_USUAL = 0.8
"""Falls become smaller as training goes on, so a window is held against the last few only."""
MOST = 4.0
"""No advantage counts for more."""
ERRORS = 2.0
"""Standard errors that chance may account for."""
FALL_LEAST = 1e-9
"""Per step: where the loss stands, the shortest step is as good as any, and cheaper."""
TRIES = 6.0
"""Decisions until exploring is half as likely as at first."""
EXPLORE, EXPLORE_MIN = 0.3, 0.02
TRY_LEAST = 0.8
"""A neighbour whose expected fall per second is below this share of the best is not tried by
chance: what it leaves behind outlasts its window, and few windows could not speak for it."""
STATES = ("rose", "stood", "fell")
STOOD = 0.02
"""A log-loss that changes less in a window stood."""

Cell = tuple[float, float]
"""A (fading) count and a sum."""
Cells = tuple[Cell, ...]

NO_CELLS: Cells = ((0.0, 0.0),) * len(WIDTHS)


@dataclass(frozen=True, slots=True)
class Learning(BitState):
    """State of `Learned`. Rows of tables are in the order of STATES, cells in that of WIDTHS."""

    window: Window = EMPTY
    last: Window | None = None
    recent: int = 1
    """In which of STATES the last window left the loss."""
    decisions: int = 0
    mean: Cell = (0.0, 0.0)
    """Falls of the log-loss per step."""
    usual: Cell = (0.0, 0.0)
    """The same of the last few windows."""
    square: Cell = (0.0, 0.0)
    """Their squares."""
    table: tuple[Cells, ...] = (NO_CELLS,) * len(STATES)
    """Advantages, by state and width: falls per step less the usual one then, over the scale."""
    seconds: Cells = NO_CELLS
    """Seconds per step, by width."""
    nbytes: Cells = NO_CELLS
    """Bytes per step, by width."""


def _add(cell: Cell, value: float, fade: float) -> Cell:
    return cell[0] * fade + 1, cell[1] * fade + value


def _add_at(cells: Cells, at: int, value: float) -> Cells:
    """Fade all cells, and add a value to one."""
    faded = tuple((count * FADE, total * FADE) for count, total in cells)
    return tuple(
        (count + 1, total + value) if i == at else (count, total)
        for i, (count, total) in enumerate(faded)
    )


def _scale(state: Learning) -> float:
    """Return the root mean square of the last few falls per step; 0 before the first."""
    count, total = state.square
    return math.sqrt(total / count) if count else 0.0


def step_seconds(seconds: Cells, nbytes: Cells) -> tuple[float, ...]:
    """Return the expected seconds of a step at each width: measured, or from the line.

    Least squares over the measured widths, of seconds = compute + slope · bytes with compute and
    slope at least 0. Bytes of a width that was never used are those of the nearest used one, in
    proportion to the bits. At least one width was used.
    """
    used = [at for at, (count, _) in enumerate(seconds) if count > 0]
    weight = np.array([seconds[at][0] for at in used])
    size = np.array([nbytes[at][1] / nbytes[at][0] for at in used])
    took = np.array([seconds[at][1] / seconds[at][0] for at in used])
    middle, mean = (float(np.average(one, weights=weight)) for one in (size, took))
    spread = float(np.average((size - middle) ** 2, weights=weight))
    slope = 0.0
    # Sizes that are nearly the same, or no bytes at all, say nothing about the link.
    if middle >= 1 and spread > (1e-3 * middle) ** 2:
        slope = float(np.average((size - middle) * (took - mean), weights=weight)) / spread
        slope = max(0.0, min(slope, mean / middle))
    found = []
    for at, bits in enumerate(WIDTHS):
        if at in used:
            found.append(float(took[used.index(at)]))
            continue
        near = min(used, key=lambda one: abs(one - at))
        guess = float(size[used.index(near)]) * bits / WIDTHS[near]
        # Below what any step took lies only the extrapolation's error.
        found.append(max(mean + slope * (guess - middle), float(took.min()) / 100))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Learned(BitController[Learning]):
    """See the module. It decides every `every` steps; what it tries follows from `seed` alone."""

    seed: int = 0
    every: int = EVERY
    late: float = 0.0
    """See `zkv_codecs.late`: what the servers' rule makes of what comes late."""

    def __post_init__(self) -> None:
        check_every(self.every)
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"bits: seed={self.seed}: it is at least 0 and below 2**63")
        if not 0 <= self.late <= 1:
            raise ValueError(f"bits: late={self.late}: it is a number from 0 to 1")

    @property
    def text(self) -> str:
        """See `BitController.text`."""
        every = "" if self.every == EVERY else f",every={self.every}"
        late = "" if not self.late else f",late={self.late!r}"
        return f"bits:learned,seed={self.seed}{every}{late}"

    def under(self, rule: str) -> Learned:
        """Return this value where the servers apply this rule, if `late` is not set."""
        return self if self.late else replace(self, late=late_under(rule))

    def start(self) -> Learning:
        """See `BitController.start`."""
        return Learning(FIRST, "step 0: it costs few bytes and hardly a step")

    def observe(self, state: Learning, seen: Observation) -> tuple[Learning, int]:
        """See `BitController.observe`."""
        state = replace(state, step=state.step + 1, window=state.window.add(seen))
        if state.window.full(self.every):
            state = self._choose(_learn(state, self.every))
        return state, state.bits

    def _choose(self, state: Learning) -> Learning:
        bits, why = best(state, self.late)
        chance = np.random.default_rng((self.seed, state.decisions)).random(2)
        explore = EXPLORE_MIN + EXPLORE / (1 + state.decisions / TRIES)
        if state.decisions < SECOND_AT:
            bits, why = FIRST, "there is no other to judge it by yet"
        elif state.decisions == SECOND_AT:
            bits, why = (
                neighbour(FIRST, 1),
                "with seconds of two widths those of others can be told",
            )
        elif chance[0] < explore:
            tried = neighbour(bits, -1 if chance[1] < 0.5 else 1)
            if tried != bits and self._worth_a_try(state, bits, tried):
                bits, why = tried, f"it is tried beside {bits} bits, which seemed best"
        return replace(state, bits=bits, why=f"step {state.step}: {why}")

    def _worth_a_try(self, state: Learning, bits: int, tried: int) -> bool:
        found = dict(zip(WIDTHS, rates(state, self.late), strict=True))
        return found[tried] >= TRY_LEAST * found[bits]


def _learn(state: Learning, every: int) -> Learning:
    """Take in a window that is full, or was cut short as the loss was no number."""
    now, last, at = state.window, state.last, WIDTHS.index(state.bits)
    state = replace(
        state,
        window=EMPTY,
        last=now if math.isfinite(now.loss) else last,
        decisions=state.decisions + 1,
        seconds=_add_at(state.seconds, at, now.step_s),
        nbytes=_add_at(state.nbytes, at, now.nbytes / now.steps),
    )
    if last is None:
        return state
    fell = fall(last.mean_loss, now.mean_loss)
    per_step = fell / every
    scale = _scale(state)
    count, total = state.usual
    more = max(-MOST, min(MOST, (per_step - total / count) / scale)) if scale else 0.0
    return replace(
        state,
        mean=_add(state.mean, per_step, FADE),
        usual=_add(state.usual, per_step, FADE_USUAL),
        square=_add(state.square, per_step**2, FADE_USUAL),
        table=tuple(
            _add_at(row, at if one == state.recent else -1, more)
            for one, row in enumerate(state.table)
        ),
        recent=1 if abs(fell) < STOOD else 2 if fell > 0 else 0,
    )


def _beyond_chance(value: float, count: float) -> float:
    """Return the mean of so many advantages less ERRORS standard errors, or 0 if it is less."""
    return math.copysign(max(0.0, abs(value) - ERRORS / math.sqrt(count or 1.0)), value)


def expected_falls(state: Learning, late: float = 0.0) -> tuple[float, ...]:
    """Return the expected fall of the log-loss per step at each width, in the current state.

    mean / steps + scale · (b(A) + b(C − A)): A is a width's mean advantage over all states, C that
    in this state, and b takes off what chance may account for, 2 / √n, as advantages are scaled to
    a deviation of about 1. `steps` of a width are worth a dense one, by what it keeps back; of one
    that was never in use it is the most that it may be.
    """
    count, total = state.mean
    mean, scale = max(FALL_LEAST, total / count if count else 0.0), _scale(state)
    found = []
    for at, bits in enumerate(WIDTHS):
        cells = [row[at] for row in state.table]
        n_all, n = sum((n for n, _ in cells), 0.0), cells[state.recent][0]
        general = sum(s for _, s in cells) / n_all if n_all else 0.0
        here = cells[state.recent][1] / n - general if n else 0.0
        beyond = _beyond_chance(general, n_all) + _beyond_chance(here, n)
        worth = steps_for_one if state.seconds[at][0] else most_steps_for_one
        found.append(mean / worth(KEPT_BACK[bits], late) + scale * beyond)
    return tuple(found)


def rates(state: Learning, late: float = 0.0) -> list[float]:
    """Return the expected fall of the log-loss per second at each width."""
    seconds = step_seconds(state.seconds, state.nbytes)
    return [one / took for one, took in zip(expected_falls(state, late), seconds, strict=True)]


def best(state: Learning, late: float = 0.0) -> tuple[int, str]:
    """Return the width of the largest expected fall per second, and why.

    Where no width is expected to let the loss fall, seconds say nothing: it is the width of the
    largest fall (or least rise) per step.
    """
    falls, found = expected_falls(state, late), rates(state, late)
    if max(falls) <= 0:
        top = max(range(len(WIDTHS)), key=lambda at: (falls[at], at))
        return WIDTHS[top], "no width let the loss fall, and this one harmed least"
    at = max(at for at, rate in enumerate(found) if rate >= (1 - NEAR) * max(found))
    return WIDTHS[at], (
        f"after a window in which the loss {STATES[state.recent]}, its log-loss is expected to "
        f"fall by {found[at]:.3g}/s ({falls[at] / found[at]:.3g} s a step), the most of all widths"
    )
