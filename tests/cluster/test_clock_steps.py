"""The time of day decides nothing: it may be stepped while a cluster trains."""

from __future__ import annotations

import ast
import asyncio
import itertools
import time
from pathlib import Path

import numpy as np
import pytest
from crew import crew, ones, work
from harness import cluster, until

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "zkv",
    "codecs/zkv_codecs",
    "workers/zkv_workers",
    "brokers/zkv_brokers",
    "brokers/zkv_net",
    "scripts/zkv_cli",
)
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
TELLS = {
    "brokers/zkv_brokers/broker.py": "what it tells zkv doctor",
    "brokers/zkv_brokers/disk.py": "when a snapshot was taken, for whoever looks at it",
    "brokers/zkv_net/loop.py": "numbers of brokers, of which a later one has a higher",
    "scripts/zkv_cli/doctor.py": "compares the clocks of two machines",
    "scripts/zkv_cli/launch.py": "when a run began, for its report",
    "workers/zkv_workers/faces.py": "when updates were made, for a run's report",
    "workers/zkv_workers/figures.py": "when a worker ended, for a run's report",
}
"""Where the time of day is looked at, and what for: it must be nothing that waits or decides."""
DAY_S = 86_400.0


def readers() -> set[str]:
    found = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    if (node.value.id, node.attr) in WALL:
                        found.add(str(path.relative_to(ROOT)))
                elif isinstance(node, ast.ImportFrom) and node.module == "time":
                    assert not {"time", "time_ns"} & {one.name for one in node.names}, path
    return found


@pytest.mark.source
def test_the_time_of_day_is_looked_at_for_nothing_but_words_and_numbers_of_brokers():
    assert readers() == TELLS.keys()


async def test_a_clock_that_steps_by_a_day_either_way_disturbs_nobody(monkeypatch):
    real, step = time.time, itertools.cycle((DAY_S, -DAY_S))
    # As few seconds as are allowed pass before somebody silent is lost: a step is far more.
    async with (
        cluster(2, optimizer="sgd:lr=1", worker_lost_s=2.0, server_lost_s=2.0) as made,
        crew(made, 2) as workers,
    ):
        members = dict(made.broker.router.members.workers)
        monkeypatch.setattr(time, "time", lambda: real() + next(step))
        monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
        router, beats = made.broker.router, set()
        for turn in range(10):
            if turn == 5:
                # What is done from time to time is done under stepped clocks, too.
                await until(lambda: beats.add(router._next_beat) or len(beats) == 4)
            done = await asyncio.gather(*(work(worker) for worker in workers))
            assert [await batch.wait() for batch in done] == ["committed"] * 2
        np.testing.assert_array_equal(await workers[0].pull("w"), -10 * ones())
        assert router.members.workers == members
        assert router.failed is None
        assert not any(role.done() for role in made.tasks)
