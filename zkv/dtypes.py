"""The element types that travel: names, sizes, and how a server computes with them.

A dtype crosses the wire as a name out of this table and never as a NumPy type string, since
`np.dtype` accepts far too much from a peer ("O", "f4,f4", sizes of gigabytes).

NumPy has no bfloat16. It is stored as its 16 bits (uint16) and widened to float32 for arithmetic,
so a server needs no extra package; only a worker that wants bfloat16 arrays needs ml_dtypes.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type: its wire name, how it is stored, and what sums are computed in."""

    name: str
    stored: np.dtype[Any]
    wide: np.dtype[Any]
    floating: bool

    @property
    def itemsize(self) -> int:
        """Bytes per element, in memory and on the wire."""
        return int(self.stored.itemsize)

    @property
    def half(self) -> bool:
        """Whether the server keeps a wider master copy of values of this type."""
        return self.floating and self.itemsize < self.wide.itemsize


def _table() -> dict[str, DType]:
    f4, f8, i8, u8 = (np.dtype(code) for code in ("f4", "f8", "i8", "u8"))
    rows = [
        DType("float16", np.dtype("f2"), f4, True),
        DType("bfloat16", np.dtype("u2"), f4, True),
        DType("float32", f4, f4, True),
        DType("float64", f8, f8, True),
    ]
    rows += [DType(f"int{8 * n}", np.dtype(f"i{n}"), i8, False) for n in (1, 2, 4, 8)]
    rows += [DType(f"uint{8 * n}", np.dtype(f"u{n}"), u8, False) for n in (1, 2, 4, 8)]
    return {row.name: row for row in rows}


DTYPES: dict[str, DType] = _table()
_NATIVE = {row.stored: row for row in DTYPES.values() if row.stored.name == row.name}
"""NumPy puts the name of a dtype together each time that it is asked."""


def dtype_of(array: Array) -> DType:
    """Return the table row of an array's dtype.

    Raises:
        TypeError: the dtype does not travel (object, complex, strings, ...).
    """
    row = _NATIVE.get(array.dtype)
    if row is None:
        row = DTYPES.get(array.dtype.name)
    if row is None:
        raise TypeError(f"dtype {array.dtype} does not travel; use one of {', '.join(DTYPES)}")
    return row


def stored_view(array: Array, dtype: DType) -> Array:
    """Return a contiguous array of the stored type with the same bits (bfloat16 becomes uint16)."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if not flat.dtype.isnative:
        flat = flat.astype(flat.dtype.newbyteorder("="))
    return flat.view(dtype.stored)


def widen(stored: Array, dtype: DType) -> Array:
    """Return the values in `dtype.wide`; the same array when it is already wide."""
    if dtype.name == "bfloat16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(dtype.wide, copy=False)


def narrow(wide: Array, dtype: DType) -> Array:
    """Return wide values as stored ones: floats rounded to nearest even, integers wrapped."""
    if dtype.name == "bfloat16":
        bits = np.ascontiguousarray(wide, dtype=np.float32).view(np.uint32)
        # Round to nearest even on the 16 bits that are cut; a NaN keeps a payload bit, so that
        # rounding cannot turn it into an infinity.
        rounded = (
            bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        ) >> np.uint32(16)
        quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
        is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return np.where(is_nan, quiet, rounded).astype(np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        return wide.astype(dtype.stored, copy=False)


def user_view(stored: Array, dtype: DType) -> Array:
    """Return the array as users know it: bfloat16 as ml_dtypes' type, all others as they are.

    Raises:
        TypeError: bfloat16 values arrived and ml_dtypes is not installed.
    """
    if dtype.name != "bfloat16":
        return stored
    try:
        ml_dtypes = importlib.import_module("ml_dtypes")
    except ImportError as error:
        raise TypeError(
            "bfloat16 arrays need the package ml_dtypes: pip install 'zkv[bf16]'"
        ) from error
    view: Array = stored.view(ml_dtypes.bfloat16)
    return view


def all_finite(stored: Array, dtype: DType) -> bool:
    """Return whether no element is NaN or infinite; integers always are finite.

    One dot product answers for almost all arrays at memory speed; only when it is not finite
    (a NaN, an Inf, or squares that overflow) is each element looked at.
    """
    if not dtype.floating or stored.size == 0:
        return True
    wide = widen(stored, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.dot(wide, wide))
    return bool(np.isfinite(total)) or bool(np.isfinite(wide).all())
