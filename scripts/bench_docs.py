"""Puts what benchmarks have measured into `docs/benchmarks.md` (`scripts/bench_all --help`).

A part of the page between `<!-- NAME -->` and `<!-- end -->` is replaced by what this makes of a
file of rows; what no file was given for stays as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import bench_language
import bench_net
import bench_scale
import peer_rows

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
Rows = Sequence[Mapping[str, Any]]


def filled(page: str, parts: Mapping[str, str]) -> str:
    """Return the page with each part put where its name is.

    Raises:
        ValueError: the page has no place for one.
    """
    for name, text in parts.items():
        place = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        page, count = place.subn(lambda found, text=text: f"{found[1]}\n{text}\n\n{found[2]}", page)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"the page has {count} places for {name}")
    return page


def machine() -> str:
    """Return what this machine is, in a sentence."""
    cores = os.cpu_count()
    model = "an unknown processor"
    memory = ""
    if (about := Path("/proc/cpuinfo")).exists():
        found = re.search(r"model name\s*: (.*)", about.read_text())
        model = found[1].strip() if found else model
        kilobytes = int(re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())[1])  # type: ignore[index]
        memory = f", {kilobytes / 2**20:.0f} GiB of memory"
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    return f"{cores} cores of {model}{memory}, {system}, Python {platform.python_version()}"


def versions(rows: Rows) -> str:
    """Return the systems that rows are of, each with its version."""
    known = {one["system"]: one["version"] for one in rows if one.get("version")}
    known["numpy"] = _numpy()
    return ", ".join(f"{name} {version}" for name, version in sorted(known.items()))


def _numpy() -> str:
    import numpy

    return numpy.__version__


def commit() -> str:
    """Return which commit is measured, if it is one."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=PAGE.parent, capture_output=True, text=True
    )
    return done.stdout.strip() or "an unknown commit"


def parts(rows: Mapping[str, Rows]) -> dict[str, str]:
    """Return what each place of the page gets, of the rows of each benchmark."""
    found: dict[str, str] = {}
    if peers := list(rows.get("peers", ())):
        about = f"{date.today()}, commit {commit()}: {machine()}; {versions(peers)}."
        noise = max(one["noise"] for one in peers)
        turns = min(one["runs"] for one in peers)
        where = f"All ran in {peers[0]['where']}, {turns} or more turns of each."
        loud = f"Other work used {noise:g} cores in the most disturbed run that counts."
        found["about"] = f"{about}\n{where} {loud}"
        found["peers"] = peer_rows.tables(peers)
    net = list(rows.get("net", ()))
    if links := [one for one in net if one["set"] != "language"]:
        found["net"] = bench_net.tables(links)
    if spoken := [one for one in net if one["set"] == "language"]:
        found["language"] = bench_language.table(spoken)
    if scale := list(rows.get("scale", ())):
        found["scale"] = bench_scale.tables(scale)
    return found


def pictures(rows: Mapping[str, Rows], folder: Path) -> None:
    """Draw a picture of each benchmark that has rows, beside the page."""
    if peers := list(rows.get("peers", ())):
        peer_rows.plotted([dict(one) for one in peers], folder / "benchmarks_peers.png")
    if links := [dict(one) for one in rows.get("net", ()) if one["set"] != "language"]:
        bench_net.plotted(links, folder / "benchmarks_net.png")
    if scale := [one for one in rows.get("scale", ()) if one["sweep"] != "memory"]:
        bench_scale.plotted(scale, folder / "benchmarks_scale.png")


def main() -> int:
    """Fill the page."""
    parser = argparse.ArgumentParser(prog="bench_docs.py")
    parser.add_argument("folder", type=Path, help="has peers.json, net.json and scale.json")
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args()
    rows: dict[str, Rows] = {}
    for name in ("peers", "net", "scale"):
        file = asked.folder / f"{name}.json"
        if file.exists() and file.stat().st_size:
            rows[name] = json.loads(file.read_text())
    made = parts(rows)
    if not made:
        parser.error(f"{asked.folder} has no rows")
    asked.page.write_text(filled(asked.page.read_text(), made))
    pictures(rows, asked.page.parent)
    print(f"filled {', '.join(made)} of {asked.page}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
