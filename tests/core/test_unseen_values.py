"""What is summed ahead of the log is looked at when it is summed, or before it is reported: late,
and never too late."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import Rig
from strategies import placed

from zkv import control as c
from zkv import data_messages as d
from zkv.wire import MODEL, ContributionId, KeySpec

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="there is no Numba here"
)
MEMBERS = (1, 2, 3)
BAD = (np.nan, np.inf, -np.inf)
Problems = dict[int, tuple[int, int, float]]
"""By member: block, element and value of what is not finite."""


def rig_of(rule: str, *, allow_nan: bool, expects: bool) -> Rig:
    specs = [KeySpec(f"k{at}", "float32", (6,), allow_nan=allow_nan) for at in range(3)]
    rig = Rig(placed(specs, 1, bucket_bytes=0, block_bytes=24), optimizer_text=rule)
    rig.init({entry.kid: np.ones(6, np.float32) for entry in rig.model.own})
    rig.log(*(c.Grant(who, MODEL, 10 + who, 0, []) for who in MEMBERS))
    if expects:
        rig.log(c.Expect(MODEL, 1, [c.Expected(who, 10 + who) for who in MEMBERS]))
    return rig


def push_all(rig: Rig, order: list[tuple[int, int]], problems: Problems) -> None:
    """Send blocks in this order of (member, block), and each member's `Done` behind its last."""
    left = {who: 3 for who in MEMBERS}
    for who, bid in order:
        values = np.full(6, float(who), np.float32)
        if who in problems and problems[who][0] == bid:
            values[problems[who][1]] = problems[who][2]
        name = ContributionId(who, MODEL, 1)
        rig.data(0, d.Push(name, 10 + who, bid, "none", rig.index, weight=1.0), values)
        left[who] -= 1
        if not left[who]:
            rig.data(0, d.Done(name, 10 + who, 1.0, [0, 1, 2], [], rig.index))


def fates(rig: Rig) -> tuple[set[tuple[int, str | int]], set[int]]:
    """Return who was refused, and for which key, and who was reported as held."""
    refused = {(one.contribution.incarnation, one.key) for _, one in rig.said(c.Void)}
    held = [name for _, one in rig.said(c.Held) for name, _ in one.contributions]
    return refused, {name.incarnation for name in held if name.group == MODEL}


@given(
    order=st.permutations([(who, bid) for who in MEMBERS for bid in range(3)]),
    problems=st.dictionaries(
        st.sampled_from(MEMBERS),
        st.tuples(st.integers(0, 2), st.integers(0, 5), st.sampled_from(BAD)),
        max_size=3,
    ),
    rule=st.sampled_from(["sgd:lr=0.1", "adam:lr=0.1", "sgd:lr=0"]),
    allow_nan=st.booleans(),
)
@settings(max_examples=60)
def test_who_is_refused_does_not_depend_on_when_values_are_looked_at(
    order: list[tuple[int, int]], problems: Problems, rule: str, allow_nan: bool
) -> None:
    late = rig_of(rule, allow_nan=allow_nan, expects=True)
    at_once = rig_of(rule, allow_nan=allow_nan, expects=False)
    for rig in (late, at_once):
        push_all(rig, order, problems)
    expected = set() if allow_nan else {(who, f"k{bid}") for who, (bid, _, _) in problems.items()}
    assert fates(late) == fates(at_once)
    assert fates(late) == (expected, set(MEMBERS) - {who for who, _ in expected})
    streaming = late.shards[0].commits.streaming
    for made, state in streaming.by_block.values():
        assert len(made) == len(MEMBERS)
        assert allow_nan or np.isfinite(state.current.values).all()
    if not expected:
        assert streaming.made == 3


def test_a_sum_that_overflows_is_no_reason_to_refuse_what_it_is_made_of() -> None:
    rig = rig_of("sgd:lr=0.1", allow_nan=False, expects=True)
    name = [ContributionId(who, MODEL, 1) for who in MEMBERS]
    for who, one in zip(MEMBERS, name, strict=True):
        values = np.full(6, 3e38, np.float32)
        rig.data(0, d.Push(one, 10 + who, 0, "none", rig.index, weight=1.0), values)
    assert rig.said(c.Void) == []
    assert rig.shards[0].commits.streaming.made == 1
