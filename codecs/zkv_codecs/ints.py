"""Integer codes with scales for each block: `int8`, `int4`, `uint8`.

`int8` and `int4` know one scale, absmax / 127 or absmax / 7 of a block of neighbouring elements:
q = round-to-nearest-even(x · 127 / absmax), decoded as q · scale. `uint8` spreads its 256 levels
over the range that the block's values take, which for one-sided values halves the error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from zkv_codecs.quantizers import BlockQuantizer


@dataclass(frozen=True, slots=True)
class Int8(BlockQuantizer):
    """8-bit codes, `block` elements to a scale: 8 + 32 / block bits per element.

    |x − decode(x)| ≤ absmax / 254 in each block, to rounding; a block whose absmax is below 1.5e-36
    is sent as zeros.
    """

    name: ClassVar[str] = "int8"
    family: ClassVar[str] = "ints"
    dtype: ClassVar[np.dtype] = np.dtype(np.int8)


@dataclass(frozen=True, slots=True)
class Int4(BlockQuantizer):
    """4-bit codes, two to a byte, `block` (even) elements to a scale: 4 + 32 / block bits each.

    Code + 8 in the low nibble of a byte for the first of two elements, in the high one for the
    second. |x − decode(x)| ≤ absmax / 14 in each block, to rounding; a block whose absmax is below
    1.5e-36 is sent as zeros.
    """

    name: ClassVar[str] = "int4"
    family: ClassVar[str] = "ints"
    dtype: ClassVar[np.dtype] = np.dtype(np.uint8)
    values_per_code: ClassVar[int] = 2


@dataclass(frozen=True, slots=True)
class UInt8(BlockQuantizer):
    """8-bit codes over the range of each block, with a step and an offset: 8 + 64 / block bits.

    The levels are whole multiples of step = (max − min) / 255, so 0 stays 0.
    |x − decode(x)| ≤ step / 2, to rounding; if all of a block's elements are nearly equal, the step
    is absmax · 2**-21, and never below 1.2e-38. Where a level would lie beyond the largest float32,
    the step is up to 1/255 smaller, and the error up to a whole step.
    """

    name: ClassVar[str] = "uint8"
    family: ClassVar[str] = "ints"
    dtype: ClassVar[np.dtype] = np.dtype(np.uint8)
    scales_per_block: ClassVar[int] = 2
