"""What docs/topologies.md says: its commands can be typed, and print what stands below them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from test_readme import Block, blocks_of, check_command, commands_of
from typer.testing import CliRunner

from zkv.topology import NAMES, topology
from zkv_cli.main import app

pytestmark = pytest.mark.source

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "topologies.md"
BLOCKS = blocks_of(PAGE.read_text("utf-8")) if PAGE.exists() else []
BASH = [block for block in BLOCKS if block.words == ("bash",)]


@pytest.mark.parametrize("block", BASH, ids=lambda block: f"line-{block.line}")
def test_its_commands_can_be_typed(block: Block) -> None:
    for command in commands_of(block.text):
        check_command(command)
        if "--topology" in command:
            assert topology(command[command.index("--topology") + 1])


@pytest.mark.skipif(not BLOCKS, reason="the docs are not here")
def test_each_figure_is_what_the_command_above_it_prints() -> None:
    pairs = [
        (above, shown)
        for above, shown in pairwise(BLOCKS)
        if shown.words == ("text",) and above.words == ("bash",) and "plan" in above.text
    ]
    assert len(pairs) == 3
    for above, shown in pairs:
        (command,) = commands_of(above.text)
        result = CliRunner().invoke(app, command[1:])
        assert result.exit_code == 0, result.stderr
        assert result.stdout == shown.text


@pytest.mark.skipif(not BLOCKS, reason="the docs are not here")
def test_it_lists_every_topology() -> None:
    assert [line.split()[0] for line in BLOCKS[0].text.splitlines()] == list(NAMES)
