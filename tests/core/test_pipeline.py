"""Encoding beside the caller: order, room, what is lent, and what is taken back."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from single_blocks import layout, received, spec

from zkv.errors import WaitTimeout
from zkv.layout import Layout
from zkv.time_split import Meter
from zkv.wire import BlockSpec, KeyEntry, KeySpec, Segment
from zkv_codecs.backend import NUMPY
from zkv_workers import signals as s
from zkv_workers.encoding import LONG, Encoder, Sealed
from zkv_workers.model import BatchState
from zkv_workers.outgoing import Outgoing, Outlet, mark_of
from zkv_workers.pipeline import Pipeline

Array = np.ndarray[Any, Any]


@pytest.fixture
def pipeline() -> Any:
    made = Pipeline(bytes_max=1000, patience_s=5.0)
    yield made
    made.close()


# --- jobs ----------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 2000), max_size=20))
def test_jobs_are_done_in_order_whatever_they_hold(sizes: list[int]) -> None:
    pipeline, done = Pipeline(bytes_max=1000, patience_s=5.0), []
    try:
        for at, size in enumerate(sizes):
            pipeline.put(lambda at=at: done.append(at), size)
        pipeline.drain()
        assert done == list(range(len(sizes)))
        assert pipeline.idle
    finally:
        pipeline.close()


def test_who_hands_over_more_than_there_is_room_for_waits(pipeline: Pipeline) -> None:
    may_end, waits = threading.Event(), threading.Event()
    pipeline.put(lambda: may_end.wait(5.0), 800)
    order: list[str] = []

    def hand_over() -> None:
        waits.set()
        pipeline.put(lambda: order.append("second"), 800)
        order.append("handed over")

    caller = threading.Thread(target=hand_over)
    caller.start()
    assert waits.wait(5.0)
    # What still fits goes by: a small job does not wait for a large one to be admitted.
    pipeline.put(lambda: order.append("small"), 100)
    assert "handed over" not in order
    may_end.set()
    caller.join(5.0)
    pipeline.drain()
    assert set(order) == {"small", "handed over", "second"}
    assert order.index("small") < order.index("second")


def test_waits_are_bounded_and_say_why() -> None:
    pipeline, may_end = Pipeline(bytes_max=10, patience_s=0.01), threading.Event()
    try:
        pipeline.put(lambda: may_end.wait(5.0), 8)
        with pytest.raises(
            WaitTimeout, match=r"has had 8 bytes to do for 0.01 s, so there is no r"
        ):
            pipeline.put(lambda: None, 8)
        with pytest.raises(WaitTimeout, match=r"1 blocks were not encoded within 0.01 s"):
            pipeline.drain()
    finally:
        may_end.set()
        pipeline.close()


def test_a_job_that_fails_leaves_room_for_the_next(pipeline: Pipeline) -> None:
    def fails() -> None:
        raise ValueError

    assert isinstance(pipeline.put(fails, 1000).exception(5.0), ValueError)
    assert pipeline.put(lambda: None, 1000).result(5.0) is None
    pipeline.close()
    pipeline.close()
    assert pipeline.idle


# --- a batch's blocks ----------------------------------------------------------------------------


class Watched(Encoder):
    """An encoder that does something before it encodes a large block."""

    first: Callable[[], object]

    def _encode(self, *given: Any, **more: Any) -> Sealed:
        if given[1].block.size >= LONG:
            self.first()
        return super()._encode(*given, **more)


class Bench:
    """A batch of one large key, one small key, and what is sent of them."""

    def __init__(self, text: str = "int8+ef", size: int = LONG) -> None:
        self.layout = layout(spec("w", size), spec("b", 4))
        self.encoder = Watched(seed=1, backend=NUMPY)
        self.encoder.use(text)
        self.encoder.first = self.pause
        self.pipeline = Pipeline(bytes_max=2**26, patience_s=10.0)
        self.meter = Meter(itertools.count().__next__)
        self.sent: dict[int, s.SendBlock] = {}
        self.threads: dict[int, str] = {}
        self.fed: list[int] = []
        """How many blocks were handed over each time."""
        self.outlet = Outlet(self.encoder, self.pipeline, self.feed, self.feed, self.meter)
        self.number = 0
        self.gate = threading.Event()
        self.gate.set()

    def pause(self) -> None:
        assert self.gate.wait(10.0)

    def feed(self, *events: s.Input) -> None:
        self.fed.append(len(events))
        for event in events:
            assert isinstance(event, s.SendBlock)
            self.sent[event.bid] = event
            self.threads[event.bid] = threading.current_thread().name

    def batch(self) -> Outgoing:
        self.number += 1
        self.sent.clear()
        blocks: dict[int, Array] = {}
        grant = s.Grant(self.number, 1, 0, 0, 0, 0, blocks, self.layout)
        return Outgoing(self.outlet, BatchState(grant, 1.0, self.encoder))

    def values(self, size: int = LONG) -> Array:
        return received(self.sent[0].sealed, (size,))


@pytest.fixture
def bench() -> Any:
    made = Bench()
    yield made
    made.gate.set()
    made.pipeline.close()


def noise(seed: int, size: int = LONG) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def test_blocks_of_a_gradient_are_handed_over_together_but_not_all_of_a_large_one() -> None:
    bench = Bench("none")
    size, count = 2**18, 20
    spans = [(at * size, (at + 1) * size) for at in range(count)]
    spans.append((count * size, count * size + 7))
    entry = KeyEntry(0, KeySpec("w", "float32", (spans[-1][1],)))
    bench.layout = Layout()
    bench.layout.add(
        [entry], [BlockSpec(at, 0, [Segment(0, *one)]) for at, one in enumerate(spans)]
    )
    gradient = noise(1, spans[-1][1])
    expected = gradient.copy()
    assert bench.batch().push("w", gradient, lend=False).done()
    gradient[:] = 7.0
    # Of 1 MiB each, and TOGETHER_BYTES are 8 MiB.
    assert bench.fed == [8, 8, 5]
    assert list(bench.sent) == list(range(count + 1))
    sent = np.concatenate([one.sealed.payload for one in bench.sent.values()])
    np.testing.assert_array_equal(sent, expected)


def test_large_blocks_are_encoded_beside_the_caller_and_small_ones_at_once(bench: Bench) -> None:
    out = bench.batch()
    bench.gate.clear()
    gradient = noise(0)
    # It returns though nothing can be encoded now, and the array is free at once.
    assert out.push("w", gradient, lend=False).done()
    gradient[:] = 7.0
    assert out.push("b", np.ones(4, np.float32), lend=False).done()
    assert bench.sent.keys() == {1}
    assert out.beside
    bench.gate.set()
    bench.pipeline.drain()
    np.testing.assert_allclose(bench.values(), noise(0), atol=0.02)
    assert bench.threads[0].startswith("zkv-encoder")
    assert bench.threads[1] == threading.current_thread().name


def test_what_is_sent_is_the_same_whether_beside_or_not(bench: Bench) -> None:
    """Bit for bit, over steps with a residual."""
    other = Encoder(seed=1, backend=NUMPY)
    other.use("int8+ef")
    for number in (1, 2, 3):
        bench.batch().push("w", noise(number), lend=number == 2)
        bench.pipeline.drain()
        alone = other.encode(bench.layout, bench.layout.blocks[0], noise(number), number)
        np.testing.assert_array_equal(bench.sent[0].sealed.payload, alone.payload)


def test_with_nothing_to_encode_nothing_goes_beside() -> None:
    bench = Bench("none")
    out = bench.batch()
    gradient = noise(0)
    assert out.push("w", gradient, lend=True).done()
    assert gradient.flags.writeable
    gradient[:] = 0.0
    np.testing.assert_array_equal(bench.values(), noise(0))
    assert not out.beside
    assert bench.pipeline._pool is None


# --- lent arrays ---------------------------------------------------------------------------------


def test_a_lent_array_cannot_be_written_to_until_it_is_free(bench: Bench) -> None:
    out = bench.batch()
    bench.gate.clear()
    gradient = noise(0)
    free = out.push("w", gradient, lend=True)
    assert not free.done()
    with pytest.raises(ValueError, match="read-only"):
        gradient[0] = 1.0
    bench.gate.set()
    free.result(5.0)
    gradient[:] = 1.0
    # It was encoded from the lender's memory, so a change after that does not matter.
    np.testing.assert_allclose(bench.values(), noise(0), atol=0.02)


def test_after_the_block_a_lent_array_is_free(bench: Bench) -> None:
    out = bench.batch()
    gradient = noise(0)
    out.push("w", gradient, lend=True)
    out.take_back()
    gradient[:] = 1.0
    out.take_back()


@pytest.mark.parametrize("how", ["view", "element", "before it is encoded"])
def test_a_lent_array_that_is_changed_by_another_way_is_found_out(bench: Bench, how: str) -> None:
    base = noise(0)
    writable = base[:]
    out = bench.batch()
    if how == "before it is encoded":
        bench.gate.clear()
    out.push("w", base if how == "view" else writable, lend=True)
    (base if how == "element" else writable)[5] = 3.0 if how != "view" else 9.0
    bench.gate.set()
    with pytest.raises(BufferError, match="key 'w': the gradient was changed while it was lent"):
        out.take_back()


@given(
    size=st.integers(2, 3000),
    pair=st.tuples(st.integers(0, 2999), st.integers(0, 2999)),
    width=st.integers(1, 300),
)
def test_another_order_of_the_same_words_changes_the_mark(
    size: int, pair: tuple[int, int], width: int
) -> None:
    """Swapped words, and swapped runs of them: whatever adds words up does not see it."""
    values = np.arange(size, dtype=np.uint64)
    before = mark_of(values)
    one, other = (at % size for at in pair)
    run = min(width, abs(one - other), size - max(one, other))
    kept = values[one : one + run].copy()
    values[one : one + run] = values[other : other + run]
    values[other : other + run] = kept
    assert (mark_of(values) != before) == (run > 0)


@given(
    size=st.integers(1, 9000),
    at=st.integers(0, 80_000),
    dtype=st.sampled_from(["f4", "f8", "f2", "u1", "i8"]),
)
def test_any_single_change_changes_the_mark(size: int, at: int, dtype: str) -> None:
    values = np.arange(size).astype(dtype)
    before = mark_of(values)
    assert mark_of(values.copy()) == before
    raw = values.view(np.uint8)
    raw[at % raw.size] ^= 1
    assert mark_of(values) != before


# --- errors and withdrawals ----------------------------------------------------------------------


def test_what_fails_beside_is_kept_for_the_end_of_the_batch(bench: Bench) -> None:
    def fails() -> None:
        raise MemoryError("no room for a block")

    bench.encoder.first = fails
    out = bench.batch()
    out.push("w", noise(0), lend=False)
    bench.pipeline.drain()
    assert isinstance(out.error, MemoryError)
    assert bench.sent == {}


def test_what_was_encoded_of_a_dropped_batch_is_taken_back_even_if_it_comes_late(
    bench: Bench,
) -> None:
    """Dropped while its block is being encoded: the residual is that of before, to the bit."""
    bench.batch().push("w", noise(1), lend=False)
    bench.pipeline.drain()
    bench.encoder.settled(1, counted=True)
    before = bench.encoder.memories.by_block[0].state[0].copy()
    entered = threading.Event()

    def slow() -> None:
        entered.set()
        bench.pause()

    bench.encoder.first = slow
    bench.gate.clear()
    out = bench.batch()
    out.push("w", noise(2), lend=False)
    assert entered.wait(5.0)
    out.drop()
    bench.gate.set()
    bench.pipeline.drain()
    bench.encoder.memories.hear()
    np.testing.assert_array_equal(bench.encoder.memories.by_block[0].state[0], before)


def test_blocks_of_a_cancelled_batch_are_not_encoded(bench: Bench) -> None:
    bench.gate.clear()
    first = bench.batch()
    first.push("w", noise(0), lend=False)
    second = bench.batch()
    second.push("w", noise(1), lend=False)
    second.state.cancelled = True
    bench.gate.set()
    bench.pipeline.drain()
    assert [one.batch for one in bench.sent.values()] == [1]
