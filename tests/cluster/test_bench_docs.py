"""What benchmarks have measured gets to its places on docs/benchmarks.md; nothing else moves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.source

bench_docs: Any = pytest.importorskip("bench_docs", reason="scripts are not installed")
import bench_language  # noqa: E402
import bench_net  # noqa: E402
import bench_runs  # noqa: E402
import bench_scale  # noqa: E402
import peer_rows  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PLACES = {"about", "peers", "net", "language", "scale"}


def rows() -> dict[str, list[dict[str, Any]]]:
    told = [{"ms": [40.0], "cpu_s": 0.1, "version": "9.8"}] * 2
    run = bench_runs.Run(told, 0.15)
    peers = [peer_rows.row(peer, "resnet50", 2, 1, [run]) for peer in ("memory", "gloo")]
    way = bench_net.Way(1000.0, "one100", 2, "zkv", 2, "own")
    curve = [(0, 0.0, 5.0), (300, 100.0, 2.6)]
    language = bench_language.rows(
        {"ddp": {"curve": curve, "compute_ms": 20.0, "comm_ms": 200.0, "noise": 0.0}}, 20.0
    )
    return {
        "peers": [
            one | {"where": "a network namespace of its own, reno"}
            for one in peer_rows.with_ratios(peers)
        ],
        "net": [*bench_net.with_ratios([bench_net.row(way, [run])]), *language],
        "scale": [bench_scale.row("keys", n, run) | {"exponent": 0.5} for n in (10, 100)],
    }


def test_each_part_comes_to_its_place_and_the_rest_stays() -> None:
    page = "# A\n\n<!-- x -->\nold\n<!-- end -->\nkept\n<!-- y -->\nalso kept\n<!-- end -->\n"
    filled = bench_docs.filled(page, {"x": r"new \1"})
    assert filled == page.replace("\nold\n", "\n\nnew \\1\n\n")
    assert bench_docs.filled(filled, {"x": r"new \1"}) == filled
    with pytest.raises(ValueError, match="0 places for z"):
        bench_docs.filled(page, {"z": ""})


def test_the_page_has_a_place_for_all_that_is_measured(tmp_path: Path) -> None:
    """As the script is run, with a copy of the page."""
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "benchmarks.md").read_text())
    for name, some in rows().items():
        (tmp_path / f"{name}.json").write_text(json.dumps(some))
    program = [sys.executable, bench_docs.__file__, str(tmp_path), "--page", str(page)]
    subprocess.run(program, check=True, capture_output=True)
    text = page.read_text()
    assert bench_docs.parts(rows()).keys() == PLACES
    assert "Nothing has been measured" not in text
    assert "| zkv | memory | 1 | 40 | 40 | 40 |" in text
    assert "gloo 9.8" in text
    assert "Other work used 0.15 cores" in text
    assert "| 1,000 | one100 | 2 | zkv | own |" in text
    assert "| ddp | 333 |" in text
    assert "**keys (of 1 KB)**: cost ~ n^0.50: linear or better" in text
    # Every picture that the page shows is drawn beside it.
    for name in ("peers", "net", "scale"):
        assert f"](benchmarks_{name}.png)" in text
        assert (tmp_path / f"benchmarks_{name}.png").read_bytes().startswith(b"\x89PNG")


def test_only_what_was_measured_is_replaced(tmp_path: Path) -> None:
    assert bench_docs.parts({"scale": rows()["scale"]}).keys() == {"scale"}
    program = [sys.executable, bench_docs.__file__, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 2
    assert "has no rows" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "needs a folder"),
        (("--fast", "x"), "knows no --fast"),
        (("--only", "moon", "x"), "moon"),
    ],
)
def test_wrong_use_of_bench_all_is_2(arguments: tuple[str, ...], said: str) -> None:
    done = subprocess.run(
        [str(ROOT / "scripts" / "bench_all"), *arguments], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert said in done.stderr
