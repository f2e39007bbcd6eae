"""Every code block of docs/gpu.md runs, by the rules of the README's, where CuPy is a stand-in.

What a python block prints is what a text block behind it shows.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from processes import answer_of
from test_readme import Block, blocks_of, check_command, commands_of

pytestmark = pytest.mark.source

TESTS = Path(__file__).resolve().parent.parent
PAGE = TESTS.parent / "docs" / "gpu.md"
BLOCKS = blocks_of(PAGE.read_text("utf-8")) if PAGE.exists() else []
PROGRAMS = [block for block in BLOCKS if block.words == ("python",)]
STAND_IN = """
import cupy_on_cpu
stand_in = cupy_on_cpu.installed()
stand_in.__enter__()
import atexit
atexit.register(stand_in.__exit__, None, None, None)
"""


@pytest.fixture
def environment(block: Block) -> Iterator[dict[str, str]]:
    import zkv

    if "connect" not in block.text:
        yield dict(os.environ)
        return
    with zkv.local(servers=1, optimizer="sgd:lr=1", codec="int8+ef") as cluster:
        yield os.environ | {"ZKV_BROKER": cluster.address, "RANK": "0", "WORLD_SIZE": "1"}


def run(block: Block, folder: Path, environment: dict[str, str]) -> str:
    stand_in = "cupy" in block.text
    file = folder / "block.py"
    file.write_text(STAND_IN * stand_in + block.text, "utf-8")
    paths = os.pathsep.join([str(TESTS), environment.get("PYTHONPATH", "")])
    return answer_of([sys.executable, str(file)], folder, environment | {"PYTHONPATH": paths}, 50)


EXPECTED = {
    'worker.init({"w": np.zeros(100_000': "committed",
    "strategy=Ring()": "[1.333",
    "means = [": "[2.857",
}
"""What programs print, by something that stands in them."""


@pytest.mark.cluster
@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: f"line-{block.line}")
def test_a_python_block_runs(block: Block, tmp_path: Path, environment: dict[str, str]) -> None:
    printed = run(block, tmp_path, environment)
    shown = [two.text for one, two in pairwise(BLOCKS) if one is block and two.words == ("text",)]
    expected = [text for part, text in EXPECTED.items() if part in block.text]
    assert len(shown) + len(expected) == 1
    if shown:
        assert printed == shown[0]
    else:
        assert printed.startswith(expected[0])


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line-{block.line}")
def test_a_block_is_what_it_says(block: Block) -> None:
    match block.words:
        case ("python",) | ("python", "no-run"):
            ast.parse(block.text)
        case ("bash",):
            for command in commands_of(block.text):
                check_command(command)
        case ("text",):
            assert block.text.strip()
        case words:
            pytest.fail(f"docs/gpu.md:{block.line}: no rule for a block of {words}")
