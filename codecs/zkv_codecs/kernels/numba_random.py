"""Chance in Numba: the functions of `numpy_random`, bit for bit."""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.numba_blocks import GROUP, block_sums, largest_bits, plus
from zkv_codecs.kernels.numba_types import F4, F4_IN, I1, INT, U1, U1_IN, U4, helper, kernel, part
from zkv_codecs.kernels.numpy_blocks import LARGEST, SCALE_MIN
from zkv_codecs.kernels.numpy_random import (
    DRAW,
    EXPONENT_TOP,
    EXPONENT_ZERO,
    FIRST,
    GOLDEN,
    NEARLY_LARGEST,
    SECOND,
)

NOTHING, ONE = np.float32(0), np.float32(1)


@helper
def draw(at: int, seed: np.uint32) -> np.uint32:
    """Return the draw of element `at`; see `numpy_random.draws`."""
    h = np.uint32(np.uint32(np.uint32(at) * GOLDEN) ^ seed)
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * FIRST)
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(13))) * SECOND)
    return np.uint32(np.uint32(h ^ (h >> np.uint32(16))) >> np.uint32(8))


@kernel(INT, U4)
def draws(seed: int, out: Array) -> None:
    """See `numpy_random.draws`."""
    for i in range(out.size):
        out[i] = draw(i, np.uint32(seed))


@part
def _uniforms(start: int, seed: np.uint32, out: Array) -> None:
    """Write draw / 2**24 of the elements from `start` on."""
    for i in range(out.size):
        out[i] = np.float32(np.int32(draw(start + i, seed))) * DRAW


# --- QSGD --------------------------------------------------------------------------------------


@part
def _qsgd_scales(
    x: Array, levels: int, block: int, terms: Array, factors: Array, scales: Array
) -> None:
    """Write the scales of one group; `terms` and `factors` are scratch."""
    factor_bits = factors.view(np.uint32)
    scale_bits = scales.view(np.uint32)
    for at in range(scales.size):
        xs = x[at * block : (at + 1) * block]
        ts = terms[at * block : (at + 1) * block]
        scale_bits[at] = largest_bits(xs)
        factor_bits[at] = 0
        if scales[at] >= SCALE_MIN:
            p = max(254 - (int(scale_bits[at]) >> 23), 1)
            factor_bits[at] = p << 23
            scale_bits[at] = (254 - p) << 23
        factor = factors[at]
        for i in range(xs.size):
            small = xs[i] * factor
            ts[i] = small * small
        ts[xs.size :] = 0
    block_sums(terms, block, factors[: scales.size])
    for at in range(scales.size):
        if factors[at] > 0:
            each = np.sqrt(factors[at]) / np.float32(levels) * scales[at]
            scales[at] = min(each, LARGEST)
        else:
            scales[at] = 0


@kernel(F4_IN, INT, INT, INT, I1, F4)
def qsgd_encode(x: Array, levels: int, block: int, seed: int, codes: Array, scales: Array) -> None:
    """See `numpy_random.qsgd_encode`."""
    terms = np.empty(GROUP, np.float32)
    factors = np.empty(GROUP // block, np.float32)
    for start in range(0, x.size, GROUP):
        group = x[start : start + GROUP]
        ss = scales[start // block : (start + GROUP) // block]
        _qsgd_scales(group, levels, block, terms, factors, ss)
        chances = terms[: group.size]
        _uniforms(start, np.uint32(seed), chances)
        for at in range(ss.size):
            xs = group[at * block : (at + 1) * block]
            us = chances[at * block : (at + 1) * block]
            qs = codes[start + at * block : start + (at + 1) * block]
            scale = ss[at]
            if scale == 0:
                qs[:] = 0
                continue
            factor = ONE / scale
            top = np.floor(min(np.float32(levels), NEARLY_LARGEST / max(scale, ONE)))
            top = max(top, ONE)
            for i in range(xs.size):
                scaled = xs[i] * factor
                low = np.floor(scaled)
                code = low + ONE if us[i] < scaled - low else low
                qs[i] = np.int8(min(max(code, -top), top))


# --- natural compression -----------------------------------------------------------------------


@kernel(F4_IN, INT, U1)
def natural_encode(x: Array, seed: int, codes: Array) -> None:
    """See `numpy_random.natural_encode`."""
    words = x.view(np.uint32)
    for i in range(x.size):
        magnitude = np.uint32(words[i] & np.uint32(0x7FFFFFFF))
        carried = np.uint32(magnitude + (draw(i, np.uint32(seed)) >> np.uint32(1)))
        exponent = np.uint32(carried >> np.uint32(23))
        kept = np.uint32(min(max(exponent, EXPONENT_ZERO), EXPONENT_TOP) - EXPONENT_ZERO)
        sign = np.uint32((words[i] >> np.uint32(31)) << np.uint32(7))
        codes[i] = np.uint8(kept | sign) if kept else np.uint8(0)


@helper
def _natural_bits(code: np.uint8) -> np.uint32:
    """See `numpy_random.natural_decode`."""
    wide = np.uint32(code)
    kept = np.uint32(wide & np.uint32(127))
    bits = np.uint32((kept + EXPONENT_ZERO) << np.uint32(23))
    bits = np.uint32(bits | ((wide >> np.uint32(7)) << np.uint32(31)))
    return bits if kept else np.uint32(0)


@kernel(U1_IN, F4)
def natural_decode(codes: Array, out: Array) -> None:
    """See `numpy_random.natural_decode`."""
    words = out.view(np.uint32)
    for i in range(codes.size):
        words[i] = _natural_bits(codes[i])


@kernel(U1_IN, "f8", F4)
def natural_add(codes: Array, weight: float, total: Array) -> None:
    """See `numpy_random.natural_add`."""
    by = np.float32(weight)
    values = np.empty(GROUP, np.float32)
    words = values.view(np.uint32)
    for start in range(0, codes.size, GROUP):
        cs = codes[start : start + GROUP]
        ys = total[start : start + GROUP]
        for i in range(cs.size):
            words[i] = _natural_bits(cs[i])
        for i in range(ys.size):
            ys[i] = ys[i] + values[i] * by


# --- ternary -----------------------------------------------------------------------------------


@part
def _gather_pairs(fours: Array, codes: Array) -> None:
    """Write a byte for each four codes, 0 to 3, the first into its lowest bits."""
    for k in range(codes.size):
        four = np.uint32(fours[k])
        four = np.uint32(four | (four >> np.uint32(6)))
        codes[k] = np.uint8(four | (four >> np.uint32(12)))


@kernel(F4_IN, INT, INT, U1, F4)
def ternary_encode(x: Array, block: int, seed: int, codes: Array, scales: Array) -> None:
    """See `numpy_random.ternary_encode`."""
    pairs = np.empty(GROUP, np.uint8)
    fours = pairs.view(np.uint32)
    chances = np.empty(GROUP, np.float32)
    for start in range(0, x.size, GROUP):
        group = x[start : start + GROUP]
        ss = scales[start // block : (start + GROUP) // block]
        bits = ss.view(np.int32)
        pairs[group.size & -4 : (group.size + 3) & -4] = 0
        _uniforms(start, np.uint32(seed), chances[: group.size])
        for at in range(ss.size):
            xs = group[at * block : (at + 1) * block]
            us = chances[at * block : (at + 1) * block]
            marks = pairs[at * block : (at + 1) * block]
            bits[at] = largest_bits(xs)
            if ss[at] < SCALE_MIN:
                ss[at] = 0
                marks[: xs.size] = 0
                continue
            scale = ss[at]
            for i in range(xs.size):
                bar = us[i] * scale
                marks[i] = (
                    np.uint8(3) if xs[i] < -bar else (np.uint8(1) if xs[i] > bar else np.uint8(0))
                )
        _gather_pairs(fours, codes[start >> 2 : (start + GROUP) >> 2])


@kernel(F4_IN, F4_IN, INT, U1, F4, F4)
def ternary_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """See `numpy_random.ternary_encode_residual`."""
    pairs = np.empty(GROUP, np.uint8)
    fours = pairs.view(np.uint32)
    for start in range(0, x.size, GROUP):
        xs = x[start : start + GROUP]
        es = e[start : start + GROUP]
        group = out[start : start + GROUP]
        ss = scales[start // block : (start + GROUP) // block]
        bits = ss.view(np.int32)
        pairs[xs.size & -4 : (xs.size + 3) & -4] = 0
        plus(xs, es, group)
        for at in range(ss.size):
            ts = group[at * block : (at + 1) * block]
            marks = pairs[at * block : (at + 1) * block]
            bits[at] = largest_bits(ts)
            if ss[at] < SCALE_MIN:
                ss[at] = 0
                marks[: ts.size] = 0
                continue
            scale = ss[at]
            bar = np.float32(0.5) * scale
            for i in range(ts.size):
                t = ts[i]
                marks[i] = np.uint8(3) if t < -bar else (np.uint8(1) if t > bar else np.uint8(0))
                ts[i] = t - (-scale if t < -bar else (scale if t > bar else NOTHING))
        _gather_pairs(fours, codes[start >> 2 : (start + GROUP) >> 2])


@part
def _spread_pairs(codes: Array, pairs: Array) -> None:
    """Write the four codes, 0 to 3, of each byte, the first from its lowest bits."""
    fours = pairs.view(np.uint32)
    for k in range(codes.size):
        code = np.uint32(codes[k])
        code = np.uint32(code | (code << np.uint32(6)))
        code = np.uint32(code | (code << np.uint32(12)))
        fours[k] = np.uint32(code & np.uint32(0x03030303))


@kernel(U1_IN, F4_IN, INT, F4)
def ternary_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_random.ternary_decode`."""
    pairs = np.empty(GROUP, np.uint8)
    for start in range(0, out.size, GROUP):
        _spread_pairs(codes[start >> 2 : (start + GROUP) >> 2], pairs)
        ss = scales[start // block : (start + GROUP) // block]
        group = out[start : start + GROUP]
        for at in range(ss.size):
            ys = group[at * block : (at + 1) * block]
            marks = pairs[at * block : (at + 1) * block]
            scale = ss[at]
            for i in range(ys.size):
                ys[i] = scale if marks[i] == 1 else (-scale if marks[i] == 3 else NOTHING)


@kernel(U1_IN, F4_IN, INT, "f8", F4)
def ternary_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_random.ternary_add`."""
    pairs = np.empty(GROUP, np.uint8)
    nothing = NOTHING * np.float32(weight)
    for start in range(0, total.size, GROUP):
        _spread_pairs(codes[start >> 2 : (start + GROUP) >> 2], pairs)
        ss = scales[start // block : (start + GROUP) // block]
        group = total[start : start + GROUP]
        for at in range(ss.size):
            ys = group[at * block : (at + 1) * block]
            marks = pairs[at * block : (at + 1) * block]
            product = ss[at] * np.float32(weight)
            for i in range(ys.size):
                ys[i] = ys[i] + (
                    product if marks[i] == 1 else (-product if marks[i] == 3 else nothing)
                )
