"""The way back of a running cluster: all servers and workers begin again from a snapshot, at once.

It is asked for (`GoBack`), or a server is lost that owned keys. Then another one is waited for in
its place, for a while; meanwhile nobody can finish anything that the lost one has part in. When the
snapshot is found whole, another router takes this one's place, which begins from its manifest as
any run with `--restore` does (`restoring`): nothing in a router that runs has to be mended, and
nothing of the old run can be left in the new one but what is handed over here. Links go on, so each
member is told (`RollBack`) behind all that the old run has told it, and says `WentBack` before all
that it says of the new one; what comes of it before that is of the old run, and is dropped. Pure.
Part of the router.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zkv import control as c
from zkv import snapshot as sn
from zkv.errors import BadSnapshot, Refused, ZkvError
from zkv.reasons import Reason
from zkv.wire import KeyEntry, TableEntry
from zkv_brokers.decisions import Decisions
from zkv_brokers.members import Server
from zkv_brokers.signals import Action, Find, Found
from zkv_brokers.taking_over import take_over

if TYPE_CHECKING:
    from zkv_brokers.router import Router

HEARD_AGAIN = 3
"""A server that was silent too long is there again when it was heard within so many beats."""


@dataclass(slots=True)
class _Lost:
    """A server that is gone."""

    server: Server
    why: str
    silent: bool
    """Whether it was only silent: then it may be heard again, with all that it held."""


class Rolling:
    """What one router does about going back, and what it knows of the run before it."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.lost: dict[int, _Lost] = {}
        self._until = 0.0
        """When it goes back with the servers that are left."""
        self._spare: dict[int, c.ServerHello] = {}
        """Servers that have come meanwhile, by the instance number of their process."""
        self._spare_since = 0.0
        """When the last of them came."""
        self._asked: tuple[int, int, str] | None = None
        """(peer, token, name of the snapshot) of who has asked for it."""
        self._looking = False
        """Whether a snapshot is being looked for."""
        self._find: list[Find] = []
        self.unmarked: set[int] = set()
        """Members of the run before, of which nothing has come yet but what is of that run."""
        self.answer: tuple[int, int, dict[str, Any]] | None = None
        """(peer, token, figures) for who has asked for what led to this run."""
        self.term = 0
        """Under which this run has begun in the place of another one; a broker that is restarted
        has a later one."""
        self.times = 0
        """How often this cluster has gone back."""
        self.last: dict[str, Any] | None = None
        self.problems: list[str] = []
        """Why snapshots could not be used that this run was to go back to."""

    # --- servers that are lost, and that come ----------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether a server is lost, and the run stands still until it goes back."""
        return bool(self.lost) and self._router.failed is None

    def awaits(self, server: Server, why: str, *, silent: bool = False) -> bool:
        """A server is lost that owned keys: return whether there is a way back without it."""
        router = self._router
        if not router.snapshots.kept or router.failed is not None:
            return False
        if server.index not in self.lost:
            if not self.lost:
                self._until = router.hub.now + router.config.server_back_s
            self.lost[server.index] = _Lost(server, why, silent)
            router.hub.note("error", self.why_waiting())
        return True

    def why_waiting(self) -> str:
        """Return who is lost, what is waited for, and what happens then; "" if nobody is."""
        if not self.lost:
            return ""
        router, kept = self._router, self._router.snapshots.kept[0]
        names = ", and ".join(f"{one.server} is lost: {one.why}" for one in self.lost.values())
        wait_s, address = router.config.server_back_s, router.config.address
        return (
            f"{names}. Another server is waited for in its place, for {wait_s:g} s "
            f"(--server-back): zkv server --broker {address}; then all go back to version "
            f"{kept.version} of snapshot {kept.name}"
        )

    @property
    def reason(self) -> Reason | None:
        """Why everybody waits, if a server is lost."""
        words = self.why_waiting()
        return Reason("every server must be here", words=words) if words else None

    def holds(self, peer: int, hello: c.ServerHello) -> bool:
        """Keep a server that has come in the place of a lost one, or of one of which it is not
        known yet; return whether it was kept.

        Raises:
            Refused: it holds something of an earlier run.
        """
        router = self._router
        if not self.lost and (hello.joins or not router.members.complete):
            return False
        if not router.snapshots.kept or (router.members.vacant and not self.lost):
            return False
        if hello.started:
            raise Refused(f"server {hello.name!r} holds blocks of an earlier run; start it anew")
        self._spare[peer], self._spare_since = hello, router.hub.now
        return True

    def forget(self, peer: int) -> None:
        """A newcomer must not come in, or has given up."""
        self._spare.pop(peer, None)

    def again(self) -> None:
        """The broker goes on in another process: what was being looked for is looked for again."""
        self._looking = False

    # --- what is asked for -----------------------------------------------------------------------

    def ask(self, peer: int, message: c.GoBack) -> None:
        """Somebody wants the run to go back.

        Raises:
            Refused: there is no snapshot, or it is about to go back.
        """
        router = self._router
        if self.lost or self._asked is not None or self.answer is not None:
            raise Refused("the run is about to go back to a snapshot")
        if not (router.config.snapshot_dir or router.snapshots.kept):
            raise Refused(
                "this broker knows no folder of snapshots: start it with --snapshot-dir FOLDER"
            )
        if message.name and not sn.NAME.fullmatch(message.name):
            raise Refused(
                f"{message.name!r} is no snapshot's name; zkv snapshot list FOLDER says which "
                "there are"
            )
        self._asked = peer, message.token, message.name

    def look(self, out: Decisions) -> None:
        """See whether it is time to go back."""
        router = self._router
        self.lost = {n: one for n, one in self.lost.items() if not self._is_back(one)}
        if self._spare and not self.lost:
            self._let_in(out)
        if self._looking or router.failed is not None:
            return
        if self._asked is not None:
            self._looking = True
            self._find.append(Find(self._wanted(self._asked[2])))
        elif self.lost and self._is_time():
            if not self.servers():
                limit_s = router.config.server_back_s
                self.give_up(f"no server has come in its place within {limit_s:g} s")
                return
            self._looking = True
            self._find.append(Find(tuple((one.url, one.name) for one in router.snapshots.kept)))

    def _let_in(self, out: Decisions) -> None:
        """Nobody is lost: those who came in somebody's place are here for nothing, if all servers
        are heard."""
        router = self._router
        hub, patience_s = router.hub, HEARD_AGAIN * router.config.beat_s
        early = hub.now - self._spare_since <= patience_s + router.config.beat_s
        if early or any(
            hub.silent_s(one.peer) > patience_s for one in router.members.servers.values()
        ):
            return
        spare, self._spare = self._spare, {}
        for peer, hello in spare.items():
            try:
                router.fleet.hello(peer, hello, out)
            except ZkvError as error:
                router.refuse(peer, 0, error)

    def _is_back(self, one: _Lost) -> bool:
        hub, beat_s = self._router.hub, self._router.config.beat_s
        heard = hub.silent_s(one.server.peer) < HEARD_AGAIN * beat_s and not one.server.broken
        back = one.silent and heard
        if back:
            hub.note("warning", f"{one.server} is heard again: nothing is lost")
        return back

    def _is_time(self) -> bool:
        return len(self._spare) >= len(self.lost) or self._router.hub.now >= self._until

    def _wanted(self, name: str) -> tuple[tuple[str, str], ...]:
        router = self._router
        for one in router.snapshots.kept:
            if one.name == name:
                return ((one.url, name),)
        folder = router.config.snapshot_dir or router.snapshots.kept[0].url
        return ((folder, name),)

    def actions(self) -> list[Find]:
        """Return what is to be looked for now."""
        found, self._find = self._find, []
        return found

    # --- going back ------------------------------------------------------------------------------

    def found(self, event: Found) -> list[Action] | None:
        """What was looked for is there, or not: return what another router that takes this one's
        place has to say at once (`Router.successor`); None: this one goes on."""
        router = self._router
        self._looking = False
        asked, self._asked = self._asked, None
        if asked is None and not (self.lost and self._is_time()):
            return None  # The lost server was heard again meanwhile.
        why = event.why
        try:
            manifest = sn.decode(event.manifest.encode(), event.url) if not why else None
            if manifest is not None:
                self._check(manifest)
        except BadSnapshot as error:
            manifest, why = None, str(error)
        if manifest is not None and not self.servers():
            manifest, why = None, "no server is here"
        if manifest is not None:
            return self._go_back(event, manifest, asked)
        if asked is not None:
            router.hub.note("error", f"the run does not go back: {why}")
            router.hub.send(asked[0], c.Refusal(asked[1], "BadSnapshot", why[:4000]))
        else:
            self.give_up(f"no snapshot can be gone back to: {why}")
        return None

    def give_up(self, why: str) -> None:
        """There is no way back: the run fails."""
        lost = next(iter(self.lost.values()))
        self._router.fail("ServerLost", f"{lost.server} is lost: {lost.why}; {why}")

    def _check(self, manifest: sn.Manifest) -> None:
        """Check that a snapshot is of this run's keys and tables: workers hold arrays for those.

        Raises:
            BadSnapshot: a key is another one there, or is none here.
        """
        layout = self._router.layout
        here: dict[str | int, object] = {one.spec.key: one.spec for one in layout.entries.values()}
        there: list[KeyEntry | TableEntry] = []
        for init in manifest.inits if layout.blocks else []:
            there += [*init.keys, *init.tables]
        for spec in (entry.spec for entry in there):
            table = layout.tables.find(spec.key)
            mine = here.get(spec.key) if table is None else table.spec
            if mine != spec:
                is_here = "there is none of that name" if mine is None else f"it is {mine}"
                raise BadSnapshot(
                    f"snapshot {manifest.name} is of another run: key {spec.key!r} is {spec} "
                    f"there; here {is_here}. A new cluster begins from it with --restore"
                )

    def _go_back(
        self, event: Found, manifest: sn.Manifest, asked: tuple[int, int, str] | None
    ) -> list[Action]:
        router = self._router
        config = replace(router.config, restored=event.manifest, restored_from=event.url)
        term = max(event.term, router.members.term + 1)
        new = type(router)(config, term=term, instance=router.hub.instance, before=router)
        router.successor = new
        why = ", and ".join(f"{one.server} is lost: {one.why}" for one in self.lost.values())
        undone = max(0, router.groups.version - manifest.version)
        told = c.RollBack(
            term,
            manifest.name,
            manifest.version,
            undone,
            (why or "it was asked for (zkv restore)")[:4000],
            [init.init for init in manifest.inits],
        )
        out = Decisions(len(new.log))
        take_over(router, new, told, out)
        if asked is not None:
            figures = {"name": manifest.name, "version": manifest.version, "undone": undone}
            new.rolling.answer = (*asked[:2], {**figures, "url": event.url})
        return new._flush(out)

    def servers(self) -> list[tuple[int, c.ServerHello]]:
        """Return the servers of the new run (peer, hello) in the order of their numbers: who came
        in the place of a lost one has its number."""
        spare = list(self._spare.items())
        found = []
        for index, server in sorted(self._router.members.servers.items()):
            if index not in self.lost:
                found.append((server.peer, server.hello))
            elif spare:
                found.append(spare.pop(0))
        return found + spare

    # --- the new run -----------------------------------------------------------------------------

    def is_of_old(self, peer: int, message: c.Message) -> bool:
        """Return whether a member speaks of the run before; it says when it does not any more."""
        if isinstance(message, c.WentBack):
            if message.term == self.term:
                self.unmarked.discard(peer)
            return True
        return peer in self.unmarked and not isinstance(message, c.Beat)

    def done(self) -> None:
        """All servers hold the snapshot."""
        if self.answer is not None:
            peer, token, figures = self.answer
            self._router.hub.send(peer, c.Reply(token, figures))
            self.answer = None

    def unusable(self, server: Server, why: str) -> bool:
        """A server cannot use the snapshot: return whether the run goes back to an older one."""
        router, text = self._router, f"{server} cannot restore its part: {why}"
        kept = router.snapshots.kept
        if self.answer is not None:
            peer, token, _ = self.answer
            router.hub.send(peer, c.Refusal(token, "BadSnapshot", text[:4000]))
            self.answer = None
        self.problems.append(text)
        if not self.times or len(kept) < 2:
            return False
        router.hub.note("error", f"{text}; trying the one before")
        del kept[0]
        self._asked = 0, 0, kept[0].name
        return True

    def plain(self) -> dict[str, Any]:
        """Return the status's figures."""
        kept = [one.name for one in self._router.snapshots.kept]
        return {
            "times": self.times,
            "waiting": self.why_waiting(),
            "last": self.last,
            "can_go_back_to": kept,
        }
