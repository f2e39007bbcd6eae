"""scripts/check_gpu: what it compares, what it says and how it ends, with a stand-in for CuPy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cupy_on_cpu
import numpy as np
import pytest
from cupy_on_cpu import Machine

from zkv_codecs.kernels import cuda_ints, cuda_module, cuda_sparse
from zkv_codecs.spec import STAGES

gpu_bits: Any = pytest.importorskip("gpu_bits", reason="scripts are not installed")
check_gpu: Any = pytest.importorskip("check_gpu", reason="scripts are not installed")

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = ["--entries", "3000", "--repeat", "1"]
ALONE = ["--no-staging", "--no-cluster"]
pytestmark = [pytest.mark.source, pytest.mark.timeout(300)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(gpu_bits, "WORKED", (2000, 1100))
    with cupy_on_cpu.installed() as made:
        yield made


def test_all_bits_agree_and_every_operation_has_a_row(machine, capsys):
    assert check_gpu.main([*SMALL, "--json", "--no-staging", "--no-cluster"]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert {row["op"] for row in rows} == {"encode", "decode", "decode_add"}
    assert len(rows) == 3 * len(list(check_gpu.timed(gpu_bits.CODECS)))
    keys = ["codec", "kernel", "entries", "op", "ms", "copies", "bits_per_entry"]
    assert {tuple(row) for row in rows} == {tuple(keys)}
    (int8,) = [row for row in rows if (row["codec"], row["op"]) == ("int8+ef", "encode")]
    assert (int8["kernel"], int8["entries"]) == ("cuda", 3000)
    assert int8["bits_per_entry"] == 8 + round(32 * 12 / 3000, 4)
    assert "all bits agree" in err


def test_a_memory_of_other_bits_is_named(machine, monkeypatch):
    """Its payload is the first that differs."""
    right = cuda_ints.int8_encode_residual

    def wrong(*given: Any) -> None:
        right(*given)
        given[-1].memory[3] += 1

    monkeypatch.setattr(cuda_ints, "int8_encode_residual", wrong)
    (line,) = gpu_bits.differing_payloads("int8+ef", sys.modules["cupy"])
    assert line.startswith("int8+ef, 2000 entries of a worker: batch 2, block 0: payload: ")
    assert gpu_bits.differing_payloads("fp16+ef", sys.modules["cupy"]) == []


def test_every_stage_with_kernels_is_checked():
    stages = {part.partition(":")[0] for text in gpu_bits.CODECS for part in text.split("+")}
    assert stages == set(STAGES) - {"powersgd", "zstd", "lz4"}


def test_every_kernel_is_compiled(machine):
    compiled, wrong = check_gpu.compile_all()
    text = "".join(cuda_module.source(family) for family in cuda_module.TEXTS)
    assert (compiled, wrong) == (text.count('extern "C" __global__'), [])


def test_a_text_that_does_not_compile_is_named_and_the_others_go_on(machine, monkeypatch):
    right = cuda_module.source
    monkeypatch.setattr(
        cuda_module, "source", lambda family: right(family) + "nonsense;" * (family == "signs")
    )
    compiled, (wrong,) = check_gpu.compile_all()
    assert compiled > 50
    assert wrong.startswith("kernels of signs: AssertionError: ")


@pytest.mark.parametrize(
    ("text", "kernel", "at", "message"),
    [
        ("int8", "int8_encode", 2, "encode (values)"),
        ("int8", "int8_encode", 3, "encode (scales)"),
        ("int8", "int8_encode_residual", 3, "encode_residual (values)"),
        ("int8", "int8_encode_residual", 5, "encode_residual (residual)"),
        ("int8", "int8_decode", 3, "decode"),
        ("int8", "int8_add", 4, "add"),
        ("topk:0.01", "topk_encode", 1, "encode (values)"),
    ],
)
def test_a_kernel_of_other_bits_is_named(machine, monkeypatch, capsys, text, kernel, at, message):
    """The last bit of one number is another one, in what is written at place `at`."""
    module = cuda_sparse if text == "topk:0.01" else cuda_ints
    right = getattr(module, kernel)

    def wrong(*given: Any) -> None:
        right(*given)
        given[at].memory.view(np.uint8)[0] ^= 1

    monkeypatch.setattr(module, kernel, wrong)
    assert check_gpu.main([*SMALL, "--codec", text, "--codec", "fp16", *ALONE]) == 1
    out, err = capsys.readouterr()
    assert f"check_gpu: {text}, 3000 entries: {message}: 1 of " in err
    assert "check_gpu: fp16" not in err
    assert "all bits agree" not in out


def test_a_kernel_that_fails_is_named_with_its_codec(machine, monkeypatch, capsys):
    def broken(*given: Any) -> None:
        raise RuntimeError("an illegal memory access\nwas encountered")

    monkeypatch.setattr(cuda_ints, "int8_encode", broken)
    assert check_gpu.main([*SMALL, "--codec", "int8", *ALONE]) == 1
    line = "check_gpu: int8, 3000 entries: RuntimeError: an illegal memory access\n"
    assert capsys.readouterr().err == line


def test_the_table_is_that_of_bench_codecs(machine, capsys):
    assert check_gpu.main([*SMALL, "--codec", "fp16", *ALONE]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = "codec                  kernel    entries op                ms  copies  bits"
    assert lines[3] == header
    assert lines[4].split() == ["fp16", "cuda", "3000", "encode", "1.000", "1.00", "16"]
    assert lines[-1] == "all bits agree with the CPU's kernels"


def test_copies_are_those_of_the_device(machine, monkeypatch):
    """The shortest of each counts."""
    import cupy

    times = iter([2.0, 9.0, 3.0, 0.5, 8.0, 1.0, 1.0, 1.0, 4.0, 2.0, 4.0, 2.0])
    monkeypatch.setattr(cupy.cuda, "get_elapsed_time", lambda start, end: next(times))
    x = cupy.asarray(np.ones(3000, np.float32))
    rows = list(check_gpu.measure("int8", x, 2, cupy))
    assert [(row["ms"], row["copies"]) for row in rows] == [(2.0, 4.0), (1.0, 1.0), (4.0, 2.0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zstd", "codec zstd has no kernels on a GPU"),
        ("none", "codec none has no kernels on a GPU"),
        ("int9", "no codec is called 'int9'"),
        ("int8+ef", "no codec is called 'ef'"),
    ],
)
def test_a_codec_without_kernels_is_wrong_use(capsys, text, message):
    with pytest.raises(SystemExit, match="2"):
        check_gpu.main(["--codec", text])
    assert message in capsys.readouterr().err


def test_without_cupy_nothing_is_checked_in_plain_words(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert check_gpu.main([]) == 3
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("check_gpu: CuPy cannot be imported")
    assert "pip install 'zkv[cuda12]'" in err


@pytest.mark.parametrize("count", [0, RuntimeError("no driver")])
def test_without_a_device_nothing_is_checked_in_plain_words(monkeypatch, capsys, count):
    def devices() -> int:
        if isinstance(count, int):
            return count
        raise count

    runtime = SimpleNamespace(getDeviceCount=devices, CUDARuntimeError=RuntimeError)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert check_gpu.main([]) == 3
    assert capsys.readouterr().err.startswith("check_gpu: CUDA finds no GPU here")


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there may be a GPU")
def test_the_script_makes_no_environment_where_no_gpu_is(tmp_path):
    done = subprocess.run(
        ["bash", "scripts/check_gpu", "--json"],
        cwd=ROOT,
        env={**os.environ, "ZKV_VENV": str(tmp_path / "venv"), "ZKV_CUDA": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert done.stderr == "check_gpu: nvidia-smi finds no GPU here, so nothing was checked\n"
    assert not (tmp_path / "venv").exists()


@pytest.mark.gpu
def test_on_a_device(capsys):
    assert check_gpu.main(["--entries", "100000", "--no-cluster"]) == 0, capsys.readouterr().err


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays that hardly have blocks of their own: kernels are slow on a CPU."""
    shapes = {"dense": (17, 1000), "signs": (130, 130), "bias": (10,)}
    shapes |= {key: (17_000,) for key in ("sparse", "half", "whole")}
    assert shapes.keys() == gpu_bits.SHAPES.keys()
    monkeypatch.setattr(gpu_bits, "SHAPES", shapes)


@pytest.mark.cluster
def test_a_cluster_makes_the_same_model_of_gradients_on_the_device(machine, few, capsys):
    given = ["--entries", "1000", "--repeat", "1", "--codec", "int8", "--json", "--no-staging"]
    assert check_gpu.main(given) == 0
    assert "a cluster was trained" in capsys.readouterr().err
    kernels = {name for _, _, name in machine.launched}
    assert {"int8_encode_residual", "onebit_encode_residual", "bf16_encode"} <= kernels
    assert {"taken_write", "bits_set"} <= kernels


def test_another_model_on_the_device_is_told_with_its_key(machine, monkeypatch):
    import cupy

    def trained(place: Any) -> dict[str, Any]:
        model = {"signs": np.ones((3, 5), np.float32), "half": np.ones(7, np.float32)}
        model["signs"][1, 2] += place is cupy.asarray
        return model

    monkeypatch.setattr(gpu_bits, "trained", trained)
    (line,) = gpu_bits.differing_keys(cupy)
    assert ": key signs: 1 of 15 differ, first 7: np.float32(2.0), not np.float32(1.0)" in line


def test_a_cluster_that_breaks_is_told(machine, monkeypatch):
    def trained(place: Any) -> dict[str, Any]:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(gpu_bits, "trained", trained)
    (line,) = gpu_bits.differing_keys(SimpleNamespace(asarray=None))
    assert line.startswith("cluster, codec ")
    assert line.endswith("RuntimeError: no more memory")
