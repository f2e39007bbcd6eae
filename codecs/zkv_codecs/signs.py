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
from zkv_codecs.blocks import checked, counted
from zkv_codecs.packed import Packed, Sizes, Stage, State, left_over, taken_back

BLOCK = 256
"""Elements that share a scale: 0.125 bits of scale per element."""

MXNET_THRESHOLD = 0.5
THRESHOLD_MIN, THRESHOLD_MAX = 1e-30, 1e30
_BYTES = np.dtype(np.uint8)


# --- the mean of |x|, and the means of both signs ---------------------------------------------


class _Means(Stage):
    """Sign bits, and `means` scales for each block. Kernels are called by the codec's name."""

    kind: ClassVar[str] = "quantize"
    name: ClassVar[str]
    means: ClassVar[int]
    block: int

    def __post_init__(self) -> None:
        checked(self.name, self.block)

    @property
    def text(self) -> str:
        """The name, and the size of a block if it is another one than 256."""
        return self.name if self.block == BLOCK else f"{self.name}:{self.block}"

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return the sign bits and the blocks' scales."""
        bits, scales = self._outputs(packed, backend)
        encode = getattr(backend.family("signs"), f"{self.name}_encode")
        encode(packed.values, self.block, bits, scales)
        return packed.coded(bits, scales), state

    def encode_residual(
        self, packed: Packed, residual: Array | None, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, Array, State]:
        """See `Stage.encode_residual`."""
        if residual is None:
            # −0.0 and not 0.0: it leaves the signs of zeros as they are. It is made of zeros, as
            # CuPy fills with 0.0 whatever equals it.
            residual = -backend.xp.zeros_like(packed.values)
        bits, scales = self._outputs(packed, backend)
        left = left_over(packed, backend)
        encode = getattr(backend.family("signs"), f"{self.name}_encode_residual")
        encode(packed.values, residual, self.block, bits, scales, left)
        return packed.coded(bits, scales), left, state

    def decode(self, packed: Packed, backend: Backend) -> Packed:
        """Return float32 values."""
        values = backend.xp.empty(counted(self, packed, packed.count), np.float32)
        decode = getattr(backend.family("signs"), f"{self.name}_decode")
        decode(packed.values, packed.scales, self.block, values)
        return packed.coded(values, None)

    def add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        """See `Stage.add`."""
        if total.dtype != np.float32:
            Stage.add(self, packed, weight, total, backend)
            return
        counted(self, packed, total.size)
        add = getattr(backend.family("signs"), f"{self.name}_add")
        add(packed.values, packed.scales, self.block, weight, total)

    def sizes(self, count: int) -> Sizes:
        """A byte for eight values, and the scales of each block."""
        return Sizes(_BYTES, -(-count // 8), self.means * -(-count // self.block))

    def _outputs(self, packed: Packed, backend: Backend) -> tuple[Array, Array]:
        sizes = self.sizes(packed.values.size)
        xp = backend.xp
        return xp.empty(sizes.values, sizes.dtype), xp.empty(sizes.scales, np.float32)


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
    means: ClassVar[int] = 1
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
    means: ClassVar[int] = 2
    block: int = BLOCK


# --- signs alone -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Majority(Stage):
    """A vote, 1 or −1, for each element: one bit (signSGD, Bernstein et al., arXiv 1810.05291).

    What is sent is a vote and not a value, zero votes 1, and `majority` turns a sum of votes into
    what is applied. There is no error feedback, as nothing says how much of a gradient was sent.
    """

    kind: ClassVar[str] = "quantize"
    feedback: ClassVar[bool] = False
    votes: ClassVar[bool] = True

    @property
    def text(self) -> str:
        """`majority`."""
        return "majority"

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return the sign bits."""
        bits = backend.xp.empty(self.sizes(packed.values.size).values, _BYTES)
        backend.family("signs").signs_encode(packed.values, bits)
        return packed.coded(bits, None), state

    def decode(self, packed: Packed, backend: Backend) -> Packed:
        """Return votes: −1 or 1, float32."""
        values = backend.xp.empty(counted(self, packed, packed.count), np.float32)
        backend.family("signs").signs_decode(packed.values, values)
        return packed.coded(values, None)

    def add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        """See `Stage.add`."""
        if total.dtype != np.float32:
            Stage.add(self, packed, weight, total, backend)
            return
        counted(self, packed, total.size)
        backend.family("signs").signs_add(packed.values, weight, total)

    def sizes(self, count: int) -> Sizes:
        """A byte for eight values."""
        return Sizes(_BYTES, -(-count // 8))


def majority(votes: Array, backend: Backend) -> Array:
    """Return what most voted for, where `votes` are sums of decoded votes: 1, −1, or 0 for a tie.

    A float32 array of any shape. With equal weights, sums are exact below 2**24 voters.
    """
    decided: Array = backend.xp.empty(votes.shape, np.float32)
    flat = votes.astype(np.float32, order="C", copy=False).reshape(-1)
    backend.family("signs").signs_settle(flat, decided.reshape(-1))
    return decided


# --- MXNet's thresholds ------------------------------------------------------------------------


class _Threshold(Stage):
    """Codes against a threshold, of x plus what is left of earlier encodings: that is the state.

    What has been sent and what is left is what was given, so no other error feedback is wanted.
    """

    kind: ClassVar[str] = "quantize"
    biased: ClassVar[bool] = False
    feedback: ClassVar[bool] = False
    remembers: ClassVar[bool] = True
    name: ClassVar[str]
    each: ClassVar[int]
    """Codes to a byte."""
    threshold: float

    def __post_init__(self) -> None:
        if not THRESHOLD_MIN <= self.threshold <= THRESHOLD_MAX:
            raise ValueError(
                f"{self.name}: threshold {self.threshold}; give one from {THRESHOLD_MIN:g} to"
                f" {THRESHOLD_MAX:g}, about as large as the gradients"
            )

    def owes(self, state: State) -> Array | None:
        """Return the residual."""
        return state[0]

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
                f"{self.name}: {packed.values.size} values and a residual of {before.size};"
                f" {self.name} takes whole arrays, so put no other stage before it"
            )
        codes = backend.xp.empty(self.sizes(packed.values.size).values, _BYTES)
        left = backend.xp.empty_like(packed.values)
        encode = getattr(backend.family("signs"), f"{self.name}_encode")
        encode(packed.values, before, self.threshold, codes, left)
        return packed.coded(codes, None), (left,)

    def restore(self, now: State, old: State, new: State) -> State:
        """Return what would be left without the step from `old` to `new`, to rounding."""
        return (taken_back(now[0], old[0], new[0]),)

    def sizes(self, count: int) -> Sizes:
        """A byte for as many values as share one."""
        return Sizes(_BYTES, -(-count // self.each))


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

    def decode(self, packed: Packed, backend: Backend) -> Packed:
        """Return 1 or −1, float32."""
        values = backend.xp.empty(counted(self, packed, packed.count), np.float32)
        backend.family("signs").mx1bit_decode(packed.values, values)
        return packed.coded(values, None)

    def add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        """See `Stage.add`."""
        if total.dtype != np.float32:
            Stage.add(self, packed, weight, total, backend)
            return
        counted(self, packed, total.size)
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

    def decode(self, packed: Packed, backend: Backend) -> Packed:
        """Return T, −T or 0, float32."""
        values = backend.xp.empty(counted(self, packed, packed.count), np.float32)
        backend.family("signs").mx2bit_decode(packed.values, self.threshold, values)
        return packed.coded(values, None)

    def add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        """See `Stage.add`."""
        if total.dtype != np.float32:
            Stage.add(self, packed, weight, total, backend)
            return
        counted(self, packed, total.size)
        backend.family("signs").mx2bit_add(packed.values, self.threshold, weight, total)


# --- what they share ---------------------------------------------------------------------------


def _number(value: float) -> str:
    """Return the shortest text that reads as the same number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
