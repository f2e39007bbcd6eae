"""Staleness-aware updates: what a server does to a gradient that was computed on an older model.

A value, composed of at most three parts, written "scale+dc:0.04+drop:5":

- ``scale``: the gradient counts 1 / (1 + staleness) of its weight, while the divisor of the mean
  stays (Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI
  2016, arXiv:1511.05950, with a staleness of 0 counting fully).
- ``dc:L``: delay compensation, g + L · g ⊙ g ⊙ (w_now − w_then) elementwise (Zheng, Meng, Wang,
  Chen, Yu, Ma, Liu, "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML
  2017, arXiv:1609.08326; L is its λ, constant here).
- ``drop:S``: a gradient more than S updates old is not applied at all.

Staleness is the model's version just before the update less the version that the gradient was
computed on. Pure; knows no servers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from zkv.dtypes import Array

FORMS = "none, or scale, dc:LAMBDA and drop:BOUND joined by '+', such as scale+drop:5"


@dataclass(frozen=True, slots=True)
class Staleness:
    """What happens to stale gradients; the default is nothing."""

    scale: bool = False
    compensation: float = 0.0
    """The λ of delay compensation; 0: none."""
    bound: int | None = None
    """More updates than this, and the gradient is dropped; None: never."""

    def __str__(self) -> str:
        parts = ["scale"] if self.scale else []
        parts += [f"dc:{self.compensation!r}"] if self.compensation else []
        parts += [f"drop:{self.bound}"] if self.bound is not None else []
        return "+".join(parts) or "none"

    def factor(self, staleness: int) -> float:
        """Return what the gradient is multiplied with: 1 / (1 + staleness), or 1."""
        return 1.0 / (1.0 + staleness) if self.scale else 1.0

    def refuses(self, staleness: int) -> str:
        """Return why a gradient of this age is dropped; "" if it is not."""
        if self.bound is None or staleness <= self.bound:
            return ""
        return f"late: {staleness} updates old, and more than {self.bound} are dropped"

    def compensated(self, gradient: Array, now: Array, then: Array) -> Array:
        """Return g + λ · g ⊙ g ⊙ (w_now − w_then), a fresh array of the gradient's dtype.

        All three are flat arrays of one wide dtype (float32 or float64).
        """
        with np.errstate(all="ignore"):
            moved = now - then
            moved *= gradient
            moved *= gradient
            moved *= gradient.dtype.type(self.compensation)
            moved += gradient
        return moved


def staleness(text: str) -> Staleness:
    """Return the value that a text means.

    Raises:
        ValueError: an unknown or repeated part, or a number out of its range.
    """
    if text == "none":
        return Staleness()
    found: dict[str, str] = {}
    for part in text.split("+"):
        name, _, number = part.strip().partition(":")
        if name in found:
            raise ValueError(f"staleness {text!r}: {name} stands twice; valid is {FORMS}")
        if name not in ("scale", "dc", "drop") or (name == "scale") != (number == ""):
            raise ValueError(f"staleness {text!r}: {part!r} is not valid; valid is {FORMS}")
        found[name] = number
    return Staleness(
        "scale" in found, _rate(found.get("dc"), text), _count(found.get("drop"), text)
    )


def _rate(number: str | None, text: str) -> float:
    if number is None:
        return 0.0
    try:
        rate = float(number)
    except ValueError:
        rate = -1.0
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"staleness {text!r}: dc needs a positive number, as in dc:0.04")
    return rate


def _count(number: str | None, text: str) -> int | None:
    if number is None:
        return None
    if not number.isdecimal():
        raise ValueError(f"staleness {text!r}: drop needs a count of updates, as in drop:5")
    return int(number)
