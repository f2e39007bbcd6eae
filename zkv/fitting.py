"""Caps of servers: what fits where, groups in parts, and what to say when nothing fits. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from zkv.errors import ConfigError
from zkv.placements import ByLoad, Caps, Placement

SEARCH_BLOCKS_MAX = 64
SEARCH_LOOKS_MAX = 50_000
"""How many servers the search looks at for some block, all in all: about 0.1 s."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A block to be placed: a slice of `key` from element `start` on, or a bucket of it and `more`
    other keys. `whole` is the bytes of the key of a slice, for messages."""

    key: str | int
    nbytes: float
    load: float
    start: int = 0
    more: int = 0
    whole: float = 0

    def __str__(self) -> str:
        others = f" and {self.more} more in its block" if self.more else ""
        size = f"{self.nbytes:,.15g} bytes"
        if self.whole > self.nbytes:
            size = f"a block with {self.nbytes:,.15g} of its {self.whole:,.15g} bytes"
        return f"key {self.key!r}{others} ({size})"


@dataclass(slots=True)
class Share:
    """What a server holds."""

    blocks: int = 0
    nbytes: float = 0
    load: float = 0
    closed: bool = False
    """Whether it takes nothing: it has left, or is to."""

    def add(self, unit: Unit) -> None:
        """Take in what is placed as one."""
        self.blocks += len(unit.at)
        self.nbytes += unit.nbytes
        self.load += unit.load


@dataclass(frozen=True, slots=True)
class Unit:
    """What is placed as one: the blocks `at`, which are one, or a group's."""

    at: list[int]
    nbytes: float
    load: float
    weight: float
    """What servers are compared by: bytes or load."""
    pin: int | None
    name: bytes
    """What stands for it on a ring."""


def empty(servers: int, closed: Set[int] = frozenset()) -> list[Share]:
    """Return the shares of servers that hold nothing; those of the numbers `closed` take none."""
    return [Share(closed=server in closed) for server in range(servers)]


def fits(caps: Caps, share: Share, unit: Unit) -> bool:
    """Return whether a server has room for a unit."""
    return (
        not share.closed
        and (caps.blocks is None or share.blocks + len(unit.at) <= caps.blocks)
        and (caps.nbytes is None or share.nbytes + unit.nbytes <= caps.nbytes)
        and (caps.load is None or share.load + unit.load <= caps.load)
    )


def alone(at: int, piece: Piece, weight: float, name: bytes = b"") -> Unit:
    """Return a block as a unit of its own."""
    return Unit([at], piece.nbytes, piece.load, weight, None, name)


def check(placement: Placement, pieces: Sequence[Piece], shares: Sequence[Share]) -> None:
    """Check what no choice of servers could change.

    Raises:
        ConfigError: a block is larger than any server's limit, or all together are.
    """
    caps = placement.caps
    if not caps or not pieces:
        return
    for piece in pieces:
        if caps.nbytes is not None and piece.nbytes > caps.nbytes:
            smaller = "" if piece.more else ", or cut smaller blocks (--block-bytes)"
            raise ConfigError(
                f"{placement.named}: {piece} is larger than the limit of every server, "
                f"bytes={caps.nbytes:,}; raise it{smaller}"
            )
        if caps.load is not None and piece.load > caps.load:
            raise ConfigError(
                f"{placement.named}: {piece} has a load of {piece.load:g}, above the limit of "
                f"every server, load={caps.load:g}; raise it, or cut smaller blocks (--block-bytes)"
            )
    largest = max(pieces, key=lambda one: one.nbytes)
    shares = [one for one in shares if not one.closed]
    wanted = {
        "blocks": (len(pieces) + sum(one.blocks for one in shares), caps.blocks),
        "bytes": (_sum(pieces, shares, "nbytes"), caps.nbytes),
        "load": (_sum(pieces, shares, "load"), caps.load),
    }
    for name, (all_, cap) in wanted.items():
        # Sums of loads are rounded: what is at the limit may come out a little above it.
        if cap is not None and all_ > cap * len(shares) * (1 + 1e-9):
            raise ConfigError(
                f"{placement.named}: {all_:,.15g} {name} are to be placed, and {len(shares)} "
                f"servers of {name}={cap:,.15g} take {cap * len(shares):,.15g}; the largest is "
                f"{largest}; raise {name}=, or start more servers (--servers)"
            )


def _sum(pieces: Sequence[Piece], shares: Sequence[Share], name: str) -> float:
    return math.fsum(getattr(one, name) for held in (pieces, shares) for one in held)


def put_pinned(
    placement: Placement, unit: Unit, shares: Sequence[Share], pieces: Sequence[Piece]
) -> None:
    """Put a unit where it is pinned.

    Raises:
        ConfigError: that server has no room.
    """
    assert unit.pin is not None
    share = shares[unit.pin]
    if share.closed:
        raise ConfigError(
            f"{placement.named}: {pieces[unit.at[0]]} is pinned to server {unit.pin}, which has "
            "left or is drained; pin it to another one"
        )
    if not fits(placement.caps, share, unit):
        piece = pieces[unit.at[0]]
        count = len(unit.at)
        all_ = f"; with what stays with it {unit.nbytes:,.15g} bytes in {count} blocks" * (
            count > 1
        )
        raise ConfigError(
            f"{placement.named}: {piece}{all_} is pinned to server {unit.pin}, which holds "
            f"{_held(share)} of at most {_limits(placement.caps)}; raise the limit, or pin it to "
            "another server"
        )
    share.add(unit)


def split(
    placement: Placement, unit: Unit, pieces: Sequence[Piece], shares: list[Share]
) -> dict[int, int] | None:
    """Put a group on few servers: again and again as much as one server has room for.

    Returns the server of each block, or None if one has no room (`shares` are of no use then).
    """
    loaded = isinstance(placement.rule, ByLoad)
    rest = sorted(unit.at, key=lambda at: (-_weight(pieces[at], loaded), at))
    chosen: dict[int, int] = {}
    while rest:
        best, taken, after = -1, list[int](), Share()
        for server, share in enumerate(shares):
            filled = replace(share)
            some = []
            for at in rest:
                one = alone(at, pieces[at], 0)
                if fits(placement.caps, filled, one):
                    filled.add(one)
                    some.append(at)
            if some and _more(some, taken, pieces, loaded):
                best, taken, after = server, some, filled
        if not taken:
            return None
        shares[best] = after
        chosen |= dict.fromkeys(taken, best)
        gone = set(taken)
        rest = [at for at in rest if at not in gone]
    return chosen


def _more(some: Sequence[int], than: Sequence[int], pieces: Sequence[Piece], loaded: bool) -> bool:
    one, other = (sum(_weight(pieces[at], loaded) for at in held) for held in (some, than))
    return (one, len(some)) > (other, len(than))


def _weight(piece: Piece, loaded: bool) -> float:
    return piece.load if loaded else piece.nbytes


def search(
    placement: Placement, units: Sequence[Unit], pieces: Sequence[Piece], shares: Sequence[Share]
) -> dict[int, int]:
    """Find some placement of few blocks within the caps, groups in parts if need be.

    Raises:
        ConfigError: there is none, or none was found in `SEARCH_LOOKS_MAX` looks.
    """
    loaded = isinstance(placement.rule, ByLoad)
    all_ = [at for unit in units for at in unit.at]
    singles = [alone(at, pieces[at], _weight(pieces[at], loaded)) for at in all_]
    tried_all = len(all_) <= SEARCH_BLOCKS_MAX
    if tried_all:
        for some in (units, singles):
            run = _Search(placement.caps, sorted(some, key=lambda one: -one.weight), shares)
            if run.found():
                return run.chosen
            tried_all = run.looks > 0
    widest = max((pieces[at] for at in all_), key=lambda one: _weight(one, loaded))
    sure = "no placement is" if tried_all else "no placement was found"
    raise ConfigError(
        f"{placement.named}: {sure} within the limits: {len(all_)} blocks are left for "
        f"{len(shares)} servers of {_limits(placement.caps)} each, the largest of {widest}; raise "
        "the limits, start more servers (--servers), or cut smaller blocks (--block-bytes)"
    )


class _Search:
    """Depth first: each unit in turn on each server that has room, the least filled first."""

    def __init__(self, caps: Caps, units: Sequence[Unit], shares: Sequence[Share]) -> None:
        self._caps, self._units = caps, units
        self._shares = [replace(one) for one in shares]
        self.chosen: dict[int, int] = {}
        self.looks = SEARCH_LOOKS_MAX

    def found(self, at: int = 0) -> bool:
        """Whether all units from this one on have found a place."""
        if at == len(self._units):
            return True
        unit = self._units[at]
        # Servers that are filled alike are one try: the first of them, the least filled first.
        distinct: dict[tuple[float, float, int], int] = {}
        for server, share in enumerate(self._shares):
            if not share.closed:
                distinct.setdefault((share.nbytes, share.load, share.blocks), server)
        for _, server in sorted(distinct.items()):
            share = self._shares[server]
            self.looks -= 1
            if self.looks <= 0:
                return False
            if not fits(self._caps, share, unit):
                continue
            self._shares[server] = replace(share)
            self._shares[server].add(unit)
            if self.found(at + 1):
                self.chosen |= dict.fromkeys(unit.at, server)
                return True
            self._shares[server] = share
        return False


def _limits(caps: Caps) -> str:
    return " and ".join(caps.texts())


def _held(share: Share) -> str:
    return f"{share.blocks} blocks, {share.nbytes:,.15g} bytes and a load of {share.load:g}"
