"""Narrow floats: laws, the reference's vectors, and its pitfalls."""

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
from zkv_codecs.floats import Bf16, Fp8E4M3, Fp8E5M2, Fp16, ScaledFp16
from zkv_codecs.kernels.numpy_floats import HUGE, LANES, lane_sums
from zkv_codecs.kernels.numpy_ints import ABSMAX_MIN
from zkv_codecs.packed import Packed, Stage
from zkv_codecs.quantizers import BlockQuantizer

backends = pytest.mark.parametrize("backend", BACKENDS)
KINDS = pytest.mark.parametrize(
    "codec",
    [Fp16(), Bf16(), ScaledFp16(100), Fp8E4M3(), Fp8E5M2()],
    ids=lambda codec: codec.text,
)
blocks = st.sampled_from([256, 1, 16, 100, 2**20])
FP8 = pytest.mark.parametrize(
    ("kind", "name", "top"),
    [(Fp8E4M3, "float8_e4m3fn", 448), (Fp8E5M2, "float8_e5m2", 57344)],
    ids=["e4m3", "e5m2"],
)


def worst(codec: Stage, x: Array, sent: Packed) -> Array:
    """The largest error that the codec's docstring allows for each element."""
    size = np.abs(x).astype(np.float64)
    if isinstance(codec, Fp16):
        return np.maximum(2.0**-11 * size, 2.0**-25) + np.maximum(size - 65504, 0)
    if isinstance(codec, Bf16):
        return np.where(size > 3.3961e38, np.inf, np.maximum(2.0**-8 * size, 2.0**-134))
    assert isinstance(codec, BlockQuantizer)
    assert sent.scales is not None
    starts = np.arange(0, x.size, codec.block)
    absmax = np.repeat(np.maximum.reduceat(size, starts), codec.block)[: x.size]
    if isinstance(codec, ScaledFp16):
        mean = np.repeat(sent.scales[0::2].astype(np.float64), codec.block)[: x.size]
        deviation = np.repeat(sent.scales[1::2].astype(np.float64), codec.block)[: x.size]
        off = np.abs(x - mean)
        bound = 2.0**-11 * off + 2.0**-25 * deviation + 4e-7 * (off + size + np.abs(mean)) + 1e-43
        bound += np.where(absmax > HUGE, absmax / 256, 0)
        return np.where(absmax < ABSMAX_MIN, absmax, bound)
    mantissa, small, dead = (4, 458752, 448) if isinstance(codec, Fp8E4M3) else (3, 7.5161e9, 57344)
    bound = np.maximum(2.0**-mantissa * size, absmax / small) * (1 + 1e-5)
    return np.where(absmax < dead * 2.0**-126, absmax, bound)


def blocked(codec: Stage, block: int) -> Stage:
    return replace(codec, block=block) if isinstance(codec, BlockQuantizer) else codec


@needs_numba
@KINDS
@given(block=blocks, case=cases())
def test_numba_gives_the_bits_of_numpy(codec: Stage, block: int, case: Case) -> None:
    check_same_bits(blocked(codec, block), case)


@KINDS
@backends
@given(block=blocks, case=cases())
def test_sizes_errors_and_what_is_left(
    codec: Stage, backend: Backend, block: int, case: Case
) -> None:
    codec = blocked(codec, block)
    sent, values, x = check_laws(codec, case, backend)
    if x.size:
        assert (np.abs(values.astype(np.float64) - x) <= worst(codec, x, sent)).all()


@KINDS
@backends
def test_nothing_is_lost_under_feedback(codec: Stage, backend: Backend) -> None:
    check_feedback(codec, backend)


@KINDS
@backends
def test_d04_d05_scalars_and_empty_arrays(codec: Stage, backend: Backend) -> None:
    """D04, D05: a 0-d array, and arrays with zero elements."""
    check_shapes(codec, backend)


@KINDS
@backends
def test_d12_zeros(codec: Stage, backend: Backend) -> None:
    """D12: an all-zero tensor through a quantizer."""
    check_zeros(codec, backend)


@backends
def test_d13_sums_are_wider_than_what_is_sent(backend: Backend) -> None:
    """D13: the sum of fp16 gradients overflows."""
    total = np.zeros(4, np.float32)
    for _ in range(8):
        Fp16().add(encoded(Fp16(), np.full(4, 20000, np.float32), backend), 1.0, total, backend)
    assert (total / 8).tolist() == [20000] * 4


@KINDS
@backends
def test_d15_dtypes(codec: Stage, backend: Backend) -> None:
    """D15: a codec with fp16 or f8 input."""
    check_dtypes(codec, backend)


@KINDS
@backends
def test_d17_nan_stays_in_its_block(codec: Stage, backend: Backend) -> None:
    """D17: NaN enters the residual; the codec itself keeps nothing of it."""
    check_not_finite(codec, backend)


@KINDS
@backends
def test_wrong_sizes_are_refused(codec: Stage, backend: Backend) -> None:
    check_refusals(codec, backend)


@needs_numba
@pytest.mark.parametrize("family", ["floats", "fp8"])
def test_kernels_are_compiled_once_and_ahead(family: str) -> None:
    check_kernels(NUMBA, family)


def of_bits(*bits: int) -> Array:
    return np.array(bits, np.uint32).view(np.float32)


def patterns() -> Array:
    """Float32 of all exponents and signs, with what stands next to the ties of 16 and 8 bits."""
    high = np.arange(0, 2**32, 2**19, np.uint64)
    near = np.array([-1, 0, 1, 0x1000, 0x0FFF, 0x8000, 0x7FFF, 0x8001], np.int64).astype(np.uint64)
    every = (high[:, None] + near[None, :]).astype(np.uint32).reshape(-1)
    return every.view(np.float32)


@needs_numba
def test_numba_narrows_all_kinds_of_floats_as_numpy() -> None:
    x = patterns()
    for codec in (Fp16(), Bf16()):
        numba, numpy = (encoded(codec, x, backend).values for backend in (NUMBA, NUMPY))
        known = ~np.isnan(x)
        assert (numba == numpy)[known].all()
        assert np.isnan(codec.decode(Packed(numba, x.shape), NUMBA).values[~known]).all()


@pytest.mark.parametrize("codec", [Fp16(), Bf16(), Fp8E4M3(), Fp8E5M2()], ids=lambda one: one.text)
@backends
def test_all_codes_decode_as_the_format_says(codec: Stage, backend: Backend) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    width, name = {
        "fp16": (np.uint16, np.float16),
        "bf16": (np.uint16, ml_dtypes.bfloat16),
        "fp8_e4m3": (np.uint8, ml_dtypes.float8_e4m3fn),
        "fp8_e5m2": (np.uint8, ml_dtypes.float8_e5m2),
    }[codec.text]
    codes = np.arange(np.iinfo(width).max + 1).astype(width)
    sizes = codec.sizes(codes.size)
    scales = np.ones(sizes.scales, np.float32) if sizes.scales else None
    with np.errstate(invalid="ignore"):
        values = codec.decode(Packed(codes, codes.shape, None, scales), backend).values
    expected = codes.view(name).astype(np.float32)
    np.testing.assert_array_equal(values, expected)
    known = ~np.isnan(expected)
    assert (np.signbit(values) == np.signbit(expected))[known].all()


@backends
def test_fp16_vectors(backend: Backend) -> None:
    x = np.array([65519, 65520, -1e30, 2.0**-25, 2.0**-25 * 1.0001, -0.0, np.inf], np.float32)
    values = decoded(Fp16(), x, backend)
    assert values.tolist() == [65504, 65504, -65504, 0, 2.0**-24, 0, 65504]
    assert np.signbit(values[5])
    assert np.isnan(decoded(Fp16(), np.array([np.nan, -np.nan], np.float32), backend)).all()


@backends
def test_bf16_vectors(backend: Backend) -> None:
    """The reference's: ties to even, overflow to infinity, and a NaN stays one."""
    x = of_bits(
        0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 1, 0x7F800001, 0xFF800000
    )  # fmt: skip
    x = np.append(x, of_bits(0x7FFFFFFF))
    assert [f"{code:04x}" for code in encoded(Bf16(), x, backend).values] == [
        "3f80", "3f80", "3f82", "3f81", "7f80", "0000", "7fc0", "ff80", "7fff"
    ]  # fmt: skip


@backends
def test_bf16_is_the_one_of_ml_dtypes(backend: Backend) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = patterns()
    x = x[~np.isnan(x)]
    with np.errstate(over="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    assert (encoded(Bf16(), x, backend).values == expected).all()


@FP8
@backends
def test_fp8_is_the_one_of_ml_dtypes_after_clipping(
    kind: type[Fp8E4M3] | type[Fp8E5M2], name: str, top: float, backend: Backend
) -> None:
    """A block that reaches the format's largest value has scale 1."""
    form = getattr(pytest.importorskip("ml_dtypes"), name)
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(form).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    ties = (values[1:] + values[:-1]) / np.float32(2)
    every = [
        values,
        ties,
        np.nextafter(ties, np.float32(9e9)),
        np.nextafter(ties, -np.float32(9e9)),
    ]
    chance = np.random.default_rng(0)
    every.append((top * chance.uniform(-1, 1, 20000)).astype(np.float32))
    every.append(np.exp(chance.uniform(-20, np.log(top), 20000)).astype(np.float32))
    x = np.concatenate([*every, patterns()])
    x = np.append(x[np.abs(x) <= top], np.float32([top, -0.0]))
    sent = encoded(kind(x.size), x, backend)
    assert sent.scales is not None
    assert sent.scales.tolist() == [1]
    assert (sent.values == x.astype(form).view(np.uint8)).all()


@FP8
@backends
def test_fp8_scales_each_block_to_its_largest_value(
    kind: type[Fp8E4M3] | type[Fp8E5M2], name: str, top: float, backend: Backend
) -> None:
    x = np.array([1e-9, -2e-9, 0, 3e20, -1e20, 0], np.float32)
    sent = encoded(kind(3), x, backend)
    assert sent.scales is not None
    np.testing.assert_allclose(sent.scales, [2e-9 / top, 3e20 / top], rtol=1e-7)
    np.testing.assert_allclose(kind(3).decode(sent, backend).values, x, rtol=2.0**-3)


@backends
def test_sfp16_is_of_mean_and_deviation(backend: Backend) -> None:
    x = (5 + 0.01 * np.random.default_rng(0).standard_normal(3000)).astype(np.float32)
    sent = encoded(ScaledFp16(1000), x, backend)
    assert sent.scales is not None
    rows = x.reshape(3, 1000).astype(np.float64)
    np.testing.assert_allclose(sent.scales[0::2], rows.mean(1), rtol=1e-6)
    np.testing.assert_allclose(sent.scales[1::2], rows.std(1), rtol=1e-5)
    wanted = (rows - rows.mean(1)[:, None]) / rows.std(1)[:, None]
    halves = sent.values.view(np.float16).astype(np.float64).reshape(3, 1000)
    np.testing.assert_allclose(halves, wanted, rtol=2.0**-11, atol=2e-4)
    # What float16 itself would make of them is 16 times as far off.
    error = np.abs(ScaledFp16(1000).decode(sent, backend).values - x).max()
    assert error * 16 < np.abs(x.astype(np.float16) - x).max()


@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e-10, 1e10, 1e30, 1e37])
@backends
def test_sfp16_neither_overflows_nor_underflows(backend: Backend, scale: float) -> None:
    """One element far from all others is as far as any can be: √block deviations."""
    x = np.full(4096, 2 * scale, np.float32)
    x[77] = -31 * scale
    values = decoded(ScaledFp16(4096), x, backend)
    np.testing.assert_allclose(values, x, rtol=2.0**-10)
    x = (scale * np.random.default_rng(0).uniform(1.5, 9, 1024)).astype(np.float32)
    np.testing.assert_allclose(decoded(ScaledFp16(), x, backend), x, rtol=2.0**-10)


@backends
def test_sfp16_keeps_equal_values(backend: Backend) -> None:
    for value in (-0.75, 1e-30, 123456.7, 0.1):
        equal = np.full(1500, value, np.float32)
        np.testing.assert_allclose(decoded(ScaledFp16(), equal, backend), equal, rtol=1e-6)


@pytest.mark.parametrize("value", [LARGEST, -LARGEST])
@pytest.mark.parametrize("codec", [ScaledFp16(), Fp8E4M3(), Fp8E5M2()], ids=lambda one: one.text)
@backends
def test_the_largest_float_stays_finite(codec: Stage, backend: Backend, value: float) -> None:
    for x in ([value], [value, 0], [value, -value], [value, 0.9 * value, -1e38], [value] + [0] * 9):
        x = np.array(x, np.float32)
        np.testing.assert_allclose(decoded(codec, x, backend), x, rtol=0.125, atol=1e34)


@pytest.mark.parametrize("codec", [Fp8E4M3(), Fp8E5M2()], ids=lambda one: one.text)
@backends
def test_tiny_blocks_are_left_to_feedback(codec: BlockQuantizer, backend: Backend) -> None:
    sent = encoded(codec, np.array([1e-38, -3e-39, 1e-45], np.float32), backend)
    assert sent.values.tolist() == [0, 0x80, 0]
    assert sent.scales is not None
    assert sent.scales.tolist() == [0]


def test_lanes_are_added_in_the_stated_order() -> None:
    chance = np.random.default_rng(4)
    y = np.zeros(5 * LANES, np.float32)
    y[:150] = chance.standard_normal(150) * 10.0 ** chance.integers(-6, 7, 150)
    lanes = [np.float32(0)] * LANES
    for at, value in enumerate(y):
        lanes[at % LANES] = lanes[at % LANES] + value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[j] + lanes[j + half] for j in range(half)]
    assert lane_sums(y.reshape(1, 5, LANES)).tolist() == [float(lanes[0])]
    assert float(lanes[0]) != float(np.float32(y.astype(np.float64).sum()))


def test_seed_figures_of_100_million_entries() -> None:
    """16 bits are 200 MB, 8 bits 100 MB, and the scales 1.56 MB more at 256 elements to one."""
    for codec, size, scales in ((Fp16(), 2, 0), (Bf16(), 2, 0), (Fp8E4M3(), 1, 390_625)):
        sizes = codec.sizes(100_000_000)
        assert (sizes.values, sizes.dtype.itemsize, sizes.scales) == (100_000_000, size, scales)


def test_texts_and_equality() -> None:
    codecs = [Fp16(), Bf16(), ScaledFp16(), ScaledFp16(256), Fp8E4M3(), Fp8E5M2(64)]
    texts = ["fp16", "bf16", "sfp16", "sfp16:256", "fp8_e4m3", "fp8_e5m2:64"]
    assert [codec.text for codec in codecs] == texts
    assert (Fp16(), ScaledFp16(1024)) == (Fp16(), ScaledFp16())
    assert Fp16() != Bf16()
    assert [kind.biased for kind in (Fp16, Bf16, ScaledFp16, Fp8E4M3, Fp8E5M2)] == [
        False, False, False, True, True
    ]  # fmt: skip


@pytest.mark.parametrize("block", [0, -1, 2**20 + 1, 256.0, True])
def test_a_block_out_of_range_is_refused(block: object) -> None:
    with pytest.raises(ValueError, match=rf"sfp16: a block of {block!r} .* from 1 to 1048576"):
        ScaledFp16(block)  # type: ignore[arg-type]


def test_float16_by_instruction_and_by_integers_are_the_same() -> None:
    """Every float16, and the floats around every one that a float16 ends or begins at."""
    floats = pytest.importorskip("zkv_codecs.kernels.numba_floats")
    if not floats.has_instruction():
        pytest.skip("this CPU has no instruction for float16, or Numba compiles for another one")
    codes = np.arange(2**16, dtype=np.uint16)
    numbers = codes[np.isfinite(codes.view(np.float16))]
    for one in numbers:
        given = floats.half_value_by_integers(one)
        assert floats.half_value_by_instruction(one).hex() == given.hex()
    exact = numbers.view(np.float16).astype(np.float32)
    halves = exact.view(np.uint32)[:, None] + np.array([0xFFF, 0x1000, 0x1001], np.uint32)
    special = np.array([np.nan, np.inf, -np.inf, 65519.9, 65520, 1e9, -1e9, 1e-45], np.float32)
    for value in (*exact[::7], *halves.view(np.float32).reshape(-1)[::11], *special):
        expected = floats.half_bits_by_integers(value)
        assert floats.half_bits_by_instruction(value) == expected, value
