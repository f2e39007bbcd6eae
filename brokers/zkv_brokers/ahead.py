"""Grants ahead of the log: where it is known what the next update will be made of.

Under a policy that needs every worker, the contributions of the next update are known when its
round begins (the design's rules 5 and 6). Servers are told (`Expect`), and make each block's next
values as soon as they hold all of it; workers are granted the next version at once, so that these
values are sent while others still come in. What is finished under such a grant waits until the
update is in the log. Whatever makes the update another one (a member lost, a contribution that is
refused or withdrawn, another policy) takes those grants back first. Pure: what is decided is
collected in `Decisions`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zkv import control as c
from zkv import events as e
from zkv.wire import MODEL
from zkv_brokers.decisions import Arrival, Decisions
from zkv_brokers.giving import give

if TYPE_CHECKING:
    from zkv_brokers.group import Group


@dataclass(slots=True)
class Ahead:
    """What is foreseen of one group's next update."""

    version: int = 0
    """That the update leads to; 0: nothing is foreseen."""
    members: dict[int, int] = field(default_factory=dict)
    """The grants whose contributions it is made of, by worker number."""
    grants: dict[int, int] = field(default_factory=dict)
    """The grants at that version that are out, by worker number."""
    given_up: int = 0
    """The version of which nothing is foreseen any more: what is sent for it may be two things."""
    later: list[c.Entry] = field(default_factory=list)
    """Entries that must not come before that update."""
    then: list[Callable[[Decisions], None]] = field(default_factory=list)
    """What waits for that update, or for the word that it will be another one."""
    confirmed: list[Arrival] = field(default_factory=list)
    """What was finished under such grants and may count by now."""

    def look(self, group: Group, out: Decisions) -> None:
        """Grant the next version, if what it will be made of is known."""
        if self.version or not self._may(group):
            return
        members = group.sync.round()
        if not members or not members.keys() <= group.incarnations.keys():
            return
        misled = any(members.get(one.number) == one.grant for one in group.misled())
        if misled or group.sync.version + 1 == self.given_up:
            return
        self.version, self.members = group.sync.version + 1, members
        expected = [
            c.Expected(group.incarnations[number], grant)
            for number, grant in sorted(members.items())
        ]
        out.log(c.Expect(group.group, self.version, expected))
        for number in sorted(members):
            dry = group.draws.pool is not None and not group.draws.pool.ready
            # Who asks for its values has none sent ahead: it begins when the update is in the log,
            # as one does for whom there is no room now.
            asks = group.holdings.is_on_demand(group.incarnations[number])
            if not dry and not asks and not group.held_because(self.version):
                grant = group.sync.next_grant(number)
                self.grants[number] = grant
                give(group, number, grant, self.version, out, ahead=True)

    def _may(self, group: Group) -> bool:
        """Whether blocks can be updated one by one, and nothing is under way that must be first.

        A norm over all blocks, values that come as deltas and what old gradients were computed on
        need the whole model first; how old a gradient is, where it is scaled by that, is known when
        it is finished; a width that is chosen for each batch needs the last one's time.
        """
        may = group.group == MODEL and not group.busy and not group.draws.dry
        return may and not self.hindrance(group)

    @staticmethod
    def hindrance(group: Group) -> str:
        """Return which setting keeps blocks from being updated one by one; "" if none does."""
        rules = group.rules
        return next(
            (
                why
                for why, there in {
                    "streaming is switched off": not rules.streaming,
                    "gradients are clipped by their norm over all keys": rules.clips,
                    "old gradients are compensated": rules.staleness.compensation,
                    "old gradients are scaled": rules.staleness.scale,
                    "codecs adapt their precision": rules.coding.widths is not None,
                    "values come down by a codec": rules.coding.down.text != "none",
                }.items()
                if there
            ),
            "",
        )

    def takes(self, start: e.Start, group: Group) -> bool:
        """Return whether a worker that may start has its grant already: from here on it counts."""
        if self.grants.get(start.worker) != start.grant:
            return False
        del self.grants[start.worker]
        group.current[start.worker] = start.grant
        incarnation = group.incarnations[start.worker]
        self.confirmed += [
            arrival
            for name, arrival in group.arrivals.items()
            if name.incarnation == incarnation and arrival.grant == start.grant
        ]
        return True

    def holds_back(self, arrival: Arrival) -> bool:
        """Return whether a contribution was made under a grant that may still be taken back."""
        return self.grants.get(arrival.number) == arrival.grant

    def committed(self, version: int, out: Decisions) -> None:
        """The update is in the log."""
        if self.version == version:
            self._forget(out)

    def _forget(self, out: Decisions) -> None:
        self.version = 0
        self.members = {}
        for entry in self.later:
            out.log(entry)
        self.later.clear()
        then, self.then = self.then, []
        for act in then:
            act(out)

    def without(self, number: int, group: Group, out: Decisions) -> None:
        """This member takes part in nothing any more; what has arrived of it still counts."""
        if (
            self.version
            and number in self.members
            and not group.has_arrived(number, self.members[number])
        ):
            self.drop(group, out)
        elif number in self.grants:
            self._take_back(number, group, out)

    def drop(self, group: Group, out: Decisions) -> None:
        """The next update will be another one: take back what was granted for it."""
        if not self.version:
            return
        for number in sorted(self.grants):
            self._take_back(number, group, out)
        group.together.part("the update will be another one", group, out)
        group.holdings.never_was(self.version)
        self.given_up = self.version
        out.log(c.Expect(group.group, self.version, []))
        self._forget(out)

    def _take_back(self, number: int, group: Group, out: Decisions) -> None:
        grant = self.grants.pop(number)
        group.sync.handle(e.Skipped(number))
        group.take_back(group.incarnations[number], number, grant, out)

    def defers(self, number: int, group: Group) -> bool:
        """Return whether a setting that this worker changes must not hold for the next update.

        Servers may have made blocks of it, unless they wait for what this worker will send after it
        was told that the setting holds. Nor may it overtake another one that has to wait.
        """
        if not self.version:
            return False
        grant = self.members.get(number)
        return bool(self.later) or grant is None or group.has_finished(number, grant)
