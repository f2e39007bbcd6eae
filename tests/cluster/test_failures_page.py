"""Every code block of docs/failures.md runs, by the rules of the README's; tests that it names are
there."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest
from test_readme import Block, blocks_of, check_command, commands_of, programs_of, run_program

pytestmark = pytest.mark.source

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "failures.md"
TEXT = PAGE.read_text("utf-8") if PAGE.exists() else ""
BLOCKS = blocks_of(TEXT)


@pytest.mark.cluster
@pytest.mark.parametrize("block", programs_of(BLOCKS), ids=lambda block: f"line-{block.line}")
def test_a_python_block_runs(block: Block, tmp_path: Path) -> None:
    run_program(block.text, tmp_path, dict(os.environ))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line-{block.line}")
def test_a_block_is_what_it_says(block: Block) -> None:
    match block.words:
        case ("python",):
            ast.parse(block.text)
        case ("bash",):
            for command in commands_of(block.text):
                check_command(command)
        case words:
            pytest.fail(f"docs/failures.md:{block.line}: no rule for a block of {words}")


def test_tests_that_the_page_names_are_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    written = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) >= 3
    assert [name for name in sorted(named) if f"def {name}(" not in written] == []
