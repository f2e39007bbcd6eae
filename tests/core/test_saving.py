"""What a server writes of itself, and takes in again: the same bits, whatever happens meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from single_blocks import layout, spec, store_of, trained

from zkv import tensor_file
from zkv.errors import BadSnapshot
from zkv.marks import Marks
from zkv.optim import rule
from zkv.wire import MODEL, TableSpec
from zkv_brokers import saving
from zkv_brokers.aggregates import Share
from zkv_brokers.contributions import Contributions
from zkv_brokers.row_store import RowStore
from zkv_brokers.store import Store
from zkv_brokers.tables import Tables
from zkv_codecs.backend import NUMPY, fastest

SIZE = 600


def through_a_file(saved: saving.Saved) -> saving.Saved:
    """What a file would be, and what is read of it."""
    data = b"".join(bytes(one) for one in tensor_file.pieces(saved.arrays, saved.metadata))
    return saving.read(*tensor_file.opened(data, "f"), "f").only(range(9))


def state_bits(store: Store) -> list[Any]:
    state, view = store.blocks[0], store.views.kept(0)
    arrays = [state.current.values, *state.slots]
    arrays += [] if state.master is None else [state.master]
    arrays += [] if view is None else [view.values]
    return [state.rule, state.counts, state.changed, *(a.tobytes() for a in arrays)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
@pytest.mark.parametrize("view", [False, True])
def test_a_block_comes_out_of_a_file_as_it_went_in(dtype: str, view: bool) -> None:
    store = trained(dtype, view=view)
    contributions = Contributions()
    contributions.know(MODEL, {11: Marks(4, {7})})
    blocks = list(store.layout.blocks.values())
    saved = saving.taken(store, Tables(store), contributions, blocks)
    assert saved.blocks[0].marks == [(11, 4, [7])]
    found, fresh = through_a_file(saved), Store(layout(spec("a", SIZE, dtype)))
    saving.put_back(found, blocks, fresh.layout, fresh, Tables(fresh))
    assert state_bits(fresh) == state_bits(store)
    assert all(slot.flags.writeable for slot in fresh.blocks[0].slots)


@pytest.mark.parametrize("backend", [NUMPY, fastest()], ids=lambda one: one.name)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("text", ["adam:lr=0.1", "momentum:lr=0.1"])
def test_updates_go_on_and_change_nothing_of_what_is_being_written(
    text: str, dtype: str, backend: Any
) -> None:
    store, block = store_of(SIZE, backend, text, dtype)
    twin, _ = store_of(SIZE, backend, text, dtype)
    chance = np.random.default_rng(3)
    first = chance.standard_normal(SIZE).astype(dtype)
    for one in (store, twin):
        one.put(block, first)

    def step(one: Store, version: int, gradient: Any) -> None:
        shares = [Share(1.0, gradient, frozenset(), 0, None)]
        if one.commit(block, shares, version, lambda spec: 1.0):
            one.count(block, shares)

    gradients = [chance.standard_normal(SIZE).astype(dtype) for _ in range(4)]
    for version in (0, 1):
        step(store, version, gradients[version])
        step(twin, version, gradients[version])
    saved = saving.taken(store, Tables(store), Contributions(), [block])
    before = {name: array.tobytes() for name, array in saved.arrays.items()}
    for version in (2, 3):
        step(store, version, gradients[version])
        step(twin, version, gradients[version])
        assert {name: array.tobytes() for name, array in saved.arrays.items()} == before
    # It was replaced once, and is the store's own again.
    assert not store.blocks[0].kept
    assert state_bits(store) == state_bits(twin)


def rows_of(part: RowStore) -> list[bytes]:
    order = np.argsort(part.index.ids)
    arrays = (*part.arrays(), part.changed())
    return [array[order].tobytes() for array in arrays]


def test_rows_come_out_as_they_went_in_and_go_on_alike() -> None:
    table = TableSpec("emb", 3, "float32", "normal:0.1", 5)
    part, chosen = RowStore(table), rule("adam")
    chance = np.random.default_rng(1)

    def step(one: RowStore, ids: Any, version: int) -> None:
        gradients = np.random.default_rng(version).standard_normal((ids.size, 3)).astype("float32")
        one.update(ids, gradients, chosen, 0.1, version, [])

    for version in range(1, 30):
        step(part, np.unique(chance.integers(0, 500, 20)).astype(np.uint64), version)
    ids, values, counts, *slots = (array.copy() for array in part.arrays())
    fresh = RowStore(table)
    fresh.put_back(part.rule, ids, values, counts, part.changed().copy(), tuple(slots))
    assert rows_of(fresh) == rows_of(part)
    for version in range(30, 60):
        more = np.unique(chance.integers(0, 900, 20)).astype(np.uint64)
        step(part, more, version)
        step(fresh, more, version)
    assert rows_of(fresh) == rows_of(part)
    everything = np.arange(900, dtype=np.uint64)
    np.testing.assert_array_equal(fresh.read(everything, 99), part.read(everything, 99))
    with pytest.raises(ValueError, match="not each once"):
        fresh.put_back("adam", ids[[0, 0]], values[:2], counts[:2], counts[:2], ())


def test_what_does_not_fit_is_refused_with_the_block() -> None:
    store = trained()
    blocks = list(store.layout.blocks.values())
    saved = saving.taken(store, Tables(store), Contributions(), blocks)
    for there, words in (
        (layout(spec("a", SIZE + 1)), "has an array of float32 (600,)"),
        (layout(spec("a", SIZE, "float64")), "where float64 (600,) is needed"),
        (layout(spec("b", 1), spec("a", SIZE)), "no file has block 1"),
    ):
        fresh, wanted = Store(there), list(there.blocks.values())[::-1]
        with pytest.raises(BadSnapshot) as caught:
            saving.put_back(saved, wanted, there, fresh, Tables(fresh))
        assert words in str(caught.value)
    for arrays in ({**saved.arrays, "9.0": np.zeros(1)}, {}):
        with pytest.raises(BadSnapshot, match="is there, or is described, but not both"):
            saving.read(arrays, saved.metadata, "f")
    with pytest.raises(BadSnapshot, match="does not say what its arrays are"):
        saving.read(saved.arrays, {}, "f")
