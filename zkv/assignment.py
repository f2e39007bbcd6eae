"""Which server each block goes to: what a placement says, carried out. Pure.

By size and by load: largest first to the least loaded server (LPT; Graham, "Bounds on
Multiprocessing Timing Anomalies", 1969), whose busiest server has at most 4/3 − 1/(3m) times the
least load possible on m servers. By hash: along a ring. A server that has no room is passed over
(on a ring as in Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA
2018). Nothing is improved afterwards: LPT finds the best of the seed page's loads, with two blocks
for each server (43) and without (40). Where caps leave no room at the end, few blocks are searched
for any placement that fits (`zkv.fitting`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace

from zkv import fitting
from zkv.fitting import Piece, Share, Unit
from zkv.hash_ring import Ring, name_of
from zkv.placements import ByLoad, Placement
from zkv.wishes import Wishes


def assign(
    pieces: Sequence[Piece],
    servers: int,
    placement: Placement,
    *,
    wishes: Wishes | None = None,
    names: Sequence[str] = (),
    held: Sequence[Share] | None = None,
) -> list[int]:
    """Return the number of the server (from 0) of each block.

    `held` is what each server has already, `names` are the servers' for pins that name one.

    Raises:
        ConfigError: pins, groups and caps cannot be met; the text names the key, its size, the
            limit and what to try.
    """
    wishes = wishes or Wishes(placement, servers, (one.key for one in pieces), names)
    shares = [replace(one) for one in held] if held is not None else fitting.empty(servers)
    fitting.check(placement, pieces, shares)
    chosen = dict[int, int]()
    units = units_of(pieces, wishes)
    for unit in units:
        if unit.pin is not None:
            fitting.put_pinned(placement, unit, shares, pieces)
            chosen |= dict.fromkeys(unit.at, unit.pin)
    free = [unit for unit in units if unit.pin is None]
    before = [replace(one) for one in shares]
    ring = wishes.ring
    choose = _Lpt(placement, shares) if ring is None else _Along(placement, shares, ring)
    found = _place(free, pieces, choose)
    if found is None:
        found = fitting.search(placement, free, pieces, before)
    chosen |= found
    return [chosen[at] for at in range(len(pieces))]


def units_of(pieces: Sequence[Piece], wishes: Wishes) -> list[Unit]:
    """Return what is placed as one: a group, or a single block; the largest first.

    Where there are caps, groups come before single blocks, which would take their room.
    """
    by_group: dict[int, list[int]] = {}
    units: list[Unit] = []
    loaded = wishes.loaded
    for at, piece in enumerate(pieces):
        group = wishes.group(piece.key)
        if group is not None:
            by_group.setdefault(group, []).append(at)
            continue
        weight = piece.load if loaded else piece.nbytes
        name = b"" if wishes.ring is None else name_of(piece.key, piece.start)
        pin = wishes.pin(piece.key)
        units.append(Unit([at], piece.nbytes, piece.load, weight, pin, name))
    for group, held in by_group.items():
        nbytes = sum(pieces[at].nbytes for at in held)
        load = sum(pieces[at].load for at in held)
        pin = wishes.pin(pieces[held[0]].key)
        weight = load if loaded else nbytes
        units.append(Unit(held, nbytes, load, weight, pin, wishes.group_name(group)))
    capped = bool(wishes.placement.caps)
    return sorted(units, key=lambda one: (capped and len(one.at) == 1, -one.weight, one.at[0]))


class _Lpt:
    """The least loaded server that has room, ties to the lower number."""

    def __init__(self, placement: Placement, shares: list[Share]) -> None:
        self.placement, self.shares = placement, shares
        self.loaded = isinstance(placement.rule, ByLoad)
        self._heap: list[tuple[float, int]] = []
        self.refresh()

    def refresh(self) -> None:
        """Take in what was put past this."""
        self._heap = [
            (share.load if self.loaded else share.nbytes, server)
            for server, share in enumerate(self.shares)
        ]
        heapq.heapify(self._heap)

    def put(self, unit: Unit) -> int | None:
        """Put a unit somewhere, and return where; None if no server has room."""
        full = []
        found = None
        while self._heap:
            weight, server = heapq.heappop(self._heap)
            if fitting.fits(self.placement.caps, self.shares[server], unit):
                found = server
                self.shares[server].add(unit)
                heapq.heappush(self._heap, (weight + unit.weight, server))
                break
            full.append((weight, server))
        for one in full:
            heapq.heappush(self._heap, one)
        return found


class _Along:
    """The first server with room clockwise on a ring."""

    def __init__(self, placement: Placement, shares: list[Share], ring: Ring) -> None:
        self.placement, self.shares, self._ring = placement, shares, ring

    def refresh(self) -> None:
        """A ring does not know loads."""

    def put(self, unit: Unit) -> int | None:
        """Put a unit somewhere, and return where; None if no server has room."""
        for server in self._ring.walk(unit.name):
            if fitting.fits(self.placement.caps, self.shares[server], unit):
                self.shares[server].add(unit)
                return server
        return None


def _place(
    units: Iterable[Unit], pieces: Sequence[Piece], choose: _Lpt | _Along
) -> dict[int, int] | None:
    """Put all units, groups without room in parts; None if some block has no room."""
    chosen: dict[int, int] = {}
    for unit in units:
        server = choose.put(unit)
        if server is not None:
            chosen |= dict.fromkeys(unit.at, server)
            continue
        parts = fitting.split(choose.placement, unit, pieces, choose.shares)
        if parts is None:
            return None
        chosen |= parts
        choose.refresh()
    return chosen


def key_loads(
    placement: Placement, sizes: Sequence[tuple[int, str | int, int]]
) -> dict[int, float]:
    """Return the load of each key by its number, from (number, key, bytes).

    Where no load is given, bytes; else a key without one counts its bytes at the mean load of a
    byte of those that have one, so that both are of one unit.
    """
    rule = placement.rule
    if not isinstance(rule, ByLoad):
        return {kid: nbytes for kid, _, nbytes in sizes}
    given = {kid: load for kid, key, _ in sizes if (load := rule.load_of(key)) is not None}
    measured = sum(nbytes for kid, _, nbytes in sizes if kid in given)
    per_byte = sum(given.values()) / measured if measured else 0.0
    return {kid: given.get(kid, nbytes * (per_byte or 1.0)) for kid, _, nbytes in sizes}


def shares_of(pieces: Iterable[Piece], chosen: Iterable[int], servers: int) -> list[Share]:
    """Return what each server holds of blocks that were placed."""
    shares = fitting.empty(servers)
    for piece, server in zip(pieces, chosen, strict=True):
        shares[server].blocks += 1
        shares[server].nbytes += piece.nbytes
        shares[server].load += piece.load
    return shares


def reason(wishes: Wishes, key: str | int) -> str:
    """Return why a key is where it is placed, for a person."""
    placement = wishes.placement
    pinned = placement.pinned(key)
    if pinned is not None:
        return f"pin:{pinned[0]}={pinned[1]}"
    group = wishes.group(key)
    if group is not None:
        with_ = f"together={'|'.join(placement.together[group])}"
        pin = wishes.pin(key)
        return with_ if pin is None else f"{with_}, pinned to server {pin}"
    if wishes.ring is not None:
        return "its place on the ring"
    of = "load" if isinstance(placement.rule, ByLoad) else "bytes"
    capped = " with room" if placement.caps else ""
    return f"to the server of least {of}{capped}"
