"""Every code block of docs/one_machine.md runs, by the rules of the README's."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
from test_readme import Block, blocks_of, check_command, commands_of, programs_of, run_program

pytestmark = pytest.mark.source

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "one_machine.md"
BLOCKS = blocks_of(PAGE.read_text("utf-8")) if PAGE.exists() else []


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
            pytest.fail(f"docs/one_machine.md:{block.line}: no rule for a block of {words}")
