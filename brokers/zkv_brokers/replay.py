"""Replays: a recorded broker or server lives again in one process, and must end with the same
bits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zkv.data_messages import decode_data
from zkv.errors import ProtocolError
from zkv.policy import policy
from zkv.roles import Holder
from zkv_brokers import saving
from zkv_brokers.config import RouterConfig
from zkv_brokers.node import Node, NodeConfig
from zkv_brokers.recording import FORMAT, digest_of, records
from zkv_brokers.router import Router
from zkv_brokers.shard_events import Loaded, Wrote
from zkv_brokers.signals import (
    Ask,
    Event,
    Found,
    Keys,
    Received,
    Restarted,
    ServerLink,
    Tick,
    Written,
)
from zkv_brokers.state import unpacked


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a replay."""

    role: str
    events: int
    entries: int
    """Entries of the control log that were written or applied."""
    version: int
    """The model's version at the end."""
    digest: str
    recorded: str | None
    """The digest at the end of the recording; None if it broke off."""

    @property
    def same(self) -> bool:
        """Whether the replay ended as the recording did."""
        return self.digest == self.recorded


def replay(path: Path) -> Replayed:
    """Replay a recording.

    Raises:
        ProtocolError: not a recording, or one of another format; the file is named.
        OSError: the file cannot be read.
    """
    found = records(path)
    _, first = next(found, (0, [None]))
    if first[0] != FORMAT:
        raise ProtocolError(f"{path} is no recording of this version ({FORMAT!r})")
    try:
        if first[1] == "broker":
            return _broker(first, [record for _, record in found])
        return _server(first, [record for _, record in found])
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"{path} is damaged: {error}") from error


def _broker(first: list[Any], rest: list[list[Any]]) -> Replayed:
    router, recorded = router_of(first, rest)
    return Replayed(
        first[1], len(rest), len(router.log), router.groups.version, router.log.digest, recorded
    )


def router_of(first: list[Any], rest: Iterable[list[Any]]) -> tuple[Router, str | None]:
    """Return a broker at the end of its recording, and the digest that was recorded there.

    Raises:
        ProtocolError, TypeError, ValueError, KeyError, IndexError: a record is damaged.
    """
    _, _, plain, term, instance, *state = first
    if state:
        router: Router = unpacked(state[0])
    else:
        config = RouterConfig(**{**plain, "policy": policy(plain["policy"])})
        router = Router(config, term=term, instance=instance)
    recorded = None
    for kind, *what in rest:
        if kind == "end":
            (recorded,) = what
        else:
            now, events = what
            router.turn([event_of(event) for event in events], now)
            router = router.successor or router
    return router, recorded


def event_of(plain: list[Any]) -> Event:
    """Return what a broker has heard, from its recorded form; ProtocolError if it is none."""
    match plain:
        case []:
            return Tick()
        case ["keys", holders]:
            return Keys(tuple(Holder(key, name, frozenset(roles)) for key, name, roles in holders))
        case [route, frame]:
            return Received(route, frame)
        case ["found", url, manifest, term, why]:
            return Found(url, manifest, term, why)
        case ["restarted", term, instance]:
            return Restarted(term, instance)
        case [index, up, None]:
            return ServerLink(index, up)
        case [route, frame, key]:
            return Received(route, frame, key)
        case [number, why, None, None]:
            return Written(number, why)
        case [None]:
            return Ask()
    raise ProtocolError(f"no event of a broker: {plain!r}")


def _server(first: list[Any], rest: list[list[Any]]) -> Replayed:
    _, role, plain, instance, began = first
    node = Node(NodeConfig(**plain), instance=instance, now=began)
    recorded = None
    for kind, *what in rest:
        if kind == "end":
            (recorded,) = what
            continue
        now, *more = what
        _live(node, kind, now, more)
    shard = node.shard
    return Replayed(
        role, len(rest), shard.index, shard.versions.get(0, 0), digest_of(shard), recorded
    )


def _live(node: Node, kind: str, now: float, what: list[Any]) -> None:
    match kind, what:
        case "control" | "data", _:
            try:
                _hear(node, kind, now, what)
            except ProtocolError:
                # The live server dropped it as well, with a word in its log.
                return
        case "over", []:
            node.turn_over(now)
        case "tick", []:
            node.tick(now)
        case "wrote", _:
            node.disk_says(Wrote(*what), now)
        case "loaded", [term, metadata, arrays, why]:
            found = {
                n: np.frombuffer(bits, t).reshape(s).copy() for n, (t, s, bits) in arrays.items()
            }
            node.disk_says(Loaded(term, saving.read(found, metadata, "recording"), why), now)
        case "stop", [why]:
            node.stop(why, now)
        case _:
            raise ProtocolError(f"no event of a server: {kind!r} {what!r}")


def _hear(node: Node, kind: str, now: float, what: list[Any]) -> None:
    if kind == "control":
        (frame,) = what
        node.broker_says(frame, now)
        return
    header, payload = what
    # A copy: what is received may be adopted and written to.
    values = None if payload is None else np.frombuffer(bytearray(payload), np.uint8)
    message = decode_data(header, None if values is None else values.nbytes)
    node.worker_says(message, values, now)
