"""What `zkv bench` measures and chooses, by made-up samples: its laws, and its words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv.placement import BLOCK_BYTES_LEAST
from zkv.wire import PAYLOAD_BYTES_MAX
from zkv_cli import bench_choice as b
from zkv_cli import bench_report as report
from zkv_cli.bench_choice import PASSES_LEAST, Turn, Variant

MB = 10**6
PLAIN = Variant("tcp")
BLOCKS = Variant("tcp", block_bytes=2**20)
THREADS = Variant("tcp", io_threads=2)
BUFFER = Variant("tcp", socket_bytes=2**20)
BOTH = Variant("tcp", block_bytes=2**20, io_threads=2)


def turns(*ms: float, cpu_s: float | None = 1.0) -> list[Turn]:
    """A turn of each pass, whose rounds all take as long."""
    return [Turn((one, one, one), cpu_s) for one in ms]


def chosen(first: b.Samples, second: b.Samples | None = None) -> b.Choice:
    (one,) = b.choices(first, second or {}, 0.2)
    return one


# --- what is measured ------------------------------------------------------------------------


@given(st.integers(2**19, 2**34))
def test_each_variant_differs_from_the_default_of_its_transport_in_one_setting(total: int) -> None:
    found = b.variants(total)
    assert len(set(found)) == len(found)
    for transport in b.TRANSPORTS:
        own = [one for one in found if one.transport == transport]
        assert own[0] == own[0].default
        assert all(len(one.set_) == 1 for one in own[1:])
    for one in found:
        assert one.block_bytes != b.default_blocks(total)
        assert one.block_bytes < total
        assert one.block_bytes == 0 or BLOCK_BYTES_LEAST <= one.block_bytes <= PAYLOAD_BYTES_MAX
        assert one.transport == "tcp" or not one.socket_bytes


def test_of_100_mb_all_is_measured() -> None:
    """The default's blocks have 8 MiB there, and are not measured twice."""
    assert b.default_blocks(100 * MB) == 8 * 2**20
    sizes = {"block_bytes": [2**18, 2**20], "io_threads": [2], "socket_bytes": [2**20, 2**22]}
    for transport, names in (("memory", [*sizes][:2]), ("tcp", [*sizes])):
        assert [one.set_ for one in b.variants(100 * MB) if one.transport == transport] == [
            {},
            *({name: value} for name in names for value in sizes[name]),
        ]
    assert b.variants(100 * MB, ["tcp"], [7]) == [
        *(PLAIN, Variant("tcp", 2**18), BLOCKS, THREADS),
        Variant("tcp", socket_bytes=7),
    ]


# --- figures ---------------------------------------------------------------------------------


def test_figures_are_medians_of_passes_and_ratios_within_a_pass() -> None:
    samples = {
        PLAIN: [Turn((1.0, 9.0, 2.0), 3.0), Turn((4.0, 4.0, 4.0), 6.0), Turn((8.0, 8.0, 8.0), 9.0)],
        THREADS: turns(1.0, 4.0, 12.0, cpu_s=None),
    }
    plain, threads = b.figures(samples, 0.5)
    assert (plain.median_ms, plain.low_ms, plain.high_ms, plain.passes) == (4.0, 2.0, 8.0, 3)
    assert (plain.ratio, plain.ratio_low, plain.ratio_high) == (1.0, 1.0, 1.0)
    # 6 seconds for 3 rounds of 0.5 GB.
    assert plain.cpu_s_per_gb == 4.0
    assert (threads.ratio, threads.ratio_low, threads.ratio_high) == (1.0, 0.5, 1.5)
    assert threads.cpu_s_per_gb is None


# --- the choice ------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0.01, 1000.0), min_size=PASSES_LEAST, max_size=8),
    st.floats(0.5, 0.9),
    st.data(),
)
def test_a_gain_is_found_whatever_drifts(drift: list[float], gain: float, data: st.DataObject):
    """What slows down a whole pass, changes nothing."""
    noise = data.draw(
        st.lists(st.floats(0.97, 1.03), min_size=len(drift), max_size=len(drift)), "noise"
    )
    samples = {
        PLAIN: turns(*(100 * slow for slow in drift)),
        BLOCKS: turns(*(100 * slow for slow in drift)),
        THREADS: turns(*(100 * slow * gain * one for slow, one in zip(drift, noise, strict=True))),
    }
    choice = chosen(samples)
    assert choice.differs
    assert choice.figures.variant == THREADS
    assert choice.figures.ratio == pytest.approx(gain, rel=0.031)


@given(st.lists(st.lists(st.floats(1.0, 1000.0), min_size=5, max_size=5), min_size=3, max_size=3))
def test_what_is_chosen_is_quicker_by_more_than_its_spread(times: list[list[float]]) -> None:
    samples = dict(zip((PLAIN, BLOCKS, THREADS), (turns(*row) for row in times), strict=True))
    choice = chosen(samples)
    one = choice.figures
    if choice.differs:
        assert 1 - one.ratio > one.ratio_high - one.ratio_low
        assert 1 - one.ratio > b.LEAST
        assert one.ratio_high < 1
        assert choice.nearest is None
    else:
        assert one.variant == PLAIN
        assert one.ratio == 1.0
        assert choice.nearest is not None


@pytest.mark.parametrize(
    "ratios",
    [
        pytest.param((0.9, 0.9, 0.9, 1.05), id="less than the spread"),
        pytest.param((0.985, 0.985, 0.985, 0.985), id="sure, but nothing"),
        pytest.param((0.5,) * (PASSES_LEAST - 1), id="too few passes"),
        pytest.param((1.3, 1.3, 1.3, 1.3), id="slower"),
    ],
)
def test_the_default_stays(ratios: Sequence[float]) -> None:
    samples = {
        PLAIN: turns(*[100.0] * len(ratios)),
        THREADS: turns(*(100 * one for one in ratios)),
    }
    choice = chosen(samples)
    assert not choice.differs
    assert choice.nearest is not None
    assert choice.nearest.variant == THREADS


def test_noise_alone_is_seldom_taken_for_a_gain() -> None:
    """As it is said where the number of passes is set."""
    chance = np.random.default_rng(1)
    wrong = dict.fromkeys((4, 5), 0)
    for passes in wrong:
        for _ in range(400):
            noise = np.exp(0.2 * chance.standard_normal((10, passes)))
            names = b.variants(100 * MB, ["tcp"], [*range(1, 7)])
            samples = {one: turns(*map(float, row)) for one, row in zip(names, noise, strict=True)}
            wrong[passes] += chosen(samples).differs
    assert wrong[5] < 0.06 * 400 < wrong[4] < 0.16 * 400


def test_of_two_that_are_as_quick_the_one_that_sets_less_is_chosen() -> None:
    many = Variant("tcp", io_threads=4)
    samples = {PLAIN: turns(*[9.0] * 5), many: turns(*[6.0] * 5), THREADS: turns(*[6.0] * 5)}
    assert chosen(samples).figures.variant == THREADS


def test_transports_are_judged_apart() -> None:
    memory, quicker = Variant("memory"), Variant("memory", io_threads=2)
    samples = {
        memory: turns(*[10.0] * 5),
        quicker: turns(*[5.0] * 5),
        PLAIN: turns(*[20.0] * 5),
        THREADS: turns(*[20.0] * 5),
    }
    first, second = b.choices(samples, {}, 0.2)
    assert (first.figures.variant, second.figures.variant) == (quicker, PLAIN)


# --- several settings in one -----------------------------------------------------------------

ALONE = {
    PLAIN: turns(*[10.0] * 5),
    Variant("tcp", block_bytes=2**18): turns(*[9.0] * 5),
    BLOCKS: turns(*[8.0] * 5),
    THREADS: turns(*[7.0] * 5),
    BUFFER: turns(*[11.0] * 5),
}


def test_what_is_quicker_alone_is_tried_together() -> None:
    assert b.together(b.figures(ALONE, 0.2)) == [PLAIN, THREADS, BOTH]
    assert b.together(b.figures({**ALONE, BLOCKS: turns(*[12.0] * 5)}, 0.2)) == [
        *(PLAIN, THREADS),
        Variant("tcp", block_bytes=2**18, io_threads=2),
    ]
    few = {one: ALONE[one] for one in (PLAIN, THREADS, BUFFER)}
    assert b.together(b.figures(few, 0.2)) == []


@pytest.mark.parametrize(
    ("alone", "both", "which"),
    [
        ([7.0] * 5, [5.0] * 5, BOTH),
        ([7.0] * 5, [6.9] * 5, THREADS),
        ([7.0] * 5, [3.0, 7.0, 7.0, 3.0, 3.0], THREADS),
        ([7.0] * 5, [20.0] * 5, THREADS),
        ([10.0] * 5, [10.0] * 5, PLAIN),
    ],
)
def test_all_in_one_must_be_quicker_than_the_best_alone(
    alone: list[float], both: list[float], which: Variant
) -> None:
    second = {PLAIN: turns(*[10.0] * 5), THREADS: turns(*alone), BOTH: turns(*both)}
    choice = chosen(ALONE, second)
    assert choice.figures.variant == which
    assert choice.differs == (which != PLAIN)


# --- words -----------------------------------------------------------------------------------


def test_what_to_set_is_said_for_each_who_has_to_be_told() -> None:
    everything = Variant("tcp", 2**20, 2, 2**22)
    assert report.commands(everything) == [
        "zkv broker --block-bytes 1MiB --io-threads 2 --socket-buffer 4MiB",
        "zkv server --io-threads 2 --socket-buffer 4MiB",
        "zkv.connect(io_threads=2, socket_bytes=4194304)",
    ]
    assert report.commands(BLOCKS) == ["zkv broker --block-bytes 1MiB"]
    assert report.commands(PLAIN) == []
    assert report.words(everything) == "blocks of 1MiB, 2 I/O threads, socket buffers of 4MiB"


@pytest.mark.parametrize(
    ("ratio", "passes", "words"),
    [
        (0.8, 5, "Payloads through sockets: 2 I/O threads. That took 0.80 (0.80 to 0.80 in 5"),
        (0.99, 5, "leave the defaults. Nothing was quicker by more than the spread; the quickest"),
        (1.2, 5, "leave the defaults. Nothing was quicker; next came 2 I/O threads: 1.20"),
        (0.8, 2, "leave the defaults. Of fewer than 4 passes the spread is not known: --pa"),
    ],
)
def test_advice_says_how_sure_it_is(ratio: float, passes: int, words: str) -> None:
    samples = {PLAIN: turns(*[10.0] * passes), THREADS: turns(*[10 * ratio] * passes)}
    choice = chosen(samples)
    lines = report.advice(choice)
    assert words in lines[0]
    assert ("    zkv server --io-threads 2" in lines) == choice.differs
    plain = report.plain_choice(choice, 100 * MB)
    assert (plain["io_threads"], plain["differs"]) == (1 + choice.differs, choice.differs)
    assert plain["block_bytes"] == 8 * 2**20


def test_a_row_tells_the_sizes_that_were_used() -> None:
    samples = {**ALONE, BUFFER: turns(*[12.0] * 5, cpu_s=None)}
    rows = report.rows(b.figures(samples, 0.2), 1, 100 * MB)
    assert [one["verdict"] for one in rows] == ["default", *["quicker"] * 3, "slower"]
    assert [one["block_bytes"] >> 18 for one in rows] == [32, 1, 4, 32, 32]
    assert [one["default"] for one in rows] == [True, *[False] * 4]
    head, *lines = report.as_table(rows)
    assert head.split()[:2] == ["payloads", "blocks"]
    cells = "sockets 8MiB 2 the system's 7.0 7.0 to 7.0 1.67 0.70 0.70 to 0.70 quicker"
    assert " ".join(lines[3].split()) == cells
    assert " - " in lines[4]
