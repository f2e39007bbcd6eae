"""A limit for the norm of what one worker contributes: above it a contribution is refused, clipped,
or refused and its worker, after a few, put out (quarantine).

Servers tell with `Held` the square sums of a contribution's blocks; the norm is over all of them.
Part of the router; it decides nothing but what one contribution counts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from zkv import control as c
from zkv.errors import ConfigError, Refused
from zkv.wire import MODEL, ContributionId
from zkv_brokers.decisions import Arrival, Decisions

if TYPE_CHECKING:
    from zkv_brokers.router import Router

ACTIONS = ("refuse", "clip", "quarantine")
QUARANTINE_AFTER = 3
"""So many contributions above the limit put a worker out."""
KEPT_MAX = 65_536
"""Contributions whose square sums are kept; those of members that are gone are never asked for."""


class Norms:
    """The norms of one broker's contributions. `limit` 0.0: they are not looked at."""

    def __init__(self, limit: float, action: str, *, joint: bool) -> None:
        if action not in ACTIONS:
            raise ValueError(f"norm action {action!r} is none of {', '.join(ACTIONS)}")
        if not 0.0 <= limit < math.inf:
            raise ValueError(f"norm limit {limit}: it is finite, and 0 for none")
        if limit and joint:
            raise ConfigError(
                "workers that add gradients up among themselves send sums, of which no one's norm "
                "can be told: --norm-limit goes with --topology servers or one-server"
            )
        self.limit, self._action = limit, action
        self._squares: dict[ContributionId, dict[int, float]] = {}
        self._counts: dict[int, int] = {}
        """Of workers' incarnations, how many contributions were above the limit."""
        self._barred: dict[tuple[str, str], str] = {}
        """Names and keys that are put out, and why."""

    def take_over(self, old: Norms) -> None:
        """The run has gone back to a snapshot: who was put out stays out."""
        self._barred = old._barred

    def told(self, message: c.Held) -> None:
        """A server says which contributions it holds, and the square sums of its blocks."""
        if not self.limit:
            return
        for (name, _), squares in zip(message.contributions, message.squares, strict=False):
            if name not in self._squares and len(self._squares) >= KEPT_MAX:
                del self._squares[next(iter(self._squares))]
            # A block that is moving may be told of by two servers: it is one.
            self._squares.setdefault(name, {}).update(squares)

    def judge(self, arrival: Arrival) -> str:
        """Return why a contribution must not count, "" if it may; say what it counts of."""
        name = arrival.contribution
        if not self.limit or name.group != MODEL:
            return ""
        squares = self._squares.pop(name, {})
        # In the order of blocks, so that a replay comes to the same bits.
        norm = math.sqrt(sum(squares[bid] for bid in sorted(squares)))
        if norm <= self.limit:
            return ""
        if self._action == "clip" and math.isfinite(norm):
            arrival.clip = self.limit / norm
            return ""
        self._counts[name.incarnation] = self._counts.get(name.incarnation, 0) + 1
        return (
            f"the gradient's norm is {norm:.6g}, above the limit of {self.limit:g} (--norm-limit)"
        )

    def check(self, name: str, key: str) -> None:
        """Check that a newcomer is not one that was put out.

        Raises:
            Refused: it is.
        """
        why = self._barred.get((name, key))
        if why is not None:
            raise Refused(f"worker {name!r} is in quarantine until a new run begins: {why}")

    def put_out(self, router: Router, out: Decisions) -> None:
        """Put out who has been above the limit too often."""
        if self._action != "quarantine":
            return
        for incarnation, count in list(self._counts.items()):
            worker = router.members.workers.get(incarnation)
            if worker is None:
                del self._counts[incarnation]
            elif count >= QUARANTINE_AFTER:
                why = f"the norms of {count} of its gradients were above {self.limit:g}"
                self._barred[worker.hello.name, router.hub.key_of(worker.peer)] = why
                router.remove(worker, f"quarantine: {why}", out)
