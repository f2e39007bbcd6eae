"""Figures of one shard, for a status report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zkv.wire import MODEL

if TYPE_CHECKING:
    from zkv_brokers.shard import Shard


def figures(shard: Shard) -> dict[str, object]:
    """Return what a shard holds, in bytes, and how far it has come."""
    return {
        "server": shard.number,
        "log_index": shard.index,
        "blocks": len(shard.store.blocks),
        "value_bytes": sum(s.current.values.nbytes for s in shard.store.blocks.values()),
        "open_contributions": len(shard.contributions.open),
        "contribution_bytes": shard.contributions.bytes_held,
        "model_version": shard.versions.get(MODEL, 0),
    }
