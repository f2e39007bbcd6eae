"""A server's part in snapshots: what it holds at a place of the log goes into a file beside its
loop, and where a run begins from a snapshot comes out of one. Part of one server's shard; knows no
files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zkv import control as c
from zkv.errors import BadSnapshot
from zkv.snapshot import server_file
from zkv.wire import MODEL, SEEDS, BlockSpec
from zkv_brokers import saving
from zkv_brokers.shard_events import Action, Load, Loaded, ToBroker, Write, Wrote

if TYPE_CHECKING:
    from zkv_brokers.shard import Shard


class Keeping:
    """What a shard writes down, and takes in again."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._writing: set[int] = set()
        """Numbers of the snapshots that are being written."""
        self._restores: c.Restore | None = None
        """What is being read."""
        self._term = 0
        """The broker's when it was asked for; it goes on under another one when it is restarted."""

    def apply(self, entry: c.Snapshot | c.Restore, out: list[Action]) -> None:
        """Do what the log says of snapshots."""
        if isinstance(entry, c.Snapshot):
            self.cut(entry, out)
        else:
            self.restore(entry, out)

    def hear(self, event: Wrote | Loaded, out: list[Action]) -> None:
        """A file is written or read, or cannot be."""
        if isinstance(event, Wrote):
            self.wrote(event, out)
        else:
            self.loaded(event, out)

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

    def restore(self, entry: c.Restore, out: list[Action]) -> None:
        """The log says that what is here begins from a snapshot."""
        shard = self._shard
        self._restores, self._term = entry, shard.term
        shard.versions.update(entry.versions)
        bids = frozenset(block.bid for block in self._mine())
        if bids:
            out.append(Load(shard.term, entry.url, entry.name, entry.checksum, bids))
        else:
            self.loaded(Loaded(shard.term, saving.Saved()), out)

    def _mine(self) -> list[BlockSpec]:
        shard = self._shard
        return [one for one in shard.layout.blocks.values() if one.server == shard.number]

    def loaded(self, event: Loaded, out: list[Action]) -> None:
        """What is here has been read, or cannot be; of an earlier broker's run it is of no use."""
        shard, entry = self._shard, self._restores
        if entry is None or event.term != self._term:
            return
        self._restores, why = None, event.why
        try:
            if not why:
                store, tables = shard.store, shard.tables
                saving.put_back(event.saved, self._mine(), shard.layout, store, tables)
                tables.begin(dict(entry.versions).get(MODEL, 0))
        except BadSnapshot as error:
            why = f"{entry.url}/{entry.name}: {error}"
        out.append(ToBroker(c.Restored(why[:4000])))
