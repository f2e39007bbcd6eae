"""Which kernels compute: NumPy's (the specification), Numba's, or CUDA's through CuPy.

All families of kernels exist for each backend as modules of the same function names, which write
into arrays that the caller has made. A kernel is compiled when it is first asked for;
`zkv_codecs.frames.warm` asks for those of a codec ahead of the first push.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

NAMES = ("numpy", "numba", "cuda")
FAMILIES = ("floats", "fp8", "ints", "signs", "random", "sparse", "indices")


@dataclass(frozen=True, slots=True)
class Backend:
    """Kernels of one kind, by family; `xp` makes the arrays that they write into."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"kernels {self.name!r}: choose one of {', '.join(NAMES)}")

    def family(self, name: str) -> Any:
        """Return this family's kernels, as attributes."""
        return _family(self.name, name)

    @property
    def xp(self) -> Any:
        """NumPy, or CuPy for CUDA's kernels."""
        return np if self.name != "cuda" else importlib.import_module("cupy")


@lru_cache
def _family(backend: str, name: str) -> Any:
    module = importlib.import_module(f"zkv_codecs.kernels.{backend}_{name}")
    if backend != "numba":
        return module
    return importlib.import_module("zkv_codecs.kernels.numba_types").Kernels(module)


NUMPY = Backend("numpy")


def fastest() -> Backend:
    """Return Numba's kernels where Numba is installed (the extra `fast`), else NumPy's."""
    return Backend("numba") if importlib.util.find_spec("numba") else NUMPY
