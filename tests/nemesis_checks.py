"""What must hold of a run in which processes died and networks broke: histories in, violations out.

Pure: a history is what workers have said (`nemesis_worker`), in order, with the clock that all
processes of a machine share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
import numpy.typing as npt

SETTLED = ("committed", "cancelled", "discarded", "withdrawn", "pending")


@dataclass(frozen=True, slots=True)
class Said:
    """A line of a worker's: its kind, when it was said, by which of its processes, and the rest."""

    kind: str
    at: float
    life: int
    words: tuple[str, ...]


def said(line: str, life: int) -> Said:
    """Return what a line says.

    Raises:
        ValueError: it is no line of a worker's.
    """
    kind, at, *words = line.split(" ")
    return Said(kind, float(at), life, tuple(words))


@dataclass(frozen=True, slots=True)
class Try:
    """One attempt to contribute at an index, and what its worker has said of it."""

    index: int
    version: int
    """That it was granted."""
    finished: bool = False
    outcome: str = ""
    """"" where the worker was killed before it could say it."""

    @property
    def counts(self) -> tuple[int, int]:
        """How often it counts, at least and at most."""
        if self.outcome == "committed":
            return 1, 1
        if self.outcome in ("cancelled", "discarded", "withdrawn") or not self.finished:
            return 0, 0
        return 0, 1


def tries(history: Iterable[Said]) -> list[Try]:
    """Return all attempts of one worker, in order."""
    found: list[Try] = []
    latest: dict[int, int] = {}
    for one in history:
        if one.kind == "S":
            latest[int(one.words[0])] = len(found)
            found.append(Try(int(one.words[0]), int(one.words[1])))
        elif one.kind in ("F", "O"):
            at = latest[int(one.words[0])]
            if one.kind == "F":
                found[at] = replace(found[at], finished=True)
            else:
                found[at] = replace(found[at], outcome=one.words[1])
    return found


def wrong_counts(rank: int, history: Iterable[Said], values: npt.NDArray[np.float32]) -> list[str]:
    """Compare what one worker has said with the model's own count of it: a digit to base 4."""
    bounds: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    outcomes: dict[int, list[str]] = defaultdict(list)
    for one in tries(history):
        least, most = bounds[one.index]
        bounds[one.index] = (least + one.counts[0], most + one.counts[1])
        outcomes[one.index].append(one.outcome or ("unheard" if one.finished else "unfinished"))
    digits = values.astype(np.int64) // 4**rank % 4
    found = []
    for index, digit in enumerate(digits.tolist()):
        least, most = bounds[index]
        if not least <= digit <= most:
            what = "lost" if digit < least else "counted too often"
            told = ", ".join(outcomes[index]) or "never begun"
            found.append(f"worker {rank}, index {index}: {what}: counts {digit}, was told {told}")
    return found


def contradictions(rank: int, history: Sequence[Said]) -> list[str]:
    """Return what a worker itself has found wrong in what it was granted, and older versions.

    Versions count of batches that were committed: one that is granted ahead of the broker's log may
    never come to be, and no batch on it counts.
    """
    found = [f"worker {rank}: {' '.join(one.words)}" for one in history if one.kind == "B"]
    counted = [one for one in tries(history) if one.outcome == "committed"]
    highest = counted[0] if counted else None
    for one in counted:
        assert highest is not None
        if one.version < highest.version:
            found.append(
                f"worker {rank}: index {one.index} was committed on version {one.version}, after "
                f"index {highest.index} on version {highest.version}"
            )
        else:
            highest = one
    return found


def beyond_slack(slack: int, histories: Mapping[int, Sequence[Said]]) -> list[str]:
    """Return starts that were more than `slack` finished batches ahead of a member of that time.

    A worker says that it finishes before the broker can know, so what it has said is never less
    than its clock; and it was a member at a moment if it said something of the same membership
    before and after.
    """
    found = []
    spans = {rank: _memberships(history) for rank, history in histories.items()}
    for rank, history in histories.items():
        for one in history:
            if one.kind != "S":
                continue
            own = int(one.words[2])
            for other, memberships in spans.items():
                if other == rank:
                    continue
                slowest = _finished_at(memberships, one.at)
                if slowest is not None and own > slowest + slack:
                    found.append(
                        f"worker {rank} started batch {own} when worker {other} had finished "
                        f"{slowest}: more than {slack} ahead"
                    )
    return found


Membership = tuple[list[float], list[int], float]
"""When it has finished batches, how many it had then, and when it was last granted one."""


def _memberships(history: Sequence[Said]) -> list[Membership]:
    found: list[Membership] = []
    times: list[float] = []
    counts: list[int] = []
    last = 0.0
    for one in (*history, Said("J", 0.0, -1, ())):
        if one.kind in ("J", "E"):
            if times:
                found.append((times, counts, last))
            times, counts, last = [], [], 0.0
        elif one.kind == "S":
            if not times:
                times.append(one.at)
                counts.append(int(one.words[2]))
            last = one.at
        elif one.kind == "F":
            times.append(one.at)
            counts.append(int(one.words[1]) + 1)
    return found


def _finished_at(memberships: Sequence[Membership], at: float) -> int | None:
    """Return how many batches a worker had finished at most; None: it was no member, for sure."""
    for times, counts, last in memberships:
        if times[0] <= at < last:
            return counts[int(np.searchsorted(times, at, side="right")) - 1]
    return None


def committed_after(at: float, histories: Mapping[int, Sequence[Said]]) -> dict[int, float | None]:
    """Return how long after `at` each worker has first begun a batch that was committed then."""
    found: dict[int, float | None] = {}
    for rank, history in histories.items():
        begun: set[str] = set()
        found[rank] = None
        for one in [*takewhile(lambda one: one.at >= at, reversed(history))][::-1]:
            if one.kind == "S":
                begun.add(one.words[0])
            elif one.kind == "O" and one.words[1] == "committed" and one.words[0] in begun:
                found[rank] = one.at - at
                break
    return found


def outcomes(histories: Mapping[int, Sequence[Said]]) -> dict[str, int]:
    """Return how many attempts have come to what."""
    found = dict.fromkeys((*SETTLED, "unheard", "unfinished"), 0)
    for history in histories.values():
        for one in tries(history):
            found[one.outcome or ("unheard" if one.finished else "unfinished")] += 1
    return {name: count for name, count in found.items() if count}


def rate(began: float, ended: float, histories: Mapping[int, Sequence[Said]]) -> float:
    """Return how many contributions were settled a second in this time, one way or the other."""
    count = sum(
        one.kind == "O" and one.words[1] != "pending" and began <= one.at < ended
        for history in histories.values()
        for one in history
    )
    return count / max(ended - began, 1e-9)
