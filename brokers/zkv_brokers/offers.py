"""Keys that workers offer to initialise. Part of the router."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zkv import control as c
from zkv.errors import Refused, ZkvError
from zkv.wire import KeySpec, TableSpec
from zkv_brokers.catalog import Pending
from zkv_brokers.decisions import Decisions
from zkv_brokers.members import Worker

if TYPE_CHECKING:
    from zkv_brokers.router import Router


def offer(router: Router, worker: Worker, message: c.Offer, out: Decisions) -> None:
    """Take an offer of keys: the first one's values count, the others are told when these are here.

    Raises:
        Refused: there would be too many keys.
        ZkvError: the keys contradict those that there are, or cannot be placed.
    """
    known = {*router.layout.kid_of, *router.layout.tables.names()}
    known.update(*(one.specs for one in router.catalog.pending.values()))
    offered: list[KeySpec | TableSpec] = [*message.keys, *message.tables]
    fresh = [one for one in offered if one.key not in known]
    there = len(known)
    if fresh and there + len(fresh) > router.config.max_keys:
        raise Refused(
            f"{there} keys and {len(fresh)} more are above the most that this broker takes, "
            f"{router.config.max_keys} (--max-keys); key {fresh[0].key!r} is one of them"
        )
    if message.tables and router.config.replicas:
        raise Refused(
            f"table {message.tables[0].key!r}: rows of tables have no copies on other servers; "
            "start the broker without --replicas, or keep these values in keys"
        )
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
    if done is not None:
        seeded(router, done, out)


def seeded(router: Router, done: Pending, out: Decisions) -> None:
    """All servers hold the values of these keys: they exist."""
    told = router.catalog.complete(done, out.index)
    for incarnation in router.members.incarnations():
        out.tell(incarnation, told)
        out.tell(incarnation, c.Ready(done.init))
    for kid in {entry.kid: None for entry in done.entries}:
        if done.plain or router.restoring.is_plain(kid):
            router.groups.make_plain(kid, out, at_birth=True)
    for incarnation, token in done.waiting:
        mine = incarnation == done.incarnation
        out.tell(incarnation, c.Reply(token, "seeded" if mine else "known"))
    router.begin(out)
