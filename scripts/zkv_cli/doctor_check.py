"""What a check of `zkv doctor` is, and in which order checks are made. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
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
    have passed (a warning is no failure)."""

    name: str
    make: Callable[[], Iterable[Check]]
    needs: Sequence[str] = ()


def checks(steps: Sequence[Step]) -> Iterator[Check]:
    """Make the checks one after the other; one that needs what has not passed is skipped."""
    outcomes: dict[str, Outcome] = {}
    for step in steps:
        missing = [name for name in step.needs if outcomes.get(name) in ("fail", "skipped")]
        if missing:
            why = "failed" if outcomes[missing[0]] == "fail" else "was skipped"
            made: Iterable[Check] = [skipped(step.name, f"needs {missing[0]}, which {why}")]
        else:
            made = step.make()
        for check in made:
            outcomes[check.name] = check.outcome
            yield check


def healthy(made: Sequence[Check]) -> bool:
    """Return whether nothing has failed."""
    return all(check.outcome != "fail" for check in made)


# --- as text ---------------------------------------------------------------------------------

MARKS: dict[Outcome, str] = {"ok": "ok", "warn": "WARN", "fail": "FAIL", "skipped": "skipped"}
NAME_WIDTH = 20


def lines_of(check: Check) -> list[str]:
    """Return a check as text: one line, and what it means and what to do if it is not well."""
    first = f"{MARKS[check.outcome]:<8}{check.name:<{NAME_WIDTH}}{check.found}"
    more = [check.means, f"-> {check.todo}" if check.todo else ""]
    return [first.rstrip(), *(f"{'':8}{text}" for text in more if text)]


def summary(made: Sequence[Check]) -> str:
    """Return the last line: what is wrong, by name."""
    parts = []
    for outcome, words in (("fail", "failed"), ("warn", "with a warning")):
        names = [check.name for check in made if check.outcome == outcome]
        if names:
            parts.append(f"{len(names)} {words} ({', '.join(names)})")
    looked = sum(check.outcome != "skipped" for check in made)
    return f"{looked} checks made: " + ("; ".join(parts) if parts else "all is well")
