"""What the tests of single codecs share: both CPU backends, and arrays in and out of a stage."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from zkv.dtypes import Array
from zkv_codecs.backend import Backend
from zkv_codecs.packed import Packed, Stage, State, dense

NUMPY, NUMBA = Backend("numpy"), Backend("numba")
BACKENDS = [
    pytest.param(NUMPY, id="numpy"),
    pytest.param(
        NUMBA,
        id="numba",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("numba") is None, reason="numba is not installed"
        ),
    ),
]
SIZES = (0, 1, 2, 3, 4, 7, 8, 9, 63, 64, 65, 255, 256, 257, 511, 513, 1000, 4095, 4096, 4097, 9001)
"""No whole byte, no whole block, no whole group of blocks, and neighbours of these."""

COMPILING = pytest.mark.timeout(300)
"""Kernels that none has compiled yet take longer than a test may, on a machine with other work."""

OVERFLOWS = pytest.mark.filterwarnings("ignore:overflow encountered")


def f4(*values: Any) -> Array:
    return np.array(values, np.float32)


def normal(size: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


def bits_of(*arrays: Array | None) -> list[tuple[str, bytes]]:
    """Dtype and bytes of arrays, so that −0.0 and 0.0 are two things."""
    return [(one.dtype.str, one.tobytes()) for one in arrays if one is not None]


def encoded(stage: Stage, x: Array, backend: Backend = NUMPY, seed: int = 0) -> Packed:
    return stage.encode(dense(x), stage.start(x.shape), seed, backend)[0]


def decoded(stage: Stage, x: Array, backend: Backend = NUMPY, seed: int = 0) -> Array:
    return stage.decode(encoded(stage, x, backend, seed), backend).values


def everything(
    stage: Stage, x: Array, e: Array, seed: int, backend: Backend
) -> list[tuple[str, bytes]]:
    """All that a stage makes of x and a residual e, as bytes."""
    state: State = (e,) if stage.remembers else ()
    sent, after = stage.encode(dense(x), state, seed, backend)
    made = [sent.values, sent.scales, *after, stage.decode(sent, backend).values]
    if stage.feedback:
        again, left, _ = stage.encode_residual(dense(x), e, (), seed, backend)
        made += [again.values, again.scales, left]
    for weight in (1.0, 0.3, -2.0):
        for dtype in (np.float32, np.float64):
            total = e.astype(dtype)
            stage.add(sent, weight, total, backend)
            made.append(total)
    return bits_of(*made)


def sizes_are_right(stage: Stage, sent: Packed, count: int) -> bool:
    sizes = stage.sizes(count)
    scales = 0 if sent.scales is None else sent.scales.size
    return (
        sent.values.dtype == sizes.dtype
        and (sent.values.size, scales) == (sizes.values, sizes.scales)
        and (sent.scales is None or sent.scales.dtype == np.float32)
    )


def blocks(x: Array, block: int) -> list[Array]:
    return [x[at : at + block] for at in range(0, x.size, block)]
