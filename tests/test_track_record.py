"""docs/track_record.md: every test that a row names is there, and so is every commit's place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.source

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "track_record.md"
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in (PAGE.read_text("utf-8") if PAGE.exists() else "").splitlines()
    if line.startswith("| ") and not line.startswith("| fault ")
]


def functions() -> set[str]:
    return {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_row_says_where_it_showed_and_names_tests_that_are_there() -> None:
    there = functions()
    files = {path.name for path in (ROOT / "tests").rglob("*.py")}
    assert len(ROWS) >= 40
    assert len({fault for fault, *_ in ROWS}) == len(ROWS)
    for row in ROWS:
        assert len(row) == 4, row
        fault, showed, mended, kept = row
        assert fault, row
        assert showed, row
        assert re.fullmatch(r"[0-9a-f]{7,12}", mended) or mended.strip("`") in files, row
        named = re.findall(r"`(test_\w+)`", kept)
        assert named, f"{fault}: no test"
        assert kept == ", ".join(f"`{name}`" for name in named), row
        assert [name for name in named if name not in there] == [], fault
