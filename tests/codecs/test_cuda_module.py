"""How CUDA's kernels reach a device, with a stand-in for CuPy: compiled once for each device."""

from __future__ import annotations

import ast
import importlib.resources
import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from zkv_codecs.backend import FAMILIES, NUMPY, Backend
from zkv_codecs.kernels import cuda_ints, cuda_module


class FakeCuda:
    """What of CuPy is used: the number of the device, the compiler, modules."""

    def __init__(self) -> None:
        self.device = 0
        self.compiled: list[tuple[str, tuple[str, ...], str]] = []
        self.loaded: list[tuple[int, bytes]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.runtime = SimpleNamespace(getDevice=lambda: self.device)
        self.compiler = SimpleNamespace(compile_using_nvrtc=self.compile)

    def compile(self, source: str, options: tuple[str, ...], filename: str) -> tuple[bytes, None]:
        self.compiled.append((source, options, filename))
        return b"machine code", None

    def Module(self) -> Any:
        device = self.device

        def get_function(name: str) -> Any:
            return lambda *call: self.launched.append((device, name, *call))

        return SimpleNamespace(
            load=lambda code: self.loaded.append((device, code)), get_function=get_function
        )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=fake))
    yield fake
    cuda_module._function.cache_clear()
    cuda_module._module.cache_clear()


def encode(count: int, block: int = 256) -> None:
    x = np.zeros(count, np.float32)
    cuda_ints.int8_encode(x, block, x, x)


def test_a_family_is_compiled_when_first_launched_and_once_on_each_device(cuda):
    for cuda.device in (0, 1, 0, 1):
        encode(10)
        cuda_ints.int8_decode(np.zeros(5, np.int8), np.zeros(1), 256, np.zeros(5))
    assert [launch[0] for launch in cuda.launched] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert cuda.loaded == [(0, b"machine code"), (1, b"machine code")]
    source, options, filename = cuda.compiled[0]
    assert source == cuda_module.source("ints")
    assert (options, filename) == (cuda_module.OPTIONS, "ints.cu")


@pytest.mark.parametrize(
    ("count", "block", "grid"),
    [(1, 256, 1), (2048, 256, 1), (2049, 256, 2), (10**7, 256, 4883), (9, 1, 2)],
)
def test_a_warp_for_each_block_of_elements(cuda, count, block, grid):
    """256 threads are 8 warps, so 8 · 256 elements to a block of threads."""
    encode(count, block)
    ((_, name, *call),) = cuda.launched
    assert name == "int8_encode"
    assert call[:2] == [(grid,), (256,)]


@pytest.mark.parametrize(("count", "grid"), [(1, 1), (256, 1), (257, 2)])
def test_a_thread_for_each_element(cuda, count, grid):
    cuda_module.per_element("ints", "int8_encode", count, (1, 2), 3)
    assert cuda.launched == [(0, "int8_encode", (grid,), (256,), (1, 2, np.int64(count), 3))]


def test_nothing_is_launched_for_nothing(cuda):
    encode(0)
    cuda_module.per_element("ints", "int8_encode", 0, ())
    assert not cuda.launched
    assert not cuda.compiled


def test_a_missing_cupy_is_named_with_the_extras_that_bring_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"need CuPy: pip install 'zkv\[cuda12\]'"):
        encode(1)


def functions(module: Any) -> dict[str, list[str]]:
    """The public functions that a module defines, with the names of their parameters."""
    return {
        name: list(inspect.signature(one).parameters)
        for name, one in vars(module).items()
        if inspect.isfunction(one) and one.__module__ == module.__name__ and name[0] != "_"
    }


def compiled_by_numba(family: str) -> set[str]:
    """The kernels of Numba's module, which need not be installed for that."""
    folder = importlib.resources.files("zkv_codecs.kernels")
    tree = ast.parse((folder / f"numba_{family}.py").read_text("utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(one).startswith("kernel(") for one in node.decorator_list)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_is_there_with_numpys_parameters(family):
    numpys, cudas = functions(NUMPY.family(family)), functions(Backend("cuda").family(family))
    assert cudas
    assert {name: numpys.get(name) for name in cudas} == cudas
    assert compiled_by_numba(family) & set(numpys) <= set(cudas)
