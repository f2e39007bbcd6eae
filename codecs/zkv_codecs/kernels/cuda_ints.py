"""Block integers on a CUDA device: the functions of `numpy_ints`, bit for bit, over CuPy arrays."""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.cuda_module import per_block

FAMILY = "ints"


def int8_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """See `numpy_ints.int8_encode`."""
    _encode("int8_encode", x, block, codes, scales)


def int8_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """See `numpy_ints.int8_encode_residual`."""
    _encode_residual("int8_encode_residual", x, e, block, codes, scales, out)


def int8_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_ints.int8_decode`."""
    _decode("int8_decode", codes, scales, block, out)


def int8_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_ints.int8_add`."""
    _add("int8_add", codes, scales, block, weight, total)


def int4_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """See `numpy_ints.int4_encode`."""
    _encode("int4_encode", x, block, codes, scales)


def int4_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """See `numpy_ints.int4_encode_residual`."""
    _encode_residual("int4_encode_residual", x, e, block, codes, scales, out)


def int4_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_ints.int4_decode`."""
    _decode("int4_decode", codes, scales, block, out)


def int4_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_ints.int4_add`."""
    _add("int4_add", codes, scales, block, weight, total)


def uint8_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """See `numpy_ints.uint8_encode`."""
    _encode("uint8_encode", x, block, codes, scales)


def uint8_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """See `numpy_ints.uint8_encode_residual`."""
    _encode_residual("uint8_encode_residual", x, e, block, codes, scales, out)


def uint8_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_ints.uint8_decode`."""
    _decode("uint8_decode", codes, scales, block, out)


def uint8_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_ints.uint8_add`."""
    _add("uint8_add", codes, scales, block, weight, total)


def _encode(kernel: str, x: Array, block: int, codes: Array, scales: Array) -> None:
    sizes = np.int64(x.size), np.int64(block)
    per_block(FAMILY, kernel, x.size, block, x, *sizes, codes, scales)


def _encode_residual(
    kernel: str, x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    sizes = np.int64(x.size), np.int64(block)
    per_block(FAMILY, kernel, x.size, block, x, e, *sizes, codes, scales, out)


def _decode(kernel: str, codes: Array, scales: Array, block: int, out: Array) -> None:
    sizes = np.int64(out.size), np.int64(block)
    per_block(FAMILY, kernel, out.size, block, codes, scales, *sizes, out)


def _add(kernel: str, codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    sizes = np.int64(total.size), np.int64(block)
    by = np.float32(weight)
    per_block(FAMILY, kernel, total.size, block, codes, scales, *sizes, by, total)
