"""The simulated cluster's broker as a process: it has a journal, dies, and is started again.

The journal is the real one, in memory: what a record holds is on the disk when the router's words
leave, and a crash may tear the one that is being written. A broker may also be stopped rather than
killed, and go on when another one has taken its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zkv_brokers import recovery
from zkv_brokers import router as r
from zkv_brokers.journal import MAGIC, contents, written
from zkv_brokers.state import packed

if TYPE_CHECKING:
    from simcluster import Sim

GHOST_TURNS = 12


class SimBroker:
    """One broker in all its lives. `router` is there while it runs."""

    def __init__(self, sim: Sim, router: r.Router) -> None:
        self.sim, self.router = sim, router
        self.up = True
        self.lives = 1
        self.crashes = 0
        self.file = bytearray()
        self.ahead_s = 0.0
        self._number = 0
        self._turns = recovery.Turns()
        self._dying = ""
        self._ghosts: list[r.Router] = []
        self.begin()

    def begin(self) -> None:
        """Write the journal anew, as one state."""
        if self.sim.options.broker_crashes:
            record = recovery.state_record(self.router, self.sim.now + self.ahead_s)
            self.file = bytearray(MAGIC + written(0, record))
            self._number = 1
            self._turns.begun(0.0)

    def take(self, events: Sequence[r.Event]) -> list[r.Action]:
        """Have the router take a turn, and return what leaves."""
        if not self.up:
            return []
        now = self.sim.now + self.ahead_s
        actions = self.router.turn(events, now)
        if self.router.successor is not None:
            return self._go_back(self.router.successor, actions)
        if not self.sim.options.broker_crashes:
            return actions
        self._turns.add(events, now, 0.0)
        if self.router.returning.abandoned:
            # None of its members was there any more, so nothing is lost with them.
            assert not self.router.groups.by_number, self.sim.story()
            self.sim.router = self.router = self.sim._new_router()
            self._turns = recovery.Turns()
            self.begin()
            return []
        actions = self._turns.leaving(events, actions)
        if not self._turns.must_be_kept(actions):
            return actions
        return self._keep(actions)

    def _go_back(self, successor: r.Router, actions: list[r.Action]) -> list[r.Action]:
        """Another router takes this one's place; the journal is written anew, in one go."""
        dying, self._dying = self._dying, ""
        if dying == "torn":
            # It dies before the new journal has its name: then nothing of it was said.
            self.router.successor = None
            self._die(exact=False)
            return []
        self.sim.went_back(successor)
        self.router = self.sim.router = successor
        self.begin()
        if dying:
            self._die(exact=True)
        if dying == "unsent":
            return []
        return actions[: self.sim.rng.randrange(len(actions))] if dying == "half" else actions

    def _keep(self, actions: list[r.Action]) -> list[r.Action]:
        rng, dying = self.sim.rng, self._dying
        self.save()
        if dying == "torn":
            # The last record, which nothing of this turn has left for.
            del self.file[-rng.randint(1, 40) :]
        if dying:
            self._dying = ""
            self._die(exact=dying != "torn")
        if dying in ("torn", "unsent"):
            return []
        return actions[: rng.randrange(len(actions))] if dying == "half" else actions

    def save(self) -> None:
        """Write what waits; it is on the disk afterwards."""
        self.file += written(self._number, self._turns.record())
        self._number += 1

    def crash(self) -> None:
        """Die now, or in the middle of the next turn that says something."""
        rng = self.sim.rng
        if not self.up or self._dying:
            return
        self._dying = rng.choice(("", "torn", "unsent", "half"))
        if not self._dying:
            self._die(exact=True)

    def _die(self, *, exact: bool) -> None:
        sim = self.sim
        self.up = False
        self.crashes += 1
        sim.notes.append(f"{sim.now:.2f} the broker died")
        if exact:
            self._check()
        if sim.rng.random() < 0.3:
            self._ghosts.append(self.router)
        # What had not to be kept is gone.
        self._turns = recovery.Turns()
        sim.later(sim.rng.random() * sim.options.broker_down_s, self._start)

    def _check(self) -> None:
        """The journal, and what was not written yet, make the same router again."""
        records = contents(bytes(self.file)).records
        again, _ = recovery.recovered([*records, self._turns.record()], self.router.config)
        assert packed(again) == packed(self.router), f"another router; {self.sim.story()}"

    def _start(self) -> None:
        sim = self.sim
        old = self.router
        found = contents(bytes(self.file))
        self.router, last = recovery.recovered(found.records, old.config)
        sim.router = self.router
        self.ahead_s = last - sim.now
        self.lives += 1
        self.up = True
        sim.term += 1
        instance = (sim.term << 50) + sim.rng.getrandbits(40)
        actions = recovery.goes_on(self.router, sim.term, instance, last)
        sim.notes.append(f"{sim.now:.2f} the broker was started again")
        self.begin()
        sim._do_router(actions)
        for ghost in self._ghosts:
            sim.later(sim.rng.random(), lambda one=ghost: self._haunt(one, GHOST_TURNS))
        self._ghosts.clear()

    def _haunt(self, ghost: r.Router, turns: int) -> None:
        """A broker that was stopped goes on; it does not know that it is of the past."""
        sim = self.sim
        if turns and not ghost.hub.superseded:
            actions = ghost.turn([r.Tick()], sim.now + self.ahead_s)
            if recovery.Turns.must_be_kept(actions) and not self.keeps(ghost):
                return
            sim.deliver(actions)
            sim.later(0.05, lambda: self._haunt(ghost, turns - 1))

    def keeps(self, router: r.Router) -> bool:
        """Return whether the journal is this router's: who does not have it may say nothing."""
        return router is self.router


def after(broker: SimBroker, life: int, action: Callable[[], None]) -> None:
    """Deliver what was sent to one life of the broker: to a later one it may come, or be lost."""
    if broker.up and (broker.lives == life or broker.sim.rng.random() < 0.5):
        action()
