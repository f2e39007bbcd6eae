"""Which version of a group each worker is known to hold, and which are on their way to it.

A worker may hold a newer one than is known: its word is late, or its grant was taken back since. It
never holds an older one. Pure: knows no messages.
"""

from __future__ import annotations

from zkv.wire import MODEL
from zkv_brokers.decisions import Pins

NOTHING = -1
"""The version that a worker holds of which nothing is known."""


class Holdings:
    """What the members hold of one group; `pins` are those of all groups."""

    def __init__(self, group: int, pins: Pins) -> None:
        self._group = group
        self._pins = pins
        self._versions: dict[int, int] = {}
        self._outdated: set[tuple[int, int, int]] = set()
        """Grants on their way whose values are no base for later ones."""

    def granted(self, incarnation: int, grant: int, version: int) -> None:
        """Servers send this version to a worker: it is pinned."""
        self._pins.by_grant[incarnation, self._group, grant] = version

    def received(self, incarnation: int, grant: int) -> None:
        """The worker has all of a grant: its version is no longer pinned for it."""
        if incarnation in self._pins.on_demand:
            return
        name = (incarnation, self._group, grant)
        version = self._pins.by_grant.pop(name, None)
        if version is not None and name not in self._outdated:
            self._versions[incarnation] = version
        self._outdated.discard(name)

    def finished(self, incarnation: int, grant: int) -> bool:
        """A batch is finished: its version is no longer pinned for it, if it was granted on demand.

        Return whether one was.
        """
        name = (incarnation, self._group, grant)
        asks = incarnation in self._pins.on_demand
        return asks and self._pins.by_grant.pop(name, None) is not None

    def is_on_demand(self, incarnation: int) -> bool:
        """Return whether a worker asks servers for what it needs of the model."""
        return self._group == MODEL and incarnation in self._pins.on_demand

    def taken_back(self, incarnation: int, grant: int) -> None:
        """A grant does not count any more; whether the worker has its values is not known."""
        name = (incarnation, self._group, grant)
        self._pins.by_grant.pop(name, None)
        self._outdated.discard(name)

    def never_was(self, version: int) -> None:
        """The log has not come to this version, and what workers have of it is no version."""
        self._versions = {who: held for who, held in self._versions.items() if held < version}

    def version(self, incarnation: int) -> int:
        """Return the newest version that this worker is known to hold all of."""
        if incarnation in self._pins.on_demand:
            return NOTHING
        return self._versions.get(incarnation, NOTHING)

    def left(self, incarnation: int) -> None:
        """A worker is gone."""
        self._versions.pop(incarnation, None)
        self._outdated = {name for name in self._outdated if name[0] != incarnation}

    def forget(self) -> None:
        """From here on a version's values are others: what is held, or on its way, is no base."""
        self._versions.clear()
        self._outdated = {name for name in self._pins.by_grant if name[1] == self._group}
