"""Sums of workers at a server: what they stand for, and those that are of no use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rig import Rig
from strategies import placed

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.sums import divided, tree_sum, weighted
from zkv.wire import MODEL, ContributionId, KeySpec
from zkv_brokers.aggregates import Joined

GRANT = 5
WEIGHTS = {1: 3.0, 2: 2.0, 3: 4.0}
SIZE = 8


def name(incarnation: int, batch: int = 1) -> ContributionId:
    return ContributionId(incarnation, MODEL, batch)


def gradient(incarnation: int) -> Array:
    return np.random.default_rng(incarnation).standard_normal(SIZE).astype(np.float32)


def total(*incarnations: int) -> Array:
    """Return the weighted sum of some, as one worker makes it."""
    found = tree_sum(
        lambda at: weighted(gradient(incarnations[at]), WEIGHTS[incarnations[at]]),
        len(incarnations),
    )
    assert found is not None
    return found


def foreseen(dtype: str = "float32", **options: Any) -> Rig:
    """A server with one key in two blocks, whose next update is known to be made of all three."""
    rig = Rig(
        placed(
            [KeySpec("w", dtype, (2 * SIZE,), **options)], 1, block_bytes=4 * SIZE, bucket_bytes=4
        )
    )
    rig.init({0: np.zeros(2 * SIZE, rig.layout.dtype(rig.layout.blocks[0]).stored)})
    rig.log(*(c.Grant(who, MODEL, GRANT, 0, []) for who in WEIGHTS))
    rig.log(c.Expect(MODEL, 1, [c.Expected(who, GRANT) for who in WEIGHTS]))
    return rig


def push_sum(rig: Rig, bid: int, values: Array, *incarnations: int, **changes: Any) -> None:
    """Send a sum, in the name of the first one that is in it."""
    of = tuple(d.Addend(name(who), GRANT, WEIGHTS[who]) for who in incarnations)
    fields = {"index": rig.index, "of": of, **changes}
    message = d.Push(name(incarnations[0]), GRANT, bid, "none", **fields)
    rig.data(0, message, values)


def done(rig: Rig, *incarnations: int, bids: tuple[int, ...] = (0, 1)) -> None:
    for who in incarnations:
        skipped = [] if bids else [0]
        said = d.Done(name(who), GRANT, WEIGHTS[who], list(bids), skipped, rig.index)
        rig.data(0, said)


def commit(rig: Rig, *incarnations: int) -> None:
    counted = [c.Counted(name(who), WEIGHTS[who]) for who in incarnations]
    rig.log(c.Commit(MODEL, 1, counted, None))


def held(rig: Rig) -> list[ContributionId]:
    return [
        one for _, said in rig.said(c.Held) for one, _ in said.contributions if one.group == MODEL
    ]


def test_a_sum_stands_for_all_that_are_in_it() -> None:
    rig = foreseen()
    done(rig, 1, 2, 3)
    assert held(rig) == []
    for bid in (0, 1):
        push_sum(rig, bid, total(1, 2, 3), 2, 1, 3)
    assert sorted(held(rig), key=lambda one: one.incarnation) == [name(who) for who in WEIGHTS]
    commit(rig, 1, 2, 3)
    expected = -0.1 * divided(total(1, 2, 3), 9.0).astype(np.float64)
    np.testing.assert_allclose(rig.values()[0], np.concatenate([expected] * 2), rtol=1e-6)


def test_sums_and_gradients_are_added_at_the_place_of_the_first() -> None:
    """Of 1 and 2 comes a sum, of 3 its gradient: (1 + 2) + 3, as without sums."""
    rig, plain = foreseen(), foreseen()
    for bid in (0, 1):
        push_sum(rig, bid, total(1, 2), 1, 2)
        rig.data(0, d.Push(name(3), GRANT, bid, "none", rig.index), gradient(3))
        for who in WEIGHTS:
            plain.data(0, d.Push(name(who), GRANT, bid, "none", plain.index), gradient(who))
    for one in (rig, plain):
        done(one, 1, 2, 3)
        commit(one, 1, 2, 3)
    assert rig.values()[0].tobytes() == plain.values()[0].tobytes()
    assert rig.shards[0].commits.streaming.adopted == 2


def test_who_skips_the_block_needs_no_sum_and_has_its_weight() -> None:
    rig = foreseen()
    done(rig, 1, 2)
    done(rig, 3, bids=())
    for bid in (0, 1):
        push_sum(rig, bid, total(1, 2), 1, 2)
    assert len(held(rig)) == 3
    commit(rig, 1, 2, 3)
    expected = np.concatenate([-0.1 * divided(total(1, 2), 9.0)] * 2)
    np.testing.assert_allclose(rig.values()[0], expected, rtol=1e-6)


def test_what_came_apart_is_held_again_when_it_has_come_by_itself() -> None:
    rig = foreseen()
    done(rig, 1, 2, 3)
    for bid in (0, 1):
        push_sum(rig, bid, total(1, 2, 3), 1, 2, 3)
    first = rig.said(c.Held)[-1][1]
    rig.log(
        c.Apart(MODEL, [c.Expected(who, GRANT) for who in WEIGHTS]),
        c.Epoch(2, [1, 3], []),
        c.Expect(MODEL, 1, []),
    )
    reported = len(held(rig))
    push_sum(rig, 0, total(1, 2, 3), 1, 2, 3)  # Late, and of no use any more.
    for who in (1, 3):
        for bid in (0, 1):
            rig.data(0, d.Push(name(who), GRANT, bid, "none", rig.index), gradient(who))
    assert held(rig)[reported:] == [name(1), name(3)]
    assert first.index < rig.said(c.Held)[-1][1].index == rig.index
    plain = foreseen()
    for who in (1, 3):
        done(plain, who)
        for bid in (0, 1):
            plain.data(0, d.Push(name(who), GRANT, bid, "none", plain.index), gradient(who))
    for one in (rig, plain):
        commit(one, 1, 3)
    assert rig.values()[0].tobytes() == plain.values()[0].tobytes()
    assert not rig.said(c.Unsound)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"values": total(1, 2, 3)[:-1]}, "28 bytes"),
        ({"values": np.full(SIZE, np.nan, np.float32)}, "NaN"),
        ({"bid": 9}, "no block 9"),
        ({"of": ()}, "nothing is in its sum"),
        ({"of": (d.Addend(name(1), GRANT, 1.0),) * 2}, "not made of what"),
        ({"of": (d.Addend(name(1), GRANT, 9.0), d.Addend(name(2), GRANT, 2.0))}, "not made of"),
        ({"of": (d.Addend(name(1), GRANT + 1, 1.0),)}, "no update that the log foresees"),
    ],
)
def test_a_sum_that_cannot_be_used_is_told_and_changes_nothing(
    change: dict[str, Any], why: str
) -> None:
    rig = foreseen()
    done(rig, 1)
    fields = dict(change)
    values, bid = fields.pop("values", total(1, 2, 3)), fields.pop("bid", 0)
    push_sum(rig, bid, values, 1, 2, 3, **fields)
    ((_, told),) = rig.said(c.Unsound)
    assert why in told.reason
    assert (told.contribution, told.grant) == (name(1), GRANT)
    kept = rig.shards[0].contributions.open
    assert not any(isinstance(p, Joined) for one in kept.values() for p in one.payloads.values())


def test_two_sums_of_one_block_contradict_each_other_and_the_same_one_twice_does_not() -> None:
    rig = foreseen()
    for _ in range(2):
        push_sum(rig, 0, total(1, 2), 1, 2)
    assert not rig.said(c.Unsound)
    push_sum(rig, 0, total(1, 2, 3), 1, 2, 3)
    ((_, told),) = rig.said(c.Unsound)
    assert "two sums" in told.reason


def test_integers_come_one_by_one() -> None:
    rig = foreseen("int32", rule="assign")
    push_sum(rig, 0, np.ones(SIZE, np.int64), 1, 2, 3)
    ((_, told),) = rig.said(c.Unsound)
    assert "int32" in told.reason


def test_halves_are_summed_wide() -> None:
    rig = foreseen("float16")
    push_sum(rig, 0, np.ones(2 * SIZE, np.float32), 1, 2, 3)
    assert not rig.said(c.Unsound)


def test_values_go_to_who_has_sent_their_sum_and_to_others_when_they_ask() -> None:
    rig = foreseen()
    for who in WEIGHTS:
        rig.data(0, d.Greet(who, 1))
        rig.data(0, d.Got(who, MODEL, GRANT, [0, 1]))
    rig.log(*(c.Grant(who, MODEL, GRANT + 1, 1, []) for who in WEIGHTS))
    before = len(rig.said(d.Block))
    push_sum(rig, 0, total(1, 2, 3), 2, 1, 3)
    sent = [block.incarnation for _, block in rig.said(d.Block)[before:]]
    assert sent == [2]
    rig.data(0, d.Ask(3, MODEL, GRANT + 1, [0, 1]))
    sent = [(block.incarnation, block.bid) for _, block in rig.said(d.Block)[before:]]
    assert sent == [(2, 0), (3, 0)]
    # Its word that it has a block, from whomever, unpins it.
    rig.data(0, d.Got(1, MODEL, GRANT + 1, [0]))
    rig.data(0, d.Ask(1, MODEL, GRANT + 1, [0]))
    assert len(rig.said(d.Block)) == before + 2
