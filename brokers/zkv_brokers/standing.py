"""How things stand with a router, as plain data for `zkv status`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zkv.rebalance import imbalance_of
from zkv_brokers import meeting, reasons, requests
from zkv_brokers.members import Worker
from zkv_brokers.placed import Placed
from zkv_brokers.placed_tables import tables_in_words

if TYPE_CHECKING:
    from zkv_brokers.router import Router


def _waiting(router: Router, worker: Worker) -> dict[str, Any] | None:
    reason = requests.why_waiting(router, worker)
    return reason.to_plain() if reason is not None else None


def _workers(router: Router) -> list[dict[str, Any]]:
    model = router.groups.model
    clocks = model.sync.clocks if model is not None else {}
    return [
        {
            "number": worker.number,
            "name": worker.hello.name,
            "host": worker.hello.host,
            "pid": worker.hello.pid,
            "observer": worker.hello.observer,
            "clock": clocks.get(worker.number, 0),
            "contributions": model.tally(worker.number).plain() if model is not None else {},
            "last_heard_s": round(router.hub.silent_s(worker.peer), 3),
            "time": worker.spent.to_plain() if worker.spent is not None else None,
            "transport": worker.transport,
            "link_rate": worker.link_rate,
            "waiting": _waiting(router, worker),
        }
        for worker in router.members.workers.values()
    ]


def _servers(router: Router, placed: Placed) -> list[dict[str, Any]]:
    measured = router.loads.by_server(router.members.servers)
    return [
        {
            "index": server.index,
            "name": server.hello.name,
            "address": server.hello.address,
            "key": router.hub.key_of(server.peer),
            "host": server.hello.host,
            "pid": server.hello.pid,
            "last_heard_s": round(router.hub.silent_s(server.peer), 3),
            **placed.of_server(server.index),
            "measured": measured.get(server.index, 0.0),
            "updates": server.updates,
            "update_s": round(server.update_s, 6),
        }
        for server in router.members.servers.values()
    ]


def _measured(router: Router) -> dict[str, Any]:
    """Return how evenly payload bytes were spread, and over how many seconds."""
    loads, servers = router.loads, router.members.servers
    return {
        "measured_imbalance": round(imbalance_of(loads.by_server(servers)), 4) if servers else 1.0,
        "measured_s": round(loads.seconds(router.hub.now), 3),
    }


def status(router: Router) -> dict[str, Any]:
    """Return how things stand, as plain data for `zkv status --json`."""
    model = router.groups.model
    members = router.members
    layout = router.layout
    coding = router.coding.plain(layout)
    gone = set(range(members.places)) - members.servers.keys()
    places = max(members.places, members.servers_wanted)
    placed = Placed(router.catalog.placement, layout, places, coding["codecs"], gone)
    return {
        "broker": router.config.address,
        "process": router.about,
        "term": members.term,
        "policy": str(router.policy),
        "optimizer": str(router.model_spec),
        "staleness": str(router.staleness),
        **coding,
        "failed": router.failed.reason if router.failed is not None else None,
        "version": router.groups.version,
        "log_entries": len(router.log),
        "data": router.groups.draws.plain(),
        "keys": len(layout.kid_of),
        "tables": tables_in_words(layout, members.servers.values()),
        "plain_keys": len(router.groups.by_number) - (model is not None),
        "servers_wanted": members.servers_wanted,
        "waiting": requests.text_of(
            router.rolling.reason
            or reasons.servers_missing(members, router.config.address)
            or reasons.workers_missing(members)
        ),
        "pending": [model.arrivals[name].number for name in model.kept()] if model else [],
        "contributions": {
            str(number): tally.plain() for number, tally in sorted(model.tallies.items())
        }
        if model is not None
        else {},
        "block_bytes": max((layout.block_bytes(b) for b in layout.blocks.values()), default=0),
        **placed.plain(),
        "topology": meeting.plain(router),
        "replicas": router.replicas.plain(),
        "moves": {**router.moves.plain(), "draining": router.fleet.draining},
        **_measured(router),
        "snapshots": router.snapshots.plain() | {"gone_back": router.rolling.plain()},
        "servers": _servers(router, placed),
        "workers": _workers(router),
    }
