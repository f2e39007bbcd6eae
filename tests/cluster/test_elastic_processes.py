"""Worker processes that are killed and come back (D25, D26), with real processes and kill -9.

What each policy does about them is tested in test_elastic.py, with workers in one loop.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import Launched, launched, program

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="sessions are read from /proc"),
]

LOST_S = 1.0
GO_ON_S = LOST_S + 2.0
"""By when the survivors of a BSP worker go on: a promise."""
SERVED_S = 2.5
"""By when a process with a dead one's name is let in: three beats, and some more."""

TRAINS = """
import os, signal, numpy as np, zkv
with zkv.connect() as worker:
    worker.init({"w": np.zeros(3, np.float32)})
    for turn in range(12):
        with worker.batch() as batch:
            if turn == 3 and worker.rank == 1:
                print("in mid-batch:", os.getpid(), flush=True)
                signal.pause()
            if turn == 4:
                print("goes on at version", batch.version, flush=True)
            batch.push("w", -np.ones(3, np.float32))
    batch.wait()
    print("ended with", worker.pull("w")[0], flush=True)
"""

ONE_NAME = """
import os, signal, sys, numpy as np, zkv
try:
    with zkv.connect() as worker:
        print("let in as", worker.rank, flush=True)
        worker.init({"w": np.zeros(3, np.float32)})
        with worker.batch() as batch:
            print("begins at version", batch.version, "pid", os.getpid(), flush=True)
            if "--stay" in sys.argv:
                signal.pause()
            batch.push("w", -np.ones(3, np.float32))
        print("outcome", batch.wait(), flush=True)
except zkv.ZkvError as error:
    print(type(error).__name__, error, flush=True)
    sys.exit(5)
"""


def test_survivors_go_on_and_the_run_names_who_died(tmp_path):
    """D25: one of three BSP workers is killed in mid-batch, half-way through its run."""
    config = tmp_path / "zkv.toml"
    config.write_text(f'[broker]\nworker_lost_s = {LOST_S}\npolicy = "bsp"\n', "utf-8")
    script = program(tmp_path, TRAINS)
    sgd = ("--optimizer", "sgd:lr=1", "--grace", "20")
    with launched("run", "-n", "3", "--servers", "2", "--config", str(config), *sgd, script) as run:
        pid = int(run.line(r"\[worker 1\] in mid-batch: (\d+)")[1])
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            run.line(r"\[worker [02]\] goes on at version 4")
        assert time.monotonic() - killed < GO_ON_S
        assert run.end() == 128 + signal.SIGKILL
        assert "zkv run: worker 1 (pid " in run.text
        assert "was ended by SIGKILL (exit code 137)" in run.text
        assert "worker 1 ('worker-1' on " in run.text
        assert run.text.count("ended with 12.0") == 2
        assert run.session() == []


def test_a_killed_worker_comes_back_under_its_name_and_a_second_live_one_may_not(tmp_path):
    """D26: the broker would miss the dead one after a minute; its successor needs not wait."""
    script = program(tmp_path, ONE_NAME)
    with ExitStack() as stack:
        up = stack.enter_context(
            launched("up", "--bind", "tcp://127.0.0.1:0", "--worker-lost", "60")
        )
        address = up.line(r"broker at (tcp://\S+)")[1]

        def start(*arguments: str, **env: str) -> Launched:
            variables = {"ZKV_CONNECT_TIMEOUT_S": str(SERVED_S)} | env
            one = launched("run", "--broker", address, script, *arguments, env=variables)
            return stack.enter_context(one)

        first = start("--stay")
        pid = int(first.line(r"begins at version 0 pid (\d+)")[1])
        os.kill(pid, signal.SIGKILL)
        again = start("--stay")
        again.line("let in as 0")
        pid = int(again.line(r"begins at version 0 pid (\d+)")[1])
        assert first.end() == 128 + signal.SIGKILL
        up.line("worker 0 .* is gone: a new process came in its place, and it was silent")

        second = start()
        second.line("NameInUse a live worker already has the name 'worker-0'")
        assert second.end() == 5

        os.kill(pid, signal.SIGKILL)
        last = start()
        last.line("let in as 0")
        last.line("outcome committed")
        assert last.end() == 0
