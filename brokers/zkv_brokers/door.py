"""The broker's door: workers that said hello and are not members yet.

They wait there for the servers to be complete, or, when somebody else holds their name or rank, for
the answer whether that one still lives. Part of the router.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from zkv import control as c
from zkv.errors import Refused, ZkvError
from zkv_brokers import requests
from zkv_brokers.decisions import Decisions
from zkv_brokers.members import Worker

if TYPE_CHECKING:
    from zkv_brokers.router import Router


class Door:
    """Newcomers, by the instance number of their process."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._early: dict[int, c.WorkerHello] = {}
        self._contested: dict[int, tuple[c.WorkerHello, float]] = {}

    @property
    def outside(self) -> Iterable[int]:
        """Who waits for the servers to be complete, or for anybody to come back."""
        return self._early

    def knock(self, peer: int, hello: c.WorkerHello, out: Decisions) -> None:
        """A worker wants in.

        Raises:
            ZkvError: it cannot be a member.
        """
        router = self._router
        router.gatekeeper.norms.check(hello.name, router.hub.key_of(peer))
        if router.failed is not None:
            router.hub.send(peer, router.failed)
        elif len(router.members.by_peer) + len(self._early) >= router.config.max_members:
            raise Refused(
                f"{len(router.members.by_peer)} members are here, the most that this broker takes "
                "(--max-members)"
            )
        elif router.returning.waiting or router.rolling.waiting or not router.members.complete:
            self._early[peer] = hello
        elif router.members.holder(hello) is not None:
            self._contested.setdefault(peer, (hello, router.hub.now))
        else:
            self.admit(peer, hello, out)

    def take_over(self, old: Door, out: Decisions) -> None:
        """The run has gone back to a snapshot: newcomers go on waiting here."""
        self._early, self._contested = old._early, old._contested
        if self._router.members.complete:
            self.open(out)

    def open(self, out: Decisions) -> None:
        """Let in who has waited, if all servers are here."""
        early, self._early = self._early, {}
        for peer, hello in early.items():
            try:
                self.knock(peer, hello, out)
            except ZkvError as error:
                self._router.refuse(peer, 0, error)

    def settle(self, out: Decisions) -> None:
        """Decide about newcomers whose name or rank is held: does the holder still live?

        A live one is heard within a beat, and keeps its place; a dead one loses it within three.
        """
        router = self._router
        router.gatekeeper.norms.put_out(router, out)
        for peer, (hello, since) in list(self._contested.items()):
            holder = router.members.holder(hello)
            waited = router.hub.now - since
            lives = holder is not None and router.hub.silent_s(holder.peer) < waited
            if holder is not None and not lives and waited <= 3 * router.config.beat_s:
                continue
            del self._contested[peer]
            if holder is not None and not lives:
                router.remove(holder, "a new process came in its place, and it was silent", out)
            try:
                self.admit(peer, hello, out)
            except ZkvError as error:
                router.refuse(peer, 0, error)

    def forget_silent(self) -> None:
        """Forget newcomers that have given up."""
        router = self._router
        for peer in router.hub.peers():
            strange = peer not in router.members.by_peer
            if strange and router.hub.silent_s(peer) > router.config.worker_lost_s:
                router.hub.forget(peer)
                self.forget(peer)
                router.fleet.forget(peer)

    def forget(self, peer: int) -> None:
        """A newcomer is not waited for any more."""
        self._early.pop(peer, None)
        self._contested.pop(peer, None)

    def admit(self, peer: int, hello: c.WorkerHello, out: Decisions) -> Worker:
        """Make a worker a member, and tell it what there is.

        Raises:
            ZkvError: it cannot be one.
        """
        router = self._router
        admitted = router.members.admit(peer, hello)
        if isinstance(admitted, ZkvError):
            raise admitted
        router.hub.note("info", f"{admitted} joined")
        router.gatekeeper.worker_joins(admitted)
        router.log_epoch(out)
        out.tell(admitted.incarnation, requests.welcome(router, admitted))
        for told in router.catalog.history:
            out.tell(admitted.incarnation, told)
            if isinstance(told, c.Layout):
                out.tell(admitted.incarnation, c.Ready(told.init))
        if not hello.observer:
            router.groups.welcome(admitted, out)
        return admitted
