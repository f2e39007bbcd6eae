"""The probe of a worker's link: what it finds on a link of given speed, and when it gives up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv import control as c
from zkv import data_messages as d
from zkv.greetings import ServerAt
from zkv_workers.link_probe import LARGE_BYTES, PATIENCE_S, ROUNDS, LinkProbe
from zkv_workers.signals import SendData

SERVERS = [ServerAt(at, f"tcp://s:{at + 1}", f"server-{at}") for at in range(3)]


def member(rank: int = 0) -> c.Welcome:
    return c.Welcome(rank, 7, rank, 2, 1, SERVERS, "", "bsp")


def run(probe: LinkProbe, rate: float, trip_s: float, noise_s: list[float]) -> int:
    """Answer all probes over a link; return how many bytes were sent."""
    now, sent, out = 0.0, 0, probe.begin(member(), 0.0)
    late = iter(noise_s)
    while out:
        (one,) = out
        assert isinstance(one, SendData)
        assert isinstance(one.message, d.Probe)
        assert one.payload is not None
        sent += one.payload.nbytes
        now += trip_s + one.payload.nbytes / rate + next(late)
        out = probe.answered(d.Probed(0, 7, one.message.number), now)
    return sent


@given(rate=st.floats(1e5, 1e9), trip_s=st.floats(0.0, 0.1), late=st.integers(0, 2 * ROUNDS - 1))
def test_it_finds_a_links_rate_whatever_its_trip_though_a_peer_is_late(
    rate: float, trip_s: float, late: int
) -> None:
    found: list[float] = []
    noise = [0.0] * (2 * ROUNDS)
    noise[late] = 0.3
    run(LinkProbe(True, found.append), rate, trip_s, noise)
    assert found == [pytest.approx(rate, rel=1e-3)]


def test_on_a_very_slow_link_a_small_probe_is_enough() -> None:
    found: list[float] = []
    assert run(LinkProbe(True, found.append), 5_000.0, 0.0, [0.0]) < LARGE_BYTES
    assert found == [pytest.approx(5_000.0)]


def test_an_answer_that_does_not_come_is_not_waited_for() -> None:
    found: list[float] = []
    probe = LinkProbe(True, found.append)
    probe.tick(100.0)
    probe.begin(member(), 100.0)
    probe.tick(100.0 + PATIENCE_S)
    assert found == []
    probe.tick(100.1 + PATIENCE_S)
    assert found == [0.0]
    assert probe.answered(d.Probed(0, 7, 1), 104.0) == []
    probe.tick(200.0)
    assert found == [0.0]


def test_workers_probe_different_servers_and_only_the_last_probe_is_believed() -> None:
    probe = LinkProbe(True, lambda rate: None)
    (first,) = probe.begin(member(rank=4), 0.0)
    assert first.server == 1
    # A new broker: it begins again.
    (again,) = probe.begin(member(rank=2), 1.0)
    assert again.server == 2
    assert probe.answered(d.Probed(0, 7, 1), 1.2) == []
    assert len(probe.answered(d.Probed(0, 7, 2), 1.2)) == 1


def test_nothing_is_sent_where_nothing_is_to_be_measured() -> None:
    found: list[float] = []
    probe = LinkProbe(False, found.append)
    assert probe.begin(member(), 0.0) == []
    probe.tick(1e9)
    assert found == []
