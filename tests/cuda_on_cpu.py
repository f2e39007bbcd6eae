"""CUDA's kernels on a CPU: their text, compiled by g++ behind a header that stands in for CUDA.

`Library.launch` takes what CuPy's kernels take, so that the launches of `zkv_codecs.kernels.cuda_*`
run too; and it is strict where a device is not: every argument must have exactly the type that the
kernel declares, inputs must come back unchanged, and nothing around an array may be written to.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zkv.dtypes import Array
from zkv_codecs.backend import NUMPY, Backend
from zkv_codecs.kernels import cuda_module

SHIM = Path(__file__).resolve().parent / "codecs" / "cuda_shim" / "cuda_shim.h"
KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\(\w+\) )?(\w+)\(')
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-U_FORTIFY_SOURCE"]
FLAGS += ["-Wall", "-Werror", "-Wno-unused-function"]
GUARD = 256
"""Bytes around each array that must stay as they are."""


class KernelError(AssertionError):
    """A kernel or a launch did what CUDA leaves undefined, or what no kernel of ours may do."""


def missing() -> str | None:
    """Return what keeps kernels from running here, if anything does."""
    if not sys.platform.startswith("linux"):
        return f"threads as fibres need Linux; this is {sys.platform}"
    return None if shutil.which("g++") else "g++ is not installed"


def kernels_in(source: str) -> list[str]:
    """Return the names of the kernels in a text, in its order."""
    return KERNEL.findall(source)


class Library:
    """Kernels of one text, launched as CuPy's are. `seed` decides which threads come first."""

    def __init__(self, source: str, folder: Path) -> None:
        reason = missing()
        if reason is not None:
            pytest.skip(reason)
        self.names = kernels_in(source)
        self.seed = 0
        text = folder / "kernels.cpp"
        built = folder / "kernels.so"
        lines = [f"SHIM_KERNEL({name})" for name in self.names]
        text.write_text("\n".join([source, *lines, ""]), "utf-8")
        command = ["g++", *FLAGS, "-include", str(SHIM), "-o", str(built), str(text)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        self._library = ctypes.CDLL(str(built))

    def parameters(self, name: str) -> list[str]:
        """Return the types that a kernel declares: `&f4` input, `*f4` output, `i8` number."""
        described = getattr(self._library, f"shim_parameters_{name}")
        described.restype = ctypes.c_char_p
        return described().decode().split()

    def launch(self, name: str, grid: int, threads: int, arguments: tuple[Any, ...]) -> None:
        """Run a kernel over a grid of blocks of so many threads.

        Raises:
            KernelError: the text says what.
        """
        types = self.parameters(name)
        if len(types) != len(arguments):
            raise KernelError(f"{name} takes {len(types)} arguments, not {len(arguments)}")
        for at, (kind, argument) in enumerate(zip(types, arguments, strict=True)):
            _check(f"{name}, argument {at}", kind, argument)
        passed = [_Passed(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(passed))(*(one.address for one in passed))
        run = getattr(self._library, f"shim_launch_{name}")
        run.restype = ctypes.c_char_p
        error = run(grid, threads, ctypes.c_uint64(self.seed), addresses)
        if error is not None:
            raise KernelError(f"{name}: {error.decode()}")
        for kind, one in zip(types, passed, strict=True):
            one.take_back(name, kind)


class Family:
    """One family of kernels in NumPy and in CUDA, to be compared bit by bit.

    Without a library of kernels on the CPU, CUDA's run on a device.
    """

    def __init__(self, name: str, library: Library | None) -> None:
        self.numpy = NUMPY.family(name)
        self.cuda = Backend("cuda").family(name)
        self.library = library

    def same(self, name: str, *arguments: Any, order: int = 0) -> tuple[Any, ...]:
        """Call a function of both with equal arguments; return them as NumPy's kernel left them.

        Arrays that can be written to are copied before; they must have the same bits afterwards,
        and the functions must return the same. `order` decides which threads come first.
        """
        wanted = tuple(_copied(one) for one in arguments)
        returned = getattr(self.numpy, name)(*wanted)
        mine = tuple(_copied(one) for one in arguments)
        assert self.call(name, *mine, order=order) == returned
        for at, (one, other) in enumerate(zip(mine, wanted, strict=True)):
            if isinstance(one, np.ndarray) and one.tobytes() != other.tobytes():
                np.testing.assert_array_equal(one, other, f"{name}, argument {at}", strict=True)
                raise AssertionError(f"{name}, argument {at}: zeros of other signs, or NaNs")
        return wanted

    def call(self, name: str, *arguments: Any, order: int = 0) -> Any:
        """Call CUDA's function with NumPy arrays, and return what it does."""
        function = getattr(self.cuda, name)
        if self.library is not None:
            self.library.seed = order
            return function(*arguments)
        import cupy

        there = [cupy.array(one) if isinstance(one, np.ndarray) else one for one in arguments]
        answer = function(*there)
        for one, other in zip(arguments, there, strict=True):
            if isinstance(one, np.ndarray) and one.flags.writeable:
                one[...] = cupy.asnumpy(other)
        return answer


class _HostCupy:
    """What of CuPy's arrays the functions use, in the host's memory."""

    @staticmethod
    def empty(count: int, dtype: Any) -> Array:
        # What is left of others: nothing may depend on it.
        return np.full(count * np.dtype(dtype).itemsize, 0xA5, np.uint8).view(dtype)

    asarray = staticmethod(np.array)


def family(name: str) -> Any:
    """Return a fixture: a family on the CPU, and on a device where there is one."""

    @pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
    def made(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Family]:
        if request.param == "gpu":
            yield Family(name, None)
            return
        library = Library(cuda_module.source(name), tmp_path_factory.mktemp(name))

        def function(asked: str, kernel: str) -> Any:
            assert asked == name
            return lambda grid, block, arguments: library.launch(kernel, *grid, *block, arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_module, "function", function)
            patch.setitem(sys.modules, "cupy", _HostCupy)
            yield Family(name, library)

    return made


def _copied(argument: Any) -> Any:
    if isinstance(argument, np.ndarray) and argument.flags.writeable:
        return argument.copy()
    return argument


def _check(where: str, kind: str, argument: Any) -> None:
    if kind[0] not in "&*":
        if not isinstance(argument, np.generic) or argument.dtype != np.dtype(kind):
            raise KernelError(f"{where}: {argument!r} for a number of type {kind}")
        return
    if not isinstance(argument, np.ndarray) or argument.dtype != np.dtype(kind[1:]):
        raise KernelError(f"{where}: not an array of {kind[1:]}")
    if argument.ndim != 1 or not argument.flags.c_contiguous:
        raise KernelError(f"{where}: not flat and contiguous")


class _Passed:
    """An argument in memory of its own: an array between two guards, or a number."""

    def __init__(self, argument: Any) -> None:
        self.argument = argument
        if isinstance(argument, np.ndarray):
            # All ones: a float that is read from here is not a number, an integer is far off.
            self._memory = np.full(argument.nbytes + 2 * GUARD, 0xFF, np.uint8)
            self._data = self._memory[GUARD : GUARD + argument.nbytes]
            self._data[:] = argument.view(np.uint8)
            self._value: Any = ctypes.c_void_p(self._data.ctypes.data)
        else:
            self._value = np.array([argument])

    @property
    def address(self) -> int:
        """Where the value that is passed stands."""
        if isinstance(self.argument, np.ndarray):
            return ctypes.addressof(self._value)
        return int(self._value.ctypes.data)

    def take_back(self, name: str, kind: str) -> None:
        """Copy what was written; what must not be, must not have been."""
        if not isinstance(self.argument, np.ndarray):
            return
        if not (self._memory[:GUARD] == 0xFF).all() or not (self._memory[-GUARD:] == 0xFF).all():
            raise KernelError(f"{name} wrote beside an array of {self.argument.size} {kind[1:]}")
        if kind[0] == "*":
            self.argument[:] = self._data.view(self.argument.dtype)
        elif self._data.tobytes() != self.argument.tobytes():
            raise KernelError(f"{name} wrote to an input")
