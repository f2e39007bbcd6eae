"""Kernels of Numba are compiled once for each machine: a second process finds them on disk."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from codec_cases import COMPILING

from zkv_codecs import kernels

pytest.importorskip("numba")

pytestmark = COMPILING

MODULES = sorted(path.stem for path in Path(kernels.__path__[0]).glob("numba_*.py"))

COUNT = """
from zkv_codecs.backend import Backend
family = Backend("numba").family("fp8")
found = [getattr(family, f"fp8_{format}_encode").stats for format in ("e4m3", "e5m2")]
print(sum(len(one.cache_hits) for one in found), sum(len(one.cache_misses) for one in found))
"""


def compiled_functions(module: str) -> dict[str, Any]:
    found = vars(importlib.import_module(f"zkv_codecs.kernels.{module}"))
    return {name: one for name, one in found.items() if hasattr(one, "py_func")}


@pytest.mark.parametrize("module", MODULES)
def test_no_kernel_is_made_inside_a_function(module: str) -> None:
    """Numba keys its disk cache by a function's place in a file and by the contents of its closure:
    kernels made in a loop or by another function would be compiled by every process."""
    for name, function in compiled_functions(module).items():
        assert "<locals>" not in function.py_func.__qualname__, name
        assert function.py_func.__closure__ is None, name


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    """Both 8-bit floats, in an empty cache: two kernels are compiled, then found."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    counts = [
        subprocess.run(
            [sys.executable, "-c", COUNT],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        for _ in range(2)
    ]
    assert counts == [["0", "2"], ["2", "0"]]
