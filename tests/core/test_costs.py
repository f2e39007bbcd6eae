"""The calculators: their laws against small independent models, then the seed pages' numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv import aggregation_costs as shared
from zkv import costs

MB = 10**6
TEN_GBIT_PER_S = 1e10
SIXTEEN_GBYTE_PER_S = 16e9 * 8
LOADS = {"p1": 40, "p2": 25, "p3": 10, "p4": 8, "p5": 6, "p6": 5, "p7": 3, "p8": 3}
"""The synchronisation page's loads, named in the order in which it lists them."""

times = st.floats(1e-6, 1e6)
sizes = st.integers(0, 10**12)
links = st.floats(1e3, 1e12)
few = st.integers(1, 12)


# --- laws: payloads and links ----------------------------------------------------------------


@given(entries=st.integers(1, 10**12), percent=st.integers(1, 100))
def test_kept_entries_are_the_least_whole_number_that_is_enough(entries: int, percent: int) -> None:
    kept = costs.kept_entries(entries, percent / 100)
    assert kept == math.ceil(Fraction(percent, 100) * entries)


@given(entries=st.integers(1, 10**9), bits=st.integers(1, 64), scale=st.integers(0, 100))
def test_a_dense_payload_is_its_bits_in_whole_bytes_and_scales(
    entries: int, bits: int, scale: int
) -> None:
    size = costs.payload_bytes(entries, bits, index_bits=64, scale_bytes=scale)
    assert 0 <= 8 * (size - scale) - entries * bits < 8
    assert costs.payload_bytes(entries, bits + 1, scale_bytes=scale) >= size
    assert costs.payload_bytes(entries + 1, bits, scale_bytes=scale) >= size


@given(
    entries=st.integers(1, 10**9),
    densities=st.tuples(st.floats(1e-9, 0.999), st.floats(1e-9, 0.999)).map(sorted),
    index=st.integers(0, 64),
)
def test_a_sparse_payload_grows_with_density_and_has_a_position_for_each_value(
    entries: int, densities: list[float], index: int
) -> None:
    less, more = (costs.payload_bytes(entries, 32, density, index) for density in densities)
    assert less <= more
    kept = costs.kept_entries(entries, densities[0])
    assert less == 4 * kept + -(-kept * index // 8)


@given(symbols=st.integers(1, 300), packed=st.integers(1, 20))
def test_packed_symbols_fit_and_are_not_below_the_bound(symbols: int, packed: int) -> None:
    bits = costs.packed_bits(symbols, packed)
    room = round(bits * packed)
    assert room % 8 == 0
    assert symbols**packed <= 2**room
    assert room < 8 or symbols**packed > 2 ** (room - 8)
    assert 2 ** costs.fixed_width_bits(symbols) >= symbols
    assert symbols == 1 or 2 ** (costs.fixed_width_bits(symbols) - 1) < symbols


@given(size=sizes, workers=few, link=links)
def test_an_ingress_is_as_slow_as_its_workers_are_many(
    size: int, workers: int, link: float
) -> None:
    one = costs.transfer_s(size, link)
    assert costs.shared_ingress_s(size, workers, link) == pytest.approx(workers * one)
    assert costs.shared_ingress_s(size, workers, link, servers=workers) == pytest.approx(one)
    assert costs.transfer_s(size, 2 * link) == pytest.approx(one / 2)


# --- laws: overlap and waiting ---------------------------------------------------------------


@given(c=times, m=times)
def test_overlap_hides_the_shorter_of_the_two(c: float, m: float) -> None:
    both = costs.overlapped_s(c, m)
    assert both + min(c, m) == pytest.approx(costs.serial_s(c, m))
    assert c + costs.exposed_s(c, m) == pytest.approx(both)
    assert 1 < costs.overlap_speed_up(c, m) <= 2
    assert costs.overlap_speed_up(c, m) == costs.overlap_speed_up(m, c)
    assert costs.overlap_speed_up(c, c) == 2


def pipelined(compute_s: float, communication_s: float, chunks: int) -> float:
    """Chunk after chunk: it is computed, then waits for the link, then is sent."""
    computed = sent = 0.0
    for _ in range(chunks):
        computed += compute_s / chunks
        sent = max(computed, sent) + communication_s / chunks
    return sent


@given(c=times, m=times, chunks=st.integers(1, 60))
def test_a_finite_pipeline_takes_what_its_events_take(c: float, m: float, chunks: int) -> None:
    took = costs.pipelined_s(c, m, chunks)
    assert took == pytest.approx(pipelined(c, m, chunks))
    assert took == pytest.approx(costs.pipelined_s(m, c, chunks))
    assert costs.pipelined_s(c, m, chunks + 1) < took * (1 + 1e-12)
    # Filling and draining cost one chunk of the faster stage.
    assert took - costs.overlapped_s(c, m) == pytest.approx(min(c, m) / chunks, rel=1e-6, abs=1e-9)


counts = st.integers(1, 80).flatmap(lambda k: st.tuples(st.integers(1, k), st.just(k)))


@given(some=counts)
def test_the_expected_wait_is_the_sum_of_the_gaps_between_finishes(some: tuple[int, int]) -> None:
    threshold, workers = some
    # While j workers are busy the next of them is done after 1/j of the mean.
    gaps = sum((Fraction(1, busy) for busy in range(workers, workers - threshold, -1)), Fraction())
    exact = costs.first_workers_s(threshold, workers, 2.0)
    assert exact == pytest.approx(float(2 * gaps), rel=1e-14)
    if threshold > 1:
        assert costs.first_workers_s(threshold - 1, workers, 2.0) < exact
    assert costs.first_workers_s(threshold, workers + 1, 2.0) < exact
    if threshold < workers:
        over = costs.first_workers_large_s(threshold, workers, 2.0) - exact
        rest = workers - threshold
        assert 0 < over < 2 * threshold / (workers * rest)


@given(waits=st.lists(times, min_size=1, max_size=9), factor=st.floats(0.01, 100))
def test_bsp_utilisation_is_a_share_without_a_unit(waits: list[float], factor: float) -> None:
    share = costs.bsp_utilisation(waits)
    assert 1 / len(waits) <= share * (1 + 1e-12)
    assert share <= 1 + 1e-12
    assert costs.bsp_utilisation([factor * wait for wait in waits]) == pytest.approx(share)
    assert costs.bsp_utilisation([waits[0]] * 3) == pytest.approx(1)


@given(workers=few, more=st.integers(0, 100))
def test_a_batch_is_shared_out_evenly(workers: int, more: int) -> None:
    shares = costs.batch_sizes(workers + more, workers)
    assert sum(shares) == workers + more
    assert len(shares) == workers
    assert shares[0] - shares[-1] in (0, 1)
    assert list(shares) == sorted(shares, reverse=True)


@given(st.lists(st.lists(st.integers(-1000, 1000), min_size=1, max_size=9), min_size=1, max_size=6))
def test_the_mean_of_batches_is_the_mean_of_all_their_samples(batches: list[list[int]]) -> None:
    found = costs.mean_of_batches([sum(b) / len(b) for b in batches], [len(b) for b in batches])
    samples = [sample for batch in batches for sample in batch]
    assert found == pytest.approx(sum(samples) / len(samples), abs=1e-9)


# --- laws: many devices and servers ----------------------------------------------------------


def ring_run(nodes: int) -> tuple[int, list[int], list[list[int]]]:
    """Run a ring on N chunks of size 1: rounds, chunks that each node sent, and the final sums."""
    held = [[10**node] * nodes for node in range(nodes)]
    sent = [0] * nodes
    rounds = 0
    for phase in ("reduce", "gather"):
        for turn in range(nodes - 1):
            moves = []
            for node in range(nodes):
                chunk = (node - turn + (phase == "gather")) % nodes
                moves.append(((node + 1) % nodes, chunk, held[node][chunk]))
                sent[node] += 1
            for to, chunk, value in moves:
                held[to][chunk] = value + (held[to][chunk] if phase == "reduce" else 0)
            rounds += 1
    return rounds, sent, held


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 8])
def test_a_ring_that_runs_sends_what_is_calculated(nodes: int) -> None:
    rounds, sent, held = ring_run(nodes)
    assert held == [[sum(10**node for node in range(nodes))] * nodes] * nodes
    assert rounds == shared.ring_rounds(nodes)
    assert sent == [shared.ring_sent_bytes(nodes, nodes)] * nodes


@given(size=sizes, nodes=few, link=links)
def test_ring_and_parts_take_the_same_and_the_cpu_takes_longest(
    size: int, nodes: int, link: float
) -> None:
    ring = shared.ring_all_reduce_s(size, nodes, link)
    half = shared.ring_all_reduce_s(size, nodes, link, reduce_only=True)
    device = shared.aggregate_on_device_s(size, nodes, link)
    assert shared.aggregate_in_parts_s(size, nodes, link) == pytest.approx(ring)
    assert ring == pytest.approx(2 * half) == pytest.approx(device / nodes)
    cpu = shared.aggregate_on_cpu_s(size, nodes, link)
    assert cpu - device == pytest.approx(2 * costs.transfer_s(size, link))
    assert shared.ring_sent_bytes(size, nodes) <= 2 * size
    assert shared.ring_chunk_bytes(size, nodes) * nodes == pytest.approx(size)


@st.composite
def placements(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, int], int]:
    servers = draw(st.integers(1, 5))
    loads = draw(st.dictionaries(st.text(max_size=3), st.integers(0, 100), min_size=1, max_size=9))
    assignment = {block: draw(st.integers(0, servers - 1)) for block in loads}
    return loads, assignment, servers


@given(placed=placements(), data=st.data())
def test_imbalance_is_busiest_over_mean_whatever_the_servers_are_called(
    placed: tuple[dict[str, int], dict[str, int], int], data: st.DataObject
) -> None:
    loads, assignment, servers = placed
    held = shared.server_loads(loads, assignment, servers)
    assert sum(held) == sum(loads.values())
    ratio = shared.load_imbalance(loads, assignment, servers)
    if sum(held):
        assert ratio == pytest.approx(max(held) / (sum(held) / servers))
    least = shared.load_imbalance_min(loads, servers)
    assert 1 <= least <= ratio * (1 + 1e-12)
    assert ratio <= servers * (1 + 1e-12)
    called = data.draw(st.permutations(range(servers)))
    renamed = {block: called[server] for block, server in assignment.items()}
    assert shared.load_imbalance(loads, renamed, servers) == ratio
    request = data.draw(st.lists(st.sampled_from(sorted(loads)), max_size=6))
    found = shared.fan_out(assignment, request)
    assert found == shared.fan_out(renamed, reversed(request))
    assert min(1, len(request)) <= found <= min(servers, len(set(request)))
    together = dict.fromkeys(loads, 0)
    assert shared.fan_out(together, request) == min(1, len(request))


# --- the seed pages' numbers -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "sparse", "megabytes", "one_ms", "eight_ms", "ratio"),
    [
        (32, {}, 400, 320, 2560, 1),
        (16, {}, 200, 160, 1280, 2),
        (8, {}, 100, 80, 640, 4),
        (2, {}, 25, 20, 160, 16),
        (1, {}, 12.5, 10, 80, 32),
        (1.6, {}, 20, 16, 128, 20),
        (32, {"density": 0.01}, 8, 6.4, 51.2, 50),
        (32, {"density": 0.01, "index_bits": 64}, 12, 9.6, 76.8, 100 / 3),
        (32, {"density": 0.01, "index_bits": 0}, 4, 3.2, 25.6, 100),
    ],
    ids=["fp32", "fp16", "int8", "ternary", "sign", "5 per byte", "1 %", "1 % wide", "no index"],
)
def test_a_hundred_million_entries_on_10_gbit_per_s(
    bits: float,
    sparse: dict[str, Any],
    megabytes: float,
    one_ms: float,
    eight_ms: float,
    ratio: float,
) -> None:
    size = costs.payload_bytes(100_000_000, bits, **sparse)
    assert size == megabytes * MB
    assert costs.transfer_s(size, TEN_GBIT_PER_S) == pytest.approx(one_ms / 1000)
    assert costs.shared_ingress_s(size, 8, TEN_GBIT_PER_S) == pytest.approx(eight_ms / 1000)
    assert costs.float32_ratio(100_000_000, size) == pytest.approx(ratio)


def test_a_scale_counts_and_25_percent_of_8_entries_are_2() -> None:
    assert costs.payload_bytes(100, 1, scale_bytes=4) == 17
    assert costs.kept_entries(8, 0.25) == 2
    assert costs.payload_bytes(8, 32, 0.25) == 16
    assert costs.kept_entries(8, 0.001) == 1
    assert costs.kept_entries(100, 0.07) == 7  # ceil(0.07 * 100) is 8 in binary


def test_ternary_values_need_2_bits_alone_and_1_6_in_fives() -> None:
    assert costs.fixed_width_bits(3) == 2
    assert costs.fixed_width_bits(100_000_000) == 27
    assert costs.packed_bits(3, 5) == 1.6
    assert costs.packed_bits(3, 4) == 2
    assert math.log2(3) < costs.packed_bits(3, 5)


def test_60_ms_and_40_ms_overlap_to_60_ms() -> None:
    assert costs.serial_s(0.06, 0.04) == pytest.approx(0.1)
    assert costs.overlapped_s(0.06, 0.04) == 0.06
    assert costs.overlap_speed_up(0.06, 0.04) == pytest.approx(5 / 3)


@pytest.mark.parametrize(
    ("c", "m", "serial", "overlapped", "exposed"),
    [
        (60, 40, 100, 60, 0),
        (40, 60, 100, 60, 20),
        (50, 50, 100, 50, 0),
        (60, 0, 60, 60, 0),
        (100, 10, 110, 100, 0),
        (0, 0, 0, 0, 0),
    ],
)
def test_more_overlaps(
    c: float, m: float, serial: float, overlapped: float, exposed: float
) -> None:
    assert costs.serial_s(c, m) == serial
    assert costs.overlapped_s(c, m) == overlapped
    assert costs.exposed_s(c, m) == exposed
    assert costs.overlap_speed_up(c, m) == (serial / overlapped if serial else 1)


@pytest.mark.parametrize(("n", "took"), [(1, 100), (2, 80), (4, 70), (8, 65), (60, 60 + 2 / 3)])
def test_60_and_40_in_n_chunks(n: int, took: float) -> None:
    assert costs.pipelined_s(60, 40, n) == pytest.approx(took)


@pytest.mark.parametrize(
    ("threshold", "workers", "means"),
    [
        (2, 3, 0.8333333333333334),
        (6, 8, 1.2178571428571427),
        (32, 64, 0.6853957082692489),
        (48, 64, 1.3631619104767758),
        (56, 64, 2.0260337608486263),
        (60, 64, 2.660557570372436),
        (63, 64, 3.743890903705769),
        (64, 64, 4.743890903705769),
    ],
)
def test_the_wait_for_k_of_exponential_workers(threshold: int, workers: int, means: float) -> None:
    assert costs.first_workers_s(threshold, workers, 1.0) == pytest.approx(means, rel=1e-14)
    assert costs.first_workers_s(threshold, workers, 0.15) == pytest.approx(0.15 * means)


def test_ln_4_is_the_limit_for_many_workers_and_not_the_value_for_64() -> None:
    limit = costs.first_workers_large_s(48, 64, 1.0)
    assert limit == pytest.approx(math.log(4), rel=1e-15)
    exact = costs.first_workers_s(48, 64, 1.0)
    assert limit / exact == pytest.approx(1.017, abs=5e-4)
    assert costs.first_workers_s(750_000, 1_000_000, 1.0) == pytest.approx(limit, rel=2e-6)


def test_workers_of_2_5_and_7_are_busy_for_two_thirds_under_bsp() -> None:
    assert costs.bsp_utilisation([2, 5, 7]) == pytest.approx(14 / 21)


def test_160_mb_on_4_devices_take_60_80_and_15_ms() -> None:
    given_sizes = (160 * MB, 4, SIXTEEN_GBYTE_PER_S)
    assert shared.aggregate_on_device_s(*given_sizes) == pytest.approx(0.060)
    assert shared.aggregate_on_cpu_s(*given_sizes) == pytest.approx(0.080)
    assert shared.aggregate_in_parts_s(*given_sizes) == pytest.approx(0.015)
    assert shared.ring_all_reduce_s(*given_sizes) == pytest.approx(0.015)
    assert shared.ring_sent_bytes(160 * MB, 4) == 240 * MB
    assert shared.ring_chunk_bytes(160 * MB, 4) == 40 * MB


@pytest.mark.parametrize(
    ("devices", "device_ms", "cpu_ms", "parts_ms"), [(2, 20, 40, 10), (8, 140, 160, 17.5)]
)
def test_160_mb_on_more_and_fewer_devices(
    devices: int, device_ms: float, cpu_ms: float, parts_ms: float
) -> None:
    given_sizes = (160 * MB, devices, SIXTEEN_GBYTE_PER_S)
    assert shared.aggregate_on_device_s(*given_sizes) == pytest.approx(device_ms / 1000)
    assert shared.aggregate_on_cpu_s(*given_sizes) == pytest.approx(cpu_ms / 1000)
    assert shared.aggregate_in_parts_s(*given_sizes) == pytest.approx(parts_ms / 1000)


@pytest.mark.parametrize(
    ("nodes", "factor"),
    [
        (1, 0),
        (2, 1),
        (3, 4 / 3),
        (4, 1.5),
        (8, 1.75),
        (16, 1.875),
        (64, 1.96875),
        (1024, 1.998046875),
    ],
)
def test_a_ring_sends_up_to_twice_the_size(nodes: int, factor: float) -> None:
    assert shared.ring_sent_bytes(160 * MB, nodes) == pytest.approx(factor * 160 * MB)
    assert shared.ring_rounds(nodes) == 2 * (nodes - 1)
    assert shared.ring_rounds(nodes, reduce_only=True) == nodes - 1
    half = shared.ring_sent_bytes(160 * MB, nodes, reduce_only=True)
    assert half == pytest.approx(factor / 2 * 160 * MB)


def test_a_central_server_takes_in_every_workers_gradient() -> None:
    assert costs.server_bytes(400 * MB, 8) == 3200 * MB
    assert costs.server_bytes(400 * MB, 8, servers=4) == 800 * MB


def test_128_samples_on_4_devices_are_32_each() -> None:
    assert costs.batch_sizes(128, 4) == (32, 32, 32, 32)
    assert costs.batch_sizes(128, 3) == (43, 43, 42)


def test_unequal_batches_are_weighted_by_their_samples() -> None:
    found = costs.mean_of_batches([1, 2, 3, 8], [32, 32, 32, 16])
    assert found == pytest.approx(2.857142857142857, rel=1e-15)
    assert costs.mean_of_batches([1, 2, 3, 8], [32] * 4) == 3.5


def test_loads_by_turns_have_a_busiest_server_of_46() -> None:
    by_turns = shared.round_robin(LOADS, 4)
    assert shared.server_loads(LOADS, by_turns, 4) == [46, 30, 13, 11]
    assert shared.load_imbalance(LOADS, by_turns, 4) == 1.84
    assert shared.fan_out(by_turns, ["p1", "p5", "p7"]) == 2


def test_names_that_fit_every_sentence_of_the_page_have_a_fan_out_of_3() -> None:
    loads = {"p1": 40, "p2": 6, "p3": 25, "p4": 5, "p5": 10, "p6": 3, "p7": 8, "p8": 3}
    pairs = {block: at // 2 for at, block in enumerate(loads)}
    assert shared.server_loads(loads, pairs, 4) == [46, 30, 13, 11]
    assert shared.load_imbalance(loads, pairs, 4) == 1.84
    assert shared.fan_out(pairs, ["p1", "p5", "p7"]) == 3
    assert best_together(loads) == pytest.approx(2.32)


def test_the_page_contradicts_itself_if_names_follow_the_listed_loads() -> None:
    found = {
        shared.fan_out(placed, ["p1", "p5", "p7"])
        for placed in pairings()
        if shared.load_imbalance(LOADS, placed, 4) == 1.84
    }
    assert found == {2}


def pairings() -> list[dict[str, int]]:
    """All 105 ways to give four servers two blocks each, servers without names."""
    names = list(LOADS)
    ways: list[list[tuple[str, str]]] = [[]]
    for _ in range(4):
        grown = []
        for way in ways:
            left = [name for name in names if not any(name in pair for pair in way)]
            grown += [[*way, (left[0], other)] for other in left[1:]]
        ways = grown
    return [{name: at for at, pair in enumerate(way) for name in pair} for way in ways]


def best_together(loads: dict[str, int]) -> float:
    """The least imbalance with p1, p5 and p7 on one server (server 0, without loss)."""
    others = [name for name in loads if name not in ("p1", "p5", "p7")]
    placed = dict.fromkeys(("p1", "p5", "p7"), 0)
    return min(
        shared.load_imbalance(loads, placed | dict(zip(others, servers, strict=True)), 4)
        for servers in product(range(4), repeat=5)
    )


def test_the_best_placements_of_the_listed_loads() -> None:
    ratios = [shared.load_imbalance(LOADS, placed, 4) for placed in pairings()]
    assert len(ratios) == 105
    assert min(ratios) == 1.72
    assert ratios.count(1.72) == 30
    contiguous = {name: at // 2 for at, name in enumerate(LOADS)}
    assert shared.server_loads(LOADS, contiguous, 4) == [65, 18, 11, 6]
    assert shared.load_imbalance(LOADS, contiguous, 4) == 2.6
    largest_first = dict(zip(LOADS, (0, 1, 2, 3, 3, 2, 3, 2), strict=True))
    assert shared.server_loads(LOADS, largest_first, 4) == [40, 25, 18, 17]
    assert shared.load_imbalance(LOADS, largest_first, 4) == 1.6
    assert shared.load_imbalance_min(LOADS, 4) == 1.6
    assert best_together(LOADS) == 1.96


# --- bad input -------------------------------------------------------------------------------

NAN = math.nan
ONE = {"p1": 1.0}

Call = Callable[[], object]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: costs.payload_bytes(0, 32), "entries must be from 1 .* given 0"),
        (lambda: costs.payload_bytes(8, 0), "bits_per_value must be .* given 0"),
        (lambda: costs.payload_bytes(8, 32, 0.0), "density must be .* to 1, given 0.0"),
        (lambda: costs.payload_bytes(8, 32, 1.5), "density must be .* given 1.5"),
        (lambda: costs.payload_bytes(8, 32, NAN), "density must be .* given nan"),
        (lambda: costs.payload_bytes(8, 32, 0.5, -1), "index_bits must be .* given -1"),
        (lambda: costs.payload_bytes(8, 32, scale_bytes=-4), "scale_bytes must be .* given -4"),
        (lambda: costs.transfer_s(-1, 1), "size_bytes must be from 0 .* given -1"),
        (lambda: costs.transfer_s(1, 0), "bits_per_s must be .* given 0"),
        (lambda: costs.transfer_s(1, math.inf), "bits_per_s must be .* given inf"),
        (lambda: costs.shared_ingress_s(1, 0, 1), "workers must be from 1 .* given 0"),
        (lambda: costs.shared_ingress_s(1, 1, 1, 0), "servers must be from 1 .* given 0"),
        (lambda: costs.serial_s(-1, 0), "compute_s must be from 0 .* given -1"),
        (lambda: costs.overlapped_s(0, NAN), "communication_s must be .* given nan"),
        (lambda: costs.pipelined_s(1, 1, 0), "chunks must be from 1 .* given 0"),
        (lambda: costs.first_workers_s(5, 4, 1), "threshold .* from 1 to 4, given 5"),
        (lambda: costs.first_workers_s(0, 4, 1), "threshold .* from 1 to 4, given 0"),
        (lambda: costs.first_workers_s(1, 10**7, 1), "workers .* to 1,000,000, given 10000000"),
        (lambda: costs.first_workers_large_s(4, 4, 1), "4 of 4 workers: .* use the exact one"),
        (lambda: costs.bsp_utilisation([]), "compute_s .* given 0"),
        (lambda: costs.bsp_utilisation([1, 0]), "compute_s must be .* given 0"),
        (lambda: costs.batch_sizes(3, 4), "samples .* from 4 .* given 3"),
        (lambda: costs.mean_of_batches([1], [1, 2]), "pair up, given 1 and 2"),
        (lambda: costs.mean_of_batches([1], [0]), "samples must be from 1 .* given 0"),
        (lambda: costs.mean_of_batches([], []), "at least one"),
        (lambda: shared.aggregate_on_device_s(1, 0, 1), "devices must be from 1 .* given 0"),
        (lambda: shared.aggregate_on_cpu_s(1, 0, 1), "devices must be from 1 .* given 0"),
        (lambda: shared.aggregate_in_parts_s(1, 0, 1), "devices must be from 1 .* given 0"),
        (lambda: shared.ring_sent_bytes(1, 0), "nodes must be from 1 .* given 0"),
        (lambda: shared.ring_sent_bytes(-1, 2), "size_bytes must be .* given -1"),
        (lambda: shared.round_robin(ONE, 0), "servers must be from 1 .* given 0"),
        (lambda: shared.load_imbalance(ONE, {}, 2), "'p1' has no server; assigned: none"),
        (lambda: shared.load_imbalance({}, {"p1": 0}, 2), "'p1' has a server but no load"),
        (lambda: shared.server_loads(ONE, {"p1": 2}, 2), "server of block 'p1' .* 0 to 1, given 2"),
        (lambda: shared.server_loads(ONE, {"p1": -1}, 2), "server of block 'p1' .* given -1"),
        (lambda: shared.load_imbalance({"p1": -1}, {"p1": 0}, 1), "load of block 'p1' .* given -1"),
        (lambda: shared.fan_out({"p1": 0}, ["p2"]), "'p2' has no server; known: p1"),
    ],
)
def test_bad_input_is_named(call: Call, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()


def test_no_input_that_is_allowed_overflows() -> None:
    most = costs.HUGE
    assert math.isfinite(costs.transfer_s(most, costs.TINY))
    assert math.isfinite(shared.aggregate_on_cpu_s(most, int(most), costs.TINY))
    assert math.isfinite(shared.ring_all_reduce_s(1, int(most), costs.TINY))
    assert math.isfinite(costs.float32_ratio(int(most), costs.TINY))
    assert math.isfinite(costs.pipelined_s(most, most, int(most)))
    assert math.isfinite(costs.first_workers_large_s(1, 2, most))
