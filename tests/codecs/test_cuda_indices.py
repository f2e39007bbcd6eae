"""CUDA's codings of positions, on the CPU and on a device: the bits of NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import family
from hypothesis import given
from hypothesis import strategies as st
from strategies_codecs import orders

from zkv.dtypes import Array
from zkv_codecs.kernels import cuda_indices, numpy_indices
from zkv_codecs.kernels.cuda_module import source

GAPS = numpy_indices.GAPS
coding = family("indices")
numbers = st.integers(0, 2**32 - 1)


def sealed(array: Array) -> Array:
    array.setflags(write=False)
    return array


def room(count: int, dtype: Any) -> Array:
    """Room for results, full of what must not be left."""
    return np.full(count * np.dtype(dtype).itemsize, 0x5A, np.uint8).view(dtype)


@st.composite
def positions(draw: st.DrawFn) -> tuple[Array, int]:
    """Ascending positions, few or many, near together or far apart, and what they are below."""
    k = draw(st.integers(0, 700))
    chance = np.random.default_rng(draw(numbers))
    n = draw(st.sampled_from([k + 1, 3 * k + 1, 70_000, 200_000]))
    indices = np.sort(chance.permutation(n)[:k]).astype(np.uint32)
    if k and draw(st.booleans()):
        n = 2**31 - 1
        indices[-1] = n - 1
    return sealed(indices), n


def packed_words(bits: int) -> int:
    """As many as `zkv_codecs.indices` gives: readers take two at a time."""
    return bits // 32 + 2


@given(orders, positions(), st.data())
def test_ascending(coding, order, drawn, data):
    indices, n = drawn
    coding.same("ascending", indices, n, order=order)
    coding.same("ascending", indices, int(indices[-1]) if indices.size else 0, order=order)
    if indices.size > 1:
        at = data.draw(st.integers(0, indices.size - 2))
        spoiled = indices.copy()
        spoiled[at + 1] = spoiled[at]
        coding.same("ascending", sealed(spoiled), n, order=order)


@given(orders, positions())
def test_offsets_in_blocks(coding, order, drawn):
    indices, n = drawn
    if n > 200_000:
        return
    counts, offsets = room(-(-n >> 16), np.uint32), room(indices.size, np.uint16)
    made = coding.same("u16_encode", indices, counts, offsets, order=order)
    counts, offsets = map(sealed, made[1:])
    coding.same("u16_decode", counts, offsets, room(indices.size, np.uint32), order=order)


@given(orders, st.integers(0, 1500), st.sampled_from([0.0, 0.001, 0.1, 1.0]), numbers)
def test_bitmap(coding, order, size, share, seed):
    chance = np.random.default_rng(seed)
    flags = chance.random(size) < share
    indices = sealed(np.flatnonzero(flags).astype(np.uint32))
    bits = sealed(coding.same("bitmap_encode", indices, room(-(-size // 8), np.uint8))[1])
    coding.same("bitmap_ones", bits, order=order)
    coding.same("bitmap_decode", bits, room(indices.size, np.uint32), order=order)


@given(orders, positions())
def test_gaps(coding, order, drawn):
    indices, _ = drawn
    k = indices.size
    widths = sealed(coding.same("gaps_widths", indices, room(-(-k // GAPS), np.uint8))[1])
    length = packed_words(int(np.repeat(widths, GAPS)[:k].sum(dtype=np.int64)))
    words = sealed(coding.same("gaps_encode", indices, widths, room(length, np.uint32))[2])
    coding.same("gaps_decode", words, widths, room(k, np.uint32), order=order)


@given(orders, st.integers(0, 600), st.integers(0, 32), numbers)
def test_any_gaps_of_a_peer(coding, order, k, widest, seed):
    """Positions beyond 32 bits too: the last one says so."""
    chance = np.random.default_rng(seed)
    widths = chance.integers(0, widest + 1, -(-k // GAPS)).astype(np.uint8)
    length = packed_words(GAPS * int(widths.sum()))
    words = chance.integers(0, 2**32, length).astype(np.uint32)
    coding.same("gaps_decode", sealed(words), sealed(widths), room(k, np.uint32), order=order)


@given(orders, positions())
def test_elias_fano(coding, order, drawn):
    indices, n = drawn
    k = indices.size
    if k == 0:
        return
    low = (n // k).bit_length() - 1
    upper = room(-(-(k + (n >> low) + 1) // 8), np.uint8)
    lower = room(packed_words(k * low), np.uint32)
    made = coding.same("elias_fano_encode", indices, low, lower, upper, order=order)
    words, bits = map(sealed, made[2:])
    coding.same("elias_fano_decode", words, low, bits, room(k, np.uint32), order=order)


@given(orders, st.integers(0, 300), st.integers(0, 30), numbers)
def test_any_elias_fano_of_a_peer(coding, order, size, low, seed):
    chance = np.random.default_rng(seed)
    bits = chance.integers(0, 256, size).astype(np.uint8)
    k = numpy_indices.bitmap_ones(bits)
    words = chance.integers(0, 2**32, packed_words(k * low)).astype(np.uint32)
    coding.same("elias_fano_decode", words, low, bits, room(k, np.uint32), order=order)


@pytest.mark.parametrize("order", range(4))
def test_more_chunks_than_a_warp_adds_up(coding, order):
    chance = np.random.default_rng(order)
    bits = sealed(chance.integers(0, 256, 100_000).astype(np.uint8))
    k = numpy_indices.bitmap_ones(bits)
    coding.same("bitmap_decode", bits, room(k, np.uint32), order=order)


def test_the_text_and_the_launches_agree_on_sizes():
    text = source("indices")
    assert f"#define GAPS {GAPS}\n" in text
    assert f"#define CHUNK {cuda_indices.CHUNK}\n" in text
