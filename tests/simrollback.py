"""The simulated cluster whose servers are lost, and which goes back to its snapshots.

Each roll-back ends one run and begins another: what is left of the first is kept (`pasts`), and the
second is checked as any run that begins from a snapshot of another one.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from simcluster import Options, Program, Sim, SimWorker

from zkv import control as c
from zkv import snapshot as sn
from zkv.errors import RolledBack, ZkvError
from zkv.link import Link
from zkv.wire import INCARNATIONS_PER_TERM
from zkv_brokers import node as n
from zkv_brokers import router as r
from zkv_brokers.shard_events import Load
from zkv_brokers.signals import Find
from zkv_workers import signals as s
from zkv_workers.encoding import Encoder
from zkv_workers.running import Running


@dataclass(frozen=True)
class Lives(Options):
    """A run in which servers are lost for good."""

    kills: int = 1
    """How often a server dies that owns keys."""
    replaced: float = 0.5
    """How often another one comes in time."""
    asks: int = 0
    """How often somebody asks that the run goes back."""
    rots: int = 0
    """How often a file of the newest snapshot is damaged."""
    shocks: float = 0.0
    """How often something else dies while all go back: the broker (if it may die at all), another
    server, or a worker."""


class RollSim(Sim):
    """One cluster in all its runs."""

    options: Lives

    def __init__(self, seed: int, options: Lives) -> None:
        self.pasts: list[RollSim] = []
        """The runs before the present one."""
        self.until_term = 0
        """Of a past run: incarnations and snapshots of this term are of a later one."""
        self.spares: set[int] = set()
        self.damaged: set[str] = set()
        super().__init__(seed, options)
        for _ in range(options.kills):
            self.later(0.2 + self.rng.random() * 0.8, self._kill)
        for _ in range(options.asks):
            self.later(0.3 + self.rng.random() * 1.5, self._ask_back)
        for _ in range(options.rots):
            self.later(0.3 + self.rng.random() * 1.5, self._rot)

    # --- what happens ----------------------------------------------------------------------------

    def _kill(self) -> None:
        """Kill a server, once there is a way back."""
        members = self.router.members.servers
        if not self.broker.up or not self.router.snapshots.kept or self.ended:
            if not self.ended:
                self.later(0.1, self._kill)
            return
        alive = [number for number in sorted(members) if self.place(number) not in self.dead]
        if not alive:
            return
        number = self.rng.choice(alive)
        at = self.place(number)
        self.dead.add(at)
        self.notes.append(f"{self.now:.2f} server-{at} was killed")
        self.later(0.01, lambda: self._broken(at))
        last = len(alive) <= 2
        if last or self.rng.random() < self.options.replaced:
            self.later(self.rng.random() * (1.8 if not last else 1.0), self._replace)

    def _broken(self, at: int) -> None:
        """The broker's connection to a server breaks."""
        here = [one for one in self.router.members.servers if self.place(one) == at]
        if here:
            self._link_broke(here[0])

    def _replace(self) -> None:
        """Start a server in the place of one that is waited for."""
        if not self.router.rolling.waiting or not self.broker.up:
            self.later(0.1, self._replace)
            return
        index = len(self.nodes)
        self.nodes.append(self._node(index))
        self.spares.add(index)
        self.notes.append(f"{self.now:.2f} server-{index} is started in its place")
        self._tick_node(index)

    def _do_node(self, index: int, actions: list[n.Action]) -> None:
        for action in actions:
            if isinstance(action, n.Failed) and index in self.spares:
                # It came too late: the others had gone on without it.
                assert "all" in str(action.error), self.story()
                self.dead.add(index)
                return
        super()._do_node(index, actions)

    def _ask_back(self) -> None:
        """Ask that the run goes back, once there is something to go back to."""
        if not self.router.snapshots.kept:
            if not self.ended:
                self.later(0.1 + self.rng.random() * 0.2, self._ask_back)
            return
        link = Link(self.number())
        names = [one.name for one in self.manifests()]
        name = self.rng.choice(["", *names[-2:]])
        self.notes.append(f"{self.now:.2f} zkv restore {name}")
        link.send(c.GoBack(1, name))
        for packet in link.outgoing(self.now):
            self.to_router(b"o%d" % link.instance, c.encode_packet(packet))

    def _rot(self) -> None:
        """Damage a file of the newest snapshot, if there is an older one."""
        there = self.manifests()
        if len(there) < 2 or len(self.router.snapshots.kept) < 2:
            return
        part = self.rng.choice(there[-1].servers)
        data = bytearray(self.disk[there[-1].name][part.file])
        data[self.rng.randrange(len(data))] ^= 1
        self.disk[there[-1].name][part.file] = bytes(data)
        self.damaged.add(there[-1].name)
        self.notes.append(f"{self.now:.2f} {part.file} of {there[-1].name} is damaged")

    def restored(self, action: Load) -> tuple[Sim, sn.Manifest]:
        assert action.name not in self.damaged, self.story()
        there = {one.name: one for one in self.manifests()}
        return self, there[action.name]

    # --- from run to run -------------------------------------------------------------------------

    def went_back(self, successor: r.Router) -> None:
        manifest = successor.restoring.manifest
        assert manifest is not None
        old = self.router
        past = copy.copy(self)
        past.pasts, past.until_term, past.router = list(self.pasts), successor.members.term, old
        self.pasts.append(past)
        origin = self.run_of(term_of(manifest.name))
        back = [self.before[1].version for _ in "1" if self.before is not None]
        asked = (
            successor.rolling.last is not None and "zkv restore" in successor.rolling.last["why"]
        )
        if not asked:
            here = origin is past or manifest.version <= back[0]
            assert here, f"undone and back; {self.story()}"
        self.before, self.first = (origin, manifest), manifest.version
        self.contributions, self.plain, self.seen, self.joint = {}, {}, {}, {}
        self.history = {}
        if self.rng.random() < self.options.shocks:
            self._shock()
        self.notes.append(f"{self.now:.2f} back at {manifest.version} of {old.groups.version}")

    def _shock(self) -> None:
        """Have something die soon."""
        dies = [self._kill] if len(self.pasts) < 4 else []
        dies += [self.broker.crash] if self.options.broker_crashes else []
        dies += [self._crash] if self.options.crashes else []
        if dies:
            self.later(self.rng.random() * 0.3, self.rng.choice(dies))

    def _find(self, action: Find, life: int) -> None:
        if self.options.broker_crashes and self.rng.random() < self.options.shocks:
            # In the turn in which it hears of the snapshot, mostly.
            self.broker.crash()
        super()._find(action, life)

    def run_of(self, term: int) -> RollSim:
        """Return the run that something of this term is of."""
        return next((one for one in self.pasts if term < one.until_term), self)

    def of(self, worker: SimWorker) -> RollSim:
        """Return the run that a worker is in, as far as it knows."""
        assert worker.session.member is not None
        return self.run_of(worker.session.member.incarnation // INCARNATIONS_PER_TERM)

    def _check_grant(self, grant: Any, state: Any, worker: SimWorker) -> None:
        Sim._check_grant(self.of(worker), grant, state, worker)

    def _program(self, rank: int, worker: SimWorker) -> Program:
        yield s.Join
        while True:
            try:
                yield from self._initialise()
                yield from self._train(rank, worker)
                return
            except RolledBack as told:
                route = next(where for where, one in self.workers.items() if one is worker)
                worker.running, worker.encoder = Running(), Encoder()
                self.feed(route, worker, s.GoOn(told))
                later = worker.session.back.told
                assert later is not None or worker.session.layout.has_model, self.story()

    # --- laws ------------------------------------------------------------------------------------

    def check(self) -> None:
        exact = "clip" not in self.options.optimizer
        for past in self.pasts:
            if exact:
                past.replay()
            past.check_past()
        super().check()
        counts = self.final("a")
        seen = set(np.flatnonzero(counts).tolist())
        assert seen == self.counted(self.router.groups.version), self.story()

    def check_past(self) -> None:
        """What was told of a run that was given up was true then."""
        counted = self.counted(self.router.groups.version)
        for pushed in self.contributions.values():
            if pushed.fate is not None and pushed.fate.outcome != "undone":
                committed = pushed.fate.outcome == "committed"
                assert committed == (pushed.token in counted), f"{pushed.fate}; {self.story()}"

    def _check_snapshot(self, manifest: sn.Manifest) -> None:
        run = self.run_of(term_of(manifest.name))
        if manifest.name in self.damaged:
            return
        if run is self:
            super()._check_snapshot(manifest)
            return
        values = self.values_in(manifest)
        assert set(np.flatnonzero(values["a"])) == run.counted(manifest.version), self.story()
        replayed = run.history.get(manifest.version)
        for key, value in (replayed.values if replayed is not None else {}).items():
            assert np.array_equal(values[key], value), f"{key}; {self.story()}"


def term_of(name: str) -> int:
    """Return the term in a snapshot's name."""
    found = sn.NAME.fullmatch(name)
    assert found is not None
    return int(found["term"], 16)


def simulate(seed: int, options: Lives) -> RollSim:
    """Run one cluster to its end and check all laws of all its runs."""
    sim = RollSim(seed, options)
    try:
        sim.run()
    except ZkvError as error:
        raise AssertionError(f"{error}; {sim.story()}") from error
    sim.check()
    return sim
