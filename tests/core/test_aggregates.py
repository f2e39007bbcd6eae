"""Sums of a block's contributions: sparse ones have the bits of dense ones, and so has the update.

A store that never keeps a sum sparse is the reference for one that always does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from single_blocks import store_of
from strategies_codecs import SPECIAL

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import DTYPES, Array, narrow
from zkv.optimizer_spec import optimizer
from zkv.staleness import staleness
from zkv.sums import tree_sum, weighted
from zkv.wire import MODEL, SEEDS, BlockSpec, ContributionId, KeyEntry, KeySpec, Segment
from zkv_brokers import aggregates
from zkv_brokers.aggregates import FEW, Aggregation, Share, SparseSum
from zkv_brokers.shard import FromBroker, FromWorker, Reset, Shard
from zkv_brokers.store import Store
from zkv_codecs.backend import NUMPY, Backend, fastest
from zkv_codecs.feedback import Encoded
from zkv_codecs.frames import to_payload
from zkv_codecs.packed import Packed, dense
from zkv_codecs.plan import plan
from zkv_codecs.spec import codec

BACKENDS = tuple({one.name: one for one in (NUMPY, fastest())}.values())
backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda one: one.name)
RULES = (
    "assign",
    "sgd:lr=0.1",
    "sgd:lr=0",
    "sgd:lr=0.1,weight_decay=0.01",
    "momentum:lr=0.1,momentum=0.8",
    "adam:lr=0.01",
    "adagrad:lr=0.1,lr_decay=0.1",
    "adagrad:lr=0.1,initial=0.5",
    "sgd:lr=0.1;k1:lr=2x",
    "sgd:lr=0.1;k1:weight_decay=0.1",
)
CHAINS = (
    "topk:0.1",
    "topk_sampled:0.2",
    "randomk:0.1",
    "threshold:0.5",
    "topk:0.1+int8",
    "randomk:0.2+fp16",
    "topk:0.1+onebit",
)


@contextmanager
def kept_sparse(always: bool) -> Iterator[None]:
    """Keep every sum sparse that may be, or none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aggregates, "FEW", dict.fromkeys(FEW, 0))
        patch.setattr(aggregates, "MANY", 1)
        if not always:
            patch.setattr(Aggregation, "_sparse", lambda *given_: None)
        yield


def frame(values: Array, positions: Sequence[int] | Array, size: int) -> Encoded:
    """Return what a worker may have sent: any values at any positions."""
    indices = np.asarray(positions, np.uint32)
    packed = Packed(np.asarray(values, np.float32), (size,), indices, kept=indices.size)
    return Encoded(codec("threshold:0.5").chain, packed)


@st.composite
def frames(draw: st.DrawFn, size: int) -> Encoded | None:
    """A frame with special numbers at some positions, often those of others; or none."""
    if not draw(st.integers(0, 5)):
        return None
    where = sorted(draw(st.sets(st.integers(0, size - 1), max_size=size))) if size else []
    numbers = st.sampled_from([*SPECIAL, 1e-45, -1e-45, 3e38, -3e38]) | st.floats(-2, 2, width=32)
    values = draw(st.lists(numbers, min_size=len(where), max_size=len(where)))
    return frame(np.array(values, np.float32), where, size)


def is_sparse(total: Any) -> bool:
    return isinstance(total, SparseSum)


def bits(total: Any) -> bytes:
    whole: Array = total.dense() if isinstance(total, SparseSum) else total
    return whole.tobytes()


def sums(store: Store, block: BlockSpec, shares: Sequence[Share]) -> tuple[Any, Any]:
    """The sum kept dense, and kept sparse."""
    found = []
    for always in (False, True):
        with kept_sparse(always):
            found.append(store.aggregate(block, shares))
    return found[0], found[1]


factors = st.sampled_from([1.0, 32.0, 0.5, 7.25, 1e-30, 0.0])


@backends
@given(
    size=st.integers(0, 40),
    dtype=st.sampled_from(["float32", "float64"]),
    stale=st.booleans(),
    data=st.data(),
)
@settings(deadline=None)
def test_a_sparse_sum_has_the_bits_of_the_dense_one(
    backend: Backend, size: int, dtype: str, stale: bool, data: st.DataObject
) -> None:
    """Whatever positions workers share, with -0.0, subnormals and sums that are infinite."""
    sent = data.draw(st.lists(frames(size), min_size=1, max_size=9))
    weights = [data.draw(factors) for _ in sent]
    ages = [data.draw(st.integers(0, 2)) for _ in sent]
    store, block = store_of(size, backend, dtype=dtype)
    store.put(block, np.zeros(size, dtype))
    if stale:
        store.settings.staleness = staleness("scale")
    shares = [
        Share(weight, one, frozenset({99}), age)
        for one, weight, age in zip(sent, weights, ages, strict=True)
    ]
    whole, few = sums(store, block, shares)
    if all(one is None for one in sent):
        assert (whole, few) == (None, None)
        return
    assert is_sparse(few)
    assert not is_sparse(whole)
    assert bits(few) == bits(whole)
    assert np.all(np.diff(few.positions) > 0)

    def term(at: int) -> Array | None:
        one = sent[at]
        if one is None:
            return None
        decoded = one.chain.decode(one.packed, NUMPY).values.astype(dtype)
        scale = store.settings.staleness.factor(ages[at])
        # What is sent sparse is added to zeros: then -0.0 is +0.0.
        return weighted(decoded, weights[at] * scale) + whole.dtype.type(0)

    with np.errstate(all="ignore"):
        expected = tree_sum(term, len(sent))
    assert expected is not None
    assert bits(whole) == expected.tobytes()


@backends
@given(
    text=st.sampled_from(CHAINS),
    workers=st.integers(1, 9),
    size=st.integers(1, 3000),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_so_it_is_with_what_codecs_make(
    backend: Backend, text: str, workers: int, size: int, seed: int
) -> None:
    chance, chain = np.random.default_rng(seed), codec(text).chain
    store, block = store_of(size, backend)
    store.put(block, np.zeros(size, np.float32))
    shares = []
    for worker in range(workers):
        gradient = dense(chance.standard_normal(size).astype(np.float32))
        sent = Encoded(chain, chain.encode(gradient, (), seed + worker, backend)[0])
        shares.append(Share(float(chance.integers(1, 40)), sent, frozenset()))
    whole, few = sums(store, block, shares)
    assert is_sparse(few)
    assert bits(few) == bits(whole)


def everything(store: Store) -> dict[str, Any]:
    state = store.blocks[0]
    arrays = (state.current.values, *(() if state.master is None else (state.master,)))
    return {
        "rule": state.rule,
        "counts": state.counts,
        "arrays": [one.tobytes() for one in (*arrays, *state.slots)],
    }


@backends
@given(
    size=st.integers(1, 30),
    rule=st.sampled_from(RULES),
    dtype=st.sampled_from(["float32", "float16", "bfloat16", "float64"]),
    cut=st.integers(0, 30),
    factor=st.sampled_from([1.0, 0.3, 0.0, np.nan]),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_an_update_has_the_same_bits_whichever_way_the_sum_was_kept(
    backend: Backend,
    size: int,
    rule: str,
    dtype: str,
    cut: int,
    factor: float,
    data: st.DataObject,
) -> None:
    """Values, master copies, state, counts and the sum of squares; untouched elements stay."""
    kind = DTYPES[dtype]
    numbers = st.sampled_from([0.0, -0.0, 1.0, -2.5, 1e-7, np.inf])
    first = np.array(data.draw(st.lists(numbers, min_size=size, max_size=size)), kind.wide)
    rounds = data.draw(st.lists(st.lists(frames(size), min_size=1, max_size=6), max_size=3))
    ends = []
    for always in (False, True):
        store, block = store_of(size, backend, rule, dtype, min(cut, size))
        store.put(block, narrow(first, kind).copy())
        squares = []
        for version, sent in enumerate(rounds):
            shares = [Share(1.0 + at, one, frozenset()) for at, one in enumerate(sent)]
            with kept_sparse(always), np.errstate(all="ignore"):
                squares.append(np.float64(store.square_sums(block, shares, version)).tobytes())
                if store.commit(block, shares, version, lambda spec: factor):
                    store.count(block, shares)
        ends.append((everything(store), squares))
    assert ends[0] == ends[1]


@backends
def test_what_was_not_sent_is_not_written(backend: Backend) -> None:
    """Not even a NaN or a -0.0, and with sgd no dense gradient is made of the sum."""
    store, block = store_of(64, backend)
    first = np.full(64, -0.0, np.float32)
    first[3] = np.nan
    store.put(block, first.copy())
    shares = [Share(1.0, frame([2.0], [7], 64), frozenset()) for _ in range(2)]
    made: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseSum, "dense", lambda self: made.append(1))
        assert store.commit(block, shares, 0, lambda spec: 1.0)
    assert made == []
    now = store.blocks[0].current.values
    assert now[7] == np.float32(-0.2)
    now[7] = -0.0
    assert now.tobytes() == first.tobytes()


@backends
def test_a_sum_is_sparse_while_few_elements_are_sent(backend: Backend) -> None:
    few = FEW[backend.name]
    store, block = store_of(20 * few, backend)
    store.put(block, np.zeros(20 * few, np.float32))

    def kept(frames_: int, elements: int, zeros_stay: bool) -> bool:
        part = elements // frames_
        sent = [frame(np.ones(part), range(part), block.size) for _ in range(frames_)]
        shares = [Share(1.0, one, frozenset()) for one in sent]
        return is_sparse(store.aggregate(block, shares, zeros_stay=zeros_stay))

    assert kept(1, 20, True)
    assert not kept(1, 21, True)
    assert kept(4, 20, True)
    assert not kept(4, 24, True)
    # A rule that needs all elements has use for it only if it saves adding dense arrays.
    assert kept(4, 20, False)
    assert not kept(2, 20, False)


@backends
def test_what_was_sent_of_a_skipped_key_changes_no_bit(backend: Backend) -> None:
    """Not even by making +0.0 a -0.0, where the others have sent nothing."""
    store, block = store_of(8, backend, "assign")
    store.put(block, np.ones(8, np.float32))
    sent = Share(1.0, frame([1.0], [2], 8), frozenset())
    for payload in (frame([5.0], [3], 8), np.ones(8, np.float32)):
        shares = [Share(1.0, payload, frozenset({0})), sent]
        assert [bits(one) for one in sums(store, block, shares)] == [
            np.eye(1, 8, 2, dtype=np.float32).tobytes()
        ] * 2


def test_a_sum_with_anything_else_in_it_is_dense() -> None:
    store, block = store_of(64, NUMPY, cut=40)
    store.put(block, np.zeros(64, np.float32))
    one = frame([1.0], [1], 64)
    vote = codec("topk:0.1+majority").chain
    voted = Encoded(vote, vote.encode(dense(np.ones(64, np.float32)), (), 0, NUMPY)[0])
    other = Share(1.0, one, frozenset())

    def kept(*shares: Share) -> bool:
        with kept_sparse(True):
            return is_sparse(store.aggregate(block, shares))

    assert kept(other)
    assert kept(other, Share(1.0, None, frozenset({0, 1})))
    # Whatever was sent, it does not count.
    assert kept(other, Share(1.0, np.ones(64, np.float32), frozenset({0, 1})))
    for share in (
        Share(1.0, np.ones(64, np.float32), frozenset()),
        Share(1.0, one, frozenset({0})),
        Share(1.0, one, frozenset(), 1, np.zeros(64, np.float32)),
        Share(1.0, voted, frozenset()),
    ):
        assert not kept(other, share)
    assert store.aggregate(block, [Share(1.0, None, frozenset())]) is None
    assert store.aggregate(block, []) is None


# --- seconds -------------------------------------------------------------------------------------


class Clock:
    """Each look at it takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_decoding_is_timed_by_block_and_told_by_key() -> None:
    shard = Shard(window_bytes=1 << 30, clock=Clock())
    keys = [
        KeySpec("a", "float32", (60,)),
        KeySpec(5, "float32", (20,)),
        KeySpec("c", "float32", (8,)),
    ]
    entries = [KeyEntry(kid, spec) for kid, spec in enumerate(keys)]
    blocks = [
        BlockSpec(0, 0, [Segment(0, 0, 60), Segment(1, 0, 20)]),
        BlockSpec(1, 0, [Segment(2, 0, 8)]),
    ]
    log: list[c.Entry] = [
        c.Configure(
            {"model": optimizer("sgd:lr=1").to_plain(), "plain": optimizer("assign").to_plain()}
        ),
        c.Epoch(1, [1], []),
        c.Init(1, 1, entries, blocks),
    ]
    shard.handle(FromBroker(c.ServerWelcome(0, 1, 1)), 0.0)
    shard.handle(FromBroker(c.Log(1, 0, log)), 0.0)

    def push(group: int, text: str) -> None:
        name = ContributionId(1, group, 1)
        for block in blocks:
            chain = codec(text if block.bid == 0 else "none")
            gradient = dense(np.ones(block.size, np.float32))
            form, payload = to_payload(chain.encode(gradient, chain.start(gradient.shape), 0)[0])
            coded = text != "none" and block.bid == 0
            message = d.Push(
                name, 1, block.bid, text if coded else "none", 3, form if coded else None
            )
            shard.handle(FromWorker(message, payload.view(np.uint8)), 0.0)
        shard.handle(FromWorker(d.Done(name, 1, 1.0, [0, 1], [], 3), None), 0.0)

    push(SEEDS, "none")
    assert shard.store.decode_s == {}
    push(MODEL, "int8")
    # From bytes to what is kept.
    assert shard.store.decode_s == {0: 1.0}
    shard.handle(
        FromBroker(
            c.Log(1, 3, [c.Commit(MODEL, 1, [c.Counted(ContributionId(1, MODEL, 1), 1.0)], None)])
        ),
        0.0,
    )
    # And into the sum. The block that came as it is has none.
    assert shard.store.decode_s == {0: 2.0}
    assert shard.layout.spread(shard.store.decode_s) == {0: 1.5, 1: 0.5}
    shard.handle(FromBroker(c.Log(1, 4, [c.Regroup(1, 4, 9)])), 0.0)
    assert shard.store.decode_s == {0: 1.5, 9: 0.5}
    assert shard.layout.spread(shard.store.decode_s) == {0: 1.5, 1: 0.5}
    shard.store.drop(9)
    assert shard.store.decode_s == {0: 1.5}
    # A shard that begins anew has the same clock.
    shard.handle(Reset(), 0.0)
    assert shard.store.decode_s == {}
    assert shard.store.clock() > 2.0


def test_sparse_sums_are_timed_too_and_nothing_is_without_a_clock() -> None:
    shares = [Share(1.0, frame([1.0], [3], 64), frozenset())]
    for clock, spent in ((Clock(), True), (None, False)):
        store, block = store_of(64, NUMPY)
        store.put(block, np.zeros(64, np.float32))
        if clock is not None:
            store.clock = clock
        with kept_sparse(True):
            store.aggregate(block, shares)
        assert (store.decode_s.get(0, 0.0) > 0) == spent


def test_the_kernels_of_sparse_sums_are_ready_before_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("numba")
    backend, merged = Backend("numba"), []
    monkeypatch.setattr(
        backend.family("sparse"), "merge", lambda *given_: merged.append(given_[1]), raising=False
    )
    for text, count in (("int8+ef;b=none", 0), ("none;b=topk:0.1+ef", 1), ("randomk:0.1+ef", 2)):
        aggregates.warm(plan(text), backend)
        assert len(merged) == count
