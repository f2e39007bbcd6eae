"""Pulls of one worker that are not answered: when each may be asked for. Knows no frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zkv import control as c
from zkv.errors import UnknownKey
from zkv.layout import Layout
from zkv.link import Link
from zkv_workers.signals import Key, Pull

NAMES_MAX = 8
"""Keys that a sentence names."""


AGAIN = 2**40
"""Above all numbers of calls: what is asked for again for a call has a number of its own above."""


def base_of(token: int) -> int:
    """Return the number of the call that a pull is of."""
    return token % AGAIN


@dataclass(slots=True)
class _Reading:
    """A pull, and whether the broker was asked."""

    pull: Pull
    asked: bool = False
    tries: int = 0


class Pulls:
    """All open pulls. `busy(kid)` tells whether an own plain push of a key is not settled."""

    def __init__(self, layout: Layout, link: Link, busy: Callable[[int], bool]) -> None:
        self.answered = 0
        self._layout = layout
        self._link = link
        self._busy = busy
        self._open: dict[int, _Reading] = {}

    def add(self, pull: Pull) -> None:
        """Note a pull; `ask` sends it when it may go."""
        self._open[pull.token] = _Reading(pull)

    def ask(self, seen: int) -> list[tuple[int, UnknownKey]]:
        """Ask for what can be read; return the pulls that cannot be, with the reason.

        `seen` is the version that this worker computes on: none older is read.

        Nothing before there is any key; no key before the own plain pushes of it are settled, so
        that a pull after a push has what was pushed.
        """
        failed: list[tuple[int, UnknownKey]] = []
        if not self._layout.kid_of and not self._layout.tables:
            return failed
        for token, reading in list(self._open.items()):
            keys = reading.pull.keys
            try:
                busy = any(self._busy(self._layout.kid(key)) for key in keys)
            except UnknownKey as error:
                del self._open[token]
                failed.append((token, error))
                continue
            if not busy and not reading.asked:
                self._ask(reading, token, seen)
        return failed

    def again(self, token: int, seen: int) -> None:
        """What was granted will not come: it is asked for again, under another name."""
        reading = self._open.get(base_of(token))
        if reading is not None:
            reading.tries += 1
            self._ask(reading, base_of(token) + reading.tries * AGAIN, seen)

    def _ask(self, reading: _Reading, name: int, seen: int) -> None:
        reading.asked = True
        self._link.send(c.Pull(name, list(reading.pull.keys), seen, reading.pull.rows))

    def done(self, token: int) -> Pull | None:
        """The pull is answered; return it, None if nobody waits for it any more."""
        self.answered += 1
        reading = self._open.pop(base_of(token), None)
        return None if reading is None else reading.pull

    def drop(self, token: int) -> None:
        """Nobody waits for this pull any more."""
        self._open.pop(token, None)

    def restart(self) -> None:
        """The broker is a new one: it has to be asked again."""
        for reading in self._open.values():
            reading.asked = False


def pull_of(keys: Sequence[Key]) -> str:
    """Return in words what a pull is for, with no more keys than a line has room for."""
    named = ", ".join(map(repr, keys[:NAMES_MAX])) or "the model"
    more = len(keys) - NAMES_MAX
    return f"the pull of {named}" + (f" and {more} more" if more > 0 else "")
