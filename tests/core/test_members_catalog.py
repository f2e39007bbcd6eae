"""Who is there and which keys exist: numbers, incarnations, one initialiser at a time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv import control as c
from zkv.errors import KeyMismatch, NameInUse, Refused, ZkvError
from zkv.layout import Layout, size_of
from zkv.optimizer_spec import optimizer
from zkv.placement import BUCKET_BYTES
from zkv.wire import KeySpec
from zkv_brokers.catalog import INIT_BYTES_MAX, Catalog, Pending
from zkv_brokers.coding import Coding
from zkv_brokers.decisions import Decisions
from zkv_brokers.members import INCARNATIONS_PER_TERM, Members, Server, Worker


def hello(name: str, rank: int = -1, world: int = 0, *, observer: bool = False) -> c.WorkerHello:
    return c.WorkerHello(name, rank, world, observer, "host", 42)


def admit(members: Members, peer: int, said: c.WorkerHello) -> Worker:
    worker = members.admit(peer, said)
    assert isinstance(worker, Worker)
    return worker


# --- members ---------------------------------------------------------------------------------


@given(
    moves=st.lists(
        st.tuples(st.integers(0, 5), st.integers(-2, 4), st.booleans()) | st.just(None), max_size=30
    ),
    term=st.integers(1, 5),
)
def test_numbers_are_unique_names_too_and_an_incarnation_never_comes_back(
    moves: list[tuple[int, int, bool] | None], term: int
) -> None:
    members = Members(term, 1)
    seen: set[int] = set()
    peer = 0
    for move in moves:
        epoch = members.epoch
        if move is None:
            if members.workers:
                members.remove(next(iter(members.workers.values())))
                assert members.epoch == epoch + 1
            continue
        name, rank, observer = move
        peer += 1
        taken = {worker.hello.name for worker in members.workers.values()}
        numbers = {worker.number for worker in members.training()}
        admitted = members.admit(peer, hello(f"w{name}", rank, observer=observer))
        if isinstance(admitted, ZkvError):
            assert f"w{name}" in taken or (rank in numbers and not observer)
            assert members.epoch == epoch
            continue
        assert admitted.incarnation not in seen
        assert admitted.incarnation // INCARNATIONS_PER_TERM == term
        seen.add(admitted.incarnation)
        assert admitted.number not in numbers
        if rank >= 0 and not observer:
            assert admitted.number == rank
    training = members.training()
    assert [w.number for w in training] == sorted({w.number for w in training})
    assert members.incarnations() == sorted(members.workers)
    assert set(members.by_peer) == {worker.peer for worker in members.workers.values()}


def test_a_worker_without_a_rank_gets_the_lowest_free_number() -> None:
    members = Members(1, 1)
    admit(members, 1, hello("a", 1))
    assert admit(members, 2, hello("b")).number == 0
    assert admit(members, 3, hello("c")).number == 2
    members.remove(members.workers[members.incarnations()[0]])
    assert admit(members, 4, hello("d")).number == 1


def test_a_name_and_a_rank_that_are_taken_are_refused_and_named() -> None:
    members = Members(1, 1)
    admit(members, 1, hello("a", 3))
    again = members.admit(2, hello("a", 4))
    assert isinstance(again, NameInUse)
    assert "'a'" in str(again)
    rank = members.admit(3, hello("b", 3))
    assert isinstance(rank, Refused)
    assert "rank 3 is taken by worker 3 ('a' on host, pid 42)" in str(rank)


def test_observers_take_no_place_among_those_who_train() -> None:
    members = Members(1, 1, world_min=2)
    watcher = admit(members, 1, hello("eye", 0, 7, observer=True))
    assert members.training() == []
    assert members.named("eye") is watcher
    assert admit(members, 2, hello("a", 0)).number == 0
    assert (members.world, members.expected) == (2, 2)


def test_the_world_is_the_largest_that_anybody_stated_or_those_who_are_here() -> None:
    members = Members(1, 1)
    for peer in range(3):
        admit(members, peer + 1, hello(f"w{peer}", world=2))
    assert (members.world, members.expected) == (3, 2)


def test_servers_get_their_indices_in_order_until_all_are_here() -> None:
    members = Members(1, 2)
    assert not members.complete
    for index in range(2):
        server = members.enrol(index, c.ServerHello("s", f"tcp://s:{index}", 0, "h", 1, False))
        assert isinstance(server, Server)
        assert server.index == index
    assert members.complete
    more = members.enrol(9, c.ServerHello("s", "tcp://s:9", 0, "h", 1, False))
    assert isinstance(more, Refused)
    assert "--servers 3" in str(more)


def test_two_servers_cannot_have_one_address() -> None:
    members = Members(1, 2)
    said = c.ServerHello("s", "tcp://s:1", 0, "h", 1, False)
    members.enrol(1, said)
    twin = members.enrol(2, said)
    assert isinstance(twin, NameInUse)
    assert "tcp://s:1" in str(twin)


# --- catalog ---------------------------------------------------------------------------------

W = KeySpec("w", "float32", (4, 3))
B = KeySpec("b", "float32", (3,))
SGD = optimizer("sgd:lr=0.1")


class Shelf:
    """A catalog with two servers, and what it has decided so far."""

    def __init__(self, codec: str = "none", codec_down: str = "none", block_bytes: int = 0) -> None:
        self.coding = Coding(codec, codec_down)
        self.catalog = Catalog(Layout(), self.coding, block_bytes)
        self.out = Decisions(0)

    def offer(
        self,
        incarnation: int,
        *specs: KeySpec,
        plain: bool = False,
        token: int = 1,
        rate: float = 0.0,
    ) -> Any:
        message = c.Offer(token, list(specs), plain, rate)
        return self.catalog.offer(incarnation, message, plain, 2, SGD, self.out)

    def entries(self, kind: type) -> list[Any]:
        return [entry for entry in self.out.entries if isinstance(entry, kind)]

    def hold(self, init: int) -> Pending | None:
        done = None
        for server in (0, 1):
            done = self.catalog.held(init, server) or done
        return done


def test_the_first_offer_initialises_and_the_others_wait_for_it() -> None:
    shelf = Shelf()
    pending = shelf.offer(11, W, B, token=5)
    assert isinstance(pending, Pending)
    assert shelf.offer(22, W, B, token=6) is pending
    assert pending.waiting == [(11, 5), (22, 6)]
    (entry,) = shelf.entries(c.Init)
    assert (entry.incarnation, [key.spec for key in entry.keys]) == (11, [W, B])
    # The initialiser alone is asked for values; what it sends waits for the entry.
    ((whom, told),) = shelf.out.messages
    assert (whom, told.seed, told.index) == (11, True, 1)
    # No key exists before every server with a block of it holds the values.
    assert shelf.catalog.layout.kid_of == {}
    assert pending.missing == {block.server for block in pending.blocks} == {0, 1}
    assert shelf.catalog.held(pending.init, 0) is None
    assert shelf.catalog.held(pending.init, 0) is None
    assert shelf.catalog.held(pending.init, 1) is pending
    assert shelf.catalog.held(pending.init, 1) is None
    shelf.catalog.complete(pending, 1)
    assert set(shelf.catalog.layout.kid_of) == {"w", "b"}
    assert shelf.offer(33, W, B) is None
    assert len(shelf.entries(c.Init)) == 1


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ([KeySpec("w", "float32", (3, 4)), B], r"key 'w'.*shape is \(4, 3\), given \(3, 4\)"),
        ([KeySpec("w", "float64", (4, 3)), B], "dtype is 'float32', given 'float64'"),
        ([KeySpec("w", "float32", (4, 3), rule="adam"), B], "rule is '', given 'adam'"),
        ([W], "lacks 'b'"),
        ([W, B, KeySpec("c", "float32", ())], "adds 'c'"),
        ([W, KeySpec("c", "float32", ())], "lacks 'b' and adds 'c'"),
    ],
    ids=str,
)
def test_other_keys_or_shapes_are_refused_naming_both(
    specs: list[KeySpec], text: str, complete: bool
) -> None:
    shelf = Shelf()
    pending = shelf.offer(11, W, B)
    if complete:
        shelf.hold(pending.init)
        shelf.catalog.complete(pending, 1)
    error = shelf.offer(22, *specs)
    assert isinstance(error, KeyMismatch)
    with pytest.raises(KeyMismatch, match=text):
        raise error
    assert len(shelf.entries(c.Init)) == 1


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ([], "without any key"),
        ([W, W], "'w' stands twice in one init"),
        ([KeySpec("t", "float32", (3,), same_as="nobody")], "tied to 'nobody', which is no key"),
        ([W, KeySpec("t", "float32", (4, 3), same_as="t")], "tied to 't', which is no key"),
        ([W, KeySpec("t", "float32", (3,), same_as="w")], r"shape \(3,\)\) is tied to 'w'"),
        ([W, KeySpec("t", "float64", (4, 3), same_as="w")], "is another name of one array"),
        ([KeySpec("k", "float32", (1,), rule="no such")], "key 'k': .*unknown update rule"),
        ([KeySpec("k", "object", (1,))], "dtype 'object' does not travel"),
        ([KeySpec("", "float32", (1,))], "has 0 bytes"),
        ([KeySpec("k", "int8", (INIT_BYTES_MAX, 2))], "bytes of values; at most"),
        ([KeySpec("k", "int8", (INIT_BYTES_MAX,)), B], "bytes of values; at most"),
    ],
    ids=str,
)
def test_an_offer_that_makes_no_sense_is_refused_and_leaves_nothing(
    specs: list[KeySpec], text: str
) -> None:
    shelf = Shelf()
    error = shelf.offer(11, *specs)
    assert isinstance(error, KeyMismatch)
    with pytest.raises(KeyMismatch, match=text):
        raise error
    assert (shelf.out.entries, shelf.out.messages, shelf.catalog.pending) == ([], [], {})
    assert isinstance(shelf.offer(22, W, B), Pending)


def test_if_the_initialiser_dies_the_next_one_takes_over() -> None:
    shelf = Shelf()
    first = shelf.offer(11, W, B)
    shelf.offer(22, W, B)
    shelf.catalog.held(first.init, 0)
    (again,) = shelf.catalog.lost(11, 2, SGD, shelf.out)
    assert [entry.init for entry in shelf.entries(c.Drop)] == [first.init]
    assert (again.incarnation, again.waiting) == (22, [(22, 1)])
    assert again.init != first.init
    # Nothing of the first one counts: all servers have to hold the values anew.
    assert again.missing == {0, 1}
    assert shelf.hold(first.init) is None
    assert shelf.hold(again.init) is again
    used = [block.bid for pending in (first, again) for block in pending.blocks]
    assert len(set(used)) == len(used)


def test_if_nobody_else_offered_the_keys_are_free_again() -> None:
    shelf = Shelf()
    shelf.offer(11, W, B)
    assert shelf.catalog.lost(11, 2, SGD, shelf.out) == []
    other = KeySpec("w", "float64", (2,))
    assert isinstance(shelf.offer(22, other), Pending)


def test_who_waits_and_leaves_is_not_asked() -> None:
    shelf = Shelf()
    pending = shelf.offer(11, W)
    shelf.offer(22, W)
    assert shelf.catalog.lost(22, 2, SGD, shelf.out) == []
    assert pending.waiting == [(11, 1)]
    assert shelf.entries(c.Drop) == []


def test_plain_keys_lie_alone_and_keys_of_different_rules_apart() -> None:
    shelf = Shelf()
    plain = shelf.offer(11, W, B, plain=True)
    assert [len(block.segments) for block in plain.blocks] == [1, 1]
    specs = [KeySpec(f"k{n}", "float32", (2,), rule=("", "adam")[n % 2]) for n in range(8)]
    trained = shelf.offer(11, *specs)
    by_kid = {entry.kid: entry.spec.rule for entry in trained.entries}
    for block in trained.blocks:
        assert len({by_kid[kid] for kid in block.kids}) == 1
    assert len(trained.blocks) < 8


@given(
    specs=st.lists(
        st.builds(
            KeySpec,
            st.integers(0, 99).map(lambda n: f"layer{n}.{('weight', 'bias', 'norm')[n % 3]}"),
            st.sampled_from(["float32", "float16", "int32"]),
            st.sampled_from([(), (1,), (512,), (16_383,), (16_384,), (30, 40), (4096,), (70_000,)]),
        ),
        min_size=1,
        max_size=12,
        unique_by=lambda one: one.key,
    ),
    up=st.sampled_from(
        [
            "none",
            "int8+ef",
            "int8;*.bias=none",
            "fp16;small=0",
            "auto;*.bias=int8",
            "onebit;small=99",
        ]
    ),
    down=st.sampled_from(["none", "int8;small=2000", "fp16;*.norm=none;small=1"]),
    later=st.sampled_from(["none", "int8+ef", "bf16"]),
)
def test_every_key_has_the_codec_that_the_plan_says_whatever_it_shares_a_block_with(
    specs: list[KeySpec], up: str, down: str, later: str
) -> None:
    shelf = Shelf(up, down)
    pending = shelf.offer(11, *specs)
    shelf.catalog.complete(pending, 1)
    layout = shelf.catalog.layout
    # The codec for all may change when blocks are long cut.
    shelf.coding.use_up(";".join([later, *up.split(";")[1:]]))
    for plan in (shelf.coding.up, shelf.coding.down):
        for block in layout.blocks.values():
            for spec in (layout.entries[kid].spec for kid in block.kids):
                floating = spec.dtype != "int32"
                said = plan.for_key(spec.key, size_of(spec)).text if floating else "none"
                assert plan.for_block(layout, block).text == said


def test_small_keys_share_a_block_and_larger_ones_another() -> None:
    shelf = Shelf("none;small=1024")
    specs = [KeySpec(f"k{n}", "float32", ((1024, 10)[n % 2],)) for n in range(12)]
    pending = shelf.catalog.offer(11, c.Offer(1, specs, False), False, 1, SGD, shelf.out)
    assert isinstance(pending, Pending)
    by_kid = {entry.kid: size_of(entry.spec) for entry in pending.entries}
    assert sum(by_kid.values()) * 4 < BUCKET_BYTES
    assert [[by_kid[kid] for kid in block.kids] for block in pending.blocks] == [
        [1024] * 6,
        [10] * 6,
    ]
    # Integers are sent as they are, so their sizes are no reason for more blocks.
    whole = [KeySpec(f"i{n}", "int32", ((1024, 10)[n % 2],)) for n in range(4)]
    other = shelf.catalog.offer(11, c.Offer(2, whole, False), False, 1, SGD, shelf.out)
    assert isinstance(other, Pending)
    assert [len(block.kids) for block in other.blocks] == [4]


def test_a_tied_key_has_the_number_of_its_owner_wherever_it_stands() -> None:
    shelf = Shelf()
    tied = KeySpec("t", "float32", (4, 3), same_as="w")
    pending = shelf.offer(11, tied, W)
    assert {entry.spec.key: entry.kid for entry in pending.entries} == {"t": 0, "w": 0}
    shelf.catalog.complete(pending, 1)
    assert shelf.catalog.layout.kid("t") == shelf.catalog.layout.kid("w")
    assert sum(block.size for block in shelf.catalog.layout.blocks.values()) == 12


def test_a_second_initialisation_goes_to_the_emptier_server() -> None:
    shelf = Shelf()
    large = shelf.offer(11, KeySpec("large", "float32", (100_000,)))
    (block,) = large.blocks
    shelf.catalog.complete(large, 1)
    small = shelf.offer(11, B)
    assert {one.server for one in small.blocks} == {1 - block.server}


LARGE = KeySpec("large", "float32", (1 << 20,))
MIB = 1 << 20


def largest(pending: Pending) -> dict[str | int, int]:
    """The size of the largest block of each key, in bytes."""
    keys = {entry.kid: entry.spec.key for entry in pending.entries}
    sizes: dict[str | int, int] = {}
    for block in pending.blocks:
        for segment in block.segments:
            key = keys[segment.kid]
            sizes[key] = max(sizes.get(key, 0), 4 * (segment.stop - segment.start))
    return sizes


@pytest.mark.parametrize(
    ("block_bytes", "rate", "codec", "codec_down", "expected"),
    [
        (0, 0.0, "none", "none", MIB),
        (0, 50e6, "none", "none", 64 * 1024),
        (0, 125e6, "none", "none", 128 * 1024),
        (0, 3e9, "none", "none", MIB),
        # What a codec makes of a block depends on its borders, which have to be the same each time.
        (0, 50e6, "int8", "none", MIB),
        (0, 50e6, "none", "int8", MIB),
        (0, 50e6, "auto", "none", MIB),
        (0, 50e6, "int8;large=none", "none", 64 * 1024),
        (256 * 1024, 50e6, "none", "none", 256 * 1024),
        (256 * 1024, 50e6, "int8", "none", 256 * 1024),
    ],
)
def test_blocks_of_what_is_sent_dense_are_as_large_as_the_link_of_the_initialiser_likes(
    block_bytes: int, rate: float, codec: str, codec_down: str, expected: int
) -> None:
    shelf = Shelf(codec, codec_down, block_bytes)
    assert largest(shelf.offer(11, LARGE, rate=rate)) == {"large": expected}


def test_who_takes_over_an_initialisation_gets_blocks_whatever_its_link() -> None:
    shelf = Shelf()
    shelf.offer(11, LARGE, rate=50e6)
    shelf.offer(22, LARGE, token=2)
    (again,) = shelf.catalog.lost(11, 2, SGD, shelf.out)
    assert largest(again) == {"large": MIB}
