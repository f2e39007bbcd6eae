"""The broker's gatekeeper: whose key a peer has, what that key may say, and which name is whose.

Part of the router: it hears from outside which keys are let in (`Keys`), and tells servers and
workers, which ask for keys themselves. It must not know sockets or files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from zkv import control as c
from zkv.errors import NotAuthorised
from zkv.roles import ROLES, Holder, check_message, mask
from zkv_brokers.decisions import Decisions
from zkv_brokers.members import Server, Worker
from zkv_brokers.norms import Norms
from zkv_brokers.signals import ServersChanged

if TYPE_CHECKING:
    from zkv_brokers.router import Router

NAMES_MAX = 1024
"""Names that are remembered of one key; then the oldest that no member has is forgotten."""


class Gatekeeper:
    """Keys of one broker's peers. `own` is the broker's own key; "": there are no keys, and
    everybody may say everything."""

    def __init__(self, router: Router, own: str) -> None:
        self._router = router
        config = router.config
        self.norms = Norms(config.norm_limit, config.norm_action, joint=router.topology.joint)
        self._own = Holder(own, "broker", frozenset(ROLES)) if own else None
        self._holders: dict[str, Holder] = {}
        self._names: dict[str, str] = {}
        """Names of workers and servers, and the keys that have had them first."""
        self._names_of: dict[str, deque[str]] = {}
        """The same by key, the oldest first."""
        router.hub.believes = self.believes

    def take_over(self, old: Gatekeeper) -> None:
        """The run has gone back to a snapshot: who may speak, and whose names are whose, is as
        before."""
        self._holders, self._names, self._names_of = old._holders, old._names, old._names_of
        self.norms.take_over(old.norms)

    # --- who may -----------------------------------------------------------------------------

    def holder(self, peer: int) -> Holder:
        """Return who a peer is.

        Raises:
            NotAuthorised: its key is not let in (any more).
        """
        assert self._own is not None
        key = self._router.hub.key_of(peer)
        found = self._own if key == self._own.key else self._holders.get(key)
        if found is None:
            raise NotAuthorised(f"the key {key[:8]}… is not let in; zkv keys add lets it in")
        return found

    def check(self, peer: int, message: c.Message, who: Server | Worker | None) -> None:
        """Check that a peer, which is that member already, may say this.

        Raises:
            NotAuthorised: it may not; key, role and what to do are named.
        """
        if self._own is None or isinstance(who, Server):
            # What a server may say was settled with its hello.
            return
        holder = self.holder(peer)
        check_message(holder, message, member=who is not None)
        if isinstance(message, c.WorkerHello | c.ServerHello):
            self._check_name(holder, message.name)

    def believes(self, peer: int, *, workers: bool = False) -> bool:
        """Return whether a peer's word of later brokers, or (`workers`) of what this one has said
        before it was restarted, counts. It may end the run, so with keys not everybody's does."""
        who = self._router.members.by_peer.get(peer)
        if self._own is None or isinstance(who, Server):
            return True
        return workers and who is not None and not who.hello.observer

    def _check_name(self, holder: Holder, name: str) -> None:
        """A name belongs to the key that is called so, or else to the first one that uses it."""
        named = next((one.key for one in self._holders.values() if one.name == name), "")
        owner = named or self._names.get(name, holder.key)
        if owner != holder.key:
            raise NotAuthorised(
                f"the name {name!r} belongs to the key {owner[:8]}…, and not to {holder}; choose "
                "another name (--name, or ZKV_NAME)"
            )
        if name in self._names:
            return
        mine = self._names_of.setdefault(holder.key, deque())
        if len(mine) >= NAMES_MAX:
            # Each process without a rank has a new name, so there may be many in a long life.
            idle = (one for one in mine if self._router.members.named(one) is None)
            if (oldest := next(idle, None)) is not None:
                mine.remove(oldest)
                del self._names[oldest]
        mine.append(name)
        self._names[name] = holder.key

    # --- what others are told ----------------------------------------------------------------

    def learn(self, holders: Iterable[Holder], out: Decisions) -> None:
        """These keys are let in from here on, and no others: members whose key is not, go."""
        if self._own is None:
            return
        self._holders = {one.key: one for one in holders}
        router = self._router
        for who in list(router.members.by_peer.values()):
            if not self._may_stay(who):
                self._put_out(who, out)
        for peer in router.hub.peers():
            # Who was put out is to hear so.
            strange = peer not in router.members.by_peer and not router.hub.is_closing(peer)
            if strange and not self._is_known(peer):
                router.door.forget(peer)
                router.fleet.forget(peer)
                router.returning.forget(peer)
                router.hub.forget(peer)
        ring = c.Keyring([], [], self._bits())
        for who in self._askers():
            router.hub.send(who.peer, ring)

    def _is_known(self, peer: int) -> bool:
        try:
            self.holder(peer)
        except NotAuthorised:
            return False
        return True

    def _may_stay(self, who: Server | Worker) -> bool:
        """Return whether the key of a member may still be what that is."""
        try:
            check_message(self.holder(who.peer), who.hello, member=False)
        except NotAuthorised:
            return False
        return True

    def _put_out(self, who: Server | Worker, out: Decisions) -> None:
        router, why = self._router, "its key was revoked"
        if isinstance(who, Server):
            router.fleet.stopped(who, why, out)
        else:
            router.hub.send(who.peer, c.Fatal("NotAuthorised", f"{who}: {why}"))
            router.remove(who, why, out)

    def _bits(self) -> list[tuple[str, int]]:
        assert self._own is not None
        some = [self._own, *self._holders.values()]
        return [(one.key, mask(one.roles)) for one in some]

    def _askers(self) -> list[Server | Worker]:
        """Who listens, and so asks others for their keys: servers, and workers if they add up."""
        members = self._router.members
        joint = list(members.workers.values()) if self._router.topology.joint else []
        return [*members.servers.values(), *joint]

    def _key(self, who: Server | Worker) -> str:
        return self._router.hub.key_of(who.peer)

    def _tell(self, to: Iterable[Server | Worker], ring: c.Keyring) -> None:
        for one in to:
            self._router.hub.send(one.peer, ring)

    def worker_joins(self, worker: Worker) -> None:
        """A worker is a member, and was told nothing yet."""
        if self._own is None:
            return
        members = self._router.members
        others = [one for one in self._askers() if one is not worker]
        self._tell(others, c.Keyring([(worker.incarnation, self._key(worker))], []))
        places = [(one.hello.address, self._key(one)) for one in members.servers.values()]
        if not self._router.topology.joint:
            self._tell([worker], c.Keyring([], places))
            return
        workers = members.workers.values()
        places += [(one.address, self._key(one)) for one in workers if one.address]
        self._tell([worker], c.Keyring(self._members(), places, self._bits()))

    def _members(self) -> list[tuple[int, str]]:
        workers = self._router.members.workers.values()
        return [(one.incarnation, self._key(one)) for one in workers]

    def server_joins(self, server: Server) -> None:
        """A server is here, and was told nothing yet."""
        if self._own is None:
            return
        members = self._router.members
        servers = list(members.servers.values())
        places = [(one.hello.address, self._key(one)) for one in servers]
        self._tell([server], c.Keyring(self._members(), places, self._bits()))
        others = [one for one in members.by_peer.values() if one is not server]
        self._tell(others, c.Keyring([], places[-1:]))

    def listens(self, worker: Worker) -> None:
        """A worker has said where others reach it."""
        if self._own is not None and worker.address:
            others = [one for one in self._router.members.workers.values() if one is not worker]
            self._tell(others, c.Keyring([], [(worker.address, self._key(worker))]))

    def addresses(self) -> ServersChanged:
        """Return where all servers are, and their keys."""
        servers = self._router.members.servers.values()
        keys = tuple((one.hello.address, self._key(one)) for one in servers)
        places = tuple((one.index, one.hello.address) for one in servers)
        return ServersChanged(places, () if self._own is None else keys)
