"""Topologies as values: what each member does with each block, and what that costs in bytes."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv import control as c
from zkv.aggregation_costs import ring_rounds, ring_sent_bytes
from zkv.data_messages import Addend
from zkv.layout import Layout
from zkv.placements import placement
from zkv.sums import tree_sum, weighted
from zkv.topology import (
    NAMES,
    Member,
    Route,
    Topology,
    alone,
    in_ring,
    owners,
    routes,
    sent_bytes,
    topology,
)
from zkv.wire import BlockSpec, KeyEntry, KeySpec, Segment
from zkv_workers.joint import Round, Term, own_term

RING, HOSTS = Topology("ring"), Topology("hierarchical")
hosts = st.lists(st.sampled_from("abcde"), min_size=2, max_size=9)
ways = st.sampled_from([RING, HOSTS])


def members_on(names: list[str]) -> list[Member]:
    """Return one member for each name of a host, numbered with gaps, as some may be gone."""
    return [Member(3 * at + 1, host) for at, host in enumerate(names)]


@dataclass
class Adding:
    """All members of an update, that hand sums and values on in an order that chance decides."""

    way: Topology
    members: list[Member]
    gradients: dict[int, dict[int, np.ndarray]]
    """By member, then by block; a block that is not there is skipped."""
    sizes: dict[int, int]
    seed: int
    at_server: dict[int, list[tuple[np.ndarray, list[int]]]] = field(default_factory=dict)
    """By block, what has come to its server: sums, and whose gradients are in each."""
    held: dict[int, Counter[int]] = field(default_factory=dict)
    """By member, how often each block's next values have come."""
    sent: Counter[int] = field(default_factory=Counter)
    """Bytes that each member has sent to others."""

    def __post_init__(self) -> None:
        companions = [c.Companion(m.number, m.number, 1, m.host, "") for m in self.members]
        told = c.Together(1, 1, str(self.way), companions, 0)
        self.rounds = {
            m.number: Round(
                told,
                m.number,
                routes(self.way, self.members, m.number, self.sizes),
                {one.number: one for one in companions},
            )
            for m in self.members
        }
        self.held = {m.number: Counter() for m in self.members}

    def run(self) -> Adding:
        rng = random.Random(self.seed)
        waiting: list[tuple[float, int, int, int, int, Term]] = []

        def put(number: int, bid: int, source: int, term: Term) -> None:
            found = self.rounds[number].put(bid, source, term)
            # What comes twice changes nothing.
            assert self.rounds[number].put(bid, source, term) is None
            if found is None:
                return
            route = self.rounds[number].routes[bid]
            if route.target is None:
                names = [addend.contribution.incarnation for addend in found.of]
                if found.values is not None:
                    self.at_server.setdefault(bid, []).append((found.values, names))
                self.hand_on(number, bid)
                return
            self.sent[number] += self.sizes[bid]
            count = sum(self.sent.values())
            heapq.heappush(waiting, (rng.random(), count, route.target, bid, number, found))

        begins = [(m.number, bid) for m in self.members for bid in self.sizes]
        rng.shuffle(begins)
        for number, bid in begins:
            values = self.gradients[number].get(bid)
            name = c.ContributionId(number, 0, 1)
            of = () if values is None else (Addend(name, 1, 1.0),)
            put(number, bid, number, Term(None if values is None else values.copy(), of))
            while waiting and rng.random() < 0.5:
                _, _, target, block, source, term = heapq.heappop(waiting)
                put(target, block, source, term)
        while waiting:
            _, _, target, block, source, term = heapq.heappop(waiting)
            put(target, block, source, term)
        return self

    def hand_on(self, number: int, bid: int) -> None:
        """Give a block's next values to a member that has sent its sum, and on from there."""
        self.held[number][bid] += 1
        for follower in self.rounds[number].routes[bid].followers:
            self.sent[number] += self.sizes[bid]
            self.hand_on(follower, bid)


@given(ways, hosts, st.integers(1, 12), st.integers(0, 2**32), st.booleans())
def test_each_gradient_is_summed_once_and_each_member_gets_the_values_once(
    way: Topology, names: list[str], blocks: int, seed: int, skips: bool
) -> None:
    rng = np.random.default_rng(seed)
    members = members_on(names)
    sizes = {7 * bid: int(rng.integers(1, 9)) * 4 for bid in range(blocks)}
    gradients = {
        m.number: {
            bid: rng.integers(-99, 99, size // 4).astype(np.float32)
            for bid, size in sizes.items()
            if not (skips and rng.random() < 0.3)
        }
        for m in members
    }
    adding = Adding(way, members, gradients, sizes, seed).run()
    for bid in sizes:
        there = sorted(number for number, own in gradients.items() if bid in own)
        found = adding.at_server.get(bid, [])
        assert sorted(number for _, whose in found for number in whose) == there
        if there:
            # Whole numbers: the order makes no difference.
            total = sum(values for values, _ in found)
            np.testing.assert_array_equal(total, sum(gradients[number][bid] for number in there))
        if way == HOSTS:
            assert len(found) <= len(set(names))
        else:
            assert len(found) <= 1
        assert all(held[bid] == 1 for held in adding.held.values())
    told = sent_bytes(way, members, sizes)
    assert {number: told[number][0] for number in told} == {
        m.number: adding.sent[m.number] for m in members
    }


@given(st.integers(2, 12), st.integers(1, 6), st.integers(1, 10**6))
def test_a_ring_of_n_sends_two_times_n_minus_one_nth_of_all_bytes(
    count: int, each: int, block: int
) -> None:
    members = members_on(["a"] * count)
    sizes = dict.fromkeys(range(each * count), block)
    total = sum(sizes.values())
    for between, up in sent_bytes(RING, members, sizes).values():
        assert between == ring_sent_bytes(total, count)
        assert between * count == ring_rounds(count) * total
        assert up * count == total


@given(hosts, st.lists(st.integers(1, 10**6), min_size=1, max_size=30))
def test_other_blocks_differ_from_that_by_two_blocks_at_most(
    names: list[str], sizes: list[int]
) -> None:
    count, total = len(names), sum(sizes)
    told = sent_bytes(RING, members_on(names), dict(enumerate(sizes)))
    assert sum(between for between, _ in told.values()) == ring_rounds(count) * total
    assert sum(up for _, up in told.values()) == total
    for between, _ in told.values():
        assert abs(between - ring_sent_bytes(total, count)) <= 2 * max(sizes)


def test_the_seed_pages_figures() -> None:
    """160 MB on 4 nodes: each sends 240 MB in 6 rounds of 40 MB."""
    sizes = dict.fromkeys(range(160), 10**6)
    told = sent_bytes(RING, members_on(["a", "b", "c", "d"]), sizes)
    assert set(told.values()) == {(240 * 10**6, 40 * 10**6)}
    assert ring_rounds(4) == 6


@given(hosts, st.integers(1, 9))
def test_one_contribution_for_each_host_travels(names: list[str], blocks: int) -> None:
    members, sizes = members_on(names), dict.fromkeys(range(blocks), 1000)
    told = sent_bytes(HOSTS, members, sizes)
    ups = {host: sum(told[m.number][1] for m in members if m.host == host) for host in set(names)}
    assert set(ups.values()) == {1000 * blocks}
    for member in members:
        leads = member.number == min(m.number for m in members if m.host == member.host)
        assert (told[member.number][1] > 0) == leads


@given(st.sampled_from([["a", "a", "b", "b"], ["a"] * 4, ["a", "a"], ["a", "a", "b"]]))
def test_where_the_order_is_that_of_servers_the_bits_are_theirs(names: list[str]) -> None:
    """Hosts whose workers have neighbouring ranks, a power of two of them: the same tree."""
    members, rng = members_on(names), np.random.default_rng(1)
    gradients = {m.number: {0: rng.standard_normal(1000).astype(np.float32)} for m in members}
    adding = Adding(HOSTS, members, gradients, {0: 4000}, 1).run()
    sums = sorted(adding.at_server[0], key=lambda one: min(one[1]))
    ours = tree_sum(lambda at: sums[at][0].copy(), len(sums))
    flat = [gradients[m.number][0] for m in members]
    servers = tree_sum(lambda at: weighted(flat[at], 1.0), len(flat))
    assert ours is not None
    assert servers is not None
    assert ours.tobytes() == servers.tobytes()


def test_members_of_one_host_are_neighbours_in_the_ring() -> None:
    members = [Member(0, "b"), Member(1, "a"), Member(2, "b"), Member(3, "c"), Member(4, "a")]
    assert in_ring(members) == [0, 2, 1, 4, 3]
    one = routes(RING, members, 1, {5: 8})[5]
    # Place 0 owns the only block: its sum begins at place 1 and ends there.
    assert owners({5: 8}, 5) == {5: 0}
    assert one == Route((2, 1), 4, (4,))
    assert routes(RING, members, 3, {5: 8})[5] == Route((4, 3), 0, ())
    assert routes(RING, members, 0, {5: 8})[5] == Route((3, 0), None, (2,))


def test_an_own_term_is_weighted_and_says_nothing_of_skipped_keys() -> None:
    """Whatever was sent for them: adding -0.0 changes no bit of the others' sum."""
    layout = Layout()
    entries = [
        KeyEntry(0, KeySpec("a", "float16", (2,))),
        KeyEntry(1, KeySpec("b", "float16", (3,))),
    ]
    block = BlockSpec(0, 0, [Segment(0, 0, 2), Segment(1, 0, 3)])
    layout.add(entries, [block])
    sent, addend = np.arange(1, 6, dtype=np.float16), Addend(c.ContributionId(1, 0, 1), 1, 3.0)
    term = own_term(layout, block, sent, addend, (1,), 7)
    assert term.values is not None
    assert term.values.dtype == np.float32
    assert term.values.tolist() == [3.0, 6.0, 0.0, 0.0, 0.0]
    assert np.signbit(term.values[2:]).all()
    assert (term.of, term.index, term.own) == ((addend,), 7, True)
    assert sent.tolist() == [1, 2, 3, 4, 5]


def test_the_largest_blocks_are_shared_out_first() -> None:
    assert owners({0: 1, 1: 1, 2: 2}, 2) == {2: 0, 0: 1, 1: 1}
    assert owners({5: 4, 6: 4, 7: 4, 8: 4}, 4) == {5: 0, 6: 1, 7: 2, 8: 3}


def test_what_brings_nothing_says_so() -> None:
    assert "nobody" in alone(RING, members_on(["a"]))
    assert "no two workers" in alone(HOSTS, members_on(["a", "b", "c"]))
    assert alone(HOSTS, members_on(["a", "b", "a"])) == ""
    assert alone(RING, members_on(["a", "b"])) == ""
    assert routes(HOSTS, members_on(["a", "b", "a"]), 4, {0: 4})[0].alone


def test_names_and_what_is_none() -> None:
    assert [str(topology(name)) for name in NAMES] == list(NAMES)
    assert [topology(name).joint for name in NAMES] == [False, False, True, True]
    for text in ("", "star", "ring:3", "Ring"):
        with pytest.raises(ValueError, match="is none of servers, one-server"):
            topology(text)
    with pytest.raises(ValueError, match="worker 9 is none of the members"):
        routes(RING, members_on(["a", "b"]), 9, {0: 4})
    with pytest.raises(ValueError, match="no routes"):
        routes(Topology("servers"), members_on(["a", "b"]), 1, {0: 4})


def test_one_server_pins_all_keys_there() -> None:
    one = Topology("one-server")
    assert one.placement("by_size") == "by_size;pin:*=0"
    assert one.placement("by_hash:8;pin:a=1;blocks=2") == "by_hash:8;pin:*=0;pin:a=1;blocks=2"
    assert placement(one.placement("by_hash:8;pin:a=1;blocks=2")).pinned("a") == ("*", "0")
    assert Topology("ring").placement("by_hash") == "by_hash"
