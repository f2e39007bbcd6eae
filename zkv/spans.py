"""Spans: what a process has done and when, kept in memory up to a bound.

Pure: a clock comes in. Whoever has no `Spans` records nothing, so a place that could be recorded
costs a look at None. It must not know where spans are written, nor what they are drawn with.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from zkv.wire import ContributionId

EVENTS_MAX = 65_536
"""About 30 MiB in memory, and 10 MiB in a file."""

TRAINING = "training"
ENCODER = "encoder"
NETWORK = "network"
BATCHES = "batches"
UPDATES = "updates"
TURNS = "turns"
TRACKS = (TURNS, TRAINING, ENCODER, UPDATES, NETWORK, BATCHES)
"""From top to bottom."""
APART = frozenset({NETWORK, BATCHES})
"""Tracks whose spans are about different things: none is a part of another, though they overlap."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Something that was done, in seconds of the process's own clock; `end_s` None: an instant.

    `out` and `into` name what left and what came in; one name in both leads from one to the other.
    """

    track: str
    name: str
    start_s: float
    end_s: float | None = None
    about: dict[str, Any] = {}
    out: tuple[str, ...] = ()
    into: tuple[str, ...] = ()


class Spans:
    """The latest spans of one process, `events_max` at most. May be used from several threads.

    `clock` gives seconds, and never goes back.
    """

    def __init__(self, clock: Callable[[], float], *, events_max: int = EVENTS_MAX) -> None:
        self.clock = clock
        self._ring: deque[tuple[int, Span]] = deque(maxlen=events_max)
        self._numbers = itertools.count(1)

    @property
    def kept(self) -> list[Span]:
        """What is still here, oldest first."""
        return [span for _, span in list(self._ring)]

    @property
    def dropped(self) -> int:
        """How many were dropped, as newer ones needed their room."""
        numbers = [number for number, _ in list(self._ring)]
        return max(numbers, default=0) - len(numbers)

    def _add(self, span: Span) -> None:
        # Two threads may come here at once: the counter gives each a number of its own.
        self._ring.append((next(self._numbers), span))

    def span(
        self,
        track: str,
        name: str,
        start_s: float,
        end_s: float,
        *,
        out: Sequence[str] = (),
        into: Sequence[str] = (),
        **about: Any,
    ) -> None:
        """Record something that is over."""
        self._add(Span(track, name, start_s, end_s, about, tuple(out), tuple(into)))

    def instant(self, track: str, name: str, at_s: float, **about: Any) -> None:
        """Record something that takes no time."""
        self._add(Span(track, name, at_s, None, about))

    @contextmanager
    def timed(
        self, track: str, name: str, *, into: Sequence[str] = (), **about: Any
    ) -> Iterator[dict[str, Any]]:
        """Record a block of code; what is put into the dict meanwhile is recorded with it."""
        began = self.clock()
        try:
            yield about
        finally:
            self.span(track, name, began, self.clock(), into=into, **about)


def flow(name: ContributionId, bid: int) -> str:
    """Return what a pushed block is called on its way from the worker into a server's sum."""
    return f"{name.incarnation}.{name.group}.{name.batch}.{bid}"


def lanes(times: Sequence[tuple[int, int]], *, nested: bool) -> list[int]:
    """Return a lane, from 0, for each (start, end), so that no two of a lane overlap in part.

    The lowest lane that is free is taken, in the order of starts. `nested`: a lane may hold spans
    within spans; else no two of a lane overlap at all.
    """
    chosen = [0] * len(times)
    open_ends: list[list[int]] = []
    for at in sorted(range(len(times)), key=lambda at: (times[at][0], -times[at][1])):
        start, end = times[at]
        for ends in open_ends:
            while ends and ends[-1] <= start:
                ends.pop()
        free = (
            number
            for number, ends in enumerate(open_ends)
            if not ends or (nested and end <= ends[-1])
        )
        chosen[at] = next(free, len(open_ends))
        if chosen[at] == len(open_ends):
            open_ends.append([])
        open_ends[chosen[at]].append(end)
    return chosen
