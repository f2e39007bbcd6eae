"""Block integers on a CUDA device: the functions of `numpy_ints`, bit for bit, over CuPy arrays."""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.cuda_module import per_block

FAMILY = "ints"


def int8_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """See `numpy_ints.int8_encode`."""
    per_block(FAMILY, "int8_encode", x.size, block, (x,), codes, scales)


def int8_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """See `numpy_ints.int8_encode_residual`."""
    per_block(FAMILY, "int8_encode_residual", x.size, block, (x, e), codes, scales, out)


def int8_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_ints.int8_decode`."""
    per_block(FAMILY, "int8_decode", out.size, block, (codes, scales), out)


def int8_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_ints.int8_add`."""
    by = np.float32(weight)
    per_block(FAMILY, "int8_add", total.size, block, (codes, scales), by, total)


def int4_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """See `numpy_ints.int4_encode`."""
    per_block(FAMILY, "int4_encode", x.size, block, (x,), codes, scales)


def int4_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """See `numpy_ints.int4_encode_residual`."""
    per_block(FAMILY, "int4_encode_residual", x.size, block, (x, e), codes, scales, out)


def int4_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_ints.int4_decode`."""
    per_block(FAMILY, "int4_decode", out.size, block, (codes, scales), out)


def int4_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_ints.int4_add`."""
    by = np.float32(weight)
    per_block(FAMILY, "int4_add", total.size, block, (codes, scales), by, total)


def uint8_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """See `numpy_ints.uint8_encode`."""
    per_block(FAMILY, "uint8_encode", x.size, block, (x,), codes, scales)


def uint8_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """See `numpy_ints.uint8_encode_residual`."""
    per_block(FAMILY, "uint8_encode_residual", x.size, block, (x, e), codes, scales, out)


def uint8_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_ints.uint8_decode`."""
    per_block(FAMILY, "uint8_decode", out.size, block, (codes, scales), out)


def uint8_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_ints.uint8_add`."""
    by = np.float32(weight)
    per_block(FAMILY, "uint8_add", total.size, block, (codes, scales), by, total)
