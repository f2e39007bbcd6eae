"""The simulator against worked examples: workers that need 2, 5 and 7 for each batch, long runs,
exponential workers, and the costs of communication.

The expected runs of 2, 5, 7 stand in fixtures/sync_oracle.json; everything here runs the shipped
simulator, and so the real synchroniser.
"""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import pytest

from zkv.compute_times import compute_times
from zkv.network_model import Network
from zkv.policy import policy
from zkv.simulation_report import to_plain
from zkv.simulator import Simulation
from zkv.sync import Waiting

FIXTURE = Path(__file__).parent.parent / "fixtures" / "sync_oracle.json"
ORACLE = {name: run for name, run in json.loads(FIXTURE.read_text()).items() if name != "about"}
WINDOWS = (14, 15, 30, 60)
MEGABYTE = 10**6


def simulation(text, compute="2,5,7", **options):
    return Simulation(policy(text), compute_times(compute), **options)


def through(text, until, compute="2,5,7", **options):
    return simulation(text, compute, **options).run(until=until).report()


def each(report, name):
    return [getattr(account, name) for account in report.accounts]


# --- 2, 5, 7 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("until", WINDOWS)
@pytest.mark.parametrize("text", ORACLE)
def test_workers_of_2_5_and_7_give_the_oracles_numbers(text, until):
    report = through(text, until)
    expected = ORACLE[text]["through"][str(until)]

    assert list(report.update_times) == expected["update_times"]
    for name in ("arrived", "applied", "busy", "waiting", "cancelled", "cancelled_time"):
        assert each(report, name) == expected[name], name
    assert [list(one) for one in report.pending] == expected["pending"]
    assert [list(one) for one in report.cancels] == expected["cancels"]
    assert report.total("useful") == expected["useful"]
    assert report.busy_share == Fraction(sum(expected["busy"]), 3 * until)
    assert report.useful_share == Fraction(expected["useful"], 3 * until)
    assert list(report.staleness) == expected["staleness"]
    assert report.staleness_mean == Fraction(expected["staleness_mean"])
    assert each(report, "transfer") == each(report, "bytes_up") == [0, 0, 0]
    trace = [row for row in ORACLE[text]["applied"] if row[1] <= until]
    assert [list(one) for one in report.contributions] == trace


@pytest.mark.parametrize("until", WINDOWS)
@pytest.mark.parametrize("text", ORACLE)
def test_json_has_the_oracles_numbers(text, until):
    plain = json.loads(json.dumps(to_plain(through(text, until, trace=False))))
    expected = ORACLE[text]["through"][str(until)]

    assert plain["policy"] == text
    assert plain["updates"] == expected["update_times"]
    for name in ("arrived", "applied", "busy", "waiting", "staleness"):
        assert plain[name] == expected[name], name
    assert plain["pending"] == len(expected["pending"])
    assert [[p["time"], p["worker"]] for p in plain["pending_contributions"]] == expected["pending"]
    assert plain["cancelled"]["count"] == sum(expected["cancelled"])
    assert plain["cancelled"]["time"] == sum(expected["cancelled_time"])
    assert plain["cancelled"]["count_per_worker"] == expected["cancelled"]
    assert plain["cancelled"]["time_per_worker"] == expected["cancelled_time"]
    assert plain["busy_share"] == float(Fraction(sum(expected["busy"]), 3 * until))
    assert Fraction(plain["exact"]["useful_share"]) == Fraction(expected["useful"], 3 * until)
    assert Fraction(plain["exact"]["staleness_mean"]) == Fraction(expected["staleness_mean"])


BY_15 = {
    # policy: (updates, arrived, applied, pending, waiting, busy, useful, cancelled, staleness)
    "bsp": (2, 6, 6, 0, 14, "31/45", "28/45", (0, 0), (0, "0")),
    "asp": (12, 12, 12, 0, 0, "1", "43/45", (0, 0), (5, "7/4")),
    "ssp:0": (6, 6, 6, 0, 14, "31/45", "28/45", (0, 0), (2, "1")),
    "ssp:1": (8, 8, 8, 0, 8, "37/45", "7/9", (0, 0), (3, "5/4")),
    "ssp:2": (9, 9, 9, 0, 6, "13/15", "37/45", (0, 0), (4, "13/9")),
    "ssp:3": (10, 10, 10, 0, 4, "41/45", "13/15", (0, 0), (4, "8/5")),
    "k-bsp:2": (3, 6, 6, 0, 9, "4/5", "7/15", (3, 15), (0, "0")),
    "k-batch-bsp:2": (3, 7, 6, 1, 0, "1", "4/15", (6, 24), (0, "0")),
    "k-asp:2": (4, 9, 8, 1, 6, "13/15", "32/45", (0, 0), (1, "3/8")),
    "k-batch-asp:2": (6, 12, 12, 0, 0, "1", "43/45", (0, 0), (3, "5/6")),
}


@pytest.mark.parametrize("text", BY_15)
def test_sums_through_15(text):
    report = through(text, 15)
    assert (
        len(report.update_times),
        report.total("arrived"),
        report.total("applied"),
        len(report.pending),
        report.total("waiting"),
        str(report.busy_share),
        str(report.useful_share),
        (report.total("cancelled"), report.total("cancelled_time")),
        (report.staleness_max, str(report.staleness_mean)),
    ) == BY_15[text]


def test_a_bsp_cycle_is_7_and_two_thirds_busy():
    report = through("bsp", 14)
    assert (report.update_times, report.total("applied")) == ((7, 14), 6)
    assert report.busy_share == report.useful_share == Fraction(14, 21)
    assert each(through("bsp", 7), "waiting") == [5, 2, 0]


def test_asp_applies_twelve_gradients_by_15_and_the_third_workers_first_is_four_updates_old():
    report = through("asp", 15)
    assert report.total("applied") == 12
    first = next(one for one in report.contributions if one.worker == 3)
    assert first == (7, 7, 3, 0, 4)


def test_simultaneous_arrivals_are_applied_and_answered_in_worker_order():
    # Worker 1 arrives at 10 and starts again before worker 2, also at 10, is applied; so its next
    # contribution, at 12, is one update old. Were both applied first, it would be fresh.
    twelfth = next(one for one in through("asp", 15).contributions if one.arrived_at == 12)
    assert twelfth == (12, 12, 1, 7, 8)


def test_ssp_1_holds_the_first_worker_from_4_to_7_for_the_third():
    run = simulation("ssp:1").run(until=4)
    assert run.synchronizer.waiting(1) == Waiting(
        "ssp:1: at most 1 finished batches ahead of the slowest", on=(2, 3), need=1, have=0
    )
    run.run(until=5)
    assert run.synchronizer.waiting(1).on == (3,)
    assert run.run(until=7).synchronizer.waiting(1) is None
    spans = [s for s in run.report().spans if s.kind == "waiting"]
    assert spans == [(1, "waiting", 4, 7)]


def test_ssp_0_makes_progress_and_an_update_of_every_gradient():
    assert through("ssp:0", 14).update_times == (2, 5, 7, 9, 12, 14)


def test_k_bsp_repeats_every_five_and_the_third_worker_never_contributes():
    report = through("k-bsp:2", 15)
    assert report.update_times == (5, 10, 15)
    assert report.cancels == ((5, 3, 5), (10, 3, 5), (15, 3, 5))
    assert each(report, "applied") == [3, 3, 0]


def test_k_batch_bsp_cancels_two_thirds_of_the_work_for_one_worker():
    report = through("k-batch-bsp:2", 12)
    assert report.update_times == (4, 8, 12)
    assert each(report, "applied") == [6, 0, 0]
    assert Fraction(report.total("cancelled_time"), 3 * 12) == Fraction(2, 3)


def test_k_asp_at_7_takes_the_first_and_the_third_worker():
    report = through("k-asp:2", 15)
    assert report.update_times == (5, 7, 10, 14)
    at_7 = [one for one in report.contributions if one.applied_at == 7]
    assert at_7 == [(7, 7, 1, 1, 1), (7, 7, 3, 0, 1)]


@pytest.mark.parametrize(
    ("text", "gradients", "updates"),
    [
        ("bsp", 6, 2),
        ("ssp:0", 6, 6),
        ("k-bsp:2", 6, 3),
        ("asp", 12, 12),
        ("k-batch-asp:2", 12, 6),
    ],
)
def test_equal_gradients_need_not_be_equal_updates(text, gradients, updates):
    report = through(text, 15)
    assert (report.total("applied"), len(report.update_times)) == (gradients, updates)


def test_an_update_at_the_end_of_anothers_batch_cancels_the_later_number():
    report = through("k-bsp:1", 3, compute="3,3")
    assert report.update_times == (3,)
    assert report.cancels == ((3, 2, 3),)


@pytest.mark.parametrize("text", ORACLE)
def test_one_worker_alone_makes_an_update_of_every_batch(text):
    report = through(text, 30, compute="3")
    assert report.update_times == tuple(range(3, 31, 3))
    assert each(report, "busy") == [30]
    assert set(report.staleness) == {0}
    assert report.cancels == ()


# --- In the long run -------------------------------------------------------------------------

LONG_RUN = {
    # policy: (period, updates, gradients, busy, useful, mean staleness, its maximum)
    "bsp": (7, "1/7", "3/7", "2/3", "2/3", "0", 0),
    "asp": (70, "59/70", "59/70", "1", "1", "2", 6),
    "ssp:0": (7, "3/7", "3/7", "2/3", "2/3", "1", 2),
    "ssp:1": (7, "3/7", "3/7", "2/3", "2/3", "1", 3),
    "ssp:3": (7, "3/7", "3/7", "2/3", "2/3", "1", 4),
    "k-bsp:2": (5, "1/5", "2/5", "4/5", "7/15", "0", 0),
    "k-batch-bsp:2": (4, "1/4", "1/2", "1", "1/3", "0", 0),
    "k-asp:2": (32, "5/16", "5/8", "13/16", "13/16", "1/2", 2),
    "k-batch-asp:2": (140, "59/140", "59/70", "1", "1", "1", 3),
}


@pytest.mark.parametrize("text", LONG_RUN)
def test_rates_over_whole_periods_once_the_transient_is_over(text):
    period, *rates, stalest = LONG_RUN[text]
    run = simulation(text)
    early = run.run(until=10 * period).report()
    late = run.run(until=20 * period).report()
    span = 10 * period

    def gained(name):
        return Fraction(late.total(name) - early.total(name), span)

    staleness = late.staleness[len(early.staleness) :]
    assert [
        Fraction(len(late.update_times) - len(early.update_times), span),
        gained("applied"),
        gained("busy") / 3,
        gained("useful") / 3,
        Fraction(sum(staleness), len(staleness)),
    ] == [Fraction(rate) for rate in rates]
    assert late.staleness_max == stalest


@pytest.mark.parametrize(
    ("text", "period", "shares"),
    [
        ("asp", 70, ["35/59", "14/59", "10/59"]),
        ("k-asp:2", 32, ["1/2", "3/10", "1/5"]),
        ("k-bsp:2", 5, ["1/2", "1/2", "0"]),
    ],
)
def test_each_workers_share_of_the_updates_in_the_long_run(text, period, shares):
    run = simulation(text)
    early = each(run.run(until=10 * period).report(), "applied")
    late = each(run.run(until=20 * period).report(), "applied")
    gained = [after - before for before, after in zip(early, late, strict=True)]
    assert [Fraction(one, sum(gained)) for one in gained] == [Fraction(one) for one in shares]


def harmonic(count):
    return math.fsum(1 / i for i in range(1, count + 1))


@pytest.mark.parametrize(
    ("text", "expected", "updates"),
    [
        ("bsp", 4.743890903705769, 1500),
        ("k-bsp:48", 1.3631619104767758, 1000),
        ("k-bsp:56", 2.026034, 1000),
        ("k-bsp:32", 0.685396, 1000),
    ],
)
def test_exponential_workers_wait_as_long_as_the_harmonic_numbers_say(text, expected, updates):
    k = 64 if text == "bsp" else int(text.partition(":")[2])
    assert harmonic(64) - harmonic(64 - k) == pytest.approx(expected, abs=1e-6)
    run = Simulation(policy(text), compute_times("64*exp:mean=1", seed=1), trace=False)
    report = run.run(updates=updates).report()
    assert report.time / updates == pytest.approx(expected, rel=0.02)


# --- Communication ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("density", "separate", "shared"),
    [
        ("1", "0.320", "2.560"),  # float32, 100 M entries
        ("1/2", "0.160", "1.280"),  # float16
        ("1/4", "0.080", "0.640"),  # int8
        ("1/16", "0.020", "0.160"),  # ternary at 2 bits
        ("1/32", "0.010", "0.080"),  # 1 bit
        ("1/50", "0.0064", "0.0512"),  # the top 1 %, with an index of 32 bits beside each value
    ],
)
def test_400_megabytes_of_8_workers_over_10_gigabits(density, separate, shared):
    for text, is_shared in ((separate, False), (shared, True)):
        network = Network(
            bits_per_s=10**10,
            bytes_up=400 * MEGABYTE,
            density=Fraction(density),
            shared=is_shared,
        )
        report = through("bsp", 9, compute="8*1", network=network)
        assert report.update_times[0] == 1 + Fraction(text)
        assert report.accounts[0].bytes_up % round(400 * MEGABYTE * Fraction(density)) == 0


def test_computing_60_and_transferring_40_takes_100_in_series_and_60_overlapped():
    link = {"bits_per_s": 8 * 10**9, "bytes_up": 40 * 10**9}
    serial = through("bsp", 600, compute="3*60", network=Network(**link))
    overlapped = through("bsp", 600, compute="3*60", network=Network(**link, overlap=True))
    assert serial.update_times == tuple(range(100, 601, 100))
    assert overlapped.update_times == tuple(range(60, 601, 60))
    assert Fraction(len(overlapped.update_times), len(serial.update_times)) == Fraction(5, 3)
    assert each(serial, "transfer") == [240] * 3
    # Hidden behind the computation, a transfer takes none of the worker's time.
    assert each(overlapped, "transfer") == [0] * 3


def test_transfers_longer_than_the_computation_are_exposed_for_the_rest():
    network = Network(bits_per_s=8, bytes_up=3, bytes_down=4, overlap=True)
    report = through("bsp", 14, compute="5", network=network)
    assert report.update_times == (7, 14)
    assert (each(report, "busy"), each(report, "transfer")) == ([10], [4])
    assert (each(report, "bytes_up"), each(report, "bytes_down")) == ([6], [8])
