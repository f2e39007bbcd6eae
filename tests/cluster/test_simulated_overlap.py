"""How well computing and sending overlap on slow links, in virtual time and without any CPU.

`scripts/bench_overlap` measures the same on real links. Here it is what the protocol costs: which
block waits for which.
"""

from __future__ import annotations

from functools import cache

import pytest
from slow_links import ENTRIES, LAYERS, RATE, batch_s

SHARES = ((60, 40), (40, 60), (50, 50))
"""Computing to communication, in per cent."""


@cache
def communication_s() -> float:
    """A batch of no computing."""
    return batch_s(0.0)


def ideal_s(compute: int, communication: int) -> tuple[float, float]:
    """Return the time to compute of such a share, and what a batch would take at best."""
    compute_s = communication_s() * compute / communication
    return compute_s, max(compute_s, communication_s())


def test_both_ways_of_a_link_are_used_at_once() -> None:
    one_way_s = LAYERS * ENTRIES * 4 / RATE
    assert one_way_s < communication_s() < 1.35 * one_way_s


@pytest.mark.parametrize("share", SHARES)
def test_a_batch_takes_little_more_than_the_longer_of_the_two(share: tuple[int, int]) -> None:
    compute_s, ideal = ideal_s(*share)
    assert ideal <= batch_s(compute_s) <= 1.12 * ideal
    # The control: without overlap they add up.
    together = compute_s + communication_s()
    assert 0.9 * together <= batch_s(compute_s, serial=True) <= 1.1 * together


@pytest.mark.parametrize("share", [(40, 60), (50, 50)])
def test_without_priority_first_layers_wait_for_all_the_others(share: tuple[int, int]) -> None:
    compute_s, ideal = ideal_s(*share)
    assert batch_s(compute_s, priority=False) >= 1.3 * ideal


@pytest.mark.parametrize("share", SHARES)
def test_a_batch_that_begins_on_older_values_waits_for_none(share: tuple[int, int]) -> None:
    compute_s, ideal = ideal_s(*share)
    assert batch_s(compute_s, prefetch=1) <= 1.02 * ideal
