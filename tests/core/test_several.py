"""Gradients on several devices as one contribution, and values that reach all of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import cupy_on_cpu
import numpy as np
import pytest
from cupy_on_cpu import Device, Machine, Stream
from hypothesis import given, settings
from hypothesis import strategies as st
from streams_on_cpu import Race

import zkv
from zkv.errors import KeyMismatch, PushRefused
from zkv.layout import Layout
from zkv.reduction import InParts, OnCpu, OneDevice, Ring
from zkv.sums import weighted_mean
from zkv.wire import BlockSpec, KeyEntry, KeySpec, Segment
from zkv_codecs.backend import NUMPY
from zkv_workers import devices, lanes, probe, reducing
from zkv_workers.encoding import Encoder
from zkv_workers.packing import Packer
from zkv_workers.reducing import all_reduced, broadcast
from zkv_workers.unpacking import read_into

Array = np.ndarray[Any, Any]
STRATEGIES = [OneDevice(), OneDevice(1), OnCpu(), InParts(), Ring()]
CUTS = (0, 700, 1400, 2000)
SIZE = CUTS[-1]


@pytest.fixture
def machine() -> Iterator[Machine]:
    with cupy_on_cpu.installed() as made:
        yield made


def there(array: Array, device: int) -> Any:
    import cupy

    with Device(device):
        return cupy.ndarray(array.copy())


def here(array: Any) -> Array:
    with Device(array.device.id):
        found: Array = array.get()
        return found


def noise(count: int, size: int = SIZE, kind: str = "f4") -> list[Array]:
    chance = np.random.default_rng(size + count)
    return [chance.standard_normal(size).astype(kind) for _ in range(count)]


# --- on devices as on the host -------------------------------------------------------------------


@given(
    st.integers(1, 4),
    st.integers(0, 9),
    st.sampled_from(STRATEGIES),
    st.sampled_from(["f4", "f8", "f2"]),
    st.booleans(),
)
@settings(max_examples=60)
def test_devices_give_the_bits_of_the_host(
    count: int, size: int, strategy: Any, kind: str, one_card: bool
) -> None:
    """In all strategies, on cards of their own or on one; nobody is in another's way."""
    if strategy == OneDevice(1) and count == 1:
        strategy = OneDevice()
    arrays = noise(count, size, kind)
    samples = [3.0, 1.0, 2.0, 5.0][:count]
    expected = all_reduced(arrays, strategy, samples=samples, mean=True)
    with cupy_on_cpu.installed():
        given = [there(one, 0 if one_card else at) for at, one in enumerate(arrays)]
        found = all_reduced(given, strategy, samples=samples, mean=True)
        for at, (one, right) in enumerate(zip(found, expected, strict=True)):
            assert one.device.id == (0 if one_card else at)
            assert here(one).tobytes() == right.tobytes()
            assert here(given[at]).tobytes() == arrays[at].tobytes()


@given(st.integers(1, 4), st.integers(0, 9), st.sampled_from(STRATEGIES))
@settings(max_examples=30)
def test_values_reach_every_device(count: int, size: int, strategy: Any) -> None:
    if strategy == OneDevice(1) and count == 1:
        strategy = OneDevice()
    (values,) = noise(1, size)
    with cupy_on_cpu.installed():
        into = [there(np.zeros_like(values), at) for at in range(count)]
        broadcast(values, into, strategy)
        assert all(here(one).tobytes() == values.tobytes() for one in into)


@pytest.mark.parametrize(
    ("strategy", "peer", "to_host", "to_device"),
    [(OneDevice(), 6, 0, 0), (InParts(), 24, 0, 0), (Ring(), 24, 0, 0), (OnCpu(), 0, 4, 4)],
)
def test_devices_talk_to_each_other_and_only_the_cpus_sum_comes_to_the_host(
    machine: Machine, strategy: Any, peer: int, to_host: int, to_device: int
) -> None:
    """Copies of whole gradients, or of quarters: 2(n − 1), 2n(n − 1), 2n."""
    given = [there(one, at) for at, one in enumerate(noise(4))]
    machine.copied.clear()
    all_reduced(given, strategy)
    ways = [way for _, way in machine.copied]
    assert (ways.count("peer"), ways.count("to host"), ways.count("to device")) == (
        peer,
        to_host,
        to_device,
    )


@pytest.mark.parametrize("strategy", [OneDevice(), InParts(), Ring()])
@pytest.mark.parametrize("place", ["wait for the step before", "wait for the gradients"])
def test_a_wait_that_is_forgotten_is_a_race(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, strategy: Any, place: str
) -> None:
    if place == "wait for the gradients":
        monkeypatch.setattr(lanes.CudaSite, "after", lambda self, marks: None)
    else:
        right = reducing._do

        def alone(step: Any, made: Any, places: Any, held: Any, marks: Any) -> None:
            right(step, made, places, held, dict(marks))

        monkeypatch.setattr(reducing, "_do", alone)
    given = [there(one, at) for at, one in enumerate(noise(4))]
    with pytest.raises(Race):
        all_reduced(given, strategy)
    for device in range(4):
        Device(device).synchronize()
    machine.races.clear()


# --- pushed --------------------------------------------------------------------------------------


def layout(dtype: str = "float32") -> Layout:
    """The key w in three blocks of its own, and b and c in one that they share."""
    made = Layout()
    specs = [KeySpec("w", dtype, (SIZE,))]
    specs += [KeySpec(name, dtype, (3,)) for name in "bc"]
    own = [
        BlockSpec(at, 0, [Segment(0, low, high)]) for at, (low, high) in enumerate(pairwise(CUTS))
    ]
    shared = BlockSpec(3, 0, [Segment(1, 0, 3), Segment(2, 0, 3)])
    made.add([KeyEntry(kid, spec) for kid, spec in enumerate(specs)], [*own, shared])
    return made


class Worker:
    def __init__(self, text: str = "int8+ef", dtype: str = "float32") -> None:
        self.layout = layout(dtype)
        self.encoder = Encoder(seed=5, backend=NUMPY)
        self.encoder.use(f"{text};small=0")
        self.number = 0

    def packer(self) -> Packer:
        self.number += 1
        return Packer(self.layout, self.layout.kids_in(0), self.encoder, self.number)

    def push(self, **keys: Any) -> list[tuple[int, bytes]]:
        packer = self.packer()
        full = [one for key, array in keys.items() for one in packer.add(key, array)]
        sealed = packer.sealed([*full, *packer.rest()])
        return sorted((bid, one.payload.tobytes()) for bid, one in sealed)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("text", ["int8+ef", "none", "topk:0.1+ef", "zstd", "powersgd:1+ef"])
def test_several_devices_are_one_contribution(machine: Machine, strategy: Any, text: str) -> None:
    """What is sent is what one array with the mean would send, over batches with a residual."""
    one, several = Worker(text), Worker(text)
    samples = (8, 8, 16)
    for _ in range(2):
        arrays, small = noise(3, SIZE), noise(3, 3)
        given = [there(values, at) for at, values in enumerate(arrays)]
        tiny = [there(values, at) for at, values in enumerate(small)]
        sent = several.push(
            w=zkv.OnDevices(given, samples, strategy), b=zkv.OnDevices(tiny, samples, strategy)
        )
        expected = one.push(
            w=all_reduced(arrays, strategy, samples=samples, mean=True)[0]
            if strategy not in (InParts(), Ring())
            else by_blocks(arrays, samples, strategy),
            b=all_reduced(small, strategy, samples=samples, mean=True)[0],
        )
        assert sent == expected


def by_blocks(arrays: list[Array], samples: Any, strategy: Any) -> Array:
    """The mean where parts begin at the key's blocks."""
    weights, total = reducing.weights_of(len(arrays), samples)
    addends = [
        reducing.owned(one, weight, reducing.HOST_SITE)
        for one, weight in zip(arrays, weights, strict=True)
    ]
    done = reducing.reduced(addends, strategy, cuts=CUTS, by=total)
    return np.concatenate([part.values for part in done.parts])


def test_what_is_reduced_is_encoded_where_it_ends_up(machine: Machine) -> None:
    worker = Worker()
    given = [there(values, at) for at, values in enumerate(noise(3))]
    machine.to_host.clear()
    worker.push(w=zkv.OnDevices(given, strategy=InParts()))
    assert [device for device, _, name in machine.launched] == [0, 1, 2]
    assert {memory.home for memory in worker.encoder.memories.by_block.values()} == {0, 1, 2}
    # Beside the payloads only whether each part is finite.
    assert sum(machine.to_host) < SIZE * 4 / 3.5


def test_a_list_is_the_mean_of_as_many_samples(machine: Machine) -> None:
    arrays = noise(2)
    sent = Worker("none").push(w=[there(one, at) for at, one in enumerate(arrays)])
    values = np.concatenate([np.frombuffer(raw, np.float32) for _, raw in sent])
    np.testing.assert_allclose(values, (arrays[0] + arrays[1]) / 2, rtol=1e-6)


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_numpys_arrays_stand_in_for_devices(strategy: Any) -> None:
    """Where no CuPy is."""
    arrays, samples = noise(3), (1, 2, 3)
    sent = Worker("none").push(w=zkv.OnDevices(arrays, samples, strategy))
    values = np.concatenate([np.frombuffer(raw, np.float32) for _, raw in sent])
    np.testing.assert_allclose(values, weighted_mean(arrays, samples), rtol=1e-5, atol=1e-6)


def test_gradients_may_be_overwritten_behind_push_and_nobody_waits(machine: Machine) -> None:
    arrays = noise(3)
    worker, other = Worker("none"), Worker("none")
    with Stream(7):
        given = [there(one, at) for at, one in enumerate(arrays)]
    packer = worker.packer()
    machine.order.waiters.clear()
    with Stream(7):
        full = packer.add("w", zkv.OnDevices(given, (1, 1, 2), OneDevice()))
    assert machine.order.waiters == set()
    for at, one in enumerate(given):
        with Device(at):
            if at == 0:
                with Stream(7):
                    one.fill(np.nan)
            else:
                one.fill(np.nan)
    sent = sorted((bid, one.payload.tobytes()) for bid, one in packer.sealed(full))
    assert sent == other.push(w=zkv.OnDevices(arrays, (1, 1, 2), OneDevice()))


def test_a_nan_on_one_device_is_refused_with_its_place(machine: Machine) -> None:
    arrays = noise(3)
    arrays[2][1500] = np.nan
    given = [there(one, at) for at, one in enumerate(arrays)]
    with pytest.raises(PushRefused, match="key 'w': element 1500 of the gradient is nan"):
        Worker().push(w=zkv.OnDevices(given, strategy=InParts()))


def test_with_skip_a_nan_skips_the_key(machine: Machine) -> None:
    arrays = noise(2)
    arrays[0][0] = np.inf
    worker = Worker("int8;nonfinite=skip")
    given = [there(one, at) for at, one in enumerate(arrays)]
    assert worker.push(w=zkv.OnDevices(given, strategy=InParts())) == []


def a_pair() -> list[Any]:
    return [np.ones(SIZE, np.float32), np.ones(SIZE, np.float32)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [a_pair()[0], 3.0], "key 'w': array 1 of 2 is neither a NumPy array nor one on a"),
        (lambda: zkv.OnDevices([]), "key 'w': there is no array to reduce"),
        (
            lambda: [a_pair()[0], np.ones(SIZE, np.float64)],
            "key 'w': array 1 has dtype float64, and array 0 has float32",
        ),
        (lambda: [np.ones(SIZE, np.float64)] * 2, "key 'w': dtype float32 expected, given float64"),
        (lambda: [np.ones(3, np.float32)] * 2, r"key 'w': shape \(2000,\) expected, given \(3,\)"),
        (lambda: zkv.OnDevices(a_pair(), (1,)), "key 'w': 1 numbers of samples for 2 arrays"),
        (lambda: [there(a_pair()[0], 0), a_pair()[1]], "array 1 and array 0 are not both on GPUs"),
        (lambda: [1.0, 2.0], "push takes a NumPy array or one on a GPU, not list"),
        (
            lambda: zkv.OnDevices(a_pair(), strategy=OneDevice(2)),
            "key 'w': on device 2: with 2 devices the root is from 0 to 1",
        ),
        (
            lambda: zkv.OnDevices([there(one, 0) for one in a_pair()], strategy=Ring((0, 2))),
            "key 'w': around the ring 0-2: it must name each of 2 devices once",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_key_and_array(
    machine: Machine, make: Any, message: str
) -> None:
    worker = Worker()
    packer = worker.packer()
    with pytest.raises(KeyMismatch, match=message):
        packer.add("w", make())
    # Nothing of it is left: the right one can be pushed.
    assert len(packer.add("w", a_pair())) == 3


def test_integers_and_bfloat16_are_not_averaged_over_devices() -> None:
    with pytest.raises(KeyMismatch, match="key 'w': array 0 is of int32, and only float16"):
        Worker(dtype="int32").push(w=[np.ones(SIZE, np.int32)] * 2)


def test_one_key_is_pushed_once_and_its_other_name_is_the_same(machine: Machine) -> None:
    made = Layout()
    tied = KeySpec("v", "float32", (SIZE,), same_as="w")
    entries = [KeyEntry(0, KeySpec("w", "float32", (SIZE,))), KeyEntry(0, tied)]
    made.add(entries, [BlockSpec(0, 0, [Segment(0, 0, SIZE)])])
    packer = Packer(made, made.kids_in(0), Encoder(backend=NUMPY), 1)
    pair = a_pair()
    assert len(packer.add("w", pair)) == 1
    assert packer.add("v", pair) == []
    with pytest.raises(KeyMismatch, match="key 'w' was already pushed"):
        packer.add("w", pair)


# --- values --------------------------------------------------------------------------------------


def blocks_of(values: Array) -> dict[int, Array]:
    cut = pairwise(CUTS)
    return {at: values[low:high] for at, (low, high) in enumerate(cut)}


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_values_are_read_into_arrays_on_every_device(machine: Machine, strategy: Any) -> None:
    (values,) = noise(1)
    into = [there(np.zeros_like(values), at) for at in range(3)]
    read_into(layout(), 0, blocks_of(values), zkv.OnDevices(into, strategy=strategy))
    assert all(here(one).tobytes() == values.tobytes() for one in into)


def test_values_are_read_into_one_array_on_a_device_behind_what_its_stream_does(
    machine: Machine,
) -> None:
    (values,) = noise(1)
    with Stream(7):
        into = there(np.zeros_like(values), 0)
        read_into(layout(), 0, blocks_of(values), into)
        assert into.get().tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [np.zeros(SIZE, "f4"), np.zeros(3, "f4")], r"shape \(2000,\) expected, given \(3"),
        (lambda: [np.zeros(2 * SIZE, "f4")[::2]], "array 0 is not C-contiguous"),
        (lambda: [[1.0]], "push takes a NumPy array or one on a GPU, not list"),
    ],
)
def test_values_go_into_arrays_of_the_key_only(make: Any, message: str) -> None:
    with pytest.raises(KeyMismatch, match=f"key 'w': {message}"):
        read_into(layout(), 0, blocks_of(noise(1)[0]), make())


# --- what links carry ----------------------------------------------------------------------------


class Clock:
    """Seconds that pass only where bytes are carried: by a table of speeds."""

    def __init__(self, patch: pytest.MonkeyPatch, speed: Any, *, shared: bool = False) -> None:
        self.now, self.speed = 0.0, speed
        self.ends: dict[Any, float] = {}
        self.shared = shared
        right = probe.carry

        def carry(given: Any, source: Any, into: Any, target: Any) -> None:
            right(given, source, into, target)
            spent_s = 10e-6 + given.nbytes / speed(source, target)
            key = None if shared else getattr(into, "memory", into).ctypes.data
            self.ends[key] = max(self.ends.get(key, 0.0), self.now) + spent_s

        patch.setattr(probe, "carry", carry)

    def __call__(self) -> float:
        """It is looked at before the copies, and when they are done."""
        self.now = max([self.now, *self.ends.values()])
        return self.now


@pytest.mark.parametrize("homes", [(0, 1, 2), (0, 0), (devices.HOST,) * 3])
def test_speeds_and_latencies_are_measured(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, homes: tuple[int, ...]
) -> None:
    clock = Clock(monkeypatch, lambda source, target: 10e9)
    links = probe.measure(homes, clock=clock, large_bytes=2**18, repeat=2)
    assert len(links.between) == len(homes) * (len(homes) + 1)
    for link in links.between.values():
        assert link.bytes_per_s == pytest.approx(10e9)
        assert link.latency_s == pytest.approx(10e-6)
    assert links.crowding == pytest.approx(1.0)


def test_a_link_that_all_share_is_found(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda source, target: 10e9, shared=True)
    links = probe.measure((0, 1, 2, 3), clock=clock, large_bytes=2**20, repeat=1)
    assert links.crowding == pytest.approx(4.0)


def test_devices_are_measured_once(machine: Machine) -> None:
    """By a real clock: nothing is said of the figures but that there are some."""
    first = probe.links((0, 1))
    copies = len(machine.copied)
    choice = probe.chosen((0, 1), 1_000_000)
    assert probe.links((0, 1)) is first
    assert len(machine.copied) == copies
    assert "1000000 bytes on 2 devices" in choice.why


@pytest.mark.parametrize(
    ("small", "large", "speed", "latency"),
    [
        ((1000, 2e-6), (11000, 12e-6), 1e9, 1e-6),
        ((1000, 2e-6), (11000, 1e-6), 11000 / 1e-6, 0.0),
        ((1000, 0.0), (11000, 0.0), 11000 / 1e-9, 0.0),
        ((1000, 1e-7), (11000, 12e-6), 10000 / 11.9e-6, 0.0),
    ],
)
def test_a_line_through_two_copies_is_a_link(
    small: Any, large: Any, speed: float, latency: float
) -> None:
    link = probe.fitted(small, large)
    assert link.bytes_per_s == pytest.approx(speed)
    assert link.latency_s == pytest.approx(latency)
