"""What a server writes of itself into a snapshot, and how it takes that in again.

At a snapshot's place in the log the arrays are taken as they are, without a copy: an update makes
new ones where they are still being written (`BlockState.kept`). Rows of tables, which updates
overwrite in place, are copied. A file has the arrays by block, and beside them, as JSON, the heads
that moves have too (`parcels.Head`). Pure: knows no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from zkv.dtypes import Array
from zkv.errors import BadSnapshot, ProtocolError
from zkv.layout import Layout
from zkv.wire import BlockSpec, Frozen, Name, UInt
from zkv_brokers import parcels
from zkv_brokers.bases import Bases
from zkv_brokers.contributions import Contributions
from zkv_brokers.row_store import RowStore
from zkv_brokers.store import Store
from zkv_brokers.tables import Tables

HEADS = "zkv"
"""Where a file's metadata has the heads."""
ROWS = ("ids", "values", "counts", "changed")
"""Arrays of a part of a table, before those of its state."""


class Rows(Frozen, frozen=True):
    """What a file has of one part of a table: the arrays of `ROWS`, and `slots` of state."""

    rule: Name
    slots: UInt


class Heads(Frozen, frozen=True):
    """What a file has, by block."""

    blocks: dict[UInt, parcels.Head]
    rows: dict[UInt, Rows]


_decoder = msgspec.json.Decoder(Heads, strict=False)


@dataclass(slots=True)
class Saved:
    """What is to be written, or was read: arrays by name, and the heads."""

    arrays: dict[str, Array] = field(default_factory=dict)
    blocks: dict[int, parcels.Head] = field(default_factory=dict)
    rows: dict[int, Rows] = field(default_factory=dict)

    @property
    def metadata(self) -> dict[str, str]:
        """What a file says beside its arrays."""
        return {HEADS: msgspec.json.encode(Heads(self.blocks, self.rows)).decode()}

    def join(self, other: Saved) -> None:
        """Take in what another file has."""
        self.arrays.update(other.arrays)
        self.blocks.update(other.blocks)
        self.rows.update(other.rows)

    def only(self, bids: Iterable[int]) -> Saved:
        """Return what there is of these blocks, in arrays of their own."""
        wanted = set(bids)
        arrays = {
            name: array.copy()
            for name, array in self.arrays.items()
            if int(name.partition(".")[0]) in wanted
        }
        blocks = {bid: head for bid, head in self.blocks.items() if bid in wanted}
        return Saved(arrays, blocks, {bid: one for bid, one in self.rows.items() if bid in wanted})


def taken(
    store: Store, tables: Tables, contributions: Contributions, blocks: Sequence[BlockSpec]
) -> Saved:
    """Return these blocks and all rows as they are now; what is written later does not change."""
    made = Saved()
    for block in blocks:
        state = store.blocks[block.bid]
        group = store.layout.group_of[block.segments[0].kid]
        marks = contributions.marks_of(group)
        # What open gradients were computed on is of no use: they begin anew.
        head, arrays = parcels.collected(store, Bases(), block, marks)
        made.blocks[block.bid] = head
        made.arrays.update((f"{block.bid}.{at}", array) for at, array in enumerate(arrays))
        state.kept = True
    for bid, part in tables.parts.items():
        ids, values, counts, *slots = part.arrays()
        changed = part.changed()
        made.rows[bid] = Rows(part.rule, len(slots))
        for at, array in enumerate((ids, values, counts, changed, *slots)):
            made.arrays[f"{bid}.{at}"] = array.copy()
    return made


def written(store: Store) -> None:
    """Nothing is being written any more: arrays that no update has replaced are the store's."""
    for state in store.blocks.values():
        state.kept = False


def read(arrays: dict[str, Array], metadata: Mapping[str, str], file: str) -> Saved:
    """Return what one file has.

    Raises:
        BadSnapshot: it is none of a server, or does not have what its heads say.
    """
    try:
        heads = _decoder.decode(metadata[HEADS])
    except (KeyError, msgspec.DecodeError, RecursionError) as error:
        raise BadSnapshot(f"{file} does not say what its arrays are: {error!r}") from error
    wanted = {bid: len(head.dtypes) for bid, head in heads.blocks.items()}
    wanted |= {bid: len(ROWS) + one.slots for bid, one in heads.rows.items()}
    names = {f"{bid}.{at}" for bid, count in wanted.items() for at in range(count)}
    if names != arrays.keys():
        odd = min(names ^ arrays.keys())
        raise BadSnapshot(f"{file}: array {odd!r} is there, or is described, but not both")
    return Saved(arrays, dict(heads.blocks), dict(heads.rows))


def put_back(
    saved: Saved, blocks: Sequence[BlockSpec], layout: Layout, store: Store, tables: Tables
) -> None:
    """Hold what these blocks, and parts of tables, have in a snapshot.

    Raises:
        BadSnapshot: something of them is not there, or has another size or dtype.
    """
    for block in blocks:
        if block.segments:
            _put_block(saved, block, layout, store)
        else:
            _put_rows(saved, block.bid, tables.parts[block.bid])


def _put_block(saved: Saved, block: BlockSpec, layout: Layout, store: Store) -> None:
    head = saved.blocks.get(block.bid)
    if head is None:
        raise BadSnapshot(f"no file has block {block.bid}")
    arrays = [saved.arrays[f"{block.bid}.{at}"] for at in range(len(head.dtypes))]
    dtype = layout.dtype(block)
    wide = [dtype.stored, *(array.dtype for array in arrays[1:])]
    for array, wanted in zip(arrays, wide, strict=True):
        if array.shape != (block.size,) or array.dtype != wanted:
            raise BadSnapshot(
                f"block {block.bid} has an array of {array.dtype} {array.shape}, where "
                f"{wanted} ({block.size},) is needed"
            )
    try:
        found = parcels.assembled(head, arrays)
    except (StopIteration, IndexError) as error:
        raise BadSnapshot(f"block {block.bid} lacks arrays that its head names") from error
    if found.state.counts.keys() != set(block.kids):
        raise BadSnapshot(f"block {block.bid} counts updates of other keys than it has")
    # Where workers of this machine read them without a copy.
    store.put(block, arrays[0])
    found.state.current = store.blocks[block.bid].current
    store.blocks[block.bid] = found.state
    store.views.adopt(block.bid, found.view)


def _put_rows(saved: Saved, bid: int, part: RowStore) -> None:
    rows = saved.rows.get(bid)
    if rows is None:
        raise BadSnapshot(f"no file has the rows of block {bid}")
    ids, values, counts, changed, *slots = (
        saved.arrays[f"{bid}.{at}"] for at in range(len(ROWS) + rows.slots)
    )
    try:
        part.put_back(rows.rule, ids, values, counts, changed, tuple(slots))
    except (ValueError, ProtocolError) as error:
        raise BadSnapshot(f"the rows of block {bid}: {error}") from error
