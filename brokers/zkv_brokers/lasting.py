"""A broker's router and its journal, side by side: what was heard is safe before it is answered.

Beside the loop, and in its way: a turn is over when the disk says so. Decides nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zkv.errors import BadSnapshot, JournalError
from zkv_brokers import recovery
from zkv_brokers import router as r
from zkv_brokers.config import RouterConfig
from zkv_brokers.state import packed
from zkv_net import loop as net

if TYPE_CHECKING:
    from zkv_brokers.journal_file import JournalFile

log = logging.getLogger("zkv.broker")


def _opened(folder: Path) -> JournalFile:
    """Return a folder's journal."""
    # Its locks and modes are those of POSIX: a broker without a journal must not need them.
    from zkv_brokers.journal_file import JournalFile

    return JournalFile(folder)


class Lasting:
    """A router that outlives its process if there is a journal's folder; None: it does not.

    `restored` finds the snapshot that a new run begins from, its folder and its manifest; it is not
    asked where a run goes on.

    Raises:
        JournalError: the journal cannot be used, or is of another run; what to do is in the text.
        BadSnapshot: the snapshot that a new run begins from cannot be used.
    """

    def __init__(
        self,
        config: RouterConfig,
        folder: Path | None,
        restored: Callable[[], tuple[str, str]] = lambda: ("", ""),
    ) -> None:
        self._config, self._restored = config, restored
        self._turns = recovery.Turns()
        self._keys: list[r.Keys] = []
        """Who is let in: it is heard when it changes, and another router must know it, too."""
        self._ahead_s = 0.0
        """The router's clock less this machine's: it stood still while there was no broker."""
        self._file = None if folder is None else _opened(folder)
        self.first: list[r.Action] = []
        """What a router that goes on has to say at once."""
        try:
            self.router = self._recovered() or self._new()
            self._begin()
        except BaseException:
            self.close(done=False)
            raise

    def origin(self) -> tuple[int, int, *tuple[bytes, ...]]:
        """Return the router's numbers and, if it went on, its state, for a recording's begin."""
        numbers = (self.router.members.term, self.router.hub.instance)
        return (*numbers, packed(self.router)) if self.router.hub.lives > 1 else numbers

    def now(self) -> float:
        """Return the router's time, in seconds."""
        # A loop's own time may be that of the beginning of its turn, in whole milliseconds.
        return time.monotonic() + self._ahead_s

    def _new(self) -> r.Router:
        url, manifest = self._restored()
        config = replace(self._config, restored=manifest, restored_from=url)
        try:
            return r.Router(config, term=net.term_number(), instance=net.broker_instance())
        except ValueError as error:
            if not manifest or isinstance(error, BadSnapshot):
                raise
            # It is whole, but some other program, or another zkv, has written it.
            raise BadSnapshot(
                f"{url} holds a snapshot that no run can begin from: {error}"
            ) from error

    def _recovered(self) -> r.Router | None:
        began = time.monotonic()
        found = None if self._file is None else self._file.read()
        if self._file is None or found is None or not found.records:
            return None
        router, last = recovery.recovered(found.records, self._config, str(self._file.path))
        if router.failed is not None:
            log.warning("the run of %s has failed: %s", self._file.path, router.failed.reason)
            return None
        took_s = time.monotonic() - began
        torn = f", of which {found.torn} were not whole" if found.torn else ""
        size = found.whole_bytes + found.torn
        log.warning("read %s in %.3f s: %d bytes%s", self._file.path, took_s, size, torn)
        self._ahead_s = last - time.monotonic()
        term, instance = net.term_number(), net.broker_instance()
        self.first = recovery.goes_on(router, term, instance, self.now())
        return router

    def _begin(self) -> None:
        """Write the journal anew, as one state."""
        if self._file is not None:
            began = time.monotonic()
            self._file.begin(recovery.state_record(self.router, self.now()))
            self._turns.begun(time.monotonic() - began)

    def _begin_again(self, file: JournalFile) -> None:
        """Write the journal anew, as it has become long. What is appended to it is as safe: without
        room for another file, or a descriptor, it only grows longer."""
        try:
            self._begin()
        except JournalError as error:
            if not file.sound:
                raise
            log.warning("the journal is not made shorter, and goes on: %s", error.__cause__)
            self._turns.later()

    def turn(self, events: Sequence[r.Event], now: float) -> list[r.Action]:
        """Have the router take a turn; return what to do, which may be done by now.

        Raises:
            JournalError: nothing of that may be done, as it may be forgotten.
            BadSnapshot: a new run was to begin, and its snapshot cannot be used.
        """
        if self._file is None:
            actions = self.router.turn(events, now)
            self.router = self.router.successor or self.router
            return actions
        self._keys = [one for one in events if isinstance(one, r.Keys)][-1:] or self._keys
        began = time.monotonic()
        actions = []
        try:
            actions = self.router.turn(events, now)
        finally:
            self._turns.add(events, now, time.monotonic() - began)
            actions = self._turns.leaving(events, actions)
            successor = self.router.successor
            if successor is None and self._turns.must_be_kept(actions):
                self._file.append(self._turns.record())
        if successor is not None:
            # All of it in one go: whoever reads the journal is before the roll-back or behind it.
            self.router = successor
            self._begin()
        elif self._turns.is_long:
            self._begin_again(self._file)
        self._check(self._file)
        return actions

    def _check(self, file: JournalFile) -> None:
        """See whether this router may go on."""
        if self.router.hub.superseded:
            raise JournalError(
                "a later broker has taken this run over: this one ends, and changes nothing more"
            )
        if self.router.returning.abandoned:
            old = file.put_aside()
            log.warning(
                "nobody of the run in %s has come back, and others are here: a new run "
                "begins, and that journal is now %s",
                file.path,
                old,
            )
            self.router, self._ahead_s = self._new(), 0.0
            self._turns = recovery.Turns()
            self.router.turn(self._keys, self.now())
            self._begin()

    def close(self, *, done: bool) -> None:
        """Let the journal go; `done`: take it away, if nobody could want to go on with its run."""
        if self._file is None:
            return
        if done and (self.router.failed is not None or not self.router.members.workers):
            self._file.remove()
        self._file.close()
        self._file = None
