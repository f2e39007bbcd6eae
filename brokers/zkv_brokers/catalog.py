"""The catalog: which keys exist, who sends their first values, and where their blocks live (rule
7).

One offer at a time initialises a set of keys. The first to offer it sends the values; the others
wait until every server holds them. If the initialiser dies half-way, its keys are dropped and the
next one that offered the same set takes over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from zkv import control as c
from zkv.assignment import key_loads
from zkv.dtypes import DTYPES
from zkv.errors import ConfigError, KeyMismatch, ZkvError, code_of
from zkv.fitting import Share, empty
from zkv.layout import Layout, check_spec, differences, size_of
from zkv.link import PACKET_BYTES_MAX
from zkv.optimizer_spec import OptimizerSpec, optimizer
from zkv.placement import (
    BLOCK_BYTES,
    BUCKET_BYTES,
    block_bytes_on,
    bucket_bytes_on,
    plan,
    segments_load,
)
from zkv.placements import ByLoad, placement
from zkv.wire import BlockSpec, KeyEntry, KeySpec, TableEntry, TableSpec, encode
from zkv_brokers.coding import Coding
from zkv_brokers.decisions import Decisions
from zkv_brokers.placed_tables import check_new, checked_tables, placed_tables

INIT_BYTES_MAX = 2**39
"""Half a million blocks: more would be a plan of minutes and a message that nobody takes."""


@dataclass(slots=True)
class Pending:
    """An initialisation whose values are not held by every server yet."""

    init: int
    incarnation: int
    specs: dict[str | int, KeySpec | TableSpec]
    order: list[KeySpec]
    plain: bool
    entries: list[KeyEntry]
    blocks: list[BlockSpec]
    missing: set[int]
    waiting: list[tuple[int, int]] = field(default_factory=list)
    """(incarnation, token) of everybody who offered these keys, the initialiser first."""
    tables: tuple[TableEntry, ...] = ()


class Catalog:
    """All keys and initialisations. `layout` and `coding` are shared with the router.

    `block_bytes`: the size of blocks; 0: by the link of the worker that initialises. `places` is
    the text of a placement, whose pins may name servers by what `names` returns, by number.
    """

    def __init__(
        self,
        layout: Layout,
        coding: Coding,
        block_bytes: int = 0,
        places: str = "by_size",
        names: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.layout = layout
        self.placement = placement(places)
        self._names = names
        self.pieces: Callable[[int], int] = lambda blocks: 0
        """Into how many equal blocks a key is cut that would be cut into so many; 0: it is not."""
        self._coding = coding
        self._block_bytes = block_bytes
        self.pending: dict[int, Pending] = {}
        self.history: list[c.Layout | c.Regrouped | c.Follow] = []
        """What a newcomer has to be told, in order."""
        self.closed: Callable[[], Set[int]] = frozenset
        """The numbers of servers that take nothing."""
        self._sets: dict[str | int, frozenset[str | int]] = {}
        self._specs: dict[str | int, KeySpec | TableSpec] = {}
        self._counts = [0, 0, 0]

    def _next(self, which: int, count: int = 1) -> int:
        first = self._counts[which]
        self._counts[which] += count
        return first

    def next_block(self) -> int:
        """Return an unused block number."""
        return self._next(2)

    def offer(
        self,
        incarnation: int,
        message: c.Offer,
        plain: bool,
        servers: int,
        spec: OptimizerSpec,
        out: Decisions,
    ) -> Pending | ZkvError | None:
        """Take an offer: None if the keys exist already, else the initialisation it belongs to."""
        try:
            specs = self._checked(message)
            same = self._compare(specs)
        except KeyMismatch as error:
            return error
        if same:
            running = next(
                (p for p in self.pending.values() if p.specs.keys() == specs.keys()), None
            )
            if running is None:
                return None
            running.waiting.append((incarnation, message.token))
            return running
        try:
            rate = message.link_rate
            started = self._start(
                incarnation, message.keys, message.tables, plain, servers, spec, out, rate
            )
        except (KeyMismatch, ConfigError) as error:
            return error
        started.waiting.append((incarnation, message.token))
        return started

    def _checked(self, message: c.Offer) -> dict[str | int, KeySpec | TableSpec]:
        keys = message.keys
        specs: dict[str | int, KeySpec] = {}
        for one in keys:
            check_spec(one)
            if one.key in specs:
                raise KeyMismatch(f"key {one.key!r} stands twice in one init")
            if one.rule:
                try:
                    optimizer(one.rule)
                except ValueError as error:
                    raise KeyMismatch(f"key {one.key!r}: {error}") from error
            specs[one.key] = one
        for one in keys:
            if one.same_as is not None:
                _check_tie(one, specs.get(one.same_as))
        tables = checked_tables(message.tables, specs)
        if not specs and not tables:
            raise KeyMismatch("init was called without any key")
        total = _total_bytes(keys)
        if total > INIT_BYTES_MAX:
            raise KeyMismatch(
                f"this init has {total} bytes of values; at most {INIT_BYTES_MAX} can be placed"
            )
        return {**specs, **tables}

    def _compare(self, specs: dict[str | int, KeySpec | TableSpec]) -> bool:
        """Return whether these keys exist (or are on their way), exactly so; raise if they
        differ."""
        known = [key for key in specs if key in self._specs]
        if not known:
            return False
        for key in known:
            text = differences(self._specs[key], specs[key])
            if text:
                raise KeyMismatch(f"key {key!r} was initialised otherwise: {text}")
        together = self._sets[known[0]]
        missing = sorted(map(repr, together - specs.keys()))
        extra = sorted(map(repr, specs.keys() - together))
        if missing or extra:
            said = [f"lacks {', '.join(missing[:5])}"] if missing else []
            said += [f"adds {', '.join(extra[:5])}"] if extra else []
            raise KeyMismatch(
                f"this init {' and '.join(said)} compared with the init that made {known[0]!r}; "
                "all workers must initialise the same set of keys in one call"
            )
        return True

    def _start(
        self,
        incarnation: int,
        keys: Sequence[KeySpec],
        tables: Sequence[TableSpec],
        plain: bool,
        servers: int,
        spec: OptimizerSpec,
        out: Decisions,
        link_rate: float = 0.0,
    ) -> Pending:
        check_new(tables, plain, spec)
        kids = {one.key: self._next(1) for one in keys if one.same_as is None}
        entries = [
            KeyEntry(kids[one.key if one.same_as is None else one.same_as], one) for one in keys
        ]
        blocks = self._planned(entries, plain, servers, spec, link_rate)
        placed, parts = placed_tables(
            [(self._next(1), one) for one in tables],
            self._counts[2] + len(blocks),
            self.placement,
            servers,
            self._names(),
            self.closed(),
        )
        blocks += parts
        size = len(encode((entries, blocks, placed)))
        if size > PACKET_BYTES_MAX:
            raise KeyMismatch(
                f"an init of {len(keys)} keys needs {size} bytes to describe, and a message has at "
                f"most {PACKET_BYTES_MAX}; initialise them in several calls"
            )
        self._next(2, len(blocks))
        pending = Pending(
            init=self._next(0) + 1,
            incarnation=incarnation,
            specs={one.key: one for one in keys} | {one.key: one for one in tables},
            order=list(keys),
            plain=plain,
            entries=entries,
            blocks=blocks,
            missing={block.server for block in blocks},
            tables=placed,
        )
        self.pending[pending.init] = pending
        self._specs.update(pending.specs)
        self._sets.update(dict.fromkeys(pending.specs, frozenset(pending.specs)))
        out.log(c.Init(pending.init, incarnation, entries, blocks, plain, placed))
        out.tell(incarnation, c.Layout(pending.init, entries, blocks, True, out.index, placed))
        return pending

    def _planned(
        self,
        entries: Sequence[KeyEntry],
        plain: bool,
        servers: int,
        spec: OptimizerSpec,
        link_rate: float,
    ) -> list[BlockSpec]:
        """Return the blocks of new keys, and their servers; ConfigError if there is no room."""

        def together(entry: KeyEntry) -> object:
            one = entry.spec
            alone = entry.kid if plain else None
            applied = (one.rule, spec.for_key(one.key), one.reduce, one.allow_nan, one.absent)
            return (*applied, self._coding.apart(one), alone)

        total = _total_bytes([entry.spec for entry in entries])
        measured = self._block_bytes or block_bytes_on(link_rate, total)

        def block_bytes(entry: KeyEntry) -> int:
            # What a codec makes of a block depends on its borders: they are the same in each run.
            if not self._coding.is_dense(entry.spec):
                return self._block_bytes or BLOCK_BYTES
            itemsize = DTYPES[entry.spec.dtype].itemsize
            size, most = size_of(entry.spec), max(1, measured // itemsize)
            cut = self.pieces(-(-size // most))
            return -(-size // cut) * itemsize if cut else measured

        def bucket_bytes(entry: KeyEntry) -> int:
            if self._block_bytes or not self._coding.is_dense(entry.spec):
                return BUCKET_BYTES
            return bucket_bytes_on(link_rate, total)

        loads = self._loads(entries)
        return plan(
            entries,
            servers,
            together=together,
            bid_first=self._counts[2],
            block_bytes=block_bytes,
            bucket_bytes=bucket_bytes,
            placement=self.placement,
            names=self._names(),
            held=self._held(servers, loads),
            loads=loads,
        )

    def _loads(self, entries: Sequence[KeyEntry]) -> dict[int, float] | None:
        """Return the load of each key, those of `entries` included; None if it is its bytes."""
        if not isinstance(self.placement.rule, ByLoad):
            return None
        started = [entry for one in self.pending.values() for entry in one.entries]
        every = [*self.layout.entries.values(), *started, *entries]
        return key_loads(
            self.placement,
            [
                (one.kid, one.spec.key, _bytes(one.spec))
                for one in every
                if one.spec.same_as is None
            ],
        )

    def _held(self, servers: int, loads: Mapping[int, float] | None) -> list[Share]:
        """Return what each server holds; under caps with what is on its way to it."""
        shares = empty(servers, self.closed())
        layouts = [self.layout]
        for one in self.pending.values() if self.placement.caps else ():
            layouts.append(Layout())
            layouts[-1].add(one.entries, one.blocks)
        for layout in layouts:
            sizes = {kid: size_of(entry.spec) for kid, entry in layout.entries.items()}
            for block in layout.blocks.values():
                share, nbytes = shares[block.server], layout.block_bytes(block)
                share.blocks += 1
                share.nbytes += nbytes
                share.load += (
                    nbytes if loads is None else segments_load(block.segments, loads, sizes)
                )
        return shares

    def held(self, init: int, server: int) -> Pending | None:
        """A server holds its part of the values; return the initialisation if that completes it."""
        pending = self.pending.get(init)
        if pending is None:
            return None
        pending.missing.discard(server)
        if pending.missing:
            return None
        del self.pending[init]
        return pending

    def complete(self, pending: Pending, index: int) -> c.Layout:
        """Take the keys into the layout; return what the workers are told."""
        tables = pending.tables
        self.layout.add(pending.entries, pending.blocks, tables=tables)
        told = c.Layout(pending.init, pending.entries, pending.blocks, False, index, tables)
        self.history.append(told)
        return told

    def lost(
        self, incarnation: int, servers: int, spec: OptimizerSpec, out: Decisions
    ) -> list[Pending]:
        """A worker is gone: drop what it was initialising and ask the next one; return what
        restarted."""
        restarted = []
        for pending in list(self.pending.values()):
            pending.waiting = [one for one in pending.waiting if one[0] != incarnation]
            if pending.incarnation != incarnation:
                continue
            out.log(c.Drop(pending.init))
            del self.pending[pending.init]
            for key in pending.specs:
                del self._specs[key], self._sets[key]
            if pending.waiting:
                try:
                    again = self._start(
                        pending.waiting[0][0],
                        pending.order,
                        [entry.spec for entry in pending.tables],
                        pending.plain,
                        servers,
                        spec,
                        out,
                    )
                except ConfigError as error:
                    # Others have taken the room meanwhile, as those that wait have to be told.
                    for other, token in pending.waiting:
                        out.tell(other, c.Refusal(token, code_of(error), str(error)[:4000]))
                    continue
                again.waiting = pending.waiting
                restarted.append(again)
        return restarted


def _total_bytes(keys: Sequence[KeySpec]) -> int:
    return sum(_bytes(one) for one in keys if one.same_as is None)


def _bytes(one: KeySpec) -> int:
    return size_of(one) * DTYPES[one.dtype].itemsize


def _check_tie(one: KeySpec, owner: KeySpec | None) -> None:
    if owner is None or owner.same_as is not None:
        raise KeyMismatch(
            f"key {one.key!r} is tied to {one.same_as!r}, which is no key of this init"
        )
    if (one.shape, one.dtype) != (owner.shape, owner.dtype):
        raise KeyMismatch(
            f"key {one.key!r} ({one.dtype}, shape {tuple(one.shape)}) is tied to {owner.key!r} "
            f"({owner.dtype}, shape {tuple(owner.shape)}); a tie is another name of one array"
        )
