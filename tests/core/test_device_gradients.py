"""Gradients on a device: the same bytes are sent as from the host, and nothing else is copied."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cupy_on_cpu
import numpy as np
import pytest
from codec_texts import MOMENTUM, PLAIN, REMEMBERING
from cupy_on_cpu import Device, Machine, Stream, is_pinned
from hypothesis import given, settings
from hypothesis import strategies as st

from zkv.errors import KeyMismatch, PushRefused
from zkv.layout import Layout
from zkv.wire import BlockSpec, KeyEntry, KeySpec, Segment
from zkv_codecs.backend import NUMPY
from zkv_workers.devices import HOST, to_host
from zkv_workers.encoding import Encoder, Sealed
from zkv_workers.model import as_arrays
from zkv_workers.packing import Packer

Array = np.ndarray[Any, Any]
pytestmark = [
    pytest.mark.timeout(300),
    # DGC's warm-up and huge numbers: as on the host.
    pytest.mark.filterwarnings("ignore:overflow encountered"),
]

ROWS, COLUMNS, CUT = 40, 50, 1100
"""The key w, and where its second block begins."""
CODECS = (*PLAIN, *REMEMBERING, *MOMENTUM)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with cupy_on_cpu.installed() as made:
        yield made


def there(array: Array, device: int = 0) -> Any:
    """The array on a device."""
    import cupy

    with Device(device):
        return cupy.ndarray(array.copy(order="K"))


def layout(dtype: str = "float32") -> Layout:
    """The key w in two blocks of its own, and b and c in one that they share."""
    made = Layout()
    specs = [KeySpec("w", dtype, (ROWS, COLUMNS))]
    specs += [KeySpec(name, dtype, (3,)) for name in "bc"]
    size = ROWS * COLUMNS
    blocks = [
        BlockSpec(0, 0, [Segment(0, 0, CUT)]),
        BlockSpec(1, 0, [Segment(0, CUT, size)]),
        BlockSpec(2, 0, [Segment(1, 0, 3), Segment(2, 0, 3)]),
    ]
    made.add([KeyEntry(kid, spec) for kid, spec in enumerate(specs)], blocks)
    return made


def gradients(batch: int) -> Array:
    values = np.random.default_rng(batch).standard_normal((ROWS, COLUMNS), np.float32)
    values[:, 7] = 0
    return values


class Worker:
    """An encoder and its batches; `home` is where gradients are pushed from."""

    def __init__(self, model: Layout | None = None) -> None:
        self.layout = layout() if model is None else model
        self.encoder = Encoder(seed=5, backend=NUMPY)
        self.sealed: list[Sealed] = []

    def push(self, batch: int, home: int = HOST, **keys: Array) -> list[tuple[Any, ...]]:
        """Push a batch; return all that is sent."""
        packer = Packer(self.layout, self.layout.kids_in(0), self.encoder, batch)
        sent: list[tuple[int, Sealed]] = []
        for key, array in keys.items():
            sent += packer.sealed(packer.add(key, array if home == HOST else there(array, home)))
        sent += packer.sealed(packer.rest())
        self.sealed = [one for _, one in sent]
        assert all(isinstance(one.payload, np.ndarray) for one in self.sealed)
        return [(bid, one.codec, one.form, one.payload.tobytes()) for bid, one in sent]

    def norm(self) -> float:
        row = self.encoder.accounts.report(self.layout).get("w", {})
        return float(row.get("residual_norm", 0.0))


class Pair:
    """The same batches from the host and from a device."""

    def __init__(self) -> None:
        self.host, self.device = Worker(), Worker()

    def use(self, text: str) -> None:
        for one in (self.host, self.device):
            one.encoder.use(f"{text};small=0")

    def push(self, batch: int, home: int) -> None:
        w = gradients(batch)
        assert self.device.push(batch, home, w=w) == self.host.push(batch, HOST, w=w)

    def settled(self, batch: int, *, counted: bool) -> None:
        for one in (self.host, self.device):
            one.encoder.settled(batch, counted=counted)

    def same_state(self) -> None:
        mine, other = self.device.encoder.memories.by_block, self.host.encoder.memories.by_block
        assert mine.keys() == other.keys()
        for bid, memory in mine.items():
            for one, two in zip(memory.state, other[bid].state, strict=True):
                assert to_host(one).tobytes() == np.asarray(two).tobytes()
        assert self.device.norm() == pytest.approx(self.host.norm(), rel=1e-5)


@pytest.mark.parametrize("text", CODECS)
def test_the_same_bytes_are_sent_and_remembered(machine: Machine, text: str) -> None:
    """Over steps with a cancelled batch in between, one at the end, and a change of the codec."""
    pair = Pair()
    pair.use(text)
    for batch in (1, 2, 3):
        pair.push(batch, 0)
    pair.settled(1, counted=True)
    pair.settled(2, counted=False)
    pair.push(4, 0)
    pair.settled(4, counted=False)
    pair.push(5, 0)
    pair.same_state()
    pair.use("int8+ef")
    pair.push(6, 0)
    pair.settled(5, counted=False)
    pair.push(7, 0)
    pair.use("none")
    pair.push(8, 0)
    pair.push(9, 0)


steps = st.lists(
    st.tuples(
        st.sampled_from(["int8+ef", "topk:0.05+ef", "none", "onebit", "mx2bit:0.5", "zstd"]),
        st.sampled_from([HOST, 0, 0, 1]),
        st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=2),
    ),
    min_size=2,
    max_size=6,
)


@given(steps)
@settings(max_examples=25)
def test_wherever_gradients_come_from_and_whatever_is_cancelled_the_bytes_are_the_hosts(
    steps: list[tuple[str, int, list[tuple[int, bool]]]],
) -> None:
    with cupy_on_cpu.installed():
        pair, waiting = Pair(), []
        for batch, (text, home, fates) in enumerate(steps):
            pair.use(text)
            pair.push(batch, home)
            waiting.append(batch)
            for at, counted in fates:
                if waiting:
                    pair.settled(waiting.pop(at % len(waiting)), counted=counted)
        pair.use("none")
        pair.push(99, HOST)


def test_what_moved_to_a_device_is_taken_back_to_the_bit(machine: Machine) -> None:
    """Two batches from the host and one from a device; the last two do not count."""
    pair = Pair()
    pair.use("int8+ef")
    for batch, home in ((1, HOST), (2, HOST), (3, 1)):
        pair.push(batch, home)
    before = pair.host.encoder.memories._steps[2][0].old[0]
    for batch in (3, 2):
        pair.settled(batch, counted=False)
    pair.push(4, 1)
    step = pair.device.encoder.memories._steps[4][0]
    with Device(1):
        assert step.old[0].get().tobytes() == before.tobytes()
    pair.same_state()


def test_only_what_is_sent_comes_to_the_host(machine: Machine) -> None:
    """Beside one byte: whether all is finite."""
    worker = Worker()
    worker.encoder.use("int8+ef;small=0")
    for batch in (1, 2):
        machine.to_host.clear()
        worker.push(batch, 0, w=gradients(batch))
        assert machine.to_host == [1, *(one.payload.nbytes for one in worker.sealed)]
        assert all(is_pinned(one.payload) for one in worker.sealed)
    # The first residuals, zeros, were made on the host.
    assert machine.to_device == [4 * CUT, 4 * (ROWS * COLUMNS - CUT)]
    assert [name for _, _, name in machine.launched] == ["int8_encode_residual"] * 4


@pytest.mark.parametrize("text", ["topk:0.05+ef", "topk:0.01+int8+ef", "threshold:1+ef"])
def test_positions_are_coded_on_the_device(machine: Machine, text: str) -> None:
    worker = Worker()
    worker.encoder.use(f"{text};small=0")
    worker.push(1, 0, w=gradients(1))
    assert all(one.form is not None and one.form.coding for one in worker.sealed)
    payloads = sum(one.payload.nbytes for one in worker.sealed)
    assert sum(machine.to_host) < payloads + 100


def test_what_is_sent_as_it_is_is_copied_once(machine: Machine) -> None:
    worker = Worker()
    w = gradients(1)
    assert [sent[3] for sent in worker.push(1, 0, w=w)] == [
        w.reshape(-1)[:CUT].tobytes(),
        w.reshape(-1)[CUT:].tobytes(),
    ]
    assert machine.to_host == [one.payload.nbytes for one in worker.sealed]
    assert all(is_pinned(one.payload) for one in worker.sealed)
    assert not machine.launched


@pytest.mark.parametrize("text", ["zstd", "powersgd:1+ef"])
def test_codecs_without_kernels_take_the_array_to_the_host(machine: Machine, text: str) -> None:
    worker = Worker()
    worker.encoder.use(f"{text};small=0")
    worker.push(1, 0, w=gradients(1))
    assert machine.to_host == [4 * ROWS * COLUMNS]
    assert not machine.launched


def test_keys_that_share_a_block_are_joined_on_the_host(machine: Machine) -> None:
    worker, other = Worker(), Worker()
    for one in (worker, other):
        one.encoder.use("int8+ef;small=0")
    small = {"b": np.arange(3, dtype=np.float32), "c": np.ones(3, np.float32)}
    assert worker.push(1, 1, **small) == other.push(1, **small)
    assert not machine.launched


def test_the_arrays_device_does_the_work_whichever_stream_it_came_on(machine: Machine) -> None:
    worker = Worker()
    worker.encoder.use("int8+ef;small=0")
    for batch, device, stream in ((1, 0, 7), (2, 0, 8), (3, 1, 7)):
        with Device(device), Stream(stream):
            worker.push(batch, device, w=gradients(batch))
    lanes = {one[:2] for one in machine.launched}
    assert {device for device, _ in lanes} == {0, 1}
    assert len(lanes) == 2
    assert not {stream for _, stream in lanes} & {0, 7, 8}
    assert machine.device == 0
    assert not machine.pending


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
@pytest.mark.parametrize("text", ["int8+ef", "topk:0.05+ef", "none"])
def test_other_types_of_numbers(machine: Machine, dtype: str, text: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    workers = Worker(layout(dtype)), Worker(layout(dtype))
    for batch in (1, 2):
        w = gradients(batch).astype(kind)
        sent = []
        for home, worker in zip((HOST, 0), workers, strict=True):
            worker.encoder.use(f"{text};small=0")
            sent.append(worker.push(batch, home, w=w))
        assert sent[0] == sent[1]


@pytest.mark.parametrize("text", ["topk:0.5+onebit", "topk:0.5+twomeans+ef", "onebit+ef", "mx1bit"])
def test_zeros_keep_their_signs(machine: Machine, text: str) -> None:
    w = np.zeros((ROWS, COLUMNS), np.float32)
    w[::2] = -0.0
    sent = []
    for home in (HOST, 0):
        worker = Worker()
        worker.encoder.use(f"{text};small=0")
        sent.append(worker.push(1, home, w=w))
    assert sent[0] == sent[1]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (1, 257)])
@pytest.mark.parametrize("text", CODECS)
def test_scalars_and_arrays_without_elements(
    machine: Machine, text: str, shape: tuple[int, ...]
) -> None:
    """D04, D05."""
    made = Layout()
    size = int(np.prod(shape, dtype=np.int64))
    made.add(
        [KeyEntry(0, KeySpec("w", "float32", shape))], [BlockSpec(0, 0, [Segment(0, 0, size)])]
    )
    sent = []
    for home in (HOST, 1):
        worker = Worker(made)
        worker.encoder.use(f"{text};small=0")
        sent.append([worker.push(batch, home, w=np.full(shape, 3.25, "f4")) for batch in (1, 2)])
    assert sent[0] == sent[1]


@pytest.mark.parametrize("how", ["fortran", "strided", "part"])
def test_other_orders_in_memory(machine: Machine, how: str) -> None:
    w = gradients(1)
    disguised = {
        "fortran": lambda: there(np.asfortranarray(w)),
        "strided": lambda: there(np.repeat(w, 2, axis=1))[:, ::2],
        "part": lambda: there(np.concatenate((w, w)))[ROWS:],
    }[how]()
    sent = []
    for array in (w, disguised):
        worker = Worker()
        worker.encoder.use("onebit+ef;small=0")
        packer = Packer(worker.layout, worker.layout.kids_in(0), worker.encoder, 1)
        sent.append(
            [(bid, one.payload.tobytes()) for bid, one in packer.sealed(packer.add("w", array))]
        )
    assert sent[0] == sent[1]
    # A contiguous array is encoded where it is.
    assert len(machine.launched) == 2


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((COLUMNS, ROWS), np.float32), r"key 'w': shape \(40, 50\) expected, given \(50"),
        (np.zeros((ROWS, COLUMNS), np.float64), "key 'w': dtype float32 expected, given float64"),
    ],
)
def test_shape_and_dtype_are_looked_at_on_the_device(
    machine: Machine, array: Array, message: str
) -> None:
    with pytest.raises(KeyMismatch, match=message):
        Worker().push(1, 0, w=array)
    assert machine.to_host == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2e37])
def test_what_a_codec_cannot_send_is_refused_and_leaves_nothing_behind(
    machine: Machine, bad: float
) -> None:
    """D17: with key and element, as on the host."""
    pair = Pair()
    pair.use("int8+ef")
    pair.push(1, 0)
    w = gradients(2)
    w[3, 4] = bad
    with pytest.raises(
        PushRefused, match=re.escape(f"'w': element 154 of the gradient is {bad:g}")
    ):
        pair.device.push(2, 0, w=w)
    # One answer, then the place, then the value.
    assert machine.to_host[-3:] == [1, 8, 4]
    pair.push(3, 0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("nonfinite", ["zero", "skip"])
def test_what_is_not_finite_is_skipped_or_zero_on_request(
    machine: Machine, nonfinite: str, dtype: str
) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    w = gradients(1).astype(kind)
    w[3, 4], w[30, 2] = np.nan, np.inf
    sent = []
    for home in (HOST, 0):
        worker = Worker(layout(dtype))
        worker.encoder.use(f"int8+ef;small=0;nonfinite={nonfinite}")
        sent.append(worker.push(1, home, w=w))
    assert sent[0] == sent[1]
    assert len(sent[0]) == (2 if nonfinite == "zero" else 0)
    assert max(machine.to_host, default=0) < w.size * 2


def test_a_large_float64_is_refused_wherever_it_is(machine: Machine) -> None:
    w = gradients(1).astype(np.float64)
    w[0, 1] = 1e100
    for home in (HOST, 0):
        worker = Worker(layout("float64"))
        worker.encoder.use("int8+ef;small=0")
        with pytest.raises(PushRefused, match="element 1 of the gradient is 1e\\+100"):
            worker.push(1, home, w=w)


class Tensor:
    """An array on a device that is not CuPy's, as PyTorch's are."""

    def __init__(self, array: Any) -> None:
        self.__cuda_array_interface__ = array.__cuda_array_interface__


def test_a_tensor_is_read_where_it_is(machine: Machine) -> None:
    w = gradients(1)
    sent = []
    for array in (w, Tensor(there(w))):
        worker = Worker()
        worker.encoder.use("int8+ef;small=0")
        packer = Packer(worker.layout, worker.layout.kids_in(0), worker.encoder, 1)
        sent.append(
            [(bid, one.payload.tobytes()) for bid, one in packer.sealed(packer.add("w", array))]
        )
        with pytest.raises(KeyMismatch, match="key 'w' was already pushed"):
            packer.add("w", array)
    assert sent[0] == sent[1]
    # Residuals only.
    assert len(machine.to_device) == 2


def test_one_array_on_a_device_may_be_pushed_under_both_its_names(machine: Machine) -> None:
    made = Layout()
    tied = KeySpec("v", "float32", (ROWS, COLUMNS), same_as="w")
    entries = [KeyEntry(0, KeySpec("w", "float32", (ROWS, COLUMNS))), KeyEntry(0, tied)]
    made.add(entries, [BlockSpec(0, 0, [Segment(0, 0, ROWS * COLUMNS)])])
    encoder = Encoder(backend=NUMPY)
    packer = Packer(made, made.kids_in(0), encoder, 1)
    w = there(gradients(1))
    assert len(packer.add("w", w)) == 1
    assert packer.add("v", w) == []
    with pytest.raises(KeyMismatch, match="tied to 'w'"):
        packer.add("v", there(gradients(1)))


def test_without_cupy_the_key_and_the_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = SimpleNamespace(__cuda_array_interface__={}, shape=(ROWS, COLUMNS))
    monkeypatch.setitem(sys.modules, "cupy", None)
    worker = Worker()
    packer = Packer(worker.layout, worker.layout.kids_in(0), worker.encoder, 1)
    with pytest.raises(KeyMismatch, match=r"key 'w': an array on a GPU .* pip install 'zkv\[cuda"):
        packer.add("w", tensor)


def test_initial_values_and_plain_pushes_come_from_a_device_too(machine: Machine) -> None:
    w = gradients(1)
    assert np.array_equal(as_arrays({"w": there(w, 1)})["w"], w)
    assert np.array_equal(to_host(Tensor(there(w))), w)
    assert to_host(np.float32(2)).shape == ()
    assert to_host([1]) == [1]
