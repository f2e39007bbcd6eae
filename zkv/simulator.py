"""A cluster under a virtual clock: the real `Synchronizer`, and workers that only take time.

Answers which policy suits which workers before any machine is rented. It decides nothing about
synchronisation: events go to the synchroniser, its actions are carried out in virtual time. Two
things that happen at one time are taken in worker order, each with all its consequences before the
next, and what happens at the end of a window belongs to it. Times stay exact if all times given are
integers or fractions. What a transfer costs is `zkv.network_model`'s; how long a batch takes is
`zkv.compute_times`'. This module must not know gradients, files, or the machine's own clock.

At each moment a worker *computes* (busy), else *transfers* (its pull or push is on the way or in a
link's queue), else *waits* (for the policy, or for a server that applies an update). So for each
worker busy + transfer + waiting is the time that has passed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from zkv.compute_times import ComputeTimes, Time
from zkv.network_model import Link, Network
from zkv.policy import SyncPolicy
from zkv.simulation_report import Account, Applied, Cancelled, SimulationReport, Span
from zkv.sync import (
    Action,
    Cancel,
    Commit,
    Discard,
    Event,
    Finished,
    Joined,
    Start,
    Synchronizer,
)


class _Kind(Enum):
    BEGIN = "may begin, now that the server has applied the update"
    PULL_LEFT = "its pull has left the link"
    PULLED = "its pull has come"
    COMPUTED = "its batch is computed"
    PUSH_LEFT = "its push has left the link"
    PUSHED = "the servers hold its push"


_Due = tuple[Time, int, int, _Kind, int]
"""Time, worker, a running number, what happens, and the grant that it happens under."""


@dataclass(slots=True)
class _Worker:
    """One worker, its open grant, and its account so far."""

    stream: Iterator[Time]
    grant: int = 0  # 0: no open grant
    begun: Time = 0  # when it began to compute under its open grant
    spent: Time = 0  # what it computed under its open grant, once that is done
    computing: bool = False
    computed: bool = False
    pushed: bool = False
    transferring: bool = False
    link: Link | None = None  # where its transfer passes or is queued
    since: Time = 0  # what it did before is booked
    busy: Time = 0
    transfer: Time = 0
    waiting: Time = 0
    arrived: int = 0
    applied: int = 0
    useful: Time = 0
    cancelled: int = 0
    cancelled_time: Time = 0
    pushes: int = 0
    pulls: int = 0

    def open_time(self, now: Time) -> Time:
        """How long it has computed under its open grant."""
        return now - self.begun if self.computing else self.spent

    def book(self, now: Time) -> str:
        """Put the time since the last booking to its account; returns what it was spent on."""
        elapsed, self.since = now - self.since, now
        if self.computing:
            self.busy += elapsed
            return "compute"
        if self.transferring:
            self.transfer += elapsed
            return "transfer"
        self.waiting += elapsed
        return "waiting"


@dataclass(slots=True)
class _Trace:
    """What happened, one by one."""

    applied: list[Applied] = field(default_factory=list)
    cancels: list[Cancelled] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


class Simulation:
    """A run that can be continued: `run` goes on to a time or a number of updates.

    `trace` keeps every contribution, cancellation and span of time beside the sums; the plot is
    drawn from it, and it costs memory for each batch. `listener` hears each action of the
    synchroniser, in their order and before it is carried out.
    """

    def __init__(
        self,
        policy: SyncPolicy,
        times: ComputeTimes,
        *,
        network: Network | None = None,
        trace: bool = True,
        listener: Callable[[Action], None] | None = None,
    ) -> None:
        self.policy = policy
        self.times = times
        self.network = network if network is not None else Network()
        self.now: Time = 0
        self._synchronizer = Synchronizer(policy, members_min=len(times.workers))
        self._workers = {worker: _Worker(stream) for worker, stream in times.streams().items()}
        self._due: list[_Due] = []
        self._order = 0
        self._server_free: Time = 0
        self._pending: dict[tuple[int, int], tuple[Time, Time]] = {}  # (arrived at, computed for)
        self._update_times: list[Time] = []
        self._staleness: list[int] = []
        self._trace = _Trace() if trace else None
        self._listener = listener
        # A sum of an exact and a random time is a float anyway, and floats are quicker.
        number: Callable[[Time], Time] = (lambda time: time) if times.exact else float
        self._latency = number(self.network.latency_s)
        self._update = number(self.network.update_s)
        self._pull_time = number(self.network.pull_s)
        self._push_time = number(self.network.push_s)
        shared = self.network.shared
        self._pulls = Link(self._pull_time, shared, self._leaves(_Kind.PULL_LEFT))
        self._pushes = Link(self._push_time, shared, self._leaves(_Kind.PUSH_LEFT))
        for worker in times.workers:
            self._tell(Joined(worker))

    @property
    def synchronizer(self) -> Synchronizer:
        """The machine that decides, to be asked why a worker waits; tell it no events."""
        return self._synchronizer

    def run(self, *, until: Time | None = None, updates: int | None = None) -> Simulation:
        """Go on through the time `until`, or to update number `updates`, whichever is first.

        Both count from the start of the simulation; returns itself. Raises ValueError if neither is
        given, or one lies in the past.
        """
        if until is None and updates is None:
            raise ValueError("a simulation needs an end: a time (until) or a number of updates")
        if until is not None and not self.now <= until < float("inf"):
            raise ValueError(f"until must be a time from {self.now} on, given {until}")
        made = len(self._update_times)
        if updates is not None and updates < max(made, 1):
            raise ValueError(f"updates must be at least {max(made, 1)}, given {updates}")
        while updates is None or len(self._update_times) < updates:
            # Somebody always computes, so something is always due.
            if until is not None and self._due[0][0] > until:
                self.now = until
                break
            self.now, worker, _, kind, grant = heapq.heappop(self._due)
            # What was due under a grant that was cancelled meanwhile does not happen.
            if self._workers[worker].grant == grant:
                self._happen(kind, worker, grant)
        return self

    def report(self) -> SimulationReport:
        """What has happened up to now; the simulation can go on afterwards."""
        for worker in self._workers:
            self._book(worker)
        trace = self._trace or _Trace()
        pending = tuple((at, worker) for (worker, _), (at, _) in self._pending.items())
        return SimulationReport(
            policy=str(self.policy),
            time=self.now,
            accounts=tuple(self._account(worker, pending) for worker in self._workers),
            update_times=tuple(self._update_times),
            staleness=tuple(self._staleness),
            pending=pending,
            contributions=tuple(trace.applied),
            cancels=tuple(trace.cancels),
            spans=(*trace.spans, *self._open_spans()) if self._trace else (),
            warnings=self._warnings(),
        )

    def _account(self, number: int, pending: tuple[tuple[Time, int], ...]) -> Account:
        worker = self._workers[number]
        return Account(
            worker=number,
            arrived=worker.arrived,
            applied=worker.applied,
            pending=worker.arrived - worker.applied,
            cancelled=worker.cancelled,
            busy=worker.busy,
            transfer=worker.transfer,
            waiting=worker.waiting,
            useful=worker.useful,
            cancelled_time=worker.cancelled_time,
            bytes_up=round(worker.pushes * self.network.push_bytes),
            bytes_down=worker.pulls * self.network.bytes_down,
        )

    def _open_spans(self) -> Iterator[Span]:
        for number, worker in self._workers.items():
            spent = worker.open_time(self.now)
            if worker.grant and spent:
                yield Span(number, "compute", worker.begun, worker.begun + spent)

    def _warnings(self) -> tuple[str, ...]:
        threshold, members = self.policy.threshold, len(self._workers)
        if threshold is None or threshold <= members:
            return ()
        return (
            f"{self.policy}: k = {threshold} is more than the {members} workers there are, so "
            f"each update takes {members}; give k of at most {members}, or more workers",
        )

    # What the synchroniser wants

    def _tell(self, event: Event) -> None:
        for action in self._synchronizer.handle(event):
            if self._listener is not None:
                self._listener(action)
            match action:
                case Commit():
                    self._commit(action)
                case Cancel(worker, grant):
                    self._cancel(worker, grant)
                case Start(worker, grant, _):
                    self._start(worker, grant)
                case Discard(worker, grant):
                    # A cancelled worker stops at once here, so nothing can be late.
                    raise AssertionError(f"worker {worker} was late with grant {grant}")

    def _commit(self, commit: Commit) -> None:
        self._update_times.append(self.now)
        self._server_free = max(self.now, self._server_free) + self._update
        before = commit.version - 1
        bases = {(c.worker, c.grant): c.base_version for c in commit.contributions}
        # An update takes all that is pending, which stands here in the order of its arrival.
        for key, (arrived_at, spent) in self._pending.items():
            base = bases[key]
            self._staleness.append(before - base)
            worker = self._workers[key[0]]
            worker.applied += 1
            worker.useful += spent
            if self._trace:
                self._trace.applied.append(Applied(arrived_at, self.now, key[0], base, before))
        self._pending.clear()

    def _start(self, number: int, grant: int) -> None:
        self._book(number)
        worker = self._workers[number]
        worker.grant, worker.spent = grant, 0
        worker.computed = worker.pushed = False
        if self._server_free > self.now:
            self._schedule(self._server_free, number, _Kind.BEGIN, grant)
        else:
            self._begin(number, grant)

    def _cancel(self, number: int, grant: int) -> None:
        self._book(number)
        worker = self._workers[number]
        lost = worker.open_time(self.now)
        worker.cancelled += 1
        worker.cancelled_time += lost
        if self._trace:
            self._trace.cancels.append(Cancelled(self.now, number, lost))
            if lost:
                span = Span(number, "cancelled", worker.begun, worker.begun + lost)
                self._trace.spans.append(span)
        if worker.link is not None:
            worker.link.stop(self.now, (number, grant))
        worker.grant, worker.spent, worker.link = 0, 0, None
        worker.computing = worker.transferring = False

    # What workers do under a grant: a pull, a computation and a push

    def _happen(self, kind: _Kind, number: int, grant: int) -> None:
        match kind:
            case _Kind.BEGIN:
                self._begin(number, grant)
            case _Kind.PULL_LEFT:
                self._off_the_link(number, grant, _Kind.PULLED)
            case _Kind.PULLED:
                self._pulled(number, grant)
            case _Kind.COMPUTED:
                self._computed(number, grant)
            case _Kind.PUSH_LEFT:
                self._off_the_link(number, grant, _Kind.PUSHED)
            case _Kind.PUSHED:
                self._pushed(number, grant)

    def _begin(self, number: int, grant: int) -> None:
        if self.network.overlap:
            self._compute(number, grant)
        if self._pull_time or self._latency:
            self._send(self._pulls, number, grant)
        else:
            self._pulled(number, grant)

    def _pulled(self, number: int, grant: int) -> None:
        self._book(number)
        worker = self._workers[number]
        worker.transferring = False
        worker.pulls += 1
        if self.network.overlap:
            self._push(number, grant)
        else:
            self._compute(number, grant)

    def _compute(self, number: int, grant: int) -> None:
        self._book(number)
        worker = self._workers[number]
        worker.computing, worker.begun = True, self.now
        self._schedule(self.now + next(worker.stream), number, _Kind.COMPUTED, grant)

    def _computed(self, number: int, grant: int) -> None:
        self._book(number)
        worker = self._workers[number]
        worker.spent = worker.open_time(self.now)
        worker.computing, worker.computed = False, True
        if not self.network.overlap:
            self._push(number, grant)
        elif worker.pushed:
            self._arrive(number, grant)

    def _push(self, number: int, grant: int) -> None:
        if self._push_time or self._latency:
            self._send(self._pushes, number, grant)
        else:
            self._pushed(number, grant)

    def _pushed(self, number: int, grant: int) -> None:
        self._book(number)
        worker = self._workers[number]
        worker.transferring, worker.pushed = False, True
        worker.pushes += 1
        if worker.computed:
            self._arrive(number, grant)

    def _arrive(self, number: int, grant: int) -> None:
        worker = self._workers[number]
        worker.grant = 0
        worker.arrived += 1
        if self._trace:
            span = Span(number, "compute", worker.begun, worker.begun + worker.spent)
            self._trace.spans.append(span)
        self._pending[number, grant] = (self.now, worker.spent)
        self._tell(Finished(number, grant))

    # Transfers and the clock

    def _send(self, link: Link, number: int, grant: int) -> None:
        self._book(number)
        worker = self._workers[number]
        worker.transferring, worker.link = True, link
        link.send(self.now, (number, grant))

    def _off_the_link(self, number: int, grant: int, then: _Kind) -> None:
        worker = self._workers[number]
        link, worker.link = worker.link, None
        if link is not None:
            link.done(self.now, (number, grant))
        if self._latency:
            self._schedule(self.now + self._latency, number, then, grant)
        else:
            self._happen(then, number, grant)

    def _leaves(self, kind: _Kind) -> Callable[[Time, tuple[int, int]], None]:
        def left(when: Time, whose: tuple[int, int]) -> None:
            self._schedule(when, whose[0], kind, whose[1])

        return left

    def _schedule(self, when: Time, number: int, kind: _Kind, grant: int) -> None:
        self._order += 1
        heapq.heappush(self._due, (when, number, self._order, kind, grant))

    def _book(self, number: int) -> None:
        worker = self._workers[number]
        since = worker.since
        if since == self.now:
            return
        spent_on = worker.book(self.now)
        # Computing becomes a span when its fate is known.
        if self._trace and spent_on != "compute":
            self._trace.spans.append(Span(number, spent_on, since, self.now))
