"""docs/limits.md names the tests that show what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.source

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / "limits.md").read_text("utf-8"))
    assert len(named) > 5
    texts = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    missing = [name for name in named if not any(f"def {name}(" in text for text in texts)]
    assert not missing
