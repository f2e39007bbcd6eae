"""A worker process that is killed after it has pushed rows: none of them is in any table."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from processes import launched, program

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="sessions are read from /proc"),
]

TRAINS = """
import os, signal, numpy as np, zkv
with zkv.connect() as worker:
    worker.init({}, tables={"emb": zkv.Table(2, initial="zeros", reduce="sum")})
    for turn in range(8):
        with worker.batch() as batch:
            mine = np.arange(100) * 1000 + 10 * turn + worker.rank
            batch.rows("emb", mine)
            batch.push_rows("emb", mine, -np.ones((100, 2), np.float32))
            if turn == 3 and worker.rank == 1:
                print("in mid-batch:", os.getpid(), flush=True)
                signal.pause()
    batch.wait()
    for rank in range(3):
        rows = worker.rows("emb", np.arange(8) * 10 + rank + 5000)
        print("rows of", rank, "are", rows[:, 1].astype(int).tolist(), flush=True)
"""


def test_rows_of_a_batch_that_was_killed_are_nowhere(tmp_path: Path) -> None:
    config = tmp_path / "zkv.toml"
    config.write_text('[broker]\nworker_lost_s = 1.0\npolicy = "bsp"\n', "utf-8")
    script = program(tmp_path, TRAINS)
    sgd = ("--optimizer", "sgd:lr=1", "--grace", "20")
    with launched("run", "-n", "3", "--servers", "2", "--config", str(config), *sgd, script) as run:
        os.kill(int(run.line(r"\[worker 1\] in mid-batch: (\d+)")[1]), signal.SIGKILL)
        assert run.end() == 128 + signal.SIGKILL
        for rank, found in ((0, [1] * 8), (1, [1, 1, 1, 0, 0, 0, 0, 0]), (2, [1] * 8)):
            assert run.text.count(f"rows of {rank} are {found}") == 2, run.text
