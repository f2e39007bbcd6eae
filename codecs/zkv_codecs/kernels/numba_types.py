"""The types of kernel arguments, and the one way in which kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba import types
from numba.core.compiler_lock import global_compiler_lock

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
    """Compile for just these argument types, when first needed; the machine code is kept on disk.

    Nothing is compiled at import: a codec needs a few kernels of a family, and each takes up to a
    second or two. Whether Python or another kernel calls it first, it is compiled for its own
    signature and no other, so that there is one piece of machine code for read-only arrays and
    others. The disk cache sees changes of the kernel's own file only: what it calls and what
    changes with it should stand there too.

    Numba finds it there by the contents of the kernel's own file: helpers stand in that file, and
    whoever changes a constant of another one deletes the `__pycache__` beside it.

    Without the GIL, so that threads encode side by side; neither `parallel` (its threads clash with
    a caller's and with forks) nor `fastmath` (it removes the checks for NaN).
    """
    signature = returns(*(_type(one) for one in arguments))

    def made(function: _F) -> _F:
        dispatcher = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
        from_kernels = dispatcher.get_call_template

        def compiled() -> Any:
            # Several threads may be the first; the compiler's own lock may be taken twice.
            with global_compiler_lock:
                if not dispatcher.signatures:
                    dispatcher.compile(signature)
                    dispatcher.disable_compile()
            return dispatcher

        def template(args: Any, kws: Any) -> Any:
            compiled()
            return from_kernels(args, kws)

        dispatcher.get_call_template = template
        dispatcher.compiled = compiled
        return cast(_F, dispatcher)

    return made


class Kernels:
    """A module's kernels, each compiled when it is first asked for."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        compiled = getattr(found, "compiled", None)
        ready = found if compiled is None else compiled()
        setattr(self, name, ready)
        return ready


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
