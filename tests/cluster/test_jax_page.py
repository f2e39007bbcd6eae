"""Every code block of docs/jax.md runs, by the rules of the README's."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_readme import Block, blocks_of, check_command, commands_of, programs_of, run_program

pytestmark = [pytest.mark.source, pytest.mark.jax]

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "jax.md"
BLOCKS = blocks_of(PAGE.read_text("utf-8")) if PAGE.exists() else []


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    import zkv

    with zkv.local(servers=2, optimizer="adam:lr=0.01") as cluster:
        yield os.environ | {"ZKV_BROKER": cluster.address, "RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.cluster
@pytest.mark.parametrize("block", programs_of(BLOCKS), ids=lambda block: f"line-{block.line}")
def test_a_python_block_runs(block: Block, tmp_path: Path, environment: dict[str, str]) -> None:
    run_program(block.text, tmp_path, environment)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line-{block.line}")
def test_a_block_is_what_it_says(block: Block) -> None:
    match block.words:
        case ("python",) | ("python", "continue"):
            ast.parse(block.text)
        case ("bash",):
            for command in commands_of(block.text):
                check_command(command)
        case words:
            pytest.fail(f"docs/jax.md:{block.line}: no rule for a block of {words}")
