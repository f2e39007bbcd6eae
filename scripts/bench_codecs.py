"""Times codecs against a copy of the same array (`scripts/bench_codecs --help`).

Copies and kernels take turns, and the shortest of all turns counts, so that other work on the
machine disturbs both alike. Arrays are cut into blocks as a worker cuts them: what a codec
allocates is then of a size that the allocator keeps, as in a run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from zkv_codecs.backend import Backend
from zkv_codecs.feedback import Codec, Encoded
from zkv_codecs.frames import to_payload, warm
from zkv_codecs.packed import State, dense
from zkv_codecs.spec import codec

ENTRIES = (1_000_000, 25_000_000)
BLOCK = 2**18
"""Entries of a block of 1 MiB."""
CODECS = (
    "fp16",
    "sfp16",
    "bf16",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8",
    "int8+ef",
    "int4+ef",
    "uint8",
    "qsgd:127",
    "natural",
    "ternary",
    "onebit",
    "onebit+ef",
    "twomeans+ef",
    "majority",
    "mx1bit",
    "mx2bit:0.5",
    "topk:0.01",
    "topk:0.01+ef",
    "topk:0.001+ef",
    "topk:0.01+fp16+ef",
    "topk_sampled:0.01+ef",
    "randomk:0.01+ef",
    "threshold:2.5+ef",
    "powersgd:4+ef",
    "zstd",
    "lz4",
)


class Subject:
    """One codec on one array, block by block."""

    def __init__(self, text: str, values: Any, backend: Backend) -> None:
        self.codec: Codec = codec(text)
        self.backend = backend
        self.blocks = [values[at : at + BLOCK] for at in range(0, values.size, BLOCK)]
        if text.startswith("powersgd"):
            self.blocks = [block.reshape(-1, 512) for block in self.blocks if block.size % 512 == 0]
        self.states: list[State] = [self.codec.start(block.shape) for block in self.blocks]
        self.total = np.zeros(values.size, np.float32)
        self.sent: list[Encoded] = []
        warm(self.codec.chain, backend)
        self.encode()

    def encode(self) -> None:
        """Encode every block; what the codec remembers goes on."""
        self.sent = []
        for at, block in enumerate(self.blocks):
            encoded, self.states[at] = self.codec.encode(
                dense(block), self.states[at], at, self.backend
            )
            self.sent.append(encoded)

    def decode(self) -> None:
        """Decode every block into an array of its own."""
        for encoded in self.sent:
            encoded.chain.decode(encoded.packed, self.backend)

    def decode_add(self) -> None:
        """Add every block, with a weight, to a total."""
        at = 0
        for encoded in self.sent:
            part = self.total[at : at + encoded.packed.size]
            encoded.chain.add(encoded.packed, 3.0, part, self.backend)
            at += encoded.packed.size

    def bits(self) -> float:
        """Return the bits that are sent for each entry."""
        entries = sum(encoded.packed.size for encoded in self.sent)
        return 8 * sum(to_payload(encoded)[1].nbytes for encoded in self.sent) / max(1, entries)


def shortest(act: Callable[[], None], copy: Callable[[], None], repeat: int) -> tuple[float, float]:
    """Return the shortest times of the two, in seconds, taking turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeat):
        for one, spent in zip((act, copy), times, strict=True):
            began = time.perf_counter()
            one()
            spent.append(time.perf_counter() - began)
    return min(times[0]), min(times[1])


def measure(text: str, entries: int, kernel: str, repeat: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each operation."""
    chance = np.random.default_rng(0)
    values = chance.standard_normal(entries, np.float32)
    target = np.empty_like(values)
    subject = Subject(text, values, Backend(kernel))
    for op in ("encode", "decode", "decode_add"):
        took_s, copy_s = shortest(getattr(subject, op), lambda: np.copyto(target, values), repeat)
        yield {
            "codec": text,
            "kernel": kernel,
            "entries": entries,
            "op": op,
            "ms": round(1e3 * took_s, 4),
            "copies": round(took_s / copy_s, 3),
            "bits_per_entry": round(subject.bits(), 4),
        }


def main() -> None:
    """Measure what was asked for, and print it."""
    parser = argparse.ArgumentParser(prog="scripts/bench_codecs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--entries", type=int, action="append")
    parser.add_argument("--codec", action="append")
    parser.add_argument("--kernel", action="append", choices=["numba", "numpy"])
    parser.add_argument("--repeat", type=int, default=7)
    asked = parser.parse_args()
    try:
        for text in asked.codec or CODECS:
            codec(text)
    except ValueError as error:
        parser.error(str(error))
    rows = []
    if not asked.json:
        print(f"{'codec':22} {'kernel':6} {'entries':>10} {'op':10} {'ms':>9} {'copies':>7}  bits")
    for entries in asked.entries or ENTRIES:
        for kernel in asked.kernel or ["numba"]:
            for text in asked.codec or CODECS:
                for row in measure(text, entries, kernel, asked.repeat):
                    rows.append(row)
                    if not asked.json:
                        print(
                            f"{row['codec']:22} {row['kernel']:6} {row['entries']:10d} "
                            f"{row['op']:10} {row['ms']:9.3f} {row['copies']:7.2f}  "
                            f"{row['bits_per_entry']:g}",
                            flush=True,
                        )
    if asked.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
