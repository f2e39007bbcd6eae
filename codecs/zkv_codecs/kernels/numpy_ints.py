"""Block integers in NumPy: the specification that the other backends match bit for bit.

A block is `block` neighbouring elements, the last one maybe fewer. Its scale is absmax / 127; below
`ABSMAX_MIN` that would be a subnormal, and the quotients of tiny numbers infinite: such a block is
sent as zeros, and error feedback keeps what it held.
"""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array

ABSMAX_MIN = np.float32(1.5e-36)


def _absmax(x: Array, block: int) -> Array:
    """Return the largest magnitude of each block, float32."""
    starts = np.arange(0, x.size, block)
    largest: Array = np.maximum.reduceat(np.abs(x), starts)
    return largest


def _codes(x: Array, absmax: Array, block: int, top: int) -> Array:
    """Return round-to-nearest-even of x · (top / absmax) of its block: the factor is rounded
    first."""
    alive = absmax >= ABSMAX_MIN
    factors = np.float32(top) / np.where(alive, absmax, np.float32(1))
    factors[~alive] = 0
    scaled = x * np.repeat(factors, block)[: x.size]
    codes: Array = np.rint(scaled).astype(np.int8)
    return codes


def int8_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """Write int8 codes and one float32 scale per block of the float32 array x."""
    if x.size == 0:
        return
    absmax = _absmax(x, block)
    codes[...] = _codes(x, absmax, block, 127)
    scales[...] = np.where(absmax >= ABSMAX_MIN, absmax / np.float32(127), np.float32(0))


def int8_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """Encode t = x + e, and write t − decode(codes) to `out`."""
    t = x + e
    int8_encode(t, block, codes, scales)
    int8_decode(codes, scales, block, out)
    np.subtract(t, out, out=out)


def int8_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """Write code · scale, float32."""
    np.multiply(codes, np.repeat(scales, block)[: codes.size], out=out, dtype=np.float32)


def int8_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """Add weight · (code · scale) to the float32 array `total`, each product rounded."""
    decoded = np.empty(codes.size, np.float32)
    int8_decode(codes, scales, block, decoded)
    total += decoded if weight == 1.0 else decoded * np.float32(weight)
