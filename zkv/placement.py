"""Placement: how keys are cut into blocks, and which server holds each.

Pure and the same on every machine: the result depends on the keys' names, order, sizes, dtypes and
rules, on the placement and the number of servers, and on nothing else (no hash of Python's, no
clock).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zkv.assignment import assign, key_loads
from zkv.dtypes import DTYPES
from zkv.fitting import Piece, Share
from zkv.layout import size_of, whole
from zkv.placements import DEFAULT, Placement
from zkv.wire import BlockSpec, KeyEntry, KeySpec, Segment
from zkv.wishes import Wishes

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
NEAR_BYTES_PER_S = 2e10
"""What counts as the rate of a way that does not leave the machine: memory is copied so fast."""
BLOCK_BYTES_MAX, FAST_S, BLOCKS_FEW = 8 * 1024 * 1024, 0.0005, 10
"""Where a larger block takes as little as that, its message costs more than its bytes: it is cut so
large if so many remain, which travel and are summed side by side."""


def block_bytes_on(link_rate: float, total_bytes: int) -> int:
    """Return the size of blocks for values of `total_bytes` on a link of so many bytes a second
    (0.0: not known).

    A power of two from 64 KiB, below which a message costs more than what it carries, to 1 MiB, or
    8 MiB within a machine.
    """
    size = BLOCK_BYTES
    while 2 * size <= min(BLOCK_BYTES_MAX, link_rate * FAST_S, total_bytes / BLOCKS_FEW):
        size *= 2
    least = max(BUCKET_BYTES, total_bytes / BLOCKS_MANY)
    while link_rate and size > link_rate * BLOCK_S and size // 2 >= least:
        size //= 2
    return size


def bucket_bytes_on(link_rate: float, total_bytes: int) -> int:
    """Return up to which size keys share blocks, for values of `total_bytes` on such a link.

    Within a machine a key of some MB costs less than a message of its own does; `BLOCKS_FEW` blocks
    are left, so that some travel while others are summed.
    """
    if link_rate < NEAR_BYTES_PER_S:
        return BUCKET_BYTES
    size = block_bytes_on(link_rate, total_bytes)
    return max(BUCKET_BYTES, min(size, total_bytes // BLOCKS_FEW))


def plan(
    entries: Sequence[KeyEntry],
    servers: int,
    *,
    together: Callable[[KeyEntry], object],
    bid_first: int = 0,
    load: Sequence[int] | None = None,
    block_bytes: int | Callable[[KeyEntry], int] = BLOCK_BYTES,
    bucket_bytes: int | Callable[[KeyEntry], int] = BUCKET_BYTES,
    placement: Placement = DEFAULT,
    names: Sequence[str] = (),
    held: Sequence[Share] | None = None,
    loads: Mapping[int, float] | None = None,
) -> list[BlockSpec]:
    """Cut keys into blocks and give each block a server.

    Keys above `bucket_bytes` are cut into slices of at most `block_bytes`; both may differ by key.
    Smaller ones share buckets with neighbours of the same dtype and the same `together(entry)`
    (rule, reduction) that the placement does not set apart. A model of nothing but small keys is
    still spread: a bucket takes no more than its server's share.

    Servers are chosen by `placement` (`zkv.assignment`), whose default is by size: largest block
    first to the least loaded server (LPT), ties to the lower number. `held` is what each server
    holds already (`load`: its bytes alone), `names` are the servers' names, `loads` the load of
    each key by its number (default: those that the placement gives).

    Raises:
        ConfigError: the placement cannot be met; the text names the key, its size, the limit and
            what to try.
    """

    def of(size: int | Callable[[KeyEntry], int]) -> Callable[[KeyEntry], int]:
        return (lambda entry: size) if isinstance(size, int) else size

    own = [entry for entry in entries if entry.spec.same_as is None]
    wishes = Wishes(placement, servers, (entry.spec.key for entry in own), names)
    cut = _pieces(
        own,
        # On a ring a bucket's keys are of one server already, however many servers there are.
        1 if wishes.ring is not None else servers,
        lambda entry: (together(entry), wishes.apart(entry.spec.key)),
        of(block_bytes),
        of(bucket_bytes),
    )
    if held is None:
        held = [Share(0, nbytes, nbytes) for nbytes in load or [0] * servers]
    pieces = to_place(cut, own, loads or key_loads(placement, _sizes(own)))
    chosen = assign(pieces, servers, placement, wishes=wishes, held=held)
    return [
        BlockSpec(bid_first + at, server, segments)
        for at, (server, (_, segments)) in enumerate(zip(chosen, cut, strict=True))
    ]


def _sizes(entries: Sequence[KeyEntry]) -> list[tuple[int, str | int, int]]:
    """Return (number, key, bytes) of each key."""
    return [(entry.kid, entry.spec.key, _bytes(entry.spec)) for entry in entries]


def _bytes(spec: KeySpec) -> int:
    return size_of(spec) * DTYPES[spec.dtype].itemsize


def to_place(
    cut: Sequence[tuple[int, list[Segment]]],
    entries: Sequence[KeyEntry],
    loads: Mapping[int, float],
) -> list[Piece]:
    """Return what is to be known of blocks, from (bytes, segments) of each."""
    keys = {entry.kid: (entry.spec.key, _bytes(entry.spec)) for entry in entries}
    sizes = {entry.kid: size_of(entry.spec) for entry in entries}
    return [
        Piece(
            keys[segments[0].kid][0],
            nbytes,
            segments_load(segments, loads, sizes),
            segments[0].start,
            len(segments) - 1,
            0 if len(segments) > 1 else keys[segments[0].kid][1],
        )
        for nbytes, segments in cut
    ]


def segments_load(
    segments: Sequence[Segment], loads: Mapping[int, float], sizes: Mapping[int, int]
) -> float:
    """Return the load of a block, from the load and the elements of each key by its number: a
    slice has its part."""
    total = 0.0
    for one in segments:
        size = sizes[one.kid]
        part = one.stop - one.start
        # By element first, so that a load of so many bytes is exactly the bytes of each slice.
        total += loads[one.kid] if part == size else loads[one.kid] / size * part
    return total


def _pieces(
    entries: Sequence[KeyEntry],
    servers: int,
    together: Callable[[KeyEntry], object],
    block_bytes: Callable[[KeyEntry], int],
    bucket_bytes: Callable[[KeyEntry], int],
) -> list[tuple[int, list[Segment]]]:
    """Return (bytes, segments) of each block, in the order of its first key."""
    sizes = {
        entry.kid: size_of(entry.spec) * DTYPES[entry.spec.dtype].itemsize for entry in entries
    }
    small = sum(sizes[one.kid] for one in entries if sizes[one.kid] <= bucket_bytes(one))
    share = max(1, -(-small // servers))
    pieces: list[list[Segment]] = []
    filled: list[int] = []
    open_buckets: dict[object, int] = {}
    for entry in entries:
        size = sizes[entry.kid]
        itemsize = DTYPES[entry.spec.dtype].itemsize
        if size > bucket_bytes(entry):
            span = max(1, block_bytes(entry) // itemsize)
            for start in range(0, size // itemsize, span):
                stop = min(start + span, size // itemsize)
                pieces.append([Segment(entry.kid, start, stop)])
                filled.append((stop - start) * itemsize)
            continue
        kind = (entry.spec.dtype, together(entry))
        at = open_buckets.get(kind)
        bucket_max = min(block_bytes(entry), share)
        before = at
        if at is None or (filled[at] + size > bucket_max and filled[at] > 0):
            at = len(pieces)
            pieces.append([])
            filled.append(0)
        pieces[at].append(whole(entry.kid, size // itemsize))
        filled[at] += size
        # A key that needs nearly all of a bucket leaves the one before it to smaller ones.
        if before is None or filled[at] < filled[before]:
            open_buckets[kind] = at
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
