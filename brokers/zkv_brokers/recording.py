"""Recordings: all that one broker or server has heard, and when, so that it can be lived again.

A file of records, each a length (4 bytes, big-endian) and a msgpack array. The first one says whose
life it is, the last one its digest; one that breaks off in between was killed, and its whole part
can still be replayed. The machines are pure, so the same events give the same bits
(`zkv_brokers.replay`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv_brokers.config import RouterConfig
from zkv_brokers.node import NodeConfig
from zkv_brokers.shard import Shard
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

FORMAT = "zkv recording 1"
LENGTH_BYTES = 4

_decoder = msgspec.msgpack.Decoder()


class Recorder:
    """Writes one recording; nothing is flushed before the end but by the file's own buffer."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def _write(self, *record: Any) -> None:
        packed = msgspec.msgpack.encode(record)
        self._file.write(len(packed).to_bytes(LENGTH_BYTES, "big") + packed)

    def broker(self, config: RouterConfig, term: int, instance: int, *state: bytes) -> None:
        """The first record of a broker; `state` is what it begins as, if it was one before."""
        self._write(FORMAT, "broker", plain_config(config), term, instance, *state)

    def server(self, config: NodeConfig, instance: int, now: float) -> None:
        """The first record of a server."""
        self._write(FORMAT, "server", asdict(config), instance, now)

    def turn(self, events: list[Event], now: float) -> None:
        """A broker's turn of the loop."""
        self._write("turn", now, [plain_of(event) for event in events])

    def heard(self, kind: str, now: float, *what: Any) -> None:
        """A server's event: "control" (frame), "data" (header, payload), "wrote" or "loaded" (see
        `plain_of_disk`), "over", "tick", "stop"."""
        self._write(kind, now, *what)

    def close(self, digest: str) -> None:
        """Write the end."""
        if not self._file.closed:
            self._write("end", digest)
            self._file.close()


def plain_config(config: RouterConfig) -> dict[str, Any]:
    """Return a router's settings as plain data; `replay.config_of` reads them."""
    return {**asdict(config), "policy": str(config.policy)}


def plain_of(event: Event) -> tuple[Any, ...]:
    """Return what a broker has heard as plain data; `replay.event_of` reads it."""
    match event:
        case Received(route, frame, key):
            return (route, frame, key) if key else (route, frame)
        case Keys(holders):
            return "keys", [(one.key, one.name, sorted(one.roles)) for one in holders]
        case ServerLink(index, up):
            return index, up, None
        case Written(number, why):
            return number, why, None, None
        case Restarted(term, instance):
            return "restarted", term, instance
        case Found(url, manifest, term, why):
            return "found", url, manifest, term, why
        case Ask():
            return (None,)
        case Tick():
            return ()


def records(path: Path) -> Iterator[tuple[int, list[Any]]]:
    """Yield (offset, record) of a recording, up to its end or to where it breaks off.

    Raises:
        ProtocolError: a record that is none; the file and the offset are named.
    """
    content = path.read_bytes()
    at = 0
    while at + LENGTH_BYTES <= len(content):
        size = int.from_bytes(content[at : at + LENGTH_BYTES], "big")
        if at + LENGTH_BYTES + size > len(content):
            return
        try:
            record = _decoder.decode(content[at + LENGTH_BYTES : at + LENGTH_BYTES + size])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"{path}: no record at byte {at}: {error}") from error
        if not isinstance(record, list) or not record:
            raise ProtocolError(f"{path}: no record at byte {at}")
        yield at, record
        at += LENGTH_BYTES + size


def plain_of_disk(event: Wrote | Loaded) -> tuple[Any, ...]:
    """Return what a disk has said, as it is recorded, its kind first."""
    if isinstance(event, Wrote):
        return "wrote", event.number, event.nbytes, event.sha256, event.why
    saved = event.saved
    arrays = {n: (one.dtype.name, one.shape, one.tobytes()) for n, one in saved.arrays.items()}
    return "loaded", event.term, saved.metadata, arrays, event.why


def digest_of(shard: Shard) -> str:
    """Return a digest of all that a shard holds: values, master copies, state and counts."""
    total = hashlib.sha256()
    for bid, state in sorted(shard.store.blocks.items()):
        counts = sorted(state.counts.items())
        total.update(repr((bid, state.rule, counts)).encode())
        arrays: list[Array] = [state.current.values, *state.slots]
        if state.master is not None:
            arrays.append(state.master)
        for array in arrays:
            total.update(repr((array.dtype.str, array.shape)).encode())
            total.update(array.tobytes())
    for bid, part in sorted(shard.tables.parts.items()):
        total.update(repr((bid, part.rule, len(part))).encode())
        for array in part.arrays():
            total.update(array.tobytes())
    total.update(repr(sorted(shard.versions.items())).encode())
    return total.hexdigest()
