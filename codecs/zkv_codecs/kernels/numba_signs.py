"""One and two bits per element in Numba: the functions of `numpy_signs`, bit for bit.

Those with means of blocks stand in `numba_means`.
"""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.numba_blocks import (
    GATHER_HIGH,
    GROUP,
    SPREAD_HIGH,
    SPREAD_LOW,
    gather,
    signs,
    spread,
)
from zkv_codecs.kernels.numba_means import (
    onebit_add,
    onebit_decode,
    onebit_encode,
    onebit_encode_residual,
    twomeans_add,
    twomeans_decode,
    twomeans_encode,
    twomeans_encode_residual,
)
from zkv_codecs.kernels.numba_types import F4, F4_IN, U1, U1_IN, kernel, part

__all__ = [
    "mx1bit_add",
    "mx1bit_decode",
    "mx1bit_encode",
    "mx2bit_add",
    "mx2bit_decode",
    "mx2bit_encode",
    "onebit_add",
    "onebit_decode",
    "onebit_encode",
    "onebit_encode_residual",
    "signs_add",
    "signs_decode",
    "signs_encode",
    "signs_settle",
    "twomeans_add",
    "twomeans_decode",
    "twomeans_encode",
    "twomeans_encode_residual",
]

ONE = np.float32(1)
NOTHING = np.float32(0)


# --- signs alone -----------------------------------------------------------------------------


@kernel(F4_IN, U1)
def signs_encode(x: Array, bits: Array) -> None:
    """See `numpy_signs.signs_encode`."""
    flags = np.empty(GROUP, np.uint8)
    for start in range(0, x.size, GROUP):
        signs(x[start : start + GROUP], flags, bits[start >> 3 : (start + GROUP) >> 3])


@kernel(U1_IN, F4)
def signs_decode(bits: Array, out: Array) -> None:
    """See `numpy_signs.signs_decode`."""
    flags = np.empty(GROUP, np.uint8)
    for start in range(0, out.size, GROUP):
        ys = out[start : start + GROUP]
        spread(bits[start >> 3 : (start + GROUP) >> 3], SPREAD_LOW, flags)
        for i in range(ys.size):
            ys[i] = -ONE if flags[i] else ONE


@kernel(U1_IN, "f8", F4)
def signs_add(bits: Array, weight: float, total: Array) -> None:
    """See `numpy_signs.signs_add`."""
    by = np.float32(weight)
    flags = np.empty(GROUP, np.uint8)
    for start in range(0, total.size, GROUP):
        ys = total[start : start + GROUP]
        spread(bits[start >> 3 : (start + GROUP) >> 3], SPREAD_LOW, flags)
        for i in range(ys.size):
            ys[i] = ys[i] + (-by if flags[i] else by)


@kernel(F4_IN, F4)
def signs_settle(votes: Array, out: Array) -> None:
    """See `numpy_signs.signs_settle`."""
    for i in range(votes.size):
        vote = votes[i]
        out[i] = np.float32(np.int32(vote > 0) - np.int32(vote < 0))


# --- MXNet's thresholds ------------------------------------------------------------------------


@kernel(F4_IN, F4_IN, "f8", U1, F4)
def mx1bit_encode(x: Array, e: Array, threshold: float, bits: Array, out: Array) -> None:
    """See `numpy_signs.mx1bit_encode`."""
    top = np.float32(threshold)
    flags = np.empty(GROUP, np.uint8)
    for start in range(0, x.size, GROUP):
        xs = x[start : start + GROUP]
        es = e[start : start + GROUP]
        ts = out[start : start + GROUP]
        flags[xs.size & -8 : (xs.size + 7) & -8] = 0
        for i in range(xs.size):
            t = xs[i] + es[i]
            flags[i] = np.uint8(t > top)
            ts[i] = t - ONE if t > top else t + ONE
        gather(flags.view(np.uint64), GATHER_HIGH, bits[start >> 3 : (start + GROUP) >> 3])


@kernel(U1_IN, F4)
def mx1bit_decode(bits: Array, out: Array) -> None:
    """See `numpy_signs.mx1bit_decode`."""
    flags = np.empty(GROUP, np.uint8)
    for start in range(0, out.size, GROUP):
        ys = out[start : start + GROUP]
        spread(bits[start >> 3 : (start + GROUP) >> 3], SPREAD_HIGH, flags)
        for i in range(ys.size):
            ys[i] = ONE if flags[i] else -ONE


@kernel(U1_IN, "f8", F4)
def mx1bit_add(bits: Array, weight: float, total: Array) -> None:
    """See `numpy_signs.mx1bit_add`."""
    by = np.float32(weight)
    flags = np.empty(GROUP, np.uint8)
    for start in range(0, total.size, GROUP):
        ys = total[start : start + GROUP]
        spread(bits[start >> 3 : (start + GROUP) >> 3], SPREAD_HIGH, flags)
        for i in range(ys.size):
            ys[i] = ys[i] + (by if flags[i] else -by)


@part
def _spread_pairs(codes: Array, pairs: Array) -> None:
    """Write the four codes, 0 to 3, of each byte, the first from its highest bits."""
    fours = pairs.view(np.uint32)
    for k in range(codes.size):
        code = np.uint32(codes[k])
        apart = (
            (code >> np.uint32(6))
            | (code << np.uint32(4))
            | (code << np.uint32(14))
            | (code << np.uint32(24))
        )
        fours[k] = np.uint32(apart & np.uint32(0x03030303))


@kernel(F4_IN, F4_IN, "f8", U1, F4)
def mx2bit_encode(x: Array, e: Array, threshold: float, codes: Array, out: Array) -> None:
    """See `numpy_signs.mx2bit_encode`."""
    top = np.float32(threshold)
    pairs = np.empty(GROUP, np.uint8)
    fours = pairs.view(np.uint32)
    for start in range(0, x.size, GROUP):
        xs = x[start : start + GROUP]
        es = e[start : start + GROUP]
        ts = out[start : start + GROUP]
        pairs[xs.size & -4 : (xs.size + 3) & -4] = 0
        for i in range(xs.size):
            t = xs[i] + es[i]
            pairs[i] = np.uint8(3) if t >= top else (np.uint8(2) if t <= -top else np.uint8(0))
            ts[i] = t - top if t >= top else (t + top if t <= -top else t)
        packed = codes[start >> 2 : (start + GROUP) >> 2]
        for k in range(packed.size):
            four = np.uint32(fours[k])
            packed[k] = np.uint8(
                (four << np.uint32(6))
                | (four >> np.uint32(4))
                | (four >> np.uint32(14))
                | (four >> np.uint32(24))
            )


@kernel(U1_IN, "f8", F4)
def mx2bit_decode(codes: Array, threshold: float, out: Array) -> None:
    """See `numpy_signs.mx2bit_decode`."""
    top = np.float32(threshold)
    pairs = np.empty(GROUP, np.uint8)
    for start in range(0, out.size, GROUP):
        ys = out[start : start + GROUP]
        _spread_pairs(codes[start >> 2 : (start + GROUP) >> 2], pairs)
        for i in range(ys.size):
            ys[i] = top if pairs[i] == 3 else (-top if pairs[i] == 2 else NOTHING)


@kernel(U1_IN, "f8", "f8", F4)
def mx2bit_add(codes: Array, threshold: float, weight: float, total: Array) -> None:
    """See `numpy_signs.mx2bit_add`."""
    product = np.float32(threshold) * np.float32(weight)
    nothing = NOTHING * np.float32(weight)
    pairs = np.empty(GROUP, np.uint8)
    for start in range(0, total.size, GROUP):
        ys = total[start : start + GROUP]
        _spread_pairs(codes[start >> 2 : (start + GROUP) >> 2], pairs)
        for i in range(ys.size):
            ys[i] = ys[i] + (product if pairs[i] == 3 else (-product if pairs[i] == 2 else nothing))
