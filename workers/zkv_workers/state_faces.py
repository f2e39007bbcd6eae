"""What users keep in snapshots, in both faces of a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zkv.errors import RolledBack
from zkv_workers import signals as s
from zkv_workers.driver import Driver
from zkv_workers.encoding import Encoder
from zkv_workers.keeper import checked_blob
from zkv_workers.running import Running

OnRollBack = Callable[[RolledBack], object]
"""What is called when the run has gone back to a snapshot, instead of raising the error."""


class GoesBack:
    """A part of the faces' classes."""

    _encoder: Encoder
    _running: Running
    _on_roll_back: OnRollBack | None
    gone_back = 0
    """How often this worker has heard that the run has gone back to a snapshot."""

    def _forget(self, told: RolledBack) -> list[s.Input]:
        """Forget what is of a run that has gone back to a snapshot; return what ends it. All that
        was pushed is encoded, or dropped."""
        self.gone_back += 1
        self._running.restart()
        self._encoder.restart()
        return [s.GoOn(told)]

    def _hear_of(self, told: RolledBack) -> Any:
        """Tell the user, whose calls are of the new run from here on: return what it says to it.

        Raises:
            RolledBack: it has not given anything to be called.
        """
        if self._on_roll_back is None:
            raise told
        return self._on_roll_back(told)

    def save_state(self, blob: bytes) -> None:
        """Keep these bytes in snapshots: the state of your random numbers, say, as it is when the
        next batch begins.

        A snapshot has what was kept when this worker began its first batch of the snapshot's
        version. Not pickled, not looked at; of the broker's folder, not of messages.

        Raises:
            TypeError, ValueError: no bytes, or more than 1 GiB.
        """
        self._encoder.keeper.blob = checked_blob(blob)

    def load_state(self) -> bytes | None:
        """Return what `save_state` has kept in the snapshot that this run has begun from, or has
        gone back to last (`RolledBack`).

        None: the run began from nothing, nothing was kept, or it was lost, which a warning in the
        log says.
        """
        return self._encoder.keeper.found


def restore(encoder: Encoder, driver: Driver) -> None:
    """Go on from this worker's state in the snapshot that the run begins from, if there is one.

    Raises:
        BadSnapshot: it cannot be read, or is not as it was written.
    """
    keeper, welcome = encoder.keeper, driver.session.member
    if welcome is not None:
        keeper.number, keeper.keeps = welcome.number, welcome.saves
        keeper.tell = lambda said: driver.beside(driver.feed, s.Say(said))
        keeper.away = lambda: driver.session.back.told is not None
        keeper.inside = lambda: driver.session.made.cycle.current is not None
        driver.saving = keeper.asked
        driver.session.made.cycle.batch = keeper.load(welcome.state)
