"""The benchmark of the adapter: its model, its peers, and its table."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
bench_torch: Any = pytest.importorskip("bench_torch", reason="scripts are not installed")
resnet50: Any = pytest.importorskip("resnet50", reason="scripts are not installed")
instant_peers: Any = pytest.importorskip("instant_peers", reason="scripts are not installed")

pytestmark = pytest.mark.torch


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["bench_torch", *arguments])
    try:
        return int(bench_torch.main())
    except SystemExit as error:
        return int(error.code or 0)


def test_the_model_has_the_parameters_of_resnet_50() -> None:
    """161 tensors with 25,557,032 elements, as torchvision's has them."""
    parameters = list(resnet50.resnet().parameters())
    assert (len(parameters), sum(one.numel() for one in parameters)) == (161, 25_557_032)


def test_instant_peers_take_every_block_of_a_batch_and_give_the_first_values_again() -> None:
    values = {"w": np.arange(300_000, dtype=np.float32), "b": np.ones(3, np.float32)}
    with instant_peers.InstantWorker() as worker:
        worker.init(values)
        for number in (1, 2, 3):
            with worker.batch() as batch:
                for key, value in values.items():
                    np.testing.assert_array_equal(batch[key], value)
                    batch.push(key, 2 * value)
            assert batch.wait(30.0) == "committed"
            # Two blocks of w, and one for b.
            assert worker.peers.pushed == 3 * number
            assert worker.peers.idle.wait(30.0)
        assert worker.stats()["outcomes"]["committed"] == 3
        assert worker.stats()["bytes_unacknowledged"] == {0: 0}
        np.testing.assert_array_equal(worker.evaluate().params["w"], values["w"])


def test_the_table_compares_each_pass_with_the_plain_one_of_its_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ("--tiny", "--side", "32", "--batch", "2", "--turns", "2", "--warm", "0")
    assert ended(monkeypatch, *tiny, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["what"], row["against"]) for row in rows] == [
        *((what, side) for what in bench_torch.TIMES for side in ("attached", "control")),
        *((f"CPU of {what}", "share") for what in bench_torch.SPENT),
    ]
    for row in rows:
        assert 0 <= row["low"] <= row["ratio"] <= row["high"] < math.inf
        # A pass of this model may be over before the I/O thread looks around.
        assert row["ratio"] > 0 or row["what"].endswith("idle")
    assert ended(monkeypatch, *tiny) == 0
    assert "CPU of both" in capsys.readouterr().out


def test_ratios_are_those_of_pairs() -> None:
    found = bench_torch.ratios([(1.0, 1.1), (10.0, 10.0), (100.0, 102.0)])
    assert found["ratio"] == 1.02


@pytest.mark.parametrize("wrong", [("--turns", "1"), ("--batch", "0"), ("--side", "x")])
def test_wrong_use_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: tuple[str, str]) -> None:
    assert ended(monkeypatch, *wrong) == 2
