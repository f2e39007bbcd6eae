"""Updates of what came as it is: to the bits of the way that takes anything, lent or not."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from single_blocks import store_of

from zkv_brokers import dense
from zkv_brokers.aggregates import Share
from zkv_brokers.memory import Memory
from zkv_brokers.store import BlockState, Store
from zkv_codecs.backend import Backend

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="there is no Numba here"
)
NUMBA = Backend("numba")
RULES = (
    "sgd:lr=0.1",
    "sgd:lr=0.1,weight_decay=0.01",
    "momentum:lr=0.1;k1:lr=0.5x",
    "adam:lr=0.01",
    "adagrad:lr=0.1",
    "assign",
)


def bits(state: BlockState) -> tuple[bytes, ...]:
    return tuple(one.tobytes() for one in (state.current.values, *state.slots))


@given(
    size=st.sampled_from([1, 5, 8195, dense.PIECE_ELEMENTS + 7]),
    cut=st.sampled_from([0, 3]),
    rule=st.sampled_from(RULES),
    weights=st.lists(st.sampled_from([1.0, 32.0, 0.5, 7.25, 2.0**25 + 1]), min_size=1, max_size=7),
    factor=st.sampled_from([1.0, 0.37]),
    kept=st.sampled_from(["", "pinned", "lent"]),
    seed=st.integers(0, 9),
)
@settings(max_examples=60)
def test_an_update_in_one_go_has_the_bits_of_one_in_steps(
    size: int, cut: int, rule: str, weights: list[float], factor: float, kept: str, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    first = chance.standard_normal(size, np.float32)
    stores: list[Store] = []
    lent: list[Any] = []
    for quick in (True, False):
        store, block = store_of(size, NUMBA, rule, cut=min(cut, size))
        store.memory = Memory(is_lent=lambda array: any(array is one for one in lent))
        store.put(block, first)
        if not quick:
            store._dense = lambda *given: None  # type: ignore[method-assign]
        stores.append(store)
    held: list[tuple[Any, bytes]] = []
    for version in range(3):
        shares = [
            Share(weight, chance.standard_normal(size, np.float32), frozenset())
            for weight in weights
        ]
        for store in stores:
            state = store.blocks[block.bid]
            before = bits(state)
            if kept == "pinned":
                state.current.pins = 1
            elif kept == "lent":
                lent.append(state.current.values)
            if kept:
                held.append((state.current.values, state.current.values.tobytes()))
            ahead, finite = store.ahead(block, shares, version)
            assert finite == (store is stores[0])
            assert bits(store.blocks[block.bid]) == before
            assert store.commit(block, shares, version, lambda spec: factor)
            store.count(block, shares)
            now = store.blocks[block.bid]
            assert now.changed == version + 1
            if factor == 1.0:
                assert (bits(ahead), ahead.counts, ahead.rule) == (bits(now), now.counts, now.rule)
        assert bits(stores[0].blocks[block.bid]) == bits(stores[1].blocks[block.bid])
        assert all(array.tobytes() == was for array, was in held)


@given(
    size=st.sampled_from([1, 5, 8195, dense.PIECE_ELEMENTS + 7]),
    rule=st.sampled_from(RULES),
    terms=st.integers(1, 5),
    fresh=st.booleans(),
    helped=st.booleans(),
    bad=st.sampled_from([np.nan, np.inf, -np.inf, None]),
    seed=st.integers(0, 9),
)
@settings(max_examples=60)
def test_an_update_in_one_go_tells_whether_all_of_it_was_finite(
    size: int, rule: str, terms: int, fresh: bool, helped: bool, bad: float | None, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    store, block = store_of(size, NUMBA, rule)
    store.put(block, chance.standard_normal(size, np.float32))
    arrays = [chance.standard_normal(size, np.float32) for _ in range(terms)]
    if bad is not None:
        arrays[chance.integers(terms)][chance.integers(size)] = bad
    shares = [Share(1.0, array, frozenset()) for array in arrays]
    runs = list(store.rules.runs(block, shares, 0, store.blocks[block.bid]))
    with pytest.MonkeyPatch.context() as patched, ThreadPoolExecutor(1) as pool:
        patched.setattr(dense, "HELPER", pool if helped else None)
        patched.setattr(dense, "SHARED_ELEMENTS", 4)
        found = store._commit_dense(block, shares, runs, 0, lambda spec: 1.0, fresh=fresh)
    assert found is (bad is None)


def test_what_is_more_than_arrays_is_left_to_the_other_way() -> None:
    store, block = store_of(4, NUMBA, cut=2)
    store.put(block, np.zeros(4, np.float32))
    plain = Share(1.0, np.ones(4, np.float32), frozenset())
    runs = list(store.rules.runs(block, [plain], 0, store.blocks[block.bid]))
    assert store._dense(block, [plain], runs) is not None
    for other in (
        Share(1.0, None, frozenset()),
        Share(1.0, plain.payload, frozenset({0})),
        Share(1.0, plain.payload, frozenset(), 1, np.zeros(4, np.float32)),
        Share(1.0, np.ones(4, np.float64), frozenset()),
    ):
        assert store._dense(block, [plain, other], runs) is None
    assert store._dense(block, [plain], runs[:0]) is None
