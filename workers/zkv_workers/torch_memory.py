"""The memory of parameters that a worker holds only while something uses them.

A key is filled when it gets its first holder, and its memory is given back with its last one; the
parameter stays the same object all the time. Knows no batches and no modules.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from zkv.dtypes import DTYPES, Array, user_view
from zkv_workers.torch_awaited import guard, release
from zkv_workers.torch_released import ReleasedParameter

Fill = Callable[[dict[str, Array]], None]
"""Writes the values of these keys into these arrays."""


@dataclass(slots=True)
class _Place:
    parameter: Any
    storage: Any
    nbytes: int
    holders: set[Hashable] = field(default_factory=set)


_MMAP_THRESHOLD = -3
"""The parameter of mallopt(3)."""
_LARGE_BYTES = 128 * 1024


def return_memory() -> None:
    """Have large blocks that are freed go back to the system at once, where the C library is glibc.

    Else it raises its limit for that with the first one, and blocks that come and go leave holes in
    its own heap, which no next one quite fits into.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)


def raw_view(tensor: Any) -> Array:
    """Return a contiguous tensor's own memory as an array, which must not be kept: it does not keep
    the memory (`Tensor.numpy` does, and that can never be given back)."""
    nbytes = tensor.numel() * tensor.element_size()
    dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
    buffer = (ctypes.c_byte * nbytes).from_address(tensor.data_ptr())
    stored = np.frombuffer(buffer, dtype.stored)
    return user_view(stored, dtype).reshape(tuple(tensor.shape))


class Memory:
    """Parameters by key, contiguous and each alone in its memory, which is given back at once.

    `use(key)` is called when a parameter without memory is used all the same; it has to hold it.
    """

    def __init__(self, parameters: Mapping[str, Any], use: Callable[[str], None]) -> None:
        self.held_bytes = 0
        self.held_bytes_max = 0
        """Since the start; the caller may set it back."""
        self._use = use
        self._places: dict[str, _Place] = {}
        self._at: dict[int, str] = {}
        """Keys by the address of their memory."""
        for key, parameter in parameters.items():
            release(parameter)
            nbytes = parameter.numel() * parameter.element_size()
            self._places[key] = _Place(parameter, parameter.untyped_storage(), nbytes)
            self._free(key)

    def hold(self, keys: Iterable[str], why: Hashable, fill: Fill) -> None:
        """Let these keys have values until `drop` is called with the same reason.

        Raises:
            RuntimeError: a parameter was given other memory; the key is named.
            Whatever `fill` raises: then nothing has changed.
        """
        wanted = [self._places[key] for key in keys]
        fresh = [key for key in keys if not self._places[key].holders]
        try:
            self._fill(fresh, fill)
        except BaseException:
            for key in fresh:
                self._free(key)
            raise
        for place in wanted:
            place.holders.add(why)
        self.held_bytes += sum(self._places[key].nbytes for key in fresh)
        self.held_bytes_max = max(self.held_bytes, self.held_bytes_max)

    def _fill(self, keys: list[str], fill: Fill) -> None:
        outs: dict[str, Array] = {}
        staged: list[tuple[Any, Any]] = []
        for key in keys:
            place = self._places[key]
            release(place.parameter)
            if not place.nbytes:
                continue
            place.storage.resize_(place.nbytes)
            if place.parameter.data_ptr() != place.storage.data_ptr():
                raise RuntimeError(
                    f"key {key!r}: the parameter was given other memory after attach (by .data, or "
                    "by .to of its module); call optimizer.detach() and attach the model again"
                )
            self._at[place.storage.data_ptr()] = key
            target = place.parameter
            if target.device.type != "cpu":
                target = torch.empty(target.shape, dtype=target.dtype)
                staged.append((place.parameter, target))
            outs[key] = raw_view(target)
        if outs:
            fill(outs)
        for parameter, near in staged:
            # Not a change that autograd has to know of: they are the values of its version again.
            parameter.data.copy_(near)

    def drop(self, keys: Iterable[str], why: Hashable) -> None:
        """Have no use for these keys any more, for that reason."""
        for key in keys:
            place = self._places[key]
            if why in place.holders:
                place.holders.discard(why)
                if not place.holders:
                    self.held_bytes -= place.nbytes
                    self._free(key)

    def held_for(self, why: Hashable) -> list[str]:
        """Return the keys that are held for a reason."""
        return [key for key, place in self._places.items() if why in place.holders]

    def is_held(self, key: str) -> bool:
        """Return whether a key has its values."""
        return bool(self._places[key].holders)

    def clear(self) -> None:
        """Have no use for anything any more."""
        for key, place in self._places.items():
            for why in list(place.holders):
                self.drop([key], why)

    def _free(self, key: str) -> None:
        place = self._places[key]
        self._at.pop(place.storage.data_ptr(), None)
        if place.nbytes:
            if not place.storage.resizable():
                # Somebody has an array of NumPy's that looks at it, and may keep that.
                place.parameter.data = torch.empty_like(place.parameter)
                place.storage = place.parameter.untyped_storage()
            place.storage.resize_(0)
            guard(place.parameter, partial(self._use, key), ReleasedParameter)

    def key_of(self, tensor: Any) -> str | None:
        """Return the key in whose memory a tensor is; None: in no key's."""
        if tensor.layout is not torch.strided or not self._at:
            return None
        return self._at.get(tensor.untyped_storage().data_ptr())

    def nbytes(self, keys: Iterable[str]) -> int:
        """Return what the values of these keys take."""
        return sum(self._places[key].nbytes for key in keys)

    def view(self, key: str, like: tuple[Any, Any, Any, Any]) -> Any:
        """Return a tensor in a held key's memory, of this (dtype, shape, strides, offset)."""
        dtype, shape, strides, offset = like
        place = self._places[key]
        with torch.no_grad():
            found = torch.empty(0, dtype=dtype, device=place.parameter.device)
            return found.set_(place.storage, offset, shape, strides)
