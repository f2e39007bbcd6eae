"""A cancellation finds its batch, whether it is heard before or after the batch has begun."""

from __future__ import annotations

import pytest

from zkv.layout import Layout
from zkv_workers.model import BatchState
from zkv_workers.running import Running
from zkv_workers.signals import Grant


def batch(number: int) -> BatchState:
    return BatchState(Grant(number, 7, 3, 0, 0, 0, {}, Layout()), 1.0)


@pytest.mark.parametrize("early", [True, False])
def test_a_cancelled_batch_knows_it(early: bool) -> None:
    running, state = Running(), batch(4)
    if early:
        running.cancel(4)
    running.add(state)
    if not early:
        assert not state.cancelled
        running.cancel(4)
    assert state.cancelled
    running.remove(4)
    assert not running.add(batch(5)).cancelled


def test_another_batch_is_not_touched() -> None:
    running = Running()
    running.cancel(3)
    state = running.add(batch(4))
    running.cancel(3)
    running.cancel(5)
    assert not state.cancelled
