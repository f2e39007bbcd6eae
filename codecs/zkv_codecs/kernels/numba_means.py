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
def _onebit_block(t: Array, flags: Array, lanes: Array) -> np.float32:
    """Write a block's flags, and return its mean: both for a block of 256.

    It goes through the four quarters of a block at once, which are the first two steps of halving.
    """
    unit = np.float32(0.5 / 256)
    words = t.view(np.uint32)
    for a in range(64):
        b, c, d = a + 64, a + 128, a + 192
        flags[a], flags[b] = words[a] >> 31, words[b] >> 31
        flags[c], flags[d] = words[c] >> 31, words[d] >> 31
        even = abs(t[a]) * unit + abs(t[c]) * unit
        lanes[a] = even + (abs(t[b]) * unit + abs(t[d]) * unit)
    return _mean(run_sum(lanes), 256, unit)


@part
def _onebit_blocks(x: Array, e: Array, bits: Array, scales: Array, out: Array) -> None:
    """Encode blocks of 256, of as many as there are scales; x and e have one more.

    The sums of the next block are made in the loop that writes the rest of this one, so that memory
    is read all the time, once, and from front to back. Read in the order of the mean, arrays that
    no cache holds took half as long again.
    """
    flags, lanes = np.empty(256, np.uint8), np.empty(64, np.float32)
    eights = flags.view(np.uint64)
    room = np.empty((2, 256), np.float32)
    sums, following = room[0], room[1]
    for i in range(256):
        following[i] = x[i] + e[i]
    for at in range(scales.size):
        sums, following = following, sums
        scale = _onebit_block(sums, flags, lanes)
        scales[at] = scale
        gather(eights, GATHER_LOW, bits[32 * at : 32 * at + 32])
        rs = out[256 * at : 256 * at + 256]
        xs = x[256 * at + 256 : 256 * at + 512]
        es = e[256 * at + 256 : 256 * at + 512]
        for i in range(256):
            following[i] = xs[i] + es[i]
            rs[i] = sums[i] - math.copysign(scale, sums[i])


@kernel(F4_IN, F4_IN, INT, U1, F4, F4)
def onebit_encode_residual(
    x: Array, e: Array, block: int, bits: Array, scales: Array, out: Array
) -> None:
    """See `numpy_signs.onebit_encode_residual`."""
    blocks = (x.size >> 8) - 1 if block == 256 else 0
    whole = 0
    if blocks > 0:
        _onebit_blocks(x, e, bits, scales[:blocks], out)
        whole = blocks << 8
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
