"""Keys that workers offer to initialise. Part of the router."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zkv import control as c
from zkv.errors import ZkvError
from zkv_brokers.decisions import Decisions
from zkv_brokers.members import Worker

if TYPE_CHECKING:
    from zkv_brokers.router import Router


def offer(router: Router, worker: Worker, message: c.Offer, out: Decisions) -> None:
    """Take an offer of keys: the first one's values count, the others are told when these are here.

    Raises:
        ZkvError: the keys contradict those that there are, or cannot be placed.
    """
    plain = message.plain or router.groups.model is not None
    worker.link_rate = message.link_rate or worker.link_rate
    who, places = worker.incarnation, router.members.places
    spec = router.plain_spec if plain else router.model_spec
    taken = router.catalog.offer(who, message, plain, places, spec, out)
    if isinstance(taken, ZkvError):
        raise taken
    if taken is None:
        router.hub.send(worker.peer, c.Reply(message.token, "known"))


def held(router: Router, init: int, server: int, out: Decisions) -> None:
    """A server holds all first values of an initialisation: with the last one the keys exist."""
    done = router.catalog.held(init, server)
    if done is None:
        return
    told = router.catalog.complete(done, out.index)
    for incarnation in router.members.incarnations():
        out.tell(incarnation, told)
        out.tell(incarnation, c.Ready(done.init))
    if done.plain:
        for entry in done.entries:
            if entry.spec.same_as is None:
                router.groups.make_plain(entry.kid, out, at_birth=True)
    for incarnation, token in done.waiting:
        mine = incarnation == done.incarnation
        out.tell(incarnation, c.Reply(token, "seeded" if mine else "known"))
    router.begin(out)
