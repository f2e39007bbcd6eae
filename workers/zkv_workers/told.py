"""What a broker was told of keys and data before anything was begun: a new one is told again.

Part of the session: it sends over the session's link and knows no frames.
"""

from __future__ import annotations

from collections.abc import Callable

from zkv import control as c
from zkv.errors import ProtocolError
from zkv.link import Link
from zkv_workers import signals as s
from zkv_workers.cycle import Cycle
from zkv_workers.pulls import Pulls
from zkv_workers.requests import Requests


class Told:
    """Offers of keys, and the pool of samples."""

    def __init__(self, link: Link, *, measuring: bool = False, rate: float = 0.0) -> None:
        self.inside = False
        """Whether the broker has let this worker in: nothing but the hello may be said before."""
        self._measuring = measuring
        """Whether offers wait until it is known how fast the link is."""
        self._link_rate = rate
        self._link = link
        self._offers: dict[int, s.Initialise] = {}
        self._unanswered: set[int] = set()
        """Those that this broker has not answered: it may still ask for their values, even if the
        one before has."""
        self.pool: s.UsePool | None = None

    def tell(self, message: c.Message) -> None:
        """Say something that only a member may say; outside it waits for `again`."""
        if self.inside:
            self._link.send(message)

    def offer(self, event: s.Initialise) -> None:
        """Tell the broker which keys this worker initialises."""
        self._offers[event.token] = event
        self._unanswered.add(event.token)
        if not self._measuring:
            rate, tables = self._link_rate, event.tables
            self.tell(c.Offer(event.token, list(event.specs), event.plain, rate, tables))

    def measured(self, rate: float) -> None:
        """The link carries so many bytes a second (0.0: not known): what has waited is said."""
        self._measuring, self._link_rate = False, rate
        for offer in list(self._offers.values()):
            self.offer(offer)

    def use_pool(self, event: s.UsePool) -> None:
        """Tell the broker which samples are to be dealt out."""
        self.pool, shard = event, event.shard
        passes = 0 if shard.passes is None else shard.passes
        self.tell(c.UsePool(event.token, shard.n, shard.size, shard.seed, shard.retry, passes))

    def again(self, cycle: Cycle, pulls: Pulls, requests: Requests, barrier: int) -> None:
        """Tell a new broker what the old one was told; not before it has let this worker in."""
        self.inside = True
        for offer in list(self._offers.values()):
            self.offer(offer)
        if self.pool is not None:
            self.use_pool(self.pool)
        if cycle.asked:
            self._link.send(c.Begin(cycle.on_demand))
        pulls.restart()
        for token in requests.named("barrier"):
            self._link.send(c.Barrier(token, barrier))
        if requests.leaving:
            self._link.send(c.Leave())

    def begun(self, is_open: Callable[[int], bool]) -> None:
        """Something was begun, so that no new broker can be joined: keep open offers only."""
        self._offers = {
            token: offer
            for token, offer in self._offers.items()
            if token in self._unanswered or is_open(token)
        }

    def answered(self, token: int) -> None:
        """The broker has answered a request."""
        self._unanswered.discard(token)

    def refused(self, token: int) -> None:
        """The broker turns a request down."""
        self._offers.pop(token, None)

    def wanted(self, message: c.Layout) -> s.Initialise:
        """Return the offer of just these keys, whose values the broker asks for.

        Raises:
            ProtocolError: they were not offered.
        """
        keys = {entry.spec.key for entry in message.keys}
        keys |= {entry.spec.key for entry in message.tables}
        for offer in self._offers.values():
            if {one.key for one in offer.specs} | {one.key for one in offer.tables} == keys:
                return offer
        raise ProtocolError(f"the broker wants values of {keys}, which were not offered")
