"""Signs with the means of blocks in Numba: functions of `numpy_signs`, bit for bit."""

from __future__ import annotations

import math

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.numba_blocks import (
    GATHER_LOW,
    GROUP,
    SPREAD_LOW,
    block_sums,
    gather,
    plus,
    run_sum,
    signs,
    spread,
)
from zkv_codecs.kernels.numba_types import F4, F4_IN, INT, U1, U1_IN, helper, kernel, part
from zkv_codecs.kernels.numpy_blocks import LARGEST, SCALE_MIN

NOTHING = np.float32(0)


@helper
def _mean(total: np.float32, count: int, unit: np.float32) -> np.float32:
    """See `numpy_signs._means`."""
    mean = min(total / (np.float32(count) * unit), LARGEST)
    return mean if mean >= SCALE_MIN else NOTHING


# --- the mean of |x| ---------------------------------------------------------------------------


@part
def _onebit(x: Array, block: int, flags: Array, terms: Array, bits: Array, scales: Array) -> None:
    """Write flags, bits and scales of one group."""
    signs(x, flags, bits)
    unit = np.float32(0.5 / block)
    for i in range(x.size):
        terms[i] = abs(x[i]) * unit
    terms[x.size : scales.size * block] = 0
    block_sums(terms, block, scales)
    for at in range(scales.size):
        scales[at] = _mean(scales[at], min(block, x.size - at * block), unit)


@kernel(F4_IN, INT, U1, F4)
def onebit_encode(x: Array, block: int, bits: Array, scales: Array) -> None:
    """See `numpy_signs.onebit_encode`."""
    flags = np.empty(GROUP, np.uint8)
    terms = np.empty(GROUP, np.float32)
    for start in range(0, x.size, GROUP):
        xs = x[start : start + GROUP]
        bs = bits[start >> 3 : (start + GROUP) >> 3]
        ss = scales[start // block : (start + GROUP) // block]
        _onebit(xs, block, flags, terms, bs, ss)


@part
def _onebit_sums(x: Array, e: Array, flags: Array, lanes: Array, scales: Array, t: Array) -> None:
    """Write sums, flags and the means of whole blocks of 256: all that needs x and e, in one loop.

    It goes through the four quarters of a block at once, which are the first two steps of halving.
    Indices are unsigned, as signed ones are checked for being negative and do not vectorise.
    """
    unit = np.float32(0.5 / 256)
    for at in range(scales.size):
        first = np.uint64(at) * np.uint64(256)
        for j in range(64):
            a = first + np.uint64(j)
            b, c, d = a + np.uint64(64), a + np.uint64(128), a + np.uint64(192)
            ta, tb = np.float32(x[a] + e[a]), np.float32(x[b] + e[b])
            tc, td = np.float32(x[c] + e[c]), np.float32(x[d] + e[d])
            t[a], t[b], t[c], t[d] = ta, tb, tc, td
            flags[a] = np.uint8(ta.view(np.uint32) >> np.uint32(31))
            flags[b] = np.uint8(tb.view(np.uint32) >> np.uint32(31))
            flags[c] = np.uint8(tc.view(np.uint32) >> np.uint32(31))
            flags[d] = np.uint8(td.view(np.uint32) >> np.uint32(31))
            lanes[j] = (abs(ta) * unit + abs(tc) * unit) + (abs(tb) * unit + abs(td) * unit)
        scales[at] = _mean(run_sum(lanes), 256, unit)


@part
def _onebit_whole(x: Array, e: Array, bits: Array, scales: Array, out: Array) -> None:
    """Encode whole blocks of 256 in pieces of two, whose sums stay near."""
    flags, lanes = np.empty(512, np.uint8), np.empty(64, np.float32)
    sums = np.empty(512, np.float32)
    eights = flags.view(np.uint64)
    for start in range(0, x.size, 512):
        rs = out[start : start + 512]
        ss = scales[start >> 8 : (start + 512) >> 8]
        _onebit_sums(x[start : start + 512], e[start : start + 512], flags, lanes, ss, sums)
        gather(eights, GATHER_LOW, bits[start >> 3 : (start + 512) >> 3])
        for at in range(ss.size):
            first = np.uint64(at) * np.uint64(256)
            scale = ss[at]
            for j in range(256):
                i = first + np.uint64(j)
                rs[i] = sums[i] - math.copysign(scale, sums[i])


@kernel(F4_IN, F4_IN, INT, U1, F4, F4)
def onebit_encode_residual(
    x: Array, e: Array, block: int, bits: Array, scales: Array, out: Array
) -> None:
    """See `numpy_signs.onebit_encode_residual`."""
    whole = x.size & -256 if block == 256 else 0
    _onebit_whole(x[:whole], e[:whole], bits[: whole >> 3], scales[: whole >> 8], out[:whole])
    flags = np.empty(GROUP, np.uint8)
    terms = np.empty(GROUP, np.float32)
    for start in range(whole, x.size, GROUP):
        xs = x[start : start + GROUP]
        es = e[start : start + GROUP]
        ts = out[start : start + GROUP]
        bs = bits[start >> 3 : (start + GROUP) >> 3]
        ss = scales[start // block : (start + GROUP) // block]
        plus(xs, es, ts)
        _onebit(ts, block, flags, terms, bs, ss)
        for at in range(ss.size):
            rs = ts[at * block : (at + 1) * block]
            scale = ss[at]
            for i in range(rs.size):
                rs[i] = rs[i] - math.copysign(scale, rs[i])


@kernel(U1_IN, F4_IN, INT, F4)
def onebit_decode(bits: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_signs.onebit_decode`."""
    flags = np.empty(GROUP, np.uint8)
    for start in range(0, out.size, GROUP):
        spread(bits[start >> 3 : (start + GROUP) >> 3], SPREAD_LOW, flags)
        ss = scales[start // block : (start + GROUP) // block]
        group = out[start : start + GROUP]
        for at in range(ss.size):
            ys = group[at * block : (at + 1) * block]
            marks = flags[at * block : (at + 1) * block]
            scale = ss[at]
            for i in range(ys.size):
                ys[i] = -scale if marks[i] else scale


@kernel(U1_IN, F4_IN, INT, "f8", F4)
def onebit_add(bits: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_signs.onebit_add`."""
    flags = np.empty(GROUP, np.uint8)
    for start in range(0, total.size, GROUP):
        spread(bits[start >> 3 : (start + GROUP) >> 3], SPREAD_LOW, flags)
        ss = scales[start // block : (start + GROUP) // block]
        group = total[start : start + GROUP]
        for at in range(ss.size):
            ys = group[at * block : (at + 1) * block]
            marks = flags[at * block : (at + 1) * block]
            product = ss[at] * np.float32(weight)
            for i in range(ys.size):
                ys[i] = ys[i] + (-product if marks[i] else product)


# --- the means of both signs -------------------------------------------------------------------


@part
def _twomeans(
    x: Array, block: int, flags: Array, terms: Array, bits: Array, means: Array, scales: Array
) -> None:
    """Write flags, bits and pairs of scales of one group."""
    signs(x, flags, bits)
    unit = np.float32(0.5 / block)
    count = scales.size >> 1
    for sign in range(2):
        for i in range(x.size):
            terms[i] = abs(x[i]) * unit if flags[i] != sign else NOTHING
        terms[x.size : count * block] = 0
        block_sums(terms, block, means[:count])
        for at in range(count):
            marks = flags[at * block : min((at + 1) * block, x.size)]
            negatives = np.int32(0)
            for i in range(marks.size):
                negatives += np.int32(marks[i])
            chosen = marks.size - negatives if sign else negatives
            mean = _mean(means[at], max(int(chosen), 1), unit)
            scales[2 * at + sign] = mean if sign else NOTHING - mean


@kernel(F4_IN, INT, U1, F4)
def twomeans_encode(x: Array, block: int, bits: Array, scales: Array) -> None:
    """See `numpy_signs.twomeans_encode`."""
    flags = np.empty(GROUP, np.uint8)
    terms = np.empty(GROUP, np.float32)
    means = np.empty(GROUP // block, np.float32)
    for start in range(0, x.size, GROUP):
        xs = x[start : start + GROUP]
        bs = bits[start >> 3 : (start + GROUP) >> 3]
        ss = scales[2 * start // block : 2 * (start + GROUP) // block]
        _twomeans(xs, block, flags, terms, bs, means, ss)


@kernel(F4_IN, F4_IN, INT, U1, F4, F4)
def twomeans_encode_residual(
    x: Array, e: Array, block: int, bits: Array, scales: Array, out: Array
) -> None:
    """See `numpy_signs.twomeans_encode_residual`."""
    flags = np.empty(GROUP, np.uint8)
    terms = np.empty(GROUP, np.float32)
    means = np.empty(GROUP // block, np.float32)
    for start in range(0, x.size, GROUP):
        xs = x[start : start + GROUP]
        es = e[start : start + GROUP]
        ts = out[start : start + GROUP]
        bs = bits[start >> 3 : (start + GROUP) >> 3]
        ss = scales[2 * start // block : 2 * (start + GROUP) // block]
        plus(xs, es, ts)
        _twomeans(ts, block, flags, terms, bs, means, ss)
        for at in range(ss.size >> 1):
            rs = ts[at * block : (at + 1) * block]
            marks = flags[at * block : (at + 1) * block]
            negative = ss[2 * at]
            rest = ss[2 * at + 1]
            for i in range(rs.size):
                rs[i] = rs[i] - (negative if marks[i] else rest)


@kernel(U1_IN, F4_IN, INT, F4)
def twomeans_decode(bits: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_signs.twomeans_decode`."""
    flags = np.empty(GROUP, np.uint8)
    for start in range(0, out.size, GROUP):
        spread(bits[start >> 3 : (start + GROUP) >> 3], SPREAD_LOW, flags)
        ss = scales[2 * start // block : 2 * (start + GROUP) // block]
        group = out[start : start + GROUP]
        for at in range(ss.size >> 1):
            ys = group[at * block : (at + 1) * block]
            marks = flags[at * block : (at + 1) * block]
            negative = ss[2 * at]
            rest = ss[2 * at + 1]
            for i in range(ys.size):
                ys[i] = negative if marks[i] else rest


@kernel(U1_IN, F4_IN, INT, "f8", F4)
def twomeans_add(bits: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_signs.twomeans_add`."""
    flags = np.empty(GROUP, np.uint8)
    for start in range(0, total.size, GROUP):
        spread(bits[start >> 3 : (start + GROUP) >> 3], SPREAD_LOW, flags)
        ss = scales[2 * start // block : 2 * (start + GROUP) // block]
        group = total[start : start + GROUP]
        for at in range(ss.size >> 1):
            ys = group[at * block : (at + 1) * block]
            marks = flags[at * block : (at + 1) * block]
            negative = ss[2 * at] * np.float32(weight)
            rest = ss[2 * at + 1] * np.float32(weight)
            for i in range(ys.size):
                ys[i] = ys[i] + (negative if marks[i] else rest)
