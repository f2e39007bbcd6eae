"""What a worker's cycle of batches keeps of the values that were sent to it."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from zkv import control as c
from zkv.layout import Layout
from zkv.wire import MODEL
from zkv_workers.assembly import Assembly
from zkv_workers.cycle import Cycle


def granted(version: int) -> tuple[c.Granted, Assembly]:
    """A grant of this version, and its values, which are here."""
    message = c.Granted(MODEL, version + 1, version, True, version, version, version, 0, [], 0)
    assembly = Assembly(message, set(), 0.0, 0.0, {0: 0})
    assembly.put(0, np.zeros(1, np.float32), 0.0)
    return message, assembly


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("early", [False, True])
def test_values_that_nothing_will_be_computed_on_are_let_go(prefetch: int, early: bool) -> None:
    """A server needs room of its own for each version that some worker still has."""
    cycle, seen = Cycle(prefetch=prefetch), []
    cycle.granted(*granted(0))
    for version in range(3):
        cycle.token = 1
        begun = cycle.begin(Layout())
        assert begun is not None
        seen.append(weakref.ref(begun[1].blocks[0]))
        del begun
        if early:
            cycle.granted(*granted(version + 1))
        cycle.finish()
        if not early:
            cycle.granted(*granted(version + 1))
    cycle.token = 1
    begun = cycle.begin(Layout())
    assert begun is not None
    assert begun[1].version == 3 - prefetch
    assert [one() is None for one in seen] == [True] * 3
