"""How workers come to know of each other, where they add gradients up among themselves.

Part of the router; `zkv_brokers.together` decides for an update whether they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from zkv import control as c
from zkv.dtypes import DTYPES
from zkv.wire import MODEL, KeySpec
from zkv_brokers.decisions import Decisions
from zkv_brokers.group import Group
from zkv_brokers.members import Server, Worker
from zkv_brokers.moves import IDLE

if TYPE_CHECKING:
    from zkv_brokers.router import Router

LEAVING_S = 2.0
"""Who leaves waits so long for the others' part of an update; then everybody sends its own."""


def prepare(router: Router, model: Group) -> None:
    """Set what the model's group has to know of its members and keys."""
    layout = router.layout
    # Keys that come later on are none of the model's.
    odd = [
        entry.spec
        for kid in layout.kids_in(MODEL)
        if not DTYPES[(entry := layout.entries[kid]).spec.dtype].floating
    ]
    together = model.together
    together.topology, together.find = router.topology, router.members.member
    together.forbids = partial(forbids, router, odd[0] if odd else None)


def forbids(router: Router, odd: KeySpec | None) -> str:
    """Return why the model's keys or codecs do not allow sums among workers; "" if they do.

    `odd`: a key of the model that is not of floating point.
    """
    layout, moves = router.layout, router.moves
    if odd is not None:
        return f"key {odd.key!r} is of {odd.dtype}: such keys come one by one"
    if moves.stage != IDLE or moves.waits_for():
        # A sum goes where its sender's contribution goes, and that is not yet the same for all.
        return "blocks are moving between servers"
    if layout.tables:
        return f"table {next(iter(layout.tables.names()))!r} is pushed by rows"
    codec = router.coding.up.text
    return "" if codec == "none" else f"gradients are encoded ({codec})"


def hear(router: Router, worker: Worker, message: c.Listens | c.CutOff, out: Decisions) -> None:
    """A worker says where others reach it, or that it cannot go on with sums."""
    if isinstance(message, c.Listens):
        worker.address, worker.machine = message.address, message.machine
        router.gatekeeper.listens(worker)
        return
    why = f"{worker}: {message.reason}"
    router.hub.note("warning", f"what workers have added up comes apart: {why}")
    if (model := router.groups.model) is not None:
        model.together.cut_off(worker.number, message.grant, why, model, out)


def unsound(router: Router, server: Server, message: c.Unsound, out: Decisions) -> None:
    """A server cannot use what workers have added up."""
    worker = router.members.workers.get(message.contribution.incarnation)
    why = f"{server}: {message.reason}"
    router.hub.note("warning", f"what workers have added up comes apart: {why}")
    if worker is not None and (model := router.groups.model) is not None:
        model.together.cut_off(worker.number, message.grant, why, model, out)


def leaves(router: Router, worker: Worker, out: Decisions) -> None:
    """A worker wants to leave, and waits for sums that it has part in: not for ever, as others may
    still compute."""
    model = router.groups.model
    if model is not None and router.hub.now - worker.leaving_at > LEAVING_S:
        model.together.stops(worker.number, "leaves", model, out)


def look(router: Router, out: Decisions) -> None:
    """What is moving has to come one by one, so that each goes where its contribution goes."""
    model = router.groups.model
    if model is not None and model.together.version and router.moves.stage != IDLE:
        model.together.stops(-1, "blocks are moving between servers", model, out)


def at_barrier(router: Router, worker: Worker, out: Decisions) -> None:
    """A worker waits in a barrier: who has finished what it was granted there, waits for it."""
    model = router.groups.model
    if model is None:
        return
    expected = model.together.members.get(worker.number)
    if expected is not None and not model.has_finished(worker.number, expected.grant):
        model.together.stops(worker.number, "is at a barrier", model, out)


def open_barriers(router: Router, training: Sequence[Worker], out: Decisions) -> None:
    """Let out who is at a barrier that all have come to, if nothing that was finished is on its
    way."""
    if not any(worker.barrier_token for worker in training):
        return
    lowest = min(worker.barrier for worker in training)
    if any(map(router.groups.unfinished, training)):
        return
    through = [w for w in training if w.barrier_token and w.barrier <= lowest]
    for worker in through:
        router.hub.send(worker.peer, c.Reply(worker.barrier_token, worker.barrier))
        worker.barrier_token = 0
    if through:
        router.groups.barrier_opened(out)


def plain(router: Router) -> dict[str, Any]:
    """Return the status's figures."""
    model = router.groups.model
    if model is not None:
        why = model.together.never(model) if router.topology.joint else ""
        figures = model.together.plain()
        return figures | {"why": why or figures["why"]}
    return {"name": str(router.topology), "updates": 0, "came_apart": 0, "why": ""}
