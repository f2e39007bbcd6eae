"""One or two bits per element: `onebit`, `twomeans`, `majority`, `mx1bit` and `mx2bit:T`.

Signs are NumPy's `signbit`, so −0.0 is negative. A sign bit is 1 for a negative element; the first
of eight elements is bit 0 of a byte, as `numpy.packbits(..., bitorder="little")` has it. Bits after
the last element are written as 0 and ignored when read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.backend import Backend
from zkv_codecs.coded import Blocked, Coded
from zkv_codecs.packed import Packed, State

BLOCK = 256
"""Elements that share a scale: 0.125 bits of scale per element."""

MXNET_THRESHOLD = 0.5
THRESHOLD_MIN, THRESHOLD_MAX = 1e-30, 1e30


# --- the mean of |x|, and the means of both signs ----------------------------------------------


class _Means(Blocked):
    """Sign bits, and means for each block. Kernels are called by the codec's name."""

    families: ClassVar[tuple[str, ...]] = ("signs",)
    each: ClassVar[int] = 8

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return the sign bits and the blocks' means."""
        bits, scales = self._outputs(packed, backend)
        encode = getattr(backend.family("signs"), f"{self.name}_encode")
        encode(packed.values, self.block, bits, scales)
        return self._sent(packed, bits, scales), state

    def encode_residual(
        self, packed: Packed, residual: Array | None, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, Array, State]:
        """See `Stage.encode_residual`."""
        if residual is None:
            # −0.0 and not 0.0: it leaves the signs of zeros as they are.
            residual = backend.xp.full_like(packed.values, -0.0)
        bits, scales = self._outputs(packed, backend)
        left = backend.xp.empty_like(packed.values)
        encode = getattr(backend.family("signs"), f"{self.name}_encode_residual")
        encode(packed.values, residual, self.block, bits, scales, left)
        return self._sent(packed, bits, scales), left, state

    def _decode(self, packed: Packed, out: Array, backend: Backend) -> None:
        decode = getattr(backend.family("signs"), f"{self.name}_decode")
        decode(packed.values, packed.scales, self.block, out)

    def _add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        add = getattr(backend.family("signs"), f"{self.name}_add")
        add(packed.values, packed.scales, self.block, weight, total)


@dataclass(frozen=True, slots=True)
class OneBit(_Means):
    """Signs, and the mean |x| of each block: 1 + 32 / block bits per element.

    Decoded as ± the mean (Karimireddy et al., "Error feedback fixes SignSGD", arXiv 1901.09847).
    ‖x − decode(x)‖² = ‖x‖² − ‖x‖₁² / n in each block of n elements: much is lost, so it needs error
    feedback. Blocks whose mean is below 1.5e-36 are sent as zeros.

    Raises:
        ValueError: a block that is no power of two from 64 to 4096.
    """

    name: ClassVar[str] = "onebit"
    block: int = BLOCK


@dataclass(frozen=True, slots=True)
class TwoMeans(_Means):
    """Signs, the mean of a block's negatives, and of its rest: 1 + 64 / block bits per element.

    Decoded as one mean or the other (Seide et al., "1-bit stochastic gradient descent", Interspeech
    2014; there with columns as blocks). ‖x − decode(x)‖² = ‖x‖² − n₁m₁² − n₂m₂² in each block, with
    the counts n and means m of both: less is lost than with `onebit`, but it needs error feedback.
    Means below 1.5e-36 in magnitude are sent as zeros.

    Raises:
        ValueError: a block that is no power of two from 64 to 4096.
    """

    name: ClassVar[str] = "twomeans"
    scales: ClassVar[int] = 2
    block: int = BLOCK


# --- signs alone -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Majority(Coded):
    """A vote, 1 or −1, for each element: one bit (signSGD, Bernstein et al., arXiv 1810.05291).

    What is sent is a vote and not a value, zero votes 1, and `majority` turns a sum of votes into
    what is applied. There is no error feedback, as nothing says how much of a gradient was sent.
    """

    name: ClassVar[str] = "majority"
    feedback: ClassVar[bool] = False
    families: ClassVar[tuple[str, ...]] = ("signs",)
    each: ClassVar[int] = 8

    @property
    def text(self) -> str:
        """`majority`."""
        return self.name

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return the sign bits."""
        bits, _ = self._outputs(packed, backend)
        backend.family("signs").signs_encode(packed.values, bits)
        return self._sent(packed, bits), state

    def _decode(self, packed: Packed, out: Array, backend: Backend) -> None:
        backend.family("signs").signs_decode(packed.values, out)

    def _add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        backend.family("signs").signs_add(packed.values, weight, total)


def majority(votes: Array, backend: Backend) -> Array:
    """Return what most voted for, where `votes` are sums of decoded votes: 1, −1, or 0 for a tie.

    A float32 array of the shape of `votes`. Voters of equal weight are counted exactly, up to 2**24
    of them in float32.
    """
    decided: Array = backend.xp.empty(votes.shape, np.float32)
    flat = votes.astype(np.float32, order="C", copy=False).reshape(-1)
    backend.family("signs").signs_settle(flat, decided.reshape(-1))
    return decided


# --- MXNet's thresholds ------------------------------------------------------------------------


class _Threshold(Coded):
    """Codes against a threshold, of x plus what is left of earlier encodings: that is the state.

    What has been sent and what is left are what was given, so no other error feedback is wanted.
    """

    biased: ClassVar[bool] = False
    feedback: ClassVar[bool] = False
    remembers: ClassVar[bool] = True
    families: ClassVar[tuple[str, ...]] = ("signs",)
    threshold: float

    def __post_init__(self) -> None:
        if not THRESHOLD_MIN <= self.threshold <= THRESHOLD_MAX:
            raise ValueError(
                f"{self.name}: threshold {self.threshold}; give one from {THRESHOLD_MIN:g} to"
                f" {THRESHOLD_MAX:g}, about as large as the gradients"
            )

    def start(self, shape: Sequence[int]) -> State:
        """Return what is left at first: zeros, flat."""
        return (np.zeros(math.prod(shape), np.float32),)

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return the codes, and what is left now.

        Raises:
            ValueError: the state is of another count of values, as behind a sparsifier.
        """
        before = backend.xp.asarray(state[0])
        if before.size != packed.values.size:
            raise ValueError(
                f"{self.text}: {packed.values.size} values and a residual of {before.size}; it"
                " takes whole arrays, so put no other stage before it"
            )
        codes, _ = self._outputs(packed, backend)
        left = backend.xp.empty_like(packed.values)
        encode = getattr(backend.family("signs"), f"{self.name}_encode")
        encode(packed.values, before, self.threshold, codes, left)
        return self._sent(packed, codes), (left,)

    def restore(self, now: State, old: State, new: State) -> State:
        """Return what would be left without the step from `old` to `new`.

        `old` itself where that was the last step, else to rounding.
        """
        return old if now[0] is new[0] else (now[0] + (old[0] - new[0]),)


@dataclass(frozen=True, slots=True)
class MxOneBit(_Threshold):
    """MXNet's `1bit`: 1 above the threshold, else −1; one bit per element.

    For t = x + residual: t > threshold is sent as bit 1 and t − 1 is left, all else as bit 0 and
    t + 1 is left. The first of eight elements is bit 7 of a byte. MXNet fills its bytes up to whole
    float32 words with zeros, which are not sent here. The layout and the rule are those of
    `src/kvstore/gradient_compression-inl.h` (apache/mxnet).

    Raises:
        ValueError: a threshold outside [1e-30, 1e30].
    """

    name: ClassVar[str] = "mx1bit"
    each: ClassVar[int] = 8
    threshold: float = MXNET_THRESHOLD

    @property
    def text(self) -> str:
        """`mx1bit`, or `mx1bit:0.1` with another threshold than MXNet's 0.5."""
        if self.threshold == MXNET_THRESHOLD:
            return self.name
        return f"{self.name}:{_number(self.threshold)}"

    def _decode(self, packed: Packed, out: Array, backend: Backend) -> None:
        backend.family("signs").mx1bit_decode(packed.values, out)

    def _add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        backend.family("signs").mx1bit_add(packed.values, weight, total)


@dataclass(frozen=True, slots=True)
class MxTwoBit(_Threshold):
    """MXNet's `2bit` with threshold T: T, −T or 0; two bits per element.

    For t = x + residual: t ≥ T is sent as code 3 and t − T is left, t ≤ −T as code 2 and t + T is
    left, all else as code 0 and t is left. The first of four elements is in the two highest bits of
    a byte. An element moves by T at most in one step, so a T far below the gradients sends them
    late. MXNet fills its bytes up to whole float32 words, which are not sent here. Source as for
    `MxOneBit`.

    Raises:
        ValueError: a threshold outside [1e-30, 1e30].
    """

    name: ClassVar[str] = "mx2bit"
    each: ClassVar[int] = 4
    threshold: float

    @property
    def text(self) -> str:
        """`mx2bit:0.5` for MXNet's own threshold."""
        return f"{self.name}:{_number(self.threshold)}"

    def _decode(self, packed: Packed, out: Array, backend: Backend) -> None:
        backend.family("signs").mx2bit_decode(packed.values, self.threshold, out)

    def _add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        backend.family("signs").mx2bit_add(packed.values, self.threshold, weight, total)


def _number(value: float) -> str:
    """Return the shortest text that reads as the same number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))
