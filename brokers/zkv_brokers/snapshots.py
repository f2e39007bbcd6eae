"""Snapshots while training goes on: when one is cut, who writes its files, and when it exists.

1. `Snapshot` in the log, between two updates: each server takes what it holds there, and writes it
   beside its loop.
2. Workers are asked what they began their first batch of that version with (`SaveState`): they
   remember it for some batches, as they may be further by then.
3. `Saved` from every server that holds something, and from workers as far as they come: the
   manifest is written; the snapshot exists.

Nobody waits for any of it. What fails leaves the older ones as they are, is said, and is tried
again the next time. Pure: what is decided is collected in `Decisions`, and files are written by
whoever carries out the actions. Part of the router.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import structs

from zkv import control as c
from zkv import snapshot as sn
from zkv.errors import Refused
from zkv_brokers.decisions import Decisions
from zkv_brokers.manifests import manifest_of, owners_of
from zkv_brokers.members import Server, Worker
from zkv_brokers.signals import Ask, Complete, GiveUp, Written

if TYPE_CHECKING:
    from zkv_brokers.router import Router

SILENT_S = 600.0
"""So long a server may take to write its part."""
STATES_S = 10.0
"""So long workers may take to begin a batch and to write what they began it with."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A snapshot that this run can go back to: where it is, and of which version."""

    url: str
    name: str
    version: int


@dataclass(slots=True)
class _Taking:
    """A snapshot that is cut and does not exist yet."""

    manifest: sn.Manifest
    began: float
    missing: set[int]
    """Servers that have not written their part."""
    parts: dict[int, sn.Part] = field(default_factory=dict)
    states: dict[int, int] = field(default_factory=dict)
    """Numbers of workers that have not written their own state, by incarnation."""
    own: dict[int, sn.WorkerState] = field(default_factory=dict)
    """Of those that have, or cannot, by number."""
    asked: list[tuple[int, int]] = field(default_factory=list)
    """(peer, token) of those who wait for it."""
    completing: bool = False
    """Whether its manifest is being written."""


class Snapshots:
    """All snapshots of one broker."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._url, every = router.config.snapshot_dir, router.config.snapshot_every
        self._every = sn.every(every if self._url else "")
        self._number = 0
        self._taking: _Taking | None = None
        self._asked: list[tuple[int, int]] = []
        self._wanted = False
        self._why_not = ""
        """Why one that is wanted is not cut."""
        self._since: tuple[float, int] | None = None
        """When the last one was begun, and the version then."""
        self._last: dict[str, Any] | None = None
        self._failed = ""
        self._given_up = ""
        """The last one that failed: its files are to go."""
        self._counts = {"taken": 0, "failed": 0}
        self._actions: list[Complete | GiveUp] = []
        self.kept: list[Kept] = []
        """The newest ones of this run, the last one first, and what it began from."""
        if (begun := router.restoring.manifest) is not None:
            self.kept.append(Kept(router.config.restored_from, begun.name, begun.version))

    def take_over(self, old: Snapshots, name: str) -> None:
        """The run has gone back to this snapshot. Numbers go on, so that no file that was on its
        way is taken for one of this run."""
        self._number, self._last, self._counts = old._number, old._last, old._counts
        self.kept += [one for one in old.kept if one.name < name][: sn.KEPT - 1]
        why = f"the run goes back to snapshot {name}"
        waiting = list(old._asked)
        if old._taking is not None:
            waiting += old._taking.asked
        if old._taking is not None and old._taking.manifest.name != name:
            # Else its manifest was there before the word of it.
            self._given_up = old._taking.manifest.name
            self._actions.append(GiveUp(self._url, self._given_up))
        for peer, token in waiting:
            self._router.hub.send(peer, c.Refusal(token, "Refused", why))

    @property
    def may(self) -> bool:
        """Whether there is a folder for snapshots, and something to write down."""
        router = self._router
        if router.rolling.waiting:
            return False
        there = router.members.complete and router.failed is None and router.layout.blocks
        return bool(self._url and there)

    @property
    def busy(self) -> bool:
        """Whether a snapshot is wanted, or on its way."""
        return self._wanted or self._taking is not None

    def ask(self, peer: int, token: int) -> None:
        """Somebody wants one; the peer is told when it exists, or why it does not.

        Raises:
            Refused: there is no folder for it.
        """
        if not self._url:
            raise Refused(
                "this broker was not told where snapshots go: start it with --snapshot-dir FOLDER"
            )
        self._wanted = True
        self._asked.append((peer, token))

    def hear(self, event: Ask | Written) -> None:
        """Whoever runs this broker wants a snapshot, or has written the manifest of one."""
        if isinstance(event, Written):
            self._written(event)
        elif self._router.rolling.waiting:
            self._router.rolling.give_up("the broker was told to end")
        elif self._url:
            self._wanted = True

    # --- when ------------------------------------------------------------------------------------

    def look(self, out: Decisions) -> None:
        """Cut a snapshot if one is wanted, or it is time for one, and it may be."""
        taking = self._taking
        if taking is not None:
            waited = self._router.hub.now - taking.began
            self._miss_states(taking, waited > STATES_S)
            if waited > SILENT_S and not taking.completing:
                names = ", ".join(f"server {index}" for index in sorted(taking.missing))
                self._give_up(f"nothing was heard of the parts of {names} for {waited:.0f} s")
            return
        if not self._wanted and not self._is_time():
            return
        self._why_not = self._hindrance()
        if self._router.failed is not None:
            self._refuse(self._router.failed.reason)
        elif not self._why_not:
            self._cut_between_updates(out)

    def _is_time(self) -> bool:
        now, version = self._router.hub.now, self._router.groups.version
        if self._since is None:
            self._since = now, version
        began, then = self._since
        every = self._every
        due = every.seconds and now - began >= every.seconds
        return bool(due or (every.updates and version - then >= every.updates))

    def _hindrance(self) -> str:
        """Return what has to happen first; "" if nothing has."""
        router = self._router
        if not router.members.complete:
            return "not all servers are here"
        if router.rolling.waiting:
            return router.rolling.why_waiting()
        if any(not one.plain for one in router.catalog.pending.values()):
            return "the first values of the model are on their way"
        if not router.layout.blocks:
            return "there is nothing to write down: no worker has called init"
        model = router.groups.model
        return "an update is being summed" if model is not None and model.is_summing else ""

    def _cut_between_updates(self, out: Decisions) -> None:
        model = self._router.groups.model
        # What is made, granted and finished ahead of the log is none of a snapshot's; but settings
        # that hold from behind the next update on are in force here already, and not in the log.
        if model is None or not model.ahead.later:
            self._cut(out)
        elif self._cut_then not in model.ahead.then:
            model.ahead.then.append(self._cut_then)

    def _cut_then(self, out: Decisions) -> None:
        if self._taking is None and not self._hindrance():
            self._cut(out)

    def _cut(self, out: Decisions) -> None:
        router = self._router
        self._number += 1
        name = sn.name_of(router.members.term, self._number)
        out.log(c.Snapshot(self._number, self._url, name))
        manifest = manifest_of(router, name, out.index)
        taking = _Taking(manifest, router.hub.now, owners_of(manifest), asked=self._asked)
        for worker in router.members.training():
            taking.states[worker.incarnation] = worker.number
            ask = c.SaveState(self._number, self._url, name, manifest.version)
            out.tell(worker.incarnation, ask)
        self._taking = taking
        self._since = router.hub.now, manifest.version
        self._asked, self._wanted = [], False

    def lost(self, server: Server) -> None:
        """A server is gone: what it has not written of a snapshot will not come."""
        taking = self._taking
        if taking is not None and server.index in taking.missing and not taking.completing:
            self._give_up(f"{server} was lost before it had written its part")

    # --- what comes of it ------------------------------------------------------------------------

    def saved(self, who: Server | Worker, message: c.Saved) -> None:
        """A server has written its part, or a worker its own state; or it could not."""
        taking = self._taking
        if taking is None or message.number != self._number or taking.completing:
            return
        if isinstance(who, Worker):
            self._saved_own(taking, who.incarnation, message)
        elif who.index in taking.missing and message.why:
            self._give_up(f"{who} could not write its part: {message.why}")
        elif who.index in taking.missing:
            taking.missing.discard(who.index)
            file = sn.server_file(who.index)
            taking.parts[who.index] = sn.Part(file, message.nbytes, message.sha256)
            self._complete(taking)

    def _saved_own(self, taking: _Taking, incarnation: int, message: c.Saved) -> None:
        """A worker's state is written; without it the snapshot is one all the same."""
        number = taking.states.pop(incarnation, None)
        before = next((one for one in taking.manifest.workers if one.number == number), None)
        if number is None or before is None:
            return
        if message.why:
            taking.own[number] = structs.replace(before, lost=message.why)
            why = f"worker {number}: its own state is not in {taking.manifest.name}: {message.why}"
            self._router.hub.note("warning", why)
        else:
            part = sn.Part(sn.worker_file(number), message.nbytes, message.sha256)
            taking.own[number] = structs.replace(before, part=part)
        self._complete(taking)

    def _miss_states(self, taking: _Taking, late: bool) -> None:
        """Go on without the states of workers that are gone, or (`late`) that have not come."""
        here = self._router.members.workers
        for incarnation in list(taking.states):
            gone = incarnation not in here
            if gone or (late and not taking.completing):
                why = "it was gone" if gone else f"it has not come within {STATES_S:g} s"
                self._saved_own(taking, incarnation, c.Saved(self._number, why=why))

    def _complete(self, taking: _Taking) -> None:
        """Have the manifest written, if all is here that it names."""
        if taking.missing or taking.states or taking.completing:
            return
        taking.completing = True
        parts = [part for _, part in sorted(taking.parts.items())]
        own = [taking.own.get(one.number, one) for one in taking.manifest.workers]
        taking.manifest = structs.replace(taking.manifest, servers=parts, workers=own)
        self._actions.append(Complete(self._number, self._url, taking.manifest))

    def _written(self, event: Written) -> None:
        """The manifest is written, or could not be."""
        taking = self._taking
        if taking is None or event.number != self._number:
            return
        if event.why:
            self._give_up(event.why)
            return
        manifest, now = taking.manifest, self._router.hub.now
        self.kept = [Kept(self._url, manifest.name, manifest.version), *self.kept][: sn.KEPT]
        self._last = {
            "name": manifest.name,
            "version": manifest.version,
            "bytes": manifest.nbytes,
            "took_s": round(now - taking.began, 3),
            "at": now,
        }
        self._failed = ""
        self._counts["taken"] += 1
        text = f"snapshot {manifest.name} of version {manifest.version} is in {self._url}"
        self._router.hub.note("info", text)
        told = {name: value for name, value in self._last.items() if name != "at"}
        for peer, token in taking.asked:
            self._router.hub.send(peer, c.Reply(token, {**told, "url": self._url}))
        self._taking = None

    def _give_up(self, why: str) -> None:
        taking = self._taking
        assert taking is not None
        self._given_up = taking.manifest.name
        self._actions.append(GiveUp(self._url, self._given_up))
        self._taking = None
        self._asked = [*taking.asked, *self._asked]
        self._refuse(why)

    def again(self) -> None:
        """The broker goes on in another process: what the one before was to do with files it may
        not have done. All parts that are on their way come all the same."""
        taking = self._taking
        if self._given_up:
            self._actions.append(GiveUp(self._url, self._given_up))
        if taking is not None and taking.completing:
            self._actions.append(Complete(self._number, self._url, taking.manifest))

    def _refuse(self, why: str) -> None:
        """One that was wanted will not be; the older ones are as they were."""
        self._wanted, self._failed = False, why
        self._counts["failed"] += 1
        self._since = self._router.hub.now, self._router.groups.version
        self._router.hub.note("error", f"no snapshot was taken, and training goes on: {why}")
        for peer, token in self._asked:
            self._router.hub.send(peer, c.Refusal(token, "Refused", why[:4000]))
        self._asked = []

    def actions(self) -> list[Complete | GiveUp]:
        """Return what is to be done with files now."""
        actions, self._actions = self._actions, []
        return actions

    def plain(self) -> dict[str, Any]:
        """Return the status's figures."""
        last, now = self._last, self._router.hub.now
        if last is not None:
            last = {**last, "ago_s": round(now - last["at"], 3)}
            del last["at"]
        taking = self._taking
        return {
            "dir": self._url,
            "every": str(self._every),
            "taken": self._counts["taken"],
            "failed_tries": self._counts["failed"],
            "last": last,
            "taking": None if taking is None else taking.manifest.name,
            "missing": [] if taking is None else sorted(taking.missing),
            "waits_for": self._why_not if self._wanted else "",
            "failed": self._failed,
        }
