"""The broker's door: workers that said hello and are not members yet.

They wait there for the servers to be complete, or, when somebody else holds their name or rank, for
the answer whether that one still lives. Part of the router.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zkv import control as c
from zkv.errors import Refused, ZkvError
from zkv.heartbeat import BEAT_S, gone_s
from zkv_brokers import requests
from zkv_brokers.decisions import Decisions
from zkv_brokers.members import Worker

if TYPE_CHECKING:
    from zkv_brokers.members import Worker
    from zkv_brokers.router import Router


@dataclass(frozen=True, slots=True)
class Contest:
    """A newcomer whose place somebody has: the peer `holder`, which was asked with the message
    number `asked`, at `since`."""

    hello: c.WorkerHello
    since: float
    holder: int
    asked: int


class Door:
    """Newcomers, by the instance number of their process."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._early: dict[int, c.WorkerHello] = {}
        self._contested: dict[int, Contest] = {}

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
        elif (holder := router.members.holder(hello)) is not None:
            if peer not in self._contested:
                self._contested[peer] = self._contest(hello, holder)
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

        A live one acknowledges what it is sent from now on, and keeps its place; one that is silent
        for three beats loses it. That something is heard of it says nothing: a kernel goes on
        sending what a dead process has left.
        """
        router = self._router
        router.gatekeeper.norms.put_out(router, out)
        patience_s = gone_s(router.config.beat_s)
        for peer, contest in list(self._contested.items()):
            hello, holder = contest.hello, router.members.holder(contest.hello)
            if holder is not None and holder.peer != contest.holder:
                self._contested[peer] = self._contest(hello, holder)
                continue
            if holder is not None and not router.hub.has_acknowledged(holder.peer, contest.asked):
                waited_s = router.hub.now - contest.since
                if min(waited_s, router.hub.silent_s(holder.peer)) <= patience_s:
                    continue
                router.remove(holder, "a new process came in its place, and it was silent", out)
            del self._contested[peer]
            try:
                self.admit(peer, hello, out)
            except ZkvError as error:
                router.refuse(peer, 0, error)

    def _contest(self, hello: c.WorkerHello, holder: Worker) -> Contest:
        """Ask the holder of a newcomer's place whether it lives."""
        hub = self._router.hub
        return Contest(hello, hub.now, holder.peer, hub.ask(holder.peer))

    def forget_silent(self) -> None:
        """Forget newcomers that have given up."""
        router = self._router
        # Who has not been let in was not told how often to beat.
        patience_s = max(router.config.worker_lost_s, gone_s(BEAT_S))
        for peer in router.hub.peers():
            strange = peer not in router.members.by_peer
            if strange and router.hub.silent_s(peer) > patience_s:
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
