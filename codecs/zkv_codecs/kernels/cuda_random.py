"""Codes rounded by chance on a CUDA device: the functions of `numpy_random`, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.cuda_module import per_block, per_element

FAMILY = "random"


def draws(seed: int, out: Array) -> None:
    """See `numpy_random.draws`."""
    per_element(FAMILY, "draws", out.size, np.uint32(seed), np.int64(out.size), out)


def qsgd_encode(x: Array, levels: int, block: int, seed: int, codes: Array, scales: Array) -> None:
    """See `numpy_random.qsgd_encode`."""
    n = np.int64(x.size)
    numbers = np.float32(levels), np.int64(block), np.uint32(seed)
    per_block(FAMILY, "qsgd_encode", x.size, block, x, n, *numbers, codes, scales)


def natural_encode(x: Array, seed: int, codes: Array) -> None:
    """See `numpy_random.natural_encode`."""
    n = x.size
    per_element(FAMILY, "natural_encode", n, x, np.int64(n), np.uint32(seed), codes)


def natural_decode(codes: Array, out: Array) -> None:
    """See `numpy_random.natural_decode`."""
    per_element(FAMILY, "natural_decode", out.size, codes, np.int64(out.size), out)


def natural_add(codes: Array, weight: float, total: Array) -> None:
    """See `numpy_random.natural_add`."""
    n = total.size
    per_element(FAMILY, "natural_add", n, codes, np.int64(n), np.float32(weight), total)


def ternary_encode(x: Array, block: int, seed: int, codes: Array, scales: Array) -> None:
    """See `numpy_random.ternary_encode`."""
    _blocks("ternary_encode", x.size, block, (x,), (np.uint32(seed), codes, scales))


def ternary_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_random.ternary_decode`."""
    _blocks("ternary_decode", out.size, block, (codes, scales), (out,))


def ternary_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_random.ternary_add`."""
    _blocks("ternary_add", total.size, block, (codes, scales), (np.float32(weight), total))


def _blocks(
    kernel: str, n: int, block: int, inputs: tuple[Array, ...], rest: tuple[Any, ...]
) -> None:
    per_block(FAMILY, kernel, n, block, *inputs, np.int64(n), np.int64(block), *rest)
