"""How the gradients of one update come together: topologies, as values.

`servers`: each worker sends its gradient to the servers, which hold the keys between them.
`one-server`: the same, and all keys are on one server. `hierarchical`: the workers of a host add
theirs up first, and one of them sends the sum on. `ring`: workers pass sums on to each other until
one has them all; what becomes of the model goes round the same way.

A topology is turned into one `Route` for each block and member: whose sums it waits for, where it
sends its own, and to whom it hands the block's next values. All members find the same routes, from
what the broker has told them. Pure: no sockets, no clock, no chance.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ONE_SERVER, HIERARCHICAL, RING = "one-server", "hierarchical", "ring"
NAMES = ("servers", ONE_SERVER, HIERARCHICAL, RING)


@dataclass(frozen=True, slots=True)
class Topology:
    """One of `NAMES`.

    Raises:
        ValueError: there is none of that name.
    """

    name: str = "servers"

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"topology {self.name[:80]!r} is none of {', '.join(NAMES)}")

    def __str__(self) -> str:
        return self.name

    @property
    def joint(self) -> bool:
        """Whether workers add gradients up among themselves before servers get the sums."""
        return self.name in (HIERARCHICAL, RING)

    def placement(self, text: str) -> str:
        """Return the text of the placement that stands for `text` under this topology."""
        if self.name != ONE_SERVER:
            return text
        first, semicolon, rest = text.partition(";")
        # Of pins the first that matches counts.
        return f"{first};pin:*=0{semicolon}{rest}"

    def pieces(self, blocks: int, workers: int) -> int:
        """Return into how many equal blocks a key is cut that would be cut into `blocks`; 0: into
        blocks of the usual size, and a rest.

        On a ring each member sums up an equal part, so there are as many blocks for each of them.
        """
        return -(-blocks // workers) * workers if self.name == RING else 0


def topology(text: str) -> Topology:
    """Return the topology that a text names; raises ValueError with the names that there are.

    >>> topology("ring").joint
    True
    """
    return Topology(text.strip())


@dataclass(frozen=True, slots=True)
class Member:
    """Who takes part in an update: its place in sums, and its host by name."""

    number: int
    host: str


@dataclass(frozen=True, slots=True)
class Route:
    """What one member does with one block. Members are named by their numbers."""

    sources: tuple[int, ...]
    """Whose sums are added up here, in this order, this member itself included."""
    target: int | None
    """Who gets that sum; None: the block's server."""
    followers: tuple[int, ...]
    """Who gets the block's next values from here, once they are here."""

    @property
    def alone(self) -> bool:
        """Whether nothing but this member's own gradient goes to the server."""
        return self.target is None and len(self.sources) == 1


def alone(way: Topology, members: Sequence[Member]) -> str:
    """Return why a topology brings nothing for these members; "" if it does."""
    if len(members) < 2:
        return "one worker has nobody to add its gradient to"
    hosts = [member.host for member in members]
    if way.name == HIERARCHICAL and len(set(hosts)) == len(hosts):
        return "no two workers are on one host"
    return ""


def routes(
    way: Topology, members: Sequence[Member], me: int, sizes: Mapping[int, int]
) -> dict[int, Route]:
    """Return what member `me` does with each block; `sizes` are their bytes, by number.

    Raises:
        ValueError: the topology leaves everything to the servers, or `me` is no member.
    """
    if me not in {member.number for member in members}:
        raise ValueError(f"worker {me} is none of the members")
    if way.name == RING:
        return _around(in_ring(members), me, sizes)
    if way.name == HIERARCHICAL:
        (host,) = (member.host for member in members if member.number == me)
        near = sorted(member.number for member in members if member.host == host)
        return dict.fromkeys(sizes, _with_leader(near, me))
    raise ValueError(f"topology {way} has no routes between workers")


def _with_leader(near: Sequence[int], me: int) -> Route:
    """The lowest number of a host leads: it adds up in the order of numbers, as servers do."""
    leader, *others = near
    if me == leader:
        return Route(tuple(near), None, tuple(others))
    return Route((me,), leader, ())


def in_ring(members: Sequence[Member]) -> list[int]:
    """Return the members in the ring's order: those of one host side by side, by number."""
    first: dict[str, int] = {}
    for member in sorted(members, key=lambda one: one.number):
        first.setdefault(member.host, member.number)
    return [one.number for one in sorted(members, key=lambda one: (first[one.host], one.number))]


def owners(sizes: Mapping[int, int], count: int) -> dict[int, int]:
    """Return at which place of a ring of `count` the sum of each block is complete.

    Largest block first to whoever has the fewest bytes: if the blocks are equal and `count` divides
    their number, each place has M/count bytes; else they differ by a block at most.
    """
    loads = [(0, place) for place in range(count)]
    found = {}
    for bid in sorted(sizes, key=lambda one: (-sizes[one], one)):
        load, place = heapq.heappop(loads)
        found[bid] = place
        heapq.heappush(loads, (load + sizes[bid], place))
    return found


def _around(ring: Sequence[int], me: int, sizes: Mapping[int, int]) -> dict[int, Route]:
    """A block's sum begins behind its owner and ends there; its next values go on from there."""
    count, place = len(ring), ring.index(me)
    before, after = ring[place - 1], ring[(place + 1) % count]
    made = {}
    for bid, owner in owners(sizes, count).items():
        first, last = place == (owner + 1) % count, place == owner
        # The values have come round when the one before the owner has them.
        ends = place == (owner - 1) % count
        made[bid] = Route(
            (me,) if first else (before, me),
            None if last else after,
            () if ends else (after,),
        )
    return made


def sent_bytes(
    way: Topology, members: Sequence[Member], sizes: Mapping[int, int]
) -> dict[int, tuple[int, int]]:
    """Return what each member sends for an update: (to other members, to servers), in bytes.

    On a ring of N the first is 2(N − 1)/N of all bytes where the blocks can be shared out equally,
    and differs from it by two blocks at most.
    """
    told = {}
    for member in members:
        own = routes(way, members, member.number, sizes)
        between = sum(
            sizes[bid] * ((route.target is not None) + len(route.followers))
            for bid, route in own.items()
        )
        up = sum(sizes[bid] for bid, route in own.items() if route.target is None)
        told[member.number] = (between, up)
    return told
