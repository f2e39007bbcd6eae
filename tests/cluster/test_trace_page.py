"""What docs/trace.md says of where the time goes: its commands, and what they print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_readme import blocks_of, check_command, commands_of

from zkv.advice import advise, lines
from zkv.run_times import run_times

pytestmark = pytest.mark.source

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "trace.md"
RUN = ROOT / "tests" / "fixtures" / "run.json"


def section() -> str:
    if not PAGE.exists():
        pytest.skip("the docs are not here")
    _, found, rest = PAGE.read_text("utf-8").partition("## Where the time goes\n")
    assert found
    return rest.partition("\n## ")[0]


def test_its_commands_can_be_typed():
    commands = [
        command
        for block in blocks_of(section())
        if block.words == ("bash",)
        for command in commands_of(block.text.replace("> run.json", ""))
    ]
    assert [command[:2] for command in commands] == [
        ["python", "-m"],
        ["zkv", "run"],
        ["zkv", "plan"],
    ]
    for command in commands:
        check_command(command)


def test_the_advice_that_it_shows_is_that_of_the_run_that_was_kept():
    """The run itself is of another day, so its JSON is kept: see the page for the command."""
    (shown,) = [block.text for block in blocks_of(section()) if block.words == ("text",)]
    told = lines(advise(run_times(json.loads(RUN.read_text("utf-8")))))
    assert shown.rstrip("\n") == "\n".join(told)
