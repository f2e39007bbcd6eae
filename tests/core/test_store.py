"""Commits on shards: the same bits as one process, whatever the cut; pins, guards, repeats.

Shards are driven by their events alone, as a server does it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import WINDOW, Rig, same_bits
from strategies import FLOATING, Model, models, placed, values_of

from zkv import control as c
from zkv import data_messages as d
from zkv import weighted_mean
from zkv.dtypes import DTYPES, Array, narrow, widen
from zkv.errors import ProtocolError
from zkv.layout import size_of
from zkv.optim import RULES, clip_factor, init_slots, square_sum, update
from zkv.optimizer_spec import OptimizerSpec, optimizer
from zkv.sums import divided, tree_sum, weighted
from zkv.wire import MODEL, NO_BATCH, PULLS, SEEDS, ContributionId, KeySpec
from zkv_brokers.grants import ToWorker
from zkv_brokers.shard import FromBroker, FromWorker, Reset, Shard
from zkv_codecs.frames import to_payload
from zkv_codecs.packed import dense
from zkv_codecs.spec import codec


class Single:
    """The reference: one process, whole keys, `zkv.weighted_mean` and `zkv.optim.update`."""

    def __init__(self, model: Model, values: Mapping[int, Array], spec: OptimizerSpec) -> None:
        self.spec = spec
        self.keys = {entry.kid: entry.spec for entry in model.own}
        self.stored = {kid: value.copy() for kid, value in values.items()}
        self.wide = {
            kid: widen(value, DTYPES[self.keys[kid].dtype]).copy() for kid, value in values.items()
        }
        self.slots = {kid: init_slots(spec.rule, wide) for kid, wide in self.wide.items()}
        self.counts = dict.fromkeys(self.keys, 0)
        self.version = 0

    def mean(
        self, kid: int, gradients: Sequence[Mapping[int, Array]], weights: Sequence[float]
    ) -> Array | None:
        dtype = DTYPES[self.keys[kid].dtype]
        here = [
            (widen(g[kid], dtype), w) for g, w in zip(gradients, weights, strict=True) if kid in g
        ]
        if not here:
            return None
        if len(here) == len(gradients):
            return weighted_mean([g for g, _ in here], weights)

        def term(at: int) -> Array | None:
            found = gradients[at].get(kid)
            return None if found is None else weighted(widen(found, dtype), weights[at])

        total = tree_sum(term, len(gradients))
        assert total is not None
        counted = weights if self.keys[kid].absent == "zero" else [w for _, w in here]
        return divided(total, float(np.sum(np.asarray(counted, np.float64))))

    def update(self, gradients: Sequence[Mapping[int, Array]], weights: Sequence[float]) -> None:
        means = {kid: self.mean(kid, gradients, weights) for kid in self.keys}
        factor = 1.0
        for kid, mean in means.items():
            if mean is None:
                continue
            dtype = DTYPES[self.keys[kid].dtype]
            self.counts[kid] += 1
            rule, lr_factor = self.spec.for_key(self.keys[kid].key)
            self.wide[kid], self.slots[kid] = update(
                rule,
                self.wide[kid],
                self.slots[kid],
                mean * mean.dtype.type(factor) if factor != 1.0 else mean,
                lr=self.spec.lr_at(self.version) * lr_factor,
                count=self.counts[kid],
            )
            self.stored[kid] = narrow(self.wide[kid], dtype)
        self.version += 1


RULE_TEXTS = (
    "assign",
    "sgd:lr=0.1,weight_decay=0.01",
    "momentum:lr=0.1,momentum=0.8",
    "nesterov:lr=0.05",
    "adam:lr=0.01",
    "adamw:lr=0.01,schedule=warmup:3;*:weight_decay=0.1,lr=2x",
    "adagrad:lr=0.1,lr_decay=0.1",
)


def test_the_law_below_covers_every_rule() -> None:
    assert {text.partition(":")[0] for text in RULE_TEXTS} == set(RULES)


@given(
    model=models(dtypes=FLOATING, absents=("zero", "out")),
    text=st.sampled_from(RULE_TEXTS),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
@settings(max_examples=150)
def test_commits_equal_one_process_bit_for_bit_for_any_servers_cut_and_skips(
    model: Model, text: str, seed: int, data: st.DataObject
) -> None:
    chance = np.random.default_rng(seed)
    first = {entry.kid: values_of(entry.spec, chance) for entry in model.own}
    rig = Rig(model, optimizer_text=text)
    rig.init(first)
    single = Single(model, first, rig.spec)
    same_bits(rig.values(), first)
    assert {held.contributions[0][0].group for _, held in rig.said(c.Held)} <= {SEEDS}
    pinned: list[tuple[Any, bytes]] = []
    for version in range(1, 4):
        weights = [data.draw(st.sampled_from([1.0, 32.0, 16.0, 0.5, 7.25])) for _ in range(3)]
        gradients = [
            {e.kid: values_of(e.spec, chance) for e in model.own if data.draw(st.integers(0, 4))}
            for _ in range(3)
        ]
        names = [ContributionId(worker, MODEL, version) for worker in (1, 2, 3)]
        if data.draw(st.booleans()):
            # A version that is on its way to a worker: it must stay as it is.
            rig.log(c.Grant(1, MODEL, version, version - 1, []))
            rig.data(0, d.Greet(1, 1))
            pinned += [
                (piece.payload, piece.payload.tobytes())
                for _, piece in rig.sent
                if isinstance(piece, ToWorker) and piece.payload is not None
            ]
        for at in data.draw(st.permutations(range(3))):
            bids = data.draw(st.permutations(list(rig.layout.blocks)))
            rig.push(names[at], version, gradients[at], order=bids, weight=weights[at])
        counted = [c.Counted(name, weight) for name, weight in zip(names, weights, strict=True)]
        rig.log(c.Commit(MODEL, version, counted, None))
        single.update(gradients, weights)
        same_bits(rig.values(), single.stored)
    for payload, before in pinned:
        assert payload.tobytes() == before
    for shard in rig.shards:
        assert not shard.contributions.open
        for bid, state in shard.store.blocks.items():
            assert state.counts == {kid: single.counts[kid] for kid in rig.layout.blocks[bid].kids}


def small(*specs: KeySpec, servers: int = 1, **options: Any) -> Rig:
    """A rig with these keys in buckets, all ones."""
    model = placed(list(specs), servers)
    rig = Rig(model, **options)
    rig.init(
        {
            e.kid: narrow(np.ones(size_of(e.spec), DTYPES[e.spec.dtype].wide), DTYPES[e.spec.dtype])
            for e in model.own
        }
    )
    return rig


def f4(*numbers: float) -> Array:
    return np.array(numbers, np.float32)


W = KeySpec("w", "float32", (2,))
B = KeySpec("b", "float32", (1,))


def commit(
    rig: Rig,
    version: int,
    *names: ContributionId,
    weights: Sequence[float] = (),
    norm: float | None = None,
) -> None:
    chosen = weights or [1.0] * len(names)
    rig.log(
        c.Commit(
            MODEL, version, [c.Counted(n, w) for n, w in zip(names, chosen, strict=True)], norm
        )
    )


# --- reductions ------------------------------------------------------------------------------


def test_batches_of_32_32_32_and_16_with_gradients_1_2_3_and_8_give_2_857143() -> None:
    rig = small(KeySpec("w", "float32", (1,)), optimizer_text="assign", members=(1, 2, 3, 4))
    names = [ContributionId(worker, MODEL, 1) for worker in (1, 2, 3, 4)]
    for name, gradient, weight in zip(names, (1, 2, 3, 8), (32, 32, 32, 16), strict=True):
        rig.push(name, 1, {0: f4(gradient)}, weight=weight)
    commit(rig, 1, *names, weights=(32, 32, 32, 16))
    assert rig.values()[0][0] == np.float32(2.857143)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (KeySpec("k", "float32", (1,)), 2.0),
        (KeySpec("k", "float32", (1,), reduce="sum"), 4.0),
        (KeySpec("k", "int32", (1,)), 4),
        (KeySpec("k", "uint8", (1,)), 4),
    ],
)
def test_batches_are_averaged_but_integers_are_added(spec: KeySpec, expected: float) -> None:
    rig = small(spec, optimizer_text="assign")
    names = [ContributionId(worker, MODEL, 1) for worker in (1, 2)]
    for name, number in zip(names, (1, 3), strict=True):
        rig.push(name, 1, {0: np.array([number], DTYPES[spec.dtype].stored)}, weight=5.0)
    commit(rig, 1, *names, weights=(5.0, 5.0))
    assert rig.values()[0].tolist() == [expected]


@pytest.mark.parametrize(("absent", "expected"), [("zero", [-0.25, -1.0]), ("out", [-1.0, -1.0])])
def test_a_skipped_key_counts_as_zero_or_is_left_out(absent: str, expected: list[float]) -> None:
    skipped, other = (
        KeySpec("s", "float32", (1,), absent=absent),
        KeySpec("o", "float32", (1,), absent=absent),
    )
    rig = small(skipped, other, optimizer_text="sgd:lr=1")
    one, two = ContributionId(1, MODEL, 1), ContributionId(2, MODEL, 1)
    rig.push(one, 1, {0: f4(2), 1: f4(2)})
    rig.push(two, 1, {1: f4(2)})
    # weights 5 and 3: 2 * 5 / 8 = 1.25 with the absent one counted, 2 without it
    commit(rig, 1, one, two, weights=(5.0, 3.0))
    assert [float(value[0]) for value in rig.values().values()] == expected


def test_what_stands_in_the_place_of_a_skipped_key_does_not_count() -> None:
    rig = small(W, B, optimizer_text="assign")
    one, two = ContributionId(1, MODEL, 1), ContributionId(2, MODEL, 1)
    rig.push(one, 1, {0: f4(-0.0, 1), 1: f4(2)})
    rig.data(0, d.Push(two, 1, 0, "none", rig.index), f4(7, 7, 4))
    rig.data(0, d.Done(two, 1, 1.0, [0], [0], rig.index))
    commit(rig, 1, one, two)
    assert rig.values()[0].tobytes() == f4(-0.0, 0.5).tobytes()
    assert rig.values()[1].tolist() == [3.0]


@pytest.mark.parametrize("text", ["momentum:lr=0.1", "adam:lr=0.1", "sgd:lr=0.1,weight_decay=0.5"])
def test_a_key_that_all_skip_is_left_alone_and_its_count_too(text: str) -> None:
    rig = small(W, B, optimizer_text=text)
    one, two = ContributionId(1, MODEL, 1), ContributionId(2, MODEL, 1)
    rig.push(one, 1, {0: f4(1, 1)})
    rig.push(two, 1, {0: f4(1, 1)})
    commit(rig, 1, one, two)
    state = rig.shards[0].store.blocks[0]
    assert state.counts == {0: 1, 1: 0}
    assert rig.values()[1].tolist() == [1.0]
    assert rig.values()[0].tolist() != [1.0, 1.0]
    assert all(slot[2] == 0.0 for slot in state.slots)


def test_a_mean_over_no_sample_changes_nothing() -> None:
    rig = small(W, optimizer_text="momentum:lr=0.1")
    one, two = ContributionId(1, MODEL, 1), ContributionId(2, MODEL, 1)
    rig.push(one, 1, {0: f4(1, 1)}, weight=0.0)
    rig.push(two, 1, {0: f4(2, 2)}, weight=0.0)
    commit(rig, 1, one, two, weights=(0.0, 0.0))
    assert rig.values()[0].tolist() == [1.0, 1.0]
    assert rig.shards[0].store.blocks[0].counts == {0: 0}
    assert rig.shards[0].versions == {MODEL: 1}


def test_clipping_scales_by_the_norm_over_all_shards() -> None:
    specs = [KeySpec("a", "float32", (2,)), KeySpec("b", "float32", (2,))]
    rig = small(*specs, servers=2, optimizer_text="sgd:lr=1,clip_global_norm=1.0")
    assert {block.server for block in rig.layout.blocks.values()} == {0, 1}
    name = ContributionId(1, MODEL, 1)
    rig.push(name, 1, {0: f4(3, 0), 1: f4(0, 4)})
    rig.log(c.Sum(MODEL, 1, [c.Counted(name, 1.0)]))
    sums = [pair for _, message in rig.said(c.SquareSums) for pair in message.blocks]
    assert sorted(sums) == [(0, 9.0), (1, 16.0)]
    commit(rig, 1, name, norm=25.0)
    factor = np.float32(clip_factor(25.0, 1.0))
    assert rig.values()[0].tolist() == [1 - 3 * factor, 1.0]
    assert rig.values()[1].tolist() == [1.0, 1 - 4 * factor]
    assert square_sum(f4(3, 0)) == 9.0


def test_another_rule_begins_with_fresh_state_for_every_key() -> None:
    rig = small(W, B, optimizer_text="adam:lr=0.1")
    for version in (1, 2):
        name = ContributionId(1, MODEL, version)
        rig.push(name, version, {0: f4(1, 2), 1: f4(3)})
        commit(rig, version, name)
    momentum, plain = optimizer("momentum:lr=0.1"), optimizer("assign")
    rig.log(c.Configure({"model": momentum.to_plain(), "plain": plain.to_plain()}))
    name = ContributionId(1, MODEL, 3)
    rig.push(name, 3, {0: f4(1, 2)})
    commit(rig, 3, name)
    state = rig.shards[0].store.blocks[0]
    assert state.rule == "momentum"
    assert state.counts == {0: 1, 1: 0}


def test_halves_keep_a_float32_master_so_that_small_updates_add_up() -> None:
    spec = KeySpec("h", "float16", (1,))
    rig = small(spec, optimizer_text="sgd:lr=0.0001")
    for version in range(1, 11):
        name = ContributionId(1, MODEL, version)
        rig.push(name, version, {0: np.array([1.0], np.float16)})
        commit(rig, version, name)
    # 0.0001 is less than half of float16's spacing at 1: without the master nothing would move.
    assert rig.values()[0][0] == np.float16(0.999)


# --- pins ------------------------------------------------------------------------------------


def blocks_to(rig: Rig, worker: int) -> list[ToWorker]:
    return [
        one
        for _, one in rig.sent
        if isinstance(one, ToWorker)
        and one.incarnation == worker
        and isinstance(one.message, d.Block)
    ]


def test_a_granted_version_stays_bit_for_bit_until_it_was_received() -> None:
    rig = small(W)
    rig.data(0, d.Greet(2, 1))
    rig.log(c.Grant(2, MODEL, 1, 0, []))
    (sent,) = blocks_to(rig, 2)
    assert sent.payload is not None
    for version in (1, 2):
        name = ContributionId(1, MODEL, version)
        rig.push(name, version, {0: f4(1, 1)})
        commit(rig, version, name)
        assert sent.payload.tolist() == [1.0, 1.0]
    assert rig.shards[0].grants.pinned_versions == 1
    current = rig.shards[0].store.blocks[0].current
    assert current.pins == 0
    rig.data(0, d.Got(2, MODEL, 1, [0]))
    assert rig.shards[0].grants.pinned_versions == 0


def test_without_pins_a_commit_writes_in_place_and_with_them_it_does_not() -> None:
    rig = small(W)
    first = rig.shards[0].store.blocks[0].current.values
    name = ContributionId(1, MODEL, 1)
    rig.push(name, 1, {0: f4(1, 1)})
    commit(rig, 1, name)
    assert rig.shards[0].store.blocks[0].current.values is first
    rig.log(c.Grant(2, MODEL, 1, 1, []))
    name = ContributionId(1, MODEL, 2)
    rig.push(name, 2, {0: f4(1, 1)})
    commit(rig, 2, name)
    assert rig.shards[0].store.blocks[0].current.values is not first


def test_no_worker_gets_last_blocks_of_a_version_before_another_gets_its_first_ones() -> None:
    """Four blocks of one server, two workers, and at first a link for four blocks."""
    rig = Rig(placed([KeySpec("w", "float32", (16,))], 1, bucket_bytes=0, block_bytes=16))
    rig.init({0: np.arange(16, dtype="f4")})
    rig.shards[0].grants.pace.first_bytes = 64
    for who in (2, 3):
        rig.data(0, d.Greet(who, 1))
    rig.log(c.Grant(2, MODEL, 1, 0, []), c.Grant(3, MODEL, 1, 0, []))
    sent = [[one.message.bid for one in blocks_to(rig, who)] for who in (2, 3)]
    assert sent == [[0, 1], [0, 1]]


def test_where_no_link_is_nothing_waits_for_its_pace() -> None:
    """As above, and one of the two is on the server's machine. It greets again and again."""
    rig = Rig(placed([KeySpec("w", "float32", (16,))], 1, bucket_bytes=0, block_bytes=16))
    rig.init({0: np.arange(16, dtype="f4")})
    rig.shards[0].grants.pace.first_bytes = 32
    for _ in range(2):
        for who, near in ((2, True), (3, False)):
            rig.data(0, d.Greet(who, 1, near))
    rig.log(c.Grant(2, MODEL, 1, 0, []), c.Grant(3, MODEL, 1, 0, []))
    sent = [[one.message.bid for one in blocks_to(rig, who)] for who in (2, 3)]
    assert sent == [[0, 1, 2, 3], [0, 1]]


def test_who_is_no_member_any_more_pins_nothing() -> None:
    rig = small(W)
    rig.log(c.Grant(2, MODEL, 1, 0, []), c.Grant(3, MODEL, 1, 0, []))
    assert rig.shards[0].store.blocks[0].current.pins == 2
    rig.log(c.Epoch(2, [1, 3], []))
    assert rig.shards[0].store.blocks[0].current.pins == 1


def test_a_grant_under_a_name_used_before_leaves_no_pin_behind() -> None:
    rig = small(W)
    for _ in range(2):
        rig.log(c.Grant(2, PULLS, 7, 0, [0]))
    rig.data(0, d.Greet(2, 1))
    rig.data(0, d.Got(2, PULLS, 7, [0]))
    assert rig.shards[0].store.blocks[0].current.pins == 0


def test_some_keys_of_a_bucket_are_sent_as_a_copy() -> None:
    rig = small(W, B)
    rig.data(0, d.Greet(2, 1))
    rig.log(c.Grant(2, PULLS, 5, 0, [1]))
    (sent,) = blocks_to(rig, 2)
    assert sent.message.kids == [1]
    assert sent.payload is not None
    assert sent.payload.tolist() == [1.0]
    assert rig.shards[0].store.blocks[0].current.pins == 0


def test_a_server_asked_again_sends_again_what_it_has_sent() -> None:
    rig = small(W)
    rig.data(0, d.Greet(2, 1))
    rig.log(c.Grant(2, MODEL, 1, 0, []))
    rig.data(0, d.Ask(2, MODEL, 1, [0, 99]))
    rig.data(0, d.Ask(2, MODEL, 77, [0]))
    assert len(blocks_to(rig, 2)) == 2
    rig.data(0, d.Got(2, MODEL, 1, [0]))
    rig.data(0, d.Ask(2, MODEL, 1, [0]))
    assert len(blocks_to(rig, 2)) == 2


# --- guards ----------------------------------------------------------------------------------


def test_nan_and_inf_name_the_key_and_void_the_whole_contribution() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        rig = small(W, B)
        before = rig.values()
        name = ContributionId(1, MODEL, 1)
        rig.push(name, 1, {0: f4(1, 1), 1: f4(bad)})
        ((_, void),) = rig.said(c.Void)
        assert (void.contribution, void.grant, void.key) == (name, 1, "b")
        assert "NaN or Inf" in void.reason
        assert not [h for _, h in rig.said(c.Held) if (name, 1) in h.contributions]
        rig.log(c.Discard(1, MODEL, 1, NO_BATCH))
        same_bits(rig.values(), before)
        assert rig.shards[0].contributions.bytes_held == 0


def test_nan_is_let_in_where_the_key_allows_it() -> None:
    rig = small(KeySpec("w", "float32", (2,), allow_nan=True), optimizer_text="assign")
    name = ContributionId(1, MODEL, 1)
    rig.push(name, 1, {0: f4(np.nan, np.inf)})
    assert not rig.said(c.Void)
    commit(rig, 1, name)
    assert np.isnan(rig.values()[0][0])


@pytest.mark.parametrize("size", [0, 1, 7, 9, 16])
def test_a_payload_of_another_size_is_refused_with_both_sizes(size: int) -> None:
    rig = small(W)
    name = ContributionId(1, MODEL, 1)
    rig.data(0, d.Push(name, 1, 0, "none", rig.index), np.zeros(size, np.uint8))
    ((_, void),) = rig.said(c.Void)
    assert void.key == "w"
    assert void.reason == f"{size} bytes where block 0 has 8"


@pytest.mark.parametrize("text", ["sgd:lr=0.1", "adam"])
def test_integers_are_refused_where_the_rule_cannot_update_them(text: str) -> None:
    rig = small(KeySpec("n", "int32", (1,)), optimizer_text=text)
    rig.push(ContributionId(1, MODEL, 1), 1, {0: np.array([1], np.int32)})
    ((_, void),) = rig.said(c.Void)
    assert void.key == "n"
    assert re.search(r"cannot update int32.*rule='assign'", void.reason)


@pytest.mark.parametrize(
    ("bid", "codec", "text"), [(99, "none", "holds no block 99"), (0, "zip", "codec 'zip'")]
)
def test_an_unknown_block_or_codec_voids_the_contribution(bid: int, codec: str, text: str) -> None:
    rig = small(W)
    rig.data(0, d.Push(ContributionId(1, MODEL, 1), 1, bid, codec, rig.index), f4(1, 1))
    ((_, void),) = rig.said(c.Void)
    assert text in void.reason


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_lossless_codec_does_not_carry_nan_past_the_guard(bad: float) -> None:
    values = np.array([1, bad], np.float32)
    for allow, said in ((False, 1), (True, 0)):
        rig = small(KeySpec("w", "float32", (2,), allow_nan=allow), optimizer_text="assign")
        name, one = ContributionId(1, MODEL, 1), codec("lz4")
        form, payload = to_payload(one.encode(dense(values), (), 0)[0])
        rig.data(0, d.Push(name, 1, 0, "lz4", rig.index, form), payload)
        assert len(rig.said(c.Void)) == said
        if allow:
            rig.data(0, d.Done(name, 1, 1.0, [0], [], rig.index))
            commit(rig, 1, name)
            assert rig.values()[0].tobytes() == values.tobytes()


def test_small_frames_may_lie_at_any_address() -> None:
    rig = small(KeySpec("w", "float64", (2,)), optimizer_text="assign")
    name = ContributionId(1, MODEL, 1)
    buffer = np.zeros(17, np.uint8)
    at = 1 if buffer.ctypes.data % 8 == 0 else 0
    buffer[at : at + 16] = np.array([2.0, 3.0]).view(np.uint8)
    message = d.Push(name, 1, 0, "none", rig.index)
    rig.shards[0].handle(FromWorker(message, buffer[at : at + 16]), 0.0)
    rig.data(0, d.Done(name, 1, 1.0, [0], [], rig.index))
    commit(rig, 1, name)
    assert rig.values()[0].tolist() == [2.0, 3.0]


# --- order, repeats, fences ------------------------------------------------------------------


def test_a_push_before_its_init_is_parked_and_taken_later() -> None:
    model = placed([W], 1)
    rig = Rig(model)
    name = ContributionId(1, SEEDS, 1)
    ahead = rig.index + 1
    rig.data(0, d.Push(name, 1, 0, "none", ahead), f4(5, 6))
    rig.data(0, d.Done(name, 1, 0.0, [0], [], ahead))
    assert not rig.said(d.Ack)
    assert not rig.said(c.Held)
    rig.log(c.Init(1, 1, model.entries, model.blocks))
    ((_, held),) = rig.said(c.Held)
    assert held.contributions == [(name, 1)]
    ((_, ack),) = rig.said(d.Ack)
    assert ack.items == [(name, 0), (name, -1)]
    assert rig.values()[0].tolist() == [5.0, 6.0]


def test_repeats_are_acknowledged_and_count_once() -> None:
    rig = small(W)
    name = ContributionId(1, MODEL, 1)
    before = len(rig.said(d.Ack))
    for _ in range(3):
        rig.push(name, 1, {0: f4(1, 1)})
    assert len(rig.said(d.Ack)) - before == 6
    assert [h.contributions for _, h in rig.said(c.Held)][1:] == [[(name, 1)]]
    commit(rig, 1, name)
    after = rig.values()
    rig.push(name, 1, {0: f4(9, 9)})
    assert len(rig.said(d.Ack)) - before == 8
    assert not rig.shards[0].contributions.open
    same_bits(rig.values(), after)


def test_what_was_reported_as_held_does_not_change_any_more() -> None:
    rig = small(W, B)
    name = ContributionId(1, MODEL, 1)
    rig.push(name, 1, {0: f4(1, 1), 1: f4(1)})
    rig.data(0, d.Done(name, 1, 1.0, [], [0, 1], rig.index))
    rig.data(0, d.Push(name, 1, 0, "none", rig.index), f4(9, 9, 9))
    commit(rig, 1, name)
    assert np.allclose(rig.values()[0], 0.9)
    assert np.allclose(rig.values()[1], 0.9)


def test_discarding_one_batch_leaves_its_grant_to_the_next() -> None:
    rig = small(W)
    gone, good = ContributionId(1, MODEL, 1), ContributionId(1, MODEL, 2)
    rig.push(gone, 1, {0: f4(9, 9)})
    rig.log(c.Discard(1, MODEL, 1, 1))
    rig.push(gone, 1, {0: f4(9, 9)})
    assert not rig.shards[0].contributions.open
    rig.push(good, 1, {0: f4(1, 1)})
    assert list(rig.shards[0].contributions.open) == [good]
    rig.log(c.Discard(1, MODEL, 1, NO_BATCH))
    rig.push(good, 1, {0: f4(1, 1)})
    assert not rig.shards[0].contributions.open


def test_an_epoch_drops_what_the_departed_left_and_fences_them() -> None:
    rig = small(W)
    kept, dropped = ContributionId(2, MODEL, 1), ContributionId(2, MODEL, 2)
    rig.push(kept, 1, {0: f4(1, 1)})
    rig.push(dropped, 2, {0: f4(2, 2)})
    rig.log(c.Epoch(2, [1, 3], [kept]))
    assert list(rig.shards[0].contributions.open) == [kept]
    rig.push(dropped, 2, {0: f4(2, 2)})
    assert {fenced.incarnation for _, fenced in rig.said(d.Fenced)} == {2}
    assert list(rig.shards[0].contributions.open) == [kept]
    commit(rig, 1, kept)
    assert np.allclose(rig.values()[0], 0.9)


def test_a_dropped_initialisation_leaves_nothing_and_the_next_one_counts() -> None:
    model = placed([W, B], 1)
    rig = Rig(model)
    rig.log(c.Init(1, 1, model.entries, model.blocks))
    rig.data(0, d.Push(ContributionId(1, SEEDS, 1), 1, 0, "none", rig.index), f4(1, 2, 3))
    rig.log(c.Drop(1))
    shard = rig.shards[0]
    assert (shard.layout.blocks, shard.contributions.open, shard.store.blocks) == ({}, {}, {})
    rig.log(c.Init(2, 2, model.entries, model.blocks))
    name = ContributionId(2, SEEDS, 2)
    rig.data(0, d.Push(name, 2, 0, "none", rig.index), f4(4, 5, 6))
    rig.data(0, d.Done(name, 2, 0.0, [0], [], rig.index))
    assert rig.values()[0].tolist() == [4.0, 5.0]


def test_a_key_on_its_own_moves_out_of_its_bucket_with_its_bits_and_state() -> None:
    rig = small(W, B, KeySpec("c", "float32", (2,)), optimizer_text="momentum:lr=0.1")
    name = ContributionId(1, MODEL, 1)
    rig.push(name, 1, {0: f4(1, 2), 1: f4(3), 2: f4(4, 5)})
    commit(rig, 1, name)
    before = rig.values()
    slots = rig.shards[0].store.blocks[0].slots[0].copy()
    rig.log(c.Regroup(1, 4, 9))
    rig.layout.regroup(1, 4, 9)
    same_bits(rig.values(), before)
    blocks = rig.shards[0].store.blocks
    assert blocks[9].slots[0].tolist() == [slots[2]]
    assert blocks[0].slots[0].tolist() == slots[[0, 1, 3, 4]].tolist()
    # As a plain key it has the plain rule (assign) and its pushes are added.
    names = [ContributionId(worker, 4, 1) for worker in (1, 2)]
    for one in names:
        rig.push(one, 1, {1: f4(2)})
    rig.log(c.Commit(4, 1, [c.Counted(one, 1.0) for one in names], None))
    assert rig.values()[1].tolist() == [4.0]
    assert rig.values()[0].tobytes() == before[0].tobytes()


def test_a_key_with_a_block_for_itself_has_the_plain_rule_when_it_is_on_its_own() -> None:
    rig = Rig(placed([KeySpec("w", "float32", (2,))], 1, bucket_bytes=0))
    rig.init({0: f4(1, 1)})
    name = ContributionId(1, MODEL, 1)
    rig.push(name, 1, {0: f4(1, 2)})
    commit(rig, 1, name)
    assert rig.values()[0].tolist() == [np.float32(0.9), np.float32(0.8)]
    rig.log(c.Regroup(0, 4, 9))
    rig.layout.regroup(0, 4, 9)
    plain = ContributionId(1, 4, 1)
    rig.push(plain, 1, {0: f4(5, 6)})
    rig.log(c.Commit(4, 1, [c.Counted(plain, 1.0)], None))
    assert rig.values()[0].tolist() == [5.0, 6.0]


def test_the_log_is_applied_in_order_or_not_at_all() -> None:
    rig = small(W)
    for term, index in ((1, rig.index + 1), (1, rig.index - 1), (0, rig.index)):
        with pytest.raises(ProtocolError, match="log entry"):
            rig.shards[0].handle(FromBroker(c.Log(term, index, [])), 0.0)


def test_a_commit_of_what_is_not_held_is_named() -> None:
    rig = small(W)
    with pytest.raises(ProtocolError, match="not held here"):
        commit(rig, 1, ContributionId(1, MODEL, 1))


def test_a_reset_shard_is_a_new_one() -> None:
    rig = small(W)
    shard = rig.shards[0]
    shard.handle(Reset(), 0.0)
    fresh = Shard(window_bytes=WINDOW)
    assert shard.status() == fresh.status()
    assert (shard.index, shard.members, shard.layout) == (0, set(), fresh.layout)
