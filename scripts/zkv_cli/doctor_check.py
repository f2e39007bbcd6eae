"""What a check of `zkv doctor` is, and in which order checks are made. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from textwrap import wrap
from typing import Any, Literal

Outcome = Literal["ok", "warn", "fail", "skipped"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    `found` is what was seen, `means` what follows from that in plain words, `todo` what to do; of
    a skipped one `found` is the reason. `figures` are for programs, units last in their names.
    """

    name: str
    outcome: Outcome
    found: str
    means: str = ""
    todo: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def ok(name: str, found: str, **figures: Any) -> Check:
    """Return a check that has passed."""
    return Check(name, "ok", found, figures=figures)


def skipped(name: str, why: str) -> Check:
    """Return a check that was not made."""
    return Check(name, "skipped", why)


@dataclass(frozen=True, slots=True)
class Step:
    """Checks that are made together: `make` looks and returns them, once those named in `needs`
    have not failed."""

    name: str
    make: Callable[[], Iterable[Check]]
    needs: Sequence[str] = ()


def checks(steps: Sequence[Step]) -> Iterator[Check]:
    """Make the checks one after the other; one that needs what has failed is skipped by name, also
    where something between them was."""
    causes: dict[str, str] = {}
    for step in steps:
        failed = [causes[name] for name in step.needs if name in causes]
        if failed:
            causes[step.name] = failed[0]
            yield skipped(step.name, f"needs {failed[0]}, which failed")
            continue
        for check in step.make():
            if check.outcome == "fail":
                causes[check.name] = check.name
            yield check


def healthy(made: Sequence[Check]) -> bool:
    """Return whether nothing has failed."""
    return all(check.outcome != "fail" for check in made)


# --- as text ---------------------------------------------------------------------------------

MARKS: dict[Outcome, str] = {"ok": "ok", "warn": "WARN", "fail": "FAIL", "skipped": "skipped"}
MARK_WIDTH, NAME_WIDTH, WIDTH = 8, 20, 100


def lines_of(check: Check) -> list[str]:
    """Return a check as text: one line, and what it means and what to do if it is not well."""
    first = f"{MARKS[check.outcome]:<{MARK_WIDTH}}{check.name:<{NAME_WIDTH}}{check.found}"
    more = [check.means, f"-> {check.todo}" if check.todo else ""]
    indent = " " * MARK_WIDTH
    wrapped = [
        wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        for text in more
    ]
    return [first.rstrip(), *(line for lines in wrapped for line in lines)]


def summary(made: Sequence[Check]) -> str:
    """Return the last line: what is wrong, by name."""
    parts = []
    for outcome, words in (("fail", "failed"), ("warn", "with a warning")):
        names = [check.name for check in made if check.outcome == outcome]
        if names:
            parts.append(f"{len(names)} {words} ({', '.join(names)})")
    looked = sum(check.outcome != "skipped" for check in made)
    return f"{looked} checks made: " + ("; ".join(parts) if parts else "all is well")
