"""Which blocks move where, so that little moves: off servers that are to go, to servers that have
come, and from busy servers to idle ones. Pure.

What a placement says holds here too: pins, groups that stay together, caps, and a ring decides for
servers that come and go. What is levelled is any weight of blocks, such as a measured load: one by
one from the busiest server to the idlest one with room, each time the block that leaves the two
nearest to each other; where none helps, two blocks change places.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from zkv import fitting
from zkv.assignment import units_of
from zkv.errors import ConfigError
from zkv.fitting import Piece, Unit
from zkv.placements import Placement
from zkv.wishes import Wishes

EVEN = 1.02
"""A busiest server of so many times the mean is not worth another move."""
GAIN = 0.01
"""What a move must take off the busiest server, as a part of the mean: less is not worth it."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A block, by its place in the list of all, that is to move to a server."""

    at: int
    to: int
    why: str


class Rearrangement:
    """Blocks on servers, some of which move. `where` is each block's server at present; servers of
    the numbers `closed` take nothing."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        where: Sequence[int],
        places: int,
        placement: Placement,
        *,
        names: Sequence[str] = (),
        closed: Set[int] = frozenset(),
    ) -> None:
        self._pieces, self._before, self._placement = pieces, where, placement
        self.where = list(where)
        self._closed = set(closed)
        self._open = [server for server in range(places) if server not in closed]
        self._shares = fitting.empty(places, closed)
        for piece, server in zip(pieces, where, strict=True):
            self._shares[server].blocks += 1
            self._shares[server].nbytes += piece.nbytes
            self._shares[server].load += piece.load
        self._wishes = Wishes(placement, places, (one.key for one in pieces), names)
        self._units = units_of(pieces, self._wishes)
        self._why: dict[int, str] = {}

    def moved(self) -> list[Moved]:
        """Return what moves, in the order in which it was found."""
        return [
            Moved(at, self.where[at], why)
            for at, why in self._why.items()
            if self.where[at] != self._before[at]
        ]

    def weights(self, weights: Sequence[float]) -> dict[int, float]:
        """Return the weight on each server that takes blocks, as it will be."""
        found = dict.fromkeys(self._open, 0.0)
        for weight, server in zip(weights, self.where, strict=True):
            found[server] = found.get(server, 0.0) + weight
        return found

    # --- servers that go, keys that are sent somewhere ------------------------------------------

    def empty_closed(self, why: str) -> None:
        """Move everything off the servers that take nothing, to where the rule puts it.

        Raises:
            ConfigError: no server has room for some block, or one is pinned to such a server.
        """
        for unit in self._units:
            there = [at for at in unit.at if self.where[at] in self._closed]
            if there:
                self._settle(self._part(unit, there), why)

    def send(self, keys: Set[str | int], server: int, why: str) -> None:
        """Move all blocks of these keys to one server.

        Raises:
            ConfigError: it takes no blocks, or has no room.
        """
        for at, piece in enumerate(self._pieces):
            if piece.key in keys and self.where[at] != server:
                unit = fitting.alone(at, piece, 0.0)
                if not fitting.fits(self._placement.caps, self._shares[server], unit):
                    raise ConfigError(
                        f"{self._placement.named}: {piece} has no room on server {server}; "
                        "raise its limits, or send the key elsewhere"
                    )
                self._put([at], server, why)

    def _settle(self, unit: Unit, why: str) -> None:
        pin, ring = unit.pin, self._wishes.ring
        if pin is not None:
            shares = [replace(one) for one in self._shares]
            fitting.put_pinned(self._placement, unit, shares, self._pieces)
            order: Iterable[int] = [pin]
        elif ring is not None:
            order = ring.walk(unit.name)
        else:
            order = sorted(self._open, key=lambda server: (self._filled(server), server))
        for server in order:
            if fitting.fits(self._placement.caps, self._shares[server], unit):
                self._put(unit.at, server, why)
                return
        shares = [replace(one) for one in self._shares]
        parts = fitting.split(self._placement, unit, self._pieces, shares)
        if parts is None:
            raise ConfigError(
                f"{self._placement.named}: no other server has room for {self._pieces[unit.at[0]]} "
                "and what is to move with it; raise the limits, or start another server first "
                "(zkv server add)"
            )
        for at, server in parts.items():
            self._put([at], server, why)

    def _filled(self, server: int) -> float:
        share = self._shares[server]
        return share.load if self._wishes.loaded else share.nbytes

    def _part(self, unit: Unit, there: list[int]) -> Unit:
        if len(there) == len(unit.at):
            return unit
        pieces = [self._pieces[at] for at in there]
        nbytes, load = sum(one.nbytes for one in pieces), sum(one.load for one in pieces)
        return Unit(there, nbytes, load, unit.weight, unit.pin, unit.name)

    def _put(self, blocks: Iterable[int], server: int, why: str) -> None:
        for at in blocks:
            piece = self._pieces[at]
            for share, sign in ((self._shares[self.where[at]], -1), (self._shares[server], 1)):
                share.blocks += sign
                share.nbytes += sign * piece.nbytes
                share.load += sign * piece.load
            self.where[at] = server
            self._why.pop(at, None)
            self._why[at] = why

    # --- servers that come, and loads that differ -----------------------------------------------

    def fill(self, server: int, why: str) -> None:
        """Give a server that has come its share: what a ring says, else by bytes or load."""
        if self._wishes.ring is None:
            weights = [one.load if self._wishes.loaded else one.nbytes for one in self._pieces]
            self.level(weights, why, only=server)
            return
        for unit in self._units:
            order = (one for one in self._wishes.ring.walk(unit.name) if one not in self._closed)
            if unit.pin is None and next(order) == server:
                there = [at for at in unit.at if self.where[at] != server]
                part = self._part(unit, there)
                if there and fitting.fits(self._placement.caps, self._shares[server], part):
                    self._put(there, server, why)

    def level(self, weights: Sequence[float], why: str, *, only: int | None = None) -> None:
        """Make servers carry alike much of a weight of blocks, as far as few moves do it.

        `only`: nothing moves but to this server.
        """
        movable = [_Load(unit, sum(weights[at] for at in unit.at)) for unit in self._units]
        movable = [
            one
            for one in movable
            if one.unit.pin is None
            and one.weight > 0
            and len({self.where[at] for at in one.unit.at}) == 1
        ]
        for _ in range(2 * len(movable)):
            if not self._step(movable, weights, why, only):
                return

    def _step(
        self, movable: list[_Load], weights: Sequence[float], why: str, only: int | None
    ) -> bool:
        loads = self.weights(weights)
        mean = sum(loads.values()) / max(1, len(loads))
        idlest = sorted(loads, key=lambda server: (loads[server], server))
        if mean <= 0 or loads[idlest[-1]] <= EVEN * mean:
            return False
        least = GAIN * mean
        on: dict[int, list[_Load]] = {server: [] for server in loads}
        for one in movable:
            on[self.where[one.unit.at[0]]].append(one)
        # What is not the busiest gives up something only where one server is to be filled.
        sources = idlest[::-1] if only is not None else idlest[-1:]
        for source in sources:
            for swap in (False, True) if only is None else (False,):
                for target in [only] if only is not None else idlest:
                    gap = loads[source] - loads[target]
                    if target == source or gap <= 2 * least:
                        continue
                    found = self._best(on[source], on[target] if swap else (), target, gap, least)
                    if found is not None:
                        self._put(found[0].unit.at, target, why)
                        self._put([] if found[1] is None else found[1].unit.at, source, why)
                        return True
        return False

    def _best(
        self, own: list[_Load], others: Sequence[_Load], target: int, gap: float, least: float
    ) -> tuple[_Load, _Load | None] | None:
        """Return what to move, and what comes back for it (of `others`, if there are any), so that
        the two servers are nearest to each other; None: nothing makes them nearer by enough."""
        best, found = gap / 2 - least, None
        ordered = sorted(others, key=lambda one: one.weight)
        for one in own:
            backs: list[_Load | None] = [None]
            if others:
                at = bisect_left([other.weight for other in ordered], one.weight - gap / 2)
                backs = list(ordered[max(0, at - 1) : at + 1])
            for back in backs:
                change = one.weight - (0.0 if back is None else back.weight)
                off = abs(change - gap / 2)
                if change > 0 and off < best and self._have_room(one, back, target):
                    best, found = off, (one, back)
        return found

    def _have_room(self, one: _Load, back: _Load | None, target: int) -> bool:
        share = replace(self._shares[target])
        if back is None:
            return fitting.fits(self._placement.caps, share, one.unit)
        own = replace(self._shares[self.where[one.unit.at[0]]])
        for held, unit in ((share, back.unit), (own, one.unit)):
            held.blocks -= len(unit.at)
            held.nbytes -= unit.nbytes
            held.load -= unit.load
        caps = self._placement.caps
        return fitting.fits(caps, share, one.unit) and fitting.fits(caps, own, back.unit)


@dataclass(frozen=True, slots=True)
class _Load:
    """What moves as one, and its weight."""

    unit: Unit
    weight: float


def imbalance_of(loads: Mapping[int, float]) -> float:
    """Return the busiest server's load over the mean (1.0 if there is none)."""
    total = sum(loads.values())
    return max(loads.values()) * len(loads) / total if total else 1.0
