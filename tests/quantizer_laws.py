"""What holds for every quantizer and backend, and the arrays to try it on."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import strategies as st

from zkv.dtypes import Array
from zkv_codecs.backend import NUMPY, Backend
from zkv_codecs.packed import Packed, Stage, dense

HAS_NUMBA = importlib.util.find_spec("numba") is not None
needs_numba = pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
NUMBA = Backend("numba")
BACKENDS = [
    pytest.param(NUMPY, id="numpy"),
    pytest.param(NUMBA, id="numba", marks=needs_numba),
]
LARGEST = float(np.finfo(np.float32).max)
SIZES = [0, 1, 2, 3, 7, 31, 32, 33, 64, 100, 255, 256, 257, 511, 1025]


@dataclass(frozen=True)
class Case:
    """An array and what was left over from the one before; both read-only."""

    x: Array
    e: Array


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Arrays of all sizes of blocks and tails, and of all magnitudes; x + e is finite."""
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.sampled_from(SIZES))
    x = chance.standard_normal(n)
    match draw(st.sampled_from(["plain", "scaled", "wide", "same", "sparse", "bits", "huge"])):
        case "scaled":
            x *= 10.0 ** draw(st.integers(-44, 37))
        case "wide":
            x *= np.exp(20 * chance.standard_normal(n))
        case "same":
            x[:] = draw(st.sampled_from([0.0, -0.0, 1.0, -3.7e-9, 2.5e30, 1e-36, 1.4e-45]))
        case "sparse":
            x[chance.random(n) < 0.8] = 0
        case "bits":
            raw = chance.integers(0, 2**32, n, np.uint32)
            raw[raw & 0x7F800000 == 0x7F800000] = 0
            x = raw.view(np.float32)
        case "huge":
            x = chance.choice([LARGEST, -LARGEST, 0, 3.3e38, -1.9e38, 1.0], n)
    x = np.clip(x, -LARGEST, LARGEST).astype(np.float32)
    e = np.zeros_like(x)
    if draw(st.booleans()) and np.abs(x).max(initial=0) < 1e38:
        e = (x * chance.uniform(-0.5, 0.5, n)).astype(np.float32)
    for array in (x, e):
        array.flags.writeable = False
    return Case(x, e)


def bits(array: Array | None) -> bytes:
    return b"" if array is None else array.tobytes()


def encoded(codec: Stage, x: Array, backend: Backend) -> Packed:
    sent, state = codec.encode(dense(x), (), 0, backend)
    assert state == ()
    return sent


def decoded(codec: Stage, x: Array, backend: Backend) -> Array:
    return codec.decode(encoded(codec, x, backend), backend).values


def check_same_bits(codec: Stage, case: Case) -> None:
    """Numba's kernels give the bits of NumPy's."""
    results = []
    for backend in (NUMPY, NUMBA):
        sent = encoded(codec, case.x, backend)
        both, left, _ = codec.encode_residual(dense(case.x), case.e, (), 0, backend)
        values = codec.decode(sent, backend).values
        results.append([sent.values, sent.scales, both.values, both.scales, left, values])
        # What huge values add up to is no codec's affair.
        total = np.full(case.x.size, 0.3, np.float32)
        with np.errstate(over="ignore"):
            codec.add(sent, 0.37, total, backend)
            codec.add(sent, 1.0, total, backend)
        results[-1].append(total)
    for one, other in zip(*results, strict=True):
        assert bits(one) == bits(other)


def check_laws(codec: Stage, case: Case, backend: Backend) -> tuple[Packed, Array, Array]:
    """What is sent has the stated sizes, and with what is left it makes what was given.

    Returns what was sent for x alone, its values, and what was given for them.
    """
    x, e = case.x, case.e
    n = x.size
    sent = encoded(codec, x, backend)
    sizes = codec.sizes(n)
    scales = 0 if sent.scales is None else sent.scales.size
    assert (sent.values.dtype, sent.values.size, scales) == (
        sizes.dtype,
        sizes.values,
        sizes.scales,
    )
    assert sent.scales is None or sent.scales.dtype == np.float32

    values = codec.decode(sent, backend).values
    assert values.dtype == np.float32
    assert values.shape == (n,)

    both, left, _ = codec.encode_residual(dense(x), e, (), 0, backend)
    t = x + e
    alone = encoded(codec, t, backend)
    assert (bits(both.values), bits(both.scales)) == (bits(alone.values), bits(alone.scales))
    # bfloat16 rounds what is beyond its largest value to infinity.
    ends = np.isfinite(left)
    whole = codec.decode(both, backend).values.astype(np.float64)[ends] + left[ends]
    assert (np.abs(whole - t[ends]) <= 2.0**-24 * np.abs(left[ends]) + 1e-45).all()

    for weight in (1.0, 0.37):
        for dtype in (np.float32, np.float64):
            total = np.full(n, 0.3, dtype)
            expected = total + values.astype(dtype) * dtype(weight)
            codec.add(sent, weight, total, backend)
            assert bits(total) == bits(expected)
    return sent, values, x


def check_feedback(codec: Stage, backend: Backend, rounds: int = 20) -> None:
    """All that was sent, and what is left at last, is all that was given, to rounding."""
    chance = np.random.default_rng(5)
    given = np.zeros(700)
    received = np.zeros(700)
    left = None
    for _ in range(rounds):
        x = chance.standard_normal(700).astype(np.float32)
        sent, left, _ = codec.encode_residual(dense(x), left, (), 0, backend)
        given += x
        codec.add(sent, 1.0, received, backend)
    assert left is not None
    np.testing.assert_allclose(received + left, given, atol=rounds * 1e-6)


def check_shapes(codec: Stage, backend: Backend) -> None:
    """0-d arrays and arrays without elements pass, and keep their shape."""
    for shape in [(), (0,), (3, 0), (0, 3), (1,), (2, 3)]:
        x = np.full(shape, 3.14, np.float32)
        sent, left, _ = codec.encode_residual(dense(x), None, (), 0, backend)
        back = codec.decode(sent, backend)
        assert back.shape == shape
        assert back.values.size == left.size == x.size
        np.testing.assert_allclose(back.values.reshape(shape), x, rtol=0.1)


def check_zeros(codec: Stage, backend: Backend) -> None:
    """Zeros stay zeros, with error feedback too."""
    for n in (1000, 1):
        left: Array | None = None
        for _ in range(3):
            x = np.zeros(n, np.float32)
            sent, left, _ = codec.encode_residual(dense(x), left, (), 0, backend)
            assert not codec.decode(sent, backend).values.any()
            assert not left.any()


def check_dtypes(codec: Stage, backend: Backend) -> None:
    """float16, float64, strided and big-endian arrays are coded as float32; the rest is refused."""
    x = np.linspace(-2, 2, 24).astype(np.float16)
    wanted = bits(decoded(codec, x.astype(np.float32), backend))
    assert bits(decoded(codec, x, backend)) == wanted
    assert bits(decoded(codec, x.astype(np.float64), backend)) == wanted
    assert bits(decoded(codec, x.astype(">f4"), backend)) == wanted
    assert bits(decoded(codec, np.repeat(x, 2)[::2], backend)) == wanted
    with pytest.raises(TypeError, match="int64"):
        dense(np.arange(3))


def check_not_finite(codec: Stage, backend: Backend) -> None:
    """NaN and Inf, which should not come this far, do no harm to other blocks or later arrays."""
    clean = np.linspace(-1, 1, 600).astype(np.float32)
    before = decoded(codec, clean, backend)
    spoilt = clean.copy()
    spoilt[:3] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore", over="ignore"):
        values = decoded(codec, spoilt, backend)
        codec.encode_residual(dense(spoilt), clean, (), 0, backend)
    block = getattr(codec, "block", 3)
    assert bits(values[block:]) == bits(before[block:])
    assert bits(decoded(codec, clean, backend)) == bits(before)


def check_refusals(codec: Stage, backend: Backend) -> None:
    """Codes, scales and totals of wrong sizes are refused before a kernel runs."""
    sent = encoded(codec, np.ones(600, np.float32), backend)
    with pytest.raises(ValueError, match=r"600 values to add to 599"):
        codec.add(sent, 1.0, np.zeros(599, np.float32), backend)
    if sent.scales is None:
        return
    for wrong in (
        replace(sent, scales=None),
        replace(sent, scales=sent.scales[:-1]),
        replace(sent, shape=(1600,), values=np.resize(sent.values, 1600)),
    ):
        with pytest.raises(ValueError, match=r"scales for \d+ values; expected"):
            codec.decode(wrong, backend)
        with pytest.raises(ValueError, match=r"scales for \d+ values; expected"):
            codec.add(wrong, 1.0, np.zeros(wrong.size, np.float32), backend)


def check_kernels(backend: Backend, family: str) -> None:
    """Each kernel is compiled once, ahead, for writable and read-only arrays; strided ones fail."""
    module = backend.family(family)
    kernels = [one for one in vars(module).values() if getattr(one, "signatures", None)]
    ahead = [one for one in kernels if one.py_func.__name__.endswith(("code", "add", "residual"))]
    assert len(ahead) >= 8
    assert all(len(one.signatures) == 1 for one in ahead)
    strided = np.zeros(20, np.float32)[::2]
    with pytest.raises(TypeError, match="No matching definition"):
        ahead[0](*(strided for _ in ahead[0].signatures[0]))
