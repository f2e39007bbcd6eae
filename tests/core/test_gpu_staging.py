"""What scripts/check_gpu compares and times of staging and of reduction, with a stand-in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import cupy_on_cpu
import pytest
from cupy_on_cpu import Machine

from zkv_workers import reducing
from zkv_workers.outgoing import Outgoing

gpu_staging: Any = pytest.importorskip("gpu_staging", reason="scripts are not installed")
check_gpu: Any = pytest.importorskip("check_gpu", reason="scripts are not installed")
pytestmark = [pytest.mark.source, pytest.mark.timeout(300)]


@pytest.fixture
def machine() -> Iterator[Machine]:
    with cupy_on_cpu.installed() as made:
        yield made


@pytest.fixture
def cupy(machine: Machine) -> Any:
    import cupy

    return cupy


def test_each_codec_and_each_strategy_has_its_rows(
    machine: Machine, few: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(check_gpu, "compile_all", lambda: (0, []))
    monkeypatch.setattr(check_gpu.gpu_bits, "WORKED", (2000, 1100))
    given = ["--entries", "3000", "--repeat", "1", "--codec", "fp16", "--no-cluster", "--json"]
    assert check_gpu.main(given) == 0
    out, err = capsys.readouterr()
    rows = [one for one in json.loads(out) if "pcie" in one]
    named = [(one["codec"], one["op"]) for one in rows]
    assert named == [
        *((text, op) for text in gpu_staging.CODECS for op in ("push", "ready")),
        *((str(one), "reduce") for one in gpu_staging.STRATEGIES),
    ]
    assert all(one["entries"] == 3000 and one["copies"] >= 0 <= one["pcie"] for one in rows)
    assert rows[0]["bits_per_entry"] == 32
    assert "staging and the reduction of several devices compared with the host" in err
    assert "link -1 to 0 (-1: the host): " in err
    assert "100000000 bytes on 4 devices" in err
    # One piece or two: a slot of the last payload may still be in use.
    assert re.search("pinned memory: [48] MiB, short of it 0 times", err)


def test_the_table_says_what_is_held_against_pinned_memory(cupy: Any) -> None:
    lines = list(check_gpu.table(gpu_staging.reduction_rows(100, 1, cupy)))
    assert len(lines) == 5
    assert "times its bytes into pinned memory" in lines[1]


def test_one_card_plays_four(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 1)
    assert gpu_staging.homes_of(cupy) == [0, 0, 0, 0]
    assert gpu_staging.differing_sums(cupy) == []


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others take their time to compile for a CPU."""
    monkeypatch.setattr(gpu_staging, "CODECS", ("none", "int8+ef"))


def test_a_gradient_that_is_not_copied_is_named_with_its_codec(
    cupy: Any, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is overwritten behind the push is another stream's business then: it is a race."""
    monkeypatch.setattr(cupy_on_cpu.ndarray, "copy", lambda self, order="C": self)
    wrong = gpu_staging.differing_payloads(cupy, 3000)
    assert len(wrong) == len(gpu_staging.CODECS)
    assert all(one.startswith("staging, ") and "3000 entries" in one for one in wrong)


def test_other_bytes_are_named_with_their_codec(
    cupy: Any, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Outgoing.push

    def push(self: Any, key: Any, gradient: Any, *, lend: bool) -> Any:
        if not hasattr(gradient, "ctypes"):
            gradient.memory[7] = 3.0
        return right(self, key, gradient, lend=lend)

    monkeypatch.setattr(Outgoing, "push", push)
    (wrong,) = [one for one in gpu_staging.differing_payloads(cupy, 3000) if ", none, " in one]
    assert wrong.endswith("other bytes are sent of a gradient that is overwritten behind its push")


def test_a_strategy_of_other_bits_is_named(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = reducing.owned

    def owned(array: Any, weight: float, site: Any) -> Any:
        made = right(array, weight, site)
        if site.home == 2 and made.values.size > 3:
            made.values.memory[3] += 1
        return made

    monkeypatch.setattr(reducing, "owned", owned)
    wrong = gpu_staging.differing_sums(cupy)
    assert len(wrong) == len(gpu_staging.STRATEGIES)
    assert "reduction in parts, 4 devices, 100003 elements: other bits than on the host" in wrong


def test_what_fails_is_told(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> None:
        raise RuntimeError("peer access is not supported")

    monkeypatch.setattr(reducing, "carry", broken)
    wrong = gpu_staging.differing_sums(cupy)
    assert wrong[0].endswith("3 elements: RuntimeError: peer access is not supported")


@pytest.mark.gpu
def test_on_a_device() -> None:
    import cupy

    assert gpu_staging.differing_payloads(cupy, 1_000_000) == []
    assert gpu_staging.differing_sums(cupy) == []
