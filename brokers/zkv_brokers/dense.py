"""Updates of contributions that came as they are: summed, divided and applied in one go.

Each array is read once: a piece of the sum is made in a core's own cache, and the rule applied to
it there. To the bits of what `aggregates` and `Store.commit` do one after the other with whole
blocks; that is for everything else. Knows no layout, no messages and no versions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from zkv.dtypes import Array
from zkv.optim import Rule, update
from zkv.sums import divided
from zkv_brokers.aggregates import Joined, Share, SparseSum, Total, apart


def _cpus() -> int:
    """Return how many processors this process may use."""
    known = getattr(os, "sched_getaffinity", None)
    return len(known(0)) if known is not None else os.cpu_count() or 1


SHARED_ELEMENTS = 128 * 1024
"""A run of so many elements is shared with another thread: handing over takes 50 us."""
HELPER = ThreadPoolExecutor(1, "zkv-sums") if _cpus() >= 4 else None
"""One core alone all but saturates memory, so that a second one gains a tenth where it is idle, and
takes as much processor again where workers have a use for it."""
PIECE_ELEMENTS = 32 * 1024
"""Of float32: a piece of each array that a sum of a few needs is in a core's own cache."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring segments that are updated by one kernel call: elements `[start, stop)`."""

    start: int
    stop: int
    rule: Rule
    lr: float
    count: int
    divisor: float

    def of(self, total: Total, *, zeros_stay: bool) -> tuple[slice | Array, Array]:
        """Return the elements that are to be updated, a slice or positions, and their sums."""
        cut = slice(self.start, self.stop)
        if not isinstance(total, SparseSum):
            return cut, total[cut]
        part = total.part(self.start, self.stop)
        if not zeros_stay:
            return cut, part.dense()
        return part.positions + self.start, part.values


@dataclass(frozen=True, slots=True)
class Dense:
    """What one update is made of: float32 arrays and their weights, in the order of rule 15."""

    terms: Sequence[tuple[Array, float]]

    @staticmethod
    def of(shares: Sequence[Share], kids: Sequence[int], factors: Sequence[float]) -> Dense | None:
        """Return it; None: some share is more than that, or says less than all of these keys."""
        if any(one.base is not None or not one.skipped.isdisjoint(kids) for one in shares):
            return None
        terms = []
        of_share = dict(zip(map(id, shares), factors, strict=True))
        for share in apart(shares):
            values, factor = share.payload, of_share[id(share)]
            if isinstance(values, Joined):
                # It is weighted already.
                values, factor = values.values, 1.0
            if not isinstance(values, np.ndarray) or values.dtype != np.float32:
                return None
            terms.append((values, factor))
        return Dense(terms) if terms else None

    def apply(
        self,
        runs: Sequence[Run],
        factor: float,
        now: tuple[Array, tuple[Array, ...]],
        out: tuple[Array, tuple[Array, ...]],
    ) -> bool:
        """Write the next values and state to `out`, which may be `now`: flat float32 arrays.

        `factor` is what the mean is multiplied by. Return whether no sum has a NaN or Inf in it,
        and so no term; False also if that is not known.
        """
        # Compiling needs Numba, and who has none has no use for this.
        from zkv_brokers import dense_numba

        kernels: Any = dense_numba
        (values, slots), (values_out, slots_out) = now, out
        scratch = np.empty((len(self.terms), PIECE_ELEMENTS), np.float32)
        finite = True
        for run in runs:
            by, times, rate = map(np.float32, (run.divisor, factor, -run.lr))
            plain = run.rule.name == "sgd" and not dict(run.rule.hyper)["weight_decay"]
            plain = plain and float(by) == run.divisor
            at_once = kernels.SGD_OF.get(len(self.terms))
            if plain and at_once is not None and values_out is not values:
                numbers = (by, times, rate)
                finite = self._sgd(at_once, run, numbers, values, values_out) and finite
                continue
            for start in range(run.start, run.stop, PIECE_ELEMENTS):
                cut = slice(start, min(start + PIECE_ELEMENTS, run.stop))
                total = self._sum(kernels, 0, len(self.terms), cut, scratch)
                finite = bool(kernels.finite(total)) and finite
                if plain:
                    kernels.sgd(values[cut], total, by, times, rate, values_out[cut])
                    continue
                gradient = divided(total, run.divisor)
                if factor != 1.0:
                    gradient = gradient * times
                update(
                    run.rule,
                    values[cut],
                    tuple(slot[cut] for slot in slots),
                    gradient,
                    lr=run.lr,
                    count=run.count,
                    out=(values_out[cut], tuple(slot[cut] for slot in slots_out)),
                )
        return finite

    def _sgd(
        self,
        kernel: Any,
        run: Run,
        numbers: tuple[Any, Any, Any],
        values: Array,
        out: Array,
    ) -> bool:
        """Apply sgd to the sum of a few terms; of a large run, half of it on another thread."""

        def part(start: int, stop: int) -> bool:
            cut = slice(start, stop)
            terms = [one for term, weight in self.terms for one in (term[cut], np.float32(weight))]
            return bool(kernel(values[cut], *terms, *numbers, out[cut]))

        if HELPER is None or run.stop - run.start < SHARED_ELEMENTS:
            return part(run.start, run.stop)
        middle = (run.start + run.stop) // 2
        half = HELPER.submit(part, middle, run.stop)
        finite = part(run.start, middle)
        return half.result() and finite

    def _sum(self, kernels: Any, first: int, last: int, cut: slice, scratch: Array) -> Array:
        """Return the sum of terms `[first, last)` over the tree of `zkv.sums`, in scratch."""
        out: Array = scratch[first, : cut.stop - cut.start]
        (values, weight), count = self.terms[first], last - first
        if count == 1:
            kernels.term(values[cut], np.float32(weight), out)
            return out
        other, by = self.terms[last - 1]
        if count == 2:
            kernels.two_terms(values[cut], np.float32(weight), other[cut], np.float32(by), out)
            return out
        middle = first + (1 << ((count - 1).bit_length() - 1))
        self._sum(kernels, first, middle, cut, scratch)
        if last - middle == 1:
            kernels.add_term(out, other[cut], np.float32(by))
        else:
            out += self._sum(kernels, middle, last, cut, scratch)
        return out


def warm() -> None:
    """Compile what sgd, the most frequent rule, needs."""
    from zkv_brokers import dense_numba

    one = np.zeros(1, np.float32)
    by: Any = np.float32(1)
    dense_numba.term(one, by, one.copy())
    dense_numba.two_terms(one, by, one, by, one.copy())
    dense_numba.add_term(one.copy(), one, by)
    dense_numba.sgd(one, one, by, by, by, one.copy())
    dense_numba.finite(one)
    for count, at_once in dense_numba.SGD_OF.items():
        at_once(one, *(one, by) * count, by, by, by, one.copy())
