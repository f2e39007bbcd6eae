"""`zkv simulate` as it is typed: figures, tables, pictures, and errors that name the mistake.

No process is started: the command runs in this one.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zkv_cli.main import app


def simulate(*arguments):
    return CliRunner().invoke(app, ["simulate", *arguments])


def told(*arguments):
    result = simulate(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_the_example_of_three_workers_under_ssp_1():
    plain = told("--compute", "2,5,7", "--policy", "ssp:1", "--until", "15")
    (run,) = plain["policies"]
    expected = {
        "policy": "ssp:1",
        "updates": [2, 4, 5, 7, 9, 10, 14, 15],
        "arrived": [3, 3, 2],
        "applied": [3, 3, 2],
        "waiting": [8, 0, 0],
        "pending": 0,
        "busy_share": 37 / 45,
        "useful_share": 7 / 9,
        "staleness": [0, 0, 2, 3, 0, 2, 2, 1],
    }
    assert {name: run[name] for name in expected} == expected
    assert (run["cancelled"]["count"], run["cancelled"]["time"]) == (0, 0)


def test_policies_come_in_the_order_named_and_once():
    plain = told(
        *("--compute", "2,5,7", "--until", "15"),
        *("--policy", "k-bsp:2", "--policy", "bsp", "--policy", "bsp"),
    )
    assert [run["policy"] for run in plain["policies"]] == ["k-bsp:2", "bsp"]
    assert plain["policies"][0]["cancelled"]["count"] == 3


def test_compare_has_all_seven_with_the_k_and_the_slack_asked_for():
    seven = ["bsp", "asp", "ssp:2", "k-bsp:3", "k-batch-bsp:3", "k-asp:3", "k-batch-asp:3"]
    arguments = ("--compute", "4*exp:1", "--updates", "20", "--k", "3", "--slack", "2")
    assert [run["policy"] for run in told(*arguments, "--compare")["policies"]] == seven
    assert told(*arguments) == told(*arguments, "--compare")
    both = told(*arguments, "--compare", "--policy", "ssp:0")
    assert [run["policy"] for run in both["policies"]] == ["ssp:0", *seven]
    text = simulate(*arguments).stdout.splitlines()
    assert [line.split()[0] for line in text] == ["policy", *seven]


def test_k_is_three_of_four_workers_unless_given():
    names = [run["policy"] for run in told("--compute", "64*1", "--until", "1")["policies"]]
    assert "k-bsp:48" in names
    assert "k-asp:2" in simulate("--compute", "2,5,7", "--until", "7").stdout


def test_a_person_gets_sums_and_a_row_for_each_worker():
    text = simulate("--compute", "2,5,7", "--policy", "k-bsp:2", "--until", "15").stdout
    assert text.startswith("k-bsp:2 through 15: 3 updates\n")
    assert "6 arrived, 6 applied, 0 pending; 3 batches cancelled, 15 of work lost" in text
    assert "busy 80.00 %, useful 46.67 %" in text
    assert [line.split()[0] for line in text.splitlines()[-3:]] == ["1", "2", "3"]
    many = simulate("--compute", "40*2", "--policy", "bsp", "--until", "4").stdout
    assert "and 8 more; --json has them all" in many


def test_communication_options_reach_the_model():
    arguments = ("--compute", "8*1", "--policy", "bsp", "--updates", "1", "--bandwidth")
    shared = told(*arguments, "10Gbit/s", "--up", "400MB", "--shared")["policies"][0]
    assert shared["updates"] == [3.56]
    assert shared["bytes_up"] == [400_000_000] * 8
    separate = told(*arguments, "10G", "--up", "400MB", "--density", "0.25")["policies"][0]
    assert separate["updates"] == [1.08]
    full = told(*arguments, "8e9", "--up", "1GB", "--down", "1GB", "--latency", "0.5")
    assert full["policies"][0]["updates"] == [4]
    beside = told(*arguments, "8e9", "--up", "1GB", "--down", "1GB", "--overlap")
    assert beside["policies"][0]["updates"] == [2]
    slow = told("--compute", "3", "--policy", "asp", "--until", "8", "--update-time", "2")
    assert slow["policies"][0]["updates"] == [3, 8]


def test_a_trace_of_a_live_run_and_its_torn_last_line(tmp_path):
    trace = tmp_path / "run.jsonl"
    whole = '{"worker": 0, "batch": 1, "compute_s": 2}\n{"worker": 1, "batch": 1, "compute_s": 5}\n'
    trace.write_text(whole + '{"worker": 1, "ba')
    result = simulate("--trace", str(trace), "--policy", "bsp", "--until", "10", "--json")
    assert result.exit_code == 0
    plain = json.loads(result.stdout)
    assert plain["policies"][0]["updates"] == [5, 10]
    assert plain["policies"][0]["workers"] == [0, 1]
    assert plain["warnings"] == [f"{trace}, line 3: the last line is torn and is ignored"]
    assert f"zkv simulate: warning: {plain['warnings'][0]}" in result.stderr
    # Torn within a character.
    trace.write_bytes(whole.encode() + '{"worker": 1, "host": "ü'.encode()[:-1])
    assert simulate("--trace", str(trace), "--policy", "bsp", "--until", "10").exit_code == 0


def test_k_above_the_workers_is_a_warning_with_both_numbers():
    result = simulate("--compute", "2,5,7", "--policy", "k-bsp:5", "--until", "14", "--json")
    assert result.exit_code == 0
    assert "k = 5 is more than the 3 workers" in result.stderr
    (run,) = json.loads(result.stdout)["policies"]
    assert run["updates"] == [7, 14]
    assert len(run["warnings"]) == 1


SAMPLES = ("--compute", "2,5,7", "--until", "70", "--samples", "3000", "--batch", "100")


def test_the_samples_of_one_policy_and_each_workers_share():
    text = simulate(*SAMPLES, "--policy", "asp", "--assign", "fixed").stdout
    assert text.startswith("asp through 70: 59 updates\n")
    assert text.endswith(
        """
3000 samples in batches of 100, fixed: a part for each worker, what did not count is skipped
a sample counts  min 1, mean 1.967, max 4; 0 never
times: samples   1: 1600, 2: 400, 3: 500, 4: 500

worker  counted  share    skipped  returned
1       3500     59.32 %  0        0
2       1400     23.73 %  0        0
3       1000     16.95 %  0        0
"""
    )
    default = simulate(*SAMPLES, "--policy", "k-bsp:2").stdout
    assert "3000 samples in batches of 100, retry: one pool, what did not count is" in default
    assert default.splitlines()[-1].split() == ["3", "0", "0.00", "%", "0", "1400"]
    many = simulate(
        *("--compute", "40*2", "--policy", "bsp", "--until", "4", "--samples", "100000"),
        *("--batch", "1"),
    ).stdout
    assert "times: samples   0: 99920, 1: 80\n" in many
    assert many.endswith("and 8 more; --json has them all\n")


def test_a_long_histogram_is_cut_short():
    arguments = ("--samples", "40", "--batch", "1", "--assign", "fixed")
    speeds = ",".join(f"{time}" for time in range(1, 21))
    text = simulate("--compute", speeds, "--policy", "asp", "--until", "400", *arguments).stdout
    (line,) = (line for line in text.splitlines() if line.startswith("times: samples"))
    assert line.startswith("times: samples   10: ")
    assert line.count(":") == 13
    assert re.search(r", and \d+ more$", line)


def test_the_samples_of_policies_are_compared_in_a_table_of_their_own():
    text = simulate(*SAMPLES, "--policy", "bsp", "--policy", "k-bsp:2", "--assign", "fixed").stdout
    head, columns, bsp, k_bsp = text.splitlines()[-4:]
    assert head.startswith("3000 samples in batches of 100, fixed: ")
    named = ["policy", "min", "mean", "max", "never", "smallest share", "largest share"]
    assert re.split(" {2,}", columns) == named
    assert bsp.split() == ["bsp", "1", "1.00", "1", "0", *("33.33", "%") * 2]
    # Nothing of the slowest worker's part is ever in the model.
    assert k_bsp.split() == ["k-bsp:2", "0", "0.93", "2", "1000", "0.00", "%", "50.00", "%"]


def test_samples_in_json_and_the_same_policies_without_them():
    plain = told(*SAMPLES, "--policy", "k-bsp:2", "--policy", "bsp", "--assign", "skip")
    cancelling, bsp = (run.pop("samples") for run in plain["policies"])
    assert plain == told(*SAMPLES[:4], "--policy", "k-bsp:2", "--policy", "bsp")
    assert (cancelling["n"], cancelling["batch"], cancelling["assign"]) == (3000, 100, "skip")
    assert (cancelling["counted"], cancelling["skipped"]) == ([1400, 1400, 0], [0, 0, 1400])
    assert (cancelling["share"], cancelling["returned"]) == ([0.5, 0.5, 0], [0, 0, 0])
    assert bsp["per_sample"] == {"min": 1, "mean": 1, "max": 1, "never": 0, "times": {"1": 3000}}


@pytest.mark.source
def test_the_page_about_policies_shows_what_the_command_prints():
    page = (Path(__file__).parent.parent.parent / "docs" / "policies.md").read_text("utf-8")
    command, _, printed = page.partition("```console\n$ zkv simulate ")[2].partition("\n")
    text = simulate(*command.split()).stdout
    assert printed.partition("```")[0] == text.partition("\n\n")[2]


def test_the_order_of_samples_is_that_of_the_seed():
    def asked(seed):
        arguments = (*SAMPLES, "--policy", "k-bsp:2", "--assign", "skip", "--seed", seed)
        return told(*arguments)["policies"][0]["samples"]

    assert asked("3") == asked("3")
    assert asked("3")["per_sample"]["times"] != asked("4")["per_sample"]["times"]
    batch = told("--compute", "2", "--policy", "asp", "--until", "2", "--samples", "99")
    assert batch["policies"][0]["samples"]["counted"] == [32]


def test_a_plot_is_a_picture_with_a_panel_for_each_policy(tmp_path):
    pytest.importorskip("matplotlib")
    from zkv.compute_times import compute_times
    from zkv.policy import policy
    from zkv.simulator import Simulation
    from zkv_cli.simulation_views import figure

    path = tmp_path / "run.png"
    result = simulate("--compute", "2,5,7", "--until", "15", "--plot", str(path))
    assert result.exit_code == 0, result.stderr
    assert path.read_bytes().startswith(b"\x89PNG")

    reports = [
        Simulation(policy(text), compute_times("2,5,7")).run(until=15).report()
        for text in ("ssp:1", "k-bsp:2")
    ]
    panels = figure(reports).axes
    assert [panel.get_title(loc="left").split(":2")[0].split(":1")[0] for panel in panels] == [
        "ssp",
        "k-bsp",
    ]
    # Vertical lines at the updates, a bar for each stretch of a worker's time.
    assert [line.get_xdata()[0] for line in panels[0].lines] == [2, 4, 5, 7, 9, 10, 14, 15]
    bars = sum(len(collection.get_paths()) for collection in panels[1].collections)
    assert bars == len(reports[1].spans)


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = simulate("--compute", "2", "--until", "4", "--plot", str(tmp_path / "a.png"))
    assert result.exit_code == 2
    assert "pip install 'zkv[demo]'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "complaints"),
    [
        (["--compute", "2,5", "--policy", "ssp:-1"], ["'ssp:-1' is none of bsp, asp, ssp:S"]),
        (["--compute", "2,5", "--policy", "fast"], ["'fast' is none of bsp", "k-batch-asp:K"]),
        (["--compute", "2,5", "--policy", "k-bsp:0"], ["threshold must be at least 1", "k-bsp:K"]),
        (["--compute", "2,5", "--k", "0"], ["threshold must be at least 1, given 0"]),
        (["--compute", "2,5", "--slack", "-1"], ["'ssp:-1' is none of", "S >= 0"]),
        (["--compute", "2,0"], ["worker 2", "compute time 0 must be above 0"]),
        (["--compute", "2", "--seed", "-1"], ["seed must be at least 0, given -1"]),
        ([], ["give either --compute", "or --trace FILE"]),
        (["--compute", "2", "--trace", "x"], ["give either --compute"]),
        (["--compute", "2", "--bandwidth", "fast"], ["--bandwidth: 'fast' is none of 10Gbit/s"]),
        (["--compute", "2", "--bandwidth", "0G"], ["bandwidth must be above 0 bit/s, given 0"]),
        (["--compute", "2", "--up", "-1"], ["--up: size '-1' is none of"]),
        (["--compute", "2", "--density", "0"], ["density must be above 0 and at most 1"]),
        (["--compute", "2", "--latency", "soon"], ["--latency: 'soon' is not a number"]),
        (["--compute", "2", "--samples", "0"], ["samples must be 1 to 100000000, given 0"]),
        (["--compute", "2", "--samples", "9", "--batch", "0"], ["batch must be 1 to", "given 0"]),
        (["--compute", "2", "--batch", "9"], ["--batch: only with --samples"]),
        (
            ["--compute", "2", "--batch", "9", "--assign", "skip"],
            ["--batch, --assign: only with --samples, as in --samples 1000"],
        ),
        (
            ["--compute", "2", "--samples", "9", "--assign", "fair"],
            ["assign 'fair' is none of retry, skip, fixed"],
        ),
        (
            ["--compute", "3*2", "--samples", "2", "--assign", "fixed"],
            ["samples must be at least 3 with assign fixed", "3 workers, given 2"],
        ),
        (
            ["--compute", "2", "--samples", "9", "--train", "digits"],
            ["--samples 9: not with --train, which deals out samples of its own"],
        ),
        (["--compute", "2", "--plot", "no/such/folder/a.png"], ["--plot no/such/folder/a.png"]),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments, complaints):
    result = simulate(*arguments, "--until", "9")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("zkv simulate: error: ")
    assert result.stderr.count("\n") == 1
    for complaint in complaints:
        assert complaint in result.stderr


@pytest.mark.parametrize(
    ("end", "complaint"),
    [
        ([], "give an end: --until TIME, --updates N"),
        (["--until", "0"], "--until must be above 0, given 0"),
        (["--until", "nan"], "--until: nan is out of range"),
        (["--updates", "0"], "--updates must be at least 1, given 0"),
    ],
)
def test_a_run_needs_an_end(end, complaint):
    result = simulate("--compute", "2", *end)
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_a_trace_that_is_not_there_is_a_failure_with_its_name():
    result = simulate("--trace", "no-such-file.jsonl", "--until", "9")
    assert result.exit_code == 1
    assert "no-such-file.jsonl" in result.stderr
