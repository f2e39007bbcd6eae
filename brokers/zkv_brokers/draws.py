"""Which samples go with which grant of the model, and who is out of samples.

It joins the pool, which knows owners and tickets, to a group, which knows workers and grants. A
worker whose grant finds the pool empty takes part in nothing until something comes back: it must
not keep the others' updates waiting. Pure: what is decided is collected in `Decisions`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from zkv import control as c
from zkv.errors import Refused
from zkv.pool import Pool, Shard
from zkv_brokers.decisions import Decisions
from zkv_brokers.members import Worker

if TYPE_CHECKING:
    from zkv_brokers.group import Group


@dataclass(slots=True)
class Draws:
    """The model's pool, if it has one, and the open ticket of each grant."""

    pool: Pool | None = None
    dry: dict[int, int] = field(default_factory=dict)
    """Members (incarnations by number) whose newest grant has found the pool empty."""
    idle: dict[int, int] = field(default_factory=dict)
    """Those of them that take no part by now, and wait for what may come back."""
    _named: set[int] = field(default_factory=set)
    _tickets: dict[tuple[int, int], int] = field(default_factory=dict)

    def use(self, message: c.UsePool, worker: Worker, *, trained: bool) -> None:
        """A worker names the pool; the first one's counts. `trained`: batches were begun already.

        Raises:
            Refused: another pool is in use, or batches were begun without one, or it only observes.
            ValueError: no such pool is possible.
        """
        shard = Shard(message.n, message.seed, message.size, message.passes or None, message.retry)
        if worker.hello.observer:
            raise Refused(f"{worker} is an observer, which computes no batches")
        if self.pool is None:
            if trained:
                raise Refused(
                    f"{worker} names {shard}, but batches were begun without any: every worker "
                    "has to take its batches from worker.batches(data), from the first one on"
                )
            self.pool = Pool(shard)
        elif self.pool.shard != shard:
            raise Refused(
                f"{worker} names {shard}, but the workers of this run share {self.pool.shard}: "
                "all must name the same (local.batches(data) draws h * size at once)"
            )
        self._named.add(worker.incarnation)

    def check_begin(self, worker: Worker) -> None:
        """Check that a worker that wants batches knows the pool, if there is one.

        Raises:
            Refused: it does not.
        """
        if self.pool is not None and worker.incarnation not in self._named:
            raise Refused(
                f"{worker} begins a batch without samples, but the workers of this run share "
                f"{self.pool.shard}: take its batches from worker.batches(data)"
            )

    def take(self, number: int, grant: int, incarnation: int) -> c.Samples | None:
        """Return what to compute on under a grant; None without a pool, or if it is empty."""
        if self.pool is None:
            return None
        draw = self.pool.take(number)
        if draw is None:
            self.dry[number] = incarnation
            return None
        self._tickets[number, grant] = draw.ticket
        return c.Samples(draw.pass_number, draw.start, draw.stop)

    def settle(self, number: int, grant: int, *, counted: bool) -> None:
        """Say what became of a grant's samples; a second time it changes nothing."""
        ticket = self._tickets.pop((number, grant), None)
        if ticket is not None and self.pool is not None:
            self.pool.settle(ticket, counted=counted)

    def left(self, number: int, arrived: Container[tuple[int, int]]) -> None:
        """A member is gone: of its draws only those count whose contributions have arrived."""
        self.dry.pop(number, None)
        for owner, grant in list(self._tickets):
            if owner == number and (owner, grant) not in arrived:
                self.settle(owner, grant, counted=False)

    def forget(self, worker: Worker) -> None:
        """A worker waits for no samples any more."""
        if self.idle.get(worker.number) == worker.incarnation:
            del self.idle[worker.number]

    def circulate(self, group: Group, out: Decisions) -> None:
        """Let out who is out of samples, and in again when some have come back.

        When nothing can come back, those who wait are told that there are no more batches.
        """
        while self.pool is not None and (self.dry or (self.idle and self.pool.ready)):
            while self.dry:
                number, incarnation = self.dry.popitem()
                if group.incarnations.get(number) == incarnation:
                    self.idle[number] = incarnation
                    group.rest(number, out)
            if self.idle and self.pool.ready:
                back, self.idle = self.idle, {}
                group.join(back, out)
        if self.idle and self.pool is not None and (self.pool.done or group.is_still):
            for _, incarnation in sorted(self.idle.items()):
                out.tell(incarnation, c.Exhausted())
            self.idle.clear()

    def plain(self) -> dict[str, Any] | None:
        """Return who has computed what, as plain data; None without a pool."""
        if self.pool is None:
            return None
        return {
            **asdict(self.pool.shard),
            "pass": self.pool.pass_number,
            "done": self.pool.done,
            "coverage": {str(n): round(part, 6) for n, part in self.pool.coverage.items()},
            "workers": {str(n): asdict(one) for n, one in sorted(self.pool.shares.items())},
        }
