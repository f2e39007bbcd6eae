"""The pool of samples: each exactly once per pass, whatever comes back; and the permutations."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import zkv
from zkv import pool
from zkv.pool import Draw, Orders, Pool, Shard, permutation

sizes = st.integers(1, 40)


class Deal:
    """A pool and everything that was drawn from it; `data` decides what happens."""

    def __init__(self, shard: Shard, data: st.DataObject) -> None:
        self.pool, self.data = Pool(shard), data
        self.open: dict[int, list[Draw]] = {}
        self.counted: Counter[tuple[int, int]] = Counter()
        self.skipped: Counter[tuple[int, int]] = Counter()
        self.returns = 0

    def settle(self, owner: int, draw: Draw, *, counted: bool) -> None:
        self.open[owner].remove(draw)
        self.pool.settle(draw.ticket, counted=counted)
        self.returns += not counted
        if counted or not self.pool.shard.retry:
            book = self.counted if counted else self.skipped
            book.update((draw.pass_number, at) for at in range(draw.start, draw.stop))

    def something(self, *, returns_max: int) -> None:
        """Let an owner draw, finish or fail a draw, or leave with all that it holds."""
        owner = self.data.draw(st.integers(0, 3))
        mine = self.open.setdefault(owner, [])
        what = self.data.draw(st.sampled_from(["draw", "draw", "count", "fail", "leave"]))
        if what == "draw" or not mine:
            draw = self.pool.take(owner)
            if draw is not None:
                mine.append(draw)
        elif what == "count" or self.returns >= returns_max:
            self.settle(owner, self.data.draw(st.sampled_from(mine)), counted=True)
        else:
            for draw in list(mine) if what == "leave" else mine[:1]:
                self.settle(owner, draw, counted=False)

    def to_the_end(self) -> None:
        """One owner finishes all that there is."""
        for owner, mine in self.open.items():
            for draw in list(mine):
                self.settle(owner, draw, counted=True)
        mine = self.open.setdefault(9, [])
        while (draw := self.pool.take(9)) is not None:
            mine.append(draw)
            self.settle(9, draw, counted=True)


@given(n=sizes, size=sizes, passes=st.integers(1, 3), retry=st.booleans(), data=st.data())
def test_each_sample_is_settled_once_per_pass_whoever_leaves_or_is_cancelled(
    n: int, size: int, passes: int, retry: bool, data: st.DataObject
) -> None:
    deal = Deal(Shard(n, 0, size, passes, retry), data)
    for _ in range(data.draw(st.integers(0, 30))):
        deal.something(returns_max=10)
    deal.to_the_end()
    whole = Counter({(number, at): 1 for number in range(1, passes + 1) for at in range(n)})
    assert deal.counted + deal.skipped == whole
    assert deal.pool.done
    assert deal.pool.coverage == {}
    shares = deal.pool.shares.values()
    assert sum(share.counted for share in shares) == deal.counted.total()
    assert sum(share.skipped for share in shares) == deal.skipped.total()
    if retry:
        assert deal.counted == whole
    else:
        assert sum(share.returned for share in shares) == 0


@given(n=sizes, size=sizes, data=st.data())
def test_what_comes_back_is_handed_out_first_the_oldest_pass_before_newer_ones(
    n: int, size: int, data: st.DataObject
) -> None:
    pool = Pool(Shard(n, 0, size, None))
    draws = [pool.take(0) for _ in range(data.draw(st.integers(1, 12)))]
    back = data.draw(st.lists(st.sampled_from(draws), unique_by=lambda draw: draw.ticket))
    for draw in back:
        pool.settle(draw.ticket, counted=False)
    again = [pool.take(1) for _ in back]
    key = [(one.pass_number, one.start, one.stop) for one in again if one is not None]
    assert key == sorted((one.pass_number, one.start, one.stop) for one in back)
    fresh, last = pool.take(1), draws[-1]
    assert fresh is not None
    assert (fresh.pass_number, fresh.start) > (last.pass_number, last.start)


@given(n=sizes, size=sizes, passes=st.integers(1, 3))
def test_a_pass_begins_when_all_fresh_samples_of_the_one_before_are_handed_out(
    n: int, size: int, passes: int
) -> None:
    pool = Pool(Shard(n, 0, size, passes))
    drawn = []
    while (draw := pool.take(0)) is not None:
        drawn.append((draw.pass_number, draw.start, draw.stop))
        assert len(draw) == min(size, n - draw.start)
    starts = range(0, n, size)
    assert drawn == [
        (number, start, min(start + size, n)) for number in range(1, passes + 1) for start in starts
    ]
    assert not pool.ready
    assert not pool.done


def test_a_worked_example() -> None:
    """Ten samples by four: 4, 4 and 2; the second draw comes back and another owner does it."""
    pool = Pool(Shard(10, 0, 4, 1))
    first, second, third = pool.take(0), pool.take(1), pool.take(0)
    assert [(d.start, d.stop) for d in (first, second, third) if d] == [(0, 4), (4, 8), (8, 10)]
    assert pool.take(1) is None
    assert first is not None
    assert second is not None
    assert third is not None
    pool.settle(first.ticket, counted=True)
    assert pool.coverage == {1: 0.4}
    assert pool.unsettled == {0: 1, 1: 1}
    pool.settle(second.ticket, counted=False)
    again = pool.take(0)
    assert again == Draw(4, 1, 4, 8)
    pool.settle(third.ticket, counted=True)
    pool.settle(4, counted=True)
    assert pool.done
    assert (pool.shares[0].counted, pool.shares[1].counted, pool.shares[1].returned) == (10, 0, 4)
    with pytest.raises(ValueError, match="ticket 4 is not open: 4 were given"):
        pool.settle(4, counted=True)


# --- permutations ------------------------------------------------------------------------------


@given(n=st.integers(1, 200), seed=st.integers(0, 2**63 - 1), number=st.integers(1, 2**63 - 1))
def test_a_permutation_has_every_sample_once_and_depends_on_its_arguments_only(
    n: int, seed: int, number: int
) -> None:
    order = permutation(n, seed, number)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))
    assert np.array_equal(order, permutation(n, seed, number))


@given(seed=st.integers(0, 2**32), number=st.integers(1, 100), other=st.integers(1, 100))
def test_passes_and_seeds_have_orders_of_their_own(seed: int, number: int, other: int) -> None:
    assume(number != other)
    assert not np.array_equal(permutation(100, seed, number), permutation(100, seed, other))
    assert not np.array_equal(permutation(100, seed, number), permutation(100, seed + 1, number))


def test_the_order_is_the_same_on_every_machine() -> None:
    """Recorded once: workers with different versions of NumPy must agree on it."""
    assert permutation(10, 0, 1).tolist() == RECORDED


@given(n=sizes, kept=st.integers(1, 3), asked=st.lists(st.integers(1, 5), max_size=12))
def test_samples_are_a_stretch_of_their_pass_whichever_orders_are_in_memory(
    n: int, kept: int, asked: list[int]
) -> None:
    orders = Orders(Shard(n, 4), kept)
    for number in asked:
        start, stop = n // 3, n // 3 + 5
        samples = orders.samples(number, start, stop)
        assert samples.tolist() == permutation(n, 4, number)[start:stop].tolist()
        samples[:] = -1  # A user may write to its own.


def test_an_order_that_is_in_memory_is_not_drawn_again_and_the_oldest_makes_room() -> None:
    with mock.patch.object(pool, "permutation", wraps=permutation) as drawn:
        orders = Orders(Shard(9, 4))
        for number in (1, 2, 1, 2, 3, 2, 3, 1):
            orders.samples(number, 0, 9)
    assert [call.args[2] for call in drawn.call_args_list] == [1, 2, 3, 1]


RECORDED = [7, 4, 5, 1, 9, 8, 6, 2, 0, 3]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"n": 0}, "n=0"),
        ({"n": 2**63}, "n="),
        ({"n": 3.0}, "n=3.0"),
        ({"n": 3, "seed": -1}, "seed=-1"),
        ({"n": 3, "size": 0}, "size=0"),
        ({"n": 3, "size": True}, "size=True"),
        ({"n": 3, "passes": 0}, "passes=0"),
    ],
)
def test_a_number_out_of_range_is_named(options: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        zkv.data.shard(**options)  # type: ignore[arg-type]


def test_the_face_makes_a_shard() -> None:
    assert zkv.data.shard(7, 1, size=2, passes=None, retry=False) == Shard(7, 1, 2, None, False)
    assert zkv.data.shard(7) == Shard(7, 0, 32, 1, True)
