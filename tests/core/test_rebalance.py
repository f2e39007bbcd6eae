"""Which blocks move where: laws of every plan, and cases with numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv.errors import ConfigError
from zkv.fitting import Piece
from zkv.owners import Homes, Owners
from zkv.placements import placement
from zkv.rebalance import Rearrangement, imbalance_of
from zkv.wire import BlockSpec

HOT = [40.0, 25.0, 10.0, 8.0, 6.0, 5.0, 3.0, 3.0]
"""The synchronisation page's eight loads."""


def pieces(sizes: Sequence[float]) -> list[Piece]:
    return [Piece(f"p{at}", size, size) for at, size in enumerate(sizes, start=1)]


def arranged(
    sizes: Sequence[float], where: Sequence[int], places: int, text: str = "by_size", **more: object
) -> Rearrangement:
    return Rearrangement(pieces(sizes), where, places, placement(text), **more)  # type: ignore[arg-type]


def test_the_pages_round_robin_is_levelled_by_few_moves() -> None:
    """40 + 6, 25 + 5, 10 + 3, 8 + 3 of mean 25: no server can have less than the 40."""
    plan = arranged(HOT, [0, 1, 2, 3, 0, 1, 2, 3], 4)
    assert imbalance_of(plan.weights(HOT)) == pytest.approx(1.84)
    plan.level(HOT, "load")
    assert imbalance_of(plan.weights(HOT)) == pytest.approx(1.6)
    assert len(plan.moved()) == 1


def test_with_two_blocks_for_each_server_blocks_change_places() -> None:
    plan = arranged(HOT, [0, 1, 2, 3, 0, 1, 2, 3], 4, "by_size;blocks=2")
    plan.level(HOT, "load")
    assert imbalance_of(plan.weights(HOT)) == pytest.approx(1.72)
    assert [plan.where.count(server) for server in range(4)] == [2, 2, 2, 2]


def test_what_is_even_stays() -> None:
    plan = arranged([5.0] * 8, [0, 1] * 4, 2)
    plan.level([5.0] * 8, "load")
    assert plan.moved() == []


def test_a_server_that_has_come_gets_its_share_and_nothing_else_moves() -> None:
    plan = arranged([10.0] * 12, [0, 1] * 6, 3)
    plan.fill(2, "come")
    assert {one.to for one in plan.moved()} == {2}
    assert [plan.where.count(server) for server in range(3)] == [4, 4, 4]


def test_a_server_that_has_come_is_filled_past_a_block_that_cannot_be_divided() -> None:
    plan = arranged([80.0, 32.0, 32.0], [0, 1, 1], 3)
    plan.fill(2, "come")
    assert sorted(plan.where) == [0, 1, 2]


def test_along_a_ring_a_server_that_has_come_takes_what_the_ring_says() -> None:
    keys = [Piece(f"key{at}", 10.0, 10.0) for at in range(200)]
    text = placement("by_hash")
    two = Rearrangement(keys, [0] * 200, 3, text, closed={0, 2})
    two.empty_closed("off")
    three = Rearrangement(keys, two.where, 3, text, closed={0})
    three.fill(2, "come")
    straight = Rearrangement(keys, [0] * 200, 3, text, closed={0})
    straight.empty_closed("off")
    assert three.where == straight.where
    assert 0 < len(three.moved()) < 140


def test_groups_and_pins_hold() -> None:
    text = placement("by_size;pin:a=0;together=b|c")
    some = [Piece(key, 10.0, 10.0) for key in "abcdef"]
    plan = Rearrangement(some, [0] * 6, 2, text)
    plan.level([10.0] * 6, "load")
    assert plan.where[0] == 0
    assert plan.where[1] == plan.where[2]
    assert plan.where.count(1) == 3


def test_what_is_pinned_to_a_server_that_goes_is_named() -> None:
    plan = arranged([10.0], [0], 2, "by_size;pin:p1=0", closed={0})
    with pytest.raises(ConfigError, match=r"key 'p1' .* is pinned to server 0, which has left or"):
        plan.empty_closed("drained")


def test_a_block_that_nobody_has_room_for_is_named() -> None:
    plan = arranged([60.0, 60.0], [0, 1], 2, "by_size;bytes=100", closed={0})
    with pytest.raises(ConfigError, match=r"no other server has room for key 'p1' \(60 bytes\)"):
        plan.empty_closed("drained")
    plan = arranged([60.0, 60.0], [0, 1], 2, "by_size;bytes=100")
    with pytest.raises(ConfigError, match=r"key 'p1' \(60 bytes\) has no room on server 1"):
        plan.send({"p1"}, 1, "sent")


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=25),
    data=st.data(),
    places=st.integers(2, 5),
    blocks=st.one_of(st.none(), st.integers(5, 30)),
)
def test_laws_of_every_plan(
    sizes: list[int], data: st.DataObject, places: int, blocks: int | None
) -> None:
    """Every block is somewhere, nothing is made worse, nothing comes to a server that is closed or
    full, and what moves has moved from where it was."""
    where = data.draw(
        st.lists(st.integers(0, places - 1), min_size=len(sizes), max_size=len(sizes))
    )
    weights = [float(data.draw(st.integers(0, 30))) for _ in sizes]
    closed = data.draw(st.sets(st.integers(0, places - 1), max_size=places - 1))
    text = "by_size" if blocks is None else f"by_size;blocks={blocks}"
    plan = arranged([float(size) for size in sizes], where, places, text, closed=closed)
    try:
        plan.empty_closed("off")
    except ConfigError:
        assert blocks is not None
        return
    assert not closed & set(plan.where)
    before = imbalance_of(plan.weights(weights))
    plan.level(weights, "load")
    assert not closed & set(plan.where)
    assert imbalance_of(plan.weights(weights)) <= before + 1e-9
    moved = plan.moved()
    assert all(plan.where[one.at] == one.to != where[one.at] for one in moved)
    assert {one.at for one in moved} == {at for at, to in enumerate(plan.where) if to != where[at]}
    counts = [plan.where.count(server) for server in range(places)]
    had = [where.count(server) for server in range(places)]
    assert all(n <= max(blocks or n, before) for n, before in zip(counts, had, strict=True))


# --- who stands for a block --------------------------------------------------------------------


def test_a_contribution_goes_by_the_placement_that_it_began_in() -> None:
    owners, block = Owners(), BlockSpec(3, 0, [])
    assert owners.of(block, 0) == (0,)
    owners.change(4, 3, 0, [0, 1])
    owners.change(6, 3, 0, [1])
    assert [owners.of(block, at) for at in (0, 3, 4, 5, 6, 9)] == [
        (0,),
        (0,),
        (0, 1),
        (0, 1),
        (1,),
        (1,),
    ]
    assert owners.of(BlockSpec(5, 2, []), 9) == (2,)
    assert owners.placement == 6


def test_who_must_hold_a_contribution_is_who_got_some_of_it() -> None:
    homes = Homes({0, 1})
    homes.change(4, {0, 1}, {2})
    homes.change(6, {1, 2})
    assert [homes.at(at) for at in (0, 4, 5, 6)] == [{0, 1}, {0, 1, 2}, {0, 1, 2}, {1, 2}]
    assert homes.owners == {1, 2}
    homes.without(2)
    assert homes.at(5) == {0, 1}
