"""The program of docs/tables.md runs, and what the page says of rules and parts is so."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from test_readme import blocks_of, programs_of, run_program

import zkv
from zkv.optim import RULES, rule
from zkv.row_rules import refusal
from zkv.tables import mixed_ids, part_of

pytestmark = pytest.mark.source

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "tables.md"
BLOCKS = blocks_of(PAGE.read_text("utf-8")) if PAGE.exists() else []


@pytest.mark.cluster
def test_its_program_runs(tmp_path: Path) -> None:
    (block,) = programs_of(BLOCKS)
    with zkv.local(servers=2, optimizer="momentum:lr=0.1") as cluster:
        env = os.environ | {"ZKV_BROKER": cluster.address, "RANK": "0", "WORLD_SIZE": "1"}
        run_program(block.text, tmp_path, env)


def test_the_rules_that_it_names_are_those_that_tables_take() -> None:
    text = PAGE.read_text("utf-8")
    for name in RULES:
        weight_decay = name == "adamw"
        taken = not refusal("emb", rule(name if not weight_decay else "adamw:weight_decay=0"))
        assert (f"| `{name}` |" in text) == taken


def test_a_row_is_of_the_part_that_it_says() -> None:
    ids = np.random.default_rng(3).integers(0, 2**63, 100).astype(np.uint64)
    upper = [int(one) >> 32 for one in mixed_ids(ids)]
    for servers in (1, 2, 3, 5):
        assert part_of(ids, servers).tolist() == [one * servers // 2**32 for one in upper]
