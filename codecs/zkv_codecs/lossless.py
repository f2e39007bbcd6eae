"""Byte compressors behind the other stages, which change no bit: `zstd` and `lz4`.

The bytes of the values are sorted by their place in an element first: signs and exponents of
neighbouring gradients are alike, mantissas are noise, and a compressor finds the former only where
they lie together. Measured on gradients: zstd saves 17 % of float32 and 31 % of bfloat16, at about
a gigabyte per second, so it pays on links below 1 Gbit/s.

What does not shrink is sent as it is, and told by its length. So no frame is longer than what went
in, and a receiver, which knows that length, refuses longer ones unread.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv_codecs.backend import Backend
from zkv_codecs.packed import Packed, Sizes, Stage, State

LEVEL = 1
"""zstd's fastest level but for the negative ones; higher ones gain nothing on gradients."""

LEVEL_MAX = 19
"""Levels above take windows of more memory than a receiver may be asked for."""

LZ4_BYTES_MAX = 0x7E000000
"""LZ4 compresses no more at once; more is sent as it is."""

BYTES = np.dtype(np.uint8)


class Lossless(Stage):
    """A compressor of the bytes of `packed.values`, of any dtype, into a uint8 array.

    Scales and indices pass untouched. `decode` gives what went in, of the same dtype, for which it
    has to know `Packed.before`; bytes that are not exactly that many elements, compressed or not,
    raise `ProtocolError`.
    """

    kind: ClassVar[str] = "lossless"
    biased: ClassVar[bool] = False

    def encode(
        self, packed: Packed, state: State, seed: int, backend: Backend
    ) -> tuple[Packed, State]:
        """Return the compressed bytes, and `before` with what they stand for."""
        values = _on_host(packed.values)
        raw = values.astype(values.dtype.newbyteorder("<"), copy=False).view(BYTES)
        sent = raw
        if raw.size:
            compressed = self._compress(_sorted(raw, values.itemsize))
            if len(compressed) < raw.size:
                sent = np.frombuffer(compressed, BYTES)
        before = Sizes(values.dtype, values.size)
        return replace(packed, values=backend.xp.asarray(sent), before=before), state

    def decode(self, packed: Packed, backend: Backend) -> Packed:
        """Return the values as they went in, maybe read-only.

        Raises:
            ValueError: `packed.before` is not set.
            ProtocolError: the bytes are not what it says.
        """
        before = packed.before
        if before is None:
            raise ValueError(f"{self.text}: nothing says what was compressed; set Packed.before")
        sent = _on_host(packed.values)
        size = before.values * before.dtype.itemsize
        if sent.size > size:
            raise ProtocolError(f"{self.text}: {sent.size} bytes for {size} before compression")
        raw = sent
        if sent.size < size:
            raw = _unsorted(self._decompressed(sent, size), before.dtype.itemsize)
        values = raw.view(before.dtype.newbyteorder("<")).astype(before.dtype, copy=False)
        return replace(packed, values=backend.xp.asarray(values), before=None)

    def sizes(self, count: int) -> Sizes:
        """As many bytes as went in, or fewer."""
        return self.sizes_after(Sizes(np.dtype(np.float32), count), (count,))

    def sizes_after(self, given: Sizes, shape: Sequence[int]) -> Sizes:
        """As many bytes as went in, or fewer, and the scales that went in."""
        return Sizes(BYTES, given.values * given.dtype.itemsize, given.scales, at_most=True)

    def _decompressed(self, sent: Array, size: int) -> Array:
        raw = self._decompress(sent, size)
        if len(raw) != size:
            raise ProtocolError(f"{self.text}: {len(raw)} bytes were compressed instead of {size}")
        return np.frombuffer(raw, BYTES)

    @abstractmethod
    def _compress(self, raw: Array) -> bytes:
        """Return the bytes compressed, or the bytes."""

    @abstractmethod
    def _decompress(self, sent: Array, size: int) -> bytes:
        """Return what was compressed, at most `size` bytes; anything else is a ProtocolError."""


@dataclass(frozen=True, slots=True)
class Zstd(Lossless):
    """Zstandard frames that hold their size and nothing behind them.

    Raises:
        ValueError: a level outside 1 to 19.
        ImportError, in use: the package zstandard is not installed.
    """

    level: int = LEVEL

    def __post_init__(self) -> None:
        if not 1 <= self.level <= LEVEL_MAX:
            raise ValueError(f"zstd: level {self.level}; give 1 to {LEVEL_MAX}, such as zstd:3")

    @property
    def text(self) -> str:
        """`zstd`, or `zstd:3` with another level."""
        return "zstd" if self.level == LEVEL else f"zstd:{self.level}"

    def _compress(self, raw: Array) -> bytes:
        compressed: bytes = _library("zstd", "zstandard").ZstdCompressor(self.level).compress(raw)
        return compressed

    def _decompress(self, sent: Array, size: int) -> bytes:
        zstandard = _library("zstd", "zstandard")
        try:
            # The library makes room for what the frame says of itself, so that is compared first.
            said = zstandard.frame_content_size(sent)
            if said != size:
                raise ProtocolError(f"zstd: a frame of {said} bytes instead of {size}")
            raw: bytes = zstandard.ZstdDecompressor().decompress(sent, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ProtocolError(f"zstd: {error}") from None
        return raw


@dataclass(frozen=True, slots=True)
class Lz4(Lossless):
    """One LZ4 block without a header: faster than zstd, and shrinks less.

    Raises:
        ImportError, in use: the package lz4 is not installed.
    """

    @property
    def text(self) -> str:
        """`lz4`."""
        return "lz4"

    def _compress(self, raw: Array) -> bytes:
        if raw.size > LZ4_BYTES_MAX:
            return raw.tobytes()
        compressed: bytes = _library("lz4", "lz4.block").compress(raw, store_size=False)
        return compressed

    def _decompress(self, sent: Array, size: int) -> bytes:
        if size > LZ4_BYTES_MAX:
            raise ProtocolError(f"lz4: {size} bytes compressed; {LZ4_BYTES_MAX} is the most")
        block = _library("lz4", "lz4.block")
        try:
            raw: bytes = block.decompress(sent, uncompressed_size=size)
        except block.LZ4BlockError as error:
            raise ProtocolError(f"lz4: {error}") from None
        return raw


def _library(codec: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"codec {codec} needs the package {package}: pip install 'zkv[lossless]'"
        ) from error


def _on_host(values: Any) -> Array:
    """Return the array in the host's memory: the compressors know no other."""
    host: Array = values if isinstance(values, np.ndarray) else values.get()
    return host


def _sorted(raw: Array, itemsize: int) -> Array:
    """Return the first bytes of all elements, then all second bytes, and so on."""
    return np.ascontiguousarray(raw.reshape(-1, itemsize).T).reshape(-1)


def _unsorted(planes: Array, itemsize: int) -> Array:
    """Undo `_sorted`."""
    if itemsize == 1:
        return planes
    count = planes.size // itemsize
    raw = np.empty((count, itemsize), BYTES)
    for place in range(itemsize):
        raw[:, place] = planes[place * count : (place + 1) * count]
    return raw.reshape(-1)
