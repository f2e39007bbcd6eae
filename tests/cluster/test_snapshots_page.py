"""The program of docs/snapshots.md runs, and its commands can be typed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from test_readme import (
    Block,
    blocks_of,
    check_flags,
    commands_of,
    help_of,
    programs_of,
    run_program,
)

from zkv_brokers.snapshots import STATES_S
from zkv_cli.cluster import LAST_SNAPSHOT_S

pytestmark = pytest.mark.source

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "snapshots.md"
BLOCKS = blocks_of(PAGE.read_text("utf-8")) if PAGE.exists() else []
BASH = [block for block in BLOCKS if block.words == ("bash",)]


@pytest.mark.cluster
def test_its_program_runs(tmp_path: Path) -> None:
    (block,) = programs_of(BLOCKS)
    run_program(block.text, tmp_path, dict(os.environ))


@pytest.mark.parametrize("block", BASH, ids=lambda block: f"line-{block.line}")
def test_its_commands_can_be_typed(block: Block) -> None:
    for command in commands_of(block.text):
        names = [
            word for word in command[1:3] if word in ("up", "snapshot", "list", "show", "restore")
        ]
        text = help_of([sys.executable, "-m", "zkv_cli", *names])
        check_flags(["zkv", *names], command[1:], text)


def test_the_times_that_it_names_are_those_of_the_code() -> None:
    text = PAGE.read_text("utf-8")
    assert f"it has {LAST_SNAPSHOT_S:.0f} s" in text
    assert f"next batch within {STATES_S:.0f} s" in text
