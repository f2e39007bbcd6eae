"""Compressors behind the other stages: every bit comes back, and no bytes can ask for memory."""

from __future__ import annotations

import contextlib
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv_codecs.backend import NUMPY
from zkv_codecs.ints import Int8
from zkv_codecs.lossless import Lossless, Lz4, Zstd
from zkv_codecs.packed import Packed, Sizes, dense

zstandard = pytest.importorskip("zstandard")
lz4_block = pytest.importorskip("lz4.block")

CODECS: list[Any] = [Zstd(), Zstd(3), Lz4()]
codecs = st.sampled_from(CODECS)
both = pytest.mark.parametrize("codec", CODECS[::2], ids=lambda codec: codec.text)

dtypes = st.sampled_from(["u1", "i1", "u2", "f2", "u4", "f4", "f8"]).map(np.dtype)
arrays = dtypes.flatmap(
    lambda dtype: (
        hnp.arrays(dtype, st.integers(0, 300))
        | st.tuples(st.integers(0, 3000), st.integers(0, 99)).map(
            lambda drawn: np.full(drawn[0], drawn[1], dtype)
        )
    )
)


def packed(values: Array) -> Packed:
    return Packed(values, (values.size,))


def compressed(codec: Lossless, values: Array) -> Packed:
    return codec.encode(packed(values), (), 0, NUMPY)[0]


def received(sent: Array, dtype: Any, count: int) -> Packed:
    """What a receiver makes of bytes that are said to be `count` elements."""
    return Packed(sent, (count,), before=Sizes(np.dtype(dtype), count))


def gradient(count: int) -> Array:
    chance = np.random.default_rng(0)
    return chance.normal(size=count, scale=1e-3).astype(np.float32)


@given(codecs, arrays)
def test_every_bit_comes_back_from_the_bytes_and_the_sizes(codec, values):
    values.setflags(write=False)
    sent = compressed(codec, values)
    assert sent.values.dtype == np.uint8
    back = codec.decode(received(sent.values, values.dtype, values.size), NUMPY)
    assert back.values.dtype == values.dtype
    assert back.values.tobytes() == values.tobytes()
    assert back.before is None


@given(codecs, arrays)
def test_nothing_grows(codec, values):
    most = codec.sizes_after(Sizes(values.dtype, values.size), (values.size,))
    assert most.at_most
    assert most.dtype == np.uint8
    assert compressed(codec, values).values.size <= most.values == values.nbytes


@both
def test_what_is_all_alike_shrinks_and_gradients_do(codec):
    assert compressed(codec, np.zeros(10_000, np.float32)).values.size < 400
    # Bytes in their places within an element: sorting them is what makes the difference.
    values = gradient(100_000)
    unsorted = codec._compress(values.view(np.uint8))
    assert compressed(codec, values).values.size < 0.97 * len(unsorted)


@both
def test_noise_is_sent_as_it_is(codec):
    noise = np.random.default_rng(1).integers(0, 256, 5000).astype(np.uint8)
    assert compressed(codec, noise).values.tobytes() == noise.tobytes()


@both
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,)])
def test_shapes_without_axes_or_elements(codec, shape):
    """D04, D05."""
    sent, state = codec.encode(dense(np.ones(shape, np.float32)), (), 0, NUMPY)
    back = codec.decode(sent, NUMPY)
    assert state == ()
    assert back.shape == shape
    assert (back.values == 1).all()
    assert back.values.size == back.size


@both
def test_behind_a_quantizer_the_codes_shrink_and_the_scales_pass(codec):
    """The receiver derives what went in from the stages before: 2000 int8 codes, 8 scales."""
    first = Int8()
    codes, _ = first.encode(dense(gradient(2000)), (), 0, NUMPY)
    sent, _ = codec.encode(codes, (), 0, NUMPY)
    after = first.sizes_after(Sizes(np.dtype(np.float32), 2000), (2000,))
    assert codec.sizes_after(after, (2000,)) == Sizes(np.dtype(np.uint8), 2000, 8, at_most=True)
    assert sent.scales is codes.scales
    arrived = Packed(sent.values, (2000,), None, sent.scales, before=after)
    back = codec.decode(arrived, NUMPY)
    assert back.values.tobytes() == codes.values.tobytes()
    assert first.decode(back, NUMPY).values.size == 2000


def test_bytes_do_not_depend_on_the_order_of_bytes_in_memory():
    values = gradient(100)
    swapped = values.astype(values.dtype.newbyteorder(">" if sys.byteorder == "little" else "<"))
    for codec in CODECS:
        assert np.array_equal(compressed(codec, values).values, compressed(codec, swapped).values)


@both
def test_error_feedback_has_nothing_to_keep(codec):
    values, residual = gradient(500), gradient(500)[::-1].copy()
    sent, left, _ = codec.encode_residual(dense(values), residual, (), 0, NUMPY)
    assert not left.any()
    assert np.array_equal(codec.decode(sent, NUMPY).values, values + residual)
    total = np.ones(500, np.float32)
    codec.add(sent, 2.0, total, NUMPY)
    assert np.array_equal(total, 1 + 2 * (values + residual))


# --- bytes of a peer -------------------------------------------------------------------------


@given(codecs, st.binary(max_size=200), dtypes, st.integers(0, 60))
def test_any_bytes_are_the_declared_number_of_elements_or_refused(codec, sent, dtype, count):
    arrived = received(np.frombuffer(sent, np.uint8), dtype, count)
    with contextlib.suppress(ProtocolError):
        back = codec.decode(arrived, NUMPY)
        assert back.values.size == count
        assert back.values.dtype == dtype


@given(codecs, arrays, st.data())
def test_what_is_cut_short_is_refused(codec, values, data):
    sent = compressed(codec, values).values
    assume(0 < sent.size < values.nbytes)
    cut = sent[: data.draw(st.integers(0, sent.size - 1))]
    with pytest.raises(ProtocolError):
        codec.decode(received(cut, values.dtype, values.size), NUMPY)


@given(codecs, st.binary(min_size=1, max_size=20))
def test_what_has_something_behind_it_is_refused(codec, behind):
    values = np.zeros(1000, np.float32)
    sent = compressed(codec, values).values.tobytes() + behind
    with pytest.raises(ProtocolError):
        codec.decode(received(np.frombuffer(sent, np.uint8), np.float32, 1000), NUMPY)


@given(codecs, st.integers(-50, 50).filter(bool))
def test_another_number_of_elements_than_declared_is_refused(codec, more):
    sent = compressed(codec, np.zeros(2000, np.float32)).values
    with pytest.raises(ProtocolError, match=r"^(zstd|lz4): "):
        codec.decode(received(sent, np.float32, 2000 + more), NUMPY)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.text)
def test_a_bomb_takes_no_memory(codec):
    """256 MB of zeros in a few KB, or in a frame that only says so, for 4 KB declared."""
    bombs = [codec._compress(np.zeros(2**28, np.uint8))]
    if isinstance(codec, Zstd):
        with_size = bytes.fromhex("28b52ffd e0") + (2**50).to_bytes(8, "little") + b"\1\0\0"
        stream = zstandard.ZstdCompressor(write_content_size=False)
        bombs += [with_size, stream.compress(bytes(2**28))]
    for bomb in bombs:
        sent = np.frombuffer(bomb, np.uint8)[:4095]
        tracemalloc.start()
        with pytest.raises(ProtocolError):
            codec.decode(received(sent, np.float32, 1024), NUMPY)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()


# --- parameters and packages -----------------------------------------------------------------


def test_a_packed_without_sizes_cannot_be_decoded():
    with pytest.raises(ValueError, match=r"zstd: .*Packed\.before"):
        Zstd().decode(packed(np.zeros(4, np.uint8)), NUMPY)


@pytest.mark.parametrize("level", [-1, 0, 20])
def test_a_level_out_of_range_is_refused(level):
    with pytest.raises(ValueError, match=rf"zstd: level {level}; give 1 to 19"):
        Zstd(level)


def test_texts():
    assert [codec.text for codec in CODECS] == ["zstd", "zstd:3", "lz4"]


@pytest.mark.parametrize(("codec", "package"), [(Zstd(), "zstandard"), (Lz4(), "lz4")])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(codec, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, "lz4.block", None)
    with pytest.raises(ImportError, match=rf"needs the package {package}: pip install 'zkv\[loss"):
        compressed(codec, np.zeros(9, np.float32))
    sent = np.zeros(3, np.uint8)
    with pytest.raises(ImportError, match=r"zkv\[lossless\]"):
        codec.decode(received(sent, np.float32, 9), NUMPY)
