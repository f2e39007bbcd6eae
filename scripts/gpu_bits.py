"""What scripts/check_gpu compares: bits of codecs, of a worker and of a cluster, on two machines.

Inputs hold no subnormal numbers, as sums outside our own kernels are CuPy's, which take those for
zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import zkv
from zkv.dtypes import Array
from zkv.layout import Layout
from zkv.wire import BlockSpec, KeyEntry, KeySpec, Segment
from zkv_codecs import indices, spec
from zkv_codecs.backend import Backend
from zkv_codecs.feedback import Encoded
from zkv_codecs.frames import to_payload
from zkv_codecs.packed import Packed, State, dense
from zkv_workers import devices
from zkv_workers.encoding import Encoder
from zkv_workers.packing import Packer

CODECS = (
    "fp16",
    "bf16",
    "sfp16",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8",
    "int4",
    "uint8",
    "qsgd:127",
    "natural",
    "ternary",
    "onebit",
    "twomeans",
    "majority",
    "mx1bit",
    "mx2bit:0.5",
    "topk:0.01",
    "topk:0.001",
    "topk_sampled:0.01",
    "randomk:0.01",
    "threshold:2.5",
    "topk:0.01+fp16",
    "topk:0.01+int8",
)
"""Chains of stages that have kernels on a device."""
REMEMBERING = (
    "none",
    *(f"{text}+ef" for text in CODECS if text not in ("majority", "mx1bit", "mx2bit:0.5")),
    "mx1bit",
    "mx2bit:0.5",
    "topk:0.05+dgc:0.9",
    "topk:0.05+int8+dgc:0.5,warmup=4",
    "randomk:0.2+dgc:0.9",
)
"""Codecs that a worker encodes some batches with, one of which does not count."""
WORKED = 300_000, 262_144
"""Entries of that worker's key, and of its first block."""
SEED = 0x123456789ABC
WEIGHT = 3.0
PLAN = "int8+ef;sparse=topk:0.02+int8+ef;signs=onebit+ef;half=bf16;whole=none;bias=none"
SHAPES = {
    "dense": (300, 1000),
    "sparse": (300_000,),
    "signs": (600, 500),
    "half": (50_000,),
    "whole": (40_000,),
    "bias": (10,),
}
BATCHES = 4


# --- codecs ----------------------------------------------------------------------------------


def inputs(entries: int) -> tuple[Array, Array, Array]:
    """Return a gradient, a residual and a sum to add to: float32, with zeros of both signs."""
    chance = np.random.default_rng(entries)
    x, residual, total = (chance.standard_normal(entries, np.float32) for _ in range(3))
    x[::97], x[5::101] = 0.0, -0.0
    return x, residual * np.float32(0.25), total


def made(text: str, given: tuple[Array, Array, Array], kernels: Backend) -> Iterator[Any]:
    """Yield all that a chain makes of the inputs with these kernels: a name and an array."""
    chain = spec.chain(text)
    x, residual, total = (kernels.xp.asarray(one) for one in given)
    state = (residual,) if chain.stages[0].remembers else ()
    sent, after = chain.encode(dense(x), state, SEED, kernels)
    yield from _parts("encode", sent, after)
    if all(stage.feedback for stage in chain.stages):
        again, left, _ = chain.encode_residual(dense(x), residual, (), SEED, kernels)
        yield from _parts("encode_residual", again, (left,))
    yield "decode", chain.decode(sent, kernels).values
    total = total.copy()
    chain.add(sent, WEIGHT, total, kernels)
    yield "add", total
    yield "payload", to_payload(Encoded(chain, sent), kernels)[1]
    if sent.indices is not None:
        for name in indices.CODINGS:
            coded = indices.encode(name, sent.indices, sent.size, kernels)
            yield f"positions as {name}", coded
            read = indices.decode(name, coded, sent.count, sent.size, kernels)
            yield f"positions from {name}", read


def _parts(op: str, sent: Packed, state: State) -> Iterator[tuple[str, Any]]:
    yield f"{op} (values)", sent.values
    if sent.scales is not None:
        yield f"{op} (scales)", sent.scales
    if sent.indices is not None:
        yield f"{op} (positions)", sent.indices
    for array in state:
        yield f"{op} (residual)", array


def differences(text: str, given: tuple[Array, Array, Array], host: Backend) -> list[str]:
    """Return what a device makes otherwise than the CPU, in words; nothing if all bits agree."""
    where = f"{text}, {given[0].size} entries"
    wrong = []
    try:
        pairs = zip(made(text, given, host), made(text, given, devices.CUDA), strict=True)
        for (name, expected), (_, there) in pairs:
            difference = _difference(expected, devices.to_host(there))
            if difference:
                wrong.append(f"{where}: {name}: {difference}")
    except Exception as error:
        wrong.append(f"{where}: {told(error)}")
    return wrong


def _difference(expected: Array, got: Array) -> str:
    if (expected.dtype, expected.shape) != (got.dtype, got.shape):
        return f"{got.size} {got.dtype} instead of {expected.size} {expected.dtype}"
    bits = f"u{expected.itemsize}"
    other = np.flatnonzero(expected.view(bits) != got.view(bits))
    if not other.size:
        return ""
    at = int(other[0])
    return f"{other.size} of {got.size} differ, first {at}: {got[at]!r}, not {expected[at]!r}"


def pushed(text: str, place: Callable[[Array], Any]) -> Iterator[tuple[str, Array]]:
    """Yield the payloads of a worker: four batches with a NaN in each, one of which does not count,
    and then, with no codec, what was kept back."""
    size, cut = WORKED
    layout = Layout()
    blocks = [BlockSpec(0, 0, [Segment(0, 0, cut)]), BlockSpec(1, 0, [Segment(0, cut, size)])]
    layout.add([KeyEntry(0, KeySpec("w", "float32", (size,)))], blocks)
    encoder = Encoder(seed=5)
    for batch in range(1, 6):
        encoder.use(f"{text if batch < 5 else 'none'};small=0;nonfinite=zero")
        if batch == 4:
            encoder.settled(2, counted=False)
        gradient = np.random.default_rng(batch).standard_normal(size, np.float32)
        gradient[batch] = np.nan if batch < 5 and text != "none" else 0
        packer = Packer(layout, layout.kids_in(0), encoder, batch)
        for bid, sealed in packer.sealed(packer.add("w", place(gradient))):
            yield f"batch {batch}, block {bid}: payload", sealed.payload


def differing_payloads(text: str, cupy: Any) -> list[str]:
    """Return which payloads of a worker are others if its gradients are on a device, in words."""
    where = f"{text}, {WORKED[0]} entries of a worker"
    try:
        for (name, here), (_, there) in zip(
            pushed(text, np.asarray), pushed(text, cupy.asarray), strict=True
        ):
            difference = _difference(here, there)
            if difference:
                return [f"{where}: {name}: {difference}"]
    except Exception as error:
        return [f"{where}: {told(error)}"]
    return []


# --- a cluster -----------------------------------------------------------------------------------


def trained(place: Callable[[Array], Any]) -> dict[Any, Array]:
    """Return the model after a few batches on a cluster of this machine, with gradients placed."""
    chance = np.random.default_rng(7)
    goal = {key: chance.standard_normal(shape, np.float32) for key, shape in SHAPES.items()}
    with (
        zkv.local(servers=2, optimizer="sgd:lr=0.5", codec=PLAN) as cluster,
        cluster.connect(rank=0) as worker,
    ):
        worker.init({key: np.zeros_like(values) for key, values in goal.items()})
        for _ in range(BATCHES):
            with worker.batch() as batch:
                for key, values in batch.params.items():
                    batch.push(key, place(values - goal[key]))
            batch.wait()
        return worker.pull()


def differing_keys(cupy: Any) -> list[str]:
    """Return what becomes another model when gradients are on a device, in words."""
    try:
        here, there = trained(np.asarray), trained(cupy.asarray)
    except Exception as error:
        return [f"cluster, codec {PLAN}: {told(error)}"]
    found = {key: _difference(here[key].reshape(-1), there[key].reshape(-1)) for key in here}
    return [f"cluster, codec {PLAN}: key {key}: {text}" for key, text in found.items() if text]


def told(error: Exception) -> str:
    """Return an error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
