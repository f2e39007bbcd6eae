"""The example of tables: its gradients are right, its loss falls, and names find their company."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

skipgram: Any = pytest.importorskip("skipgram", reason="scripts are not installed")


def test_its_gradients_are_those_of_its_loss() -> None:
    rng = np.random.default_rng(1)
    center = rng.standard_normal((3, 4))
    other = rng.standard_normal((3, 2, 4))
    _, of_center, of_other = skipgram.gradients(center, other)
    for values, found in ((center, of_center), (other, of_other)):
        for at in np.ndindex(*values.shape):
            kept, ends = values[at], []
            for step in (1e-5, -1e-5):
                values[at] = kept + step
                ends.append(skipgram.gradients(center, other)[0])
            values[at] = kept
            assert found[at] == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-6)


def test_only_names_of_code_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "'''doc of it'''\ndef one(two):  # a comment\n    return one('text', \"more\")\n"
    )
    monkeypatch.setattr(skipgram, "sources", lambda count: [path, path])
    monkeypatch.setattr(skipgram, "COUNT_MIN", 2)
    text = skipgram.read(0)
    assert [text.names[at] for at in text.places] == ["one", "two", "one"] * 2
    assert text.counts.tolist() == [4, 2]
    assert text.files.tolist() == [0, 0, 0, 1, 1, 1]


def test_pairs_are_of_one_file_and_a_worker_has_files_of_its_own() -> None:
    """Two files of other names each: neighbours never mix them."""
    count = 2000
    places = np.concatenate([np.arange(count) % 40, 40 + np.arange(count) % 40])
    counts = np.bincount(places)
    names = [f"n{at}" for at in range(80)]
    text = skipgram.Text(names, counts, places, np.repeat([0, 1], count))
    numbers = [skipgram.row_number(name) for name in names]
    assert len(set(numbers)) == 80
    for rank in range(2):
        centers, others = skipgram.Pairs(text, rank, 2, 0).draw(64)
        own = set(numbers[40 * rank : 40 * rank + 40])
        assert set(centers.tolist()) <= own
        assert set(others[:, 0].tolist()) <= own
        assert not set(others[:, 1:].reshape(-1).tolist()) <= own


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["skipgram", *arguments])
    try:
        return int(skipgram.main())
    except SystemExit as error:
        return int(error.code or 0)


@pytest.mark.parametrize(
    "arguments", [("--workers", "0"), ("--pairs", "no"), ("--dim", "-1"), ("--what",)]
)
def test_wrong_use_is_2(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    assert ended(monkeypatch, *arguments) == 2


@pytest.mark.cluster
def test_the_loss_falls_and_names_find_their_neighbours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--files", "150", "--batches", "60", "--workers", "2", "--pairs", "512", "--dim", "16")
    assert ended(monkeypatch, *small, "--words", "self,name,nothing_of_the_kind", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    losses = [one["loss"] for one in told["loss"]]
    assert len(losses) == 12
    # Six scores of zero cost 6 log 2 = 4.16: nothing is known at first.
    assert losses[0] < 4.2
    assert losses[-1] < 0.75 * losses[0]
    assert list(told["neighbours"]) == ["self", "name"]
    assert all(len(set(near)) == 6 for near in told["neighbours"].values())
