"""Who computes which samples: each exactly once per pass, whoever joins, leaves or is cancelled.

The pool hands out positions of a permutation that everybody can compute, so a draw is three
numbers, however many samples it has. It must not know workers' sockets, grants, time or the data.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from zkv.dtypes import Array

INT_MAX = 2**63 - 1
"""What fits on the wire, for each number of a shard."""

ORDERS_MAX = 2
"""Permutations that are kept: while one pass begins, samples of the one before may come back."""


def permutation(n: int, seed: int, pass_number: int) -> Array:
    """Return the order of samples 0…n−1 in one pass (from 1): an int64 array of shape (n,).

    Samples sorted by random 64-bit keys, ties by number: the keys are the raw output of PCG64
    (O'Neill 2014, HMC-CS-2014-0905) seeded with (seed, pass), which every version of NumPy gives
    alike. `Generator.permutation` may change between versions, and workers need not have the same.
    """
    keys = np.random.PCG64(np.random.SeedSequence([seed, pass_number])).random_raw(n)
    order: Array = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    return order


@dataclass(frozen=True, slots=True)
class Shard:
    """How `n` samples are dealt out to all workers of a run, `size` at a time, `passes` times.

    Raises:
        ValueError: a number is out of its range; all of them are whole numbers.
    """

    n: int
    seed: int = 0
    size: int = 32
    passes: int | None = 1
    """None: for as long as the workers go on."""
    retry: bool = True
    """Whether samples of a batch that did not count are handed out again, or are skipped."""

    def __post_init__(self) -> None:
        passes = 1 if self.passes is None else self.passes
        limits = (("n", self.n, 1), ("seed", self.seed, 0), ("size", self.size, 1))
        for name, value, least in (*limits, ("passes", passes, 1)):
            if type(value) is not int or not least <= value <= INT_MAX:
                raise ValueError(
                    f"data: {name}={value!r}; it must be a whole number, at least {least}"
                )


class Orders:
    """The permutations of a shard's passes, of which `kept` stay in memory: int64 arrays (n,).

    The oldest pass makes room for one that is asked for.
    """

    __slots__ = ("_kept", "_orders", "_shard")

    def __init__(self, shard: Shard, kept: int = ORDERS_MAX) -> None:
        self._shard = shard
        self._kept = kept
        self._orders: dict[int, Array] = {}

    def samples(self, pass_number: int, start: int, stop: int) -> Array:
        """Return the samples at positions `[start, stop)` of a pass: an int64 array of their own.

        It costs O(stop - start), and O(n log n) where that pass is not in memory.
        """
        if pass_number not in self._orders:
            while len(self._orders) >= self._kept:
                del self._orders[min(self._orders)]
            shard = self._shard
            self._orders[pass_number] = permutation(shard.n, shard.seed, pass_number)
        return self._orders[pass_number][start:stop].copy()


@dataclass(frozen=True, slots=True)
class Draw:
    """Positions `[start, stop)` of the permutation of a pass; `ticket` is to be settled once."""

    ticket: int
    pass_number: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class Share:
    """What became of one owner's samples."""

    counted: int = 0
    skipped: int = 0
    """Handed out, did not count, and are not handed out again."""
    returned: int = 0
    """Handed out, did not count, and went back."""


@dataclass(frozen=True, slots=True)
class Remaining:
    """What is left of a pool: what has not counted is still to be dealt out."""

    pass_number: int
    fresh: int
    """Where the positions of that pass begin that were never handed out."""
    back: tuple[tuple[int, int, int], ...]
    """(pass, start, stop) of those that were, and have not counted."""
    settled: tuple[tuple[int, int], ...]
    """(pass, positions settled) of the passes that are not complete."""
    shares: tuple[tuple[int, int, int, int], ...]
    """(owner, counted, skipped, returned)."""


@dataclass(slots=True)
class Pool:
    """Hands out draws, and keeps book of them.

    In each pass every position is settled exactly once: counted, or (without `retry`) skipped. What
    comes back is handed out first, the oldest pass before newer ones; a new pass begins when all
    fresh positions of the one before are handed out. A draw costs O(log r) with r draws that have
    come back, and O(1) with none.
    """

    shard: Shard
    pass_number: int = 1
    """The pass that fresh positions are taken from; the first is 1."""
    shares: dict[int, Share] = field(default_factory=dict)
    """By owner."""
    _fresh: int = 0
    _tickets: int = 0
    _open: dict[int, tuple[int, Draw]] = field(default_factory=dict)
    _back: list[tuple[int, int, int]] = field(default_factory=list)
    _settled: dict[int, int] = field(default_factory=dict)

    def remaining(self) -> Remaining:
        """Return what is left if nothing that is open comes to count."""
        there = (draw for _, draw in self._open.values())
        back = [*self._back, *((one.pass_number, one.start, one.stop) for one in there)]
        shares = sorted(self.shares.items())
        return Remaining(
            self.pass_number,
            self._fresh,
            tuple(sorted(back)),
            tuple(sorted(self._settled.items())),
            tuple((who, one.counted, one.skipped, one.returned) for who, one in shares),
        )

    @staticmethod
    def of(shard: Shard, left: Remaining) -> Pool:
        """Return a pool of which that is left."""
        shares = {who: Share(*counts) for who, *counts in left.shares}
        # Sorted, as it is written, is a heap.
        settled = dict(left.settled)
        return Pool(shard, left.pass_number, shares, left.fresh, 0, {}, sorted(left.back), settled)

    @property
    def ready(self) -> bool:
        """Whether somebody who asks now gets a draw."""
        return bool(self._back) or self._has_fresh

    @property
    def done(self) -> bool:
        """Whether every position of every pass is settled."""
        return not self._open and not self.ready

    @property
    def _has_fresh(self) -> bool:
        passes = self.shard.passes
        return self._fresh < self.shard.n or passes is None or self.pass_number < passes

    @property
    def unsettled(self) -> dict[int, int]:
        """How many draws each owner holds; a scan, for words and tables."""
        held: dict[int, int] = {}
        for owner, _ in self._open.values():
            held[owner] = held.get(owner, 0) + 1
        return held

    @property
    def coverage(self) -> dict[int, float]:
        """What part of each pass that has begun and is not complete is settled, in [0, 1]."""
        return {number: done / self.shard.n for number, done in sorted(self._settled.items())}

    def take(self, owner: int) -> Draw | None:
        """Hand out the next samples; None if there are none now (some may come back)."""
        if self._back:
            where = heapq.heappop(self._back)
        elif self._has_fresh:
            where = self._next()
        else:
            return None
        self._tickets += 1
        draw = Draw(self._tickets, *where)
        self._open[draw.ticket] = (owner, draw)
        self._settled.setdefault(draw.pass_number, 0)
        return draw

    def _next(self) -> tuple[int, int, int]:
        if self._fresh >= self.shard.n:
            self.pass_number, self._fresh = self.pass_number + 1, 0
        start = self._fresh
        self._fresh = min(start + self.shard.size, self.shard.n)
        return self.pass_number, start, self._fresh

    def settle(self, ticket: int, *, counted: bool) -> None:
        """Say once what became of a draw.

        Raises:
            ValueError: the ticket is not open.
        """
        if ticket not in self._open:
            raise ValueError(
                f"ticket {ticket} is not open: {self._tickets} were given, and each is settled once"
            )
        owner, draw = self._open.pop(ticket)
        share = self.shares.setdefault(owner, Share())
        if not counted and self.shard.retry:
            share.returned += len(draw)
            heapq.heappush(self._back, (draw.pass_number, draw.start, draw.stop))
            return
        if counted:
            share.counted += len(draw)
        else:
            share.skipped += len(draw)
        self._settled[draw.pass_number] += len(draw)
        if self._settled[draw.pass_number] == self.shard.n:
            del self._settled[draw.pass_number]
