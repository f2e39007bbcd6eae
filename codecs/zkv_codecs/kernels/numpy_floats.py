"""Narrow floats in NumPy: the specification that the other backends match bit for bit.

All narrowing rounds to nearest, ties to even. Both 16-bit formats are written as their bits,
uint16. What a NaN becomes is not specified, except that `fp16` and `bf16` keep it one.

`sfp16` keeps a mean and a deviation for each block, `block` neighbouring elements, the last one
maybe fewer. A sum over a block is taken in this order on every backend: `LANES` accumulators that
start at 0, of which the j-th adds the elements j, j + LANES, j + 2 LANES, … of the block one after
the other; then the upper half is added to the lower until one is left.
"""

from __future__ import annotations

import numpy as np

from zkv.dtypes import DTYPES, Array, narrow, widen
from zkv_codecs.kernels.numpy_ints import ABSMAX_MIN, FINITE, absmax_of, spread

HALF_MAX = np.float32(65504)
LANES = 32
DEVIATION_MIN = np.float32(2.0**-23)
"""Of a block whose largest magnitude is scaled to [2, 4): a constant block's deviation is none."""
HUGE = np.float32(FINITE * (1 - 2.0**-8))
SHRINK = np.float32(1 - 2.0**-8)
"""Decoding rounds up by at most 2**-10 of the largest float32. Blocks that reach above `HUGE` are
sent smaller by this factor, so that what is decoded is finite."""


def fp16_encode(x: Array, codes: Array) -> None:
    """Write float16 bits of the float32 array x, clipped to ±65504."""
    codes[...] = np.clip(x, -HALF_MAX, HALF_MAX).astype(np.float16).view(np.uint16)


def fp16_decode(codes: Array, out: Array) -> None:
    """Write the float32 values of float16 bits."""
    out[...] = codes.view(np.float16)


def fp16_add(codes: Array, weight: float, total: Array) -> None:
    """Add weight · value to the float32 array `total`, each product rounded."""
    total += codes.view(np.float16).astype(np.float32) * np.float32(weight)


def bf16_encode(x: Array, codes: Array) -> None:
    """Write bfloat16 bits of the float32 array x; above 3.3961e38 that is infinity."""
    codes[...] = narrow(x, DTYPES["bfloat16"])


def bf16_decode(codes: Array, out: Array) -> None:
    """Write the float32 values of bfloat16 bits."""
    out[...] = widen(codes, DTYPES["bfloat16"])


def bf16_add(codes: Array, weight: float, total: Array) -> None:
    """Add weight · value to the float32 array `total`, each product rounded."""
    total += widen(codes, DTYPES["bfloat16"]) * np.float32(weight)


def lane_sums(rows: Array) -> Array:
    """Return the sum of each block in the order that the module states.

    `rows` is float32 of shape (blocks, elements / LANES, LANES), filled up with zeros.
    """
    lanes = np.zeros((rows.shape[0], LANES), np.float32)
    for at in range(rows.shape[1]):
        lanes += rows[:, at]
    width = LANES // 2
    while width:
        lanes[:, :width] += lanes[:, width : 2 * width]
        width //= 2
    return lanes[:, 0]


def _rows(flat: Array, block: int) -> Array:
    """Return a copy of the blocks, each filled up with zeros to a multiple of LANES elements."""
    block = min(block, flat.size)
    whole, rest = divmod(flat.size, block)
    rows = np.zeros((-(-flat.size // block), -(-block // LANES) * LANES), flat.dtype)
    rows[:whole, :block] = flat[: whole * block].reshape(whole, block)
    rows[whole:, :rest] = flat[whole * block :]
    return rows.reshape(rows.shape[0], -1, LANES)


def sfp16_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """Write float16 bits of (x − mean) / deviation, and both float32 for each block in turn.

    A block is first multiplied by the power of two that brings its largest magnitude to [2, 4): no
    sum or square overflows then, or underflows to any effect. Of the products y,
    mean = Σy / count, deviation = max(√(Σ(y − mean)² / count), 2**-23), sums in the module's order,
    v = (y − mean) · (1 / deviation), where the reciprocal is rounded first. |v| ≤ √count, to
    rounding, so nothing is clipped. Mean and deviation are sent as those of x; see `SHRINK` for
    one exception. The other: a block below `ABSMAX_MIN` is all zeros.
    """
    if x.size == 0:
        return
    absmax = absmax_of(x, block)
    alive = absmax >= ABSMAX_MIN
    exponents = np.where(alive, absmax, np.float32(1)).view(np.uint32) >> np.uint32(23)
    up = ((np.uint32(255) - exponents) << np.uint32(23)).view(np.float32)
    down = ((exponents - np.uint32(1)) << np.uint32(23)).view(np.float32)
    up[~alive] = 0

    counts = np.minimum(x.size - np.arange(absmax.size) * block, block).astype(np.float32)
    y = x * spread(up, block, x.size)
    mean = lane_sums(_rows(y, block)) / counts
    y -= spread(mean, block, x.size)
    deviation = np.sqrt(lane_sums(_rows(y * y, block)) / counts)
    deviation = np.maximum(deviation, DEVIATION_MIN)
    fp16_encode(y * spread(np.float32(1) / deviation, block, x.size), codes)

    down[absmax > HUGE] *= SHRINK
    down[~alive] = 0
    scales[0::2] = mean * down
    scales[1::2] = deviation * down


def sfp16_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """Write 2 · (v · (deviation / 2) + mean / 2), float32: v · deviation itself may overflow."""
    halves = scales * np.float32(0.5)
    np.multiply(codes.view(np.float16), spread(halves[1::2], block, codes.size), out=out)
    out += spread(halves[0::2], block, codes.size)
    out += out


def sfp16_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """Add weight · decoded to the float32 array `total`, each product rounded."""
    decoded = np.empty(codes.size, np.float32)
    sfp16_decode(codes, scales, block, decoded)
    total += decoded * np.float32(weight)
