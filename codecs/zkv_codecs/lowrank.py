"""Low-rank factors instead of a matrix: `powersgd:R`.

One step of subspace iteration (Vogels, Karimireddy, Jaggi: PowerSGD, arXiv 1905.13727, algorithm 1)
on a matrix M of n rows and m columns, from the m × R factor Q of the step before:

    P = orthonormal(M Q),  Q = Mᵀ P,  decoded as P Qᵀ

In the paper all workers share P and Q, which takes two rounds of sums. A parameter server has one
message per worker: each sends factors of its own gradient, and what is summed is P Qᵀ. So what is
decoded is P Pᵀ M, an orthogonal projection of that worker's own gradient, and error feedback keeps
the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.backend import Backend
from zkv_codecs.packed import Packed, Sizes, Stage, State

START_SEED = 0x9E3779B97F4A7C15
"""Of the first Q; any will do, but it must not be another one in the next run."""

VANISHED = np.float32(1e-6)
"""A column of Q this small beside the largest one is rounding, and no direction to start from."""

DOWN, UP = np.float32(2.0**-64), np.float32(2.0**32)
"""Exact factors that keep sums of numbers near float32's largest finite: DOWN · UP · UP = 1."""


@dataclass(frozen=True, slots=True)
class PowerSgd(Stage):
    """Factors of `rank` columns: 32 · rank · (n + m) / (n · m) bits per element of a n × m array.

    A matrix has the array's first axis as rows and all the others as columns. Arrays for which
    2 · rank · (n + m) ≥ n · m, and those of fewer than two axes, are sent as they are.

    The bits depend on the matrix product of the machine (BLAS): unlike other codecs' they are not
    the same everywhere, and a receiver's P Qᵀ equals the sender's to rounding.

    ‖M − decode(M)‖² = ‖M‖² − ‖decode(M)‖², to rounding, for all M; M of a rank ≤ `rank` survives.

    Raises:
        ValueError: a rank below 1.
    """

    kind: ClassVar[str] = "lowrank"
    remembers: ClassVar[bool] = True
    rank: int

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"powersgd: rank {self.rank}; give 1 or more, such as powersgd:4")

    @property
    def text(self) -> str:
        """`powersgd:4` for rank 4."""
        return f"powersgd:{self.rank}"

    def start(self, shape: Sequence[int]) -> State:
        """Return the first Q, normally distributed; nothing for arrays that are sent as they are.

        The step from `old` to `new` need not be undone (`restore`): any Q is only a start.
        """
        if not self.compresses(shape):
            return ()
        chance = np.random.default_rng(START_SEED)
        return (chance.standard_normal((_matrix(shape)[1], self.rank), np.float32),)

    def compresses(self, shape: Sequence[int]) -> bool:
        """Return whether an array of this shape is sent as factors."""
        if len(shape) < 2:
            return False
        rows, columns = _matrix(shape)
        return 2 * self.rank * (rows + columns) < rows * columns

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return P and then Q, each row by row in one flat array, and the Q to start from next."""
        if not self.compresses(packed.shape):
            return packed, state
        xp = backend.xp
        matrix = packed.values.reshape(_matrix(packed.shape))
        with np.errstate(all="ignore"):
            p, q = _factors(matrix, xp.asarray(state[0]), xp)
            following = self._start_after(q, packed.shape, xp)
            p, q = _balanced(p, q, xp)
        sent = xp.concatenate((p.reshape(-1), q.reshape(-1)))
        return replace(packed, values=sent, kept=sent.size), (following,)

    def decode(self, packed: Packed, backend: Backend) -> Packed:
        """Return P Qᵀ, flat."""
        if not self.compresses(packed.shape):
            return packed
        rows, columns = _matrix(packed.shape)
        p = packed.values[: rows * self.rank].reshape(rows, self.rank)
        q = packed.values[rows * self.rank :].reshape(columns, self.rank)
        with np.errstate(all="ignore"):
            # One column is no case for BLAS: NumPy takes ten times as long.
            product = p * q.T if self.rank == 1 else p @ q.T
        return replace(packed, values=product.reshape(-1), kept=None)

    def sizes(self, count: int) -> Sizes:
        """All values: a flat array is sent as it is."""
        return Sizes(np.dtype(np.float32), count)

    def sizes_after(self, given: Sizes, shape: Sequence[int]) -> Sizes:
        """rank · (n + m) values, or all of them."""
        if not self.compresses(shape):
            return given
        return Sizes(np.dtype(np.float32), self.rank * sum(_matrix(shape)))

    def _start_after(self, q: Array, shape: Sequence[int], xp: Any) -> Array:
        """Return columns of length 1 in the directions of Q's.

        A column that vanished would stay so for ever, as M · 0 = 0: a gradient of zeros, or one of
        low rank, must not cost a direction for good. Such columns, and those that are no numbers,
        start anew.
        """
        largest = xp.abs(q).max()
        q = q / xp.where(largest > 0, largest, np.float32(1))
        lengths = xp.sqrt(xp.sum(q * q, axis=0))
        alive = lengths > VANISHED * lengths.max()
        columns: Array = q / xp.where(alive, lengths, np.float32(1))
        if not alive.all():
            columns = xp.where(alive, columns, xp.asarray(self.start(shape)[0]))
        return columns


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of an array of two axes or more."""
    columns = 1
    for extent in shape[1:]:
        columns *= extent
    return shape[0], columns


def _factors(matrix: Array, start: Array, xp: Any) -> tuple[Array, Array]:
    """Return P, with orthonormal columns, and Q = matrixᵀ · P."""
    p, q = _projected(matrix, start, xp)
    if not xp.isfinite(q).all():
        p, q = _projected(matrix * DOWN, start, xp)
        p, q = p * UP, q * UP
    return p, q


def _balanced(p: Array, q: Array, xp: Any) -> tuple[Array, Array]:
    """Return P · 2**k and Q · 2**−k of about equal magnitude, so that one scale serves for both.

    Their product is the same to the bit. A quantizer behind this stage would else see the columns
    of length 1 vanish beside a large gradient's.
    """
    largest = [float(xp.abs(one).max()) if one.size else 0.0 for one in (p, q)]
    if not all(0 < one < float("inf") for one in largest):
        return p, q
    (_, low), (_, high) = (math.frexp(one) for one in largest)
    steps = (high - low) // 2
    return p * np.float32(2.0**steps), q * np.float32(2.0**-steps)


def _projected(matrix: Array, start: Array, xp: Any) -> tuple[Array, Array]:
    # Householder reflections give orthonormal columns whatever they are given: no small number has
    # to be added to the length of a zero column, and dependent columns stay at right angles, where
    # Gram and Schmidt's method makes them out of rounding errors.
    p, _ = xp.linalg.qr(matrix @ start)
    return p, matrix.T @ p
