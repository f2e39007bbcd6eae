"""What stands in for CuPy where no device is: arrays in the host's memory, kernels on the CPU.

Our CUDA text is compiled for the CPU and launched as on a device (see `cuda_on_cpu`). What a device
would not forgive is an error here: a NumPy array among device arrays, a device array given to
NumPy's functions, an array of another device than the current one, and reading what was copied
asynchronously before anybody has waited for it (it is not there yet). New memory is full of what
others have left in it. What happened is recorded: launches, transfers, pinned memory.

Only what our code uses is here; everything else is an AttributeError.
"""

from __future__ import annotations

import functools
import operator
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import Library

from zkv_codecs.kernels import cuda_module

DEVICES = 2
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod")
ARITHMETIC += ("and_", "or_", "xor", "lshift", "rshift")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
GARBAGE = 0xA5


@functools.cache
def library(source: str) -> Library:
    """Compile a text for the CPU; what is loaded needs its file no more."""
    with tempfile.TemporaryDirectory() as folder:
        return Library(source, Path(folder))


class Machine:
    """The state of all devices: which is current, their streams, and what was done on them."""

    def __init__(self) -> None:
        self.device = 0
        self.streams = [0] * DEVICES
        self.pending: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self.launched: list[tuple[int, int, str]] = []
        """Device, stream and kernel."""
        self.to_host: list[int] = []
        """Bytes of each copy from a device, scalars included."""
        self.to_device: list[int] = []
        self.pinned: list[int] = []
        """Bytes of each piece of pinned memory."""
        self.waited: list[tuple[int, int]] = []
        """Device and stream of each wait for an event."""

    @property
    def current(self) -> tuple[int, int]:
        return self.device, self.streams[self.device]

    def flush(self, where: tuple[int, int]) -> None:
        for copy in self.pending.pop(where, []):
            copy()


machine = Machine()


class Device:
    """`cupy.cuda.Device`: a context manager."""

    def __init__(self, number: int | None = None) -> None:
        self.id = machine.device if number is None else int(number)
        self._before: list[int] = []

    def __enter__(self) -> Device:
        self._before.append(machine.device)
        machine.device = self.id
        return self

    def __exit__(self, *error: object) -> None:
        machine.device = self._before.pop()

    def synchronize(self) -> None:
        for where in [one for one in machine.pending if one[0] == self.id]:
            machine.flush(where)


class Stream:
    """`cupy.cuda.Stream`: a context manager that makes it the current one of its device."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._before: list[tuple[int, int]] = []

    def __enter__(self) -> Stream:
        self._before.append(machine.current)
        machine.streams[machine.device] = self.number
        return self

    def __exit__(self, *error: object) -> None:
        device, stream = self._before.pop()
        machine.streams[device] = stream


class Event:
    """`cupy.cuda.Event`: waiting for it does what its stream was given before it was recorded."""

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self._timed = not disable_timing
        self._where: tuple[int, int] | None = None

    def record(self) -> None:
        self._where = machine.current

    def synchronize(self) -> None:
        assert self._where is not None, "an event that was never recorded"
        machine.waited.append(self._where)
        machine.flush(self._where)


class _Pinned(bytearray):
    """Pinned memory: a buffer that knows itself."""


def alloc_pinned_memory(nbytes: int) -> _Pinned:
    machine.pinned.append(nbytes)
    return _Pinned(bytes([GARBAGE]) * nbytes)


def _operand(value: Any) -> Any:
    """What an operation works on: an array of the current device, or a number."""
    if isinstance(value, ndarray):
        if value.device.id != machine.device:
            raise RuntimeError(
                f"an array of device {value.device.id} while device {machine.device} is current"
            )
        return value.memory
    if isinstance(value, np.ndarray) or not np.isscalar(value):
        raise TypeError(f"Unsupported type {type(value)}")
    return value


def _index(key: Any) -> Any:
    if isinstance(key, ndarray):
        return _operand(key)
    if isinstance(key, np.ndarray):
        raise TypeError("a NumPy array as an index of a device array")
    return key


def _computed(function: Callable[..., Any], *operands: Any, **options: Any) -> ndarray:
    """The result of NumPy's function, on the current device; devices give no warnings."""
    given = [_operand(one) for one in operands]
    with np.errstate(all="ignore"):
        return ndarray(np.asarray(function(*given, **options)))


class ndarray:
    """`cupy.ndarray`: memory that only this module's functions and kernels can read."""

    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.device = Device()

    dtype = property(lambda self: self.memory.dtype)
    shape = property(lambda self: self.memory.shape)
    size = property(lambda self: self.memory.size)
    ndim = property(lambda self: self.memory.ndim)
    nbytes = property(lambda self: self.memory.nbytes)
    itemsize = property(lambda self: self.memory.itemsize)
    strides = property(lambda self: self.memory.strides)

    @property
    def flags(self) -> SimpleNamespace:
        flags = self.memory.flags
        return SimpleNamespace(c_contiguous=flags.c_contiguous, f_contiguous=flags.f_contiguous)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.str, "version": 3, "memory": self}

    def __array__(self, *given: Any, **options: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_function__(self, function: Any, *given: Any) -> Any:
        raise TypeError(f"NumPy's {function.__name__} was given a device array")

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, key: Any) -> ndarray:
        return self._view(self.memory[_index(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        _operand(self)[_index(key)] = _operand(value)

    def _view(self, memory: Any) -> ndarray:
        made = ndarray(np.asarray(memory))
        made.device = self.device
        return made

    # --- one number comes to the host ------------------------------------------------------------

    def item(self) -> Any:
        machine.to_host.append(self.itemsize)
        return _operand(self).item()

    def __int__(self) -> int:
        return int(self.item())

    __index__ = __int__

    def __float__(self) -> float:
        return float(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    # --- the same memory, or a copy on the device ------------------------------------------------

    def view(self, dtype: Any = None) -> ndarray:
        return self._view(self.memory if dtype is None else self.memory.view(dtype))

    def reshape(self, *shape: Any) -> ndarray:
        return self._view(self.memory.reshape(*shape))

    def astype(
        self,
        dtype: Any,
        order: Any = "K",
        casting: Any = None,
        subok: Any = None,
        copy: bool = True,
    ) -> ndarray:
        if not copy and self.dtype == dtype and (order == "K" or self.flags.c_contiguous):
            return self
        return _computed(lambda x: x.astype(dtype, order=order), self)

    def copy(self, order: str = "C") -> ndarray:
        return _computed(lambda x: x.copy(order), self)

    def fill(self, value: Any) -> None:
        # CuPy sets the memory to 0 for whatever equals 0, and −0.0 does.
        _operand(self).fill(_operand(value) or 0)

    def sort(self) -> None:
        _operand(self).sort()

    def sum(self, axis: Any = None, dtype: Any = None) -> ndarray:
        return _computed(np.sum, self, axis=axis, dtype=dtype)

    def max(self) -> ndarray:
        return _computed(np.max, self)

    def min(self) -> ndarray:
        return _computed(np.min, self)

    def all(self) -> ndarray:
        return _computed(np.all, self)

    def any(self) -> ndarray:
        return _computed(np.any, self)

    def argmax(self) -> ndarray:
        return _computed(np.argmax, self)

    # --- to the host -----------------------------------------------------------------------------

    def get(
        self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True
    ) -> Any:
        memory = _operand(self)
        machine.to_host.append(self.nbytes)
        if out is None:
            assert blocking, "a copy into memory that is not pinned would be waited for"
            machine.flush(machine.current)
            return np.array(memory, order=order)
        assert out.flags.c_contiguous
        assert memory.flags.c_contiguous
        assert (out.dtype, out.shape) == (memory.dtype, memory.shape)
        assert is_pinned(out)
        # In the order of the stream: what is written later is not seen.
        now = memory.copy()
        machine.pending.setdefault(machine.current, []).append(lambda: np.copyto(out, now))
        if blocking:
            machine.flush(machine.current)
        return out


def _operators() -> None:
    for name in (*ARITHMETIC, *COMPARISONS):
        act = getattr(operator, name)
        plain = name.rstrip("_")
        setattr(ndarray, f"__{plain}__", lambda self, other, act=act: _computed(act, self, other))
        if name in ARITHMETIC:
            setattr(
                ndarray, f"__r{plain}__", lambda self, other, act=act: _computed(act, other, self)
            )

            def inplace(self: Any, other: Any, act: Any = act) -> Any:
                memory = _operand(self)
                memory[...] = _computed(act, self, other).memory
                return self

            setattr(ndarray, f"__i{plain}__", inplace)
    for name in ("neg", "invert", "abs"):
        act = getattr(operator, name)
        setattr(ndarray, f"__{name}__", lambda self, act=act: _computed(act, self))


_operators()


def is_pinned(array: Any) -> bool:
    """Return whether a NumPy array lies in pinned memory."""
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base.obj if isinstance(base, memoryview) else base, _Pinned)


def _empty(shape: Any, dtype: Any = float) -> ndarray:
    made = np.empty(shape, dtype)
    made.reshape(-1).view(np.uint8)[:] = GARBAGE
    return ndarray(made)


def _asarray(value: Any, dtype: Any = None) -> ndarray:
    if isinstance(value, ndarray):
        return value if dtype is None else value.astype(dtype, copy=False)
    if hasattr(value, "__cuda_array_interface__"):
        shared = value.__cuda_array_interface__["memory"]
        made: ndarray = shared.view()
        return made
    made = ndarray(np.array(value, dtype))
    machine.to_device.append(made.nbytes)
    return made


def _concatenate(parts: Any) -> ndarray:
    given = [_operand(one) for one in parts]
    assert all(isinstance(one, np.ndarray) for one in given), "Only cupy arrays can be concatenated"
    assert len({one.dtype for one in given}) == 1
    return ndarray(np.concatenate(given))


class CUDARuntimeError(RuntimeError):
    """What CuPy raises where there is no device."""


class _Module:
    """`cupy.cuda.Module`: a text on the CPU."""

    def load(self, code: bytes) -> None:
        self._library = library(code.decode())

    def get_function(self, name: str) -> Callable[..., None]:
        device = machine.device

        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
            assert device == machine.device, "a kernel that was loaded on another device"
            given = []
            for one in arguments:
                if not isinstance(one, ndarray | np.generic):
                    raise TypeError(f"{name}: an argument of type {type(one)}")
                given.append(_operand(one))
            machine.launched.append((*machine.current, name))
            self._library.launch(name, *grid, *block, tuple(given))

        return launch


def _module() -> SimpleNamespace:
    cuda = SimpleNamespace(
        Device=Device,
        Stream=Stream,
        Event=Event,
        Module=_Module,
        alloc_pinned_memory=alloc_pinned_memory,
        get_elapsed_time=lambda start, end: 1.0,
        compiler=SimpleNamespace(
            compile_using_nvrtc=lambda source, options, filename: (source.encode(), None)
        ),
        runtime=SimpleNamespace(
            getDevice=lambda: machine.device,
            getDeviceCount=lambda: DEVICES,
            CUDARuntimeError=CUDARuntimeError,
        ),
    )
    return SimpleNamespace(
        ndarray=ndarray,
        cuda=cuda,
        empty=_empty,
        zeros=lambda shape, dtype=float: ndarray(np.zeros(shape, dtype)),
        empty_like=lambda x: _empty(_operand(x).shape, x.dtype),
        zeros_like=lambda x: _computed(np.zeros_like, x),
        asarray=_asarray,
        asnumpy=lambda x: x.get(),
        ascontiguousarray=lambda x: (
            _computed(np.ascontiguousarray, x) if not x.flags.c_contiguous else x
        ),
        concatenate=_concatenate,
        copyto=lambda target, x: target.__setitem__(..., x),
        where=lambda condition, x, y: _computed(np.where, condition, x, y),
        abs=lambda x: _computed(np.abs, x),
        isfinite=lambda x: _computed(np.isfinite, x),
        array_equal=lambda x, y: _computed(np.array_equal, x, y),
    )


@contextmanager
def installed() -> Iterator[Machine]:
    """Stand in for CuPy; yield what is recorded. All devices are new."""

    def forget() -> None:
        cuda_module._function.cache_clear()
        cuda_module._module.cache_clear()
        machine.__init__()  # type: ignore[misc]

    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", _module())
        yield machine
    forget()
