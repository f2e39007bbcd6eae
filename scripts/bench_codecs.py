"""Times codecs against a copy of the same array (`scripts/bench_codecs --help`).

Copies and kernels take turns, and the shortest of all turns counts, so that other work on the
machine disturbs both alike.

What is timed is what a worker's encoding thread does. An array is cut into blocks of 1 MiB as a
worker cuts it, and copied block by block, as `batch.push` does before it returns: that copy is not
timed. Each block is encoded into memory that the codec allocates, but for a residual, which is
written over that copy, as in `zkv_workers.encoding`. A worker keeps an encoded block until it is
acknowledged, with a window of them in flight: so here the blocks of the last turn are kept, 64 MiB
of them at most, and older ones go back to the allocator. It keeps what a codec remembered before a
batch until that batch is settled: so here old residuals are kept until the next turn begins.
`faults` counts the pages that were new all the same, in the turn that had fewest. Joining
what is sent into one payload is not timed. Decoding reads the blocks of the first pass.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
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
WINDOW = 64 * 2**20
"""Bytes of encoded blocks that a worker has in flight: `SessionConfig.window_bytes`."""
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
    "ternary+ef",
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
        self.in_flight: deque[Encoded] = deque()
        self.in_flight_bytes = 0
        self.before: list[State] = []
        self.own: list[Any] = []
        warm(self.codec.chain, backend)
        self.prepare()
        self.sent = [self._block(at) for at in range(len(self.blocks))]
        self.prepare()
        self.encode()

    def prepare(self) -> None:
        """Copy every block, as a worker does when it is pushed."""
        self.own = [block.copy() for block in self.blocks]

    def _block(self, at: int) -> Encoded:
        """Encode one block; what the codec remembers goes on."""
        self.before.append(self.states[at])
        given = replace(dense(self.own[at]), own=True)
        encoded, self.states[at] = self.codec.encode(given, self.states[at], at, self.backend)
        return encoded

    def encode(self) -> None:
        """Encode every block; what came before is held as long as a worker holds it."""
        self.before = []
        for at in range(len(self.blocks)):
            encoded = self._block(at)
            self.in_flight.append(encoded)
            self.in_flight_bytes += encoded.nbytes
            while self.in_flight_bytes > WINDOW or len(self.in_flight) > len(self.blocks):
                self.in_flight_bytes -= self.in_flight.popleft().nbytes

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


def faults() -> int:
    """Return how many pages the process was given so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def shortest(
    act: Callable[[], None], copy: Callable[[], None], repeat: int, prepare: Callable[[], None]
) -> tuple[float, float, int]:
    """Return the shortest times of the two, in seconds, and the fewest pages that `act` was given.

    They take turns, each of which `prepare` precedes.
    """
    times: tuple[list[float], list[float]] = ([], [])
    pages = []
    for _ in range(repeat):
        prepare()
        before = faults()
        for one, spent in zip((act, copy), times, strict=True):
            began = time.perf_counter()
            one()
            spent.append(time.perf_counter() - began)
        pages.append(faults() - before)
    return min(times[0]), min(times[1]), min(pages)


def measure(text: str, entries: int, kernel: str, repeat: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each operation."""
    chance = np.random.default_rng(0)
    values = chance.standard_normal(entries, np.float32)
    target = np.zeros_like(values)
    subject = Subject(text, values, Backend(kernel))
    for op in ("encode", "decode", "decode_add"):
        took_s, copy_s, pages = shortest(
            getattr(subject, op),
            lambda: np.copyto(target, values),
            repeat,
            subject.prepare if op == "encode" else lambda: None,
        )
        yield {
            "codec": text,
            "kernel": kernel,
            "entries": entries,
            "op": op,
            "ms": round(1e3 * took_s, 4),
            "copies": round(took_s / copy_s, 3),
            "faults": pages,
            "bits_per_entry": round(subject.bits(), 4),
        }


def shown(*cells: Any) -> str:
    """Return a line of the table."""
    widths = (-22, -6, 10, -10, 10, 7, 7, 8)
    return " ".join(
        str(cell).ljust(-width) if width < 0 else str(cell).rjust(width)
        for cell, width in zip(cells, widths, strict=True)
    )


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
        print(shown("codec", "kernel", "entries", "op", "ms", "copies", "faults", "bits"))
    for entries in asked.entries or ENTRIES:
        for kernel in asked.kernel or ["numba"]:
            for text in asked.codec or CODECS:
                for row in measure(text, entries, kernel, asked.repeat):
                    rows.append(row)
                    if not asked.json:
                        print(shown(*row.values()), flush=True)
    if asked.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
