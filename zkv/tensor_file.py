"""Arrays as the bytes of a safetensors file, and back.

The library's own writer wants all arrays as one string of bytes, which would be the whole shard a
second time; here a header is made, and the arrays follow it one by one, as they lie in memory. What
is read comes from a disk that may be broken: any bytes are such a file or a `BadSnapshot`. Pure:
knows no files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from zkv.dtypes import Array
from zkv.errors import BadSnapshot

LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000
"""The format's own limit."""
METADATA = "__metadata__"
_NAMES = {
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    **{f"int{8 * n}": f"I{8 * n}" for n in (1, 2, 4, 8)},
    **{f"uint{8 * n}": f"U{8 * n}" for n in (1, 2, 4, 8)},
}
_DTYPES = {short: np.dtype(name) for name, short in _NAMES.items()}

_UInt = Annotated[int, Meta(ge=0)]


class _Tensor(Struct, frozen=True, forbid_unknown_fields=True):
    """What a header says of one array."""

    dtype: str
    shape: Annotated[tuple[_UInt, ...], Meta(max_length=32)]
    data_offsets: tuple[_UInt, _UInt]

    @property
    def nbytes(self) -> int:
        """What its dtype and shape need."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_metadata = msgspec.json.Decoder(dict[str, str])
_tensor = msgspec.json.Decoder(_Tensor)


def pieces(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> Iterator[bytes | Array]:
    """Yield the bytes of a file in order: the header, then each array (flat uint8) as it lies in
    memory, if it is contiguous.

    Raises:
        ValueError: a name is the one that the format has for itself, or an array's dtype is none of
            the format's.
    """
    # The larger elements first, so that each array is aligned: the format has no holes.
    ordered = sorted(arrays.items(), key=lambda one: -one[1].dtype.itemsize)
    described: dict[str, object] = {METADATA: dict(metadata)}
    at = 0
    for name, array in ordered:
        if name in described or array.dtype.name not in _NAMES:
            raise ValueError(f"array {name!r} of {array.dtype} cannot be in a safetensors file")
        shape, end = list(array.shape), at + array.nbytes
        short = _NAMES[array.dtype.name]
        described[name] = {"dtype": short, "shape": shape, "data_offsets": [at, end]}
        at = end
    header = msgspec.json.encode(described)
    header += b" " * (-len(header) % LENGTH_BYTES)
    if len(header) > HEADER_BYTES_MAX:
        raise ValueError(f"a header of {len(header)} bytes; the format has {HEADER_BYTES_MAX}")
    yield len(header).to_bytes(LENGTH_BYTES, "little") + header
    for _, array in ordered:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def opened(data: Any, file: str) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the arrays of a file, which look at `data` (bytes or flat uint8), and its metadata.

    Raises:
        BadSnapshot: it is no such file; `file`, what was expected and what was found are named.
    """
    whole = np.frombuffer(data, np.uint8)
    if whole.size < LENGTH_BYTES:
        raise BadSnapshot(f"{file} has {whole.size} bytes, too few for a safetensors file")
    size = int.from_bytes(whole[:LENGTH_BYTES].tobytes(), "little")
    begins = LENGTH_BYTES + size
    if size > HEADER_BYTES_MAX or begins > whole.size:
        raise BadSnapshot(f"{file} names a header of {size} bytes, and has {whole.size} in all")
    try:
        raw = _header.decode(whole[LENGTH_BYTES:begins].tobytes())
        metadata = _metadata.decode(raw.pop(METADATA, msgspec.Raw(b"{}")))
        found = {name: _tensor.decode(one) for name, one in raw.items()}
    except (ValueError, RecursionError) as error:
        raise BadSnapshot(f"{file} has no header of a safetensors file: {error}") from error
    return _arrays(found, whole[begins:], file), metadata


def _arrays(found: Mapping[str, _Tensor], body: Array, file: str) -> dict[str, Array]:
    arrays, at = {}, 0
    for name, one in sorted(found.items(), key=lambda pair: pair[1].data_offsets):
        if one.dtype not in _DTYPES:
            raise BadSnapshot(f"{file}: array {name!r} is of no type that is known here")
        start, stop = one.data_offsets
        if start != at or stop - start != one.nbytes or stop > body.size:
            raise BadSnapshot(
                f"{file}: array {name!r} needs {one.nbytes} bytes from {at} on, and has bytes "
                f"{start} to {stop} of {body.size}"
            )
        try:
            arrays[name] = body[start:stop].view(_DTYPES[one.dtype]).reshape(one.shape)
        except ValueError as error:
            raise BadSnapshot(f"{file}: array {name!r} has shape {one.shape}: {error}") from error
        at = stop
    if at != body.size:
        raise BadSnapshot(f"{file} has {body.size} bytes of arrays, and describes {at}")
    return arrays
