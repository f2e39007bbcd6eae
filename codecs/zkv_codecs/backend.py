"""Which kernels compute: NumPy's (the specification), Numba's, or CUDA's through CuPy.

All families of kernels exist for each backend as modules of the same function names, which write
into arrays that the caller has made. A module is imported when it is first asked for, and compiles
all its kernels then: `warm` does it ahead of the first push.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
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
        """Return the module with this family's kernels."""
        return importlib.import_module(f"zkv_codecs.kernels.{self.name}_{name}")

    @property
    def xp(self) -> Any:
        """NumPy, or CuPy for CUDA's kernels."""
        return np if self.name != "cuda" else importlib.import_module("cupy")


NUMPY = Backend("numpy")


def fastest() -> Backend:
    """Return Numba's kernels where Numba is installed (the extra `fast`), else NumPy's."""
    return Backend("numba") if importlib.util.find_spec("numba") else NUMPY
