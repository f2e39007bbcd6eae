"""Block integers on a CUDA device: the functions of `numpy_ints`, bit for bit, over CuPy arrays."""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.cuda_module import per_block


def int8_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """See `numpy_ints.int8_encode`."""
    n = x.size
    per_block("ints", "int8_encode", n, block, x, np.int64(n), np.int64(block), codes, scales)


def int8_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """See `numpy_ints.int8_encode_residual`."""
    n, name = x.size, "int8_encode_residual"
    per_block("ints", name, n, block, x, e, np.int64(n), np.int64(block), codes, scales, out)


def int8_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_ints.int8_decode`."""
    n = codes.size
    per_block("ints", "int8_decode", n, block, codes, scales, np.int64(n), np.int64(block), out)


def int8_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_ints.int8_add`."""
    n, by = codes.size, np.float32(weight)
    sizes = np.int64(n), np.int64(block)
    per_block("ints", "int8_add", n, block, codes, scales, *sizes, by, total)
