"""A session's blocks on their way to servers.

Pushes wait for byte credits, are sent again until acknowledged, and dropped when their contribution
is settled.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.layout import Layout
from zkv.pace import Pace
from zkv.table_layout import bid_of
from zkv.window import Window, ready
from zkv.wire import MODEL, ContributionId
from zkv_workers.config import SessionConfig
from zkv_workers.encoding import Sealed
from zkv_workers.flights import Flights
from zkv_workers.packing import Empty, cut, fresh
from zkv_workers.places import Places
from zkv_workers.signals import SendData

LAST = 2**62
"""The place of a contribution's end: behind all of its blocks."""


class Uploads:
    """Pushed blocks, by server."""

    def __init__(self, layout: Layout, config: SessionConfig) -> None:
        self.places = Places(layout)
        self._layout, self._config = layout, config
        self._priority = config.priority
        self._windows: dict[int, Window[SendData]] = {}
        self._pace = None if config.near else Pace()
        self.empty: Empty = fresh
        self.bytes_sent = 0
        self.bytes_arrived = 0
        """Acknowledged ones."""
        self.busy_s = 0.0
        """Seconds in which something was on its way, up to the last acknowledgement."""
        self._busy_since: float | None = None
        self.idle_since = 0.0
        """When the last acknowledgement came after which nothing was on its way."""
        self.flights = Flights()

    def _window(self, server: int) -> Window[SendData]:
        if server not in self._windows:
            size, pause = self._config.window_bytes, self._config.resend_s
            self._windows[server] = Window(size, resend_s=pause, pace=self._pace)
        return self._windows[server]

    def push(
        self,
        name: ContributionId,
        grant: int,
        bid: int,
        sealed: Sealed,
        index: int,
        weight: float | None = None,
        of: tuple[d.Addend, ...] | None = None,
    ) -> None:
        """Queue a block, or a sum `of` some, for its server, and for those with copies of it."""
        payload, order = sealed.payload, self._order(name, bid)
        codec, form, placement = sealed.codec, sealed.form, self.places.begun(name, grant)
        message = d.Push(name, grant, bid, codec, index, form, weight, placement, of)
        label = (name, bid if of is None else -2 - bid)
        for server in self.places.servers(name, grant, self._layout.blocks[bid_of(bid)]):
            data = SendData(server, message, payload)
            self._window(server).offer(label, payload.nbytes, data, order)
            self.bytes_sent += payload.nbytes

    def conclude(
        self,
        name: ContributionId,
        grant: int,
        weight: float,
        skipped: Sequence[int],
        index: int,
        places: Iterable[int] = (),
    ) -> None:
        """Queue the end of a contribution for its group's servers (rule 8); `places`: in tables."""
        absent, keeps = set(skipped), self._config.prefetch > 0
        by_server = self._layout.places_by_server(name.group, places)
        for block in self._layout.blocks_in(name.group):
            for server in self.places.servers(name, grant, block):
                sent = by_server.setdefault(server, [])
                if not absent.issuperset(block.kids):
                    sent.append(block.bid)
        placement, skips = self.places.begun(name, grant), list(skipped)
        for server, bids in by_server.items():
            self._done(server, d.Done(name, grant, weight, bids, skips, index, keeps, placement))

    def seed(
        self, name: ContributionId, message: c.Layout, values: Mapping[str | int, Array]
    ) -> None:
        """Queue the initial values of an initialisation: they are pushed like a contribution."""
        for bid, payload in cut(self._layout, message.blocks, values, self.empty).items():
            self.push(name, message.init, bid, Sealed(payload), message.index)
        self.end_seeds(name, message)

    def end_seeds(self, name: ContributionId, message: c.Layout) -> None:
        """Queue the end of an initialisation."""
        for server in dict.fromkeys(block.server for block in message.blocks):
            sent = [b.bid for b in message.blocks if b.server == server and b.segments]
            self._done(server, d.Done(name, message.init, 0.0, sent, [], message.index))

    def _done(self, server: int, message: d.Done) -> None:
        order = self._order(message.contribution, LAST)
        data = SendData(server, message, None)
        self._window(server).offer((message.contribution, -1), 0, data, order)

    def _order(self, name: ContributionId, bid: int) -> tuple[int, ...]:
        """Return what goes first: an older batch, and of one batch what is needed first when the
        next one is computed. Blocks are numbered as keys were initialised: first layers first."""
        return (name.batch, bid) if self._priority and name.group == MODEL else ()

    def acknowledged(self, message: d.Ack, now: float) -> None:
        """A server has these."""
        window = self._window(message.server)
        before = window.in_flight
        for name, bid in message.items:
            window.acknowledge((name, bid), now)
        self.bytes_arrived += before - window.in_flight
        self.flights.note(message.server, window.in_flight, before - window.in_flight, now)
        if self._busy_since is not None:
            self.busy_s += now - self._busy_since
        self._busy_since = now if self._is_busy else None
        if self._busy_since is None:
            self.idle_since = now

    @property
    def held_bytes(self) -> int:
        """Bytes of what was pushed and is not known to have arrived."""
        return sum(window.held_bytes for window in self._windows.values())

    @property
    def _is_busy(self) -> bool:
        return any(window.in_flight for window in self._windows.values())

    def forget(self, name: ContributionId, arrived_at: float | None = None) -> None:
        """The contribution is settled: nobody needs its frames any more.

        `arrived_at`: servers hold all of it, and the word of that was quicker than their receipts.
        """
        self.places.settled(name)
        for server, window in self._windows.items():
            before = window.in_flight
            ours = (n for n in window.names() if isinstance(n, tuple) and n[0] == name)
            if names := set[Hashable](ours):
                window.forget(names)
            arrived = before - window.in_flight
            if arrived and arrived_at is not None:
                self.bytes_arrived += arrived
                self.flights.note(server, window.in_flight, arrived, arrived_at)
            if not window.in_flight:
                self.flights.stop(server)
        self._busy_since = self._busy_since if self._is_busy else None

    def ready(self, now: float) -> list[SendData]:
        """Return what may be sent now."""
        found = ready(self._windows.values(), now)
        if found:
            for server, window in self._windows.items():
                self.flights.note(server, window.in_flight, 0, now)
        if self._busy_since is None and self._is_busy:
            self._busy_since = now
        return found

    def owing(self) -> set[int]:
        """Return the servers that have not acknowledged everything."""
        return {server for server, window in self._windows.items() if len(window)}

    def unacknowledged(self) -> dict[int, int]:
        """Return the bytes in flight at each server."""
        return {server: window.in_flight for server, window in self._windows.items()}

    def here(self, servers: Set[int]) -> None:
        """These are the servers from here on: nothing is on its way to others any more."""
        self.places.here(servers)
        for server in self._windows.keys() - servers:
            window = self._windows.pop(server)
            window.forget(set(window.names()))
            self.flights.stop(server)

    def clear(self) -> None:
        """Drop everything (the broker started anew)."""
        self._windows.clear()
        self.places.clear()
