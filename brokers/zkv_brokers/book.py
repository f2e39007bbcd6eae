"""What a group knows of its grants and of contributions on their way; it decides nothing."""

from __future__ import annotations

from zkv.marks import Marks
from zkv.wire import ContributionId
from zkv_brokers.ahead import Ahead
from zkv_brokers.decisions import Arrival, Tally
from zkv_brokers.rules import Rules
from zkv_brokers.together import Together


class Book:
    """Who takes part, what was granted to them, and what has come of it."""

    def __init__(self) -> None:
        self.incarnations: dict[int, int] = {}
        """Of the members, by number."""
        self.arrivals: dict[ContributionId, Arrival] = {}
        self.tallies: dict[int, Tally] = {}
        """What became of the contributions, by worker number."""
        self.reserved: set[tuple[int, int]] = set()
        """Grants (worker number, grant) for whose contributions servers keep room."""
        self.over: dict[int, Marks] = {}
        """Grants that are settled, by incarnation."""
        self.current: dict[int, int] = {}
        """The newest grant of each worker that the log has reached the version of."""
        self.bases: dict[tuple[int, int], int] = {}
        """The version that each open grant was given at, by (worker number, grant)."""
        self.ahead = Ahead()
        self.together = Together()
        self._arrived: dict[tuple[int, int], ContributionId] = {}

    def arrival(self, name: ContributionId, number: int, grant: int) -> Arrival:
        """Return the book of a contribution, begun if this is the first that is heard of it."""
        return self.arrivals.setdefault(name, Arrival(name, number, grant))

    def kept(self) -> list[ContributionId]:
        """Return the contributions that have arrived and wait for their update."""
        return [name for name, arrival in self.arrivals.items() if arrival.arrived]

    def unfinished(self, incarnation: int) -> bool:
        """Return whether something that this worker has finished is not held everywhere yet."""
        return any(
            a.finished and not a.arrived
            for n, a in self.arrivals.items()
            if n.incarnation == incarnation
        )

    def is_over(self, incarnation: int, grant: int) -> bool:
        """Return whether what was computed under this grant is settled."""
        marks = self.over.get(incarnation)
        return marks is not None and grant in marks

    def is_open(self, number: int, grant: int) -> bool:
        """Return whether a worker may finish a batch under a grant."""
        return grant in (self.current.get(number), self.ahead.grants.get(number))

    def misled(self) -> list[Arrival]:
        """Return the contributions whose blocks have named another weight than they have."""
        return [one for one in self.arrivals.values() if one.misled]

    def has_arrived(self, number: int, grant: int) -> bool:
        """Return whether every server holds what was computed under a grant."""
        return (number, grant) in self._arrived

    def has_finished(self, number: int, grant: int) -> bool:
        """Return whether a worker has said that it has sent all of it."""
        found = [
            one for one in self.arrivals.values() if (one.number, one.grant) == (number, grant)
        ]
        return any(one.finished for one in found)

    def tally(self, number: int) -> Tally:
        """Return the book of one worker's contributions."""
        return self.tallies.setdefault(number, Tally())

    @property
    def under_way(self) -> bool:
        """Whether anybody was ever granted anything: the start line is passed."""
        return bool(self.current)

    def found(self, number: int, grant: int) -> Arrival:
        """Return what has arrived under a grant."""
        return self.arrivals[self._arrived[number, grant]]

    def computed_on_older(self, arrival: Arrival, versions: int, rules: Rules) -> None:
        """A contribution was computed on older values than it was granted."""
        granted = self.bases.get((arrival.number, arrival.grant), 0)
        self.bases[arrival.number, arrival.grant] = max(0, granted - versions)
        if rules.staleness.compensation:
            arrival.void = arrival.void or (
                f"it was computed on version {granted - versions} under a grant of {granted}, and "
                "delay compensation needs what was granted: connect workers with prefetch=0, or "
                "choose staleness scale"
            )
