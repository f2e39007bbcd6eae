"""What a shard does when a key leaves its group, or a grant does not count, and what it tells of
itself. Part of the shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zkv import control as c
from zkv.wire import MODEL, NO_BATCH, PULLS, SEEDS

if TYPE_CHECKING:
    from zkv_brokers.shard import Shard


def regroup(shard: Shard, kid: int, group: int, bid: int) -> None:
    """Move a key into a group of its own; out of a bucket into block `bid`."""
    layout, store = shard.layout, shard.store
    shard.grants.forget_sent()
    store.rules.forget()
    (before, *rest) = layout.blocks_for([kid])
    layout.regroup(kid, group, bid)
    if not rest and bid in layout.blocks and before.server == shard.number:
        store.split_out(kid, before, bid)
    else:
        for block in (before, *rest):
            store.views.drop(block.bid)


def drop(shard: Shard, entry: c.Init) -> None:
    """Forget keys whose first values will not come."""
    kids = [key.kid for key in entry.keys if key.spec.same_as is None]
    tables = [table.kid for table in entry.tables]
    shard.tables.drop(tables)
    for block in shard.layout.blocks_for(kids):
        shard.store.drop(block.bid)
    shard.layout.remove(kids + tables)
    shard.contributions.discard(entry.incarnation, SEEDS, entry.init, NO_BATCH)


def discard(shard: Shard, entry: c.Discard) -> None:
    """Drop what came, or is to go, under a grant that no longer counts, or one batch of it."""
    incarnation, group, grant = entry.incarnation, entry.group, entry.grant
    if group == PULLS:
        shard.tables.free(incarnation, group, grant)
        return
    shard.contributions.discard(incarnation, group, grant, entry.batch)
    if entry.batch != NO_BATCH:
        return
    if not entry.values:
        shard.grants.drop(incarnation, group, grant)
        shard.tables.free(incarnation, group, grant)
    if group == MODEL:
        shard.commits.bases.release(incarnation, grant)


def status_of(shard: Shard) -> dict[str, object]:
    """Return figures for a status report."""
    return {
        "server": shard.number,
        "log_index": shard.index,
        "blocks": len(shard.store.blocks),
        "value_bytes": sum(s.current.values.nbytes for s in shard.store.blocks.values()),
        "open_contributions": len(shard.contributions.open),
        "contribution_bytes": shard.contributions.bytes_held,
        "model_version": shard.versions.get(MODEL, 0),
    }
