"""Sparsifiers: a few elements are sent as they are, with their positions, the others as zeros.

A ratio R keeps k = max(1, ⌈R·n⌉) of n > 0 elements, computed with R as the decimal number that it
was written as: 0.07 of 100 are 7, though the float nearest to 0.07 is a little above it. Of equal
magnitudes the one at the lowest index is taken first. Where k of n values are sent unscaled,
‖x − decode(x)‖² ≤ (1 − k/n) ‖x‖²: for `RandomK` in the mean, for all others always.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import numpy as np

from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv_codecs.backend import Backend
from zkv_codecs.kernels.numpy_sparse import round_keys, stride_of
from zkv_codecs.packed import Packed, Sizes, Stage, State, left_over

_FLOAT32_MAX = float(np.finfo(np.float32).max)


def kept(ratio: float, n: int) -> int:
    """Return how many of n elements a ratio keeps: max(1, ⌈ratio · n⌉), and 0 of none."""
    exact = Fraction(str(ratio))
    return max(1, -(-exact.numerator * n // exact.denominator)) if n else 0


def add_at(values: Array, positions: Array, weight: float, total: Array, backend: Backend) -> None:
    """Add weight · values to `total` (float32 or float64) at these positions, in place.

    Each product is rounded to the dtype of `total`, as `Stage.add` has it.
    """
    kernels = backend.family("sparse")
    add = kernels.add if total.dtype == np.float32 else kernels.add_wide
    add(values, positions, weight, total)


class Sparsifier(Stage):
    """A stage that turns dense values into a few of them and their positions."""

    kind: ClassVar[str] = "sparsify"

    def positions(self, packed: Packed, backend: Backend) -> Array:
        """Return where the values belong: uint32, strictly ascending, below `packed.size`."""
        if packed.indices is None:
            raise ValueError(f"{self.text}: values without indices are dense, and not sent by it")
        return packed.indices

    def decode(self, packed: Packed, backend: Backend) -> Packed:
        """Return dense float32 values: zeros but for those that were sent."""
        values = backend.xp.empty(packed.size, np.float32)
        backend.family("sparse").scatter(packed.values, self.positions(packed, backend), values)
        return Packed(values, packed.shape)

    def add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        """Add weight · values to `total` where they belong; nothing else of it is touched."""
        add_at(packed.values, self.positions(packed, backend), weight, total, backend)


@dataclass(frozen=True, slots=True)
class TopK(Sparsifier):
    """The k elements of largest magnitude, exactly. Error feedback is wanted."""

    ratio: float

    def __post_init__(self) -> None:
        _check_ratio("topk", self.ratio)

    @property
    def text(self) -> str:
        """`topk:0.01`."""
        return f"topk:{_number(self.ratio)}"

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return the values that are sent and their positions."""
        values, indices = _outputs(kept(self.ratio, packed.values.size), backend)
        backend.family("sparse").topk_encode(packed.values, values, indices)
        return replace(packed, values=values, indices=indices), state

    def encode_residual(
        self, packed: Packed, residual: Array | None, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, Array, State]:
        """See `Stage.encode_residual`: what is left is the sum, with zeros where it is sent."""
        values, indices = _outputs(kept(self.ratio, packed.values.size), backend)
        residual, left = _left(packed, residual, backend)
        backend.family("sparse").topk_encode_residual(
            packed.values, residual, values, indices, left
        )
        return replace(packed, values=values, indices=indices), left, state

    def sizes(self, count: int) -> Sizes:
        """Exactly k values."""
        return Sizes(np.dtype(np.float32), kept(self.ratio, count))


@dataclass(frozen=True, slots=True)
class TopKSampled(Sparsifier):
    """At most k elements: those that reach a threshold estimated from a sample of the array.

    The selection of Deep Gradient Compression (Lin et al., arXiv 1712.01887): if more than k reach
    it, these are cut to the k largest. The seed says where the strided sample begins. Zeros are
    never sent. Arrays of up to 8,192 elements are their own sample.
    """

    ratio: float

    def __post_init__(self) -> None:
        _check_ratio("topk_sampled", self.ratio)

    @property
    def text(self) -> str:
        """`topk_sampled:0.01`."""
        return f"topk_sampled:{_number(self.ratio)}"

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return the values that are sent and their positions."""
        values, indices = _outputs(kept(self.ratio, packed.values.size), backend)
        start = seed % stride_of(packed.values.size)
        count = backend.family("sparse").sampled_encode(packed.values, start, values, indices)
        return replace(packed, values=values[:count], indices=indices[:count]), state

    def encode_residual(
        self, packed: Packed, residual: Array | None, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, Array, State]:
        """See `Stage.encode_residual`: what is left is the sum, with zeros where it is sent."""
        values, indices = _outputs(kept(self.ratio, packed.values.size), backend)
        residual, left = _left(packed, residual, backend)
        start = seed % stride_of(packed.values.size)
        count = backend.family("sparse").sampled_encode_residual(
            packed.values, residual, start, values, indices, left
        )
        return replace(packed, values=values[:count], indices=indices[:count]), left, state

    def sizes(self, count: int) -> Sizes:
        """At most k values."""
        return Sizes(np.dtype(np.float32), kept(self.ratio, count), at_most=True)


@dataclass(frozen=True, slots=True)
class RandomK(Sparsifier):
    """k elements at positions drawn without replacement; the seed is sent instead of positions.

    What is sent is what a receiver adds, so the scale is the sender's business alone. `encode`
    sends x · n/k: unbiased, E decode(x) = x, and E ‖decode(x)‖² = n/k ‖x‖², which wants a smaller
    learning rate. `encode_residual` sends sums as they are: error feedback makes up for what was
    left out, and a scale would make it diverge (Stich, Cordonnier, Jaggi: Sparsified SGD with
    Memory, NeurIPS 2018).
    """

    biased: ClassVar[bool] = False
    positions_travel: ClassVar[bool] = False
    ratio: float

    def __post_init__(self) -> None:
        _check_ratio("randomk", self.ratio)

    @property
    def text(self) -> str:
        """`randomk:0.01`."""
        return f"randomk:{_number(self.ratio)}"

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return the values that are sent, scaled by n/k, and the seed."""
        n = packed.values.size
        values, indices = self._drawn(n, seed, backend)
        factor = n / values.size if n else 1.0
        backend.family("sparse").gather(packed.values, indices, factor, values)
        return replace(packed, values=values, seed=seed, kept=values.size), state

    def encode_residual(
        self, packed: Packed, residual: Array | None, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, Array, State]:
        """See `Stage.encode_residual`: what is left is the sum, with zeros where it is sent."""
        values, indices = self._drawn(packed.values.size, seed, backend)
        residual, left = _left(packed, residual, backend)
        backend.family("sparse").gather_residual(packed.values, residual, indices, values, left)
        return replace(packed, values=values, seed=seed, kept=values.size), left, state

    def positions(self, packed: Packed, backend: Backend) -> Array:
        """Return the positions that the seed stands for.

        Raises:
            ProtocolError: not as many values as the ratio keeps.
        """
        k = kept(self.ratio, packed.size)
        if packed.values.size != k:
            raise ProtocolError(
                f"{self.text} of {packed.size} elements: {k} values, not {packed.values.size}"
            )
        indices: Array = backend.xp.empty(k, np.uint32)
        backend.family("sparse").draw(packed.size, round_keys(packed.seed), indices)
        return indices

    def sizes(self, count: int) -> Sizes:
        """Exactly k values."""
        return Sizes(np.dtype(np.float32), kept(self.ratio, count))

    def _drawn(self, n: int, seed: int, backend: Backend) -> tuple[Array, Array]:
        values, indices = _outputs(kept(self.ratio, n), backend)
        backend.family("sparse").draw(n, round_keys(seed), indices)
        return values, indices


@dataclass(frozen=True, slots=True)
class Threshold(Sparsifier):
    """The elements with |x| ≥ T, T rounded to float32: any number of them, maybe none."""

    least: float

    def __post_init__(self) -> None:
        if not 0 < self.least <= _FLOAT32_MAX or np.float32(self.least) == 0:
            raise ValueError(
                f"threshold:{self.least}: give a number above 0 that a float32 can hold,"
                " as in threshold:0.001"
            )

    @property
    def text(self) -> str:
        """`threshold:0.001`."""
        return f"threshold:{_number(self.least)}"

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return the values that are sent and their positions."""
        count = backend.family("sparse").reaching(packed.values, self.least)
        return self._sent(packed, packed.values, count, backend), state

    def encode_residual(
        self, packed: Packed, residual: Array | None, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, Array, State]:
        """See `Stage.encode_residual`: what is left is the sum, with zeros where it is sent."""
        kernels = backend.family("sparse")
        residual, left = _left(packed, residual, backend)
        count = kernels.reaching_sum(packed.values, residual, self.least, left)
        sent = self._sent(packed, left, count, backend)
        kernels.clear(sent.indices, left)
        return sent, left, state

    def sizes(self, count: int) -> Sizes:
        """Any number of values."""
        return Sizes(np.dtype(np.float32), count, at_most=True)

    def _sent(self, packed: Packed, dense: Array, count: int, backend: Backend) -> Packed:
        values, indices = _outputs(count, backend)
        backend.family("sparse").reaching_encode(dense, self.least, values, indices)
        return replace(packed, values=values, indices=indices)


def _outputs(k: int, backend: Backend) -> tuple[Array, Array]:
    return backend.xp.empty(k, np.float32), backend.xp.empty(k, np.uint32)


def _left(packed: Packed, residual: Array | None, backend: Backend) -> tuple[Array, Array]:
    """Return the residual, zeros if there is none yet, and room for the next one."""
    if residual is None:
        residual = backend.xp.zeros_like(packed.values)
    return residual, left_over(packed, backend)


def _check_ratio(name: str, ratio: float) -> None:
    if not 0 < ratio <= 1:
        raise ValueError(
            f"{name}:{ratio}: the ratio is the share of elements to keep, above 0 and at most 1,"
            f" as in {name}:0.01"
        )


def _number(value: float) -> str:
    """Return the shortest text that reads as this float."""
    return str(float(value)).removesuffix(".0")
