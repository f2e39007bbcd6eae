"""Tables that workers offer: may they be made, and on which servers do their rows lie? Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from typing import Any

from msgspec import structs

from zkv.errors import ConfigError, KeyMismatch
from zkv.layout import Layout, check_key
from zkv.optimizer_spec import OptimizerSpec, optimizer
from zkv.placements import Placement
from zkv.row_rules import check_rule
from zkv.tables import problem_of
from zkv.wire import BlockSpec, TableEntry, TableSpec
from zkv.wishes import Wishes
from zkv_brokers.members import Server


def checked_tables(
    offered: Sequence[TableSpec], keys: Collection[str | int]
) -> dict[str | int, TableSpec]:
    """Return the tables of an init by name; `keys` are the names of its keys.

    Raises:
        KeyMismatch: one cannot be made so, or a name stands twice.
    """
    found: dict[str | int, TableSpec] = {}
    for one in offered:
        try:
            check_key(one.key)
            problem = problem_of(one)
            if problem:
                raise ValueError(f"table {one.key!r}: {problem}")
        except (TypeError, ValueError) as error:
            raise KeyMismatch(str(error)) from error
        if one.key in found or one.key in keys:
            raise KeyMismatch(f"key {one.key!r} stands twice in one init")
        found[one.key] = one
    return found


def check_new(tables: Sequence[TableSpec], plain: bool, model: OptimizerSpec) -> None:
    """Check that tables may be made now, in a model with this optimizer.

    Raises:
        KeyMismatch: they came with keys that are no part of the model, or after its first batch; or
            their rule is none for tables.
    """
    if tables and plain:
        raise KeyMismatch(
            f"table {tables[0].key!r}: tables are part of the model: they are initialised before "
            "its first batch, not with plain=True"
        )
    for one in tables:
        try:
            check_rule(one.key, optimizer(one.rule) if one.rule else model)
        except ValueError as error:
            raise KeyMismatch(str(error)) from error


def placed_tables(
    tables: Sequence[tuple[int, TableSpec]],
    bid_first: int,
    placement: Placement,
    servers: int,
    names: Sequence[str],
    closed: Set[int] = frozenset(),
) -> tuple[tuple[TableEntry, ...], list[BlockSpec]]:
    """Return numbered tables with the numbers of their blocks, from `bid_first` on, and the blocks.

    A table has a part on each server but for those of the numbers `closed`, in their order, or only
    one on the server that it is pinned to. How large the parts will be is not known: of many rows
    each has nearly as many.

    Raises:
        ConfigError: a pin names no server, or one that takes nothing.
    """
    entries: list[TableEntry] = []
    blocks: list[BlockSpec] = []
    wishes = Wishes(placement, servers, [spec.key for _, spec in tables], names) if tables else None
    for kid, spec in tables:
        pin = None if wishes is None else wishes.pin(spec.key)
        first = bid_first + len(blocks)
        here = [at for at in range(servers) if at not in closed]
        own = [BlockSpec(first + at, server, []) for at, server in enumerate(here)]
        if pin in closed:
            raise ConfigError(
                f"{placement.named}: table {spec.key!r} is pinned to server {pin}, which has left "
                "or is drained; pin it to another one"
            )
        if pin is not None:
            own = [BlockSpec(first, pin, [])]
        entries.append(TableEntry(kid, spec, [block.bid for block in own]))
        blocks += own
    return tuple(entries), blocks


def tables_in_words(layout: Layout, servers: Iterable[Server]) -> list[dict[str, Any]]:
    """Return the status's part on tables: what each is, on which servers, and how many rows (and
    their bytes, state included) these have told of last."""
    told = [one for server in servers for one in server.rows]
    return [
        {
            **structs.asdict(entry.spec),
            "servers": [layout.blocks[bid].server for bid in entry.bids],
            "rows_held": sum(rows for kid, rows, _ in told if kid == entry.kid),
            "bytes_held": sum(nbytes for kid, _, nbytes in told if kid == entry.kid),
        }
        for entry in layout.tables.entries.values()
    ]
