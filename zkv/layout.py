"""Keys, blocks and groups: who is where. Broker, servers and workers each keep one and apply the
same changes to it, so it decides nothing and knows no process.

A block is a flat array of one dtype and rule: either a slice of one large key, or a bucket of whole
small keys. A group is a set of keys with one version: the model (group 0), or one plain key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zkv.dtypes import DTYPES, DType
from zkv.errors import KeyMismatch, ProtocolError, UnknownKey
from zkv.keys import check_key as check_key
from zkv.keys import unknown_key as unknown_key
from zkv.table_layout import TableLayout, bid_of
from zkv.wire import (
    MODEL,
    SEEDS,
    BlockSpec,
    KeyEntry,
    KeySpec,
    Segment,
    TableEntry,
    TableSpec,
)

REDUCES = ("", "sum", "mean")
ABSENT = ("zero", "out")


@dataclass(slots=True)
class Layout:
    """The keys, blocks and groups that exist, and the indices between them."""

    entries: dict[int, KeyEntry] = field(default_factory=dict)
    kid_of: dict[str | int, int] = field(default_factory=dict)
    blocks: dict[int, BlockSpec] = field(default_factory=dict)
    blocks_of_key: dict[int, list[int]] = field(default_factory=dict)
    group_of: dict[int, int] = field(default_factory=dict)
    tables: TableLayout = field(default_factory=TableLayout)
    """Tables are no keys, and their blocks are in no group: whoever means them says so."""
    _copy: Layout | None = None
    _kids_in: dict[int, list[int]] = field(default_factory=dict, compare=False)
    _blocks_in: dict[int, list[BlockSpec]] = field(default_factory=dict, compare=False)
    """What was found of groups since the last change: batches ask for it thousands of times."""
    _blocks_with: dict[int, tuple[BlockSpec, ...]] = field(default_factory=dict, compare=False)

    def averages(self, block: BlockSpec) -> bool:
        """Return whether contributions to this block are averaged by weight (else added)."""
        kid = block.segments[0].kid
        reduce = self.entries[kid].spec.reduce
        if reduce:
            return reduce == "mean"
        return self.group_of[kid] == MODEL and self.dtype(block).floating

    def snapshot(self) -> Layout:
        """Return a copy that stays as it is, for another thread (the same one until a change)."""
        if self._copy is None:
            self._copy = Layout(
                dict(self.entries),
                dict(self.kid_of),
                dict(self.blocks),
                {kid: list(bids) for kid, bids in self.blocks_of_key.items()},
                dict(self.group_of),
                self.tables.copy(),
            )
        return self._copy

    def _changed(self) -> None:
        self._copy = None
        self._kids_in.clear()
        self._blocks_in.clear()
        self._blocks_with.clear()

    def add(
        self,
        entries: Sequence[KeyEntry],
        blocks: Sequence[BlockSpec],
        group: int = MODEL,
        tables: Sequence[TableEntry] = (),
    ) -> None:
        """Add the keys and blocks of one initialisation; adding them again changes nothing, unless
        they were added to SEEDS: keys whose first values are on their way are in no group.

        Raises:
            ProtocolError: they contradict each other or what is here; nothing is added then.
        """
        fresh = [block for block in blocks if block.bid not in self.blocks]
        self._check(entries, fresh)
        self.tables.check(tables, {block.bid: block for block in (*self.blocks.values(), *fresh)})
        self._changed()
        for entry in entries:
            if entry.spec.same_as is None:
                if self.group_of.get(entry.kid, SEEDS) == SEEDS:
                    self.group_of[entry.kid] = group
                self.entries[entry.kid] = entry
                self.blocks_of_key.setdefault(entry.kid, [])
            self.kid_of[entry.spec.key] = entry.kid
        self.tables.add(tables)
        for block in fresh:
            self._put(block)

    def _check(self, entries: Sequence[KeyEntry], blocks: Sequence[BlockSpec]) -> None:
        specs = {kid: entry.spec for kid, entry in self.entries.items()}
        for entry in entries:
            if entry.spec.same_as is None and specs.setdefault(entry.kid, entry.spec) != entry.spec:
                raise ProtocolError(f"key number {entry.kid} is {specs[entry.kid].key!r} already")
        for entry in entries:
            if entry.kid not in specs or self.kid_of.get(entry.spec.key, entry.kid) != entry.kid:
                raise ProtocolError(f"key {entry.spec.key!r} has no number of its own: {entry.kid}")
        for block in blocks:
            for segment in block.segments:
                spec = specs.get(segment.kid)
                if spec is None or not segment.start <= segment.stop <= size_of(spec):
                    raise ProtocolError(f"block {block.bid} has {segment}, which is in no key")

    def clear(self) -> None:
        """Forget everything."""
        self._changed()
        for index in (self.entries, self.kid_of, self.blocks, self.blocks_of_key, self.group_of):
            index.clear()
        self.tables.clear()

    def _put(self, block: BlockSpec) -> None:
        self.blocks[block.bid] = block
        for kid in block.kids:
            held = self.blocks_of_key.setdefault(kid, [])
            if block.bid not in held:
                held.append(block.bid)

    def remove(self, kids: Iterable[int]) -> None:
        """Forget keys and the blocks that hold nothing else (a dropped initialisation)."""
        self._changed()
        gone = set(kids)
        for bid in {bid for kid in gone for bid in self.blocks_of_key.get(kid, [])}:
            del self.blocks[bid]
        for bid in self.tables.remove(gone):
            del self.blocks[bid]
        for kid in gone:
            self.entries.pop(kid, None)
            self.blocks_of_key.pop(kid, None)
            self.group_of.pop(kid, None)
        self.kid_of = {key: kid for key, kid in self.kid_of.items() if kid not in gone}

    def regroup(self, kid: int, group: int, bid: int) -> None:
        """Give a key a group of its own; out of a bucket it moves to block `bid` on its server.

        Raises:
            ProtocolError: there is no such key, or already such a block.
        """
        if self.group_of.get(kid) == group:
            return
        if kid not in self.blocks_of_key or bid in self.blocks:
            raise ProtocolError(f"key number {kid} cannot move into block {bid}")
        self._changed()
        self.group_of[kid] = group
        for old in list(self.blocks_of_key[kid]):
            bucket = self.blocks[old]
            if bucket.kids == [kid]:
                continue
            (moved,) = [segment for segment in bucket.segments if segment.kid == kid]
            rest = [segment for segment in bucket.segments if segment.kid != kid]
            self.blocks[old] = BlockSpec(old, bucket.server, rest)
            self.blocks_of_key[kid] = []
            self._put(BlockSpec(bid, bucket.server, [moved]))

    def move(self, moves: Iterable[tuple[int, int]]) -> None:
        """Give blocks (block, server) to other servers.

        Raises:
            ProtocolError: there is no such block.
        """
        self._changed()
        for bid, server in moves:
            if bid not in self.blocks:
                raise ProtocolError(f"there is no block {bid} that could move to server {server}")
            self.blocks[bid] = BlockSpec(bid, server, self.blocks[bid].segments)

    def kid(self, key: str | int) -> int:
        """Return a key's number.

        Raises:
            UnknownKey: it was never initialised; near misses and the other kind of key are named.
        """
        kid = self.kid_of.get(key)
        if kid is None and self.tables.find(key) is not None:
            raise UnknownKey(
                f"key {key!r} is a table: its rows are read by batch.rows or worker.rows, and "
                "pushed by batch.push_rows"
            )
        if kid is None:
            raise UnknownKey(unknown_key(key, self.kid_of))
        return kid

    def table(self, key: str | int) -> TableEntry:
        """Return a table.

        Raises:
            UnknownKey: there is none of this name; those that there are are named.
        """
        found = self.tables.find(key)
        if found is None and key in self.kid_of:
            raise UnknownKey(f"key {key!r} is no table: it is read and pushed as a whole")
        if found is None:
            raise UnknownKey(unknown_key(key, self.tables.names()))
        return found

    @property
    def has_model(self) -> bool:
        """Whether there is anything to train in batches."""
        return bool(self.tables or self.kids_in(MODEL))

    def servers_in(self, group: int) -> set[int]:
        """Return the servers that hold a part of a group, tables included."""
        return {block.server for block in self.blocks_in(group)} | {
            self.blocks[bid].server for bid in (self.tables.of_block if group == MODEL else ())
        }

    def server_of(self, place: int) -> int:
        """Return the server that a block, or a place in a table's block, is on."""
        return self.blocks[bid_of(place)].server

    def places_by_server(self, group: int, places: Iterable[int]) -> dict[int, list[int]]:
        """Return these places of a group's tables, by server; each that holds any has a list."""
        found: dict[int, list[int]] = {}
        for bid in self.tables.of_block if group == MODEL else ():
            found.setdefault(self.blocks[bid].server, [])
        for place in places:
            found[self.server_of(place)].append(place)
        return found

    def kids_in(self, group: int) -> list[int]:
        """Return the group's keys in the order of their numbers: that of initialisation."""
        found = self._kids_in.get(group)
        if found is None:
            found = sorted(kid for kid, of in self.group_of.items() if of == group)
            self._kids_in[group] = found
        return list(found)

    def blocks_in(self, group: int) -> list[BlockSpec]:
        """Return the group's blocks in the order of their numbers."""
        found = self._blocks_in.get(group)
        if found is None:
            bids = {bid for kid in self.kids_in(group) for bid in self.blocks_of_key[kid]}
            found = self._blocks_in[group] = [self.blocks[bid] for bid in sorted(bids)]
        return list(found)

    def blocks_for(self, kids: Iterable[int]) -> list[BlockSpec]:
        """Return the blocks in which these keys lie, in the order of their numbers.

        Raises:
            ProtocolError: there is no key of such a number.
        """
        try:
            bids = sorted({bid for kid in kids for bid in self.blocks_of_key[kid]})
        except KeyError as error:
            raise ProtocolError(f"there is no key number {error}") from None
        return [self.blocks[bid] for bid in bids]

    def blocks_with(self, kid: int) -> Sequence[BlockSpec]:
        """Return what `blocks_for` does, for one key: each gradient asks for it several times.

        Raises:
            ProtocolError: there is no key of this number.
        """
        found = self._blocks_with.get(kid)
        if found is None:
            found = self._blocks_with[kid] = tuple(self.blocks_for((kid,)))
        return found

    def dtype(self, block: BlockSpec) -> DType:
        """Return the dtype of a block's elements."""
        return (
            DTYPES[self.entries[block.segments[0].kid].spec.dtype]
            if block.segments
            else DTYPES["uint8"]
        )

    def spread(self, of_blocks: Mapping[int, float]) -> dict[int, float]:
        """Spread a figure of each block (by number) over its keys (by number), by their elements.

        Blocks that are gone, as their keys have moved out, are left out.
        """
        found: dict[int, float] = {}
        for bid, figure in of_blocks.items():
            block = self.blocks.get(bid)
            if block is None:
                continue
            for segment in block.segments:
                part = (segment.stop - segment.start) / max(1, block.size)
                found[segment.kid] = found.get(segment.kid, 0.0) + figure * part
        return found

    def block_bytes(self, block: BlockSpec) -> int:
        """Return the bytes of a block's values."""
        return block.size * self.dtype(block).itemsize

    def shape(self, block: BlockSpec) -> tuple[int, ...]:
        """Return (rows, columns) of a block that holds whole rows of one key (its first axis), else
        (elements,)."""
        if len(block.segments) == 1:
            shape = self.entries[block.segments[0].kid].spec.shape
            row = math.prod(shape[1:])
            start = block.segments[0].start
            if len(shape) > 1 and row and block.size % row == 0 and start % row == 0:
                return (block.size // row, row)
        return (block.size,)


def size_of(spec: KeySpec) -> int:
    """Return the number of elements of a key (1 for a 0-d array)."""
    return math.prod(spec.shape)


def check_spec(spec: KeySpec) -> None:
    """Check what a peer says of a key.

    Raises:
        KeyMismatch: dtype or reduce unknown, too many elements, or an integer key with a mean.
    """
    try:
        check_key(spec.key)
    except (TypeError, ValueError) as error:
        raise KeyMismatch(str(error)) from error
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        raise KeyMismatch(
            f"key {spec.key!r}: dtype {spec.dtype!r} does not travel; "
            f"use one of {', '.join(DTYPES)}"
        )
    if spec.reduce not in REDUCES:
        raise KeyMismatch(f"key {spec.key!r}: reduce {spec.reduce!r} is none of 'sum', 'mean'")
    if spec.absent not in ABSENT:
        raise KeyMismatch(f"key {spec.key!r}: absent {spec.absent!r} is none of 'zero', 'out'")
    if spec.reduce == "mean" and not dtype.floating:
        raise KeyMismatch(
            f"key {spec.key!r}: a mean of {spec.dtype} would lose fractions; use reduce='sum'"
        )
    if size_of(spec) * dtype.itemsize >= 2**48:
        raise KeyMismatch(f"key {spec.key!r}: shape {tuple(spec.shape)} is more than 2**48 bytes")


def differences(known: KeySpec | TableSpec, offered: KeySpec | TableSpec) -> str:
    """Return in words how an offered spec differs from the one initialised; "" if it does not."""
    if isinstance(known, TableSpec) or isinstance(offered, TableSpec):
        return _table_differences(known, offered)
    parts = [
        f"{name} is {then!r}, given {now!r}"
        for name, then, now in (
            ("shape", tuple(known.shape), tuple(offered.shape)),
            ("dtype", known.dtype, offered.dtype),
            ("reduce", known.reduce, offered.reduce),
            ("rule", known.rule, offered.rule),
            ("allow_nan", known.allow_nan, offered.allow_nan),
            ("absent", known.absent, offered.absent),
            ("same_as", known.same_as, offered.same_as),
        )
        if then != now
    ]
    return "; ".join(parts)


def _table_differences(known: KeySpec | TableSpec, offered: KeySpec | TableSpec) -> str:
    if type(known) is not type(offered):
        was, now = ("table" if isinstance(one, TableSpec) else "key" for one in (known, offered))
        return f"it is a {was}, given as a {now}"
    pairs = [
        (name, getattr(known, name), getattr(offered, name)) for name in known.__struct_fields__
    ]
    return "; ".join(
        f"{name} is {then!r}, given {now!r}" for name, then, now in pairs if then != now
    )


def whole(kid: int, size: int) -> Segment:
    """Return the segment of a whole key."""
    return Segment(kid, 0, size)
