"""What codecs of one or two bits, and of codes by chance, share: outputs, counts, and blocks."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.backend import Backend
from zkv_codecs.kernels.numpy_blocks import BLOCK_MAX, BLOCK_MIN
from zkv_codecs.packed import Packed, Sizes, Stage


class Coded(Stage):
    """A quantizer whose codes are bytes: it decodes and adds by kernels."""

    kind: ClassVar[str] = "quantize"
    name: ClassVar[str]
    """Its spec text without parameters."""
    dtype: ClassVar[np.dtype] = np.dtype(np.uint8)
    """Of a byte of codes."""
    each: ClassVar[int] = 1
    """Codes to a byte."""

    def decode(self, packed: Packed, backend: Backend) -> Packed:
        """Return float32 values.

        Raises:
            ValueError: not as many bytes or scales as `sizes` says.
        """
        values = backend.xp.empty(self._count(packed), np.float32)
        self._decode(packed, values, backend)
        return replace(packed, values=values, scales=None)

    def add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        """See `Stage.add`.

        Raises:
            ValueError: not as many bytes or scales as `sizes` says for `total`.
        """
        if total.dtype != np.float32:
            Stage.add(self, packed, weight, total, backend)
            return
        count = self._count(packed)
        if count != total.size:
            raise ValueError(f"{self.text}: {count} values to be added to {total.size}")
        self._add(packed, weight, total, backend)

    def sizes(self, count: int) -> Sizes:
        """Whole bytes."""
        return Sizes(self.dtype, -(-count // self.each))

    @abstractmethod
    def _decode(self, packed: Packed, out: Array, backend: Backend) -> None:
        """Write the decoded values to the float32 array `out`."""

    @abstractmethod
    def _add(self, packed: Packed, weight: float, total: Array, backend: Backend) -> None:
        """Add weight · decoded to the float32 array `total`, each product rounded."""

    def _outputs(self, packed: Packed, backend: Backend) -> tuple[Array, Array]:
        """Return room for codes and scales."""
        sizes = self.sizes(packed.values.size)
        xp = backend.xp
        return xp.empty(sizes.values, sizes.dtype), xp.empty(sizes.scales, np.float32)

    def _sent(self, packed: Packed, codes: Array, scales: Array | None = None) -> Packed:
        """Return what is sent instead of `packed`, which says how many values it was."""
        count = int(packed.values.size)
        kept = None if count == packed.size else count
        return replace(packed, values=codes, scales=scales, kept=kept)

    def _count(self, packed: Packed) -> int:
        """Return how many values the codes stand for.

        Kernels check nothing: none may be called with less than it reads.
        """
        count = packed.values.size if self.each == 1 else packed.count
        sizes, scales = self.sizes(count), packed.scales
        given = (packed.values.size, 0 if scales is None else scales.size)
        if given != (sizes.values, sizes.scales):
            raise ValueError(
                f"{self.text}: {given[0]} bytes and {given[1]} scales for {count} values;"
                f" {sizes.values} and {sizes.scales} expected"
            )
        return int(count)


class Blocked(Coded):
    """A quantizer with scales for each `block` elements, which kernels sum by halving."""

    scales: ClassVar[int] = 1
    """For each block."""
    usual: ClassVar[int] = 256
    """A block of this size is not in the text."""
    block: int

    def __post_init__(self) -> None:
        whole = type(self.block) is int and BLOCK_MIN <= self.block <= BLOCK_MAX
        if not whole or self.block & (self.block - 1):
            raise ValueError(
                f"{self.name}: block {self.block!r}; give a power of two from {BLOCK_MIN} to"
                f" {BLOCK_MAX}"
            )

    @property
    def text(self) -> str:
        """The name, and the size of a block if it is not the usual one."""
        return self.name if self.block == self.usual else f"{self.name}:{self.block}"

    def sizes(self, count: int) -> Sizes:
        """Whole bytes, and the scales of each block."""
        return Sizes(self.dtype, -(-count // self.each), self.scales * -(-count // self.block))
