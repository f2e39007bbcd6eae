"""docs/doctor.md: its commands can be typed, and what it shows is what `zkv doctor` says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from test_readme import Block, blocks_of, check_command, commands_of

from zkv_cli import doctor, doctor_probes, doctor_way
from zkv_net import descriptors

pytestmark = pytest.mark.source

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "doctor.md"
TEXT = PAGE.read_text("utf-8") if PAGE.exists() else ""
BLOCKS = blocks_of(TEXT)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line-{block.line}")
def test_a_block_is_what_it_says(
    block: Block, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    match block.words:
        case ("bash",):
            for command in commands_of(block.text):
                check_command(command)
        case ("text",):
            refused = doctor_way.Dialled("10.0.0.2", "refused", 0.0)
            found: dict[tuple[Any, str], Any] = {
                (doctor_probes, "resolve"): lambda host: doctor_way.Resolved(("10.0.0.2",)),
                (doctor_probes, "dial"): lambda host, port: refused,
                (descriptors, "limits"): lambda: (1024, 4096),
                (doctor.net, "host_name"): lambda: "node1",
            }
            for (module, name), stand_in in found.items():
                monkeypatch.setattr(module, name, stand_in)
            assert not doctor.run("tcp://head:5555", as_json=False)
            assert capsys.readouterr().out == block.text
        case words:
            pytest.fail(f"docs/doctor.md:{block.line}: no rule for a block of {words}")


def test_the_table_has_every_check_in_order() -> None:
    named = re.findall(r"^\| ([^|]+) \|", TEXT, re.MULTILINE)[1:]
    steps = [step.name for step in doctor.Patient("tcp://head:5555").steps()]
    steps[steps.index("servers")] = "server 0, server 1, ..."
    assert named == steps
