"""Servers that are lost in the simulated cluster, which goes back to its last snapshot.

Whatever is under way, the final bits are those of one process that does what the logs say: the old
one up to the snapshot, and then the new one. And broken variants that must be caught."""

from __future__ import annotations

import random
from dataclasses import asdict, fields
from typing import Any

import pytest
from drawn_runs import POLICIES, drawn
from simcluster import Options
from simrollback import Lives, simulate

SEEDS = 3


def lives(seed: int, **fixed: Any) -> Lives:
    """Draw a run in which servers are lost."""
    own = {one.name for one in fields(Options)}
    given = {name: value for name, value in fixed.items() if name in own}
    made = drawn(seed, **{"batches": 16, "void": 0.0, **given})
    rng = random.Random(seed + 1)
    return Lives(
        **{
            **asdict(made),
            "every": rng.choice(("2updates", "0.2s")),
            "kills": rng.choice((1, 1, 2)),
            "replaced": rng.choice((0.2, 0.8)),
            "asks": rng.choice((0, 0, 1)),
            "rots": rng.choice((0, 0, 1)),
            "broker_restarts": 0,
            "broker_crashes": rng.choice((0, 0, 1, 2)),
            "broker_down_s": 0.8,
            "moves": rng.choice((0, 0, 2)),
            "disk_s": rng.choice((0.01, 0.05)),
            **fixed,
        }
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_with_faults_all_go_back_together_and_on_from_there(policy: str) -> None:
    gone_back = 0
    for seed in range(SEEDS):
        sim = simulate(seed, lives(seed, policy=policy))
        gone_back += len(sim.pasts)
    assert gone_back > 1
