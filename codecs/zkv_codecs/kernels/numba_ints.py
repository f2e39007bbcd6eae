"""Block integers in Numba: the functions of `numpy_ints`, bit for bit, in one pass over memory.

Slices instead of index ranges, so that the loops vectorise; read-only inputs in the signatures, so
that an array over a received frame does not compile a kernel again.
"""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.numba_types import F4, F4_IN, I1, I1_IN, INT, helper, kernel
from zkv_codecs.kernels.numpy_ints import ABSMAX_MIN


@helper
def _absmax_bits(x: Array) -> np.int32:
    """Return the bits of the largest magnitude: maxima of floats do not vectorise (NaN)."""
    bits = x.view(np.int32)
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    return largest


@kernel(F4_IN, INT, I1, F4)
def int8_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """See `numpy_ints.int8_encode`."""
    top = np.float32(127)
    scale_bits = scales.view(np.int32)
    for at in range(scales.size):
        xs = x[at * block : (at + 1) * block]
        qs = codes[at * block : (at + 1) * block]
        scale_bits[at] = _absmax_bits(xs)
        absmax = scales[at]
        if absmax >= ABSMAX_MIN:
            factor = top / absmax
            scales[at] = absmax / top
            for i in range(xs.size):
                qs[i] = np.int8(np.rint(xs[i] * factor))
        else:
            scales[at] = 0
            qs[:] = 0


@kernel(F4_IN, F4_IN, INT, I1, F4, F4)
def int8_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """See `numpy_ints.int8_encode_residual`."""
    top = np.float32(127)
    scale_bits = scales.view(np.int32)
    for at in range(scales.size):
        xs = x[at * block : (at + 1) * block]
        es = e[at * block : (at + 1) * block]
        ts = out[at * block : (at + 1) * block]
        qs = codes[at * block : (at + 1) * block]
        for i in range(xs.size):
            ts[i] = xs[i] + es[i]
        scale_bits[at] = _absmax_bits(ts)
        absmax = scales[at]
        if absmax >= ABSMAX_MIN:
            factor = top / absmax
            scale = absmax / top
            scales[at] = scale
            for i in range(xs.size):
                code = np.int8(np.rint(ts[i] * factor))
                qs[i] = code
                ts[i] = ts[i] - np.float32(code) * scale
        else:
            scales[at] = 0
            qs[:] = 0


@kernel(I1_IN, F4_IN, INT, F4)
def int8_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_ints.int8_decode`."""
    for at in range(scales.size):
        qs = codes[at * block : (at + 1) * block]
        ys = out[at * block : (at + 1) * block]
        scale = scales[at]
        for i in range(qs.size):
            ys[i] = np.float32(qs[i]) * scale


@kernel(I1_IN, F4_IN, INT, "f8", F4)
def int8_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_ints.int8_add`."""
    by = np.float32(weight)
    for at in range(scales.size):
        qs = codes[at * block : (at + 1) * block]
        ys = total[at * block : (at + 1) * block]
        scale = scales[at]
        for i in range(qs.size):
            ys[i] = ys[i] + (np.float32(qs[i]) * scale) * by
