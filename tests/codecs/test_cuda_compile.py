"""CUDA's kernels compile for every card, by NVIDIA's compiler, where there is no card."""

from __future__ import annotations

import importlib.resources
import re
from typing import Any

import pytest
from cuda_on_cpu import kernels_in

from zkv_codecs import backend
from zkv_codecs.kernels import cuda_module

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)

nvrtc: Any = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")


def checked(answer: tuple[Any, ...]) -> Any:
    """Return what a call gives beside its status."""
    assert answer[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS, answer[0]
    return answer[1] if len(answer) == 2 else answer[1:]


@pytest.fixture(scope="module", autouse=True)
def compiler() -> tuple[int, int]:
    """The compiler's version."""
    try:
        return checked(nvrtc.nvrtcVersion())
    except RuntimeError as error:
        pytest.skip(f"nvidia-cuda-nvrtc is not installed: {error}")


def compiled(family: str, target: str, kind: str) -> bytes:
    """Return a family's machine code (CUBIN) or its portable assembly (PTX)."""
    source = cuda_module.source(family).encode()
    program = checked(nvrtc.nvrtcCreateProgram(source, f"{family}.cu".encode(), 0, [], []))
    options = [f"-arch={target}".encode(), *(option.encode() for option in cuda_module.OPTIONS)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    code = bytes(checked(getattr(nvrtc, f"nvrtcGet{kind}Size")(program)))
    getattr(nvrtc, f"nvrtcGet{kind}")(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return code


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("family", cuda_module.TEXTS)
def test_every_family_compiles_for_every_card(family, architecture):
    assert compiled(family, f"sm_{architecture}", "CUBIN").startswith(b"\x7fELF")


@pytest.mark.parametrize("family", cuda_module.TEXTS)
def test_arithmetic_is_exact(family):
    """No fused multiply-add and no approximation, and subnormals stay: else bits would differ."""
    assembly = compiled(family, "compute_75", "PTX").decode()
    assert re.findall(r"\b(?:fma|mad)\.\w+\.f(?:32|64)|\.approx|\.full\.|\.ftz", assembly) == []
    for name in kernels_in(cuda_module.source(family)):
        assert f".entry {name}(" in assembly


def test_a_fused_multiply_add_would_be_seen(monkeypatch):
    monkeypatch.setattr(cuda_module, "OPTIONS", ("-std=c++17",))
    assert "fma.rn.f32" in compiled("ints", "compute_75", "PTX").decode()


def test_every_text_belongs_to_a_family():
    folder = importlib.resources.files("zkv_codecs.kernels") / "cuda"
    texts = {file.name.removesuffix(".cu") for file in folder.iterdir()}
    assert texts == {name for names in cuda_module.TEXTS.values() for name in names}
    assert set(cuda_module.TEXTS) <= set(backend.FAMILIES)
