"""Block integers: laws, the reference's vectors, and its pitfalls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quantizer_laws import (
    BACKENDS,
    LARGEST,
    NUMBA,
    Case,
    cases,
    check_dtypes,
    check_feedback,
    check_kernels,
    check_laws,
    check_not_finite,
    check_refusals,
    check_same_bits,
    check_shapes,
    check_zeros,
    decoded,
    encoded,
    needs_numba,
)

from zkv.dtypes import Array
from zkv_codecs.backend import NUMPY, Backend
from zkv_codecs.ints import Int4, Int8, UInt8
from zkv_codecs.kernels.numpy_ints import ABSMAX_MIN
from zkv_codecs.packed import Packed, dense
from zkv_codecs.quantizers import BlockQuantizer

backends = pytest.mark.parametrize("backend", BACKENDS)
KINDS = pytest.mark.parametrize("codec", [Int8(), Int4(), UInt8()], ids=lambda codec: codec.text)
blocks = st.sampled_from([256, 2, 16, 34, 100, 2**20])


def per_element(codec: BlockQuantizer, per_block: Array, n: int) -> Array:
    return np.repeat(per_block.astype(np.float64), codec.block)[:n]


def worst(codec: BlockQuantizer, x: Array, sent: Packed) -> Array:
    """The largest error that the codec's docstring allows for each element."""
    assert sent.scales is not None
    starts = np.arange(0, x.size, codec.block)
    absmax = per_element(codec, np.maximum.reduceat(np.abs(x), starts), x.size)
    if isinstance(codec, UInt8):
        steps = per_element(codec, sent.scales[0::2], x.size)
        whole = np.where(absmax > 0.99 * LARGEST, 1.0, 0.5)
        return whole * steps + 3e-7 * absmax
    levels = 254 if isinstance(codec, Int8) else 14
    return np.where(absmax < ABSMAX_MIN, absmax, absmax / levels * 1.0001)


@needs_numba
@KINDS
@given(block=blocks, case=cases())
def test_numba_gives_the_bits_of_numpy(codec: BlockQuantizer, block: int, case: Case) -> None:
    check_same_bits(replace(codec, block=block), case)


@KINDS
@backends
@given(block=blocks, case=cases())
def test_sizes_errors_and_what_is_left(
    codec: BlockQuantizer, backend: Backend, block: int, case: Case
) -> None:
    codec = replace(codec, block=block)
    sent, values, x = check_laws(codec, case, backend)
    if x.size:
        error = np.abs(values.astype(np.float64) - x)
        assert (error <= worst(codec, x, sent)).all()


@KINDS
@backends
def test_nothing_is_lost_under_feedback(codec: BlockQuantizer, backend: Backend) -> None:
    check_feedback(codec, backend)


@KINDS
@backends
def test_d04_d05_scalars_and_empty_arrays(codec: BlockQuantizer, backend: Backend) -> None:
    """D04, D05: a 0-d array, and arrays with zero elements."""
    check_shapes(codec, backend)


@KINDS
@backends
def test_d12_zeros(codec: BlockQuantizer, backend: Backend) -> None:
    """D12: an all-zero tensor through a quantizer."""
    check_zeros(codec, backend)


@KINDS
@backends
def test_d15_dtypes(codec: BlockQuantizer, backend: Backend) -> None:
    """D15: a codec with fp16 or f8 input."""
    check_dtypes(codec, backend)


@KINDS
@backends
def test_d17_nan_stays_in_its_block(codec: BlockQuantizer, backend: Backend) -> None:
    """D17: NaN enters the residual; the codec itself keeps nothing of it."""
    check_not_finite(codec, backend)


@KINDS
@backends
def test_wrong_sizes_are_refused(codec: BlockQuantizer, backend: Backend) -> None:
    check_refusals(codec, backend)


@needs_numba
def test_kernels_are_compiled_once_and_ahead() -> None:
    check_kernels(NUMBA, "ints")


@backends
def test_d14_each_worker_has_its_own_scale(backend: Backend) -> None:
    """D14: an average taken on the compressed integers."""
    total = np.zeros(2, np.float32)
    for gradient in ([1.0, -1.0], [100.0, 50.0]):
        sent = encoded(Int8(), np.array(gradient, np.float32), backend)
        Int8().add(sent, 0.5, total, backend)
    assert np.abs(total - [50.5, 24.5]).max() <= (1 / 127 + 100 / 127) / 2


@backends
def test_int8_vector(backend: Backend) -> None:
    """The block of the reference: ties go to even, the scale is absmax / 127."""
    x = np.array([12.7, -6.35, 0.05, 0, -12.7, 3, 0.15, -0.149], np.float32)
    sent = encoded(Int8(), x, backend)
    assert sent.values.tolist() == [127, -64, 0, 0, -127, 30, 2, -1]
    assert sent.scales is not None
    assert sent.scales.tolist() == [np.float32(12.7) / np.float32(127)]


@backends
def test_int4_packs_the_first_code_into_the_low_nibble(backend: Backend) -> None:
    x = np.array([7, -7, 1, 0, -3], np.float32)
    sent = encoded(Int4(), x, backend)
    assert sent.values.tolist() == [0x1F, 0x89, 0x05]
    assert Int4().decode(sent, backend).values.tolist() == x.tolist()


@backends
def test_int4_knows_how_many_values_a_sparsifier_left(backend: Backend) -> None:
    """Whether positions or a seed say where they belong, the count is not the array's."""
    five = np.array([7, -7, 1, 0, -3], np.float32)
    for sparse in (
        Packed(five, (40,), np.array([0, 3, 4, 8, 39], np.uint32)),
        Packed(five, (40,), seed=7, kept=5),
    ):
        sent, _ = Int4().encode(sparse, (), 0, backend)
        assert sent.count == 5
        back = Int4().decode(sent, backend)
        assert back.values.tolist() == five.tolist()
        assert (back.indices is sparse.indices, back.seed, back.count) == (True, sparse.seed, 5)
    arrived = replace(sent, kept=None)
    with pytest.raises(ValueError, match="3 codes and 1 scales for 40 values; expected 20 and 1"):
        Int4().decode(arrived, backend)


@backends
def test_uint8_spreads_its_levels_over_one_sided_values(backend: Backend) -> None:
    x = np.array([0, 51, 255, 12.4, 100.5], np.float32)
    sent = encoded(UInt8(), x, backend)
    assert sent.values.tolist() == [0, 51, 255, 12, 100]
    assert sent.scales is not None
    assert sent.scales.tolist() == [1.0, 0.0]


@backends
def test_uint8_keeps_tiny_gradients(backend: Backend) -> None:
    """A range + 1e-7 would make [.82e-9, 2.06e-9, -2.88e-9] of these."""
    for unit in (1e-9, 1e-20, 1e-34):
        x = np.array([1 * unit, 2 * unit, -3 * unit], np.float32)
        values = decoded(UInt8(), x, backend)
        assert np.abs(values - x).max() <= 5 * unit / 255 / 2 * 1.001


@backends
def test_uint8_keeps_zeros_and_equal_values(backend: Backend) -> None:
    chance = np.random.default_rng(3)
    x = np.where(chance.random(256) < 0.5, 0, chance.uniform(-1, 3, 256)).astype(np.float32)
    assert not decoded(UInt8(), x, backend)[x == 0].any()
    for value in (-0.75, 1e-30, 123456.7):
        equal = np.full(300, value, np.float32)
        np.testing.assert_allclose(decoded(UInt8(), equal, backend), equal, rtol=2.0**-21)


@pytest.mark.parametrize("value", [LARGEST, -LARGEST])
@KINDS
@backends
def test_the_largest_float_stays_finite(
    codec: BlockQuantizer, backend: Backend, value: float
) -> None:
    for x in ([value], [value, 0], [value, -value], [value, 0.9 * value, -1e38]):
        x = np.array(x, np.float32)
        np.testing.assert_allclose(
            decoded(codec, x, backend), x, rtol=0.01, atol=LARGEST / 14 * 1.001
        )


@KINDS
@backends
def test_what_feedback_leaves_dies_away_without_nan(
    codec: BlockQuantizer, backend: Backend
) -> None:
    """Rows without a gradient leave residuals that shrink to denormals: 7 / absmax overflows."""
    left = np.random.default_rng(2).standard_normal(512).astype(np.float32)
    for _ in range(120):
        x = np.zeros(512, np.float32)
        _, left, _ = codec.encode_residual(dense(x), left, (), 0, backend)
        assert np.isfinite(left).all()
    assert np.abs(left).max() < ABSMAX_MIN


@pytest.mark.parametrize(
    ("codec", "error"),
    [
        (Int8(4096), 0.0087),
        (Int8(1024), 0.0079),
        (Int8(256), 0.0070),
        (Int8(64), 0.0059),
        (Int4(1024), 0.143),
        (Int4(256), 0.126),
        (Int4(64), 0.108),
    ],
    ids=str,
)
def test_relative_error_of_gaussian_values(codec: BlockQuantizer, error: float) -> None:
    """The reference's table of relative L2 errors."""
    x = np.random.default_rng(1).standard_normal(2**18).astype(np.float32)
    off = np.linalg.norm(decoded(codec, x, NUMPY) - x) / np.linalg.norm(x)
    assert off == pytest.approx(error, rel=0.02)


def test_seed_figures_of_100_million_entries() -> None:
    """8 bits are 100 MB, and the scales 1.56 MB more at 256 elements to one."""
    sizes = Int8().sizes(100_000_000)
    assert sizes.values * sizes.dtype.itemsize == 100_000_000
    assert sizes.scales * 4 == 1_562_500
    assert Int4().sizes(100_000_001).values == 50_000_001


def test_texts_and_equality() -> None:
    texts = [codec.text for codec in (Int8(), Int8(1024), Int4(64), UInt8())]
    assert texts == ["int8", "int8:1024", "int4:64", "uint8"]
    assert Int8() == Int8(256) != Int8(64)
    assert Int8() != UInt8()
    assert all(kind.biased for kind in (Int8, Int4, UInt8))


@pytest.mark.parametrize("block", [0, -1, 2**31, 256.0, True, "256"])
@pytest.mark.parametrize("kind", [Int8, Int4, UInt8])
def test_a_block_out_of_range_is_refused(kind: type[BlockQuantizer], block: object) -> None:
    with pytest.raises(ValueError, match=rf"{kind.name}: a block of {block!r} elements; it must"):
        kind(block)  # type: ignore[arg-type]


def test_an_odd_block_of_int4_is_refused() -> None:
    with pytest.raises(ValueError, match="from 2 to 2147483646 and a multiple of 2"):
        Int4(255)
