"""`zkv plan advise`: five made-up bottlenecks, each named, and what holds of every advice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from zkv.advice import CODECS, Advice, Remedy, advise, lines
from zkv.costs import overlapped_s, serial_s
from zkv.run_times import run_times
from zkv.time_split import OWN, PARTS, Meter, Part
from zkv_cli.main import app

MB = 1_000_000


def run(
    *workers: dict[str, float] | list[dict[str, float]],
    busy: tuple[float, ...] = (0.001, 0.001),
    update: tuple[float, ...] = (0.001, 0.001),
    own: float = 0.0,
    held: tuple[int, ...] = (2 * MB, 2 * MB),
    policy: str = "bsp",
    codec: str = "none",
    codecs: tuple[dict[str, Any], ...] = (),
    bytes_up: int = 4 * MB,
    batches: int = 20,
) -> dict[str, Any]:
    """The JSON of a run whose batches are each like these seconds by part; `own` is the share of
    waits that is for a worker's own contribution."""
    rows = [
        [
            [row.get(name, 0.0) for name in PARTS]
            for row in ([one] if isinstance(one, dict) else one)
        ]
        for one in workers
    ]
    rows = [(one * batches)[:batches] for one in rows]
    splits = []
    for one in rows:
        sums = dict(zip(PARTS, map(math.fsum, zip(*one, strict=True)), strict=True))
        splits.append(
            {
                "batches": batches,
                "wall_s": sum(sums.values()),
                **{f"{name}_s": spent_s for name, spent_s in sums.items()},
                "waits": {OWN: own * sums["wait"], "bsp": (1 - own) * sums["wait"]},
            }
        )
    plain = {
        "policy": policy,
        "workers": list(range(len(workers))),
        "bytes_up": [bytes_up * batches] * len(workers),
        "bytes_down": [4 * MB * batches] * len(workers),
        "time": splits,
        "time_by_batch": [{"parts": list(PARTS), "rows": one} for one in rows],
        "sent": [
            {
                str(at): {"bytes": held[at] * batches, "busy_s": s * batches}
                for at, s in enumerate(busy)
            }
        ]
        * len(workers),
        "servers": [
            {"index": at, "value_bytes": held[at], "updates": 10, "update_s": 10 * s}
            for at, s in enumerate(update)
        ],
        "codec": codec,
        "codec_down": "none",
        "codecs": list(codecs),
    }
    told: dict[str, Any] = json.loads(json.dumps(plain))
    return told


def advice(plain: dict[str, Any]) -> Advice:
    return advise(run_times(plain))


def remedy(found: Advice, name: str) -> Remedy:
    (one,) = [one for one in found.remedies if one.name == name]
    return one


# --- five bottlenecks --------------------------------------------------------------------------

SMOOTH = {"compute": 0.04, "communication": 0.004, "encode": 0.001, "wait": 0.002}


def test_slow_data_loading_is_named_and_loading_ahead_is_the_first_remedy():
    found = advice(run(*[SMOOTH | {"data": 0.05}] * 3))
    assert found.largest.name == "data"
    assert "50 ms a batch" in found.largest.text
    first = found.remedies[0]
    assert (first.kind, first.worth) == ("data", True)
    # 97 ms become max(50, 47); without loading at all they would be 47.
    assert first.gain == pytest.approx(97 / 50 - 1)
    assert found.largest.gain_if_gone == pytest.approx(97 / 47 - 1)


def test_one_slow_worker_under_bsp_is_named_and_a_policy_is_the_first_remedy():
    quick = SMOOTH | {"wait": 0.122}
    found = advice(run(quick, quick, SMOOTH | {"compute": 0.16}))
    assert found.largest.name == "straggler"
    assert "worker 2 is the slowest, 167 ms" in found.largest.text
    assert "47 ms" in found.largest.text
    first = found.remedies[0]
    assert (first.name, first.worth) == ("policy asp", True)
    assert first.gain == pytest.approx((2 / 47 + 1 / 167) / (3 / 167) - 1, rel=0.05)
    assert remedy(found, "policy k-bsp:2").worth


def test_a_slow_link_is_named_and_a_codec_is_the_first_remedy():
    # 4 MB at 100 Mbit/s are 320 ms, each way.
    slow = {"compute": 0.04, "encode": 0.001, "communication": 0.32, "wait": 0.32}
    found = advice(run(slow, slow, busy=(0.32, 0.32), own=1.0))
    assert found.largest.name == "link"
    assert "100 Mbit/s" in found.largest.text
    assert (found.remedies[0].kind, found.remedies[0].worth) == ("codec", True)
    int8 = remedy(found, "codec int8+ef")
    then_ms = 681 - 320 * (1 - 8.125 / 32) + 1.57 * 4e6 / 7.7e9 * 1e3
    assert int8.gain == pytest.approx(681 / then_ms - 1)
    assert remedy(found, "codec_down int8").worth
    overlap = overlapped_s(0.041, 0.64) / serial_s(0.041, 0.64)
    assert remedy(found, "overlap").gain == pytest.approx(1 / overlap - 1)


def test_a_codec_that_costs_more_than_it_saves_is_named_and_none_is_the_first_remedy():
    books = ({"bytes_before": 160 * MB, "bytes_after": 2 * MB, "encode_s": 4.0},)
    heavy = {"compute": 0.04, "encode": 0.1, "communication": 0.004, "wait": 0.001}
    plain = run(
        heavy,
        heavy,
        busy=(0.0002, 0.0002),
        codec="topk:0.01+fp16+ef",
        codecs=books,
        bytes_up=50_000,
    )
    found = advice(plain)
    assert found.largest.name == "encode"
    assert "by topk:0.01+fp16+ef" in found.largest.text
    first = found.remedies[0]
    assert (first.name, first.worth) == ("codec none", True)
    assert "100 ms of encoding less" in first.why
    # 79 times the bytes at the speed that was seen, and a copy as this machine makes it.
    copied_s = 4e6 * 4.0 / (3.14 * 160e6)
    assert first.gain == pytest.approx(0.145 / (0.045 + copied_s + 0.0002 * 79) - 1, rel=1e-3)


def test_an_overloaded_server_is_named_and_even_servers_are_the_first_remedy():
    waits = {"compute": 0.02, "encode": 0.001, "communication": 0.05, "wait": 0.03}
    found = advice(run(*[waits] * 4, busy=(0.005, 0.03), update=(0.002, 0.05), own=1.0))
    assert found.largest.name == "server"
    assert "server 1 takes 80 ms a batch" in found.largest.text
    assert "its machine or its link is slower" in found.largest.text
    assert (found.remedies[0].kind, found.remedies[0].worth) == ("servers", True)


def test_a_poor_placement_is_told_from_a_slow_machine_by_its_bytes():
    waits = {"compute": 0.02, "communication": 0.05, "wait": 0.03}
    held = (MB // 2, 7 * MB // 2)
    found = advice(run(*[waits] * 4, busy=(0.005, 0.03), update=(0.002, 0.05), own=1.0, held=held))
    assert found.largest.name == "server"
    assert "1.8 times the mean, with 88% of the bytes" in found.largest.text
    assert "slower" not in found.largest.text


def test_one_server_whose_updates_take_long_wants_more_of_them():
    waits = {"compute": 0.02, "communication": 0.08}
    found = advice(run(waits, waits, busy=(0.001,), update=(0.07,), held=(4 * MB,)))
    assert found.largest.name == "server"
    # Half of the update, and of the millisecond that 4 MB take on one link of two workers.
    assert remedy(found, "more servers").gain == pytest.approx(0.1 / 0.0645 - 1)
    assert not any(one.name == "even servers" for one in found.remedies)


def test_where_computing_is_all_nothing_is_worth_it():
    found = advice(run(*[SMOOTH | {"compute": 1.0}] * 2))
    assert found.largest.name == "none"
    assert not any(one.worth for one in found.remedies)
    told = lines(found)
    assert "nothing else stands out" in told[2]
    assert all("not worth it" in line for line in told[5:])


# --- laws --------------------------------------------------------------------------------------

seconds = st.floats(0, 1, allow_nan=False)
batch_rows = st.fixed_dictionaries({name: seconds for name in PARTS})
runs = st.builds(
    lambda workers, busy, update, own, policy, codec: run(
        *workers,
        busy=busy,
        update=update,
        own=own,
        policy=policy,
        codec=codec,
        codecs=()
        if codec == "none"
        else ({"bytes_before": 80 * MB, "bytes_after": 40 * MB, "encode_s": 0.5},),
        batches=6,
    ),
    st.lists(
        st.lists(batch_rows, min_size=1, max_size=3).filter(
            lambda rows: all(row["compute"] > 1e-3 for row in rows)
        ),
        min_size=1,
        max_size=4,
    ),
    st.tuples(seconds, seconds),
    st.tuples(seconds, seconds),
    seconds,
    st.sampled_from(["bsp", "asp", "ssp:1", "k-bsp:2", "k-asp:2", "k-batch-bsp:2"]),
    st.sampled_from(["none", "fp16", "int4+ef"]),
)


@settings(max_examples=25)
@given(plain=runs)
def test_shares_sum_to_one_and_gains_are_sorted_and_never_below_minus_one(plain):
    times = run_times(plain)
    for worker, rows in zip(times.workers, plain["time_by_batch"], strict=True):
        # The first batch, in which kernels compile, is left out; no second of the others is.
        for one, row in zip(worker.batches, rows["rows"][1:], strict=True):
            assert one.own_s + one.wait == pytest.approx(sum(row))
            assert min(one.up, one.wait) >= 0
    found = advise(times)
    assert sum(found.shares.values()) == pytest.approx(1)
    gains = [one.gain for one in found.remedies]
    assert gains == sorted(gains, reverse=True)
    assert all(gain >= -1 and math.isfinite(gain) for gain in gains)
    assert found.largest.gain_if_gone >= 0
    json.dumps(found.to_plain(), allow_nan=False)
    assert len(lines(found)) >= 5


@settings(max_examples=25)
@given(plain=runs.filter(lambda plain: plain["policy"] in ("bsp", "asp", "ssp:1")))
def test_what_only_takes_away_from_batches_is_never_slower(plain):
    """Under a policy that cancels nothing: there, a slower worker may be luckier."""
    found = advice(plain)
    gains = {one.kind: one.gain for one in found.remedies}
    assert gains["data"] >= -1e-9
    assert gains["overlap"] >= -1e-9
    assert gains["servers"] >= -1e-9
    for name in ("more servers", "even servers"):
        assert remedy(found, name).gain >= -1e-9


@settings(max_examples=25)
@given(plain=runs.filter(lambda plain: plain["policy"] == "asp"))
def test_no_remedy_of_the_largest_cost_gains_more_than_its_absence(plain):
    found = advice(plain)
    kinds = {"data": "data", "link": "servers", "server": "servers"}
    for one in found.remedies:
        if kinds.get(found.largest.name) == one.kind:
            assert one.gain <= found.largest.gain_if_gone * (1 + 1e-6) + 1e-9


def test_what_a_meter_books_is_what_advice_reads():
    """The parts keep their names from the worker to the advice."""
    clock = iter(range(10_000)).__next__
    meter = Meter(clock)
    for _ in range(3):
        with meter.on(Part.WAIT):
            pass
        with meter.on(Part.COMPUTE), meter.on(Part.COMMUNICATION):
            pass
        with meter.ending():
            pass
    plain = run({})
    plain["time"][0] = meter.spent().to_plain()
    plain["time_by_batch"][0]["rows"] = meter.rows
    (worker,) = run_times(plain).workers
    assert len(worker.batches) == 2
    for one, row in zip(worker.batches, meter.rows[1:], strict=True):
        assert (one.data, one.compute, one.encode) == row[:3]
        assert (one.values, one.calls, one.up + one.wait) == row[3:]


def test_the_shortest_wait_of_a_round_is_nobodys_fault():
    """Two workers that are slow in turn wait for each other, whatever their means are."""
    first = [{"compute": 0.2, "wait": 0.01}, {"compute": 0.1, "wait": 0.11}]
    second = [{"compute": 0.1, "wait": 0.11}, {"compute": 0.2, "wait": 0.01}]
    times = run_times(run(first, second))
    for worker in times.workers:
        assert {one.up for one in worker.batches} == {0.01}
        assert {round(one.wait, 9) for one in worker.batches} == {0.0, 0.1}
    # Elsewhere batches do not belong together: the least mean counts, and no batch has more.
    times = run_times(run(first, second, policy="asp", batches=21))
    assert {round(one.up, 9) for one in times.workers[0].batches} == {0.01, 0.06}


# --- bad input, and the command ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        ([1], "no JSON object"),
        ({"traceEvents": []}, "this is a trace"),
        ({"reports": []}, "scripts/demo"),
        ({"policies": []}, "zkv simulate"),
        ({"policy": "bsp", "workers": [0]}, "does not say where the time went"),
        (run(SMOOTH) | {"time": [None]}, "no worker has told"),
        (run(SMOOTH) | {"policy": "fastest"}, "fastest"),
        (run(SMOOTH) | {"sent": []}, "not whole"),
        (run(SMOOTH) | {"bytes_up": ["much"]}, "could not convert"),
        (run(SMOOTH) | {"time_by_batch": [{"parts": ["all"], "rows": [[1.0]]}]}, "parts"),
    ],
)
def test_other_files_are_refused_with_what_to_give_instead(tmp_path, plain, says):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(plain), "utf-8")
    done = CliRunner().invoke(app, ["plan", "advise", str(path)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.stderr
    assert str(path) in done.stderr


@pytest.mark.parametrize("text", [None, "{", "[" * 100_000])
def test_a_file_that_is_none_or_no_json_is_refused(tmp_path, text):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text, "utf-8")
    done = CliRunner().invoke(app, ["plan", "advise", str(path)])
    assert done.exit_code == 2
    assert "run.json" in done.stderr


def test_the_command_says_the_same_to_a_person_and_as_json(tmp_path):
    plain = run(SMOOTH, SMOOTH | {"compute": 0.16})
    path = tmp_path / "run.json"
    path.write_text(json.dumps(plain), "utf-8")
    told = CliRunner().invoke(app, ["plan", "advise", str(path)])
    assert told.exit_code == 0, told.stderr
    assert told.stdout.splitlines() == list(lines(advice(plain)))
    as_json = CliRunner().invoke(app, ["plan", "advise", "--json", "-"], input=json.dumps(plain))
    assert json.loads(as_json.stdout) == json.loads(json.dumps(advice(plain).to_plain()))


@pytest.mark.source
def test_costs_of_codecs_are_those_of_their_page():
    """docs/codecs.md, "What it costs"."""
    page = Path(__file__).parents[2] / "docs" / "codecs.md"
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]]
        for line in page.read_text("utf-8").splitlines()
        if line.startswith("| `")
    ]
    table = {row[0]: row for row in rows if len(row) == 5}
    for one in CODECS:
        assert (one.bits, one.copies) == tuple(map(float, table[one.text][1:3]))
