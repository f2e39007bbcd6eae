"""CUDA's kernels: their text beside this module, compiled by CuPy when one is first launched.

The text is CUDA C++, so that it can be compiled for every card where there is none, and run on a
CPU by a test. Launches go to CuPy's current stream and wait for nothing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.resources
from typing import Any

FAMILIES = ("ints",)
"""Families with a text."""

OPTIONS = ("-std=c++17", "-fmad=false")
"""No fused multiply-add: the bits are those of NumPy. Division, roots and subnormals are IEEE's
without an option."""

THREADS = 256
"""Threads in a block."""

WARP = 32
"""Threads that step together."""


def source(family: str) -> str:
    """Return a family's CUDA text, with what all families share before it."""
    folder = importlib.resources.files("zkv_codecs.kernels") / "cuda"
    return "\n".join((folder / f"{name}.cu").read_text("utf-8") for name in ("common", family))


@functools.cache
def function(family: str, name: str) -> Any:
    """Return a kernel, to be called with a grid, a block and arguments; CuPy compiles its family.

    Raises:
        ImportError: CuPy is not installed.
    """
    return _module(family).get_function(name)


def per_element(family: str, name: str, count: int, *arguments: Any) -> None:
    """Launch a kernel with one thread for each of `count` elements; with none, do nothing."""
    launch(family, name, -(-count // THREADS), *arguments)


def per_block(family: str, name: str, count: int, block: int, *arguments: Any) -> None:
    """Launch a kernel with one warp for each block of `block` elements."""
    launch(family, name, -(-count // (block * (THREADS // WARP))), *arguments)


def launch(family: str, name: str, blocks: int, *arguments: Any) -> None:
    """Launch a kernel with so many blocks of `THREADS` threads.

    Arguments are CuPy arrays and NumPy scalars of exactly the types in the text.
    """
    if blocks:
        function(family, name)((blocks,), (THREADS,), arguments)


@functools.cache
def _module(family: str) -> Any:
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise ImportError(
            "kernels 'cuda' need CuPy: pip install 'zkv[cuda12]' or 'zkv[cuda13]'"
        ) from error
    return cupy.RawModule(code=source(family), options=OPTIONS)
