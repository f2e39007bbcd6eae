"""Controllers of precision as text: `bits:schedule=32@0,8@100`, `bits:heuristic`, `bits:learned`.

The text is a controller's plain form, and reads back as an equal value.
"""

from __future__ import annotations

from typing import Any

from zkv_codecs.bits import EVERY, BitController, Heuristic, Schedule
from zkv_codecs.bits_learned import Learned
from zkv_codecs.spec import number

FORMS = "bits:schedule=32@0,8@100,4@1000, bits:heuristic, bits:learned,seed=3"
OPTIONS = {"heuristic": ("every",), "learned": ("seed", "every", "late")}


def is_bits(text: str) -> bool:
    """Whether this text means a controller, not a codec."""
    return text.strip().partition(":")[0] == "bits"


def controller(text: str) -> BitController[Any]:
    """Return the controller of this text.

    `heuristic` and `learned` take `every=N` (steps between decisions), `learned` takes `seed=N` and
    `late=X` too.

    Raises:
        ValueError: none; the text says what is wrong, and lists the forms.
    """
    try:
        return _controller(text.strip())
    except ValueError as error:
        raise ValueError(f"{text[:80]!r}: {error}; forms are {FORMS}") from None


def _controller(text: str) -> BitController[Any]:
    head, _, rest = text.partition(":")
    if head != "bits":
        raise ValueError("it begins with bits:")
    if rest.startswith("schedule="):
        points = [one.partition("@") for one in rest.removeprefix("schedule=").split(",")]
        return Schedule(tuple((_whole(step), _whole(bits)) for bits, _, step in points))
    name, *given = rest.split(",")
    if name not in OPTIONS:
        raise ValueError(f"no controller is called {name[:40]!r}")
    options: dict[str, int] = {}
    late = 0.0
    for one in given:
        option, _, value = one.partition("=")
        if option not in OPTIONS[name] or option in options:
            raise ValueError(
                f"{name} takes {' and '.join(OPTIONS[name])}, each once, not {one[:40]!r}"
            )
        if option == "late":
            options[option], late = 0, number("bits: late", value, "0.5")
        else:
            options[option] = _whole(value)
    every = options.get("every", EVERY)
    if name == "heuristic":
        return Heuristic(every)
    return Learned(options.get("seed", 0), every, late)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise ValueError(f"{text[:40]!r} is no whole number")
    return int(text)
