"""Laws of the simulator, compute times and traces, and input that is refused."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv.compute_times import (
    ComputeTimes,
    InTurn,
    Random,
    compute_times,
    exact,
    read_trace,
)
from zkv.network_model import Network
from zkv.policy import SyncPolicy, asp, bsp, k_asp, k_batch_asp, k_batch_bsp, k_bsp, policy, ssp
from zkv.simulation_report import to_plain
from zkv.simulator import Simulation

policies = st.one_of(
    st.just(bsp()),
    st.just(asp()),
    st.integers(0, 3).map(ssp),
    *(st.integers(1, 5).map(make) for make in (k_bsp, k_batch_bsp, k_asp, k_batch_asp)),
)
moments = st.fractions(min_value=Fraction(1, 4), max_value=6, max_denominator=4)
clusters = st.lists(
    st.lists(moments, min_size=1, max_size=3).map(lambda values: InTurn(tuple(values))),
    min_size=1,
    max_size=5,
).map(lambda rules: ComputeTimes(tuple(rules), tuple(range(1, len(rules) + 1))))
networks = st.builds(
    Network,
    bits_per_s=st.none() | st.integers(4, 40),
    latency_s=st.just(0) | moments,
    bytes_up=st.integers(0, 8),
    bytes_down=st.integers(0, 8),
    density=st.sampled_from([1, Fraction(1, 2), Fraction(1, 3)]),
    update_s=st.just(0) | moments,
    shared=st.booleans(),
    overlap=st.booleans(),
)


# --- Laws ------------------------------------------------------------------------------------


@given(policies, clusters, networks, st.integers(0, 40))
def test_all_time_is_accounted_for_and_no_contribution_is_lost(rule, times, network, until):
    run = Simulation(rule, times, network=network).run(until=until)
    report = run.report()
    assert report.time == until
    pending = [worker for _, worker in report.pending]
    for account in report.accounts:
        assert account.busy + account.transfer + account.waiting == until
        assert min(account.busy, account.transfer, account.waiting) >= 0
        assert account.arrived == account.applied + account.pending
        assert account.pending == pending.count(account.worker)
        assert account.useful + account.cancelled_time <= account.busy
        own = sorted(
            (s for s in report.spans if s.worker == account.worker),
            key=lambda s: (s.begin, s.end),
        )
        # Spans neither overlap nor leave a gap.
        assert sum(s.end - s.begin for s in own) == until
        assert all(one.end == after.begin for one, after in itertools.pairwise(own))
        for kind, booked in (("waiting", account.waiting), ("transfer", account.transfer)):
            assert sum(s.end - s.begin for s in own if s.kind == kind) == booked
        lost = sum(s.end - s.begin for s in own if s.kind == "cancelled")
        assert lost == account.cancelled_time
    assert len(report.staleness) == report.total("applied") == len(report.contributions)
    assert len(report.cancels) == report.total("cancelled")
    assert list(report.update_times) == sorted(report.update_times)
    assert run.synchronizer.version == len(report.update_times)


@given(policies, clusters, networks, st.integers(0, 20), st.integers(0, 20))
def test_a_run_in_two_parts_is_the_run_in_one(rule, times, network, first, more):
    run = Simulation(rule, times, network=network).run(until=first)
    run.report()
    parts = run.run(until=first + more).report()
    whole = Simulation(rule, times, network=network).run(until=first + more).report()
    assert to_plain(parts) == to_plain(whole)
    assert parts.contributions == whole.contributions


@given(policies, clusters, st.integers(1, 10), st.booleans(), st.booleans())
def test_a_run_ends_at_the_update_asked_for(rule, times, updates, shared, overlap):
    network = Network(shared=shared, overlap=overlap)
    report = Simulation(rule, times, network=network).run(updates=updates).report()
    assert len(report.update_times) == updates
    assert report.time == report.update_times[-1]
    # Without anything to transfer, links and overlap change nothing.
    assert to_plain(report) == to_plain(Simulation(rule, times).run(updates=updates).report())


@given(clusters, st.integers(1, 5), st.integers(1, 40))
def test_an_update_of_batches_takes_exactly_k_and_asp_never_waits(times, k, until):
    need = min(k, len(times.workers))
    for rule in (k_batch_asp(k), k_batch_bsp(k)):
        report = Simulation(rule, times).run(until=until).report()
        assert len(report.update_times) == report.total("arrived") // need
        assert report.total("waiting") == 0


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_asps_mean_staleness_over_a_period_is_one_less_than_the_workers(speeds):
    # Each update of one worker falls into exactly one batch of every other worker.
    period = math.lcm(*speeds)
    times = compute_times(",".join(map(str, speeds)))
    run = Simulation(asp(), times, trace=False)
    early = len(run.run(until=period).report().staleness)
    report = run.run(until=3 * period).report()
    later = report.staleness[early:]
    assert Fraction(sum(later), len(later)) == len(speeds) - 1


@given(clusters, st.integers(0, 3))
def test_ssps_bound_holds_for_every_batch_that_starts(times, slack):
    report = Simulation(ssp(slack), times).run(until=30).report()
    finished = {
        account.worker: sorted(
            one.arrived_at for one in report.contributions if one.worker == account.worker
        )
        for account in report.accounts
    }
    for span in report.spans:
        if span.kind == "compute":
            done = {
                worker: sum(at <= span.begin for at in arrivals)
                for worker, arrivals in finished.items()
            }
            assert done[span.worker] - min(done.values()) <= slack


@given(clusters, networks)
def test_separate_links_are_never_slower_than_a_shared_one_of_half_the_bandwidth(times, network):
    separate = replace(network, shared=False)
    half = None if network.bits_per_s is None else Fraction(network.bits_per_s, 2)
    shared = replace(network, shared=True, bits_per_s=half)
    fast, slow = (
        Simulation(bsp(), times, network=one, trace=False).run(updates=3).now
        for one in (separate, shared)
    )
    assert fast <= slow


# --- Examples of communication ---------------------------------------------------------------


def updates_of(text, compute, until, **figures):
    network = Network(**figures)
    run = Simulation(policy(text), compute_times(compute), network=network).run(until=until)
    return run.report()


def test_a_pull_the_batch_and_a_push_follow_one_another_each_after_its_latency():
    report = updates_of("bsp", "3", 22, latency_s=1, bits_per_s=8, bytes_up=4, bytes_down=2)
    assert report.update_times == (11, 22)
    first = sorted((s.begin, s.end, s.kind) for s in report.spans if s.begin < 11)
    assert first == [(0, 3, "transfer"), (3, 6, "compute"), (6, 11, "transfer")]


def test_on_a_shared_link_the_first_to_finish_goes_first_and_the_rest_queue():
    report = updates_of("bsp", "3,1,1", 20, bits_per_s=8, bytes_up=4, shared=True)
    arrived = {one.worker: one.arrived_at for one in report.contributions if one.applied_at == 13}
    assert arrived == {2: 5, 3: 9, 1: 13}


@pytest.mark.parametrize(("second", "third"), [(2, 3), (3, 2)])
def test_a_cancelled_push_leaves_the_shared_link_and_its_queue(second, third):
    # At 5 the push of one of workers 2 and 3 has just begun, and that of the other is queued.
    # Neither may hold up the next round, in which worker 1 pushes from 6 to 10.
    compute = f"1,{second},{third}"
    report = updates_of("k-bsp:1", compute, 15, bits_per_s=8, bytes_up=4, shared=True)
    assert report.update_times == (5, 10, 15)
    assert report.cancels[:2] == ((5, 2, second), (5, 3, third))


def test_a_cancelled_batch_loses_what_was_computed_and_not_what_was_transferred():
    report = updates_of("k-bsp:1", "1,5", 4, bits_per_s=8, bytes_up=1, bytes_down=2)
    assert report.update_times == (4,)
    assert report.cancels == ((4, 2, 2),)
    assert [account.bytes_down for account in report.accounts] == [2, 2]
    assert [account.bytes_up for account in report.accounts] == [1, 0]


def test_the_server_applies_one_update_at_a_time_and_who_starts_waits_for_it():
    alone = updates_of("asp", "3", 13, update_s=2)
    assert alone.update_times == (3, 8, 13)
    assert alone.accounts[0].waiting == 4
    # Both arrive at 3; the server is busy until 5 with the first and until 7 with the second.
    both = updates_of("asp", "3,3", 10, update_s=2)
    assert both.update_times == (3, 3, 8, 10)


def test_worker_numbers_are_those_of_the_times():
    times = ComputeTimes((InTurn((2,)), InTurn((3,))), (0, 7))
    plain = to_plain(Simulation(k_batch_asp(2), times).run(until=2).report())
    assert plain["workers"] == [0, 7]
    assert plain["pending_contributions"] == [{"time": 2, "worker": 0}]


# --- Compute times ---------------------------------------------------------------------------


def test_decimals_stay_exact():
    report = Simulation(bsp(), compute_times("0.1,0.3")).run(until=exact("0.9")).report()
    assert report.update_times == (Fraction(3, 10), Fraction(6, 10), Fraction(9, 10))
    assert report.busy_share == Fraction(2, 3)
    assert to_plain(report)["updates"] == [0.3, 0.6, 0.9]


def test_forms_of_compute_times():
    assert compute_times(
        "2, 3/4 ,2*exp:1,lognormal:mean=2,sigma=0.5,gamma:1,shape=4"
    ).by_worker == (
        InTurn((2,)),
        InTurn((3, 4)),
        Random("exp", 1.0),
        Random("exp", 1.0),
        Random("lognormal", 2.0, 0.5),
        Random("gamma", 1.0, 4.0),
    )


def test_times_in_turn_start_again_from_the_first():
    report = Simulation(asp(), compute_times("1/4")).run(until=11).report()
    assert report.update_times == (1, 5, 6, 10, 11)


@pytest.mark.parametrize(
    ("text", "variance"),
    [
        ("exp:mean=2", 4.0),
        ("lognormal:mean=2,sigma=0.5", 4 * (math.exp(0.25) - 1)),
        ("gamma:mean=2,shape=4", 1.0),
    ],
)
def test_random_times_have_the_mean_and_the_variance_of_their_law(text, variance):
    stream = compute_times(text, seed=3).streams()[1]
    drawn = list(itertools.islice(stream, 40_000))
    mean = math.fsum(drawn) / len(drawn)
    assert mean == pytest.approx(2, rel=0.02)
    assert math.fsum((x - mean) ** 2 for x in drawn) / len(drawn) == pytest.approx(
        variance, rel=0.05
    )


def test_a_seed_gives_the_same_luck_to_every_policy_and_another_to_each_worker():
    def first(seed, worker, count=70):
        return list(itertools.islice(compute_times("2*exp:1", seed=seed).streams()[worker], count))

    assert first(1, 1) == first(1, 1)
    assert first(1, 1) != first(1, 2)
    assert first(1, 1) != first(2, 1)
    times = compute_times("3*exp:1", seed=5)
    begun = []
    for rule in (asp(), bsp(), k_asp(2)):
        report = Simulation(rule, times).run(updates=4).report()
        begun.append(min(s.end - s.begin for s in report.spans if s.begin == 0 and s.worker == 1))
    assert begun[0] == begun[1] == begun[2]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("2,0", "worker 2, '0': compute time 0 must be above 0"),
        ("2,-1", "worker 2, '-1': compute time -1 must be above 0"),
        ("2,,3", "worker 2, '': '' is not a number"),
        ("nan", "worker 1, 'nan': nan is out of range"),
        ("1e999999999", "out of range"),
        ("1e-999999999", "out of range"),
        ("0*2", "1 to 1000000 workers, given 0"),
        ("99999999*2", "1 to 1000000 workers, given 99999999"),
        ("uniform:1", "'uniform' is none of exp, lognormal, gamma"),
        ("gamma:mean=1", "gamma needs shape too"),
        ("exp:mean=1,mean=2", "exp takes mean, each once, not 'mean=2'"),
        ("exp:rate=1", "exp takes mean, each once, not 'rate=1'"),
        ("exp:0", "exp: mean must be above 0, given 0"),
        ("lognormal:mean=1,sigma=-1", "lognormal: sigma must be above 0, given -1"),
    ],
)
def test_compute_times_that_are_refused(text, complaint):
    with pytest.raises(ValueError, match=r"worker|compute") as caught:
        compute_times(text)
    assert complaint in str(caught.value)


@given(st.text(max_size=30))
def test_any_text_is_compute_times_or_a_value_error(text):
    try:
        times = compute_times(text.replace("*", ""))
    except ValueError:
        return
    assert times.workers


# --- Traces ----------------------------------------------------------------------------------

GOOD = '{"worker": 4, "batch": 1, "compute_s": 0.5}\n{"worker": 0, "batch": 2, "compute_s": 3}\n'


def test_a_trace_is_sorted_by_batch_and_read_exactly():
    times, warnings = read_trace(GOOD + '{"batch":1,"worker":0,"compute_s":0.1,"host":"a"}\n')
    assert times.workers == (0, 4)
    assert times.by_worker == (InTurn((Fraction(1, 10), 3)), InTurn((Fraction(1, 2),)))
    assert warnings == ()


@given(st.integers(1, 42))
def test_a_torn_last_line_is_named_and_ignored(length):
    last = '{"worker": 4, "batch": 2, "compute_s": 0.25}'
    times, warnings = read_trace(GOOD + last[:length], name="run.jsonl")
    assert warnings == ("run.jsonl, line 3: the last line is torn and is ignored",)
    assert times == read_trace(GOOD)[0]
    assert read_trace(GOOD + last)[1] == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no batch is recorded"),
        ('{"worker": 1, "ba', "no batch is recorded"),
        ("oops\n" + GOOD, "t, line 1: not JSON: 'oops'"),
        ("[1]\n" + GOOD, "t, line 1: an object is expected"),
        ('{"worker": 1, "batch": 1}\n', "t, line 1: compute_s must be a number, given None"),
        ('{"worker": true, "batch": 1, "compute_s": 1}', "worker must be a number, given True"),
        ('{"worker": 1, "batch": 1, "compute_s": "1"}', "compute_s must be a number, given 1"),
        ('{"worker": 1, "batch": 1, "compute_s": NaN}', "compute_s must be a number, given nan"),
        ('{"worker": 1, "batch": 1, "compute_s": 1e99}', "compute_s: 1e99 is out of range"),
        ('{"worker": 1, "batch": 1, "compute_s": 0}', "compute_s must be above 0, given 0"),
        ('{"worker": 1, "batch": 1.5, "compute_s": 1}', "batch must be a whole number from 0"),
        ('{"worker": -1, "batch": 1, "compute_s": 1}', "worker must be a whole number from 0"),
    ],
)
def test_traces_that_are_refused(text, complaint):
    with pytest.raises(ValueError, match=r"^t") as caught:
        read_trace(text, name="t")
    assert complaint in str(caught.value)


@given(st.text(max_size=40) | st.dictionaries(st.text(), st.integers()).map(json.dumps))
def test_any_text_is_a_trace_or_a_value_error(text):
    try:
        times, _ = read_trace(text)
    except ValueError:
        return
    assert times.workers


# --- Refusals and warnings -------------------------------------------------------------------


@pytest.mark.parametrize("text", ["k-bsp:5", "k-batch-bsp:5", "k-asp:5", "k-batch-asp:5"])
def test_k_above_the_members_is_a_warning_with_both_numbers_and_the_run_goes_on(text):
    report = Simulation(policy(text), compute_times("2,5,7")).run(until=15).report()
    assert len(report.warnings) == 1
    assert "k = 5 is more than the 3 workers" in report.warnings[0]
    assert report.update_times
    assert not Simulation(policy(text), compute_times("5*1")).run(until=1).report().warnings


def test_a_policy_of_its_own_name_is_simulated_too():
    own = SyncPolicy("own", threshold=2, distinct=False, cancel=False, slack=1)
    assert Simulation(own, compute_times("2,5,7")).run(until=7).report().update_times == (4, 7)


@pytest.mark.parametrize(
    ("figures", "complaint"),
    [
        ({"bits_per_s": 0}, "bandwidth must be above 0 bit/s, given 0"),
        ({"density": 0}, "density must be above 0 and at most 1, given 0"),
        ({"density": 2}, "density must be above 0 and at most 1, given 2"),
        ({"latency_s": -1}, "latency_s must be at least 0, given -1"),
        ({"bytes_up": -1}, "bytes_up must be at least 0, given -1"),
        ({"bytes_down": -1}, "bytes_down must be at least 0, given -1"),
        ({"update_s": math.inf}, "update_s must be at least 0"),
    ],
)
def test_figures_of_a_network_that_are_refused(figures, complaint):
    with pytest.raises(ValueError, match=complaint):
        Network(**figures)


@pytest.mark.parametrize(
    ("end", "complaint"),
    [
        ({}, "needs an end"),
        ({"until": 3}, "until must be a time from 5 on, given 3"),
        ({"until": math.inf}, "until must be a time from 5 on"),
        ({"updates": 1}, "updates must be at least 3, given 1"),
    ],
)
def test_ends_that_are_refused(end, complaint):
    run = Simulation(asp(), compute_times("2,5,7")).run(until=5)
    with pytest.raises(ValueError, match=complaint):
        run.run(**end)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: ComputeTimes((), ()), "no worker is given"),
        (lambda: ComputeTimes((InTurn((1,)),), (2,), seed=-1), "seed must be at least 0"),
        (lambda: ComputeTimes((InTurn((1,)),) * 2, (2, 1)), "worker numbers must rise"),
        (lambda: InTurn(()), "no compute time is given"),
        (lambda: Random("beta", 1.0), "'beta' is none of exp, lognormal, gamma"),
    ],
)
def test_values_that_are_refused(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()
