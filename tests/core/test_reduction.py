"""Plans of local reduction: each part is summed once from each device, in the order it says."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv import aggregation_costs as costs
from zkv.reduction import CPU, InParts, Move, OnCpu, OneDevice, Plan, Ring, at_cuts, even, plan
from zkv.reduction_choice import Link, Links, choose, ring, uniform

GB_PER_S = 16e9


@st.composite
def plans(draw: Any, sizes: Any = None) -> Plan:
    devices = draw(st.integers(1, 9))
    size = draw(st.integers(0, 40) if sizes is None else sizes)
    cuts = None
    if draw(st.booleans()):
        inner = draw(st.lists(st.integers(0, size), max_size=6))
        cuts = sorted({0, size, *inner})
    strategy = draw(
        st.sampled_from(
            (
                OneDevice(),
                OneDevice(devices - 1),
                OnCpu(),
                InParts(),
                Ring(),
                Ring(tuple(draw(st.permutations(range(devices))))),
            )
        )
    )
    return plan(strategy, devices, size, cuts)


def summed(made: Plan, *, spread: bool) -> dict[tuple[int, int], tuple[int, ...]]:
    """What is at each place of each part: the devices whose gradients are in it, from the left.

    A move that adds puts what arrives behind or before what is there: addition commutes.
    """
    parts = len(made.bounds) - 1
    held = {(at, part): (at,) for at in range(made.devices) for part in range(parts)}
    for step in (*made.sums, *(made.spread if spread else ())):
        before = dict(held)
        for move in step:
            arriving = before[move.source, move.part]
            mine = before.get((move.target, move.part), ())
            if not move.adds:
                held[move.target, move.part] = arriving
            else:
                assert not set(arriving) & set(mine), "an addend is added twice"
                longer, shorter = sorted((arriving, mine), key=len, reverse=True)
                assert len(shorter) == 1 or len(longer) == 1, "no sum from the left"
                held[move.target, move.part] = longer + shorter
    return held


@given(plans())
def test_each_part_is_the_sum_of_all_devices_from_the_left_in_the_order_that_is_said(
    made: Plan,
) -> None:
    held = summed(made, spread=False)
    for part in range(len(made.bounds) - 1):
        order = held[made.owner(part), part]
        assert sorted(order) == list(range(made.devices))
        said = made.order(part)
        # The first two may be either way round.
        assert order[2:] == said[2:]
        assert set(order[:2]) == set(said[:2])


@given(plans())
def test_afterwards_every_device_has_the_same_sums(made: Plan) -> None:
    held = summed(made, spread=True)
    for part in range(len(made.bounds) - 1):
        total = held[made.owner(part), part]
        assert len(total) == made.devices
        assert {held[at, part] for at in range(made.devices)} == {total}


@given(plans())
def test_in_a_step_each_place_sends_at_most_one_part_and_receives_at_most_one(made: Plan) -> None:
    for step in (*made.sums, *made.spread):
        assert len({move.source for move in step}) == len(step) == len({m.target for m in step})
        assert all(move.source != move.target for move in step)


@given(plans())
def test_parts_cover_the_gradient_once(made: Plan) -> None:
    assert made.bounds[0] == 0
    assert sum(made.elements(part) for part in range(len(made.bounds) - 1)) == made.size
    assert all(made.elements(part) >= 0 for part in range(len(made.bounds) - 1))


@given(st.integers(0, 1000), st.integers(1, 64))
def test_even_parts_differ_by_one_element_at_most(size: int, parts: int) -> None:
    bounds = even(size, parts)
    sizes = [high - low for low, high in pairwise(bounds)]
    assert (len(sizes), sum(sizes)) == (parts, size)
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 5))
def test_parts_begin_at_cuts_and_are_out_of_balance_by_a_block_at_most(
    blocks: list[int], parts: int
) -> None:
    cuts = [sum(blocks[:at]) for at in range(len(blocks) + 1)]
    bounds = at_cuts(cuts, parts)
    assert set(bounds) <= set(cuts)
    for part, bound in enumerate(bounds):
        assert abs(bound - cuts[-1] * part / parts) <= max(blocks) / 2


def ports(made: Plan, *, spread: bool = True) -> tuple[Counter[int], Counter[int]]:
    sends: Counter[int] = Counter()
    receives: Counter[int] = Counter()
    for (source, target), moved in made.carried(spread=spread).items():
        sends[source] += moved
        receives[target] += moved
    return sends, receives


@given(st.integers(2, 16), st.integers(1, 100))
def test_links_carry_what_the_seed_pages_say(devices: int, each: int) -> None:
    """M elements on n devices, where n divides M."""
    size = devices * each
    one, cpu = plan(OneDevice(), devices, size), plan(OnCpu(), devices, size)
    assert ports(one, spread=False)[1] == {0: (devices - 1) * size}
    assert ports(one)[0][0] == (devices - 1) * size
    assert ports(cpu, spread=False)[1] == {CPU: devices * size}
    assert ports(cpu)[0][CPU] == devices * size
    for strategy in (InParts(), Ring()):
        sends, receives = ports(plan(strategy, devices, size))
        each_sends = costs.ring_sent_bytes(size, devices)
        assert set(sends.values()) == set(receives.values()) == {round(each_sends)}
        sends, _ = ports(plan(strategy, devices, size), spread=False)
        assert set(sends.values()) == {
            round(costs.ring_sent_bytes(size, devices, reduce_only=True))
        }
    around = plan(Ring(), devices, size)
    assert len(around.sums) + len(around.spread) == costs.ring_rounds(devices)
    assert set(around.carried()) == {(at, (at + 1) % devices) for at in range(devices)}


@pytest.mark.parametrize(
    ("strategy", "seconds", "formula"),
    [
        (OneDevice(), 0.060, costs.aggregate_on_device_s),
        (OnCpu(), 0.080, costs.aggregate_on_cpu_s),
        (InParts(), 0.015, costs.aggregate_in_parts_s),
        (Ring(), 0.015, costs.ring_all_reduce_s),
    ],
)
def test_160_mb_on_4_devices_with_16_gb_per_s_take_60_80_and_15_ms(
    strategy: Any, seconds: float, formula: Any
) -> None:
    """The key-value store page's example."""
    made, links = plan(strategy, 4, 40_000_000), uniform(4, GB_PER_S)
    assert made.seconds(4, links.took) == pytest.approx(seconds)
    assert made.seconds(4, links.took) == pytest.approx(formula(160e6, 4, 8 * GB_PER_S))
    # Half of it to sum up, half to hand the sums back.
    assert made.seconds(4, links.took, spread=False) == pytest.approx(seconds / 2)


def test_a_ring_of_four_by_hand() -> None:
    made = plan(Ring(), 4, 4)
    assert made.sums[0] == tuple(Move(at, at, (at + 1) % 4, True) for at in range(4))
    assert made.sums[2] == tuple(Move(at, (at + 2) % 4, (at + 3) % 4, True) for at in range(4))
    assert [made.owner(part) for part in range(4)] == [3, 0, 1, 2]
    assert made.order(1) == (1, 2, 3, 0)
    assert made.spread[0] == tuple(Move(at, (at + 3) % 4, at, False) for at in range(4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plan(Ring(), 0, 1), "devices must be from 1 to 64, given 0"),
        (lambda: plan(Ring(), 65, 1), "devices must be from 1 to 64, given 65"),
        (lambda: plan(Ring(), 2, -1), "size must not be negative, given -1"),
        (lambda: plan(OneDevice(2), 2, 1), "on device 2: with 2 devices the root is from 0 to 1"),
        (lambda: plan(OneDevice(-1), 2, 1), "the root is from 0 to 1"),
        (lambda: plan(Ring((0, 1, 1)), 3, 1), "around the ring 0-1-1: it must name each of 3"),
        (lambda: plan(InParts(), 2, 5, [0, 4]), "cuts must go from 0 up to the size, 5, given"),
        (lambda: Link(0), "a link carries more than 0 bytes/s"),
        (lambda: Link(1, float("nan")), "at least 0 s, given"),
        (lambda: Links(2, {}), "the link from the CPU to device 0 is missing"),
        (lambda: Links(1, uniform(1, 1).between, 0.5), "crowding is at least 1, given 0.5"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --- which one -----------------------------------------------------------------------------------


def with_fast(links: Links, speed: float, *pairs: tuple[int, int]) -> Links:
    """The same links, some of them of another speed in both directions."""
    fast = {hop: Link(speed) for one, two in pairs for hop in ((one, two), (two, one))}
    return Links(links.devices, {**links.between, **fast}, links.crowding)


def test_behind_a_switch_of_full_bandwidth_parts_are_the_fastest() -> None:
    """The page's machine: its three figures come out again, and are told."""
    choice = choose(uniform(4, GB_PER_S), 160_000_000)
    assert choice.strategy == InParts()
    assert "on device 0 60 ms, in parts 15 ms, around a ring 15 ms, on the CPU 80 ms" in choice.why


def test_where_neighbours_are_joined_fast_a_ring_follows_them() -> None:
    """NVLink joins 0-2-1-3-0; the other pairs go over PCIe."""
    links = with_fast(uniform(4, 12e9), 50e9, (0, 2), (2, 1), (1, 3), (3, 0))
    choice = choose(links, 100_000_000)
    assert choice.strategy == Ring((0, 2, 1, 3))
    assert "at 50 GB/s" in choice.why


def test_where_all_goes_through_one_link_fewer_bytes_win() -> None:
    """All four at once are four times slower, so parts take as long as one device in turn."""
    links = uniform(4, 12e9)
    shared = Links(4, links.between, 4.0)
    seconds = dict(choose(shared, 100_000_000).seconds)
    assert seconds[InParts()] == pytest.approx(4 * 2 * 3 * 25e6 / 12e9)
    assert seconds[OneDevice()] == pytest.approx(2 * 3 * 100e6 / 12e9)
    # As long as each other: the one of fewer moves.
    assert choose(shared, 100_000_000).strategy == OneDevice()


def test_where_devices_reach_each_other_slower_than_the_cpu_it_sums() -> None:
    """Every copy between devices goes through the host's memory, at a third of the speed."""
    places = range(CPU, 4)
    slow = {
        (one, two): Link(12e9 if CPU in (one, two) else 2e9) for one in places for two in places
    }
    links = Links(4, {hop: one for hop, one in slow.items() if hop[0] != hop[1]}, 4.0)
    assert choose(links, 100_000_000).strategy == OnCpu()


def test_few_bytes_go_where_there_are_the_fewest_steps() -> None:
    links = uniform(4, GB_PER_S, latency_s=20e-6)
    seconds = dict(choose(links, 16).seconds)
    assert seconds[InParts()] == pytest.approx(seconds[OneDevice()], rel=1e-3)
    assert choose(links, 16).strategy == OneDevice()
    assert choose(links, 160_000_000).strategy == InParts()


def test_the_root_is_where_the_links_are_best() -> None:
    links = with_fast(uniform(3, 10e9), 40e9, (1, 0), (1, 2))
    assert OneDevice(1) in dict(choose(links, 1_000_000).seconds)


def test_one_device_moves_nothing() -> None:
    choice = choose(uniform(1, 1e9), 100)
    assert (choice.strategy, choice.why) == (
        OneDevice(),
        "there is one device, so nothing moves",
    )


@given(st.data(), st.integers(2, 6))
def test_what_is_chosen_is_within_three_per_cent_of_the_least(data: Any, devices: int) -> None:
    places = range(CPU, devices)
    speeds = st.floats(1e8, 1e11)
    between = {
        (one, two): Link(data.draw(speeds), data.draw(st.sampled_from([0.0, 1e-5])))
        for one in places
        for two in places
        if one != two
    }
    links = Links(devices, between, data.draw(st.floats(1, devices)))
    choice = choose(links, data.draw(st.integers(0, 10**9)), spread=data.draw(st.booleans()))
    spent = dict(choice.seconds)
    assert spent[choice.strategy] <= min(spent.values()) / 0.97**4
    assert "ms" in choice.why


def test_of_many_devices_only_their_own_order_is_a_ring() -> None:
    assert ring(uniform(8, 1e9)) == ()
    assert ring(with_fast(uniform(8, 1e9), 9e9, (0, 7))) == ()
