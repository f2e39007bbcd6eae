"""Positions on the wire: four codings of strictly ascending indices, the smallest is chosen.

For k indices below n, without any header, k and n being known from elsewhere; k = 0 takes no byte:

`u16`
    How many lie in each block of 65,536 positions (uint32 each), then their offsets (uint16 each).
`bitmap`
    Bit i is set for index i.
`gaps`
    The positions left out before each index, 128 to a block, each as wide as the widest of its
    block: one byte of width for each block, then the packed gaps.
`elias_fano`
    The l = ⌊log2(n / k)⌋ lower bits of each index packed, then k + ⌊n / 2**l⌋ + 1 bits of which
    number (index >> l) + j is set for the j-th index.

Bits are counted from the lowest of the first byte; padding up to a byte is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv_codecs.backend import NUMPY, Backend
from zkv_codecs.kernels.numpy_indices import GAPS
from zkv_codecs.packed import ELEMENTS_MAX

CODINGS = ("u16", "bitmap", "gaps", "elias_fano")
"""From the simplest on."""

WIDTH_MAX = 32


def best(indices: Array, n: int, backend: Backend = NUMPY) -> str:
    """Return the coding that takes the fewest bytes, the simplest of those that take the same.

    Raises:
        TypeError, ValueError: as `encode` does.
    """
    indices = _checked(indices, n, backend)
    return min(CODINGS, key=lambda coding: _size(coding, indices, n, backend))


def size(coding: str, indices: Array, n: int, backend: Backend = NUMPY) -> int:
    """Return the bytes that `encode` gives, and raise what it does."""
    _check_coding(coding, ValueError)
    return _size(coding, _checked(indices, n, backend), n, backend)


def encode(coding: str, indices: Array, n: int, backend: Backend = NUMPY) -> Array:
    """Return strictly ascending indices below n as bytes: a flat uint8 array.

    Raises:
        TypeError: the indices are not integers. Floats are refused even where they are whole
            numbers, as a float32 holds no odd number above 2**24.
        ValueError: no coding of this name; n above 2**31 - 1; or the indices are not ascending or
            not in [0, n).
    """
    _check_coding(coding, ValueError)
    return _encoded(coding, _checked(indices, n, backend), n, backend)


def encode_best(indices: Array, n: int, backend: Backend = NUMPY) -> tuple[str, Array]:
    """Return the coding that `best` names, and what `encode` gives with it.

    The indices are looked at once only, which on a device saves waiting for it.

    Raises:
        TypeError, ValueError: as `encode` does.
    """
    indices = _checked(indices, n, backend)
    name = min(CODINGS, key=lambda coding: _size(coding, indices, n, backend))
    return name, _encoded(name, indices, n, backend)


def decode(
    coding: str, data: Array | bytes | memoryview, k: int, n: int, backend: Backend = NUMPY
) -> Array:
    """Return the k indices below n that a peer has sent as bytes: uint32, strictly ascending.

    Raises:
        ProtocolError: not what `encode` gives for any k indices below n; a wider width than
            needed is let pass.
    """
    _check_coding(coding, ProtocolError)
    if not 0 <= k <= n <= ELEMENTS_MAX:
        raise ProtocolError(f"{k} indices below {n}: want 0 ≤ k ≤ n ≤ {ELEMENTS_MAX}")
    buffer = _buffer(data, backend)
    if k == 0:
        _check_length(coding, buffer.size, 0, k, n)
        return _room(0, backend)
    indices = _DECODERS[coding](buffer, k, n, backend)
    if not backend.family("indices").ascending(indices, n):
        raise ProtocolError(f"indices as {coding}: not strictly ascending below {n}, k = {k}")
    return indices


# --- one pair for each coding ------------------------------------------------------------------


def _u16_encode(indices: Array, n: int, backend: Backend) -> Array:
    blocks = _blocks(n)
    data: Array = backend.xp.empty(_fixed_size("u16", indices.size, n), np.uint8)
    counts, offsets = data[: 4 * blocks].view(np.uint32), data[4 * blocks :].view(np.uint16)
    backend.family("indices").u16_encode(indices, counts, offsets)
    return data


def _u16_decode(data: Array, k: int, n: int, backend: Backend) -> Array:
    _check_length("u16", data.size, _fixed_size("u16", k, n), k, n)
    blocks = _blocks(n)
    counts = _aligned(data[: 4 * blocks], np.uint32)
    total = int(counts.sum(dtype=np.uint64))
    if total != k:
        raise ProtocolError(f"indices as u16: counts add up to {total}, not to {k}")
    out = _room(k, backend)
    backend.family("indices").u16_decode(counts, _aligned(data[4 * blocks :], np.uint16), out)
    return out


def _bitmap_encode(indices: Array, n: int, backend: Backend) -> Array:
    data: Array = backend.xp.empty(_fixed_size("bitmap", indices.size, n), np.uint8)
    backend.family("indices").bitmap_encode(indices, data)
    return data


def _bitmap_decode(data: Array, k: int, n: int, backend: Backend) -> Array:
    _check_length("bitmap", data.size, _fixed_size("bitmap", k, n), k, n)
    _check_padding("bitmap", data, n)
    _check_ones("bitmap", data, k, backend)
    out = _room(k, backend)
    backend.family("indices").bitmap_decode(data, out)
    return out


def _gaps_encode(indices: Array, n: int, backend: Backend) -> Array:
    widths = _widths(indices, backend)
    length = _bytes(_gap_bits(widths, indices.size))
    words = _room(length // 4 + 2, backend)
    backend.family("indices").gaps_encode(indices, widths, words)
    joined: Array = backend.xp.concatenate((widths, words.view(np.uint8)[:length]))
    return joined


def _gaps_decode(data: Array, k: int, n: int, backend: Backend) -> Array:
    blocks = -(-k // GAPS)
    if data.size < blocks:
        raise ProtocolError(f"indices as gaps: {blocks} widths for k = {k}, not {data.size} bytes")
    widths, packed = data[:blocks], data[blocks:]
    widest = int(widths.max())
    if widest > WIDTH_MAX:
        raise ProtocolError(f"indices as gaps: widths of at most {WIDTH_MAX} bits, not {widest}")
    bits = _gap_bits(widths, k)
    _check_length("gaps", data.size, blocks + _bytes(bits), k, n)
    _check_padding("gaps", packed, bits)
    out = _room(k, backend)
    last = backend.family("indices").gaps_decode(_words(packed, backend), widths, out)
    if last >= n:
        raise ProtocolError(f"indices as gaps: all below {n}, not up to {last}")
    return out


def _elias_fano_encode(indices: Array, n: int, backend: Backend) -> Array:
    low, lower, upper = _elias_fano_parts(indices.size, n)
    words = _room(_bytes(lower) // 4 + 2, backend)
    bits: Array = backend.xp.empty(_bytes(upper), np.uint8)
    backend.family("indices").elias_fano_encode(indices, low, words, bits)
    joined: Array = backend.xp.concatenate((words.view(np.uint8)[: _bytes(lower)], bits))
    return joined


def _elias_fano_decode(data: Array, k: int, n: int, backend: Backend) -> Array:
    _check_length("elias_fano", data.size, _fixed_size("elias_fano", k, n), k, n)
    low, lower, upper = _elias_fano_parts(k, n)
    packed, bits = data[: _bytes(lower)], data[_bytes(lower) :]
    _check_padding("elias_fano", packed, lower)
    _check_padding("elias_fano", bits, upper)
    _check_ones("elias_fano", bits, k, backend)
    out = _room(k, backend)
    backend.family("indices").elias_fano_decode(_words(packed, backend), low, bits, out)
    return out


_ENCODERS: dict[str, Callable[[Array, int, Backend], Array]] = {
    "u16": _u16_encode,
    "bitmap": _bitmap_encode,
    "gaps": _gaps_encode,
    "elias_fano": _elias_fano_encode,
}
_DECODERS: dict[str, Callable[[Array, int, int, Backend], Array]] = {
    "u16": _u16_decode,
    "bitmap": _bitmap_decode,
    "gaps": _gaps_decode,
    "elias_fano": _elias_fano_decode,
}


# --- sizes -------------------------------------------------------------------------------------


def _size(coding: str, indices: Array, n: int, backend: Backend) -> int:
    k = indices.size
    if k == 0:
        return 0
    if coding == "gaps":
        widths = _widths(indices, backend)
        return int(widths.size) + _bytes(_gap_bits(widths, k))
    return _fixed_size(coding, k, n)


def _fixed_size(coding: str, k: int, n: int) -> int:
    """Return the bytes of a coding whose size does not depend on the indices, for k > 0."""
    if coding == "u16":
        return 4 * _blocks(n) + 2 * k
    if coding == "bitmap":
        return _bytes(n)
    _, lower, upper = _elias_fano_parts(k, n)
    return _bytes(lower) + _bytes(upper)


def _blocks(n: int) -> int:
    return -(-n >> 16)


def _bytes(bits: int) -> int:
    return -(-bits >> 3)


def _gap_bits(widths: Array, k: int) -> int:
    """Return the bits of all gaps; the last block may hold fewer than `GAPS`."""
    missing = widths.size * GAPS - k
    return GAPS * int(widths.sum(dtype=np.int64)) - missing * int(widths[-1])


def _elias_fano_parts(k: int, n: int) -> tuple[int, int, int]:
    """Return how many lower bits an index has, and the bits of the lower and the upper part."""
    low = (n // k).bit_length() - 1
    return low, k * low, k + (n >> low) + 1


# --- checks ------------------------------------------------------------------------------------


def _checked(indices: Array, n: int, backend: Backend) -> Array:
    """Return the indices as contiguous uint32 if they are what a coding takes."""
    if indices.dtype.kind not in "iu":
        raise TypeError(f"indices are integers, not {indices.dtype}: floats lose digits")
    if not 0 <= n <= ELEMENTS_MAX:
        raise ValueError(f"indices below {n}: n is at most {ELEMENTS_MAX}; cut the array")
    if indices.dtype != np.uint32 and indices.size:
        least, most = int(indices.min()), int(indices.max())
        if least < 0 or most >= n:
            raise ValueError(f"indices from {least} to {most}: they must be in [0, {n})")
    indices = indices.reshape(-1).astype(np.uint32, order="C", copy=False)
    if not backend.family("indices").ascending(indices, n):
        raise ValueError(f"{indices.size} indices: they must be strictly ascending and below {n}")
    return indices


def _check_coding(coding: str, error: type[Exception]) -> None:
    if coding not in CODINGS:
        raise error(f"index coding {coding!r}: choose one of {', '.join(CODINGS)}")


def _check_length(coding: str, given: int, expected: int, k: int, n: int) -> None:
    if given != expected:
        raise ProtocolError(
            f"indices as {coding}: {expected} bytes for {k} of {n} elements, not {given}"
        )


def _check_padding(coding: str, data: Array, bits: int) -> None:
    """Refuse bits that are set in the last byte behind the first `bits`."""
    if bits % 8 and int(data[-1]) >> bits % 8:
        raise ProtocolError(
            f"indices as {coding}: 0 in the {8 - bits % 8} bits of padding,"
            f" not {int(data[-1]) >> bits % 8}"
        )


def _check_ones(coding: str, bits: Array, k: int, backend: Backend) -> None:
    ones = backend.family("indices").bitmap_ones(bits)
    if ones != k:
        raise ProtocolError(f"indices as {coding}: {k} bits set, not {ones}")


def _encoded(coding: str, indices: Array, n: int, backend: Backend) -> Array:
    """Return checked indices as bytes."""
    if indices.size == 0:
        nothing: Array = backend.xp.empty(0, np.uint8)
        return nothing
    return _ENCODERS[coding](indices, n, backend)


# --- memory ------------------------------------------------------------------------------------


def _room(count: int, backend: Backend) -> Array:
    """Return room for so many uint32."""
    made: Array = backend.xp.empty(count, np.uint32)
    return made


def _buffer(data: Any, backend: Backend) -> Array:
    """Return bytes as an array where the kernels want it: a view where they already are there."""
    there = hasattr(data, "__cuda_array_interface__")
    buffer: Array = backend.xp.asarray(data if there else np.frombuffer(data, np.uint8))
    return buffer


def _widths(indices: Array, backend: Backend) -> Array:
    """Return the width of each block of gaps."""
    widths: Array = backend.xp.empty(-(-indices.size // GAPS), np.uint8)
    backend.family("indices").gaps_widths(indices, widths)
    return widths


def _aligned(data: Array, dtype: Any) -> Array:
    """Return bytes as numbers: a view, or a copy if they lie where numbers must not.

    CuPy's arrays do not tell whether they are aligned, so theirs is always a copy.
    """
    view: Array = data.view(dtype)
    return view if getattr(view.flags, "aligned", False) else data.copy().view(dtype)


def _words(data: Array, backend: Backend) -> Array:
    """Return bytes as uint32 words, with one more word, as readers take two at a time."""
    words: Array = backend.xp.zeros(data.size // 4 + 2, np.uint32)
    words.view(np.uint8)[: data.size] = data
    return words
