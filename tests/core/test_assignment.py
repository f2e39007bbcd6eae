"""Which server a block goes to: laws of every placement, and the seed page's numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import pytest
from hash_seeds import printed
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import Model, models

from zkv.assignment import assign, key_loads, shares_of
from zkv.dtypes import DTYPES
from zkv.errors import ConfigError
from zkv.fitting import Piece, Share
from zkv.hash_ring import Ring, name_of
from zkv.layout import size_of, whole
from zkv.placement import imbalance, plan
from zkv.placements import ByHash, ByLoad, BySize, Caps, Placement, placement
from zkv.wire import BlockSpec, KeyEntry, KeySpec

LOADS = {f"p{at}": load for at, load in enumerate((40, 25, 10, 8, 6, 5, 3, 3), start=1)}
"""The seed page's blocks, in its order."""


def pieces(loads: dict[str, int]) -> list[Piece]:
    return [Piece(key, load, load) for key, load in loads.items()]


def named(sizes: Sequence[int]) -> list[Piece]:
    return pieces({f"k{at}": size for at, size in enumerate(sizes)})


def loads_of(blocks: Sequence[Piece], chosen: Sequence[int], servers: int) -> list[float]:
    return [share.load for share in shares_of(blocks, chosen, servers)]


def ways(count: int, servers: int) -> Iterator[tuple[int, ...]]:
    return product(range(servers), repeat=count)


def within(caps: Caps, blocks: Sequence[Piece], chosen: Sequence[int], servers: int) -> bool:
    return all(
        (caps.blocks is None or share.blocks <= caps.blocks)
        and (caps.nbytes is None or share.nbytes <= caps.nbytes)
        and (caps.load is None or share.load <= caps.load)
        for share in shares_of(blocks, chosen, servers)
    )


sizes = st.lists(st.integers(0, 30), min_size=1, max_size=7)
rules = st.sampled_from([BySize(), ByHash(4), ByHash(), ByLoad()])
caps = st.builds(
    Caps,
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 60),
    st.none() | st.integers(1, 60).map(float),
)

# --- laws ------------------------------------------------------------------------------------


@given(model=models(), rule=rules, servers=st.integers(1, 5), data=st.data())
def test_every_element_of_every_key_is_in_one_block_on_one_server_that_there_is(
    model: Model, rule: BySize | ByHash | ByLoad, servers: int, data: st.DataObject
) -> None:
    pattern = data.draw(st.sampled_from(["*", "[a-m]*", "?", "no such"]))
    value = Placement(rule, ((pattern, str(servers - 1)),), ((pattern, "*1*"),))
    blocks = plan(model.entries, servers, together=lambda e: None, block_bytes=16, placement=value)
    assert {block.server for block in blocks} <= set(range(servers))
    found = sorted((one.kid, one.start, one.stop) for block in blocks for one in block.segments)
    for entry in model.own:
        ends = [(start, stop) for kid, start, stop in found if kid == entry.kid]
        assert ends[0][0] == 0
        assert ends[-1][1] == size_of(entry.spec)
        assert all(one[1] == other[0] for one, other in pairwise(ends))
    assert [block.bid for block in blocks] == list(range(len(blocks)))


@given(sizes=sizes, rule=rules, limits=caps, servers=st.integers(1, 3))
def test_caps_hold_and_an_error_means_that_nothing_holds_them(
    sizes: list[int], rule: BySize | ByHash | ByLoad, limits: Caps, servers: int
) -> None:
    blocks = named(sizes)
    value = Placement(rule, caps=limits)
    try:
        chosen = assign(blocks, servers, value)
    except ConfigError as error:
        assert value.text in str(error)  # noqa: PT017 - both outcomes are right
        assert "key 'k" in str(error)  # noqa: PT017
        assert not any(within(limits, blocks, way, servers) for way in ways(len(blocks), servers))
    else:
        assert within(limits, blocks, chosen, servers)


@given(
    sizes=sizes, limit=st.integers(1, 60), held=st.lists(st.integers(0, 40), min_size=2, max_size=2)
)
def test_what_is_held_already_counts_for_caps(
    sizes: list[int], limit: int, held: list[int]
) -> None:
    blocks = named(sizes)
    shares = [Share(1, nbytes, nbytes) for nbytes in held]
    try:
        chosen = assign(blocks, 2, Placement(caps=Caps(nbytes=limit)), held=shares)
    except ConfigError:
        chosen = []
    assert shares == [Share(1, nbytes, nbytes) for nbytes in held]
    for server, share in enumerate(shares_of(blocks, chosen, 2) if chosen else ()):
        assert share.nbytes == 0 or share.nbytes + held[server] <= limit


@given(sizes=sizes, servers=st.integers(1, 4), rule=st.sampled_from([BySize(), ByLoad()]))
def test_lpt_is_within_its_bound_of_the_best(
    sizes: list[int], servers: int, rule: BySize | ByLoad
) -> None:
    blocks = named(sizes)
    best = min(max(loads_of(blocks, way, servers)) for way in ways(len(blocks), servers))
    busiest = max(loads_of(blocks, assign(blocks, servers, Placement(rule)), servers))
    assert busiest * 3 * servers <= best * (4 * servers - 1)


@given(
    keys=st.lists(st.text(max_size=5) | st.integers(0, 2**63 - 1), min_size=1, unique=True),
    servers=st.integers(1, 8),
    virtual=st.integers(1, 64),
    leaver=st.integers(0, 7),
    together=st.sampled_from([(), (("1*", "*0*"),), (("?",), ("*",))]),
)
def test_a_server_more_or_less_moves_only_what_it_takes_or_leaves(
    keys: list[str | int],
    servers: int,
    virtual: int,
    leaver: int,
    together: tuple[tuple[str, ...], ...],
) -> None:
    value = Placement(ByHash(virtual), (), together)
    blocks = [Piece(key, 1, 1, start) for key in keys for start in (0, 100)]
    before = assign(blocks, servers, value)
    for one, other in zip(before, assign(blocks, servers + 1, value), strict=True):
        assert other in (one, servers)
    everybody = range(servers + 1)
    whole_ring = Ring(everybody, virtual)
    rest = Ring([server for server in everybody if server != leaver % (servers + 1)], virtual)
    for block in blocks:
        name = name_of(block.key, block.start)
        walk = [server for server in whole_ring.walk(name) if server != leaver % (servers + 1)]
        assert list(rest.walk(name)) == walk
        assert rest.owner(name) == walk[0]


@given(model=models(dtypes=("float32", "int8")), order=st.randoms(use_true_random=False))
def test_by_hash_a_key_is_where_it_is_whatever_the_others_and_their_order(
    model: Model, order: st.DataObject
) -> None:
    def where(entries: Sequence[KeyEntry], servers: int) -> dict[tuple[int, int], int]:
        blocks = plan(
            entries,
            servers,
            together=lambda e: None,
            block_bytes=16,
            bucket_bytes=8,
            placement=Placement(ByHash()),
        )
        return {(s.kid, s.start): block.server for block in blocks for s in block.segments}

    shuffled = list(model.own)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    all_ = where(model.own, 3)
    assert where(shuffled, 3) == all_
    assert where(shuffled[:1], 3).items() <= all_.items()
    grown = where(model.own, 4)
    assert grown.keys() == all_.keys()
    assert all(grown[at] in (server, 3) for at, server in all_.items())


@given(
    sizes=sizes, rule=rules, names=st.permutations(["amy", "bob", "eve"]), limit=st.none() | caps
)
def test_the_order_in_which_servers_came_decides_nothing_but_which_has_which_number(
    sizes: list[int], rule: BySize | ByHash | ByLoad, names: list[str], limit: Caps | None
) -> None:
    blocks = named(sizes)
    free = Placement(rule, caps=limit or Caps())
    try:
        assert assign(blocks, 3, free, names=names) == assign(blocks, 3, free)
    except ConfigError:
        assume(False)
    pinned = Placement(rule, (("k[02]", "eve"), ("k1", "0")), ())
    chosen = assign(blocks, 3, pinned, names=names)
    for block, server in zip(blocks, chosen, strict=True):
        if block.key in ("k0", "k2"):
            assert names[server] == "eve"
        elif block.key == "k1":
            assert server == 0


@given(model=models(), servers=st.integers(1, 4), block_bytes=st.sampled_from([3, 16, 50, 200]))
def test_by_load_is_by_size_where_loads_are_the_bytes(
    model: Model, servers: int, block_bytes: int
) -> None:
    def blocks(rule: BySize | ByLoad, loads: dict[int, float] | None) -> list[BlockSpec]:
        return plan(
            model.entries,
            servers,
            together=lambda e: e.spec.absent,
            block_bytes=block_bytes,
            bucket_bytes=20,
            placement=Placement(rule),
            loads=loads,
        )

    nbytes = {e.kid: float(size_of(e.spec) * DTYPES[e.spec.dtype].itemsize) for e in model.own}
    assert blocks(ByLoad(), nbytes) == blocks(ByLoad(), None) == blocks(BySize(), None)


@given(
    loads=st.dictionaries(
        st.sampled_from(["a1", "a2", "b1", "b2", "c"]), st.integers(0, 50), min_size=1
    ),
    given_=st.dictionaries(st.sampled_from(["a1", "b2", "c"]), st.integers(0, 9).map(float)),
)
def test_a_key_without_a_load_counts_by_its_bytes_in_the_unit_of_the_others(
    loads: dict[str, int], given_: dict[str, float]
) -> None:
    value = Placement(ByLoad(tuple(given_.items())))
    keys = list(loads)
    found = key_loads(value, [(kid, key, loads[key]) for kid, key in enumerate(keys)])
    measured = [kid for kid, key in enumerate(keys) if key in given_]
    for kid in measured:
        assert found[kid] == given_[keys[kid]]
    total = sum(found[kid] for kid in measured)
    nbytes = sum(loads[keys[kid]] for kid in measured)
    rate = total / nbytes if total and nbytes else 1.0
    for kid, key in enumerate(keys):
        if kid not in measured:
            assert found[kid] == pytest.approx(loads[key] * rate)


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=7),
    rule=rules,
    groups=st.lists(st.sets(st.integers(0, 6), min_size=1, max_size=4), max_size=3),
    servers=st.integers(1, 4),
    pin=st.none() | st.tuples(st.integers(0, 6), st.integers(0, 3)),
)
def test_what_is_to_stay_together_does_and_pins_hold(
    sizes: list[int],
    rule: BySize | ByHash | ByLoad,
    groups: list[set[int]],
    servers: int,
    pin: tuple[int, int] | None,
) -> None:
    blocks = named(sizes)
    pins = ((f"k{pin[0]}", str(pin[1] % servers)),) if pin is not None else ()
    together = tuple(tuple(f"k{at}" for at in sorted(group)) for group in groups)
    chosen = assign(blocks, servers, Placement(rule, pins, together))
    for group in groups:
        assert len({chosen[at] for at in group if at < len(sizes)}) <= 1
    if pin is not None and pin[0] < len(sizes):
        assert chosen[pin[0]] == pin[1] % servers


@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=6),
    rule=rules,
    limits=caps,
    servers=st.integers(2, 3),
    count=st.integers(2, 4),
)
def test_a_group_is_divided_only_if_caps_leave_no_other_way(
    sizes: list[int], rule: BySize | ByHash | ByLoad, limits: Caps, servers: int, count: int
) -> None:
    blocks = named(sizes)
    group = range(min(count, len(sizes)))
    value = Placement(rule, (), (tuple(f"k{at}" for at in group),), limits)
    try:
        chosen = assign(blocks, servers, value)
    except ConfigError:
        assert not any(within(limits, blocks, way, servers) for way in ways(len(blocks), servers))
        return
    assert within(limits, blocks, chosen, servers)
    if len({chosen[at] for at in group}) > 1:
        assert not any(
            within(limits, blocks, way, servers)
            for way in ways(len(blocks), servers)
            if len({way[at] for at in group}) == 1
        )


SCRIPT = """
from zkv.placement import plan
from zkv.placements import placement
from zkv.wire import KeyEntry, KeySpec
entries = [
    KeyEntry(kid, KeySpec(f"layer{kid}.w", "float32", (kid * 977 % 40_000,))) for kid in range(90)
]
for text in ("by_hash", "by_load:*1.w=40", "by_size;together=*2.w;pin:*3.w=1;bytes=4MB"):
    blocks = plan(entries, 3, together=lambda e: 0, block_bytes=30_000, placement=placement(text))
    print([(b.server, s.kid, s.start) for b in blocks for s in b.segments])
"""


def test_a_placement_is_the_same_in_every_process_whatever_its_hash_seed() -> None:
    """D02: no placement uses the built-in hash of a text."""
    assert len(printed(SCRIPT).splitlines()) == 3


# --- cases -----------------------------------------------------------------------------------


def test_a_ring_is_the_same_in_every_version() -> None:
    """Where these keys lie on five servers; another hash would move a model that is kept."""
    ring = Ring(range(5), 64)
    keys: list[str | int] = ["w", "b", "7", 7, "layer1.weight", "größe", 2**63 - 1]
    assert [ring.owner(name_of(key)) for key in keys] == [2, 1, 1, 0, 2, 1, 0]
    assert [ring.owner(name_of("w", start)) for start in (0, 1000, 2000)] == [2, 0, 1]


def test_one_server_more_takes_about_its_share() -> None:
    blocks = [Piece(f"layer{at}", 1, 1) for at in range(20_000)]
    for servers in (1, 4, 9):
        before = assign(blocks, servers, placement("by_hash"))
        after = assign(blocks, servers + 1, placement("by_hash"))
        moved = sum(one != other for one, other in zip(before, after, strict=True))
        # A share of the ring is even to about 1 / sqrt(64) of itself: half of it is four of those.
        assert 0.5 / (servers + 1) < moved / len(blocks) < 1.5 / (servers + 1)


def resnet50() -> list[int]:
    """Elements of the 161 tensors of ResNet-50, by formula (He et al., arXiv 1512.03385)."""
    sizes, width_in = [64 * 3 * 49, 64, 64], 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            sizes += [width_in * width, width, width, width * width * 9, width, width]
            sizes += [width * 4 * width, 4 * width, 4 * width]
            sizes += [width_in * 4 * width, 4 * width, 4 * width] if block == 0 else []
            width_in = 4 * width
    return [*sizes, width_in * 1000, 1000]


def bert() -> list[int]:
    """Elements of the tensors of an encoder like BERT's base model (Devlin et al., 2018)."""
    width, inner = 768, 3072
    layer = [width * width, width] * 4 + [width, width, width * inner, inner, inner * width, width]
    return [30_522 * width, 512 * width, 2 * width, width, width, *(12 * [*layer, width, width])]


@pytest.mark.parametrize("servers", [2, 4, 8])
@pytest.mark.parametrize(
    "elements", [resnet50(), bert(), [10**6, *([10**4] * 100)]], ids=["resnet", "bert", "half"]
)
def test_a_hash_loads_servers_unevenly_and_sizes_do_not(elements: list[int], servers: int) -> None:
    """Case D42: by hash some servers had far more bytes. The figure says so; by size it is even,
    also where one tensor has half of all bytes, as it is cut."""
    entries = [
        KeyEntry(kid, KeySpec(f"layer{kid}.weight", "float32", (size,)))
        for kid, size in enumerate(elements)
    ]

    def found(text: str) -> float:
        blocks = plan(entries, servers, together=lambda entry: None, placement=placement(text))
        return imbalance(blocks, servers, lambda block: 4.0 * block.size)

    assert found("by_size") <= 1.1
    assert found("by_hash") > found("by_size")
    assert max(found("by_hash:1"), found("by_hash")) > 1.1


def test_the_model_of_that_case_is_resnet_50() -> None:
    assert (len(resnet50()), sum(resnet50())) == (161, 25_557_032)


def test_the_seed_pages_loads() -> None:
    blocks = pieces(LOADS)
    free = assign(blocks, 4, placement("by_load"))
    assert loads_of(blocks, free, 4) == [40, 25, 18, 17]
    two = assign(blocks, 4, placement("by_load;blocks=2"))
    # 40 + 3, 25 + 3, 10 + 5, 8 + 6: the best of all 105 ways to give each server two blocks.
    assert loads_of(blocks, two, 4) == [43, 28, 15, 14]
    assert two == assign(blocks, 4, placement("by_size;blocks=2"))

    def ratio(chosen: Sequence[int]) -> float:
        placed = [BlockSpec(at, server, [whole(at, 1)]) for at, server in enumerate(chosen)]
        return imbalance(placed, 4, lambda block: blocks[block.bid].load)

    assert (ratio(free), ratio(two)) == (1.6, 1.72)
    # The page's own placement, with names that make its sentence on p1, p5 and p7 true.
    names = {"p1": 40, "p2": 6, "p3": 25, "p4": 5, "p5": 10, "p6": 3, "p7": 8, "p8": 3}
    pinned = ";".join(f"pin:p{at + 1}={at // 2}" for at in range(8))
    page = assign(pieces(names), 4, placement(f"by_load;{pinned}"))
    assert loads_of(pieces(names), page, 4) == [46, 30, 13, 11]
    assert len({page[at] for at in (0, 4, 6)}) == 3
    # Together they are one server's, which concentrates what is hot.
    kept = assign(pieces(names), 4, placement("by_load;together=p1|p5|p7"))
    assert len({kept[at] for at in (0, 4, 6)}) == 1
    assert max(loads_of(pieces(names), kept, 4)) == 58
    listed = assign(blocks, 4, placement("by_load;together=p1|p5|p7"))
    assert max(loads_of(blocks, listed, 4)) == 49


def test_a_group_whose_member_is_pinned_goes_there_and_buckets_are_not_shared() -> None:
    sizes_ = {"emb.w": 5000, "emb.b": 10, "norm": 10, "head.w": 5000, "head.b": 10}
    entries = [
        KeyEntry(kid, KeySpec(key, "int8", (size,)))
        for kid, (key, size) in enumerate(sizes_.items())
    ]
    value = placement("by_size;pin:emb.b=1;together=emb.*|head.*")
    blocks = plan(entries, 3, together=lambda e: 0, bucket_bytes=100, placement=value)
    where = {s.kid: b.server for b in blocks for s in b.segments}
    assert where == {0: 1, 1: 1, 2: 0, 3: 1, 4: 1}
    one = plan(entries, 1, together=lambda e: 0, bucket_bytes=100)
    assert [block.kids for block in one] == [[0], [1, 2, 4], [3]]
    apart = plan(
        entries,
        1,
        together=lambda e: 0,
        bucket_bytes=100,
        placement=placement("by_size;pin:norm=0"),
    )
    assert [block.kids for block in apart] == [[0], [1, 4], [2], [3]]


def test_small_keys_of_one_server_on_a_ring_share_one_block_however_many_servers_there_are() -> (
    None
):
    entries = [KeyEntry(kid, KeySpec(f"k{kid}", "int8", (10,))) for kid in range(100)]
    for servers in (2, 3):
        blocks = plan(entries, servers, together=lambda e: 0, placement=placement("by_hash"))
        assert sorted(block.server for block in blocks) == list(range(servers))
        assert sorted(kid for block in blocks for kid in block.kids) == list(range(100))


def test_by_load_servers_are_compared_by_load_alone() -> None:
    blocks = [Piece("a", 1, 9), Piece("b", 100, 5), Piece("c", 100, 4), Piece("d", 1, 0)]
    assert assign(blocks, 2, placement("by_load")) == [0, 1, 1, 0]
    assert assign(blocks, 2, placement("by_size")) == [0, 0, 1, 1]
    held = [Share(1, 0, 20), Share(1, 1000, 0)]
    assert assign(blocks, 2, placement("by_load"), held=held) == [1, 1, 1, 1]


def test_a_slice_has_its_part_of_a_load_to_the_bit() -> None:
    # 49 times 1/49 is less than 1 in binary: slices must not lose against a key of one byte.
    entries = [KeyEntry(0, KeySpec("w", "int8", (49,))), KeyEntry(1, KeySpec("b", "int8", (1,)))]
    by_size, by_load = (
        plan(
            entries,
            2,
            together=lambda e: 0,
            block_bytes=1,
            bucket_bytes=0,
            placement=placement(text),
        )
        for text in ("by_size", "by_load:w=49,b=1")
    )
    assert by_load == by_size


def test_groups_take_their_room_before_single_blocks_do() -> None:
    blocks = [Piece("a1", 1, 1), Piece("a2", 1, 1), Piece("b", 10, 10), Piece("c", 9, 9)]
    assert assign(blocks, 2, placement("by_size;together=a?;blocks=2")) == [0, 0, 1, 1]
    # Without caps the largest goes first, whatever it is.
    assert assign(blocks, 2, placement("by_size;together=a?")) == [1, 1, 0, 1]


def test_a_group_too_large_for_any_server_is_on_as_few_as_can_be() -> None:
    group = [Piece(f"a{at}", 5, 5) for at in range(6)]
    blocks = [*group, Piece("b", 10, 10)]
    chosen = assign(blocks, 3, placement("by_size;together=a?;pin:b=2;bytes=15"))
    assert chosen == [0, 0, 0, 1, 1, 1, 2]


def test_a_search_keeps_a_group_together_if_that_fits() -> None:
    blocks = named([1, 6, 5, 11, 8, 5])
    chosen = assign(blocks, 2, placement("by_size;together=k0|k1;bytes=19"))
    assert chosen[0] == chosen[1]
    assert sorted(loads_of(blocks, chosen, 2)) == [18, 18]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "by_size;bytes=39",
            r"key 'p1' \(40 bytes\) is larger than the limit of every server, bytes=39; raise it, "
            r"or cut smaller blocks \(--block-bytes\)",
        ),
        ("by_size;load=30", r"key 'p1' \(40 bytes\) has a load of 40, above .* load=30; raise it"),
        (
            "by_size;blocks=1",
            r"8 blocks are to be placed, and 4 servers of blocks=1 take 4; .*key 'p1' "
            r"\(40 bytes\); raise blocks=, or start more servers \(--servers\)",
        ),
        (
            "by_size;pin:p2=0;pin:p1=0;bytes=40",
            r"key 'p2' \(25 bytes\) is pinned to server 0, which",
        ),
        (
            "by_size;pin:p3=1;together=p3|p1|p2;bytes=60",
            r"key 'p1' .*75 bytes in 3 blocks is pinned to server 1, which holds 0 blocks, 0 bytes "
            r"and a load of 0 of at most bytes=60; raise the limit, or pin it to another server",
        ),
        ("by_size;pin:p1=4", "pin:p1=4 names no server of this cluster; its servers are 0 to 3"),
        (
            "by_size;pin:p1=0;pin:p2=1;together=p?",
            "key 'p2' is pinned to server 1 and key 'p1' to server 0, but they are to stay "
            "together",
        ),
        ("by_size;blocks=2;bytes=40", "no placement is within the limits: 8 blocks are left for 4"),
    ],
)
def test_what_cannot_be_met_names_the_key_its_size_the_limit_and_what_to_try(
    text: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        assign(pieces(LOADS), 4, placement(text))
    assert str(caught.value).startswith(f"placement {text}: ")


def test_a_key_in_a_bucket_is_named_with_its_neighbours() -> None:
    entries = [KeyEntry(kid, KeySpec(f"k{kid}", "int8", (30,))) for kid in range(3)]
    with pytest.raises(
        ConfigError, match=r"key 'k0' and 2 more in its block \(90 bytes\) is larger"
    ):
        plan(entries, 1, together=lambda e: 0, placement=placement("by_size;bytes=80"))


def test_where_largest_first_has_no_room_some_other_way_is_found() -> None:
    # 5 and a 3 on one server, 4 and 4 on the other: neither has room for 3 more within 10. But
    # 5 and 4 on one, 4, 3 and 3 on the other are 9 and 10.
    blocks = named([5, 4, 4, 3, 3])
    assert max(loads_of(blocks, assign(blocks, 2, Placement()), 2)) == 11
    chosen = assign(blocks, 2, placement("by_size;bytes=10"))
    assert sorted(loads_of(blocks, chosen, 2)) == [9, 10]


def test_a_search_that_is_given_up_says_so() -> None:
    # Odd sizes and an even limit that all of them would have to fill exactly.
    blocks = named([2 * at + 1001 for at in range(40)])
    total = sum(block.nbytes for block in blocks)
    with pytest.raises(ConfigError, match="no placement was found within the limits: 40 blocks"):
        assign(blocks, 8, placement(f"by_size;bytes={int(total) // 8};blocks=5"))
