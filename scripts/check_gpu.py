"""Checks and times CUDA's kernels on a device (`scripts/check_gpu --help`).

Everything is compared with the kernels of the CPU bit for bit. The inputs hold no subnormal
numbers, as sums outside our own kernels are CuPy's, which take those for zeros.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import zkv
from zkv.dtypes import Array
from zkv_codecs import indices, spec
from zkv_codecs.backend import Backend, fastest
from zkv_codecs.feedback import Encoded
from zkv_codecs.frames import to_payload
from zkv_codecs.kernels import cuda_module
from zkv_codecs.packed import Packed, State, dense
from zkv_workers import devices

ENTRIES = (1_000_000, 25_000_000)
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
FED_BACK = ("int8", "int4", "uint8", "onebit", "twomeans", "topk", "randomk", "threshold")
"""Those are timed with error feedback too."""
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
KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\(\w+\) )?(\w+)\(')


class NoDevice(Exception):
    """There is nothing to check; the text says why."""


def found() -> Any:
    """Return CuPy, if it finds a device.

    Raises:
        NoDevice: CuPy is not installed, or finds none.
    """
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise NoDevice(
            f"CuPy cannot be imported ({error}), so nothing was checked; "
            "install it with pip install 'zkv[cuda12]' or 'zkv[cuda13]'"
        ) from error
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise NoDevice(f"CUDA finds no GPU here ({error}), so nothing was checked") from error
    if not count:
        raise NoDevice("CUDA finds no GPU here, so nothing was checked")
    return cupy


def compile_all() -> tuple[int, list[str]]:
    """Compile each kernel for the current device; return how many, and what went wrong."""
    compiled, wrong = 0, []
    for family in cuda_module.TEXTS:
        try:
            for name in KERNEL.findall(cuda_module.source(family)):
                cuda_module.function(family, name)
                compiled += 1
        except Exception as error:
            wrong.append(f"kernels of {family}: {_told(error)}")
    return compiled, wrong


# --- bits ----------------------------------------------------------------------------------------


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
        wrong.append(f"{where}: {_told(error)}")
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


# --- time ----------------------------------------------------------------------------------------


def measure(text: str, x: Any, repeat: int, cupy: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for each operation on an array on a device, as scripts/bench_codecs does.

    `copies` is the time as a multiple of copying the array on the device, in turns with it.
    """
    codec = spec.codec(text)
    states = [devices.started(codec, x.shape, devices.home(x))]
    target, total = cupy.empty_like(x), cupy.zeros_like(x)

    def encode() -> Encoded:
        encoded, states[0] = codec.encode(dense(x), states[0], SEED, devices.CUDA)
        return encoded

    sent = encode()
    acts: dict[str, Callable[[], Any]] = {
        "encode": encode,
        "decode": lambda: sent.chain.decode(sent.packed, devices.CUDA),
        "decode_add": lambda: sent.chain.add(sent.packed, WEIGHT, total, devices.CUDA),
    }
    bits = 8 * to_payload(sent, devices.CUDA)[1].nbytes / max(1, x.size)
    for op, act in acts.items():
        took, copied = [], []
        act()
        for _ in range(repeat):
            took.append(elapsed_ms(act, cupy.cuda))
            copied.append(elapsed_ms(lambda: cupy.copyto(target, x), cupy.cuda))
        yield {
            "codec": text,
            "kernel": "cuda",
            "entries": x.size,
            "op": op,
            "ms": round(min(took), 4),
            "copies": round(min(took) / max(min(copied), 1e-6), 3),
            "bits_per_entry": round(bits, 4),
        }


def elapsed_ms(act: Callable[[], Any], cuda: Any) -> float:
    """Return the time between two events around what an act gives the device to do."""
    start, end = cuda.Event(), cuda.Event()
    start.record()
    act()
    end.record()
    end.synchronize()
    return float(cuda.get_elapsed_time(start, end))


def timed(codecs: tuple[str, ...]) -> Iterator[str]:
    """Yield the codecs to time: each, and with error feedback where it is wanted."""
    for text in codecs:
        yield text
        if text.partition(":")[0] in FED_BACK:
            yield f"{text}+ef"


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
        return [f"cluster, codec {PLAN}: {_told(error)}"]
    found = {key: _difference(here[key].reshape(-1), there[key].reshape(-1)) for key in here}
    return [f"cluster, codec {PLAN}: key {key}: {text}" for key, text in found.items() if text]


# --- all -----------------------------------------------------------------------------------------


def check(asked: argparse.Namespace, cupy: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Do all that was asked for; return the rows, and what differs."""
    began = time.perf_counter()
    compiled, wrong = compile_all()
    _say(asked, f"{compiled} kernels compiled in {time.perf_counter() - began:.1f} s")
    rows: list[dict[str, Any]] = []
    codecs = tuple(asked.codec or CODECS)
    for entries in asked.entries or ENTRIES:
        given = inputs(entries)
        for text in codecs:
            wrong += differences(text, given, fastest())
        _say(asked, f"{len(codecs)} codecs compared at {entries} entries")
        x = cupy.asarray(given[0])
        if wrong:
            break
        for text in timed(codecs):
            rows += measure(text, x, asked.repeat, cupy)
    if asked.cluster and not wrong:
        wrong += differing_keys(cupy)
        _say(asked, f"a cluster was trained from the host and from the device: {BATCHES} batches")
    return rows, wrong


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table, that of scripts/bench_codecs."""
    yield f"{'codec':22} {'kernel':6} {'entries':>10} {'op':10} {'ms':>9} {'copies':>7}  bits"
    for row in rows:
        yield (
            f"{row['codec']:22} {row['kernel']:6} {row['entries']:10d} {row['op']:10} "
            f"{row['ms']:9.3f} {row['copies']:7.2f}  {row['bits_per_entry']:g}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Check, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/check_gpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--entries", type=int, action="append")
    parser.add_argument("--codec", action="append")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--no-cluster", dest="cluster", action="store_false")
    asked = parser.parse_args(arguments)
    try:
        for text in asked.codec or ():
            if not devices.has_kernels(spec.codec(text)) or spec.chain(text).stages == ():
                parser.error(f"codec {text} has no kernels on a GPU")
    except ValueError as error:
        parser.error(f"{error}; name stages only, as in topk:0.01+int8")
    try:
        cupy = found()
    except NoDevice as error:
        print(f"check_gpu: {error}", file=sys.stderr)
        return 3
    rows, wrong = check(asked, cupy)
    print(json.dumps(rows) if asked.json else "\n".join(table(rows)))
    for line in wrong:
        print(f"check_gpu: {line}", file=sys.stderr)
    if not wrong:
        _say(asked, "all bits agree with the CPU's kernels")
    return 1 if wrong else 0


def _say(asked: argparse.Namespace, text: str) -> None:
    print(text, file=sys.stderr if asked.json else sys.stdout, flush=True)


def _told(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


if __name__ == "__main__":
    sys.exit(main())
