"""`codec=auto` at one worker, on links that are simulated: what is sent, and why."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from single_blocks import layout, received, spec

from zkv.layout import Layout
from zkv_codecs.auto import auto
from zkv_codecs.backend import NUMPY
from zkv_workers.choosing import LOOK_EVERY, Chooser, Traffic
from zkv_workers.encoding import Encoder, Sealed

Array = np.ndarray[Any, Any]
SIZE = 40_000
MBIT = 1e6 / 8
SLOW, FAST = 10 * MBIT, 1e12


class Link:
    """A worker's way to one server: `latency_s` and bytes / speed for each batch."""

    def __init__(self, speed: float, *, latency_s: float = 1e-3, text: str = "auto") -> None:
        self.speed, self.latency_s = speed, latency_s
        self.up, self.up_s, self.down, self.down_s, self.passed_s = 0, 0.0, 0, 0.0, 0.0
        self.encoder = Encoder(seed=1, backend=NUMPY)
        self.encoder.traffic = self.traffic
        self.encoder.use(text)
        chooser = self.encoder._chooser
        assert chooser is not None
        self.chooser: Chooser = chooser
        # What computing costs here is real, what travels takes the link's time.
        chooser._clock = lambda: time.perf_counter() + self.passed_s
        self.batches = 0

    def traffic(self) -> Traffic:
        return Traffic(self.up, self.up_s, self.down, self.down_s)

    def carry(self, nbytes: int) -> None:
        spent = self.latency_s + nbytes / self.speed
        self.up, self.up_s = self.up + nbytes, self.up_s + spent
        self.passed_s += spent

    def fetch(self, nbytes: int) -> None:
        self.down, self.down_s = self.down + nbytes, self.down_s + self.latency_s
        self.down_s += nbytes / self.speed

    def batch(self, there: Layout, gradients: dict[int, Array]) -> dict[int, Sealed]:
        self.batches += 1
        self.encoder.begin()
        sent = {
            bid: self.encoder.encode(there, there.blocks[bid], values, self.batches)
            for bid, values in gradients.items()
        }
        self.fetch(sum(values.nbytes for values in gradients.values()))
        self.carry(sum(one.payload.nbytes for one in sent.values()))
        return sent


def noise(seed: int, size: int = SIZE) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def run(link: Link, batches: int, size: int = SIZE) -> list[str]:
    there = layout(spec("w", size))
    link.fetch(4 * size)
    return [link.batch(there, {0: noise(at, size)})[0].codec for at in range(batches)]


def test_a_slow_link_is_never_sent_a_dense_batch() -> None:
    """What came down tells of it before anything goes up."""
    sent = run(Link(SLOW), 40)
    assert "none" not in sent
    assert link_bytes(sent[-1]) < 0.05


def link_bytes(text: str) -> float:
    """Bytes per dense byte of the codecs that are chosen from."""
    return {"none": 1.0, "fp16": 0.5, "int8": 0.26, "onebit": 0.04, "topk:0.01+fp16": 0.01}[text]


def test_a_fast_link_is_sent_what_was_given() -> None:
    sent = run(Link(FAST, latency_s=3e-3), 40)
    assert set(sent[20:]) == {"none"}


def test_a_fast_link_that_seemed_slow_is_found_out() -> None:
    """Down: first 160 kB in 20 ms, as a server was busy; up it takes 1 ms whatever is sent."""
    there = layout(spec("w", SIZE))
    link = Link(FAST)
    link.down, link.down_s = 4 * SIZE, 0.02
    sent = [link.batch(there, {0: noise(at)})[0].codec for at in range(40)]
    assert sent[0] != "none"
    assert set(sent[20:]) == {"none"}


def test_a_link_that_becomes_slow_is_noticed_and_one_that_becomes_fast_in_time() -> None:
    link = Link(FAST)
    assert run(link, 30)[-1] == "none"
    link.speed = SLOW
    assert "none" not in run(link, 30)[-10:]
    link.speed = FAST
    sent = run(link, LOOK_EVERY + 30)
    assert sent[-1] == "none"


def test_nothing_is_lost_while_codecs_change() -> None:
    """What was received and what is kept is all that was given."""
    link = Link(SLOW)
    there = layout(spec("w", SIZE))
    link.fetch(4 * SIZE)
    given, got = np.zeros(SIZE), np.zeros(SIZE)
    codecs = Counter[str]()
    for at in range(60):
        if at == 30:
            link.speed = FAST
        given += noise(at)
        sealed = link.batch(there, {0: noise(at)})[0]
        codecs[sealed.codec] += 1
        link.chooser.looking = at == 40
        got += received(sealed, (SIZE,)).astype(np.float64)
    memory = link.encoder.memories.by_block[0]
    kept = memory.codec.carried(memory.state)
    rest = (0.0 if kept is None else kept) + (0.0 if memory.owed is None else memory.owed)
    np.testing.assert_allclose(got + rest, given, atol=2e-4)
    assert len(codecs) > 1


def test_each_key_has_its_own_codec() -> None:
    """Chance is kept whole by no codec that chooses few; what is mostly zero is."""
    there = layout(spec("noise", SIZE), spec("sparse", SIZE), spec("small", 10))
    link = Link(SLOW, text="auto:owed=3")
    link.fetch(8 * SIZE)
    sparse = np.zeros(SIZE, np.float32)
    sparse[::200] = 1.0
    for at in range(200):
        sent = link.batch(there, {0: noise(at), 1: sparse, 2: noise(at, 10)})
    assert sent[0].codec != sent[1].codec == "topk:0.01+fp16"
    assert sent[2].form is None
    rows = link.encoder.accounts.report(there)
    assert rows.keys() == {"noise", "sparse"}
    assert "topk:0.01+fp16+ef owes" in str(rows["noise"]["why"])
    assert str(rows["sparse"]["why"]).startswith("'sparse' (40000 elements): topk:0.01+fp16+ef, ")


def test_a_first_choice_counts_what_the_model_takes_to_come_down_by_keys() -> None:
    """0.08 s for both keys: half of it belongs to each, though the second is not known yet."""
    there = layout(spec("a", SIZE), spec("b", SIZE))
    link = Link(8 * SIZE / 0.079)
    link.fetch(8 * SIZE)
    link.encoder.begin()
    link.encoder.encode(there, there.blocks[0], noise(0), 0)
    (unit,) = link.chooser.units.values()
    assert link.chooser._rest_s([unit]) == pytest.approx(0.04)


def test_keys_of_a_bucket_share_a_codec_that_chooses_no_elements() -> None:
    there = layout(spec("a", 2000), spec("b", 2000), bucket=True)
    link = Link(SLOW, text="auto;small=0")
    link.fetch(16_000)
    for at in range(20):
        sealed = link.batch(there, {0: noise(at, 4000)})[0]
    assert sealed.codec == "onebit"
    assert "'a and 1 more' (4000 elements)" in str(link.encoder.accounts.report(there)["b"]["why"])


def test_a_worker_without_a_link_chooses_none() -> None:
    made = Encoder(seed=1, backend=NUMPY)
    made.use("auto")
    there = layout(spec("w", SIZE))
    for at in range(20):
        made.begin()
        sealed = made.encode(there, there.blocks[0], noise(at), at)
        assert (sealed.codec, sealed.form) == ("none", None)
        np.testing.assert_array_equal(sealed.payload, noise(at))


@pytest.mark.parametrize("elements", [0, 1])
def test_blocks_of_next_to_nothing_are_measured_too(elements: int) -> None:
    chooser = Chooser(auto("auto"), NUMPY)
    there = layout(spec("w", elements))
    unit = chooser.unit(there, there.blocks[0])
    assert chooser._measured(unit.candidates["int8+ef"], _given(elements), 4).encode_s >= 0


def test_what_a_codec_will_keep_back_is_estimated_before_it_was_in_use() -> None:
    """Of normal noise onebit cuts off 1 − 2/π of the squares: e² = 0.3634 (1 + e²), e = 0.756."""
    chooser = Chooser(auto("auto"), NUMPY)
    there = layout(spec("w", SIZE))
    unit = chooser.unit(there, there.blocks[0])
    dense = replace(_given(SIZE), values=noise(0))
    found = {text: chooser._measured(one, dense, 4).error for text, one in unit.candidates.items()}
    assert found["onebit+ef"] == pytest.approx(0.756, rel=0.02)
    assert found["none"] == 0.0 != found["fp16"]
    assert chooser._measured(unit.candidates["onebit+ef"], _given(SIZE), 4).error == 0.0


def test_what_it_may_keep_back_is_no_less_than_that_of_noise_until_it_was_in_use() -> None:
    """A first gradient with all in a few elements: topk sends it whole, and keeps 3 of noise."""
    link = Link(SLOW)
    there = layout(spec("w", SIZE))
    few = np.zeros(SIZE, np.float32)
    few[:100] = 1.0
    link.fetch(4 * SIZE)
    link.batch(there, {0: few})
    (unit,) = link.chooser.units.values()
    first = unit.measured["topk:0.01+fp16+ef"]
    assert first.error == 0.0
    assert first.most == pytest.approx(3.27, rel=0.05)
    assert unit.measured["onebit+ef"].most == pytest.approx(unit.measured["onebit+ef"].error)
    assert (unit.measured["none"].most, unit.measured["fp16"].most) == (None, None)
    used = unit.current.text
    link.batch(there, {0: few})
    assert unit.measured[used].most is None
    assert unit.measured["int8+ef"].most is not None


def test_where_late_steps_are_worth_less_a_first_gradient_is_not_trusted() -> None:
    """Most of a step is no encoding or sending: what topk would save is less than what it may
    cost, though it sends this gradient whole."""
    there = layout(spec("w", SIZE))
    few = np.zeros(SIZE, np.float32)
    few[:100] = 1.0
    sent = {}
    for late in (0.0, 0.5):
        link = Link(SLOW, text=f"auto:late={late},candidates=none|int8+ef|topk:0.01+fp16+ef")
        link.fetch(4 * SIZE)
        sent[late] = link.batch(there, {0: few})[0].codec
    assert sent == {0.0: "topk:0.01+fp16", 0.5: "int8"}


def _given(size: int) -> Any:
    from zkv_codecs.packed import dense

    return dense(np.ones(size, np.float32))
