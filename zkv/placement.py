"""Placement: how keys are cut into blocks, and which server holds each.

Pure and the same on every machine: the result depends on the keys' order, sizes, dtypes and rules,
and on nothing else (no hash of a string, no clock).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from zkv.dtypes import DTYPES
from zkv.layout import size_of, whole
from zkv.wire import BlockSpec, KeyEntry, Segment

BLOCK_BYTES = 1024 * 1024
"""Blocks of about 1 MiB pipeline well and stay in a core's cache while they are summed."""
BUCKET_BYTES = 64 * 1024
"""Keys up to this size share blocks: a message costs as much as copying about 64 KiB."""
BLOCK_BYTES_LEAST = 4 * 1024
BLOCKS_MANY = 16_384
"""More of one init are cut only where blocks of 1 MiB are not enough: each costs its place in
messages and in tables."""
BLOCK_S = 0.002
"""How long a block may be under way at most on a link that is slower than a block of 1 MiB needs:
what is urgent waits for one, and then for its own."""


def block_bytes_on(link_rate: float, total_bytes: int) -> int:
    """Return the size of blocks for values of `total_bytes` on a link of so many bytes a second
    (0.0: not known).

    A power of two from 64 KiB, below which a message costs more than what it carries, to 1 MiB.
    """
    size = BLOCK_BYTES
    least = max(BUCKET_BYTES, total_bytes / BLOCKS_MANY)
    while link_rate and size > link_rate * BLOCK_S and size // 2 >= least:
        size //= 2
    return size


def plan(
    entries: Sequence[KeyEntry],
    servers: int,
    *,
    together: Callable[[KeyEntry], object],
    bid_first: int = 0,
    load: Sequence[int] | None = None,
    block_bytes: int | Callable[[KeyEntry], int] = BLOCK_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[BlockSpec]:
    """Cut keys into blocks and give each block a server.

    Keys above `bucket_bytes` are cut into slices of at most `block_bytes`, which may differ by key.
    Smaller ones share buckets with neighbours of the same dtype and the same `together(entry)`
    (rule, reduction). A model of nothing but small keys is still spread: a bucket takes no more
    than its server's share.

    Servers are chosen by size: largest block first to the least loaded server (LPT; Graham, "Bounds
    on Multiprocessing Timing Anomalies", 1969), ties to the lower number. `load` is what each
    server holds already, in bytes.
    """

    def size_for(entry: KeyEntry) -> int:
        return block_bytes if isinstance(block_bytes, int) else block_bytes(entry)

    pieces = _pieces(
        [entry for entry in entries if entry.spec.same_as is None],
        servers,
        together,
        size_for,
        bucket_bytes,
    )
    loads = [(held, server) for server, held in enumerate(load or [0] * servers)]
    heapq.heapify(loads)
    chosen: dict[int, int] = {}
    for at in sorted(range(len(pieces)), key=lambda at: (-pieces[at][0], at)):
        held, server = heapq.heappop(loads)
        chosen[at] = server
        heapq.heappush(loads, (held + pieces[at][0], server))
    return [
        BlockSpec(bid_first + at, chosen[at], segments) for at, (_, segments) in enumerate(pieces)
    ]


def _pieces(
    entries: Sequence[KeyEntry],
    servers: int,
    together: Callable[[KeyEntry], object],
    block_bytes: Callable[[KeyEntry], int],
    bucket_bytes: int,
) -> list[tuple[int, list[Segment]]]:
    """Return (bytes, segments) of each block, in the order of its first key."""
    sizes = {
        entry.kid: size_of(entry.spec) * DTYPES[entry.spec.dtype].itemsize for entry in entries
    }
    small = sum(size for size in sizes.values() if size <= bucket_bytes)
    share = max(1, -(-small // servers))
    pieces: list[list[Segment]] = []
    filled: list[int] = []
    open_buckets: dict[object, int] = {}
    for entry in entries:
        size = sizes[entry.kid]
        itemsize = DTYPES[entry.spec.dtype].itemsize
        if size > bucket_bytes:
            span = max(1, block_bytes(entry) // itemsize)
            for start in range(0, size // itemsize, span):
                stop = min(start + span, size // itemsize)
                pieces.append([Segment(entry.kid, start, stop)])
                filled.append((stop - start) * itemsize)
            continue
        kind = (entry.spec.dtype, together(entry))
        at = open_buckets.get(kind)
        bucket_max = min(block_bytes(entry), share)
        if at is None or (filled[at] + size > bucket_max and filled[at] > 0):
            at = open_buckets[kind] = len(pieces)
            pieces.append([])
            filled.append(0)
        pieces[at].append(whole(entry.kid, size // itemsize))
        filled[at] += size
    return list(zip(filled, pieces, strict=True))


def imbalance(
    blocks: Sequence[BlockSpec], servers: int, weight: Callable[[BlockSpec], float]
) -> float:
    """Return the busiest server's load over the mean load (1.0 is perfect; 1.0 if there is none).

    The seed page on synchronisation: loads 40, 25, 10, 8, 6, 5, 3, 3 on four servers with a busiest
    server of 46 give 46 / 25 = 1.84.
    """
    loads = [0.0] * servers
    for block in blocks:
        loads[block.server] += weight(block)
    total = sum(loads)
    return max(loads) * servers / total if total else 1.0
