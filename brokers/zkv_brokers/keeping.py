"""A server's part in snapshots: what it holds at a place of the log goes into a file beside its
loop. Part of one server's shard; knows no files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zkv import control as c
from zkv.snapshot import server_file
from zkv.wire import SEEDS
from zkv_brokers import saving
from zkv_brokers.shard_events import Action, ToBroker, Write, Wrote

if TYPE_CHECKING:
    from zkv_brokers.shard import Shard


class Keeping:
    """What a shard writes down."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._writing: set[int] = set()
        """Numbers of the snapshots that are being written."""

    def cut(self, entry: c.Snapshot, out: list[Action]) -> None:
        """The log says that a snapshot is cut here."""
        shard = self._shard
        layout, store = shard.layout, shard.store
        mine = [
            block
            for bid in sorted(store.blocks)
            if (block := layout.blocks[bid]).server == shard.number
            # First values that are on their way are none yet.
            and layout.group_of[block.segments[0].kid] != SEEDS
        ]
        if not mine and not shard.tables.parts:
            return
        saved = saving.taken(store, shard.tables, shard.contributions, mine)
        self._writing.add(entry.number)
        file = server_file(shard.number)
        out.append(Write(entry.number, entry.url, entry.name, file, saved))

    def wrote(self, event: Wrote, out: list[Action]) -> None:
        """A file is written, or could not be."""
        self._writing.discard(event.number)
        if not self._writing:
            saving.written(self._shard.store)
        out.append(ToBroker(c.Saved(event.number, event.nbytes, event.sha256, event.why[:4000])))
