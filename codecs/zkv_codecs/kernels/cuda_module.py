"""CUDA's kernels: their text beside this module, compiled when one is first launched on a device.

The text is CUDA C++, so that it can be compiled for every card where there is none, and run on a
CPU by a test. CuPy brings the compiler, loads what it gives and launches it, on the current stream;
nothing here waits for a kernel. CuPy's own `RawModule` is not used: it adds `-ftz=true` to all
options (cupy/cupy issue 9576), so that subnormal numbers would become zeros, and other bits.
"""

from __future__ import annotations

import functools
import importlib
import importlib.resources
from typing import Any

import numpy as np

from zkv.dtypes import Array

TEXTS = {
    "floats": ("common", "narrow", "floats"),
    "fp8": ("common", "narrow", "fp8"),
    "ints": ("common", "ints"),
    "signs": ("common", "blocks", "signs"),
    "random": ("common", "blocks", "random"),
    "sparse": ("common", "sparse"),
    "indices": ("common", "indices"),
}
"""The families, and the files that make up the text of each."""

OPTIONS = ("-std=c++17", "-fmad=false")
"""No fused multiply-add: the bits are those of NumPy. Without an option, division, roots and
subnormal numbers are IEEE's."""

THREADS = 256
"""Threads in a block."""

WARP = 32
"""Threads that step together."""


def source(family: str) -> str:
    """Return a family's CUDA text."""
    folder = importlib.resources.files("zkv_codecs.kernels") / "cuda"
    return "\n".join((folder / f"{name}.cu").read_text("utf-8") for name in TEXTS[family])


def function(family: str, name: str) -> Any:
    """Return a kernel for the current device, to be called with a grid, a block and arguments.

    Raises:
        ImportError: CuPy is not installed.
    """
    return _function(family, name, _cupy().cuda.runtime.getDevice())


def per_element(family: str, name: str, n: int, inputs: tuple[Any, ...], *rest: Any) -> None:
    """Launch a kernel with one thread for each of n elements; with none, do nothing.

    Its arguments are the inputs, n, and the rest.
    """
    launch(family, name, -(-n // THREADS), *inputs, np.int64(n), *rest)


def per_chunk(
    family: str, name: str, n: int, chunk: int, inputs: tuple[Any, ...], *rest: Any
) -> None:
    """Launch a kernel with one warp for each `chunk` of n elements, a size that its text knows."""
    warps = THREADS // WARP
    launch(family, name, -(-n // (chunk * warps)), *inputs, np.int64(n), *rest)


def per_block(
    family: str, name: str, n: int, block: int, inputs: tuple[Any, ...], *rest: Any
) -> None:
    """Launch a kernel with one warp for each `block` of n elements.

    Its arguments are the inputs, n, the size of a block, and the rest.
    """
    per_chunk(family, name, n, block, inputs, np.int64(block), *rest)


def launch(family: str, name: str, blocks: int, *arguments: Any) -> None:
    """Launch a kernel with so many blocks of `THREADS` threads.

    Arguments are CuPy arrays and NumPy scalars of exactly the types in the text.
    """
    if blocks:
        function(family, name)((blocks,), (THREADS,), arguments)


def empty(count: int, dtype: Any) -> Array:
    """Return a flat array on the current device, with anything in it."""
    made: Array = _cupy().empty(count, dtype)
    return made


def array(values: Array) -> Array:
    """Return a copy of a NumPy array on the current device."""
    made: Array = _cupy().asarray(values)
    return made


@functools.cache
def _function(family: str, name: str, device: int) -> Any:
    return _module(family, device).get_function(name)


@functools.cache
def _module(family: str, device: int) -> Any:
    """Return a family's machine code, loaded on the current device, which is `device`."""
    cuda = _cupy().cuda
    code, _ = cuda.compiler.compile_using_nvrtc(source(family), OPTIONS, filename=f"{family}.cu")
    module = cuda.Module()
    module.load(code)
    return module


def _cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise ImportError(
            "kernels 'cuda' need CuPy: pip install 'zkv[cuda12]' or 'zkv[cuda13]'"
        ) from error
