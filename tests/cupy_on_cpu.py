"""What stands in for CuPy where no device is: arrays in the host's memory, kernels on the CPU.

Our CUDA text is compiled for the CPU and launched as on a device (see `cuda_on_cpu`). What a device
would not forgive is an error here: a NumPy array among device arrays, a device array given to
NumPy's functions, an array of another device than the current one, reading what was copied
asynchronously before anybody has waited for it (it is not there yet), and what streams do to each
other's memory with no event in between (see `streams_on_cpu`). New memory is full of what others
have left in it. What happened is recorded: launches, transfers, pinned memory.

Only what our code uses is here; everything else is an AttributeError.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import Library
from streams_on_cpu import Clock, Memory, Order, Race, StreamId

from zkv_codecs.kernels import cuda_module
from zkv_workers import lanes, probe

DEVICES = 4
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod")
ARITHMETIC += ("and_", "or_", "xor", "lshift", "rshift")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
GARBAGE = 0xA5


def byte_bounds(array: Any) -> tuple[int, int]:
    """The addresses between which an array lies."""
    found = np.lib.array_utils if hasattr(np.lib, "array_utils") else np
    return found.byte_bounds(array)  # type: ignore[attr-defined, no-any-return]


@functools.cache
def library(source: str) -> Library:
    """Compile a text for the CPU; what is loaded needs its file no more."""
    with tempfile.TemporaryDirectory() as folder:
        return Library(source, Path(folder))


class Machine:
    """The state of all devices: which is current, their streams, and what was done on them."""

    def __init__(self) -> None:
        self.order = Order()
        self.races: list[str] = []
        """Memory that was given away too early: nobody can be told then."""
        self.local = threading.local()
        """The current device and streams are each thread's own."""
        self.numbers = itertools.count(100)
        self.copied: list[tuple[StreamId, str]] = []
        """Stream and direction of each copy of an array: "to host", "to device", "peer"."""
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
    def device(self) -> int:
        return getattr(self.local, "device", 0)

    @device.setter
    def device(self, number: int) -> None:
        self.local.device = number

    @property
    def streams(self) -> list[int]:
        if not hasattr(self.local, "streams"):
            self.local.streams = [0] * DEVICES
        found: list[int] = self.local.streams
        return found

    @property
    def current(self) -> StreamId:
        return self.device, self.streams[self.device]

    @property
    def pending(self) -> int:
        """Copies to the host that nobody has waited for."""
        return len(self.order.deliveries)

    def wait(self, stream: StreamId) -> None:
        """The host waits for all that a stream was given."""
        self.order.host_waits(self.order.now(stream))


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
        for where in [one for one in machine.order.clocks if one[0] == self.id]:
            machine.wait(where)


class Stream:
    """`cupy.cuda.Stream`: a context manager that makes it the current one of its device."""

    def __init__(self, number: int | None = None, non_blocking: bool = False) -> None:
        self.number = next(machine.numbers) if number is None else number
        self.device_id = machine.device
        self._before = threading.local()

    @property
    def where(self) -> StreamId:
        return self.device_id, self.number

    def __enter__(self) -> Stream:
        if self.device_id != machine.device:
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with "
                f"the current device ({machine.device})"
            )
        self._stack.append(machine.current)
        machine.streams[machine.device] = self.number
        return self

    def __exit__(self, *error: object) -> None:
        device, stream = self._stack.pop()
        machine.streams[device] = stream

    @property
    def _stack(self) -> list[StreamId]:
        if not hasattr(self._before, "stack"):
            self._before.stack = []
        found: list[StreamId] = self._before.stack
        return found

    def wait_event(self, event: Event) -> None:
        assert event.clock is not None, "an event that was never recorded"
        machine.order.waits(self.where, event.clock)

    def synchronize(self) -> None:
        machine.wait(self.where)


def external_stream(pointer: int, device: int = -1) -> Stream:
    """Another library's stream: here its pointer is its number."""
    with Device(machine.device if device == -1 else device):
        return Stream(pointer)


def get_current_stream() -> Stream:
    device, number = machine.current
    with Device(device):
        return Stream(number)


class Event:
    """`cupy.cuda.Event`: waiting for it does what its stream was given before it was recorded."""

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self._timed = not disable_timing
        self._device = machine.device
        self._where: StreamId | None = None
        self.clock: Clock | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._where = machine.current if stream is None else stream.where
        assert self._where[0] == self._device, "an event of another device than its stream's"
        self.clock = machine.order.now(self._where)

    def synchronize(self) -> None:
        assert self._where is not None, "an event that was never recorded"
        assert self.clock is not None
        machine.waited.append(self._where)
        machine.order.host_waits(self.clock)


class _Pinned(bytearray):
    """Pinned memory: a buffer that knows itself."""


def alloc_pinned_memory(nbytes: int) -> _Pinned:
    machine.pinned.append(nbytes)
    return _Pinned(bytes([GARBAGE]) * nbytes)


def _touch(array: ndarray, stream: StreamId, *, writes: bool) -> None:
    """An operation of a stream reads or writes an array."""
    if array.size:
        array.history.use(*byte_bounds(array.memory), stream, writes=writes)


def _operand(value: Any, *, writes: bool = False) -> Any:
    """What an operation works on: an array of the current device, or a number."""
    if isinstance(value, ndarray):
        if value.device.id != machine.device:
            raise RuntimeError(
                f"an array of device {value.device.id} while device {machine.device} is current"
            )
        _touch(value, machine.current, writes=writes)
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

    def __init__(self, memory: Any, history: Memory | None = None) -> None:
        self.memory = memory
        self.device = Device()
        if history is None:
            history = Memory(machine.order, machine.current, machine.races)
            self.history = history
            _touch(self, machine.current, writes=True)
        self.history = history

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
        given = _operand(value)
        _operand(self, writes=True)[_index(key)] = given

    def _view(self, memory: Any) -> ndarray:
        made = ndarray(np.asarray(memory), self.history)
        made.device = self.device
        return made

    # --- one number comes to the host ------------------------------------------------------------

    def item(self) -> Any:
        machine.to_host.append(self.itemsize)
        value = _operand(self).item()
        machine.wait(machine.current)
        return value

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
        _operand(self, writes=True).fill(_operand(value) or 0)

    def sort(self) -> None:
        _operand(self, writes=True).sort()

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
        on = machine.current if stream is None else stream.where
        assert on[0] == self.device.id == machine.device, "a copy on another device's stream"
        _touch(self, on, writes=False)
        memory = self.memory
        machine.to_host.append(self.nbytes)
        machine.copied.append((on, "to host"))
        if out is None:
            assert blocking, "a copy into memory that is not pinned would be waited for"
            machine.wait(on)
            return np.array(memory, order=order)
        assert out.flags.c_contiguous
        assert memory.flags.c_contiguous
        assert (out.dtype, out.shape) == (memory.dtype, memory.shape)
        assert blocking or is_pinned(out)
        # In the order of the stream: what is written later is not seen.
        now = memory.copy()
        machine.order.deliver(on, lambda: np.copyto(out, now))
        if blocking:
            machine.wait(on)
        return out

    def set(self, given: Any, stream: Any = None) -> None:
        """From the host, in the order of a stream."""
        on = machine.current if stream is None else stream.where
        assert on[0] == self.device.id == machine.device, "a copy on another device's stream"
        assert self.flags.c_contiguous
        assert (given.dtype, given.shape) == (self.dtype, self.shape)
        _touch(self, on, writes=True)
        machine.to_device.append(self.nbytes)
        machine.copied.append((on, "to device"))
        np.copyto(self.memory, given)


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
                result = _computed(act, self, other).memory
                _operand(self, writes=True)[...] = result
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
    assert given
    assert all(isinstance(one, np.ndarray) for one in given), "Only cupy arrays can be concatenated"
    assert len({one.dtype for one in given}) == 1
    return ndarray(np.concatenate(given))


def _copyto(target: ndarray, given: Any) -> None:
    """Also between devices, in the order of the current stream, which has to be of one of them."""
    if isinstance(given, ndarray) and given.device.id != target.device.id:
        assert machine.device in (given.device.id, target.device.id)
        assert (given.dtype, given.size) == (target.dtype, target.size)
        assert given.flags.c_contiguous
        assert target.flags.c_contiguous
        _touch(given, machine.current, writes=False)
        _touch(target, machine.current, writes=True)
        machine.copied.append((machine.current, "peer"))
        np.copyto(target.memory, given.memory)
    else:
        target[...] = given


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
                # Which of them it writes to, only its text knows.
                given.append(_operand(one, writes=True))
            machine.launched.append((*machine.current, name))
            self._library.launch(name, *grid, *block, tuple(given))

        return launch


def _module() -> SimpleNamespace:
    cuda = SimpleNamespace(
        Device=Device,
        Stream=Stream,
        ExternalStream=external_stream,
        Event=Event,
        Module=_Module,
        alloc_pinned_memory=alloc_pinned_memory,
        get_current_stream=get_current_stream,
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
        copyto=_copyto,
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
        lanes.forget()
        probe.forget()
        machine.__init__()  # type: ignore[misc]

    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", _module())
        yield machine
        lanes.forget()
        races = machine.races
    forget()
    if races:
        raise Race("; ".join(sorted(set(races))[:3]))
