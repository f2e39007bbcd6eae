"""One and two bits per element on a CUDA device: the functions of `numpy_signs`, bit for bit."""

from __future__ import annotations

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.cuda_module import THREADS, launch, per_block, per_element

FAMILY = "signs"


def signs_encode(x: Array, bits: Array) -> None:
    """See `numpy_signs.signs_encode`."""
    per_element(FAMILY, "signs_encode", x.size, (x,), bits)


def signs_decode(bits: Array, out: Array) -> None:
    """See `numpy_signs.signs_decode`."""
    per_element(FAMILY, "signs_decode", out.size, (bits,), out)


def signs_add(bits: Array, weight: float, total: Array) -> None:
    """See `numpy_signs.signs_add`."""
    per_element(FAMILY, "signs_add", total.size, (bits,), np.float32(weight), total)


def signs_settle(votes: Array, out: Array) -> None:
    """See `numpy_signs.signs_settle`."""
    per_element(FAMILY, "signs_settle", out.size, (votes,), out)


def onebit_encode(x: Array, block: int, bits: Array, scales: Array) -> None:
    """See `numpy_signs.onebit_encode`."""
    per_block(FAMILY, "onebit_encode", x.size, block, (x,), bits, scales)


def onebit_encode_residual(
    x: Array, e: Array, block: int, bits: Array, scales: Array, out: Array
) -> None:
    """See `numpy_signs.onebit_encode_residual`."""
    per_block(FAMILY, "onebit_encode_residual", x.size, block, (x, e), bits, scales, out)


def onebit_decode(bits: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_signs.onebit_decode`."""
    per_block(FAMILY, "onebit_decode", out.size, block, (bits, scales), out)


def onebit_add(bits: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_signs.onebit_add`."""
    per_block(FAMILY, "onebit_add", total.size, block, (bits, scales), np.float32(weight), total)


def twomeans_encode(x: Array, block: int, bits: Array, scales: Array) -> None:
    """See `numpy_signs.twomeans_encode`."""
    per_block(FAMILY, "twomeans_encode", x.size, block, (x,), bits, scales)


def twomeans_encode_residual(
    x: Array, e: Array, block: int, bits: Array, scales: Array, out: Array
) -> None:
    """See `numpy_signs.twomeans_encode_residual`."""
    per_block(FAMILY, "twomeans_encode_residual", x.size, block, (x, e), bits, scales, out)


def twomeans_decode(bits: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_signs.twomeans_decode`."""
    per_block(FAMILY, "twomeans_decode", out.size, block, (bits, scales), out)


def twomeans_add(bits: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_signs.twomeans_add`."""
    per_block(FAMILY, "twomeans_add", total.size, block, (bits, scales), np.float32(weight), total)


def mx1bit_encode(x: Array, e: Array, threshold: float, bits: Array, out: Array) -> None:
    """See `numpy_signs.mx1bit_encode`."""
    top = np.float32(threshold)
    per_element(FAMILY, "mx1bit_encode", x.size, (x, e), top, bits, out)


def mx1bit_decode(bits: Array, out: Array) -> None:
    """See `numpy_signs.mx1bit_decode`."""
    per_element(FAMILY, "mx1bit_decode", out.size, (bits,), out)


def mx1bit_add(bits: Array, weight: float, total: Array) -> None:
    """See `numpy_signs.mx1bit_add`."""
    per_element(FAMILY, "mx1bit_add", total.size, (bits,), np.float32(weight), total)


def mx2bit_encode(x: Array, e: Array, threshold: float, codes: Array, out: Array) -> None:
    """See `numpy_signs.mx2bit_encode`."""
    n, top = np.int64(x.size), np.float32(threshold)
    launch(FAMILY, "mx2bit_encode", -(-codes.size // THREADS), x, e, n, top, codes, out)


def mx2bit_decode(codes: Array, threshold: float, out: Array) -> None:
    """See `numpy_signs.mx2bit_decode`."""
    per_element(FAMILY, "mx2bit_decode", out.size, (codes,), np.float32(threshold), out)


def mx2bit_add(codes: Array, threshold: float, weight: float, total: Array) -> None:
    """See `numpy_signs.mx2bit_add`."""
    numbers = np.float32(threshold), np.float32(weight)
    per_element(FAMILY, "mx2bit_add", total.size, (codes,), *numbers, total)
