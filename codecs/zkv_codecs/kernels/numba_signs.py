"""One and two bits per element in Numba: the functions of `numpy_signs`, bit for bit."""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.numba_blocks import (
    GROUP,
    SPREAD_HIGH,
    SPREAD_LOW,
    block_sums,
    gather_high,
    gather_low,
    spread,
)
from zkv_codecs.kernels.numba_types import F4, F4_IN, INT, U1, U1_IN, helper, kernel, part
from zkv_codecs.kernels.numpy_blocks import LARGEST, SCALE_MIN

ONE = np.float32(1)
NOTHING = np.float32(0)


@part
def _signs(x: Array, flags: Array, bits: Array) -> None:
    """Write a flag, 1 for negative, and a bit for each element of a group."""
    words = x.view(np.int32)
    flags[x.size & -8 : (x.size + 7) & -8] = 0
    marks = flags[: x.size]
    for i in range(words.size):
        marks[i] = np.uint8(words[i] < 0)
    gather_low(flags, bits)


@helper
def _mean(total: np.float32, count: int, unit: np.float32) -> np.float32:
    """See `numpy_signs._means`."""
    mean = min(total / (np.float32(count) * unit), LARGEST)
    return mean if mean >= SCALE_MIN else NOTHING


# --- signs alone -----------------------------------------------------------------------------


@kernel(F4_IN, U1)
def signs_encode(x: Array, bits: Array) -> None:
    """See `numpy_signs.signs_encode`."""
    flags = np.empty(GROUP, np.uint8)
    for start in range(0, x.size, GROUP):
        _signs(x[start : start + GROUP], flags, bits[start >> 3 : (start + GROUP) >> 3])


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


# --- the mean of |x| ---------------------------------------------------------------------------


@part
def _onebit(x: Array, block: int, flags: Array, terms: Array, bits: Array, scales: Array) -> None:
    """Write flags, bits and scales of one group."""
    _signs(x, flags, bits)
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


@kernel(F4_IN, F4_IN, INT, U1, F4, F4)
def onebit_encode_residual(
    x: Array, e: Array, block: int, bits: Array, scales: Array, out: Array
) -> None:
    """See `numpy_signs.onebit_encode_residual`."""
    flags = np.empty(GROUP, np.uint8)
    terms = np.empty(GROUP, np.float32)
    for start in range(0, x.size, GROUP):
        xs = x[start : start + GROUP]
        es = e[start : start + GROUP]
        ts = out[start : start + GROUP]
        bs = bits[start >> 3 : (start + GROUP) >> 3]
        ss = scales[start // block : (start + GROUP) // block]
        for i in range(xs.size):
            ts[i] = xs[i] + es[i]
        _onebit(ts, block, flags, terms, bs, ss)
        for at in range(ss.size):
            rs = ts[at * block : (at + 1) * block]
            marks = flags[at * block : (at + 1) * block]
            scale = ss[at]
            for i in range(rs.size):
                rs[i] = rs[i] - (-scale if marks[i] else scale)


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
    _signs(x, flags, bits)
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
        for i in range(xs.size):
            ts[i] = xs[i] + es[i]
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
        gather_high(flags, bits[start >> 3 : (start + GROUP) >> 3])


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
