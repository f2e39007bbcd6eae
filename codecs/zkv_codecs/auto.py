"""`codec=auto`: for each key the codec that makes a step shortest, or none if none pays.

Whether a codec pays depends on the machine and the link: of more than 200 set-ups in data centres
6 gained (Agarwal et al., MLSys 2022). So it is computed, from what was measured here: seconds to
encode and decode an element, bytes of an element, bytes per second of the link. What a codec cuts
off has a budget of its own, and a price.

Nothing here measures or remembers: measurements and the codecs in use come in as values, and a
choice goes out with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from zkv_codecs import spec
from zkv_codecs.late import late_under, most_steps_for_one, steps_for_one

CANDIDATES: tuple[str, ...] = ("none", "fp16", "int8+ef", "onebit+ef", "topk:0.01+fp16+ef")
OWED, LOST, MARGIN = 10.0, 0.01, 0.05
NUMBERS = ("owed", "lost", "margin", "late")
SLACK = 1.25
"""The codec in use may exceed the budget by this factor, as norms of gradients vary by step."""
FORMS = "auto, auto:owed=4,lost=0.001,margin=0.1,late=0.5,pipelined,candidates=none|int8+ef"


def _check(where: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{where}: {name}={value}: it is a finite number, at least 0")


@dataclass(frozen=True, slots=True)
class Measured:
    """What one codec does to one key.

    Raises:
        ValueError: a number below 0, infinite or NaN.
    """

    encode_s: float
    """Seconds per element, at a worker."""
    decode_s: float
    """Seconds per element until it is in the sum: of all that a server decodes in one step, if it
    decodes the workers' contributions one after the other."""
    nbytes: float
    """On the wire, per element of the dense array."""
    error: float | None = None
    """Norm of what was cut off, over the norm of the gradient; with error feedback that is the
    residual's. Best from the sums of squares of several steps. None: not known yet."""
    most: float | None = None
    """What `error` may be in the long run, where it is a guess; None: it was seen in use."""

    def __post_init__(self) -> None:
        _check(
            "auto: measured",
            encode_s=self.encode_s,
            decode_s=self.decode_s,
            nbytes=self.nbytes,
            error=self.error or 0.0,
            most=self.most or 0.0,
        )


DENSE = Measured(0.0, 0.0, 4.0, 0.0)
"""Of `none`, if nobody measured it."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key: its elements, what was measured of each candidate (by text), and the codec in use.

    A candidate that was not measured is not chosen.
    """

    elements: int
    measured: Mapping[str, Measured]
    current: str = "none"


@dataclass(frozen=True, slots=True)
class Conditions:
    """What all keys share: bytes per second of one worker's link, and seconds of a step that no
    codec changes, such as the gradient's computation (0: only what travels counts).

    Raises:
        ValueError: a link without bytes per second, or seconds below 0.
    """

    bytes_per_s: float
    compute_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_s < math.inf:
            raise ValueError(f"auto: bytes_per_s={self.bytes_per_s}: it is above 0 and finite")
        _check("auto", compute_s=self.compute_s)


@dataclass(frozen=True, slots=True)
class Choice:
    """A codec for one key, the expected seconds of its part of a step, and why, in one line."""

    codec: str
    seconds: float
    why: str


def feeds_back(codec: str) -> bool:
    """Whether what this codec cuts off is sent later, so that it is late and not lost."""
    return codec.rpartition("+")[2].partition(":")[0] in ("ef", "dgc")


@dataclass(frozen=True, slots=True)
class Auto:
    """Chooses among candidates, which are listed from the gentlest to the harshest.

    Of those within the budget of error, the first that takes at most 1 + `margin` of the fastest
    one's time is chosen: a harsher codec has to be worth it. `none` is always the first of all. The
    codec in use stays while it takes at most 1 + 2 · `margin` of the fastest one's time and less
    than `none`, so that the choice does not flap. A candidate whose error is not known yet is taken
    to be within the budget: it will be known as soon as the candidate is in use.

    The budget: `owed`, for error feedback, is the norm of the residual in norms of a gradient, so
    about the number of steps that what was cut off comes late; `lost`, without feedback, is the
    share of a gradient that never comes.

    The price: steps with what comes late are worth less under some update rules, so a codec's time
    is multiplied by `zkv_codecs.late.steps_for_one`. Until a codec was in use the price is the
    highest that it may be (`most_steps_for_one`, of `Measured.most`): what a trial leaves in a
    running mean outlasts it, so one that was not worth it costs more than a few steps. `late` None:
    whoever knows the rule sets it (a broker does, `under`); until then it is 0, and nothing is
    worth less.

    Raises:
        ValueError: no candidate, one that is given twice, or a number below 0.
    """

    candidates: tuple[str, ...] = CANDIDATES
    owed: float = OWED
    lost: float = LOST
    margin: float = MARGIN
    pipelined: bool = False
    """Whether encoding, sending and decoding overlap."""
    late: float | None = None

    def __post_init__(self) -> None:
        if not self.candidates or len(set(self.candidates)) != len(self.candidates):
            raise ValueError(f"auto: candidates {self.candidates}: name some, each once")
        for text in self.candidates:
            if spec.codec(text).chain.is_vote:
                raise ValueError(f"auto: candidates {text}: votes and gradients cannot be summed")
        _check("auto", owed=self.owed, lost=self.lost, margin=self.margin, late=self.late or 0.0)

    @property
    def text(self) -> str:
        """What `auto` reads as this value."""
        plain = Auto()
        parts = [
            f"{name}={getattr(self, name)!r}"
            for name in NUMBERS
            if getattr(self, name) != getattr(plain, name)
        ]
        parts += ["pipelined"] if self.pipelined else []
        if self.candidates != plain.candidates:
            parts.append("candidates=" + "|".join(self.candidates))
        return "auto" + (":" + ",".join(parts) if parts else "")

    def __str__(self) -> str:
        return self.text

    def seconds(self, elements: float, one: Measured, link: float, compute_s: float) -> float:
        """Return the seconds of a step: compute + encode + bytes / link + decode.

        If stages overlap, the longest of them. That is a key's own bound; where several keys
        overlap each other the step takes no longer than the sum over keys.
        """
        stages = (
            compute_s,
            elements * one.encode_s,
            elements * one.nbytes / link,
            elements * one.decode_s,
        )
        return max(stages) if self.pipelined else sum(stages)

    def under(self, rule: str) -> Auto:
        """Return this value where the servers apply this rule, if `late` is not set."""
        late = late_under(rule)
        return replace(self, late=late) if late and self.late is None else self

    def steps(self, codec: str, one: Measured) -> float:
        """Return how many steps with a codec are worth a dense one, at least 1."""
        late = self.late or 0.0
        if not feeds_back(codec):
            return 1.0
        if one.most is not None:
            return most_steps_for_one(one.most, late)
        return steps_for_one(one.error or 0.0, late)

    def choose(
        self, keys: Mapping[str | int, Key], conditions: Conditions
    ) -> dict[str | int, Choice]:
        """Return a choice for each key. Computing is shared out by elements."""
        total = sum(key.elements for key in keys.values()) or 1
        return {
            name: self._one(name, key, conditions, conditions.compute_s * (key.elements / total))
            for name, key in keys.items()
        }

    def _one(self, name: str | int, key: Key, conditions: Conditions, compute_s: float) -> Choice:
        measured = {"none": key.measured.get("none", DENSE)}
        measured |= {
            codec: key.measured[codec] for codec in self.candidates if codec in key.measured
        }
        took = {
            codec: self.seconds(key.elements, one, conditions.bytes_per_s, compute_s)
            for codec, one in measured.items()
        }
        price = {codec: took[codec] * self.steps(codec, one) for codec, one in measured.items()}
        refused = {
            codec: over
            for codec, one in measured.items()
            if (over := self._over(codec, one, codec == key.current))
        }
        allowed = [codec for codec in measured if codec not in refused]
        fastest = min(price[codec] for codec in allowed)
        chosen = next(codec for codec in allowed if price[codec] <= (1 + self.margin) * fastest)
        stays = (
            key.current in allowed
            and price[key.current] <= (1 + 2 * self.margin) * fastest
            and (key.current == "none" or price[key.current] < price["none"])
        )
        if stays:
            chosen = key.current
        why = _line(f"{name!r} ({key.elements} elements)", chosen, took, price, allowed)
        return Choice(chosen, took[chosen], "; ".join([why, *refused.values()]))

    def _over(self, codec: str, one: Measured, current: bool) -> str:
        """Return in which way a codec exceeds the budget; "" if it does not."""
        slack = SLACK if current else 1.0
        if codec == "none" or one.error is None:
            return ""
        if feeds_back(codec) and one.error > self.owed * slack:
            return f"{codec} owes {one.error:.3g} gradients, {self.owed:g} at most"
        if not feeds_back(codec) and one.error > self.lost * slack:
            return f"{codec} loses {one.error:.3g} of a gradient, {self.lost:g} at most"
        return ""


def _line(
    what: str,
    chosen: str,
    took: Mapping[str, float],
    price: Mapping[str, float],
    allowed: list[str],
) -> str:
    """Say what was chosen, and against what."""
    text = f"{what}: {chosen}, {_seconds(chosen, took, price)}"
    others = [codec for codec in allowed if codec != chosen]
    if chosen != "none":
        return f"{text}, against {took['none']:.3g} s with none"
    if not others:
        return f"{text}; nothing else may be chosen"
    best = min(others, key=lambda codec: price[codec])
    return f"{text}: not even {best} pays, at {_seconds(best, took, price)}"


def _seconds(codec: str, took: Mapping[str, float], price: Mapping[str, float]) -> str:
    worth = price[codec] / took[codec] if took[codec] > 0 else 1.0
    more = f" (of which it takes {worth:.3g} times as many)" if worth >= 1.01 else ""
    return f"{took[codec]:.3g} s a step{more}"


def is_auto(text: str) -> bool:
    """Whether this text means `auto`, not one codec."""
    return text.strip().partition(":")[0] == "auto"


def auto(text: str) -> Auto:
    """Return the value of this text. `candidates` come last, separated by |.

    Raises:
        ValueError: none, or no such candidate; the text says what is wrong, and lists the forms.
    """
    try:
        return _auto(text.strip())
    except ValueError as error:
        raise ValueError(f"{text[:80]!r}: {error}; forms are {FORMS}") from None


def _auto(text: str) -> Auto:
    head, colon, rest = text.partition(":")
    if head != "auto" or (colon and not rest):
        raise ValueError("it is auto, or auto: and options")
    found: dict[str, float] = {}
    options, names, listed = rest.partition("candidates=")
    candidates = CANDIDATES
    if names:
        candidates = tuple(spec.codec(one).text for one in listed.split("|"))
    given = [one for one in options.split(",") if one]
    for one in given:
        name, equals, value = one.partition("=")
        wanted = name in NUMBERS if equals else name == "pipelined"
        if not wanted or name in found:
            raise ValueError(
                f"auto takes owed, lost, margin and late, pipelined, and candidates, each once, "
                f"not {one[:40]!r}"
            )
        found[name] = spec.number(f"auto: {name}", value, f"{name}=0.1") if equals else 1.0
    return Auto(
        candidates,
        found.get("owed", OWED),
        found.get("lost", LOST),
        found.get("margin", MARGIN),
        "pipelined" in found,
        found.get("late"),
    )
