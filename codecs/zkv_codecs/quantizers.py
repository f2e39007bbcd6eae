"""What quantizers with a scale for each block share: everything but their kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.backend import Backend
from zkv_codecs.packed import ELEMENTS_MAX, Packed, Sizes, Stage, State, left_over

BLOCK = 256
"""Elements that share a scale: 0.125 bits of scale per element."""


@dataclass(frozen=True, slots=True)
class BlockQuantizer(Stage):
    """Codes of equal width, with float32 scales for each `block` neighbouring elements.

    A subclass names its kernels: NAME_encode, NAME_encode_residual, NAME_decode and NAME_add of
    one family, where NAME is also its spec text. `ValueError` where `block` is out of range.
    """

    kind: ClassVar[str] = "quantize"
    name: ClassVar[str]
    family: ClassVar[str]
    dtype: ClassVar[np.dtype]
    """Of the codes."""
    values_per_code: ClassVar[int] = 1
    scales_per_block: ClassVar[int] = 1
    block_default: ClassVar[int] = BLOCK
    block_max: ClassVar[int] = ELEMENTS_MAX

    block: int = BLOCK

    def __post_init__(self) -> None:
        least = self.values_per_code
        most = self.block_max // least * least
        if type(self.block) is not int or not least <= self.block <= most or self.block % least:
            multiple = f" and a multiple of {least}" if least > 1 else ""
            raise ValueError(
                f"{self.name}: a block of {self.block!r} elements; it must be an integer from "
                f"{least} to {most}{multiple}"
            )

    @property
    def text(self) -> str:
        """For example `int8`, or `int8:1024` with another block than the usual one."""
        return self.name if self.block == self.block_default else f"{self.name}:{self.block}"

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return the codes and their scales."""
        codes, scales = self._outputs(packed, backend)
        self._kernel("encode", backend)(packed.values, self.block, codes, scales)
        return packed.coded(codes, scales), state

    def encode_residual(
        self, packed: Packed, residual: Array | None, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, Array, State]:
        """See `Stage.encode_residual`."""
        if residual is None:
            residual = backend.xp.zeros_like(packed.values)
        codes, scales = self._outputs(packed, backend)
        left = left_over(packed, backend)
        self._kernel("encode_residual", backend)(
            packed.values, residual, self.block, codes, scales, left
        )
        return packed.coded(codes, scales), left, state

    def decode(self, packed: Packed, backend: Backend) -> Packed:
        """Return float32 values.

        Raises:
            ValueError: other numbers of codes or scales than `sizes` says.
        """
        count = self._count(packed)
        values = backend.xp.empty(count, np.float32)
        self._kernel("decode", backend)(packed.values, packed.scales, self.block, values)
        return packed.coded(values, None)

    def add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        """See `Stage.add`.

        Raises:
            ValueError: other numbers of codes or scales than `sizes` says for `total`.
        """
        if total.dtype != np.float32:
            Stage.add(self, packed, weight, total, backend)
            return
        count = self._count(packed)
        if count != total.size:
            raise ValueError(f"{self.name}: {count} values to add to {total.size}")
        self._kernel("add", backend)(packed.values, packed.scales, self.block, weight, total)

    def sizes(self, count: int) -> Sizes:
        """Codes of `dtype` for `count` values, and the scales of the blocks they make."""
        codes, blocks = -(-count // self.values_per_code), -(-count // self.block)
        return Sizes(self.dtype, codes, blocks * self.scales_per_block)

    def _kernel(self, job: str, backend: Backend) -> Any:
        return getattr(backend.family(self.family), f"{self.name}_{job}")

    def _outputs(self, packed: Packed, backend: Backend) -> tuple[Array, Array]:
        sizes = self.sizes(packed.values.size)
        xp = backend.xp
        return xp.empty(sizes.values, sizes.dtype), xp.empty(sizes.scales, np.float32)

    def _count(self, packed: Packed) -> int:
        """Return how many values the codes stand for; no kernel must read past an array's end."""
        count = packed.count if self.values_per_code > 1 else packed.values.size
        sizes, scales = self.sizes(count), packed.scales
        given = (packed.values.size, 0 if scales is None else scales.size)
        if given != (sizes.values, sizes.scales):
            raise ValueError(
                f"{self.text}: {given[0]} codes and {given[1]} scales for {count} values; "
                f"expected {sizes.values} and {sizes.scales}"
            )
        return count
