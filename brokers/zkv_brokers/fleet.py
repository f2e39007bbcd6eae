"""Servers that come, go, and are lost. Part of the router."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zkv import control as c
from zkv.entries import Configure, Epoch
from zkv.errors import Refused, ZkvError
from zkv.heartbeat import gone_s
from zkv.layout import Layout
from zkv.wire import MODEL
from zkv_brokers.decisions import Decisions
from zkv_brokers.members import Server
from zkv_brokers.moves import IDLE
from zkv_brokers.rearranging import by_itself, tried
from zkv_brokers.signals import ServersChanged

if TYPE_CHECKING:
    from zkv_brokers.router import Router


class Fleet:
    """The router's servers: those that the start line waits for, late ones, and drained ones."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.joined: set[int] = set()
        """Servers that came when all that the start line waits for were here."""
        self._fresh: list[int] = []
        """Those of them that have not got their share."""
        self._early: dict[int, c.ServerHello] = {}
        """Servers that wait at the door, by the instance number of their process: late ones that
        were early, and such as come for one that may be lost."""
        self._planned: Layout | None = None
        """The layout that all was planned for."""
        self._warned = ""
        self.draining: list[int] = []
        """Servers that everything moves away from."""
        self._addresses: ServersChanged | None = None
        self.retired: set[int] = set()
        """Those of them that own nothing, and were told to go."""

    def changed(self) -> None:
        """Tell the data port which servers are here."""
        self._addresses = self._router.gatekeeper.addresses()

    def actions(self) -> list[ServersChanged]:
        """Return what the data port has to know now."""
        addresses, self._addresses = self._addresses, None
        return [] if addresses is None else [addresses]

    def closed(self) -> set[int]:
        """Return the numbers of servers that take no blocks: those that have left, or are to."""
        members = self._router.members
        return set(range(members.places)) - members.servers.keys() | set(self.draining)

    def hello(self, peer: int, hello: c.ServerHello, out: Decisions) -> bool:
        """Let a server in; return whether all are here now.

        Raises:
            ZkvError: there is no place for it.
        """
        router, members = self._router, self._router.members
        late = members.complete
        if hello.started and (hello.joins or late):
            # Also one that was taken for lost, and has not heard of it.
            raise Refused(
                f"server {hello.name!r} holds blocks of an earlier run, or of a place in this one "
                "that it has lost; start it anew"
            )
        if hello.started and not late:
            router.fail(
                "BrokerLost",
                f"server {hello.name!r} at {hello.address} holds a model of an earlier broker, "
                "whose log is lost; stop all processes and start the run again",
            )
            router.hub.send(peer, router.failed or c.Bye(""))
            return False
        if hello.joins and not late:
            # It is one more: it must not take the place of one that the start line waits for.
            self._early[peer] = hello
            return False
        if late and not hello.joins and not members.vacant and self.suspects():
            # It may be one of those that are lost, started again before that was found.
            self._early[peer] = hello
            return False
        enrolled = members.enrol(peer, hello)
        if isinstance(enrolled, ZkvError):
            raise enrolled
        here = f"{len(members.servers)} of {members.servers_wanted}"
        router.hub.note("info", f"{enrolled} is here, {here}")
        router.gatekeeper.server_joins(enrolled)
        wanted, beat_s = members.servers_wanted, router.config.beat_s
        welcome = c.ServerWelcome(enrolled.index, wanted, members.term, beat_s)
        router.hub.send(peer, welcome)
        if late:
            for message in self._catch_up(out):
                router.hub.send(peer, message)
            enrolled.index_sent = out.index
            self.joined.add(enrolled.index)
            self._fresh.append(enrolled.index)
            self._tell(out)
        if members.complete:
            self._let_in(out)
        return members.complete

    def _let_in(self, out: Decisions) -> None:
        """Look again at those who wait at the door."""
        early, self._early = self._early, {}
        for waited, one in early.items():
            try:
                self.hello(waited, one, out)
            except ZkvError as error:
                self._router.refuse(waited, 0, error)

    def suspects(self) -> bool:
        """Return whether some server may be lost of whose blocks there are copies: then nothing
        moves, as it may be needed where it is."""
        router, hub, beat_s = self._router, self._router.hub, self._router.config.beat_s
        return router.replicas.wanted and any(
            one.broken or hub.is_away(one.peer) or hub.silent_s(one.peer) > 2 * beat_s
            for one in router.members.servers.values()
        )

    def forget(self, peer: int) -> None:
        """A late server that was early must not come in."""
        self._early.pop(peer, None)
        self._router.rolling.forget(peer)

    def _catch_up(self, out: Decisions) -> Iterator[c.Catchup]:
        """Yield what a server has to know that was not here when it was written into the log."""
        router = self._router
        entries: list[c.Entry] = []
        for told in router.catalog.history:
            match told:
                case c.Layout(init=init, keys=keys, blocks=blocks, tables=tables):
                    entries.append(c.Init(init, 0, keys, blocks, False, tables))
                case c.Regrouped(kid=kid, group=group, bid=bid):
                    entries.append(c.Regroup(kid, group, bid))
                case c.Follow(placement=placement, blocks=moved):
                    moves = [(bid, servers[0]) for bid, servers in moved]
                    entries.append(c.Move(placement, moves))
        for one in router.catalog.pending.values():
            entries.append(
                c.Init(one.init, one.incarnation, one.entries, one.blocks, one.plain, one.tables)
            )
        entries += router.log.latest(out.entries, (Configure, Epoch))
        groups = router.groups.by_number
        here = {number: group.version for number, group in groups.items()}
        versions = sorted({MODEL: router.groups.version, **here}.items())
        term = router.members.term
        for at, entry in enumerate(entries, start=1):
            yield c.Catchup(term, out.index, [entry], versions, at == len(entries))

    def _tell(self, out: Decisions) -> None:
        """Tell workers, and the relay, which servers are here."""
        router = self._router
        self.changed()
        here = router.members.servers.values()
        message = c.Servers([c.ServerAt(s.index, s.hello.name, s.hello.address) for s in here])
        for incarnation in router.members.incarnations():
            out.tell(incarnation, message)

    def owned(self) -> set[int]:
        """Return the servers that own blocks, or will when their first values are here."""
        router = self._router
        blocks = list(router.layout.blocks.values())
        for one in router.catalog.pending.values():
            blocks += one.blocks
        return {block.server for block in blocks}

    def look(self, out: Decisions) -> None:
        """Tell drained servers to go, once nothing is on its way to them."""
        moves, layout = self._router.moves, self._router.layout
        if not (self.draining or self._fresh) or moves.stage != IDLE or moves.waiting:
            return
        if self._fresh or self._planned is not layout.snapshot():
            # There may be keys that are newer than the plan.
            moves.plan(tried(lambda: by_itself(self._router, self._fresh), self._warn))
            self._fresh.clear()
            self._planned = layout.snapshot()
            moves.look(out)
        if not self.draining or not moves.is_still:
            return
        for index in self.draining:
            needed = self.owned() | set(moves.kept.values())
            if index not in self.retired and index not in needed:
                self.retired.add(index)
                out.log(c.Retire(index))

    def _warn(self, text: str) -> None:
        if text != self._warned:
            self._router.hub.note("warning", f"some blocks stay where they are: {text}")
        self._warned = text

    def stopped(self, server: Server, why: str, out: Decisions) -> None:
        """A server says that it cannot go on, or that it goes."""
        drained = server.index in self.retired and server.index not in self.owned()
        if drained:
            self._remove(server, why, out)
        else:
            self._lost(server, f"it has stopped ({why})", out)

    def may_go(self, server: Server) -> bool:
        """Return whether nothing is lost with a server: a late one that has never owned a block.

        One that has may still have values to send that were granted while it did.
        """
        return server.index in self.joined and server.index not in self._owners()

    def _owners(self) -> set[int]:
        """Return the servers that own blocks, will when their first values are here, or did."""
        found = {
            block.server for one in self._router.catalog.pending.values() for block in one.blocks
        }
        for told in self._router.catalog.history:
            match told:
                case c.Layout(blocks=blocks):
                    found |= {block.server for block in blocks}
                case c.Follow(blocks=moved):
                    found |= {servers[0] for _, servers in moved}
        return found

    def tick(self, out: Decisions) -> None:
        """Time has passed: a server may be lost."""
        router, config = self._router, self._router.config
        if router.returning.waiting:
            return
        for server in list(router.members.servers.values()):
            silent = router.hub.silent_s(server.peer)
            gone = server.broken and silent > gone_s(config.beat_s)
            if not gone and not router.hub.overdue_s(server.peer, config.server_lost_s):
                continue
            why = "its connection broke, and " if server.broken else ""
            why += f"nothing was heard of it for {silent:.1f} s"
            self._lost(server, why, out, silent=True)
        if self._early and router.members.complete:
            self._let_in(out)

    def _lost(self, server: Server, why: str, out: Decisions, *, silent: bool = False) -> None:
        """A server is gone: go on without it, if that can be, or go back to a snapshot.

        `silent`: it may be heard again.
        """
        if self.may_go(server):
            self._remove(server, why, out, lost=self._router.replicas.wanted)
            return
        hindrance = self._router.replicas.hindrance(server)
        if not hindrance:
            self._router.replicas.take_over(server, why, out)
        elif not self._router.rolling.awaits(server, why, silent=silent):
            no_way = f"{hindrance}, and there is no snapshot to go back to (--snapshot-dir)"
            self._router.fail("ServerLost", f"{server} is lost: {why}; {no_way}")

    def _remove(self, server: Server, why: str, out: Decisions, *, lost: bool = False) -> None:
        """Go on without a server that owns nothing; `lost`: another one may come for it."""
        router = self._router
        router.hub.note("info", f"{server} is gone: {why}; it owned nothing")
        router.moves.lost(server.index, out)
        (router.members.lose if lost else router.members.dismiss)(server)
        self.without(server, why, out)

    def without(self, server: Server, why: str, out: Decisions) -> None:
        """Tell all who have to know that a server is no member any more."""
        router = self._router
        router.hub.send(server.peer, c.Bye(why))
        router.hub.close(server.peer)
        router.rolling.lost.pop(server.index, None)
        self.draining = [index for index in self.draining if index != server.index]
        self._fresh = [index for index in self._fresh if index != server.index]
        for group in router.groups.by_number.values():
            group.homes.without(server.index)
            group.sum_again(out)
            group.check_all(out)
        self._tell(out)
