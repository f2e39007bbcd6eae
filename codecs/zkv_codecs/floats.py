"""Narrow floats: `fp16`, `bf16`, `sfp16`, `fp8_e4m3`, `fp8_e5m2`; all round to nearest even."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.backend import Backend
from zkv_codecs.packed import Packed, Sizes, Stage, State
from zkv_codecs.quantizers import BlockQuantizer


class _Half(Stage):
    """A 16-bit float for each value, and nothing else."""

    kind: ClassVar[str] = "quantize"
    biased: ClassVar[bool] = False
    name: ClassVar[str]
    exponent: ClassVar[np.uint16]

    @property
    def text(self) -> str:
        """The format's name."""
        return self.name

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return the bits of the narrowed values, uint16."""
        codes = backend.xp.empty(packed.values.size, np.uint16)
        self._kernel("encode", backend)(packed.values, codes)
        return packed.coded(codes, None), state

    def decode(self, packed: Packed, backend: Backend) -> Packed:
        """Return float32 values."""
        values = backend.xp.empty(packed.values.size, np.float32)
        self._kernel("decode", backend)(packed.values, values)
        return packed.coded(values, None)

    def add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        """See `Stage.add`.

        Raises:
            ValueError: `total` has not as many elements.
        """
        if total.dtype != np.float32:
            Stage.add(self, packed, weight, total, backend)
            return
        if packed.values.size != total.size:
            raise ValueError(f"{self.name}: {packed.values.size} values to add to {total.size}")
        self._kernel("add", backend)(packed.values, weight, total)

    def finite(self, codes: Array) -> bool:
        """See `Stage.finite`: the exponent's bits are not all set."""
        return not ((codes & self.exponent) == self.exponent).any()

    def sizes(self, count: int) -> Sizes:
        """Two bytes per value."""
        return Sizes(np.dtype(np.uint16), count)

    def _kernel(self, job: str, backend: Backend) -> Any:
        return getattr(backend.family("floats"), f"{self.name}_{job}")


@dataclass(frozen=True, slots=True)
class Fp16(_Half):
    """IEEE binary16, clipped to ±65504: 16 bits per element.

    |x − decode(x)| ≤ 2**-11 · |x| from 6.1e-5 on, and 2**-25 below. Where gradients are that small,
    `sfp16` or `bf16` serves better.
    """

    name: ClassVar[str] = "fp16"
    exponent: ClassVar[np.uint16] = np.uint16(0x7C00)


@dataclass(frozen=True, slots=True)
class Bf16(_Half):
    """bfloat16, the upper half of a float32: 16 bits per element.

    |x − decode(x)| ≤ 2**-8 · |x| for all normal float32; what exceeds 3.3961e38 becomes infinite.
    """

    name: ClassVar[str] = "bf16"
    exponent: ClassVar[np.uint16] = np.uint16(0x7F80)


@dataclass(frozen=True, slots=True)
class ScaledFp16(BlockQuantizer):
    """binary16 of (x − mean) / deviation of a block: 16 + 64 / block bits per element.

    Nothing overflows, as no value is further than √block deviations from the mean, and nothing
    underflows: |x − decode(x)| ≤ 2**-11 · |x − mean| + 2**-25 · deviation, to rounding. A block
    whose absmax is below 1.5e-36 is sent as zeros, one with absmax above 3.38e38 smaller by 1/256.
    The mean and the deviation are float32 sums, which is why `block` is 2**20 at most.
    """

    biased: ClassVar[bool] = False
    name: ClassVar[str] = "sfp16"
    family: ClassVar[str] = "floats"
    dtype: ClassVar[np.dtype] = np.dtype(np.uint16)
    scales_per_block: ClassVar[int] = 2
    block_default: ClassVar[int] = 1024
    block_max: ClassVar[int] = 2**20

    block: int = 1024

    def encode_residual(
        self, packed: Packed, residual: Array | None, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, Array, State]:
        """See `Stage.encode_residual`; so little is left over that it has no kernel of its own."""
        return Stage.encode_residual(self, packed, residual, state, seed, backend)

    def finite(self, codes: Array) -> bool:
        """See `Stage.finite`."""
        return not ((codes & Fp16.exponent) == Fp16.exponent).any()


@dataclass(frozen=True, slots=True)
class Fp8E4M3(BlockQuantizer):
    """8-bit floats with 3 bits of mantissa, scaled to ±448: 8 + 32 / block bits per element.

    |x − decode(x)| ≤ 2**-4 · |x| from absmax / 28672 on, and absmax / 458752 below, to rounding; a
    block whose absmax is below 5.3e-36 is sent as zeros.
    """

    name: ClassVar[str] = "fp8_e4m3"
    family: ClassVar[str] = "fp8"
    dtype: ClassVar[np.dtype] = np.dtype(np.uint8)

    def finite(self, codes: Array) -> bool:
        """See `Stage.finite`: all bits set is NaN, and there is no infinity."""
        return not ((codes & np.uint8(0x7F)) == np.uint8(0x7F)).any()


@dataclass(frozen=True, slots=True)
class Fp8E5M2(BlockQuantizer):
    """8-bit floats with 2 bits of mantissa, scaled to ±57344: 8 + 32 / block bits per element.

    |x − decode(x)| ≤ 2**-3 · |x| from absmax / 9.4e8 on, and absmax / 7.5e9 below, to rounding; a
    block whose absmax is below 6.8e-34 is sent as zeros.
    """

    name: ClassVar[str] = "fp8_e5m2"
    family: ClassVar[str] = "fp8"
    dtype: ClassVar[np.dtype] = np.dtype(np.uint8)

    def finite(self, codes: Array) -> bool:
        """See `Stage.finite`: the exponent's bits are not all set."""
        return not ((codes & np.uint8(0x7C)) == np.uint8(0x7C)).any()
