"""What a worker began its batches with: the first of a version is given, whenever it is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from zkv import control as c
from zkv import tensor_file
from zkv.errors import BadSnapshot
from zkv.layout import Layout
from zkv_codecs.spec import codec
from zkv_workers import keeper as k
from zkv_workers.memories import Memories, Memory
from zkv_workers.signals import Grant

FIRST = Grant(1, 1, 0, 0, 0, 0, {}, Layout())


class _Kept:
    """A keeper whose files are heard of at once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.said: list[c.Saved] = []
        self.files: list[k.Beginning] = []
        self.keeper = k.Keeper(Memories(), keeps=True, tell=self.said.append)
        patch.setattr(k.Keeper, "_write", lambda _, message, begun: self.files.append(begun))

    def begin(self, version: int, behind: int = 0) -> None:
        """Begin the next batch; what is kept names the version that it was granted."""
        self.keeper.blob = b"%d" % (version + behind)
        grant = replace(FIRST, batch=version + behind + 1, version=version, behind=behind)
        self.keeper.begun(grant)

    def ask(self, version: int) -> None:
        self.keeper.asked(c.SaveState(1, "url", "name", version))

    @property
    def blobs(self) -> list[bytes | None]:
        return [one.blob for one in self.files]


@pytest.mark.parametrize("further", range(k.BEGINNINGS))
def test_the_first_batch_of_a_version_is_meant_although_others_began_since(
    further: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = _Kept(monkeypatch)
    for version in range(6 + further):
        kept.begin(version)
    kept.ask(5)
    assert kept.blobs == [b"5"]
    assert kept.files[0].batches == 5


def test_who_is_asked_too_late_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = _Kept(monkeypatch)
    for version in range(6 + k.BEGINNINGS):
        kept.begin(version)
    kept.ask(5)
    assert not kept.files
    assert "it was asked for version 5" in kept.said[0].why


def test_a_version_that_is_not_begun_yet_is_waited_for_unless_the_worker_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = _Kept(monkeypatch)
    kept.keeper.inside = lambda: True
    kept.ask(0)
    assert kept.blobs == [None]
    kept.begin(0)
    kept.ask(1)
    assert len(kept.files) == 1
    kept.begin(1)
    assert kept.blobs == [None, b"1"]
    kept.ask(2)
    kept.keeper.blob = b"at rest"
    kept.keeper.rest()
    assert kept.blobs == [None, b"1", b"at rest"]
    assert kept.files[-1].batches == 2


def test_a_batch_counts_as_of_the_version_that_it_was_granted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = _Kept(monkeypatch)
    for version in range(4):
        kept.begin(version, behind=1)
    kept.ask(3)
    assert kept.blobs == [b"3"]


def test_a_file_gives_what_went_into_it() -> None:
    chance = np.random.default_rng(1)
    text = codec("topk:0.1+ef").text
    residual, owed = (chance.standard_normal(50).astype(np.float32) for _ in range(2))
    blocks: dict[int, Any] = {3: (text, (residual,), owed), 9: (text, (residual * 2,), None)}
    for blob in (None, b"", b"\x00mine"):
        arrays, metadata = k.file_of(k.Beginning(7, 12, blob, blocks))
        data = b"".join(bytes(one) for one in tensor_file.pieces(arrays, metadata))
        found = k.beginning_in(*tensor_file.opened(data, "f"), "f")
        assert (found.batches, found.blob) == (12, blob)
        for bid, (name, state, kept) in blocks.items():
            there = found.blocks[bid]
            assert there[0] == name
            np.testing.assert_array_equal(there[1][0], state[0])
            assert (there[2] is None) == (kept is None)
            assert Memory(codec(name), there[1], there[2]).square() > 0
    with pytest.raises(BadSnapshot, match="f is no state of a worker"):
        k.beginning_in({}, metadata, "f")


def test_nothing_of_a_run_that_has_gone_back_is_written_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, away = _Kept(monkeypatch), [False]
    kept.keeper.away = lambda: away[0]
    for version in range(6):
        kept.begin(version)
    away[0] = True
    kept.ask(3)  # The other workers of the new run are there already.
    kept.keeper.restart()
    away[0] = False
    kept.ask(3)
    assert kept.files == []
    assert [one.why.startswith("it has not heard yet") for one in kept.said] == [True, True]
    kept.keeper.load(None)
    kept.begin(3)
    kept.ask(3)
    assert kept.blobs == [b"3"]
