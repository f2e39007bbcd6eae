"""The live cluster in virtual time makes the runs that two independent simulators agreed on.

Broker, servers and workers are real and talk over real sockets; only computing is not: each batch
lasts 2, 5 or 7 units of a clock that this test keeps. At each instant the next worker to finish (by
time, then by number) leaves its block; when the broker has taken that in, whoever holds a grant
begins at that very instant. No number here is taken from the code under test.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crew import all_begun, begun, crew, end, model, ones, version
from harness import Cluster, cluster, until

from zkv.aio import AsyncWorker

TIMES = (2, 5, 7)
FIXTURE = Path(__file__).parent.parent / "fixtures" / "sync_oracle.json"
ORACLE: dict[str, Any] = json.loads(FIXTURE.read_text("utf-8"))
POLICIES = [name for name in ORACLE if name != "about"]


@dataclass
class Computing:
    """One worker in virtual time: it computes until `ends`, or has asked at `ends` and waits."""

    rank: int
    worker: AsyncWorker
    batch: Any
    began: int = 0
    ends: int = 0
    next_one: asyncio.Task[Any] | None = None
    arrived: int = 0
    waited: int = 0
    cancelled: int = 0
    cancelled_time: int = 0


@dataclass
class Arrived:
    """A finished batch that waits for its update."""

    time: int
    worker: int
    batch: Any


@dataclass
class VirtualRun:
    """The schedule and what came of it, in the words of the fixture."""

    made: Cluster
    crew: list[Computing]
    pending: list[Arrived] = field(default_factory=list)
    applied: list[list[int]] = field(default_factory=list)
    update_times: list[int] = field(default_factory=list)
    cancels: list[list[int]] = field(default_factory=list)

    async def through(self, last: int) -> None:
        """Make everything happen that is due by a virtual time, that time included."""
        while True:
            computing = [one for one in self.crew if one.next_one is None]
            assert computing, "nobody computes: the run has come to a stand"
            first = min(computing, key=lambda one: (one.ends, one.rank))
            if first.ends > last:
                return
            await self._finish(first)

    async def _finish(self, one: Computing) -> None:
        now, before = one.ends, version(self.made)
        group = model(self.made)
        await end(one.batch, ones())
        one.arrived += 1
        self.pending.append(Arrived(now, one.rank, one.batch))
        one.next_one = asyncio.ensure_future(begun(one.worker))
        # The clock counts finished batches, so it tells when the broker has decided.
        await until(
            lambda: group.sync.clocks[one.rank] == one.arrived,
            what=f"that the broker has batch {one.arrived} of worker {one.rank}",
        )
        if version(self.made) > before:
            await self._updated(now, before)
        for other in self.crew:
            await self._look_at(other, now)

    async def _updated(self, now: int, before: int) -> None:
        assert version(self.made) == before + 1
        self.update_times.append(now)
        for one in self.pending:
            assert await one.batch.wait(6) == "committed"
            self.applied.append([one.time, now, one.worker + 1, one.batch.version, before])
        self.pending.clear()

    async def _look_at(self, one: Computing, now: int) -> None:
        """Begin what is granted, and give up what was cancelled."""
        group = model(self.made)
        if one.next_one is None and group.tally(one.rank).cancelled > one.cancelled:
            batch = one.batch
            await until(lambda: batch.cancelled, what=f"that worker {one.rank} is told")
            await end(batch)
            assert await batch.wait(6) == "cancelled"
            one.cancelled += 1
            one.cancelled_time += now - one.began
            self.cancels.append([now, one.rank + 1, now - one.began])
            one.ends = now
            one.next_one = asyncio.ensure_future(begun(one.worker))
        if one.next_one is None:
            assert not one.batch.cancelled
        elif group.sync.waiting(one.rank) is None:
            one.batch = await one.next_one
            assert one.batch.version == version(self.made)
            one.waited += now - one.ends
            one.next_one, one.began, one.ends = None, now, now + TIMES[one.rank]
        else:
            assert not one.next_one.done(), f"worker {one.rank} went on though it has to wait"

    def figures(self, last: int) -> dict[str, Any]:
        """What the fixture has for a virtual time, of this run."""
        waiting = [
            one.waited + (last - one.ends if one.next_one is not None else 0) for one in self.crew
        ]
        applied = Counter(row[2] for row in self.applied)
        staleness = [row[4] - row[3] for row in self.applied]
        return {
            "update_times": self.update_times,
            "arrived": [one.arrived for one in self.crew],
            "applied": [applied[one.rank + 1] for one in self.crew],
            "pending": [[one.time, one.worker + 1] for one in self.pending],
            "waiting": waiting,
            "busy": [last - waited for waited in waiting],
            "useful": sum(TIMES[row[2] - 1] for row in self.applied),
            "cancelled": [one.cancelled for one in self.crew],
            "cancelled_time": [one.cancelled_time for one in self.crew],
            "cancels": self.cancels,
            "staleness": staleness,
        }


async def check_books(run: VirtualRun) -> None:
    """What the broker and the workers have counted is what has happened."""
    histograms = [
        {
            str(age): count
            for age, count in sorted(
                Counter(row[4] - row[3] for row in run.applied if row[2] == one.rank + 1).items()
            )
        }
        for one in run.crew
    ]
    status = await run.crew[0].worker.status()
    assert status["version"] == len(run.update_times)
    for one, member, ages in zip(run.crew, status["workers"], histograms, strict=True):
        applied = sum(ages.values())
        assert member["number"] == one.rank
        assert member["clock"] == one.arrived
        assert member["contributions"] == {
            "applied": applied,
            "late": 0,
            "cancelled": one.cancelled,
            "discarded": 0,
            "staleness": ages,
        }
        stats = one.worker.stats()
        assert stats["staleness"] == ages
        assert stats["outcomes"] == {
            "committed": applied,
            "discarded": 0,
            "cancelled": one.cancelled,
        }
    # Every update is one times the mean of ones, whatever the policy.
    value = await run.crew[0].worker.pull("w")
    np.testing.assert_array_equal(value, -len(run.update_times) * ones())


@pytest.mark.parametrize("policy", POLICIES)
async def test_the_live_cluster_makes_the_oracle_s_run(policy: str) -> None:
    """Updates, waits, cancellations and staleness, in order, through 15 and through 30."""
    expected = ORACLE[policy]
    async with (
        cluster(2, policy_text=policy, optimizer="sgd:lr=1") as made,
        crew(made, 3) as workers,
    ):
        batches = await all_begun(workers)
        assert [batch.version for batch in batches] == [0, 0, 0]
        members = [
            Computing(rank, worker, batch, ends=TIMES[rank])
            for rank, (worker, batch) in enumerate(zip(workers, batches, strict=True))
        ]
        run = VirtualRun(made, members)
        for last in (15, 30):
            await run.through(last)
            figures = run.figures(last)
            wanted = expected["through"][str(last)]
            assert figures == {name: wanted[name] for name in figures}
            assert run.applied == [row for row in expected["applied"] if row[1] <= last]
        await check_books(run)
        unanswered = [one.next_one for one in run.crew if one.next_one is not None]
        for asked in unanswered:
            asked.cancel()
        await asyncio.gather(*unanswered, return_exceptions=True)
