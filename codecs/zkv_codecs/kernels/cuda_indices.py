"""Codings of positions on a CUDA device: the functions of `numpy_indices`, bit for bit.

Functions that return something wait for the device; no other does.
"""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.cuda_module import empty, launch, per_chunk, per_element
from zkv_codecs.kernels.numpy_indices import GAPS

FAMILY = "indices"
CHUNK = 128
"""As in the text: bytes in which a warp looks for set bits."""


def ascending(indices: Array, n: int) -> bool:
    """See `numpy_indices.ascending`."""
    wrong = empty(1, np.uint32)
    wrong.fill(0)
    per_element(FAMILY, "ascending", indices.size, (indices,), np.uint32(n), wrong)
    return not int(wrong[0])


def u16_encode(indices: Array, counts: Array, offsets: Array) -> None:
    """See `numpy_indices.u16_encode`."""
    counts.fill(0)
    per_element(FAMILY, "u16_split", indices.size, (indices,), counts, offsets)


def u16_decode(counts: Array, offsets: Array, out: Array) -> None:
    """See `numpy_indices.u16_decode`."""
    before, _ = _sums_before(counts)
    per_chunk(FAMILY, "u16_join", counts.size, 1, (counts, before), offsets, out)


def bitmap_encode(indices: Array, bits: Array) -> None:
    """See `numpy_indices.bitmap_encode`."""
    _set(indices, 0, False, bits)


def bitmap_ones(bits: Array) -> int:
    """See `numpy_indices.bitmap_ones`."""
    return int(_ones_before(bits)[1][0])


def bitmap_decode(bits: Array, out: Array) -> None:
    """See `numpy_indices.bitmap_decode`."""
    before, _ = _ones_before(bits)
    per_chunk(FAMILY, "bits_find", bits.size, CHUNK, (bits,), before, out)


def gaps_widths(indices: Array, widths: Array) -> None:
    """See `numpy_indices.gaps_widths`."""
    per_chunk(FAMILY, "gaps_width", indices.size, GAPS, (indices,), widths)


def gaps_encode(indices: Array, widths: Array, words: Array) -> None:
    """See `numpy_indices.gaps_encode`."""
    words.fill(0)
    before, _ = _sums_before(widths)
    per_element(FAMILY, "gaps_pack", indices.size, (indices,), widths, before, words)


def gaps_decode(words: Array, widths: Array, out: Array) -> int:
    """See `numpy_indices.gaps_decode`."""
    before, _ = _sums_before(widths)
    sums, total = empty(widths.size, np.uint64), empty(1, np.uint64)
    given = words, widths, before
    per_chunk(FAMILY, "gaps_sum", out.size, GAPS, given, sums)
    launch(FAMILY, "scan_wide", 1, np.int64(widths.size), sums, total)
    per_chunk(FAMILY, "gaps_find", out.size, GAPS, (*given, sums), out)
    return int(total[0]) - 1


def elias_fano_encode(indices: Array, low: int, words: Array, bits: Array) -> None:
    """See `numpy_indices.elias_fano_encode`."""
    words.fill(0)
    per_element(FAMILY, "low_pack", indices.size, (indices,), np.uint32(low), words)
    _set(indices, low, True, bits)


def elias_fano_decode(words: Array, low: int, bits: Array, out: Array) -> None:
    """See `numpy_indices.elias_fano_decode`."""
    bitmap_decode(bits, out)
    per_element(FAMILY, "low_join", out.size, (words,), np.uint32(low), out)


def _set(indices: Array, low: int, numbered: bool, bits: Array) -> None:
    bits.fill(0)
    places = np.uint32(low), np.uint32(numbered)
    per_element(FAMILY, "bits_set", indices.size, (indices,), *places, bits)


def _sums_before(numbers: Array) -> tuple[Array, Array]:
    """Return the sums of the numbers before each, and that of all, uint32."""
    sums, total = empty(numbers.size, np.uint32), empty(1, np.uint32)
    sums[...] = numbers
    launch(FAMILY, "scan", 1, np.int64(numbers.size), sums, total)
    return sums, total


def _ones_before(bits: Array) -> tuple[Array, Array]:
    """Return how many bits are set in the chunks before each, and in all."""
    chunks = -(-bits.size // CHUNK)
    counts, total = empty(chunks, np.uint32), empty(1, np.uint32)
    per_chunk(FAMILY, "bits_count", bits.size, CHUNK, (bits,), counts)
    launch(FAMILY, "scan", 1, np.int64(chunks), counts, total)
    return counts, total
