"""Processes that are stopped (SIGSTOP) and go on: for two seconds under the default profile nobody
is given up and nothing is lost; beyond that a worker ends as evicted, and nothing counts twice.

Each contribution adds one to an element of its own, so that lost and doubled ones are seen.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import PATIENCE_S, Launched

import zkv
from zkv.errors import ClusterNotReady

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux's signals"),
]

TURNS, MID = 40, 20
STOPPED_S = 2.0

COUNTS = """
import json, os, signal, sys, numpy as np, zkv
told = json.loads(sys.argv[1])
rank, done = int(os.environ["RANK"]), []
try:
    with zkv.connect(name=f"counts-{rank}") as worker:
        worker.init({"count": np.zeros((2, told["turns"]), np.float32)}, reduce="sum")
        for turn in told["indices"]:
            one = np.zeros((2, told["turns"]), np.float32)
            one[rank, turn] = -1
            with worker.batch() as batch:
                batch.push("count", one)
                if turn in told["waits_at"]:
                    print("in mid-batch", turn, flush=True)
                    signal.sigwait({signal.SIGUSR1})
                if turn == told["stops_at"]:
                    os.kill(os.getpid(), signal.SIGSTOP)
            if batch.wait() == "committed":
                done.append(turn)
        print("all:", json.dumps(worker.pull("count").tolist()), flush=True)
except zkv.ZkvError as error:
    print(type(error).__name__, error, flush=True)
print("done:", json.dumps(done), flush=True)
"""


@contextmanager
def counting(
    cluster: Any, rank: int, indices: list[int], *, waits_at: Sequence[int] = (), stops_at: int = -1
) -> Iterator[Launched]:
    """A worker that contributes these indices in turn."""
    told = {"turns": TURNS, "indices": indices, "waits_at": list(waits_at), "stops_at": stops_at}
    environment = {
        "ZKV_BROKER": cluster.address,
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    # Else the signal that it waits for would end it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        one = Launched(sys.executable, "-c", COUNTS, json.dumps(told), env=environment)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait(PATIENCE_S)


def awaited(condition: Callable[[], Any], what: str) -> Any:
    """Ask again until something holds; each question takes its time."""
    import time

    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come"
    return found


def silent_for(cluster: Any, who: str) -> None:
    """Wait until a stopped process has been silent for STOPPED_S."""
    if who == "broker":
        # Nobody else knows: a question is left unanswered for as long.
        with pytest.raises(ClusterNotReady):
            cluster.status(STOPPED_S)
        return

    def longest() -> bool:
        status = cluster.status()
        if who == "server":
            return bool(status["servers"][0]["last_heard_s"] >= STOPPED_S)
        found = [one for one in status["workers"] if one["number"] == 1]
        return bool(found[0]["last_heard_s"] >= STOPPED_S)

    awaited(longest, f"silence of the {who}")


def test_processes_that_stand_still_for_two_seconds_are_nobody_lost():
    everything = list(range(TURNS))
    waits_at = dict(zip(("worker", "server", "broker"), (10, 20, 30), strict=True))
    with (
        zkv.local(servers=2, policy="bsp", optimizer="sgd:lr=1", workers=2) as cluster,
        counting(cluster, 0, everything, waits_at=list(waits_at.values())) as first,
        counting(cluster, 1, everything) as second,
    ):
        pids = {
            "worker": second.process.pid,
            "server": cluster.servers[0].pid,
            "broker": cluster.broker.pid,
        }
        for who, turn in waits_at.items():
            first.line(f"in mid-batch {turn}")
            term = cluster.status()["term"]
            os.kill(pids[who], signal.SIGSTOP)
            try:
                # Work goes on as far as it can.
                os.kill(first.process.pid, signal.SIGUSR1)
                silent_for(cluster, who)
            finally:
                os.kill(pids[who], signal.SIGCONT)
        ended = [json.loads(one.line("all: (.*)")[1]) for one in (first, second)]
        reported = [json.loads(one.line("done: (.*)")[1]) for one in (first, second)]
        assert reported == [everything] * 2
        assert first.end() == second.end() == 0
        np.testing.assert_array_equal(ended, np.ones((2, 2, TURNS)))
        after = cluster.status()
    assert (after["term"], after["version"]) == (term, TURNS)
    assert "is gone: nothing was heard" not in cluster.logs()


def test_a_worker_that_stands_still_for_too_long_is_evicted_and_nothing_counts_twice():
    everything = list(range(TURNS))
    with zkv.local(
        servers=2, policy="asp", optimizer="sgd:lr=1", workers=2, worker_lost_s=1.0
    ) as cluster:
        with (
            counting(cluster, 0, everything) as first,
            counting(cluster, 1, everything, stops_at=MID) as second,
        ):
            awaited(
                lambda: "worker 1" in cluster.logs() and "is gone: nothing" in cluster.logs(),
                "the loss of worker 1",
            )
            first.line("all: ")
            os.kill(second.process.pid, signal.SIGCONT)
            second.line("^Evicted ")
            reported = json.loads(second.line("done: (.*)")[1])
            assert first.end() == second.end() == 0
        assert reported == everything[:MID]
        with cluster.connect(observer=True) as observer:
            count = observer.pull("count")
        np.testing.assert_array_equal(count[0], np.ones(TURNS))
        np.testing.assert_array_equal(count[1, :MID], np.ones(MID))
        np.testing.assert_array_equal(count[1, MID:], np.zeros(TURNS - MID))
        # Under its old name, it does the rest.
        with counting(cluster, 1, everything[MID:]) as again:
            assert json.loads(again.line("all: (.*)")[1]) == np.ones((2, TURNS)).tolist()
            assert again.end() == 0
