"""Codes that are rounded by chance, so that their mean is what was given: `qsgd:S`, `natural` and
`ternary`.

The seed of `encode` decides: the same seed gives the same codes on every machine, and another one
must be given for each encoding, or errors of elements that do not change never average out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.backend import Backend
from zkv_codecs.blocks import checked, counted
from zkv_codecs.kernels.numpy_random import folded
from zkv_codecs.packed import Packed, Sizes, Stage, State, left_over

QSGD_BLOCK = 512
TERNARY_BLOCK = 256
LEVELS_MAX = 127


@dataclass(frozen=True, slots=True)
class Qsgd(Stage):
    """8-bit codes from −levels to levels, in units of a block's length / levels.

    q = x · levels / ‖block‖₂, rounded down or up so that its mean is exact; decoded as
    q · ‖block‖₂ / levels: 8 + 32 / block bits per element (Alistarh et al., QSGD, arXiv 1610.02132;
    there coded by Elias, with the same chances). |x − decode(x)| < ‖block‖₂ / levels, to rounding.
    Unbiased, to 2**-23 of that. Blocks whose largest magnitude is below 1.5e-36 are sent as zeros.

    Raises:
        ValueError: levels outside 1 … 127, or a block that is no power of two from 64 to 4096.
    """

    kind: ClassVar[str] = "quantize"
    biased: ClassVar[bool] = False
    levels: int
    block: int = QSGD_BLOCK

    def __post_init__(self) -> None:
        if type(self.levels) is not int or not 1 <= self.levels <= LEVELS_MAX:
            raise ValueError(f"qsgd: {self.levels!r} levels; give 1 to {LEVELS_MAX}")
        checked("qsgd", self.block)

    @property
    def grows(self) -> str:
        """See `Stage.grows`: the error's square is up to √block / levels times that of a block."""
        if self.levels**2 >= self.block:
            return ""
        least = math.isqrt(self.block - 1) + 1
        return (
            f"{self.levels} levels err by more than what blocks of {self.block} hold; give at "
            f"least {least}, or leave +ef away"
        )

    @property
    def text(self) -> str:
        """`qsgd:127`, or `qsgd:127:1024` with another block than 512."""
        text = f"qsgd:{self.levels}"
        return text if self.block == QSGD_BLOCK else f"{text}:{self.block}"

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return the codes and their scales."""
        xp, sizes = backend.xp, self.sizes(packed.values.size)
        codes, scales = xp.empty(sizes.values, sizes.dtype), xp.empty(sizes.scales, np.float32)
        backend.family("random").qsgd_encode(
            packed.values, self.levels, self.block, folded(seed), codes, scales
        )
        return packed.coded(codes, scales), state

    def decode(self, packed: Packed, backend: Backend) -> Packed:
        """Return float32 values."""
        values = backend.xp.empty(counted(self, packed, packed.values.size), np.float32)
        backend.family("ints").int8_decode(packed.values, packed.scales, self.block, values)
        return packed.coded(values, None)

    def add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        """See `Stage.add`."""
        if total.dtype != np.float32:
            Stage.add(self, packed, weight, total, backend)
            return
        counted(self, packed, total.size)
        backend.family("ints").int8_add(packed.values, packed.scales, self.block, weight, total)

    def sizes(self, count: int) -> Sizes:
        """One byte per value, a scale per block."""
        return Sizes(np.dtype(np.int8), count, -(-count // self.block))


@dataclass(frozen=True, slots=True)
class Natural(Stage):
    """Sign and exponent: one of the two powers of two around x, by chance, in 8 bits.

    The mean is exact for |x| from 2**-108 to 2**18 and for 0; what is larger becomes 2**18, and
    what is smaller 2**-108 or 0. The mean of decode(x)² is 9/8 x² at most (Horváth et al., "Natural
    compression", arXiv 1905.10988). A code is sign · 128 + exponent − 18, with float32's biased
    exponent; 0 is zero.
    """

    kind: ClassVar[str] = "quantize"
    biased: ClassVar[bool] = False

    @property
    def text(self) -> str:
        """`natural`."""
        return "natural"

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return the codes."""
        codes = backend.xp.empty(packed.values.size, np.uint8)
        backend.family("random").natural_encode(packed.values, folded(seed), codes)
        return packed.coded(codes, None), state

    def decode(self, packed: Packed, backend: Backend) -> Packed:
        """Return float32 values."""
        values = backend.xp.empty(counted(self, packed, packed.values.size), np.float32)
        backend.family("random").natural_decode(packed.values, values)
        return packed.coded(values, None)

    def add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        """See `Stage.add`."""
        if total.dtype != np.float32:
            Stage.add(self, packed, weight, total, backend)
            return
        counted(self, packed, total.size)
        backend.family("random").natural_add(packed.values, weight, total)

    def sizes(self, count: int) -> Sizes:
        """One byte per value."""
        return Sizes(np.dtype(np.uint8), count)


@dataclass(frozen=True, slots=True)
class Ternary(Stage):
    """−1, 0 or 1 times the largest magnitude s of a block: 2 + 32 / block bits per element.

    x becomes sign(x) · s with probability |x| / s, else 0, so its mean is exact to s / 2**24 (Wen
    et al., TernGrad, arXiv 1705.07878; there with whole tensors as blocks). Codes are 0, 1, and 3
    for −1, four to a byte, the first in its lowest bits. Blocks whose largest magnitude is below
    1.5e-36 are sent as zeros.

    That is `encode`. With a residual x becomes what is nearest of s, −s and 0 instead. What chance
    cuts off is less than s, and s is the largest of gradient and residual together, so a residual
    could grow with each step, by a gradient's largest element. What is cut off here is s / 2 at
    most: no element of a residual exceeds the largest that any gradient had. And
    ‖x − decode(x)‖² ≤ ‖x‖² − s² ≤ (1 − 1/n) ‖x‖² in each block of n elements: a contraction, which
    is all that error feedback needs (Karimireddy et al., arXiv 1901.09847).

    Raises:
        ValueError: a block that is no power of two from 64 to 4096.
    """

    kind: ClassVar[str] = "quantize"
    biased: ClassVar[bool] = False
    block: int = TERNARY_BLOCK

    def __post_init__(self) -> None:
        checked("ternary", self.block)

    @property
    def text(self) -> str:
        """`ternary`, or `ternary:64` with another block than 256."""
        return "ternary" if self.block == TERNARY_BLOCK else f"ternary:{self.block}"

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return the codes and their scales."""
        codes, scales = self._outputs(packed, backend)
        backend.family("random").ternary_encode(
            packed.values, self.block, folded(seed), codes, scales
        )
        return packed.coded(codes, scales), state

    def encode_residual(
        self, packed: Packed, residual: Array | None, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, Array, State]:
        """See `Stage.encode_residual`; the seed decides nothing here."""
        if residual is None:
            residual = backend.xp.zeros_like(packed.values)
        codes, scales = self._outputs(packed, backend)
        left = left_over(packed, backend)
        backend.family("random").ternary_encode_residual(
            packed.values, residual, self.block, codes, scales, left
        )
        return packed.coded(codes, scales), left, state

    def decode(self, packed: Packed, backend: Backend) -> Packed:
        """Return float32 values."""
        values = backend.xp.empty(counted(self, packed, packed.count), np.float32)
        backend.family("random").ternary_decode(packed.values, packed.scales, self.block, values)
        return packed.coded(values, None)

    def add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        """See `Stage.add`."""
        if total.dtype != np.float32:
            Stage.add(self, packed, weight, total, backend)
            return
        counted(self, packed, total.size)
        backend.family("random").ternary_add(
            packed.values, packed.scales, self.block, weight, total
        )

    def sizes(self, count: int) -> Sizes:
        """A byte for four values, a scale per block."""
        return Sizes(np.dtype(np.uint8), -(-count // 4), -(-count // self.block))

    def _outputs(self, packed: Packed, backend: Backend) -> tuple[Array, Array]:
        xp, sizes = backend.xp, self.sizes(packed.values.size)
        return xp.empty(sizes.values, sizes.dtype), xp.empty(sizes.scales, np.float32)
