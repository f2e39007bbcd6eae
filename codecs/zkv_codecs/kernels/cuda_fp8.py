"""8-bit floats on a CUDA device: the functions of `numpy_fp8`, bit for bit, over CuPy arrays."""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.cuda_module import per_block

FAMILY = "fp8"


def fp8_e4m3_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """See `numpy_fp8.fp8_e4m3_encode`."""
    per_block(FAMILY, "fp8_e4m3_encode", x.size, block, (x,), codes, scales)


def fp8_e4m3_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """See `numpy_fp8.fp8_e4m3_encode_residual`."""
    per_block(FAMILY, "fp8_e4m3_encode_residual", x.size, block, (x, e), codes, scales, out)


def fp8_e4m3_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_fp8.fp8_e4m3_decode`."""
    per_block(FAMILY, "fp8_e4m3_decode", out.size, block, (codes, scales), out)


def fp8_e4m3_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_fp8.fp8_e4m3_add`."""
    by = np.float32(weight)
    per_block(FAMILY, "fp8_e4m3_add", total.size, block, (codes, scales), by, total)


def fp8_e5m2_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """See `numpy_fp8.fp8_e5m2_encode`."""
    per_block(FAMILY, "fp8_e5m2_encode", x.size, block, (x,), codes, scales)


def fp8_e5m2_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """See `numpy_fp8.fp8_e5m2_encode_residual`."""
    per_block(FAMILY, "fp8_e5m2_encode_residual", x.size, block, (x, e), codes, scales, out)


def fp8_e5m2_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_fp8.fp8_e5m2_decode`."""
    per_block(FAMILY, "fp8_e5m2_decode", out.size, block, (codes, scales), out)


def fp8_e5m2_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_fp8.fp8_e5m2_add`."""
    by = np.float32(weight)
    per_block(FAMILY, "fp8_e5m2_add", total.size, block, (codes, scales), by, total)
