"""A router takes the place of another one, as the run goes back to a snapshot.

Who is a member, whose keys are whose, and all numbers that must rise are handed over, and nothing
else. Pure. Part of the router.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from zkv import control as c
from zkv.reasons import Reason
from zkv_brokers.decisions import Decisions
from zkv_brokers.hub import Hub
from zkv_brokers.members import Members, Worker

if TYPE_CHECKING:
    from zkv_brokers.router import Router


def handed_over(old: Router, term: int) -> tuple[Members, Hub, bool]:
    """Return what the router that takes this one's place begins with: members, of which nobody is
    there yet, the links, and whether the start line is passed."""
    before = old.members
    servers, workers = len(old.rolling.servers()), old.config.workers
    members = Members(term, servers, workers, workers_min=before.workers_min, left=before.left)
    members.passed = old.line_passed
    return members, old.hub, old.line_passed


def take_over(old: Router, router: Router, told: c.RollBack, out: Decisions) -> None:
    """Have a router begin as that of the run that goes on in the place of another one."""
    rolling, before = router.rolling, old.rolling
    router.hub.note(
        "warning",
        f"going back to version {told.version} of snapshot {told.name}, {told.undone} updates: "
        f"{told.why}",
    )
    rolling.term, rolling.problems = told.term, before.problems
    rolling.times = before.times + 1
    rolling.last = {"name": told.name, "version": told.version, "why": told.why}
    rolling.last["undone"] = told.undone
    for one in before.lost.values():
        router.hub.send(one.server.peer, c.Fatal("ServerLost", told.why))
        router.hub.close(one.server.peer)
    if before.answer is not None:
        peer, token, _ = before.answer
        router.hub.send(peer, c.Refusal(token, "Refused", f"it has gone back again: {told.why}"))
    router.gatekeeper.take_over(old.gatekeeper)
    router.snapshots.take_over(old.snapshots, told.name)
    router.moves.placement = old.moves.placement
    for peer, hello in before.servers():
        if peer in old.members.by_peer:
            _tell(router, peer, told)
        router.fleet.hello(peer, structs.replace(hello, started=False, joins=False), out)
    _take_workers(old, router, told, out)
    router.fleet.changed()
    router.restoring.look(out)
    router.door.take_over(old.door, out)


def _take_workers(old: Router, router: Router, told: c.RollBack, out: Decisions) -> None:
    """Members stay members, under their numbers, and those who trained begin together."""
    model = old.groups.model
    trained = set(old.groups.begun) | old.groups.cohort
    trained |= set(model.incarnations.values()) if model is not None else set()
    trained |= set(old.groups.draws.idle.values())
    for worker in sorted(old.members.workers.values(), key=lambda one: one.number):
        _tell(router, worker.peer, told)
        number = worker.hello.rank if worker.hello.observer else worker.number
        hello = structs.replace(worker.hello, rank=number)
        admitted = router.door.admit(worker.peer, hello, out)
        if worker.incarnation in trained and not worker.leaving:
            router.groups.cohort.add(admitted.incarnation)


def _tell(router: Router, peer: int, told: c.RollBack) -> None:
    router.rolling.unmarked.add(peer)
    router.hub.send(peer, told)


def cohort_reason(router: Router, worker: Worker) -> Reason | None:
    """Return whom a worker waits for where all begin together; None if that is not so."""
    groups, members = router.groups, router.members
    missing = groups.cohort & members.workers.keys() - groups.begun
    if not missing or worker.incarnation not in groups.begun or router.catalog.pending:
        return None
    names = ", ".join(str(members.workers[one]) for one in sorted(missing)[:4])
    return Reason(
        "all begin together",
        need=len(groups.cohort),
        have=len(groups.cohort) - len(missing),
        words=f"all begin together, and {names} has not asked for a batch yet",
    )
