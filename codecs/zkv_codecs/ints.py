"""Integer codes with a scale per block: `int8`.

q = round-to-nearest-even(x · 127 / absmax), decoded as q · absmax / 127; absmax is the largest
magnitude of a block of neighbouring elements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.backend import Backend
from zkv_codecs.packed import Packed, Sizes, Stage, State

BLOCK = 256
"""Elements that share a scale: 0.125 bits of scale per element."""


@dataclass(frozen=True, slots=True)
class Int8(Stage):
    """8-bit codes, `block` elements to a scale: 8 + 32 / block bits per element.

    |x − decode(x)| ≤ absmax / 254 in each block, to rounding.
    """

    kind: ClassVar[str] = "quantize"
    block: int = BLOCK

    @property
    def text(self) -> str:
        """`int8`, or `int8:1024` with another block."""
        return "int8" if self.block == BLOCK else f"int8:{self.block}"

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return the codes and their scales."""
        codes, scales = self._outputs(packed, backend)
        backend.family("ints").int8_encode(packed.values, self.block, codes, scales)
        return self._sent(packed, codes, scales), state

    def encode_residual(
        self, packed: Packed, residual: Array | None, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, Array, State]:
        """See `Stage.encode_residual`."""
        if residual is None:
            residual = backend.xp.zeros_like(packed.values)
        codes, scales = self._outputs(packed, backend)
        left = backend.xp.empty_like(packed.values)
        backend.family("ints").int8_encode_residual(
            packed.values, residual, self.block, codes, scales, left
        )
        return self._sent(packed, codes, scales), left, state

    def decode(self, packed: Packed, backend: Backend) -> Packed:
        """Return float32 values."""
        values = backend.xp.empty(packed.values.size, np.float32)
        backend.family("ints").int8_decode(packed.values, packed.scales, self.block, values)
        return replace(packed, values=values, scales=None)

    def add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        """See `Stage.add`."""
        if total.dtype != np.float32:
            Stage.add(self, packed, weight, total, backend)
            return
        backend.family("ints").int8_add(packed.values, packed.scales, self.block, weight, total)

    def sizes(self, count: int) -> Sizes:
        """One byte per value, a scale per block."""
        return Sizes(np.dtype(np.int8), count, -(-count // self.block))

    def _outputs(self, packed: Packed, backend: Backend) -> tuple[Array, Array]:
        sizes = self.sizes(packed.values.size)
        xp = backend.xp
        return xp.empty(sizes.values, sizes.dtype), xp.empty(sizes.scales, np.float32)

    def _sent(self, packed: Packed, codes: Array, scales: Array) -> Packed:
        return replace(packed, values=codes, scales=scales)
