"""What one batch costs: bytes, time on a link, overlap with computation, waiting for stragglers.

The calculators of the seed pages, for `zkv plan` and for notebooks. `zkv.aggregation_costs` has
those of many devices and servers. They are ideal figures: no protocol overhead, no time to
compress, no delay of a server. Sizes are in bytes, links in bits per second, times in seconds, and
names say so. This module must not know a cluster: it measures nothing and simulates nothing.

A decimal number means what it says: 7 % of 100 entries are 7 entries, whatever binary rounding
makes of 0.07. Every function raises ValueError with the name of what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from zkv.sums import weighted_mean

TINY = 1e-30
HUGE = 1e30
"""Between these no formula here overflows: none multiplies or divides more than six inputs."""
BITS_PER_BYTE = 8
BITS_PER_VALUE_MAX = 1024
FLOAT32_BITS = 32
WORKERS_MAX = 1_000_000
"""The exact expectation adds one term for each worker."""


def checked(name: str, value: float, low: float, high: float = HUGE) -> None:
    """Raise ValueError unless low <= value <= high (so not for NaN), with name and value."""
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low:,} to {high:,}, given {value!r}")


def fixed_width_bits(symbols: int) -> int:
    """Return the bits that tell `symbols` values apart at a fixed width: ⌈log₂ symbols⌉.

    The synchronisation page, §8: three symbols need 2. For positions it is the least index width.
    """
    checked("symbols", symbols, 1)
    return (symbols - 1).bit_length()


def packed_bits(symbols: int, packed: int) -> float:
    """Return the bits for each of `packed` symbols that share whole bytes.

    8 · ⌈log₂(symbols ** packed) / 8⌉ / packed. Five ternary values fit into a byte (3⁵ = 243), so
    1.6 bits each; no packing gets below log₂ 3 = 1.585.
    """
    checked("symbols", symbols, 1, 2**64)
    checked("packed", packed, 1, 1024)
    width = (symbols**packed - 1).bit_length()
    return BITS_PER_BYTE * math.ceil(Fraction(width, BITS_PER_BYTE)) / packed


def kept_entries(entries: int, density: float) -> int:
    """Return how many entries a sparse gradient keeps: max(1, ⌈density · entries⌉).

    The synchronisation page, §7: 25 % of 8 entries are 2.
    """
    checked("entries", entries, 1)
    checked("density", density, TINY, 1)
    return max(1, math.ceil(_decimal(density) * entries))


def payload_bytes(
    entries: int,
    bits_per_value: float,
    density: float = 1.0,
    index_bits: float = 32,
    scale_bytes: int = 0,
) -> int:
    """Return the bytes of one encoded gradient, in whole bytes for values and for positions.

    ⌈kept · bits_per_value / 8⌉ + ⌈kept · index_bits / 8⌉ + scale_bytes, where kept is
    `kept_entries(entries, density)`. Positions are counted only if entries are left out (density
    below 1); index_bits is 0 if the receiver can derive them, such as from a seed.

    The synchronisation page, §8: of 100 million entries, float32 takes 400 MB, int8 100 MB, and the
    largest 1 % with 32-bit values and 32-bit positions 8 MB: 50 times less, not 100.
    """
    kept = kept_entries(entries, density)
    checked("bits_per_value", bits_per_value, TINY, BITS_PER_VALUE_MAX)
    checked("index_bits", index_bits, 0, BITS_PER_VALUE_MAX)
    checked("scale_bytes", scale_bytes, 0)
    values = math.ceil(kept * _decimal(bits_per_value) / BITS_PER_BYTE)
    positions = math.ceil(kept * _decimal(index_bits) / BITS_PER_BYTE) if density < 1 else 0
    return values + positions + scale_bytes


def _decimal(value: float) -> Fraction:
    """Return the number that a person sees when the float is printed."""
    return Fraction(str(float(value)))


def float32_ratio(entries: int, size_bytes: float) -> float:
    """Return how many times less `size_bytes` is than the same entries as float32."""
    checked("size_bytes", size_bytes, TINY)
    return payload_bytes(entries, FLOAT32_BITS) / size_bytes


def transfer_s(size_bytes: float, bits_per_s: float) -> float:
    """Return the time that bytes take on a link: 8 · size_bytes / bits_per_s.

    The synchronisation page, §8: 400 MB on 10 Gb/s take 0.32 s.
    """
    checked("size_bytes", size_bytes, 0)
    checked("bits_per_s", bits_per_s, TINY)
    return BITS_PER_BYTE * size_bytes / bits_per_s


def server_bytes(size_bytes: float, workers: int, servers: int = 1) -> float:
    """Return what one server takes in for an update, and as much gives out: N · M / S.

    N workers push M bytes each, spread evenly over S servers. The overview page: the cost of a
    central server is linear in the number of workers.
    """
    checked("size_bytes", size_bytes, 0)
    checked("workers", workers, 1)
    checked("servers", servers, 1)
    return workers * size_bytes / servers


def shared_ingress_s(size_bytes: float, workers: int, bits_per_s: float, servers: int = 1) -> float:
    """Return the time until N workers' gradients have passed the ingress that they share.

    8 · N · M / S / bits_per_s, for S servers with one ingress each. The synchronisation page, §8:
    8 workers with 400 MB each on 10 Gb/s need at least 2.56 s; links of their own do not help.
    """
    return transfer_s(server_bytes(size_bytes, workers, servers), bits_per_s)


def _checked_times(compute_s: float, communication_s: float) -> None:
    checked("compute_s", compute_s, 0)
    checked("communication_s", communication_s, 0)


def serial_s(compute_s: float, communication_s: float) -> float:
    """Return the time of a batch without overlap: C + M (the synchronisation page, §9)."""
    _checked_times(compute_s, communication_s)
    return compute_s + communication_s


def overlapped_s(compute_s: float, communication_s: float) -> float:
    """Return the time of a batch at ideal overlap in steady state: max(C, M).

    The synchronisation page, §9: 60 ms and 40 ms take 60 ms. It holds for work whose order allows
    the overlap; filling and draining are left out (`pipelined_s` has them).
    """
    _checked_times(compute_s, communication_s)
    return max(compute_s, communication_s)


def exposed_s(compute_s: float, communication_s: float) -> float:
    """Return the communication that ideal overlap cannot hide: max(0, M − C)."""
    _checked_times(compute_s, communication_s)
    return max(0.0, communication_s - compute_s)


def pipelined_s(compute_s: float, communication_s: float, chunks: int) -> float:
    """Return the time of one batch in n equal chunks, each sent once it is computed.

    C/n + (n − 1) · max(C, M)/n + M/n: the first chunk is computed, the slower stage runs without a
    gap, the last chunk is sent. n = 1 is C + M; large n comes near max(C, M). An extension of the
    synchronisation page, §9, which names filling and draining: 60 ms and 40 ms in 4 chunks take
    70 ms.
    """
    _checked_times(compute_s, communication_s)
    checked("chunks", chunks, 1)
    slower = max(compute_s, communication_s)
    return (compute_s + communication_s + (chunks - 1) * slower) / chunks


def overlap_speed_up(compute_s: float, communication_s: float) -> float:
    """Return how many times faster ideal overlap is: (C + M) / max(C, M).

    From 1 (nothing to hide, or no work at all) to 2 (C = M). The synchronisation page, §9: 100/60.
    """
    overlapped = overlapped_s(compute_s, communication_s)
    return serial_s(compute_s, communication_s) / overlapped if overlapped else 1.0


def harmonic_difference(threshold: int, workers: int) -> float:
    """Return H_K − H_(K−k) = 1/(K−k+1) + … + 1/K, added with one rounding at the end.

    k is the threshold, K the workers, 1 <= k <= K <= 1,000,000.
    """
    checked("workers", workers, 1, WORKERS_MAX)
    checked("threshold (at most the workers)", threshold, 1, workers)
    return math.fsum(1 / at for at in range(workers - threshold + 1, workers + 1))


def first_workers_s(threshold: int, workers: int, mean_s: float) -> float:
    """Return the expected time until the first k of K workers are done, exactly.

    (H_K − H_(K−k)) · mean_s for independent exponential compute times of one mean (1/μ); k = K
    waits for all, H_K · mean_s. The synchronisation page, §6: all of 64 take 4.744 times the mean.
    48 of 64 take 1.3632 times the mean exactly. The page's ln 4 = 1.3863 is the limit for many
    workers (`first_workers_large_s`) and 1.7 % higher.
    """
    checked("mean_s", mean_s, 0)
    return harmonic_difference(threshold, workers) * mean_s


def first_workers_large_s(threshold: int, workers: int, mean_s: float) -> float:
    """Return the limit of `first_workers_s` for many workers, the share k/K held: ln(K/(K−k)).

    Times mean_s, and always above the exact value. The synchronisation page, §6: ln 4 for 75 %.

    Raises:
        ValueError: also if threshold = workers, where no such limit exists (H_K grows for ever).
    """
    checked("mean_s", mean_s, 0)
    checked("workers", workers, 1)
    checked("threshold (at most the workers)", threshold, 1, workers)
    if threshold == workers:
        raise ValueError(
            f"threshold {threshold} of {workers} workers: waiting for all has no large-K value, "
            "as it grows with ln K; use the exact one"
        )
    return -math.log1p(-threshold / workers) * mean_s


def bsp_utilisation(compute_s: Sequence[float]) -> float:
    """Return the share of their time in which workers compute under BSP: Σ cᵢ / (K · max c).

    It is that of whole cycles. The synchronisation page, §2: 2, 5 and 7 give 14/21 = 66.67 %.
    """
    checked("compute_s (how many)", len(compute_s), 1)
    for value in compute_s:
        checked("compute_s", value, TINY)
    return math.fsum(compute_s) / (len(compute_s) * max(compute_s))


def batch_sizes(samples: int, workers: int) -> tuple[int, ...]:
    """Return each worker's share of a batch; sizes differ by at most one, larger ones first.

    The overview page: 128 samples on 4 devices are 32 each.
    """
    checked("workers", workers, 1, WORKERS_MAX)
    checked("samples (at least one for each worker)", samples, workers)
    share, more = divmod(samples, workers)
    return (share + 1,) * more + (share,) * (workers - more)


def mean_of_batches(means: Sequence[float], samples: Sequence[int]) -> float:
    """Return the mean over all samples from each batch's mean: Σ nᵢmᵢ / Σ nᵢ.

    The synchronisation page, §2, asks for the weights: batches of 32, 32, 32 and 16 with means 1,
    2, 3 and 8 give 2.857143; the plain mean 3.5 counts the small batch twice.
    """
    if len(means) != len(samples):
        raise ValueError(f"means and samples must pair up, given {len(means)} and {len(samples)}")
    for mean, count in zip(means, samples, strict=True):
        checked("means", mean, -HUGE)
        checked("samples", count, 1)
    values = [np.array([mean], np.float64) for mean in means]
    return float(weighted_mean(values, samples)[0])
