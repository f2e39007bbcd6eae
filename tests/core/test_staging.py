"""From a device to a frame: who waits for what, and what becomes of pinned memory.

`cupy_on_cpu` raises `Race` where a stream touches what another one has not done with.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import cupy_on_cpu
import numpy as np
import pytest
import zmq
from cupy_on_cpu import Device, Event, Machine, Stream
from hypothesis import given
from hypothesis import strategies as st
from single_blocks import layout, spec
from streams_on_cpu import Race

from zkv.errors import PushRefused
from zkv.layout import Layout
from zkv.time_split import Meter
from zkv.wire import BlockSpec, KeyEntry, Segment
from zkv_codecs.backend import NUMPY
from zkv_workers import lanes, pinned
from zkv_workers import signals as s
from zkv_workers.encoding import Encoder, Sealed
from zkv_workers.lanes import Copy, Lane
from zkv_workers.model import BatchState
from zkv_workers.outgoing import Outgoing, Outlet
from zkv_workers.pinned import ALIGNMENT, Ring, Slots
from zkv_workers.pipeline import Pipeline

Array = np.ndarray[Any, Any]
BLOCKS, BLOCK = 3, 8192
SIZE = BLOCKS * BLOCK
CALLER = threading.current_thread().name


@pytest.fixture
def machine() -> Iterator[Machine]:
    with cupy_on_cpu.installed() as made:
        yield made


# --- slots ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=60))
def test_slots_never_overlap_and_are_found_where_there_is_room(
    steps: list[tuple[int, int]],
) -> None:
    slots, taken = Slots(100), []
    for nbytes, drop in steps:
        start = slots.take(nbytes)
        if start is None:
            used = sorted(taken)
            edges = [0, *(at for one in used for at in (one[0], one[0] + one[1])), 100]
            assert (
                max(high - low for low, high in zip(edges[::2], edges[1::2], strict=True)) < nbytes
            )
        else:
            assert 0 <= start <= 100 - nbytes
            assert all(start + nbytes <= low or low + size <= start for low, size in taken)
            taken.append((start, nbytes))
        if taken and drop < 4:
            slots.give_back(*taken.pop(drop % len(taken)))
        assert slots.taken == sum(size for _, size in taken)
    for one in taken:
        slots.give_back(*one)
    assert slots.holes == [(0, 100)]


def test_slots_are_used_in_turn() -> None:
    slots = Slots(100)
    assert [slots.take(30) for _ in range(3)] == [0, 30, 60]
    slots.give_back(0, 30)
    slots.give_back(30, 30)
    # Behind the last one there is no room, so it begins again.
    assert slots.take(20) == 0
    assert slots.take(20) == 20


def test_pinned_memory_is_bounded_and_made_in_pieces(machine: Machine) -> None:
    ring = Ring(bytes_max=10_000, piece_bytes=4096)
    held = [ring.room(4000), ring.room(4000)]
    assert all(one is not None for one in held)
    assert machine.pinned == [4096, 4096]
    assert ring.room(4000) is None
    assert ring.short == 1
    held.clear()
    assert ring.room(4000) is not None
    assert machine.pinned == [4096, 4096]


def test_what_is_larger_than_a_piece_gets_one_for_itself(machine: Machine) -> None:
    ring = Ring(bytes_max=10_000, piece_bytes=1024)
    assert ring.room(5000) is not None
    assert machine.pinned == [-(-5000 // ALIGNMENT) * ALIGNMENT]
    assert ring.room(20_000) is None


@pytest.mark.parametrize(
    "kept",
    [
        lambda one: one.view(np.float32),
        lambda one: one[8:16],
        lambda one: one.view(np.float32)[2:].reshape(-1, 2),
        memoryview,
        lambda one: zmq.Frame(one, copy=False, copy_threshold=0),
        lambda one: np.frombuffer(memoryview(one), np.uint8),
    ],
)
def test_a_slot_is_taken_while_anything_refers_to_it(
    machine: Machine, kept: Callable[[Array], Any]
) -> None:
    ring = Ring()
    array = ring.room(1024)
    assert array is not None
    holder = kept(array)
    del array
    ring.room(1)
    assert ring.taken >= 1024
    del holder
    gc.collect()
    ring.room(1)
    assert ring.taken == ALIGNMENT


def test_a_slot_is_free_once_zeromq_has_sent_it(machine: Machine) -> None:
    ring = Ring()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        sender.bind("inproc://slots")
        receiver.connect("inproc://slots")
        array = ring.room(2**17)
        assert array is not None
        array[:] = 7
        tracker = sender.send(array, copy=False, track=True)
        del array
        ring.room(1)
        assert ring.taken >= 2**17
        frame = receiver.recv(copy=False)
        assert set(np.frombuffer(frame.buffer, np.uint8)) == {7}
        del frame
        tracker.wait(10)
        gc.collect()
        ring.room(1)
        assert ring.taken == ALIGNMENT
    finally:
        context.destroy(linger=0)


# --- a batch from a device -----------------------------------------------------------------------


def three_blocks() -> Layout:
    made = layout(spec("b", 4), spec("c", 4), bucket=True)
    cut = [Segment(2, at * BLOCK, (at + 1) * BLOCK) for at in range(BLOCKS)]
    made.add(
        [KeyEntry(2, spec("w", SIZE))],
        [BlockSpec(1 + at, 0, [one]) for at, one in enumerate(cut)],
    )
    return made


class Bench:
    """A worker's way out for one large key, w, and two that share a block."""

    def __init__(self, text: str = "int8+ef", model: Layout | None = None) -> None:
        self.layout = three_blocks() if model is None else model
        self.encoder = Encoder(seed=1, backend=NUMPY)
        self.encoder.use(f"{text};small=0")
        self.pipeline = Pipeline(bytes_max=2**26, patience_s=10.0)
        self.sent: list[tuple[int, Sealed]] = []
        self.outlet = Outlet(
            self.encoder, self.pipeline, self.feed, self.feed, Meter(time.perf_counter)
        )
        self.number = 0

    def feed(self, *events: s.Input) -> None:
        for event in events:
            assert isinstance(event, s.SendBlock)
            self.sent.append((event.bid, event.sealed))

    def batch(self) -> Outgoing:
        self.number += 1
        blocks: dict[int, Array] = {}
        grant = s.Grant(self.number, 1, 0, 0, 0, 0, blocks, self.layout)
        return Outgoing(self.outlet, BatchState(grant, 1.0, self.encoder))

    def hold(self) -> threading.Event:
        """Let the pipeline do nothing until the event is set."""
        gate = threading.Event()
        self.pipeline.put(lambda: gate.wait(10.0))
        return gate

    def payloads(self) -> list[tuple[int, bytes]]:
        return [(bid, sealed.payload.tobytes()) for bid, sealed in self.sent]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.pipeline.close()


def noise(seed: int, size: int = SIZE) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def there(array: Array) -> Any:
    import cupy

    return cupy.ndarray(array.copy())


def from_devices(bench: Bench, batches: int = 3) -> list[tuple[int, bytes]]:
    """Push batches, each from another stream, and overwrite each gradient behind its push.

    Raises:
        Race: two streams were in each other's way.
    """
    for number in range(1, batches + 1):
        out = bench.batch()
        with Stream(10 + number):
            gradient, small = there(noise(number)), there(noise(number, 4))
            out.push("w", gradient, lend=False)
            gradient.fill(1e30)
            for key in "bc":
                out.push(key, small, lend=False)
            small.fill(np.nan)
        bench.pipeline.drain()
        if out.error is not None:
            raise out.error
    return bench.payloads()


def from_host(text: str = "int8+ef", batches: int = 3) -> list[tuple[int, bytes]]:
    bench = Bench(text)
    try:
        for number in range(1, batches + 1):
            out = bench.batch()
            out.push("w", noise(number), lend=False)
            bench.pipeline.drain()
            for key in "bc":
                out.push(key, noise(number, 4), lend=False)
    finally:
        bench.pipeline.close()
    return bench.payloads()


@pytest.mark.parametrize("text", ["int8+ef", "topk:0.01+int8+ef", "none", "onebit+ef", "zstd"])
def test_the_bytes_are_the_hosts_though_gradients_are_overwritten_behind_push(
    machine: Machine, text: str
) -> None:
    bench = Bench(text)
    try:
        assert from_devices(bench) == from_host(text)
    finally:
        bench.pipeline.close()


def test_who_pushes_waits_for_no_device(machine: Machine, bench: Bench) -> None:
    """Not for codecs that ask the device, nor for keys that share a block, nor for zstd."""
    for text in ("int8+ef", "topk:0.01+ef", "zstd", "none"):
        bench.encoder.use(f"{text};small=0")
        out, gate = bench.batch(), bench.hold()
        machine.order.waiters.clear()
        for key, size in (("w", SIZE), ("b", 4), ("c", 4)):
            out.push(key, there(noise(1, size)), lend=False)
        assert machine.order.waiters == set()
        gate.set()
        bench.pipeline.drain()
        assert out.error is None
        assert CALLER not in machine.order.waiters
        assert len(bench.sent) == BLOCKS + 1
        bench.sent.clear()


def test_kernels_and_copies_run_on_streams_of_their_own(machine: Machine, bench: Bench) -> None:
    from_devices(bench, 1)
    kernels = {(device, stream) for device, stream, _ in machine.launched}
    copies = {stream for stream, way in machine.copied if way == "to host"}
    lane = lanes.lane(0)
    assert kernels == {lane.work.where}
    assert copies == {lane.copies.where}
    assert not {lane.work.where, lane.copies.where} & {(0, 0), (0, 11)}


def test_only_what_is_sent_comes_over_the_bus(machine: Machine, bench: Bench) -> None:
    out = bench.batch()
    machine.to_host.clear()
    out.push("w", there(noise(1)), lend=False)
    bench.pipeline.drain()
    payloads = sum(sealed.payload.nbytes for _, sealed in bench.sent)
    # One byte beside them: whether all is finite.
    assert sum(machine.to_host) == payloads + 1
    assert payloads < SIZE * 4 / 3.5


def test_pinned_memory_is_used_again(machine: Machine, bench: Bench) -> None:
    for number in range(1, 25):
        out = bench.batch()
        out.push("w", there(noise(number)), lend=False)
        bench.pipeline.drain()
        # They have arrived.
        bench.sent.clear()
    assert machine.pinned == [pinned.PIECE_BYTES]
    assert pinned.ring().short == 0


def test_where_no_slot_is_free_ordinary_memory_takes_its_place(
    machine: Machine, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent before it is here, and nobody waits for a server."""
    small = Ring(bytes_max=BLOCK + 4096, piece_bytes=BLOCK + 4096)
    monkeypatch.setattr(pinned, "_ring", small)
    assert from_devices(bench) == from_host()
    assert small.short > 0
    assert sum(machine.pinned) <= BLOCK + 4096


def test_a_gradient_that_cannot_be_sent_is_told_at_the_end_of_its_batch(
    machine: Machine, bench: Bench
) -> None:
    """D17: with key and element; nothing of it stays in what is remembered."""
    from_devices(bench, 1)
    bad, out = noise(2), bench.batch()
    bad[BLOCK + 5] = np.nan
    out.push("w", there(bad), lend=False)
    bench.pipeline.drain()
    with pytest.raises(PushRefused, match=f"key 'w': element {BLOCK + 5} of the gradient is nan"):
        raise out.error or AssertionError("it was sent")
    out.drop()
    bench.sent.clear()
    bench.number = 1
    out = bench.batch()
    out.push("w", there(noise(2)), lend=False)
    bench.pipeline.drain()
    assert bench.payloads() == [one for one in from_host(batches=2)[4:] if one[0] > 0]


def test_a_small_gradient_that_cannot_be_sent_is_told_as_well(
    machine: Machine, bench: Bench
) -> None:
    out = bench.batch()
    for key, value in (("b", 1.0), ("c", np.inf)):
        out.push(key, there(np.full(4, value, np.float32)), lend=False)
    bench.pipeline.drain()
    with pytest.raises(PushRefused, match="key 'c': element 0 of the gradient is inf"):
        raise out.error or AssertionError("it was sent")


def test_of_small_keys_some_of_which_are_skipped_the_others_are_sent(
    machine: Machine, bench: Bench
) -> None:
    bench.encoder.use("int8;small=0;nonfinite=skip")
    out = bench.batch()
    out.push("b", there(np.full(4, 2, np.float32)), lend=False)
    out.push("w", there(np.full(SIZE, np.nan, np.float32)), lend=False)
    out.rest()
    bench.pipeline.drain()
    assert out.error is None
    assert [bid for bid, _ in bench.sent] == [0]
    assert out.state.packer.skipped() == (1, 2)


def test_a_batch_in_vain_waits_for_nothing_and_sends_nothing(
    machine: Machine, bench: Bench
) -> None:
    out, gate = bench.batch(), bench.hold()
    out.push("w", there(noise(1)), lend=False)
    out.drop()
    gate.set()
    bench.pipeline.drain()
    assert bench.sent == []
    assert machine.launched == []


# --- waits that are forgotten --------------------------------------------------------------------


def ignores_the_callers_event(patch: pytest.MonkeyPatch) -> None:
    right = Lane.working
    patch.setattr(Lane, "working", lambda self, after=(): right(self))


def copies_before_kernels_are_done(patch: pytest.MonkeyPatch) -> None:
    right = Stream.wait_event

    def wait_event(self: Stream, event: Event) -> None:
        if self.where != lanes._lanes[0].copies.where:
            right(self, event)

    patch.setattr(Stream, "wait_event", wait_event)


def sends_before_the_copy_is_here(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Copy, "wait", lambda self: None)


def encodes_on_another_stream(patch: pytest.MonkeyPatch) -> None:
    right = lanes.on
    patch.setattr(
        lanes,
        "on",
        lambda home, stream=None: right(home, None if stream is lanes._lanes[0].work else stream),
    )


def takes_no_copy_of_the_gradient(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cupy_on_cpu.ndarray, "copy", lambda self, order="C": self)


def frees_a_slot_when_it_is_filled(patch: pytest.MonkeyPatch) -> None:
    right = Ring.room

    def room(self: Ring, nbytes: int) -> Array | None:
        made = right(self, nbytes)
        for piece in self._pieces:
            piece.slots = Slots(piece.slots.size)
        return made

    patch.setattr(Ring, "room", room)


def gives_memory_away_that_is_still_copied(patch: pytest.MonkeyPatch) -> None:
    right = Copy.__init__
    patch.setattr(Copy, "__init__", lambda self, done, held: right(self, done, held[1:]))


@pytest.mark.parametrize(
    "forget",
    [
        ignores_the_callers_event,
        copies_before_kernels_are_done,
        sends_before_the_copy_is_here,
        encodes_on_another_stream,
        takes_no_copy_of_the_gradient,
        frees_a_slot_when_it_is_filled,
        gives_memory_away_that_is_still_copied,
    ],
)
def test_what_is_forgotten_is_found_out(
    monkeypatch: pytest.MonkeyPatch, forget: Callable[[pytest.MonkeyPatch], None]
) -> None:
    assert is_found_out(monkeypatch, forget)


def test_where_nothing_is_forgotten_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_found_out(monkeypatch, lambda patch: None)


def is_found_out(
    monkeypatch: pytest.MonkeyPatch, forget: Callable[[pytest.MonkeyPatch], None]
) -> bool:
    expected, found = from_host(), False
    bench = Bench()
    try:
        with cupy_on_cpu.installed() as machine, monkeypatch.context() as patch:
            lanes.lane(0)
            forget(patch)
            try:
                found = from_devices(bench) != expected
            except Race:
                found = True
            found = found or bool(machine.races)
            machine.races.clear()
    finally:
        bench.pipeline.close()
    return found


def test_a_gradient_that_another_stream_overwrites_is_a_race(
    machine: Machine, bench: Bench
) -> None:
    """The rule: only in the order of the stream that was current at `push`."""
    out = bench.batch()
    with Stream(7):
        gradient = there(noise(1))
        out.push("w", gradient, lend=False)
    with pytest.raises(Race), Stream(8):
        gradient.fill(0)
    bench.pipeline.drain()


def test_the_order_of_two_devices_is_an_event_too(machine: Machine) -> None:
    import cupy

    with Device(0):
        given = there(noise(1, 8))
    with Device(1):
        into = cupy.empty(8, np.float32)
        with pytest.raises(Race):
            cupy.copyto(into, given)
    with Device(0):
        done = Event()
        done.record()
    with Device(1):
        cupy.cuda.get_current_stream().wait_event(done)
        cupy.copyto(into, given)
        assert np.array_equal(into.get(), noise(1, 8))
