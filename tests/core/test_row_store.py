"""One part of a table against a dictionary: every row, of every version that is looked at."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from zkv.dtypes import Array
from zkv.optim import init_slots, rule, update
from zkv.tables import Table
from zkv_brokers.row_index import RowIndex
from zkv_brokers.row_store import History, RowStore

MUTANT_SEEDS = 30


def uint64(ids: Any) -> Array:
    return np.asarray(list(ids), np.uint64)


# --- the index ---------------------------------------------------------------------------------


def test_rows_are_found_and_get_slots_in_the_order_in_which_they_came() -> None:
    index, rng = RowIndex(), np.random.default_rng(1)
    expected: dict[int, int] = {}
    for turn in range(60):
        low = rng.integers(0, 400, 40).astype(np.uint64)
        ids = np.unique(low << np.uint64(44) if turn % 3 else low)
        found = index.find(ids)
        assert found.tolist() == [expected.get(one, -1) for one in ids.tolist()]
        fresh = ids[found < 0]
        slots = index.add(fresh)
        assert slots.tolist() == list(range(len(expected), len(expected) + fresh.size))
        expected.update(zip(fresh.tolist(), slots.tolist(), strict=True))
        assert len(index) == len(expected)
    assert index.ids.tolist() == list(expected)
    assert index.find(uint64(expected)).tolist() == list(expected.values())
    assert index.find(uint64([])).size == 0


def test_rows_that_begin_their_search_at_one_place_are_all_found() -> None:
    index, rng = RowIndex(), np.random.default_rng(2)
    many = rng.integers(0, 2**63, 20_000).astype(np.uint64)
    first = index._first(many)
    crowd = many[first == np.bincount(first).argmax()]
    # The last place of the table is followed by its first.
    crowd = np.unique(np.concatenate([crowd, many[first == first.max()]]))[:20]
    slots = index.add(crowd)
    assert index.find(crowd).tolist() == slots.tolist()
    assert (index.find(np.setdiff1d(many, crowd)[:500]) == -1).all()


# --- versions ----------------------------------------------------------------------------------


class Replay:
    """A store beside a dictionary of all versions, under random pins and updates."""

    def __init__(self, seed: int, text: str = "adam:beta1=0.5") -> None:
        self.rng = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.rule = rule(text)
        self.spec = Table(3, initial="normal:1").spec("emb")
        self.store = RowStore(self.spec)
        self.version = 0
        self.pins: list[int] = []
        self.versions: list[dict[int, Array]] = [{}]
        self.state: dict[int, Any] = {}
        self.counts: dict[int, int] = {}

    def row(self, version: int, one: int) -> Array:
        known: Array | None = self.versions[version].get(one)
        return self.store.first(uint64([one]))[0] if known is None else known

    def update(self) -> None:
        ids = sorted(self.rng.sample(range(40), self.rng.choice((1, 3, 12))))
        gradients = self.numbers.standard_normal((len(ids), 3)).astype(np.float32)
        now = dict(self.versions[-1])
        for one, gradient in zip(ids, gradients, strict=True):
            state = self.state.get(one, init_slots(self.rule, np.zeros(3, np.float32)))
            self.counts[one] = self.counts.get(one, 0) + 1
            now[one], self.state[one] = update(
                self.rule, self.row(-1, one), state, gradient, lr=0.1, count=self.counts[one]
            )
        self.versions.append(now)
        self.version += 1
        pins = sorted(set(self.pins))
        self.store.update(uint64(ids), gradients, self.rule, 0.1, self.version, pins)

    def release(self) -> None:
        self.pins.remove(gone := self.rng.choice(self.pins))
        if gone not in self.pins:
            self.store.history.release(gone, sorted(set(self.pins)))

    def look(self) -> None:
        for version in {*self.pins, self.version}:
            ids = sorted(self.rng.sample(range(45), self.rng.choice((0, 1, 20))))
            found = self.store.read(uint64(ids), version)
            for one, row in zip(ids, found, strict=True):
                assert row.tobytes() == self.row(version, one).tobytes(), (version, one)
            assert not np.may_share_memory(found, self.store._values)
            self.look_at_all(version)

    def look_at_all(self, version: int) -> None:
        """Piece by piece: just the rows that updates up to a version have changed."""
        seen: dict[int, bytes] = {}
        start, count = 0, self.rng.choice((1, 7, 100))
        while start >= 0:
            ids, rows, following = self.store.part(start, count, version)
            assert not set(ids.tolist()) & seen.keys()
            seen.update(zip(ids.tolist(), map(bytes, rows), strict=True))
            assert following == -1 or following == start + count < len(self.store)
            start = following
        expected = {one: row.tobytes() for one, row in self.versions[version].items()}
        assert seen == expected, version

    def run(self) -> None:
        for _ in range(120):
            turn = self.rng.random()
            if turn < 0.4:
                self.update()
            elif turn < 0.6:
                self.pins.append(self.version)
            elif turn < 0.8 and self.pins:
                self.release()
            self.look()
        touched = {one for version in self.versions for one in version}
        assert len(self.store) == len(touched)


@pytest.mark.parametrize("text", ["adam:beta1=0.5", "sgd", "adagrad:initial=1"])
def test_pinned_versions_stay_as_they_are_and_the_newest_is_the_replay(text: str) -> None:
    for seed in range(12):
        Replay(seed, text).run()


def test_nothing_is_kept_that_nobody_looks_at() -> None:
    """Of each pinned version a row is kept at most once, however many updates there were."""
    made = Replay(1)
    for _ in range(4):
        made.update()
    assert made.store.history.nbytes == 0
    made.pins = [4]
    for _ in range(3):
        made.update()
        made.pins.append(made.version)
    for _ in range(60):
        made.update()
    history = made.store.history
    assert set(history.by_version) <= set(made.pins)
    for pieces in history.by_version.values():
        ids = np.concatenate([one.ids for one in pieces])
        assert np.unique(ids).size == ids.size <= 40
    made.look()
    while made.pins:
        made.release()
        made.look()
    assert history.by_version == {}
    assert history.nbytes == 0


def test_a_row_that_is_only_read_takes_no_memory() -> None:
    store = RowStore(Table(3).spec("emb"))
    store.read(uint64(range(1000)), 0)
    assert len(store) == store.nbytes == 0
    store.update(uint64([7]), np.ones((1, 3), np.float32), rule("adam"), 0.1, 1, [])
    assert len(store) == 1
    assert store.nbytes == 3 * 3 * 4
    assert len(store.arrays()[0]) == 1


# --- broken variants ---------------------------------------------------------------------------


def _nothing_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowStore, "_keep", lambda self, ids, slots, version, pins: None)


def _the_oldest_pin_has_it(patch: pytest.MonkeyPatch) -> None:
    original = RowStore._keep

    def keep(self: RowStore, ids: Array, slots: Array, version: int, pins: Any) -> None:
        original(self, ids, slots, version, pins[:1])

    patch.setattr(RowStore, "_keep", keep)


def _what_is_released_is_gone(patch: pytest.MonkeyPatch) -> None:
    original = History.release

    def release(self: History, version: int, pins: Any) -> None:
        original(self, version, [])

    patch.setattr(History, "release", release)


def _a_later_version_may_do(patch: pytest.MonkeyPatch) -> None:
    original = History.read

    def read(self: History, ids: Array, version: int, out: Array) -> Array:
        return original(self, ids, version + 1, out)

    patch.setattr(History, "read", read)


@pytest.mark.parametrize(
    "mutant",
    [_nothing_is_kept, _the_oldest_pin_has_it, _what_is_released_is_gone, _a_later_version_may_do],
    ids=lambda mutant: mutant.__name__,
)
def test_a_broken_variant_is_caught(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        _run_many()


def _run_many() -> None:
    for seed in range(MUTANT_SEEDS):
        Replay(seed).run()
