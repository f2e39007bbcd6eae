"""Codes that are rounded by chance, so that their mean is what was given: `qsgd:S`, `natural` and
`ternary`.

The seed of `encode` decides: the same seed gives the same codes on every machine, and another one
must be given for each encoding, or errors of elements that do not change never average out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.backend import Backend
from zkv_codecs.coded import Blocked, Coded
from zkv_codecs.kernels.numpy_random import folded
from zkv_codecs.packed import Packed, State

QSGD_BLOCK = 512
TERNARY_BLOCK = 256
LEVELS_MAX = 127


@dataclass(frozen=True, slots=True)
class Qsgd(Blocked):
    """8-bit codes from −levels to levels, in units of a block's length / levels.

    q = x · levels / ‖block‖₂, rounded down or up so that its mean is exact; decoded as
    q · ‖block‖₂ / levels: 8 + 32 / block bits per element (Alistarh et al., QSGD, arXiv 1610.02132;
    there coded by Elias, with the same chances). |x − decode(x)| < ‖block‖₂ / levels, to rounding.
    Unbiased, to 2**-23 of x. Blocks whose largest magnitude is below 1.5e-36 are sent as zeros.

    Raises:
        ValueError: levels outside 1 … 127, or a block that is no power of two from 64 to 4096.
    """

    name: ClassVar[str] = "qsgd"
    biased: ClassVar[bool] = False
    families: ClassVar[tuple[str, ...]] = ("random", "ints")
    dtype: ClassVar[np.dtype] = np.dtype(np.int8)
    levels: int
    block: int = QSGD_BLOCK

    def __post_init__(self) -> None:
        if type(self.levels) is not int or not 1 <= self.levels <= LEVELS_MAX:
            raise ValueError(f"qsgd: {self.levels!r} levels; give 1 to {LEVELS_MAX}")
        Blocked.__post_init__(self)

    @property
    def text(self) -> str:
        """`qsgd:127`, or `qsgd:127:1024` with another block than 512."""
        text = f"qsgd:{self.levels}"
        return text if self.block == QSGD_BLOCK else f"{text}:{self.block}"

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return the codes and their scales."""
        codes, scales = self._outputs(packed, backend)
        backend.family("random").qsgd_encode(
            packed.values, self.levels, self.block, folded(seed), codes, scales
        )
        return self._sent(packed, codes, scales), state

    def _decode(self, packed: Packed, out: Array, backend: Backend) -> None:
        backend.family("ints").int8_decode(packed.values, packed.scales, self.block, out)

    def _add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        backend.family("ints").int8_add(packed.values, packed.scales, self.block, weight, total)


@dataclass(frozen=True, slots=True)
class Natural(Coded):
    """Sign and exponent: one of the two powers of two around x, by chance, in 8 bits.

    The mean is exact for 0 and for |x| from 2**-108 to 2**18; what is larger becomes 2**18, what is
    smaller 2**-108 or 0. The mean of decode(x)² is 9/8 x² at most (Horváth et al., "Natural
    compression", arXiv 1905.10988). A code is sign · 128 + exponent − 18, with float32's biased
    exponent; 0 is zero.
    """

    name: ClassVar[str] = "natural"
    biased: ClassVar[bool] = False
    families: ClassVar[tuple[str, ...]] = ("random",)

    @property
    def text(self) -> str:
        """`natural`."""
        return self.name

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return the codes."""
        codes, _ = self._outputs(packed, backend)
        backend.family("random").natural_encode(packed.values, folded(seed), codes)
        return self._sent(packed, codes), state

    def _decode(self, packed: Packed, out: Array, backend: Backend) -> None:
        backend.family("random").natural_decode(packed.values, out)

    def _add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        backend.family("random").natural_add(packed.values, weight, total)


@dataclass(frozen=True, slots=True)
class Ternary(Blocked):
    """−1, 0 or 1 times the largest magnitude s of a block: 2 + 32 / block bits per element.

    x becomes sign(x) · s with probability |x| / s, else 0, so its mean is exact to s / 2**24 (Wen
    et al., TernGrad, arXiv 1705.07878; there with whole tensors as blocks). Codes are 0, 1, and 3
    for −1, four to a byte, the first in its lowest bits. Blocks whose largest magnitude is below
    1.5e-36 are sent as zeros.

    Raises:
        ValueError: a block that is no power of two from 64 to 4096.
    """

    name: ClassVar[str] = "ternary"
    biased: ClassVar[bool] = False
    families: ClassVar[tuple[str, ...]] = ("random",)
    each: ClassVar[int] = 4
    block: int = TERNARY_BLOCK

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return the codes and their scales."""
        codes, scales = self._outputs(packed, backend)
        backend.family("random").ternary_encode(
            packed.values, self.block, folded(seed), codes, scales
        )
        return self._sent(packed, codes, scales), state

    def _decode(self, packed: Packed, out: Array, backend: Backend) -> None:
        backend.family("random").ternary_decode(packed.values, packed.scales, self.block, out)

    def _add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        backend.family("random").ternary_add(
            packed.values, packed.scales, self.block, weight, total
        )
