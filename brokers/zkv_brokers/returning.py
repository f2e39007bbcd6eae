"""After a broker's restart: its members are taken up again as they are heard. Part of the router.

Until the first of them is, newcomers wait at the door and nobody is given up. If none comes back,
the run that the journal is of has ended without a word, and a new one may begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zkv import control as c
from zkv.errors import ZkvError
from zkv_brokers.decisions import Decisions

if TYPE_CHECKING:
    from zkv_brokers.router import Router

ABANDONED_S = 5.0
"""Members dial every 0.3 s at least, and speak every 0.5 s; but a server in an update is silent."""


class Returning:
    """What a router that was restarted waits for."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._since: float | None = None
        """When it was restarted; None: somebody has been heard since."""
        self._strangers: dict[int, c.ServerHello] = {}
        self.abandoned = False
        """Whether nobody of this run is left, and somebody wants to begin another one."""

    def begin(self, term: int, instance: int) -> None:
        """Go on in another process, which knows all that the one before has heard."""
        router = self._router
        router.members.term = term
        router.hub.restart(instance)
        self._since = router.hub.now if router.members.by_peer else None
        for server in router.members.servers.values():
            # The connections that were watched have ended with the process.
            server.broken = False
        router.fleet.changed()
        router.snapshots.again()
        router.rolling.again()
        workers, servers = len(router.members.workers), len(router.members.servers)
        version, entries = router.groups.version, len(router.log)
        text = f"going on at version {version} of the model, entry {entries} of the log"
        router.hub.note("warning", f"{text}; {workers} workers and {servers} servers are members")

    @property
    def waiting(self) -> bool:
        """Whether nobody has come back yet, so that it is not known if the run goes on."""
        return self._since is not None

    def holds(self, peer: int, hello: c.ServerHello) -> bool:
        """Return whether a new server has to wait until that is known."""
        if self.waiting:
            self._strangers[peer] = hello
        return self.waiting

    def forget(self, peer: int) -> None:
        """A newcomer must not come in."""
        self._strangers.pop(peer, None)

    def look(self, out: Decisions) -> None:
        """See whether anybody has come back."""
        router = self._router
        if router.hub.forgetful:
            router.fail(
                "BrokerLost",
                "the broker was restarted, and its journal lacks what somebody was told before: "
                "its end is lost. Stop all processes and start the run again",
            )
        if self._since is None:
            return
        if all(router.hub.is_away(peer) for peer in router.members.by_peer):
            late = router.hub.now - self._since > ABANDONED_S
            self.abandoned = late and bool(self._strangers or router.door.outside)
            return
        self._since = None
        strangers, self._strangers = self._strangers, {}
        for peer, hello in strangers.items():
            try:
                if router.fleet.hello(peer, hello, out):
                    router.fleet.changed()
            except ZkvError as error:
                router.refuse(peer, 0, error)
        router.door.open(out)
