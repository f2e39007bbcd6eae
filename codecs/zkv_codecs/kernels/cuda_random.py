"""Codes rounded by chance on a CUDA device: the functions of `numpy_random`, bit for bit."""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.cuda_module import per_block, per_element

FAMILY = "random"


def draws(seed: int, out: Array) -> None:
    """See `numpy_random.draws`."""
    per_element(FAMILY, "draws", out.size, (np.uint32(seed),), out)


def qsgd_encode(x: Array, levels: int, block: int, seed: int, codes: Array, scales: Array) -> None:
    """See `numpy_random.qsgd_encode`."""
    numbers = np.float32(levels), np.uint32(seed)
    per_block(FAMILY, "qsgd_encode", x.size, block, (x,), *numbers, codes, scales)


def natural_encode(x: Array, seed: int, codes: Array) -> None:
    """See `numpy_random.natural_encode`."""
    per_element(FAMILY, "natural_encode", x.size, (x,), np.uint32(seed), codes)


def natural_decode(codes: Array, out: Array) -> None:
    """See `numpy_random.natural_decode`."""
    per_element(FAMILY, "natural_decode", out.size, (codes,), out)


def natural_add(codes: Array, weight: float, total: Array) -> None:
    """See `numpy_random.natural_add`."""
    per_element(FAMILY, "natural_add", total.size, (codes,), np.float32(weight), total)


def ternary_encode(x: Array, block: int, seed: int, codes: Array, scales: Array) -> None:
    """See `numpy_random.ternary_encode`."""
    per_block(FAMILY, "ternary_encode", x.size, block, (x,), np.uint32(seed), codes, scales)


def ternary_encode_residual(
    x: Array, e: Array, block: int, codes: Array, scales: Array, out: Array
) -> None:
    """See `numpy_random.ternary_encode_residual`."""
    per_block(FAMILY, "ternary_encode_residual", x.size, block, (x, e), codes, scales, out)


def ternary_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_random.ternary_decode`."""
    per_block(FAMILY, "ternary_decode", out.size, block, (codes, scales), out)


def ternary_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_random.ternary_add`."""
    per_block(FAMILY, "ternary_add", total.size, block, (codes, scales), np.float32(weight), total)
