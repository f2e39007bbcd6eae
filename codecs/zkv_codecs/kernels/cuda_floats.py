"""Narrow floats on a CUDA device: the functions of `numpy_floats`, bit for bit."""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.cuda_module import per_block, per_element

FAMILY = "floats"


def fp16_encode(x: Array, codes: Array) -> None:
    """See `numpy_floats.fp16_encode`."""
    per_element(FAMILY, "fp16_encode", x.size, (x,), codes)


def fp16_decode(codes: Array, out: Array) -> None:
    """See `numpy_floats.fp16_decode`."""
    per_element(FAMILY, "fp16_decode", out.size, (codes,), out)


def fp16_add(codes: Array, weight: float, total: Array) -> None:
    """See `numpy_floats.fp16_add`."""
    per_element(FAMILY, "fp16_add", total.size, (codes,), np.float32(weight), total)


def bf16_encode(x: Array, codes: Array) -> None:
    """See `numpy_floats.bf16_encode`."""
    per_element(FAMILY, "bf16_encode", x.size, (x,), codes)


def bf16_decode(codes: Array, out: Array) -> None:
    """See `numpy_floats.bf16_decode`."""
    per_element(FAMILY, "bf16_decode", out.size, (codes,), out)


def bf16_add(codes: Array, weight: float, total: Array) -> None:
    """See `numpy_floats.bf16_add`."""
    per_element(FAMILY, "bf16_add", total.size, (codes,), np.float32(weight), total)


def sfp16_encode(x: Array, block: int, codes: Array, scales: Array) -> None:
    """See `numpy_floats.sfp16_encode`."""
    per_block(FAMILY, "sfp16_encode", x.size, block, (x,), codes, scales)


def sfp16_decode(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_floats.sfp16_decode`."""
    per_block(FAMILY, "sfp16_decode", out.size, block, (codes, scales), out)


def sfp16_add(codes: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_floats.sfp16_add`."""
    by = np.float32(weight)
    per_block(FAMILY, "sfp16_add", total.size, block, (codes, scales), by, total)
