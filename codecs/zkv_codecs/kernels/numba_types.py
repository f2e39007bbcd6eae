"""The types of kernel arguments, and the one way in which kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba import types

_F = TypeVar("_F", bound=Callable[..., Any])


def _flat(scalar: Any, readonly: bool) -> Any:
    return types.Array(scalar, 1, "C", readonly=readonly)


F4, F4_IN = _flat(types.float32, False), _flat(types.float32, True)
F8, F8_IN = _flat(types.float64, False), _flat(types.float64, True)
I1, I1_IN = _flat(types.int8, False), _flat(types.int8, True)
I4, I4_IN = _flat(types.int32, False), _flat(types.int32, True)
U1, U1_IN = _flat(types.uint8, False), _flat(types.uint8, True)
U2, U2_IN = _flat(types.uint16, False), _flat(types.uint16, True)
U4, U4_IN = _flat(types.uint32, False), _flat(types.uint32, True)
U8, U8_IN = _flat(types.uint64, False), _flat(types.uint64, True)
INT = types.int64
"""Arrays of these types are flat and C-contiguous. `_IN` takes read-only arrays too; what a kernel
writes to must not be one."""


def kernel(*arguments: Any, returns: Any = types.void) -> Callable[[_F], _F]:
    """Compile for just these argument types, at once; the machine code is kept on disk.

    Numba finds it there by the contents of the kernel's own file: helpers stand in that file, and
    whoever changes a constant of another one deletes the `__pycache__` beside it.

    Without the GIL, so that threads encode side by side; neither `parallel` (its threads clash with
    a caller's and with forks) nor `fastmath` (it removes the checks for NaN).
    """
    signature = returns(*(_type(one) for one in arguments))

    def compiled(function: _F) -> _F:
        made: _F = numba.njit(signature, nogil=True, cache=True, error_model="numpy")(function)
        return made

    return compiled


def helper(function: _F) -> _F:
    """Compile a function of numbers that kernels call; LLVM inlines it into them."""
    made: _F = numba.njit(nogil=True, error_model="numpy", inline="never")(function)
    return made


def part(function: _F) -> _F:
    """Make a function of arrays a part of the kernels that call it.

    A call would count the references to each array up and down, atomically: for each block of 256
    elements that is as dear as coding them.
    """
    made: _F = numba.njit(nogil=True, error_model="numpy", inline="always")(function)
    return made


def _type(one: Any) -> Any:
    return getattr(types, one) if isinstance(one, str) else one
