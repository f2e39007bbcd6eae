"""`zkv plan` and the quantities it reads: units, figures as JSON, formulas, and wrong use."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from zkv import aggregation_costs, costs
from zkv_cli import units
from zkv_cli.main import app

COMMANDS = (
    "transfer",
    "ingress",
    "overlap",
    "stragglers",
    "aggregate",
    "ring",
    "placement",
    "topology",
)
LOADS = "40,25,10,8,6,5,3,3"


def plan(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def figures(*arguments: str) -> dict[str, Any]:
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def text(*arguments: str) -> str:
    result = plan(*arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


# --- laws of the units -----------------------------------------------------------------------

prefixes = st.sampled_from(["", "k", "M", "G", "T"])
decimals = st.decimals(0, 10**6, places=3).map(str)


@given(number=decimals, prefix=prefixes, space=st.sampled_from(["", " "]))
def test_bytes_on_a_link_are_eight_times_its_bits(number: str, prefix: str, space: str) -> None:
    bits = units.bits_per_s(f"{number}{space}{prefix}b/s")
    assert bits == float(Fraction(number) * units.PREFIXES[prefix])
    assert units.bits_per_s(f"{number}{space}{prefix}bit/s") == bits
    assert units.bits_per_s(f"{number}{space}{prefix}bps") == bits
    assert units.bits_per_s(f"{number}{space}{prefix}B/s") == 8 * bits


@given(number=st.integers(0, 10**9), prefix=prefixes)
def test_a_count_and_a_size_are_numbers_times_their_prefix(number: int, prefix: str) -> None:
    assert units.count(f"{number}{prefix}") == number * units.PREFIXES[prefix]
    assert units.size_bytes(f" {number} {prefix}B ") == number * units.PREFIXES[prefix]
    if prefix:
        binary = units.size_bytes(f"{number}{prefix.replace('k', 'K')}iB")
        assert binary == number * 1024 ** "kMGT".index(prefix) * 1024


@given(number=decimals)
def test_a_time_is_the_same_in_every_unit(number: str) -> None:
    seconds = units.seconds(number)
    assert seconds == units.seconds(f"{number}s") == float(number)
    for unit, factor in (("ms", 10**3), ("us", 10**6), ("ns", 10**9)):
        assert units.seconds(f"{number} {unit}") == float(Fraction(number) / factor)
    assert units.seconds(f"{number}min") == pytest.approx(60 * seconds)


READERS = [units.count, units.number, units.size_bytes, units.bits_per_s, units.seconds]


@given(
    typed=st.text(max_size=12) | st.from_regex(r"-?[0-9._]{1,6} ?[a-zA-Z/%]{0,4}", fullmatch=True)
)
def test_any_text_is_a_quantity_or_a_value_error_that_shows_it(typed: str) -> None:
    for read in READERS:
        try:
            assert math.isfinite(read(typed))
        except ValueError as error:
            assert repr(typed) in str(error)  # noqa: PT017 - both outcomes are right


@given(st.floats(1e-9, 1e20) | st.just(0.0))
def test_what_is_shown_reads_back_to_six_digits(value: float) -> None:
    for show, read in ((units.time_text, units.seconds), (units.bits_text, units.bits_per_s)):
        assert read(show(value).replace(",", "")) == pytest.approx(value, rel=1e-5)
    assert units.size_bytes(units.size_text(value).replace(",", "")) == pytest.approx(
        value, rel=1e-5, abs=0.5
    )


@pytest.mark.parametrize(
    ("read", "typed"),
    [
        (units.size_bytes, "400Mb"),
        (units.bits_per_s, "10"),
        (units.bits_per_s, "10Gb"),
        (units.seconds, "5h"),
        (units.number, "nan"),
        (units.number, "inf"),
        (units.count, "1.5"),
        (units.count, "٣"),
    ],
)
def test_a_unit_that_could_mean_something_else_is_refused(
    read: Callable[[str], float], typed: str
) -> None:
    with pytest.raises(ValueError, match=typed):
        read(typed)


# --- the seed pages' numbers, as figures -----------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "size", "time_s", "ratio"),
    [
        ([], 400_000_000, 0.32, 1),
        (["--bits", "16"], 200_000_000, 0.16, 2),
        (["--bits", "8"], 100_000_000, 0.08, 4),
        (["--bits", "2"], 25_000_000, 0.02, 16),
        (["--bits", "1"], 12_500_000, 0.01, 32),
        (["--density", "1%"], 8_000_000, 0.0064, 50),
        (["--density", "0.01", "--index-bits", "64"], 12_000_000, 0.0096, 100 / 3),
    ],
)
def test_transfer(encoding: list[str], size: int, time_s: float, ratio: float) -> None:
    told = figures("transfer", "--entries", "100M", "--link", "10Gb/s", *encoding)
    assert told["payload_bytes"] == size
    assert told["transfer_s"] == pytest.approx(time_s)
    assert told["float32_ratio"] == pytest.approx(ratio)
    sent_bits = {"1%": 32, "0.01": 64}.get(encoding[1] if encoding else "", 0)
    assert told["index_bits"] == sent_bits
    assert told["kept_entries"] == (1_000_000 if "--density" in encoding else 100_000_000)
    assert (told["entries"], told["bits_per_s"]) == (100_000_000, 1e10)


def test_ingress() -> None:
    told = figures("ingress", "--size", "400MB", "--workers", "8", "--link", "10Gb/s")
    assert told["one_worker_s"] == pytest.approx(0.32)
    assert told["shared_ingress_s"] == pytest.approx(2.56)
    told = figures(
        "ingress", "--size", "400MB", "--workers", "8", "--link", "10Gb/s", "--servers", "4"
    )
    assert told["server_bytes"] == 800_000_000
    assert told["shared_ingress_s"] == pytest.approx(0.64)


def test_overlap() -> None:
    told = figures("overlap", "--compute", "60ms", "--communication", "40ms", "--chunks", "4")
    assert told["serial_s"] == pytest.approx(0.1)
    assert told["overlapped_s"] == 0.06
    assert told["exposed_s"] == 0
    assert told["speed_up"] == pytest.approx(5 / 3)
    assert told["pipelined_s"] == pytest.approx(0.07)
    told = figures("overlap", "--compute", "40ms", "--communication", "60ms")
    assert told["exposed_s"] == pytest.approx(0.02)
    assert told["chunks"] is told["pipelined_s"] is None


def test_stragglers() -> None:
    told = figures("stragglers", "--workers", "64", "--threshold", "48", "--mean", "1s")
    assert told["exact_s"] == pytest.approx(1.3631619104767758, rel=1e-14)
    assert told["large_k_s"] == pytest.approx(math.log(4), rel=1e-14)
    assert told["all_s"] == pytest.approx(4.743890903705769, rel=1e-14)
    told = figures("stragglers", "--workers", "64", "--mean", "10ms")
    assert told["threshold"] == 64
    assert told["exact_s"] == told["all_s"] == pytest.approx(0.04743890903705769)
    assert told["large_k_s"] is None


def test_aggregate_and_ring() -> None:
    told = figures("aggregate", "--size", "160MB", "--devices", "4", "--link", "16GB/s")
    found = [told["on_device_s"], told["on_cpu_s"], told["in_parts_s"]]
    assert found == pytest.approx([0.060, 0.080, 0.015])
    told = figures("ring", "--size", "160MB", "--nodes", "4", "--link", "16GB/s")
    assert (told["chunks"], told["chunk_bytes"], told["rounds"]) == (4, 40_000_000, 6)
    assert told["sent_bytes"] == 240_000_000
    assert told["time_s"] == pytest.approx(0.015)
    half = figures("ring", "--size", "160MB", "--nodes", "4", "--link", "16GB/s", "--reduce-only")
    assert (half["rounds"], half["sent_bytes"]) == (3, 120_000_000)


def test_placement() -> None:
    told = figures("placement", "--loads", LOADS, "--servers", "4", "--request", "p1,p5,p7")
    assert told["server_loads"] == [46, 30, 13, 11]
    assert (told["mean_load"], told["busiest_load"]) == (25, 46)
    assert (told["imbalance"], told["imbalance_min"], told["fan_out"]) == (1.84, 1.6, 2)
    told = figures("placement", "--loads", LOADS, "--servers", "4", "--assign", "0,0,1,1,2,2,3,3")
    assert told["imbalance"] == 2.6
    assert told["request"] is told["fan_out"] is None
    named = "p1=40,p2=6,p3=25,p4=5,p5=10,p6=3,p7=8,p8=3"
    told = figures(
        *("placement", "--loads", named, "--servers", "4"),
        *("--assign", "0,0,1,1,2,2,3,3", "--request", "p1, p5, p7"),
    )
    assert (told["imbalance"], told["fan_out"]) == (1.84, 3)


def test_placement_before_and_after() -> None:
    given = ("placement", "--loads", LOADS, "--servers", "4", "--request", "p1,p5,p7")
    before = figures(*given)
    told = figures(*given, "--placement", "by_load; blocks=2")
    assert before.items() <= told.items()
    assert told["placement"] == "by_load;blocks=2"
    after = told["after"]
    assert after["server_loads"] == [43, 28, 15, 14]
    assert (after["busiest_load"], after["imbalance"], after["fan_out"]) == (43, 1.72, 3)
    moved = {one["block"]: (one["from"], one["to"]) for one in told["moved"]}
    assert moved == {"p5": (0, 3), "p6": (1, 2), "p7": (2, 1), "p8": (3, 0)}
    for block, server in after["assignment"].items():
        assert moved.get(block, (server, server)) == (before["assignment"][block], server)
    free = figures(*given, "--placement", "by_load")["after"]
    assert (free["busiest_load"], free["imbalance"]) == (40, 1.6)
    pinned = figures(*given, "--placement", "by_load;pin:p2=3;together=p1|p5|p7")
    assert pinned["after"]["fan_out"] == 1
    why = {one["block"]: one["why"] for one in pinned["moved"]}
    assert why["p2"] == "pin:p2=3"
    assert why["p7"] == "together=p1|p5|p7"


def test_sizes_stand_beside_loads() -> None:
    given = ("placement", "--loads", "1,2,30", "--servers", "2", "--sizes", "9kB,8kB,1kB")
    by_size = figures(*given, "--placement", "by_size")["after"]
    assert by_size["assignment"] == {"p1": 0, "p2": 1, "p3": 1}
    by_load = figures(*given, "--placement", "by_load")["after"]
    assert by_load["assignment"] == {"p1": 1, "p2": 1, "p3": 0}
    capped = figures(*given, "--placement", "by_load;bytes=10kB")["after"]
    assert capped["assignment"] == {"p1": 0, "p2": 1, "p3": 0}


# --- for a person ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "formulas"),
    [
        (
            "transfer --entries 100M --density 1% --link 10Gb/s --scale-bytes 4",
            [
                "1 % of 100,000,000 = 1,000,000",
                "(32 + 32 for its position) bit / 8 + 4 B of scales",
                "= 8 MB (float32 / 50)",
                "8 MB × 8 / 10 Gb/s = 6.4 ms",
            ],
        ),
        (
            "transfer --entries 100M --link 10Gb/s",
            ["100,000,000 × 32 bit / 8 = 400 MB", "400 MB × 8 / 10 Gb/s = 320 ms"],
        ),
        (
            "ingress --size 400MB --workers 8 --link 10Gb/s",
            ["8 × 400 MB = 3.2 GB", "3.2 GB × 8 / 10 Gb/s = 2.56 s"],
        ),
        (
            "overlap --compute 60ms --communication 40ms --chunks 4",
            [
                "60 ms + 40 ms = 100 ms",
                "max(60 ms, 40 ms) = 60 ms",
                "100 ms / 60 ms = 1.66667",
                "(60 ms + 3 × max(60 ms, 40 ms) + 40 ms) / 4 = 70 ms",
            ],
        ),
        (
            "stragglers --workers 64 --threshold 48",
            [
                "48 of 64, exact",
                "(H_64 − H_16) × 1 s = 1.36316 s",
                "limit for many workers",
                "ln(64 / 16) × 1 s = 1.38629 s",
                "H_64 × 1 s = 4.74389 s",
            ],
        ),
        (
            "aggregate --size 160MB --devices 4 --link 16GB/s",
            [
                "2 × (4 − 1) × 160 MB × 8 / 128 Gb/s = 60 ms",
                "2 × 4 × 160 MB",
                "= 80 ms",
                "160 MB / 4 × 8 / 128 Gb/s = 15 ms",
            ],
        ),
        (
            "ring --size 160MB --nodes 4 --link 16GB/s",
            ["160 MB / 4 = 40 MB", "2 × (4 − 1) = 6", "6 × 40 MB = 240 MB", "= 15 ms"],
        ),
        (
            f"placement --loads {LOADS} --servers 4 --request p1,p5,p7",
            ["p1 40 + p5 6 = 46", "46 / 25 = 1.84", "below 1.6", "p1, p5, p7: 2 of 4 servers"],
        ),
    ],
)
def test_a_person_sees_the_formula_with_the_numbers(arguments: str, formulas: list[str]) -> None:
    shown = text(*arguments.split())
    for formula in formulas:
        assert formula in shown
    lines = shown.splitlines()
    assert 2 <= len(lines) <= 6
    assert max(map(len, lines)) <= 100


def test_of_many_moves_the_first_have_a_line() -> None:
    loads = ",".join(["1"] * 30)
    given = ("placement", "--loads", loads, "--servers", "2")
    told = text(*given, "--placement", "by_size;pin:*=1")
    assert "imbalance  15 / 15 = 1 before, 30 / 15 = 2 after" in told
    assert "moves      15 of 30 blocks, 15 of 30 of the load" in told
    assert "more: --json" not in told
    assert text(*given, "--placement", "by_size;pin:p?=0;pin:p??=1").count(" pin:") == 14
    loads = ",".join(["1"] * 60)
    told = text("placement", "--loads", loads, "--servers", "2", "--placement", "by_size;pin:*=1")
    assert told.endswith("and 10 more: --json\n")
    unmoved = text(*given, "--assign", ",".join(["1"] * 30), "--placement", "by_size;pin:*=1")
    assert unmoved.endswith("moves      0 of 30 blocks, 0 of 30 of the load\n")


def test_a_server_without_a_block_is_shown_too() -> None:
    assert "server 1   nothing" in text("placement", "--loads", "4", "--servers", "2")


# --- wrong use -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("transfer --entries 1.5 --link 1b/s", "--entries: '1.5' is no whole number"),
        ("transfer --entries 8 --link 10", "--link: '10' is none of 10Gb/s"),
        ("transfer --entries 8 --link 0b/s", "bits_per_s must be"),
        ("transfer --entries 8 --link 1b/s --density 150%", "density must be .* given 1.5"),
        ("transfer --entries 0 --link 1b/s", "entries must be from 1"),
        ("ingress --size 4Mb --workers 1 --link 1b/s", "--size: '4Mb'"),
        ("ingress --size 4MB --workers 0 --link 1b/s", "workers must be from 1"),
        ("overlap --compute nan --communication 1", "--compute: 'nan'"),
        ("overlap --compute 1 --communication -1", "communication_s must be from 0"),
        ("overlap --compute 1 --communication 1 --chunks 0", "chunks must be from 1"),
        ("stragglers --workers 4 --threshold 5", "from 1 to 4, given 5"),
        ("stragglers --workers 4 --threshold 0", "from 1 to 4, given 0"),
        ("aggregate --size 1B --devices 0 --link 1b/s", "devices must be from 1"),
        ("ring --size 1B --nodes -2 --link 1b/s", "nodes must be from 1 .* given -2"),
        ("placement --loads 4,x --servers 2", "--loads: 'x'"),
        ("placement --loads a=4,a=5 --servers 2", "--loads: block 'a' stands twice"),
        ("placement --loads 4,-5 --servers 2", "load of block 'p2' .* given -5"),
        ("placement --loads 4,5 --servers 0", "servers must be from 1"),
        ("placement --loads 4,5 --servers 2 --assign 0", "--assign: 1 servers for 2 blocks"),
        ("placement --loads 4,5 --servers 2 --assign 0,2", "server of block 'p2' .* given 2"),
        ("placement --loads 4,5 --servers 2 --request p3", "'p3' has no server; known: p1, p2"),
        ("placement --loads 4,5", "give --loads and --servers, or a run's --record"),
        ("placement --servers 2", "give --loads and --servers, or a run's --record"),
        ("placement --record x --loads 4", "--record has blocks of its own"),
        ("placement --record /no/such/file", "--record: /no/such/file cannot be read"),
        ("placement --record x --servers 0", "--servers: .* given 0"),
        ("placement --loads 4,5 --servers 2 --placement by_name", "--placement: .*'by_name'"),
        ("placement --loads 4,5 --servers 2 --placement by_size;blocks=0", "blocks=0: a server"),
        ("placement --loads 4,5 --servers 2 --placement by_size;pin:p1=2", "pin:p1=2 names no"),
        ("placement --loads 4,5 --servers 1 --placement by_size;blocks=1", "2 blocks are to be"),
        ("placement --loads 4,5 --servers 1 --sizes 4,x --placement by_size", "--sizes: 'x'"),
        ("placement --loads 4,5 --servers 1 --sizes 4", "--sizes: 1 sizes for 2 blocks"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments: str, named: str) -> None:
    for form in ([], ["--json"]):
        result = plan(*arguments.split(), *form)
        assert result.exit_code == 2
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        command = arguments.split()[0]
        assert line.startswith(f"zkv plan {command}: error: ")
        assert re.search(named, line), line


def test_a_missing_or_unknown_option_is_exit_code_2_too() -> None:
    assert plan("transfer").exit_code == 2
    assert plan("ring", "--size", "1B", "--faster").exit_code == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json_and_help(command: str) -> None:
    assert "--json" in text(command, "--help")


def test_help_does_not_wait_for_what_calculates() -> None:
    script = "import sys, zkv_cli.main; sys.exit(bool({'numpy', 'zkv.costs'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_command_and_the_functions_agree() -> None:
    told = figures("transfer", "--entries", "1234567", "--density", "3%", "--link", "7Mbit/s")
    size = costs.payload_bytes(1_234_567, 32, 0.03)
    assert (told["payload_bytes"], told["transfer_s"]) == (size, costs.transfer_s(size, 7e6))
    told = figures("ring", "--size", "5GiB", "--nodes", "7", "--link", "1.5Gb/s")
    assert told["time_s"] == aggregation_costs.ring_all_reduce_s(5 * 2**30, 7, 1.5e9)
