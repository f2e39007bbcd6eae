"""What a server holds and what is settled: repeats are known for all time, in little memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zkv.marks import Marks
from zkv.wire import NO_BATCH, ContributionId
from zkv_brokers.contributions import Contributions

numbers = st.lists(st.integers(1, 30), max_size=40)


@given(settled=numbers)
def test_marks_hold_exactly_what_was_settled(settled: list[int]) -> None:
    marks = Marks()
    for number in settled:
        marks.settle(number)
    assert [n for n in range(1, 40) if n in marks] == sorted(set(settled))


@given(order=st.permutations(range(1, 30)), missing=st.integers(1, 29))
def test_marks_keep_in_memory_only_what_is_above_a_gap(order: list[int], missing: int) -> None:
    marks = Marks()
    for number in order:
        if number != missing:
            marks.settle(number)
    assert marks.high == missing - 1
    assert marks.above == set(range(missing + 1, 30))
    marks.settle(missing)
    assert (marks.high, marks.above) == (29, set())


names = st.builds(ContributionId, st.integers(1, 3), st.integers(0, 1), st.integers(1, 4))
grants = st.integers(1, 4)
operations = st.one_of(
    st.tuples(st.just("at"), names, grants),
    st.tuples(st.just("settle"), names, grants),
    st.tuples(st.just("discard"), names, grants),
    st.tuples(st.just("discard all"), names, grants),
)


@given(operations=st.lists(operations, max_size=40))
def test_what_is_settled_stays_settled_and_nothing_else_is(
    operations: list[tuple[str, ContributionId, int]],
) -> None:
    held = Contributions()
    open_: dict[ContributionId, int] = {}
    over: set[tuple[int, int, int]] = set()
    dropped: set[tuple[ContributionId, int]] = set()
    for what, name, grant in operations:
        owner = (name.incarnation, name.group)
        if what == "at" and not held.is_settled(name, grant):
            held.at(name, grant)
            open_.setdefault(name, grant)
        if what == "settle":
            held.settle(name)
            if name in open_:
                over.add((*owner, open_.pop(name)))
        if what.startswith("discard"):
            batch = NO_BATCH if what == "discard all" else name.batch
            held.discard(*owner, grant, batch)
            if batch == NO_BATCH:
                over.add((*owner, grant))
            dropped.add((name, grant))
            open_ = {
                n: g
                for n, g in open_.items()
                if (n.incarnation, n.group, g) != (*owner, grant)
                or batch not in (NO_BATCH, n.batch)
            }
        assert {n: one.grant for n, one in held.open.items()} == open_
        for number in range(1, 5):
            for one in {name, *open_}:
                settled = (one.incarnation, one.group, number) in over or (one, number) in dropped
                assert held.is_settled(one, number) == settled


def test_a_contribution_is_complete_with_its_done_and_all_its_blocks() -> None:
    held = Contributions()
    name = ContributionId(1, 0, 1)
    one = held.at(name, 1)
    assert not one.complete
    one.payloads[3] = np.zeros(4, np.uint8)
    assert not one.complete
    one.bids = frozenset({3, 5})
    assert not one.complete
    one.payloads[5] = np.zeros(6, np.uint8)
    assert one.complete
    assert held.bytes_held == 10
    assert held.at(name, 1) is one


def test_a_contribution_without_blocks_here_is_complete_at_once() -> None:
    one = Contributions().at(ContributionId(1, 0, 1), 1)
    one.bids = frozenset()
    assert one.complete


def test_an_epoch_forgets_those_who_left_but_not_what_still_counts() -> None:
    held = Contributions()
    kept, lost, mine = ContributionId(1, 0, 1), ContributionId(2, 0, 1), ContributionId(3, 0, 1)
    for name in (kept, lost, mine):
        held.at(name, 1)
    held.discard(1, 0, 7, NO_BATCH)
    held.discard(2, 0, 7, NO_BATCH)
    held.keep_only({3}, {kept})
    assert set(held.open) == {kept, mine}
    assert held.is_settled(ContributionId(1, 0, 9), 7)
    # An incarnation never comes back: what it has settled need not be remembered.
    assert not held.is_settled(ContributionId(2, 0, 9), 7)
    held.settle(kept)
    assert held.is_settled(kept, 1)
