"""What a group of keys keeps book of: decisions of one turn, contributions on their way, pins,
tallies."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from zkv import control as c
from zkv.wire import ContributionId

CANCELLED = "cancelled: the update happened without it"


class Decisions:
    """What one turn of the broker has decided: entries for the log, messages for workers."""

    def __init__(self, index: int = 0) -> None:
        self.first_index = index
        self.entries: list[c.Entry] = []
        self.messages: list[tuple[int, c.Message]] = []

    @property
    def index(self) -> int:
        """The index that the next entry will have."""
        return self.first_index + len(self.entries)

    def log(self, entry: c.Entry) -> None:
        """Append an entry to the log."""
        self.entries.append(entry)

    def tell(self, incarnation: int, message: c.Message) -> None:
        """Send a message to the worker with this incarnation, after the entries so far are
        logged."""
        self.messages.append((incarnation, message))


@dataclass(slots=True)
class Arrival:
    """A contribution on its way: who holds it, and whether the synchronizer has been told."""

    contribution: ContributionId
    number: int
    grant: int = 0
    weight: float = 0.0
    misled: bool = False
    """Whether its blocks have named another weight than it has in the end."""
    loss: float | None = None
    nbytes: int = 0
    finished: bool = False
    placement: int = 0
    """That its blocks were sent by."""
    held: set[int] = field(default_factory=set)
    void: str = ""
    clip: float = 1.0
    """What its gradient is multiplied with, as its norm is above a limit."""
    arrived: bool = False


@dataclass(slots=True)
class Pins:
    """Which model versions are on their way to workers; at most `versions_max` at a time (rule
    3)."""

    versions_max: int
    by_grant: dict[tuple[int, int, int], int] = field(default_factory=dict)
    on_demand: set[int] = field(default_factory=set)
    """Incarnations that ask servers for what they need of the model: they hold no version, and what
    they were granted stays pinned until they have finished with it."""

    def admits(self, version: int) -> bool:
        """Return whether one more grant may pin this version."""
        versions = set(self.by_grant.values())
        return version in versions or len(versions) < self.versions_max

    def release(self, incarnation: int) -> None:
        """Forget all grants of a worker that is gone."""
        self.by_grant = {name: v for name, v in self.by_grant.items() if name[0] != incarnation}
        self.on_demand.discard(incarnation)


@dataclass(slots=True)
class Tally:
    """What became of one worker's contributions: gradients, not updates (the version counts
    those)."""

    applied: int = 0
    late: int = 0
    """Finished after the update had happened without them."""
    cancelled: int = 0
    """Unfinished when the update happened without them."""
    discarded: int = 0
    """Refused by a guard."""
    staleness: Counter[int] = field(default_factory=Counter)
    """How many of the applied ones were how many updates old."""

    def plain(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {
            "applied": self.applied,
            "late": self.late,
            "cancelled": self.cancelled,
            "discarded": self.discarded,
            "staleness": {str(age): count for age, count in sorted(self.staleness.items())},
        }
