"""What a shard does when a key leaves its group, or a grant does not count, and what it tells of
itself. Part of the shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zkv import control as c
from zkv.errors import ProtocolError
from zkv.wire import MODEL, NO_BATCH, PULLS, SEEDS, ContributionId
from zkv_brokers.contributions import Open
from zkv_brokers.guards import Problem
from zkv_brokers.shortage import check_room

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


def keep_only(shard: Shard, entry: c.Epoch) -> None:
    """Others are members now: drop what those that are gone left behind, but for what counts."""
    shard.members, kept = set(entry.members), set(entry.kept)
    shard.contributions.keep_only(shard.members, kept)
    shard.grants.keep_only(shard.members)
    shard.tables.keep_only(shard.members)
    shard.commits.bases.keep_only(shard.members | {name.incarnation for name in kept})


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


def opened(shard: Shard, name: ContributionId, grant: int) -> Open:
    """Return the open contribution, if it is to something that is here to contribute to.

    Raises:
        ProtocolError: it is not; or its worker has more open than an honest one comes to.
        MemoryError: these are first values for which there is no room.
    """
    if name.group == SEEDS:
        entry = shard.inits.get(name.batch)
        mine = entry is not None and entry.incarnation == name.incarnation
        if not mine or grant != name.batch:
            raise ProtocolError(
                f"incarnation {name.incarnation} sent values of initialisation {name.batch}, "
                "which it was not asked for"
            )
        if name not in shard.contributions.open:
            check_room(shard.store, shard.seed_bids[name.batch])
    elif name.group not in shard.groups:
        raise ProtocolError(
            f"incarnation {name.incarnation} pushed to group {name.group}, "
            f"which server {shard.number} does not know"
        )
    return shard.contributions.at(name, grant)


def no_block(server: int, name: ContributionId, bid: int) -> Problem:
    """Return why a block of a contribution is refused that this server does not hold."""
    of = "this initialisation" if name.group == SEEDS else f"group {name.group}"
    return "?", f"server {server} holds no block {bid} of {of}"
