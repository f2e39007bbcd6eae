"""Batches that begin on what the one before was granted, while their own values travel."""

from __future__ import annotations

import numpy as np
import pytest
from bench import Bench
from hypothesis import given
from hypothesis import strategies as st
from rig import Rig
from strategies import placed

from zkv import control as c
from zkv import data_messages as d
from zkv.errors import ConfigError, Refused
from zkv.wire import MODEL, NO_BATCH, ContributionId, KeySpec
from zkv_workers import signals as s
from zkv_workers.model import BatchState, session_config


def finish(bench: Bench, state: BatchState, token: int) -> c.Finish:
    bench.feed(s.Finish(token, state.number, 1.0, ()))
    found = [one for one in bench.heard if isinstance(one, c.Finish)][-1]
    assert found.contribution.batch == state.number
    return found


def first_batch(bench: Bench) -> BatchState:
    """A batch of version 7, all of which is here."""
    bench.grant(1, version=7)
    for bid in range(3):
        bench.send(bid, version=7)
    return bench.begin(2)


def test_a_batch_computes_on_what_the_one_before_was_granted_and_says_how_old_that_is() -> None:
    bench = Bench(prefetch=1)
    state = first_batch(bench)
    assert (state.version, state.missing()) == (7, ())
    assert finish(bench, state, 3).behind == 0
    # The second is granted, and none of its values is here.
    bench.grant(2, version=9)
    state = bench.begin(4)
    assert (state.version, state.missing()) == (7, ())
    assert state.params()["a"].tolist() == [1, 2, 3, 4]
    bench.send(0, grant=2, version=9)
    assert finish(bench, state, 5).behind == 2
    # The third computes on those, and waits for them alone.
    bench.grant(3, version=10)
    for bid in range(3):
        bench.send(bid, grant=3, version=10)
    state = bench.begin(6)
    assert state.version == 9
    bench.wait(7, state, "b")
    assert bench.answer(7) is None
    bench.send(2, grant=2, version=9)
    assert bench.answer(7) is not None
    bench.wait(8, state, "a")
    assert bench.answer(8) is None
    bench.send(1, grant=2, version=9)
    assert bench.answer(8) is not None
    assert finish(bench, state, 9).behind == 1


def test_without_it_a_batch_waits_for_its_own_values() -> None:
    bench = Bench()
    finish(bench, first_batch(bench), 3)
    bench.grant(2, version=9)
    state = bench.begin(4)
    assert (state.version, state.missing(["b"])) == (9, (1,))


def test_what_was_cancelled_or_withdrawn_leaves_the_values_that_batches_begin_on() -> None:
    bench = Bench(prefetch=1)
    finish(bench, first_batch(bench), 3)
    bench.grant(2, version=9)
    state = bench.begin(4)
    bench.feed(s.Withdraw(state.number))
    assert bench.begin(5).version == 7
    bench.say(c.Cancel(MODEL, 2))
    bench.grant(3, version=10)
    assert bench.begin(6).version == 7


def test_no_batch_begins_on_a_version_that_never_came_to_be() -> None:
    """The second was finished under a grant ahead of the log, which is taken back then."""
    bench = Bench(prefetch=1)
    finish(bench, first_batch(bench), 3)
    bench.say(c.Granted(MODEL, 2, 8, True, 0, 0, 0, 0, [], 0, ahead=True))
    bench.send(0, grant=2, version=8)
    finish(bench, bench.begin(4), 5)
    bench.say(c.Cancel(MODEL, 2))
    bench.grant(3, version=8)
    state = bench.begin(6)
    assert (state.version, state.missing(["a"])) == (8, (0,))
    assert finish(bench, state, 7).behind == 0


def test_after_a_barrier_a_batch_begins_on_its_own_values() -> None:
    bench = Bench(prefetch=1)
    finish(bench, first_batch(bench), 3)
    bench.feed(s.Barrier(4))
    bench.grant(2, version=30)
    assert bench.begin(5).version == 30


def test_values_that_come_just_in_time_are_none_to_begin_on() -> None:
    bench = Bench(prefetch=1)
    bench.feed(s.Begin(2, on_demand=True))
    answer = bench.answer(2)
    assert isinstance(answer, s.Fail)
    assert isinstance(answer.error, Refused)
    assert "prefetch=0" in str(answer.error)


@pytest.mark.parametrize("given_", [2, -1])
def test_other_numbers_are_refused(given_: int) -> None:
    with pytest.raises(ConfigError, match="neither 0 nor 1"):
        session_config("tcp://b:1", prefetch=given_)


def test_a_variable_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert session_config("tcp://b:1")[0].prefetch == 0
    monkeypatch.setenv("ZKV_PREFETCH", "1")
    assert session_config("tcp://b:1")[0].prefetch == 1
    assert session_config("tcp://b:1", prefetch=0)[0].prefetch == 0


@given(values=st.booleans())
def test_a_server_goes_on_with_the_values_of_a_finished_batch_that_does_not_count(
    values: bool,
) -> None:
    rig = Rig(placed([KeySpec("w", "float32", (8,))], 1, bucket_bytes=0, block_bytes=16))
    rig.init({0: np.arange(8, dtype="f4")})
    rig.log(c.Grant(2, MODEL, 1, 0, []))
    rig.push(ContributionId(2, MODEL, 1), 1, {0: np.ones(8, "f4")})
    rig.log(c.Discard(2, MODEL, 1, NO_BATCH, values))
    rig.data(0, d.Greet(2, 1))
    sent = [one for _, one in rig.sent if isinstance(getattr(one, "message", None), d.Block)]
    assert len(sent) == (2 if values else 0)
    assert not rig.shards[0].contributions.open
