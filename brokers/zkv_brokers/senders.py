"""Who sends a server data, over which route, and whether that may be: nothing is believed that does
not come over the route on which its worker has greeted, nor with another key than that worker's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set

import zmq

from zkv.data_messages import Data, Done, Fetch, Greet, Part, Probe, Push
from zkv.data_messages import sender as sender
from zkv.errors import ProtocolError
from zkv.roles import KEY_BYTES
from zkv.wire import STRANGERS
from zkv_net.safety import Safety

log = logging.getLogger("zkv.server")
STRANGER_S = 60.0
"""How long the route of one who is no member yet is kept."""
RELAYED = 2
"""Route frames of what the broker passes on: its own, and the worker's behind its key."""


class Senders:
    """Routes to workers by their incarnation. `gone(incarnation)` is called for each that is let
    go."""

    def __init__(self, gone: Callable[[int], None]) -> None:
        self.safety = Safety()
        self.routes: dict[int, list[bytes]] = {}
        self._gone = gone
        self._newest = 0
        """The incarnation that has become a member last."""
        self._strangers: dict[int, float] = {}
        """Since when others have a route."""

    def may(self, message: Data, route: Sequence[zmq.Frame], last: zmq.Frame) -> bool:
        """Return whether who has sent this may; `last` is a message's last frame.

        Raises:
            ProtocolError: it may not, and that is no matter of time.
        """
        if not self.safety.encrypts:
            return True
        key = self._key(route, last)
        roles = self.safety.roles(key)
        if isinstance(message, Fetch | Part):
            if "server" not in roles:
                raise ProtocolError(f"the key {key[:8]}… asks as a server, and is for none")
            return True
        incarnation = sender(message)
        if incarnation >= STRANGERS:
            # Whose key is let in may measure the way; no member has such a number.
            return isinstance(message, Greet | Probe)
        if not self.safety.knows(incarnation):
            # The broker's word is on its way; who greets does so again.
            log.debug("dropped a %s of somebody yet unknown", type(message).__name__)
            return False
        if not self.safety.is_of(incarnation, key):
            raise ProtocolError(f"incarnation {incarnation} is not of the key {key[:8]}…")
        if isinstance(message, Push | Done) and "worker" not in roles:
            raise ProtocolError(f"the key {key[:8]}… may not push: it only reads")
        return True

    def _key(self, route: Sequence[zmq.Frame], last: zmq.Frame) -> str:
        """Return whose key a message has come with; the broker says it of what it passes on."""
        key = self.safety.sender(last)
        if len(route) == 1:
            return key
        if len(route) != RELAYED or key != self.safety.broker:
            raise ProtocolError(f"a route of {len(route)} frames by the key {key[:8]}…")
        return route[1].bytes[:KEY_BYTES].hex()

    def is_known(self, message: Data, route: list[bytes]) -> bool:
        """Whether the message came over the route on which its worker has greeted."""
        if isinstance(message, Greet):
            self.routes[message.incarnation] = route
            return True
        return self.routes.get(sender(message)) == route

    def forget_those_gone(self, members: Set[int], now: float) -> None:
        """Forget the routes of those who are no members any more. Who greets before the log says
        that it is one, which incarnations tell, as they rise, has some time to become one."""
        self._newest = max(self._newest, *members, 0)
        for who in self.routes.keys() - members:
            since = self._strangers.setdefault(who, now)
            if who <= self._newest or now - since > STRANGER_S:
                del self.routes[who], self._strangers[who]
                self._gone(who)
