"""Checks and times CUDA's kernels on a device (`scripts/check_gpu --help`)."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import gpu_bits
import gpu_staging
from zkv_codecs import spec
from zkv_codecs.backend import fastest
from zkv_codecs.feedback import Encoded
from zkv_codecs.frames import to_payload
from zkv_codecs.kernels import cuda_module
from zkv_codecs.packed import dense
from zkv_workers import devices

ENTRIES = (1_000_000, 25_000_000)
FED_BACK = ("int8", "int4", "uint8", "onebit", "twomeans", "topk", "randomk", "threshold")
"""Those are timed with error feedback too."""
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
            wrong.append(f"kernels of {family}: {gpu_bits.told(error)}")
    return compiled, wrong


# --- time ----------------------------------------------------------------------------------------


def measure(text: str, x: Any, repeat: int, cupy: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for each operation on an array on a device, as scripts/bench_codecs does.

    `copies` is the time as a multiple of copying the array on the device, in turns with it.
    """
    codec = spec.codec(text)
    # On this stream, unlike what a worker remembers.
    states = [tuple(cupy.asarray(one) if one.ndim else one for one in codec.start(x.shape))]
    target, total = cupy.empty_like(x), cupy.zeros_like(x)

    def encode() -> Encoded:
        encoded, states[0] = codec.encode(dense(x), states[0], gpu_bits.SEED, devices.CUDA)
        return encoded

    sent = encode()
    acts: dict[str, Callable[[], Any]] = {
        "encode": encode,
        "decode": lambda: sent.chain.decode(sent.packed, devices.CUDA),
        "decode_add": lambda: sent.chain.add(sent.packed, gpu_bits.WEIGHT, total, devices.CUDA),
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


# --- all -----------------------------------------------------------------------------------------


def check(asked: argparse.Namespace, cupy: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Do all that was asked for; return the rows, and what differs."""
    began = time.perf_counter()
    compiled, wrong = compile_all()
    _say(asked, f"{compiled} kernels compiled in {time.perf_counter() - began:.1f} s")
    rows: list[dict[str, Any]] = []
    codecs = tuple(asked.codec or gpu_bits.CODECS)
    remembering = [one for one in gpu_bits.REMEMBERING if not asked.codec or one.startswith(codecs)]
    for text in remembering:
        wrong += gpu_bits.differing_payloads(text, cupy)
    _say(asked, f"{len(remembering)} codecs compared as a worker uses them")
    for entries in asked.entries or ENTRIES:
        given = gpu_bits.inputs(entries)
        for text in codecs:
            wrong += gpu_bits.differences(text, given, fastest())
        _say(asked, f"{len(codecs)} codecs compared at {entries} entries")
        x = cupy.asarray(given[0])
        if wrong:
            break
        for text in timed(codecs):
            rows += measure(text, x, asked.repeat, cupy)
    if asked.staging and not wrong:
        rows += staging(asked, cupy, wrong)
    if asked.cluster and not wrong:
        wrong += gpu_bits.differing_keys(cupy)
        _say(
            asked,
            f"a cluster was trained from the host and from the device: {gpu_bits.BATCHES} batches",
        )
    return rows, wrong


def staging(asked: argparse.Namespace, cupy: Any, wrong: list[str]) -> list[dict[str, Any]]:
    """Compare and time the way from a device to a frame, and several devices' sums."""
    rows: list[dict[str, Any]] = []
    sizes = asked.entries or ENTRIES
    wrong += gpu_staging.differing_payloads(cupy, min(sizes))
    wrong += gpu_staging.differing_sums(cupy)
    _say(asked, "staging and the reduction of several devices compared with the host")
    for entries in () if wrong else sizes:
        rows += gpu_staging.staging_rows(entries, asked.repeat, cupy)
        rows += gpu_staging.reduction_rows(entries, asked.repeat, cupy)
    for line in gpu_staging.said(cupy):
        _say(asked, line)
    return rows


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table, that of scripts/bench_codecs."""
    yield f"{'codec':22} {'kernel':6} {'entries':>10} {'op':10} {'ms':>9} {'copies':>7}  bits"
    for row in rows:
        pcie = f"  {row['pcie']:.2f} times its bytes into pinned memory" if "pcie" in row else ""
        yield (
            f"{row['codec']:22} {row['kernel']:6} {row['entries']:10d} {row['op']:10} "
            f"{row['ms']:9.3f} {row['copies']:7.2f}  {row['bits_per_entry']:g}{pcie}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Check, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/check_gpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--entries", type=int, action="append")
    parser.add_argument("--codec", action="append")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--no-staging", dest="staging", action="store_false")
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


if __name__ == "__main__":
    sys.exit(main())
