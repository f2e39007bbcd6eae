"""Updates whose gradients workers add up among themselves (`zkv.topology`).

Where it is known what the next update is made of (`Expect`), its members are told of each other,
and send sums instead of gradients. Until then what they compute waits with them; whatever cannot be
known in time goes to the servers, one by one. Nothing of such an update counts before all of it is
held, so that it is there whole, or comes apart whole: if a member is lost, or cannot reach another,
everybody sends its own after all, and the sum is what it would have been on servers. Pure: what is
decided is collected in `Decisions`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zkv import control as c
from zkv.topology import Member, Topology, alone
from zkv.wire import MODEL
from zkv_brokers.decisions import Arrival, Decisions

if TYPE_CHECKING:
    from zkv_brokers.group import Group
    from zkv_brokers.members import Worker


RETRY = "; sums are tried again at version "
RESTS_MAX = 256
"""After sums that could not be finished so many updates go to the servers at most."""


def _nobody(incarnation: int) -> None:
    """Know no members."""


@dataclass(slots=True)
class Together:
    """One group's update that is added up among workers, if it is, and who waits to hear so."""

    topology: Topology = field(default_factory=Topology)
    find: Callable[[int], Worker | None] = _nobody
    """The member with this incarnation."""
    forbids: Callable[[], str] = str
    """Why the model's keys or codecs do not allow sums among workers; "" if they do."""
    version: int = 0
    """That the update leads to; 0: none is added up among workers now."""
    members: dict[int, c.Expected] = field(default_factory=dict)
    """Whose contributions it is made of, by worker number."""
    undecided: dict[tuple[int, int], int] = field(default_factory=dict)
    """The grants whose gradients wait, (worker number, grant), and their incarnations."""
    apart: dict[tuple[int, int], int] = field(default_factory=dict)
    """(incarnation, grant) of what came apart, and the log index from which on it is held anew."""
    failures: int = 0
    """How often in a row sums could not be finished though nobody was lost."""
    again_at: int = 0
    """The version at which they are tried again: a link that is broken costs seconds each time."""
    updates: int = 0
    came_apart: int = 0
    why: str = ""
    """Why the last update that was not added up among workers was not."""

    def waits(self, number: int, grant: int, group: Group) -> bool:
        """A grant is given: return whether its gradient waits to hear where it goes."""
        if not self.topology.joint or group.group != MODEL or self.never(group):
            return False
        self.undecided[number, grant] = group.incarnations[number]
        return True

    def never(self, group: Group) -> str:
        """Return why no update is added up among workers under the settings in force; "": some
        are."""
        if group.sync.policy.threshold is not None:
            return f"under {group.sync.policy} it is not known in advance what an update is made of"
        return group.ahead.hindrance(group) or self.forbids()

    def look(self, group: Group, out: Decisions) -> list[Arrival]:
        """Tell those whose gradients wait where these go, as far as that is known.

        Return what was finished before that was known, and may count by now.
        """
        if not self.undecided:
            return []
        gone = [
            (number, grant)
            for (number, grant), incarnation in self.undecided.items()
            if group.incarnations.get(number) != incarnation or group.is_over(incarnation, grant)
        ]
        for one in gone:
            del self.undecided[one]
        foreseen = group.ahead.version
        if foreseen and foreseen != self.version:
            members = dict(group.ahead.members)
            why = self._hindrance(members, group)
            if not why:
                return self._begin(members, group, out)
            return self._separate(set(members.items()), why, group, out)
        if group.busy:
            return []
        now = {one for one in self.undecided if group.current.get(one[0]) == one[1]}
        why = self.never(group) or "it was not known in time what the update is made of"
        return self._separate(now, why, group, out)

    def _hindrance(self, members: dict[int, int], group: Group) -> str:
        """Return why these do not add up their gradients among themselves; "": they do."""
        if not members.items() <= self.undecided.keys():
            return "a member sends to the servers already"
        if why := self.never(group):
            return why
        if group.ahead.version < self.again_at:
            return f"{self.why.split(RETRY)[0]}{RETRY}{self.again_at}"
        found = [self.find(group.incarnations[number]) for number in sorted(members)]
        workers = [one for one in found if one is not None]
        if len(workers) < len(members):
            return "a member is gone"
        for one in workers:
            if group.holdings.is_on_demand(one.incarnation):
                return f"{one} asks servers for what it needs"
            if one.barrier_token and not group.has_finished(one.number, members[one.number]):
                return f"{one} is at a barrier"
            if not one.address:
                return f"{one} cannot be reached by other workers"
        far = len({one.machine for one in workers}) > 1
        for one in workers if far else ():
            if only_here(one.address):
                return (
                    f"{one} listens at {one.address}, which only its own machine reaches, as it "
                    "has dialled the broker there: give it the broker's other address"
                )
        return alone(self.topology, [Member(one.number, one.machine) for one in workers])

    def _begin(self, members: dict[int, int], group: Group, out: Decisions) -> list[Arrival]:
        self.version = group.ahead.version
        self.members, companions = {}, []
        for number, grant in sorted(members.items()):
            del self.undecided[number, grant]
            incarnation = group.incarnations[number]
            self.members[number] = c.Expected(incarnation, grant)
            worker = self.find(incarnation)
            assert worker is not None
            where = worker.machine, worker.address
            companions.append(c.Companion(number, incarnation, grant, *where))
        for one in companions:
            told = c.Together(one.grant, self.version, str(self.topology), companions, out.index)
            out.tell(one.incarnation, told)
        return self._finished(set(members.items()), group)

    def _separate(
        self, grants: set[tuple[int, int]], why: str, group: Group, out: Decisions
    ) -> list[Arrival]:
        told = grants & self.undecided.keys()
        for number, grant in sorted(told):
            out.tell(self.undecided.pop((number, grant)), c.Separate(grant, out.index))
            self.why = why
        return self._finished(told, group)

    @staticmethod
    def _finished(grants: set[tuple[int, int]], group: Group) -> list[Arrival]:
        found = [a for a in group.arrivals.values() if (a.number, a.grant) in grants]
        return [one for one in found if one.finished]

    def ready(self, arrival: Arrival, group: Group, out: Decisions) -> list[Arrival]:
        """Return what may count now that this has come further: the contributions to an update that
        is added up among workers may count only all at once."""
        if (arrival.number, arrival.grant) in self.undecided and not arrival.void:
            return []
        expected = self.members.get(arrival.number)
        if not self.version or expected is None or expected.grant != arrival.grant:
            return [arrival]
        if arrival.void:
            self.part(f"a contribution is refused: {arrival.void}", group, out)
            return [arrival]
        grants = {(number, one.grant) for number, one in self.members.items()}
        found = [a for a in group.arrivals.values() if (a.number, a.grant) in grants]
        whole = [a for a in found if a.finished and group.homes.at(a.placement) <= a.held]
        return sorted(whole, key=lambda a: a.number) if len(whole) == len(grants) else []

    def part(self, why: str, group: Group, out: Decisions) -> None:
        """What workers have added up does not count: each sends its own."""
        if not self.version:
            return
        expected = [one for _, one in sorted(self.members.items())]
        grants = {(number, one.grant) for number, one in self.members.items()}
        out.log(c.Apart(group.group, expected))
        self.version, self.members = 0, {}
        if any((one.number, one.grant) in grants for one in group.arrivals.values()):
            self.came_apart, self.why = self.came_apart + 1, why
        live = set(group.incarnations.values())
        self.apart = {one: at for one, at in self.apart.items() if one[0] in live}
        for one in expected:
            self.apart[one.incarnation, one.grant] = out.index
            out.tell(one.incarnation, c.Separate(one.grant, out.index))
        for arrival in group.arrivals.values():
            if (arrival.number, arrival.grant) in grants:
                arrival.held.clear()

    def is_stale(self, incarnation: int, grant: int, index: int) -> bool:
        """Return whether a server has reported a contribution before it came apart there."""
        return index < self.apart.get((incarnation, grant), 0)

    def stops(self, number: int, why: str, group: Group, out: Decisions) -> None:
        """A member will bring nothing under its grant for now, or does not wait for the others (-1:
        none of the members can go on)."""
        why = why if number < 0 else f"worker {number} {why}"
        if self.version and (number in self.members or number < 0):
            self._come_apart(why, group, out)
        self._separate({one for one in self.undecided if one[0] == number}, why, group, out)

    def cut_off(self, number: int, grant: int, why: str, group: Group, out: Decisions) -> None:
        """A member, or a server, cannot go on with the sums."""
        expected = self.members.get(number)
        if self.version and expected is not None and expected.grant == grant:
            self.failures += 1
            self.again_at = self.version + min(2**self.failures, RESTS_MAX)
            self._come_apart(why, group, out)

    def _come_apart(self, why: str, group: Group, out: Decisions) -> None:
        """The update is the same, but blocks that were made of sums already have other bits than
        those that will be made of gradients: an update has the one or the other."""
        self.part(why, group, out)
        group.ahead.drop(group, out)

    def committed(self, version: int) -> None:
        """The update is in the log."""
        if self.version == version:
            self.updates, self.failures = self.updates + 1, 0
            self.version, self.members = 0, {}

    def plain(self) -> dict[str, object]:
        """Return the figures as plain data."""
        return {
            "name": str(self.topology),
            "updates": self.updates,
            "came_apart": self.came_apart,
            "why": self.why,
        }


def only_here(address: str) -> bool:
    """Return whether nobody but its own machine reaches an address."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")
