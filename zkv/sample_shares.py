"""Which samples get into the model, how often, and whose: by the way that batches are assigned.

`SampleShares` listens to what a synchroniser decides. A started batch gets samples, an update
counts those of its contributions, and those of a batch that comes to nothing go back or are
skipped. The samples come from the pool that a live run has (`zkv.pool`). This module must not know
policies, gradients, how time passes, or where anything is printed.

How often two samples have counted may differ, and this is by how much:

- `retry`: by at most the passes that are *partly counted*. In a pass each sample counts at most
  once; in one that is complete it has counted once, and in one of which nothing has counted, not at
  all. So only the others can tell two samples apart, each by 1.
- `skip`: without a bound, as a pass is over when each sample has counted or was skipped. No sample
  is favoured, though: which of them a skipped batch has is up to the permutation.
- `fixed`: without a bound, and a sample's count follows its worker's: whoever makes twice as many
  batches that count has its samples in the model twice as often. Equal parts under a policy where
  all workers count alike (BSP) stay level: two samples differ by at most 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, get_args

import numpy as np

from zkv.dtypes import Array
from zkv.events import Action, Cancel, Commit, Discard, Start
from zkv.pool import INT_MAX, Draw, Orders, Pool, Shard, Share

Way = Literal["retry", "skip", "fixed"]
WAYS: tuple[Way, ...] = get_args(Way)
SAMPLES_MAX = 100_000_000
"""Two numbers of 8 bytes are kept for each sample, and two more while an order is drawn."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """How batches are assigned: `samples` of them, numbered 0...n-1, `batch` at a time, no end.

    - "retry": one pool for all workers, and the samples of a batch that comes to nothing are handed
      out again, before others;
    - "skip": one pool, and such samples are skipped in that pass;
    - "fixed": the worker of rank r of w has the samples r, r + w, ... for itself and goes round in
      them; such samples are skipped, as by a live worker whose loop goes on.

    In each pass the order is a new permutation; its last batch may be smaller.

    Raises ValueError for a number out of its range, or another way.
    """

    samples: int
    batch: int = 32
    way: Way = "retry"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise ValueError(f"assign {str(self.way)[:40]!r} is none of {', '.join(WAYS)}")
        limits = (("samples", 1, SAMPLES_MAX), ("batch", 1, INT_MAX), ("seed", 0, INT_MAX))
        for name, least, most in limits:
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name} must be {least} to {most}, given {value}")


@dataclass(slots=True)
class _Deck:
    """A pool, and the samples that its positions stand for: first, first + step, ..."""

    pool: Pool
    orders: Orders
    first: int
    step: int
    back: dict[tuple[int, int], Array] = field(default_factory=dict)
    """Samples that have come back, by pass and start: older orders are no longer in memory."""

    def take(self, owner: int) -> tuple[Draw, Array]:
        draw = self.pool.take(owner)
        assert draw is not None, "a pool whose passes have no end is never empty"
        again = self.back.pop((draw.pass_number, draw.start), None)
        if again is not None:
            return draw, again
        places = self.orders.samples(draw.pass_number, draw.start, draw.stop)
        return draw, places * self.step + self.first

    def settle(self, draw: Draw, samples: Array, *, counted: bool) -> None:
        self.pool.settle(draw.ticket, counted=counted)
        if not counted and self.pool.shard.retry:
            self.back[draw.pass_number, draw.start] = samples


class SampleShares:
    """Which samples each worker's batches have; `hear` is its one way in.

    `workers` are the numbers of all workers, in the order of their ranks. An action costs
    O(size of the batch) for each batch it names, apart from the order that is drawn when a pass
    begins.

    Raises ValueError if a worker would have no sample of its own.
    """

    def __init__(self, assignment: Assignment, workers: Sequence[int]) -> None:
        self.assignment = assignment
        self.workers = tuple(workers)
        self._counts: Array = np.zeros(assignment.samples, np.int64)
        self._decks = dict(zip(self.workers, self._dealt(), strict=True))
        self._open: dict[tuple[int, int], tuple[Draw, Array]] = {}

    def _dealt(self) -> Iterator[_Deck]:
        """Yield each worker's deck; a pool is one deck in all hands."""
        how, hands = self.assignment, len(self.workers)
        if how.way != "fixed":
            shard = Shard(how.samples, how.seed, how.batch, None, how.way == "retry")
            yield from [_deck(shard)] * hands
            return
        if how.samples < hands:
            raise ValueError(
                f"samples must be at least {hands} with assign fixed, one for each of the "
                f"{hands} workers, given {how.samples}"
            )
        for rank in range(hands):
            own = len(range(rank, how.samples, hands))
            yield _deck(Shard(own, how.seed, how.batch, None, False), rank, hands)

    @property
    def counts(self) -> Array:
        """How often each sample has counted: int64, (samples,), a view that cannot be written."""
        view: Array = self._counts.view()
        view.flags.writeable = False
        return view

    @property
    def batches_kept(self) -> int:
        """How many batches have their samples in memory: those open, and those that came back."""
        decks = {id(deck): deck for deck in self._decks.values()}
        return len(self._open) + sum(len(deck.back) for deck in decks.values())

    def hear(self, action: Action) -> None:
        """Carry out one decision. Decisions must come in their order.

        Raises KeyError for an unknown worker, or a contribution of a batch that was never started.
        """
        match action:
            case Start(worker, grant, _):
                self._open[worker, grant] = self._decks[worker].take(worker)
            case Cancel(worker, grant) | Discard(worker, grant):
                # A late contribution is discarded after its batch was cancelled.
                if (worker, grant) in self._open:
                    self._settle(worker, grant, counted=False)
            case Commit():
                for one in action.contributions:
                    self._settle(one.worker, one.grant, counted=True)

    def _settle(self, worker: int, grant: int, *, counted: bool) -> None:
        draw, samples = self._open.pop((worker, grant))
        self._decks[worker].settle(draw, samples, counted=counted)
        if counted:
            # Within one draw no sample stands twice.
            self._counts[samples] += 1

    def report(self) -> SamplesReport:
        """What has counted up to now; more may be heard afterwards."""
        times = np.bincount(self._counts)
        return SamplesReport(
            self.assignment,
            self.workers,
            tuple(
                replace(self._decks[worker].pool.shares.get(worker, Share()))
                for worker in self.workers
            ),
            {int(at): int(times[at]) for at in np.flatnonzero(times)},
        )


def _deck(shard: Shard, first: int = 0, step: int = 1) -> _Deck:
    # What comes back keeps its samples, so no older order is asked for.
    return _Deck(Pool(shard), Orders(shard, kept=1), first, step)


@dataclass(frozen=True, slots=True)
class SamplesReport:
    """What became of the samples: `shares` in the order of `workers`, both by rank.

    What is computed, or has arrived and is not applied, is in none of the figures.
    """

    assignment: Assignment
    workers: tuple[int, ...]
    shares: tuple[Share, ...]
    histogram: dict[int, int]
    """How many samples have counted so many times, by that number, rising."""

    @property
    def counted(self) -> int:
        """How many samples have counted, each as often as it has."""
        return sum(share.counted for share in self.shares)

    @property
    def parts(self) -> tuple[Fraction, ...]:
        """Each worker's part of what has counted, 0 to 1; all 0 if nothing has."""
        whole = self.counted or 1
        return tuple(Fraction(share.counted, whole) for share in self.shares)

    @property
    def least(self) -> int:
        """How often the sample has counted that has counted least."""
        return min(self.histogram)

    @property
    def most(self) -> int:
        """How often the sample has counted that has counted most."""
        return max(self.histogram)

    @property
    def mean(self) -> Fraction:
        """How often a sample has counted in the mean."""
        return Fraction(self.counted, self.assignment.samples)

    @property
    def never(self) -> int:
        """How many samples have not counted."""
        return self.histogram.get(0, 0)

    def to_plain(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` takes; lists have one entry for each worker, by rank."""
        how = self.assignment
        return {
            "n": how.samples,
            "batch": how.batch,
            "assign": how.way,
            "seed": how.seed,
            "counted": [share.counted for share in self.shares],
            "share": [float(part) for part in self.parts],
            "skipped": [share.skipped for share in self.shares],
            "returned": [share.returned for share in self.shares],
            "per_sample": {
                "min": self.least,
                "mean": float(self.mean),
                "max": self.most,
                "never": self.never,
                "times": {str(times): count for times, count in self.histogram.items()},
            },
        }
