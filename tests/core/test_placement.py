"""Placement: the same on every machine, balanced, and the seed page's numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hash_seeds import printed
from hypothesis import given
from hypothesis import strategies as st
from strategies import Model, models

from zkv.dtypes import DTYPES
from zkv.layout import size_of, whole
from zkv.placement import (
    BLOCK_BYTES,
    BLOCK_BYTES_MAX,
    BLOCK_S,
    BLOCKS_FEW,
    BLOCKS_MANY,
    BUCKET_BYTES,
    FAST_S,
    NEAR_BYTES_PER_S,
    block_bytes_on,
    bucket_bytes_on,
    imbalance,
    plan,
)
from zkv.wire import BlockSpec, KeyEntry, KeySpec

LOADS = (40, 25, 10, 8, 6, 5, 3, 3)
"""The seed page's blocks, in its order."""


def entries(sizes: Sequence[int], dtype: str = "int8") -> list[KeyEntry]:
    return [KeyEntry(kid, KeySpec(f"k{kid}", dtype, (size,))) for kid, size in enumerate(sizes)]


def alike(entry: KeyEntry) -> object:
    return entry.spec.rule


def per_server(blocks: Sequence[BlockSpec], servers: int) -> list[int]:
    return [sum(b.size for b in blocks if b.server == server) for server in range(servers)]


# --- laws ------------------------------------------------------------------------------------


@given(model=models(absents=("zero", "out")))
def test_a_block_is_a_slice_of_one_key_or_a_bucket_of_whole_alike_ones(model: Model) -> None:
    specs = {entry.kid: entry.spec for entry in model.own}
    for block in model.blocks:
        assert block.segments
        kinds = {(specs[kid].dtype, specs[kid].absent) for kid in block.kids}
        assert len(kinds) == 1
        if len(block.segments) > 1:
            assert block.segments == [whole(kid, size_of(specs[kid])) for kid in block.kids]
    assert [block.bid for block in model.blocks] == list(range(len(model.blocks)))


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=20),
    servers=st.integers(1, 5),
    block_bytes=st.integers(1, 100),
    bucket_bytes=st.integers(0, 100),
)
def test_no_block_is_larger_than_allowed_and_lpt_holds_its_bound(
    sizes: list[int], servers: int, block_bytes: int, bucket_bytes: int
) -> None:
    blocks = plan(
        entries(sizes), servers, together=alike, block_bytes=block_bytes, bucket_bytes=bucket_bytes
    )
    largest = max(block.size for block in blocks)
    # A key that may share a bucket is never cut, whatever the size of a block.
    assert largest <= max(block_bytes, bucket_bytes)
    loads = per_server(blocks, servers)
    assert sum(loads) == sum(sizes)
    # Graham: whoever is busiest was the least loaded before its last block.
    assert max(loads) <= sum(sizes) / servers + largest


@given(small=st.lists(st.integers(1, 50), min_size=20, max_size=60), servers=st.integers(2, 4))
def test_a_model_of_nothing_but_small_keys_is_spread(small: list[int], servers: int) -> None:
    blocks = plan(entries(small), servers, together=alike)
    loads = per_server(blocks, servers)
    assert min(loads) > 0
    # A bucket takes no more than a server's share, so no server has more than two of them.
    assert max(loads) <= 2 * -(-sum(small) // servers)


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=9),
    load=st.lists(st.integers(0, 1000), min_size=3, max_size=3),
)
def test_what_servers_hold_already_counts(sizes: list[int], load: list[int]) -> None:
    blocks = plan(entries(sizes), 3, together=alike, bucket_bytes=0, load=load)
    after = [held + fresh for held, fresh in zip(load, per_server(blocks, 3), strict=True)]
    for server, fresh in enumerate(per_server(blocks, 3)):
        if fresh:
            assert after[server] <= max(sum(after) / 3, min(after) + max(sizes))


@given(model=models())
def test_the_plan_depends_on_its_arguments_alone(model: Model) -> None:
    copies = [
        KeyEntry(e.kid, KeySpec(*(getattr(e.spec, f) for f in e.spec.__struct_fields__)))
        for e in model.entries
    ]
    one, two = (
        plan(given_entries, model.servers, together=lambda e: (e.spec.absent,), bid_first=7)
        for given_entries in (model.entries, copies)
    )
    assert one == two
    assert [block.bid for block in one] == list(range(7, 7 + len(one)))


SCRIPT = """
import json
from zkv.placement import plan
from zkv.wire import KeyEntry, KeySpec
names = [f"layer{n}.{part}" for n in range(40) for part in ("weight", "bias", "norm")]
entries = [
    KeyEntry(kid, KeySpec(name, ("float32", "float16")[kid % 2], (kid * 977 % 40_000,)))
    for kid, name in enumerate(names)
]
blocks = plan(entries, 3, together=lambda e: (e.spec.rule, e.spec.key[-4:]), block_bytes=30_000)
rows = [(b.bid, b.server, s.kid, s.start, s.stop) for b in blocks for s in b.segments]
print(json.dumps(rows))
"""


def test_the_plan_is_the_same_in_every_process_whatever_its_hash_seed() -> None:
    assert len(json.loads(printed(SCRIPT))) > 20


# --- the seed page's numbers -----------------------------------------------------------------


def test_the_seed_pages_loads_on_four_servers_have_a_busiest_server_of_40() -> None:
    blocks = plan(entries(LOADS), 4, together=alike, bucket_bytes=0)
    loads = per_server(blocks, 4)
    assert sorted(loads) == [17, 18, 25, 40]
    assert imbalance(blocks, 4, lambda block: block.size) == 1.6
    # LPT in full: 40 / 25 / 10+5+3 / 8+6+3.
    assert [block.server for block in blocks] == [0, 1, 2, 3, 3, 2, 3, 2]


def test_a_busiest_server_of_46_is_1_84_times_the_mean() -> None:
    # 40 + 6 / 25 / 10 + 8 / 5 + 3 + 3: the page's busiest server has 46 of 100.
    servers = (0, 1, 2, 2, 0, 3, 3, 3)
    blocks = [
        BlockSpec(bid, server, [whole(bid, size)])
        for bid, (size, server) in enumerate(zip(LOADS, servers, strict=True))
    ]
    assert max(per_server(blocks, 4)) == 46
    assert imbalance(blocks, 4, lambda block: block.size) == 1.84


def test_the_imbalance_of_contiguous_pairs_and_of_nothing() -> None:
    pairs = [BlockSpec(bid, bid // 2, [whole(bid, size)]) for bid, size in enumerate(LOADS)]
    assert imbalance(pairs, 4, lambda block: block.size) == 2.6
    assert imbalance([], 4, lambda block: block.size) == 1.0
    assert imbalance(pairs, 4, lambda block: 0.0) == 1.0


def test_a_small_model_uses_both_servers() -> None:
    # 64 x 32 + 32 + 32 x 10 + 10 floats: all four keys would fit into one bucket.
    sizes = (64 * 32, 32, 32 * 10, 10)
    assert sum(sizes) * 4 < BUCKET_BYTES
    blocks = plan(entries(sizes, "float32"), 2, together=alike)
    assert {block.server for block in blocks} == {0, 1}


def test_a_large_key_is_cut_into_blocks_of_1_mib_on_all_servers() -> None:
    size = 5 * BLOCK_BYTES // 4 + 100
    blocks = plan(entries([size], "float32"), 3, together=alike)
    assert [block.size * DTYPES["float32"].itemsize for block in blocks] == [BLOCK_BYTES] * 5 + [
        400
    ]
    assert {block.server for block in blocks} == {0, 1, 2}


def test_other_names_of_a_key_take_no_place() -> None:
    tied = KeyEntry(0, KeySpec("tied", "int8", (9,), same_as="k0"))
    assert plan([*entries([9]), tied], 1, together=alike) == plan(entries([9]), 1, together=alike)


@given(rate=st.floats(1.0, 1e12), total=st.integers(1, 2**40))
def test_a_block_is_a_power_of_two_that_the_link_carries_in_time_if_that_is_not_too_small(
    rate: float, total: int
) -> None:
    size = block_bytes_on(rate, total)
    assert size.bit_count() == 1
    assert BUCKET_BYTES <= size <= BLOCK_BYTES_MAX
    assert size >= BLOCK_BYTES or total / size <= BLOCKS_MANY
    # Larger ones only on links that hardly notice, and if many remain.
    assert size <= BLOCK_BYTES or size <= min(rate * FAST_S, total / BLOCKS_FEW)
    in_time = size <= rate * BLOCK_S
    smaller_would_not_do = size // 2 < max(BUCKET_BYTES, total / BLOCKS_MANY)
    assert in_time or smaller_would_not_do
    # It is the largest of those.
    assert size >= BLOCK_BYTES or 2 * size > rate * BLOCK_S


def test_a_link_of_which_nothing_is_known_gets_blocks_of_1_mib() -> None:
    assert block_bytes_on(0.0, 10**8) == BLOCK_BYTES == 1024 * 1024


@given(rate=st.floats(0.0, 1e12), total=st.integers(1, 2**40))
def test_keys_share_blocks_as_long_as_enough_blocks_are_left(rate: float, total: int) -> None:
    size = bucket_bytes_on(rate, total)
    assert BUCKET_BYTES <= size <= max(BUCKET_BYTES, block_bytes_on(rate, total))
    if rate < NEAR_BYTES_PER_S:
        assert size == BUCKET_BYTES
    assert size == BUCKET_BYTES or size <= total / BLOCKS_FEW


@given(
    sizes=st.lists(st.integers(1, 12_000_000), min_size=1, max_size=60),
    servers=st.integers(1, 3),
)
def test_within_a_machine_few_blocks_hold_all_keys(sizes: list[int], servers: int) -> None:
    """At most twice as many as if all were full, and some for what is large."""
    total = sum(sizes)
    bucket, most = (of(NEAR_BYTES_PER_S, total) for of in (bucket_bytes_on, block_bytes_on))
    blocks = plan(entries(sizes), servers, together=alike, block_bytes=most, bucket_bytes=bucket)
    small = [size for size in sizes if size <= bucket]
    room = min(most, max(1, -(-sum(small) // servers)))
    large = sum(-(-size // most) for size in sizes if size > bucket)
    assert len(blocks) <= large + 2 * sum(small) / room + 1
    assert sum(block.size for block in blocks) == total


def test_a_key_that_fills_a_bucket_leaves_the_one_before_it_open() -> None:
    blocks = plan(entries([2, 10, 3]), 1, together=alike, block_bytes=10, bucket_bytes=10)
    assert [block.kids for block in blocks] == [[0, 2], [1]]


def test_within_a_machine_a_large_model_has_blocks_of_8_mib() -> None:
    assert block_bytes_on(NEAR_BYTES_PER_S, 10**8) == BLOCK_BYTES_MAX == 8 * 1024 * 1024
    assert block_bytes_on(NEAR_BYTES_PER_S, 10**7) == BLOCK_BYTES
