"""What scripts/check_gpu compares and times beside codecs: the way from a device to a frame, and
the reduction of several devices' gradients. Where there is one GPU, it plays several.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

import gpu_bits
from zkv.dtypes import Array
from zkv.layout import Layout
from zkv.reduction import InParts, OnCpu, OneDevice, Ring, Strategy
from zkv.time_split import Meter
from zkv.wire import BlockSpec, KeyEntry, KeySpec, Segment
from zkv_workers import devices, lanes, pinned, probe
from zkv_workers import signals as s
from zkv_workers.encoding import Encoder
from zkv_workers.model import BatchState
from zkv_workers.outgoing import Outgoing, Outlet
from zkv_workers.pipeline import Pipeline
from zkv_workers.reducing import all_reduced

CODECS = ("none", "int8+ef", "topk:0.01+int8+ef")
STRATEGIES: tuple[Strategy, ...] = (OneDevice(), OnCpu(), InParts(), Ring())
BLOCK = 262_144
"""Entries of a block: 1 MiB."""
PLAYED = 4
"""Devices that one GPU plays."""
SIZES = (0, 3, 100_003)
"""Elements of the gradients that are compared."""
PATIENCE_S = 60.0


class Way:
    """A worker's way out, for one key in blocks of 1 MiB."""

    def __init__(self, entries: int, text: str) -> None:
        self.layout = Layout()
        edges = [*range(0, entries, BLOCK), entries] if entries else [0, 0]
        cut = enumerate(pairwise(edges))
        blocks = [BlockSpec(at, 0, [Segment(0, *pair)]) for at, pair in cut]
        self.layout.add([KeyEntry(0, KeySpec("w", "float32", (entries,)))], blocks)
        self.encoder = Encoder(seed=5)
        self.encoder.use(f"{text};small=0")
        self.pipeline = Pipeline(bytes_max=2**40, patience_s=PATIENCE_S)
        self.sent: dict[int, Array] = {}
        self.outlet = Outlet(
            self.encoder, self.pipeline, self._feed, self._feed, Meter(time.perf_counter)
        )
        self.number = 0

    def _feed(self, *events: s.Input) -> None:
        for event in events:
            assert isinstance(event, s.SendBlock)
            self.sent[event.bid] = event.sealed.payload

    def push(self, gradient: Any) -> Outgoing:
        """Push the next batch's gradient."""
        self.number += 1
        self.sent = {}
        self.encoder.settled(self.number - 1, counted=True)
        blocks: dict[int, Array] = {}
        grant = s.Grant(self.number, 1, 0, 0, 0, 0, blocks, self.layout)
        out = Outgoing(self.outlet, BatchState(grant, 1.0, self.encoder))
        out.push("w", gradient, lend=False)
        return out

    def done(self, out: Outgoing) -> None:
        """Wait until all of it is ready to be sent."""
        self.pipeline.drain()
        if out.error is not None:
            raise out.error


# --- bits ----------------------------------------------------------------------------------------


def payloads(text: str, entries: int, place: Callable[[Array], Any]) -> dict[int, bytes]:
    """Return what three batches send; each gradient is overwritten as soon as it is pushed."""
    way, found = Way(entries, text), {}
    try:
        for number in range(3):
            given = np.random.default_rng(number).standard_normal(entries, np.float32)
            gradient = place(given)
            out = way.push(gradient)
            if not isinstance(gradient, np.ndarray):
                gradient.fill(1e30)
            way.done(out)
            found |= {1000 * number + bid: one.tobytes() for bid, one in way.sent.items()}
    finally:
        way.pipeline.close()
    return found


def differing_payloads(cupy: Any, entries: int) -> list[str]:
    """Return which codecs send something else of what was overwritten behind its push, in words."""
    wrong = []
    for text in CODECS:
        try:
            if payloads(text, entries, np.asarray) != payloads(text, entries, cupy.asarray):
                wrong.append(
                    f"staging, {text}, {entries} entries: other bytes are sent of a gradient that "
                    "is overwritten behind its push"
                )
        except Exception as error:
            wrong.append(f"staging, {text}, {entries} entries: {gpu_bits.told(error)}")
    return wrong


def homes_of(cupy: Any) -> list[int]:
    """Return the numbers of all GPUs, or that of the only one several times."""
    count = int(cupy.cuda.runtime.getDeviceCount())
    return list(range(count)) if count > 1 else [0] * PLAYED


def placed(arrays: Sequence[Array], homes: Sequence[int], cupy: Any) -> list[Any]:
    """Return arrays on these devices."""
    found = []
    for array, home in zip(arrays, homes, strict=True):
        with cupy.cuda.Device(home):
            found.append(cupy.asarray(array))
    return found


def differing_sums(cupy: Any) -> list[str]:
    """Return which strategies give other bits on devices than on the host, in words."""
    wrong, homes = [], homes_of(cupy)
    samples = [float(1 + at) for at in range(len(homes))]
    for size in SIZES:
        chance = np.random.default_rng(size)
        arrays = [chance.standard_normal(size, np.float32) for _ in homes]
        for strategy in STRATEGIES:
            where = f"reduction {strategy}, {len(homes)} devices, {size} elements"
            try:
                expected = all_reduced(arrays, strategy, samples=samples, mean=True)
                given = placed(arrays, homes, cupy)
                found = all_reduced(given, strategy, samples=samples, mean=True)
                pairs = zip(found, expected, strict=True)
                if any(devices.to_host(one).tobytes() != two.tobytes() for one, two in pairs):
                    wrong.append(f"{where}: other bits than on the host")
            except Exception as error:
                wrong.append(f"{where}: {gpu_bits.told(error)}")
    return wrong


# --- time ----------------------------------------------------------------------------------------


def least_ms(act: Callable[[], object], repeat: int) -> float:
    """Return the least time of an act that waits for all it has begun."""
    found = []
    for _ in range(repeat):
        began = time.perf_counter()
        act()
        found.append(time.perf_counter() - began)
    return 1e3 * min(found)


class Bus:
    """Copies to hold times against: on the device, and from it into pinned memory."""

    def __init__(self, cupy: Any, repeat: int) -> None:
        self._cupy, self._repeat = cupy, repeat

    def device_ms(self, nbytes: int) -> float:
        """Return how long a copy of so many bytes on the device takes."""
        x = self._cupy.zeros(nbytes, np.uint8)
        target = self._cupy.empty_like(x)
        return self._ms(lambda: self._cupy.copyto(target, x))

    def pinned_ms(self, nbytes: int) -> float:
        """Return how long so many bytes take from the device into pinned memory, as one copy."""
        x = self._cupy.zeros(nbytes, np.uint8)
        host = np.frombuffer(self._cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)
        return self._ms(lambda: x.get(out=host, stream=lanes.current(), blocking=False))

    def _ms(self, act: Callable[[], object]) -> float:
        def waited() -> None:
            act()
            lanes.mark().synchronize()

        waited()
        return max(least_ms(waited, self._repeat), 1e-6)


def staging_rows(entries: int, repeat: int, cupy: Any) -> Iterator[dict[str, Any]]:
    """Yield for each codec how long `push` keeps its caller, and until all is ready to be sent.

    `copies`: as a multiple of copying the gradient on the device; `pcie`: of copying the bytes that
    are sent into pinned memory at once.
    """
    bus = Bus(cupy, repeat)
    x = cupy.asarray(np.random.default_rng(0).standard_normal(entries, np.float32))
    copied_ms = bus.device_ms(4 * entries)
    for text in CODECS:
        way = Way(entries, text)
        try:
            push_ms, ready_ms = [], []
            for _ in range(repeat + 1):
                began = time.perf_counter()
                out = way.push(x)
                push_ms.append(1e3 * (time.perf_counter() - began))
                way.done(out)
                ready_ms.append(1e3 * (time.perf_counter() - began))
            sent_bytes = sum(one.nbytes for one in way.sent.values())
        finally:
            way.pipeline.close()
        sent_ms = bus.pinned_ms(max(1, sent_bytes))
        # The first one compiles kernels and makes memory.
        for op, took in (("push", push_ms), ("ready", ready_ms)):
            least = min(took[1:])
            yield row(text, entries, op, least, least / copied_ms, least / sent_ms, sent_bytes)


def reduction_rows(entries: int, repeat: int, cupy: Any) -> Iterator[dict[str, Any]]:
    """Yield for each strategy how long all devices' sums take, as multiples of one gradient's copy
    on a device, and into pinned memory."""
    bus, homes = Bus(cupy, repeat), homes_of(cupy)
    arrays = placed([np.ones(entries, np.float32)] * len(homes), homes, cupy)
    copied_ms, pinned_ms = bus.device_ms(4 * entries), bus.pinned_ms(4 * entries)
    for strategy in STRATEGIES:
        all_reduced(arrays, strategy)
        spent = least_ms(lambda way=strategy: all_reduced(arrays, way), repeat)  # type: ignore[misc]
        yield row(
            str(strategy),
            entries,
            "reduce",
            spent,
            spent / copied_ms,
            spent / pinned_ms,
            4 * entries,
        )


def row(
    name: str, entries: int, op: str, ms: float, copies: float, pcie: float, nbytes: int
) -> dict[str, Any]:
    """Return a row as scripts/bench_codecs has them, and `pcie`."""
    return {
        "codec": name,
        "kernel": "cuda",
        "entries": entries,
        "op": op,
        "ms": round(ms, 4),
        "copies": round(copies, 3),
        "bits_per_entry": round(8 * nbytes / max(1, entries), 4),
        "pcie": round(pcie, 3),
    }


def said(cupy: Any) -> Iterator[str]:
    """Yield what the links carry, what would be chosen, and what pinned memory was needed."""
    homes = homes_of(cupy)
    links = probe.links(homes)
    for (source, target), link in sorted(links.between.items()):
        if source != target:
            yield (
                f"link {source} to {target} (-1: the host): {link.bytes_per_s / 1e9:.3g} GB/s "
                f"after {1e6 * link.latency_s:.3g} us"
            )
    yield f"while all send, a copy takes {links.crowding:.3g} times as long"
    yield probe.chosen(homes, 100_000_000).why
    ring = pinned.ring()
    yield f"pinned memory: {ring.nbytes / 2**20:g} MiB, short of it {ring.short} times"
