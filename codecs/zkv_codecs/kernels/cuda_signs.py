"""One and two bits per element on a CUDA device: the functions of `numpy_signs`, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from zkv.dtypes import Array
from zkv_codecs.kernels.cuda_module import per_block, per_element

FAMILY = "signs"


def signs_encode(x: Array, bits: Array) -> None:
    """See `numpy_signs.signs_encode`."""
    per_element(FAMILY, "signs_encode", x.size, x, np.int64(x.size), bits)


def signs_decode(bits: Array, out: Array) -> None:
    """See `numpy_signs.signs_decode`."""
    per_element(FAMILY, "signs_decode", out.size, bits, np.int64(out.size), out)


def signs_add(bits: Array, weight: float, total: Array) -> None:
    """See `numpy_signs.signs_add`."""
    n = total.size
    per_element(FAMILY, "signs_add", n, bits, np.int64(n), np.float32(weight), total)


def signs_settle(votes: Array, out: Array) -> None:
    """See `numpy_signs.signs_settle`."""
    per_element(FAMILY, "signs_settle", out.size, votes, np.int64(out.size), out)


def onebit_encode(x: Array, block: int, bits: Array, scales: Array) -> None:
    """See `numpy_signs.onebit_encode`."""
    _blocks("onebit_encode", x.size, block, (x,), (bits, scales))


def onebit_encode_residual(
    x: Array, e: Array, block: int, bits: Array, scales: Array, out: Array
) -> None:
    """See `numpy_signs.onebit_encode_residual`."""
    _blocks("onebit_encode_residual", x.size, block, (x, e), (bits, scales, out))


def onebit_decode(bits: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_signs.onebit_decode`."""
    _blocks("onebit_decode", out.size, block, (bits, scales), (out,))


def onebit_add(bits: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_signs.onebit_add`."""
    _blocks("onebit_add", total.size, block, (bits, scales), (np.float32(weight), total))


def twomeans_encode(x: Array, block: int, bits: Array, scales: Array) -> None:
    """See `numpy_signs.twomeans_encode`."""
    _blocks("twomeans_encode", x.size, block, (x,), (bits, scales))


def twomeans_encode_residual(
    x: Array, e: Array, block: int, bits: Array, scales: Array, out: Array
) -> None:
    """See `numpy_signs.twomeans_encode_residual`."""
    _blocks("twomeans_encode_residual", x.size, block, (x, e), (bits, scales, out))


def twomeans_decode(bits: Array, scales: Array, block: int, out: Array) -> None:
    """See `numpy_signs.twomeans_decode`."""
    _blocks("twomeans_decode", out.size, block, (bits, scales), (out,))


def twomeans_add(bits: Array, scales: Array, block: int, weight: float, total: Array) -> None:
    """See `numpy_signs.twomeans_add`."""
    _blocks("twomeans_add", total.size, block, (bits, scales), (np.float32(weight), total))


def mx1bit_encode(x: Array, e: Array, threshold: float, bits: Array, out: Array) -> None:
    """See `numpy_signs.mx1bit_encode`."""
    n, top = x.size, np.float32(threshold)
    per_element(FAMILY, "mx1bit_encode", n, x, e, np.int64(n), top, bits, out)


def mx1bit_decode(bits: Array, out: Array) -> None:
    """See `numpy_signs.mx1bit_decode`."""
    per_element(FAMILY, "mx1bit_decode", out.size, bits, np.int64(out.size), out)


def mx1bit_add(bits: Array, weight: float, total: Array) -> None:
    """See `numpy_signs.mx1bit_add`."""
    n = total.size
    per_element(FAMILY, "mx1bit_add", n, bits, np.int64(n), np.float32(weight), total)


def mx2bit_encode(x: Array, e: Array, threshold: float, codes: Array, out: Array) -> None:
    """See `numpy_signs.mx2bit_encode`."""
    n, top = x.size, np.float32(threshold)
    per_element(FAMILY, "mx2bit_encode", codes.size, x, e, np.int64(n), top, codes, out)


def mx2bit_decode(codes: Array, threshold: float, out: Array) -> None:
    """See `numpy_signs.mx2bit_decode`."""
    n, top = out.size, np.float32(threshold)
    per_element(FAMILY, "mx2bit_decode", n, codes, np.int64(n), top, out)


def mx2bit_add(codes: Array, threshold: float, weight: float, total: Array) -> None:
    """See `numpy_signs.mx2bit_add`."""
    n, top = total.size, np.float32(threshold)
    per_element(FAMILY, "mx2bit_add", n, codes, np.int64(n), top, np.float32(weight), total)


def _blocks(
    kernel: str, n: int, block: int, inputs: tuple[Array, ...], outputs: tuple[Any, ...]
) -> None:
    per_block(FAMILY, kernel, n, block, *inputs, np.int64(n), np.int64(block), *outputs)
