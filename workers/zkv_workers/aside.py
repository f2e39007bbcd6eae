"""What a session does that is no part of a batch: initial values in parts, and waits for room.

A worker that cannot hold the model makes its first values layer by layer: each block is pushed as
soon as it is complete, and the next ones are made when there is room for them. Knows no frames.
"""

from __future__ import annotations

from collections.abc import Callable

from zkv import control as c
from zkv.errors import BrokerLost
from zkv.layout import Layout
from zkv.wire import ContributionId
from zkv_workers import signals as s
from zkv_workers.encoding import Sealed
from zkv_workers.requests import Requests
from zkv_workers.transfers import Uploads


class Aside:
    """Seeds, and calls that wait for room. `answer` ends a call."""

    def __init__(
        self,
        layout: Layout,
        uploads: Uploads,
        requests: Requests,
        answer: Callable[[int, object], None],
    ) -> None:
        self._layout = layout
        self._uploads = uploads
        self._requests = requests
        self._answer = answer
        self._rooms: list[s.Room] = []
        self._asked: list[s.Seeding] = []
        self._seeding: dict[int, int] = {}
        """Calls that wait until every server holds an initialisation: tokens by its number."""

    def seed(self, offer: s.Initialise, name: ContributionId, message: c.Layout) -> None:
        """The broker asks for the values of what this worker has offered."""
        if offer.in_parts:
            self._asked.append(s.Seeding(name, message, self._layout.snapshot()))
            self._answer(offer.token, self._asked[-1])
        else:
            self._uploads.seed(name, message, offer.values)

    def take(self, event: s.Seed | s.EndSeeds | s.Room, now: float) -> None:
        """Take what the caller gives, or waits for.

        Raises:
            BrokerLost: a broker that is gone has asked for these values.
        """
        match event:
            case s.EndSeeds(seeding=seeding) if seeding not in self._asked:
                raise BrokerLost("the broker is a new one, and has no values yet; initialise again")
            case s.Seed(seeding=seeding) if seeding not in self._asked:
                pass  # The end will say it.
            case s.Seed(seeding, bid, values):
                index = seeding.message.index
                name, init = seeding.name, seeding.message.init
                self._uploads.push(name, init, bid, Sealed(values), index)
            case s.EndSeeds(token, seeding):
                self._requests.open(token, "the servers' receipt of the first values", now)
                self._seeding[seeding.message.init] = token
                self._uploads.end_seeds(seeding.name, seeding.message)
            case s.Room(token=token):
                self._requests.open(token, "room for what is to be sent", now)
                self._rooms.append(event)

    def ready(self, init: int) -> None:
        """Every server holds the values of an initialisation."""
        token = self._seeding.pop(init, 0)
        if token:
            self._answer(token, None)

    def restart(self) -> list[int]:
        """The broker is a new one; return the calls that it cannot answer."""
        tokens = list(self._seeding.values())
        self._asked.clear()
        self._seeding.clear()
        return tokens

    def give_up(self, token: int) -> None:
        """Nobody waits for this call's answer any more."""
        self._rooms = [room for room in self._rooms if room.token != token]

    def look(self) -> None:
        """Answer those who wait for room, if there is some."""
        if not self._rooms:
            return
        held = self._uploads.held_bytes
        rooms, self._rooms = self._rooms, []
        for room in rooms:
            if held <= room.nbytes:
                self._answer(room.token, None)
            else:
                self._rooms.append(room)
