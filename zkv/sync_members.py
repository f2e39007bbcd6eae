"""What the synchroniser keeps of one member: where it is, and which of its grants may come late."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

LATE_RUNS_MAX = 64
"""How many separate runs of cancelled, unfinished grants are remembered for each worker."""


class Place(Enum):
    """Where a member is in the open round."""

    JOINING = "waits for the next round, or at the start line"
    COMPUTING = "has an open grant"
    CONTRIBUTED = "waits for the update that it has contributed to"
    HELD = "too far ahead of the slowest"


@dataclass(slots=True)
class Member:
    """One live worker's place, its grants, and the version of the newest."""

    grant: int
    """The newest grant given to this worker number, in this membership or an earlier one."""
    place: Place = Place.JOINING
    base_version: int = 0
    skipped: int = 0
    """Numbers after `grant` that will not be used."""
    late: list[range] = field(default_factory=list)
    """Cancelled grants that were never finished, as rising runs."""

    def cancelled(self) -> None:
        """Remember the newest grant as cancelled."""
        if self.late and self.late[-1].stop == self.grant:
            self.late[-1] = range(self.late[-1].start, self.grant + 1)
            return
        self.late.append(range(self.grant, self.grant + 1))
        # A worker that finished this many batches since will not come back to the first.
        del self.late[:-LATE_RUNS_MAX]

    def settle_late(self, grant: int) -> bool:
        """Forget a cancelled grant that has now been finished; False if there is none."""
        for at, run in enumerate(self.late):
            if grant in run:
                rest = (range(run.start, grant), range(grant + 1, run.stop))
                self.late[at : at + 1] = [part for part in rest if part]
                return True
        return False
