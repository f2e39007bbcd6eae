"""What moves when somebody asks for it, or a server has come: plans from the broker's state.

The plan itself is `zkv.rebalance`'s; `Moves` carries it out. Part of the router.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from zkv import control as c
from zkv.assignment import key_loads
from zkv.dtypes import DTYPES
from zkv.errors import ConfigError, Refused
from zkv.fitting import Piece
from zkv.layout import size_of
from zkv.placement import to_place
from zkv.rebalance import Moved, Rearrangement, imbalance_of
from zkv.wire import BlockSpec
from zkv_brokers.members import Server
from zkv_brokers.moves import Step

if TYPE_CHECKING:
    from zkv_brokers.router import Router


class Plan:
    """Where the broker's blocks are to be. `closed` are the servers that take none."""

    def __init__(self, router: Router, closed: set[int]) -> None:
        self._router = router
        layout = router.layout
        self.blocks: list[BlockSpec] = [layout.blocks[bid] for bid in sorted(layout.blocks)]
        self.blocks = [block for block in self.blocks if block.segments]
        self.where = [router.moves.heading().get(b.bid, b.server) for b in self.blocks]
        self.pieces = _pieces(router, self.blocks)
        self.arrangement = Rearrangement(
            self.pieces,
            self.where,
            router.members.places,
            router.catalog.placement,
            names=router.members.names(),
            closed=closed,
        )
        measured = router.loads.by_block()
        self.measured = [measured.get(block.bid, 0.0) for block in self.blocks]

    def steps(self) -> list[Step]:
        """Return what has to move, in order."""
        return [
            Step(self.blocks[one.at].bid, self.where[one.at], one.to, one.why)
            for one in self.arrangement.moved()
        ]

    def plain(self) -> dict[str, Any]:
        """Return the plan as plain data: what moves and why, and the imbalance of measured load
        (of bytes, if none was measured) before and after."""
        weights: Sequence[float] = self.measured
        of = "measured"
        if not any(weights):
            weights, of = [piece.nbytes for piece in self.pieces], "bytes"
        members = self._router.members
        before = dict.fromkeys(members.servers, 0.0)
        for weight, server in zip(weights, self.where, strict=True):
            before[server] = before.get(server, 0.0) + weight
        after = self.arrangement.weights(weights)
        moved = self.arrangement.moved()
        return {
            "of": of,
            "seconds": round(self._router.loads.seconds(self._router.hub.now), 3),
            "imbalance_before": round(imbalance_of(before), 4),
            "imbalance_after": round(imbalance_of(after), 4),
            "loads_before": {str(one): load for one, load in sorted(before.items())},
            "loads_after": {str(one): load for one, load in sorted(after.items())},
            "bytes": sum(self.pieces[one.at].nbytes for one in moved),
            "of_bytes": sum(piece.nbytes for piece in self.pieces),
            "blocks": len(self.blocks),
            "moves": [self._move(one, weights) for one in moved],
        }

    def _move(self, one: Moved, weights: Sequence[float]) -> dict[str, Any]:
        piece = self.pieces[one.at]
        return {
            "block": self.blocks[one.at].bid,
            "key": piece.key,
            "more_keys": piece.more,
            "bytes": piece.nbytes,
            "load": weights[one.at],
            "from": self.where[one.at],
            "to": one.to,
            "why": one.why,
        }


def _pieces(router: Router, blocks: Sequence[BlockSpec]) -> list[Piece]:
    entries = [entry for entry in router.layout.entries.values() if entry.spec.same_as is None]
    sizes = [
        (one.kid, one.spec.key, size_of(one.spec) * DTYPES[one.spec.dtype].itemsize)
        for one in entries
    ]
    loads = key_loads(router.catalog.placement, sizes)
    cut = [(router.layout.block_bytes(block), block.segments) for block in blocks]
    return to_place(cut, entries, loads)


def rearrange(router: Router, message: c.Rearrange) -> dict[str, Any]:
    """Do what somebody asks for, and return the plan.

    Raises:
        Refused: it cannot be done: no such server or key, the last server, nothing measured.
        ConfigError: no server has room; the text names the key, its size and the limit.
    """
    fleet, members = router.fleet, router.members
    of: int | None = None
    match message.action:
        case "rebalance":
            plan = Plan(router, fleet.closed())
            plan.arrangement.empty_closed("its server is drained")
            if not any(plan.measured):
                raise Refused(
                    "no load was measured yet: nothing was pushed or sent since the start, or "
                    "since the last move; try again when workers have trained for a few seconds"
                )
            plan.arrangement.level(plan.measured, "from the busiest server to the idlest")
        case "drain":
            server = members.find(message.server)
            of = server.index
            left = members.servers.keys() - fleet.closed() - {server.index}
            if not left:
                raise Refused(
                    f"{server} is the last server that takes blocks, and nothing could take what "
                    "it holds; start another one first: zkv server add"
                )
            if len(left) < 2 and router.replicas.wanted:
                raise Refused(
                    f"{server} is one of the last two servers that take blocks, and their copies "
                    "need two (--replicas 1); start another one first: zkv server add"
                )
            _check_tables(router, server)
            plan = Plan(router, fleet.closed() | {server.index})
            plan.arrangement.empty_closed("its server is drained")
            if not message.dry and server.index not in fleet.draining:
                fleet.draining.append(server.index)
        case "move":
            plan = _sent(router, message)
        case other:
            raise Refused(f"{other!r} is none of rebalance, drain, move")
    if not message.dry:
        router.moves.plan(plan.steps())
    return {"action": message.action, "server": of, "dry": message.dry, **plan.plain()}


def _check_tables(router: Router, server: Server) -> None:
    """Check that a server may be drained: rows of tables stay where they are.

    Raises:
        Refused: it holds some.
    """
    layout = router.layout
    for entry in layout.tables.entries.values():
        if any(layout.blocks[bid].server == server.index for bid in entry.bids):
            raise Refused(
                f"{server} holds rows of table {entry.spec.key!r}, which do not move: it cannot be "
                "drained while the run goes on"
            )


def _sent(router: Router, message: c.Rearrange) -> Plan:
    """Return the plan that sends keys to a server."""
    server, fleet = router.members.find(message.server), router.fleet
    if server.index in fleet.closed():
        raise Refused(f"{server} is drained: it takes no blocks")
    plan = Plan(router, fleet.closed())
    for pattern in map(str, message.keys):
        keys = {one.key for one in plan.pieces if fnmatchcase(str(one.key), pattern)}
        if not keys:
            raise Refused(f"no block begins with a key that matches {pattern!r}")
        plan.arrangement.send(keys, server.index, f"{pattern} was sent to server {server.index}")
    return plan


def by_itself(router: Router, fresh: Sequence[int]) -> list[Step]:
    """Return what moves without being asked for: off drained servers, and to fresh ones.

    Raises:
        ConfigError: no server has room.
    """
    closed = router.fleet.closed()
    plan = Plan(router, closed)
    plan.arrangement.empty_closed("its server is drained")
    for server in (one for one in fresh if one not in closed):
        plan.arrangement.fill(server, f"server {server} has come")
    return plan.steps()


def tried(find: Callable[[], list[Step]], say: Callable[[str], None]) -> list[Step]:
    """Return the steps that are found; none, with a word, if there is no room."""
    try:
        return find()
    except (ConfigError, Refused) as error:
        say(str(error))
        return []
