"""The report of a run: nothing lost on the way to JSON, text or plot, and a wrong input named."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv.time_split import Spent
from zkv_cli import report as rep

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
RUN = {
    "policy": "bsp",
    "servers": 2,
    "workers": 3,
    "updates": 450,
    "wall_s": 2.5,
    "route": "direct",
}


def worker(rank: int, **changes: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "name": f"w{rank}",
        "batches": 5,
        "outcomes": {"committed": 3, "discarded": 1, "cancelled": 1},
        "wait_s": 0.25,
        "compute_s": 1.5,
        "bytes_up": 1500,
        "bytes_down": 2_000_000,
        "loss": [[1000.0 + rank, 2.0], [1001.0 + rank, 0.5]],
        "accuracy": 0.975 if rank == 0 else None,
        **changes,
    }


def whole(**changes: Any) -> rep.RunReport:
    return rep.run_report({**RUN, **changes}, [worker(rank) for rank in (2, 0, 1)])


@given(st.integers(0, 10**16))
def test_bytes_text_keeps_three_digits_of_the_count(count: int) -> None:
    number, unit = rep.bytes_text(count).split()
    shown = float(number) * 1000 ** rep.UNITS.index(unit)
    assert math.isclose(shown, count, rel_tol=0.00502)
    assert unit == "TB" or float(number) < 1000


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1500, "1.50 kB"),
        (99_949, "99.9 kB"),
        (99_951, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (12_345_678, "12.3 MB"),
        (3 * 10**15, "3000 TB"),
    ],
)
def test_bytes_text_examples(count: int, text: str) -> None:
    assert rep.bytes_text(count) == text


@given(st.lists(st.floats(-1e6, 1e6), max_size=40), st.integers(1, 50))
def test_a_running_mean_stays_within_its_window(values: list[float], window: int) -> None:
    means = rep.smooth(values, window)
    assert len(means) == len(values)
    for end, mean in enumerate(means, start=1):
        part = values[max(0, end - window) : end]
        assert min(part) - 1e-6 <= mean <= max(part) + 1e-6


def test_running_mean_example() -> None:
    assert rep.smooth([4.0, 2.0, 0.0, 8.0], 2) == [4.0, 3.0, 1.0, 4.0]
    with pytest.raises(ValueError, match="window 0"):
        rep.smooth([1.0], 0)


@given(st.permutations(range(3)))
def test_the_order_of_arrival_does_not_matter(order: list[int]) -> None:
    assert rep.run_report(RUN, [worker(rank) for rank in order]) == whole()


@given(st.floats(-1e5, 1e5))
def test_losses_count_from_the_first_whatever_the_clock_says(offset: float) -> None:
    workers = [worker(rank, loss=[[offset + rank, 1.0]]) for rank in range(3)]
    times = [r.loss[0][0] for r in rep.run_report(RUN, workers).reports]
    assert times == pytest.approx([0.0, 1.0, 2.0])


def test_json_keeps_every_figure_and_adds_the_totals() -> None:
    plain = rep.to_plain(whole())
    assert json.loads(json.dumps(plain)) == plain
    assert {name: plain[name] for name in RUN} == RUN
    assert plain["accuracy"] == 0.975
    assert (plain["bytes_up"], plain["bytes_down"]) == (4500, 6_000_000)
    assert plain["reports"][1] == worker(1, loss=[[1.0, 2.0], [2.0, 0.5]]) | {"time": None}


def test_the_json_dict_makes_the_same_report_again() -> None:
    plain = rep.to_plain(whole())
    assert rep.run_report(plain, plain["reports"]) == whole()


def test_plain_text_example() -> None:
    assert rep.text(whole(), tty=False).splitlines() == [
        "test accuracy 0.9750 after 450 updates in 2.5 s",
        "policy bsp, 3 workers, 2 servers, route direct; 4.50 kB up, 6.00 MB down",
        "",
        "worker  batches  committed  lost    wait  compute       up     down  last loss",
        "w0            5          3     2  0.25 s   1.50 s  1.50 kB  2.00 MB     0.5000",
        "w1            5          3     2  0.25 s   1.50 s  1.50 kB  2.00 MB     0.5000",
        "w2            5          3     2  0.25 s   1.50 s  1.50 kB  2.00 MB     0.5000",
    ]


def test_a_line_for_each_worker_says_where_its_time_went() -> None:
    split = Spent(4, 2.0, 0.5, 1.0, 0.0, 0.25, 0.0, 0.25).to_plain()
    run = rep.run_report(RUN, [worker(rank, time=split if rank else None) for rank in range(3)])
    assert rep.text(run, tty=False).splitlines()[-3:] == [
        "where the time goes, by batch",
        *(
            f"w{rank}  4 batches of 500 ms: data 25.0%, compute 50.0%, encode 0.0%, "
            "communication 12.5%, wait 12.5%"
            for rank in (1, 2)
        ),
    ]


def test_one_of_a_kind_is_singular_and_a_missing_accuracy_says_so() -> None:
    run = {**RUN, "workers": 1, "servers": 1, "updates": 1}
    text = rep.text(rep.run_report(run, [worker(0, accuracy=None, loss=[])]), tty=False)
    assert "test accuracy not evaluated after 1 update in" in text
    assert "1 worker, 1 server," in text
    assert text.endswith("–")


def test_the_terminal_table_shows_what_the_plain_one_shows() -> None:
    run = rep.run_report(RUN, [worker(rank, name=f"[red]{rank}") for rank in range(3)])
    drawn = rep.text(run, tty=True)
    bare = re.sub(r"\x1b\[[0-9;]*m", "", drawn)
    assert bare != drawn
    for row in (rep.COLUMNS, *rep.rows(run)):
        assert any(all(cell in line for cell in row) for line in bare.splitlines())


def test_a_worker_without_a_name_is_called_by_its_rank() -> None:
    assert rep.run_report({**RUN, "workers": 1}, [worker(0, name="")]).reports[0].name == "0"


@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 1], [0, 1, 2, 3], [1, 2, 3], []])
def test_ranks_that_are_missing_twice_or_too_many_are_refused(ranks: list[int]) -> None:
    message = rf"ranks {re.escape(str(ranks))}, expected one each of \[0, 1, 2\]"
    with pytest.raises(ValueError, match=message):
        rep.run_report(RUN, [worker(rank) for rank in ranks])


@pytest.mark.parametrize("name", ["batches", "outcomes", "wait_s", "bytes_up", "loss"])
def test_a_missing_field_is_named_with_its_worker(name: str) -> None:
    broken = worker(1)
    del broken[name]
    with pytest.raises(ValueError, match=f"worker 1 has no '{name}'"):
        rep.run_report(RUN, [worker(0), broken, worker(2)])


@pytest.mark.parametrize("name", sorted(RUN))
def test_a_missing_field_of_the_run_is_named(name: str) -> None:
    run = {key: value for key, value in RUN.items() if key != name}
    with pytest.raises(ValueError, match=f"the run has no '{name}'"):
        rep.run_report(run, [worker(rank) for rank in range(3)])


@pytest.mark.parametrize("loss", [[], [[0.0, 0.0]], [[0.0, 2.3], [1.0, 0.1]]])
def test_a_plot_is_a_png_also_of_few_losses(tmp_path: Path, loss: list[list[float]]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "loss.png"
    workers = [worker(rank, loss=loss) for rank in range(3)]
    rep.write_plot(rep.run_report(RUN, workers), path)
    assert path.read_bytes().startswith(PNG_SIGNATURE)


def test_a_plot_has_one_named_line_per_worker_and_units_on_its_axes() -> None:
    pytest.importorskip("matplotlib")
    (axes,) = rep.figure(whole(), window=1).axes
    lines = {str(line.get_label()): line for line in axes.lines}
    named = {label: line for label, line in lines.items() if label.startswith("worker")}
    assert list(named) == [f"worker w{rank} (5 batches)" for rank in range(3)]
    assert np.asarray(named["worker w1 (5 batches)"].get_xdata()).tolist() == [1.0, 2.0]
    assert np.asarray(named["worker w1 (5 batches)"].get_ydata()).tolist() == [2.0, 0.5]
    assert "(s)" in axes.get_xlabel()
    assert "nats" in axes.get_ylabel()
    assert "0.9750" in axes.get_title()
    assert axes.get_legend() is not None
