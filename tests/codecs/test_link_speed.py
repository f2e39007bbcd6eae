"""What bytes cost on a link, from steps of many and of few bytes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from zkv_codecs.link_speed import KEPT, LinkSpeed

MBIT = 1e6 / 8


def seen(*steps: tuple[float, float], down: tuple[float, float] | None = None) -> LinkSpeed:
    link = LinkSpeed()
    if down is not None:
        link.add_down(*down)
    for nbytes, seconds in steps:
        link.add(nbytes, seconds)
    return link


def test_nothing_is_known_before_anything_was_sent() -> None:
    assert seen().bytes_per_s == math.inf
    assert seen((0, 0.1), (100, 0.0)).bytes_per_s == math.inf
    assert seen().slowest_bytes_per_s == math.inf


def test_what_came_down_counts_until_something_went_up() -> None:
    link = seen(down=(460_000, 0.46))
    assert link.bytes_per_s == 1e6
    link.add(460_000, 0.92)
    assert link.bytes_per_s == 5e5


def test_a_size_that_was_seen_twice_says_nothing_of_the_slope() -> None:
    """Half of 24 and 54 ms may be chance, so the 30 between them are no speed yet."""
    twice = [(3e5, 0.024), (3e5, 0.024)]
    link = seen(*twice, down=(6.7e5, 0.054))
    assert link.bytes_per_s == 3e5 / 0.024
    assert link.down == (6.7e5, 0.054)
    more = seen(*twice, (3e5, 0.024))
    for _ in range(3):
        more.add_down(6.7e5, 0.054)
    assert math.isclose(more.bytes_per_s, 3.7e5 / 0.030)


def test_steps_of_one_size_count_as_if_there_were_no_latency() -> None:
    assert seen(*[(1e6, 0.1)] * 5).bytes_per_s == 1e7


@given(
    speed=st.floats(1e5, 1e10),
    latency=st.floats(0.0, 0.1),
    few=st.floats(1e3, 1e5),
    times=st.floats(8.0, 1000.0),
)
def test_the_slope_is_the_speed_whatever_the_latency(
    speed: float, latency: float, few: float, times: float
) -> None:
    link = LinkSpeed()
    for _ in range(KEPT):
        for nbytes in (few, few * times):
            link.add(nbytes, latency + nbytes / speed)
    assert math.isclose(link.bytes_per_s, speed, rel_tol=1e-3) or latency > 1e4 * few / speed


def test_on_a_fast_link_bytes_cost_nothing() -> None:
    """461 kB within 2 ms, 12 kB within 1.9 ms: nearly all of it is latency, and it jitters."""
    jitter = (0.0, 3e-4, -2e-4, 1e-4, 5e-4, -3e-4, 0.0, 2e-4, -1e-4)
    link = LinkSpeed()
    for away in jitter:
        link.add(461_000, 2.0e-3 + away)
        link.add(12_000, 1.9e-3 - away)
    assert link.bytes_per_s == math.inf


def test_one_large_step_is_enough_on_a_slow_link() -> None:
    """At most half of it is put down to chance."""
    slow = seen((461_000, 461_000 / MBIT), *[(3000, 3000 / MBIT)] * 5)
    assert MBIT <= slow.bytes_per_s <= 2.1 * MBIT


def test_the_speed_follows_a_link_that_becomes_another() -> None:
    link = seen(*[(1e6, 1.0), (1e4, 0.01)] * KEPT)
    assert math.isclose(link.bytes_per_s, 1e6, rel_tol=1e-6)
    for _ in range(2):
        link.add(1e6, 0.1)
    assert math.isclose(link.bytes_per_s, 1e7, rel_tol=1e-6)
    assert link.slowest_bytes_per_s == link.bytes_per_s


def test_one_step_that_waited_changes_nothing() -> None:
    link = seen(*[(1e6, 0.1), (1e4, 0.001)] * KEPT)
    before = link.bytes_per_s
    link.add(1e6, 5.0)
    link.add(1e6, 0.1)
    assert math.isclose(link.bytes_per_s, before, rel_tol=1e-6)
