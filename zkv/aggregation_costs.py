"""What it costs to combine gradients of many devices, and how evenly servers share the load.

The second half of the seed pages' calculators (`zkv.costs` has the first): aggregation on one
device, on the CPU and in parts, ring all-reduce, imbalance and fan-out of a placement. Sizes are in
bytes, links in bits per second, times in seconds. This module must not know a cluster: which
server holds which block comes in as an explicit assignment.

Every function raises ValueError with the name of what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from zkv.costs import checked, transfer_s
from zkv.placement import imbalance
from zkv.wire import BlockSpec

SERVERS_MAX = 1_000_000


def aggregate_on_device_s(size_bytes: float, devices: int, bits_per_s: float) -> float:
    """Return the time to aggregate on one of n devices and give the result back.

    2(n − 1) · M / B: each of the others sends its M bytes to it in turn, and gets M bytes. The
    key-value store page: 160 MB, 4 devices, 16 GB/s: 30 + 30 = 60 ms.
    """
    checked("devices", devices, 1)
    return 2 * (devices - 1) * transfer_s(size_bytes, bits_per_s)


def aggregate_on_cpu_s(size_bytes: float, devices: int, bits_per_s: float) -> float:
    """Return the time to aggregate on the CPU, which has no gradient of its own: 2n · M / B.

    The key-value store page: 160 MB, 4 devices, 16 GB/s: 80 ms.
    """
    checked("devices", devices, 1)
    return 2 * devices * transfer_s(size_bytes, bits_per_s)


def aggregate_in_parts_s(size_bytes: float, devices: int, bits_per_s: float) -> float:
    """Return the time if each of n devices aggregates one part of M/n: 2(n − 1) · (M/n) / B.

    All links work at once. The key-value store page: 160 MB in four parts of 40 MB on 4 devices,
    16 GB/s: 15 ms. It is also the time of a ring (`ring_all_reduce_s`), and of as many evenly
    loaded servers as workers, one beside each.
    """
    checked("devices", devices, 1)
    return 2 * (devices - 1) * transfer_s(size_bytes / devices, bits_per_s)


def ring_chunk_bytes(size_bytes: float, nodes: int) -> float:
    """Return the size of a chunk of a ring: M/N, as there are as many chunks as nodes."""
    checked("size_bytes", size_bytes, 0)
    checked("nodes", nodes, 1)
    return size_bytes / nodes


def ring_rounds(nodes: int, *, reduce_only: bool = False) -> int:
    """Return in how many rounds every node of a ring sends one chunk to the next: 2(N − 1).

    N − 1 rounds add up (scatter-reduce, the overview page), N − 1 more hand the sums round
    (all-gather). With `reduce_only` it is the first half, which the key-value store page describes.
    """
    checked("nodes", nodes, 1)
    return (nodes - 1) * (1 if reduce_only else 2)


def ring_sent_bytes(size_bytes: float, nodes: int, *, reduce_only: bool = False) -> float:
    """Return what each node of a ring sends, and as much receives: 2(N − 1)/N · M.

    The overview page calls it constant. It comes near 2M: 1.5 M for 4 nodes, 1.96875 M for 64
    (Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
    2009). With `reduce_only` it is (N − 1)/N · M.
    """
    checked("size_bytes", size_bytes, 0)
    return ring_rounds(nodes, reduce_only=reduce_only) * size_bytes / nodes


def ring_all_reduce_s(
    size_bytes: float, nodes: int, bits_per_s: float, *, reduce_only: bool = False
) -> float:
    """Return the time of a ring all-reduce: 8 · `ring_sent_bytes` / bits_per_s.

    All links of the ring work at once, so it is the time of one node. 160 MB, 4 nodes, 16 GB/s:
    240 MB in 15 ms.
    """
    sent_bytes = ring_sent_bytes(size_bytes, nodes, reduce_only=reduce_only)
    return transfer_s(sent_bytes, bits_per_s)


def round_robin(blocks: Iterable[str], servers: int) -> dict[str, int]:
    """Return the assignment of block i (from 0) to server i mod S (the synchronisation page, §10).

    As many blocks for each server, which says nothing about their load.
    """
    checked("servers", servers, 1, SERVERS_MAX)
    return {block: at % servers for at, block in enumerate(blocks)}


def server_loads(
    loads: Mapping[str, float], assignment: Mapping[str, int], servers: int
) -> list[float]:
    """Return the load of each of `servers` servers, from each block's load and server (from 0).

    Raises:
        ValueError: a block has no server or no load, a server does not exist, a load is negative.
    """
    _checked_placement(loads, assignment, servers)
    held: list[list[float]] = [[] for _ in range(servers)]
    for block, server in assignment.items():
        held[server].append(loads[block])
    return [math.fsum(parts) for parts in held]


def load_imbalance(
    loads: Mapping[str, float], assignment: Mapping[str, int], servers: int
) -> float:
    """Return the busiest server's load over the mean load (1.0: perfect, or nothing to do).

    It is `zkv.placement.imbalance` of an explicit assignment. The synchronisation page, §10: loads
    of 100 on four servers, the busiest with 46, give 46/25 = 1.84.
    """
    _checked_placement(loads, assignment, servers)
    blocks = [BlockSpec(at, assignment[block], []) for at, block in enumerate(loads)]
    by_number = list(loads.values())
    return imbalance(blocks, servers, lambda block: by_number[block.bid])


def load_imbalance_min(loads: Mapping[str, float], servers: int) -> float:
    """Return what no placement of whole blocks can get below: max(largest load, mean) / mean.

    The synchronisation page's loads on four servers: 40/25 = 1.6, which is also reached.
    """
    checked("servers", servers, 1, SERVERS_MAX)
    for block, load in loads.items():
        checked(f"load of block {block!r}", load, 0)
    total = math.fsum(loads.values())
    return max(1.0, max(loads.values()) * servers / total) if total else 1.0


def fan_out(assignment: Mapping[str, int], request: Iterable[str]) -> int:
    """Return how many servers a request for these blocks contacts.

    The synchronisation page, §10, says 3 for p1, p5, p7. With its loads in their listed order a
    busiest server of 46 needs p1 and p5 together, so the fan-out is 2; it is 3 only if the names
    do not follow that order, such as {p1: 40, p2: 6}, {p3, p4}, {p5, p6}, {p7, p8}.
    """
    wanted = list(request)
    for block in wanted:
        if block not in assignment:
            raise ValueError(f"request: block {block!r} has no server; known: {_some(assignment)}")
    return len({assignment[block] for block in wanted})


def _checked_placement(
    loads: Mapping[str, float], assignment: Mapping[str, int], servers: int
) -> None:
    checked("servers", servers, 1, SERVERS_MAX)
    for block, load in loads.items():
        checked(f"load of block {block!r}", load, 0)
        if block not in assignment:
            raise ValueError(f"block {block!r} has no server; assigned: {_some(assignment)}")
    for block, server in assignment.items():
        if block not in loads:
            raise ValueError(f"block {block!r} has a server but no load; loads: {_some(loads)}")
        checked(f"server of block {block!r} (counted from 0)", server, 0, servers - 1)


def _some(blocks: Mapping[str, object]) -> str:
    """Return the first names of a mapping for an error's text."""
    names = list(blocks)
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "none"
