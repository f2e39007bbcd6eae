"""What a snapshot's manifest says of the broker's own state at its place in the log. Pure.

A contribution that has not become an update is none in a snapshot: its worker's clock does not
count it, and its samples are dealt out again.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from zkv import control as c
from zkv import snapshot as sn
from zkv.version import VERSION
from zkv.wire import MODEL
from zkv_brokers.group import Group

if TYPE_CHECKING:
    from zkv_brokers.router import Router


def manifest_of(router: Router, name: str, index: int) -> sn.Manifest:
    """Return the manifest of a snapshot that is cut here, without files and the time."""
    groups, layout = router.groups, router.layout
    inits = [
        sn.Init(told.init, told.keys, list(told.tables))
        for told in router.catalog.history
        if isinstance(told, c.Layout)
    ]
    numbers = sorted({MODEL, *groups.by_number} if layout.has_model else groups.by_number)
    return sn.Manifest(
        format=sn.FORMAT,
        zkv=VERSION,
        name=name,
        at=0.0,
        version=groups.version,
        term=router.members.term,
        index=index,
        settings=settings_of(router),
        inits=inits,
        blocks=[block for _, block in sorted(layout.blocks.items())],
        groups=[_group(router, number) for number in numbers],
        pool=_pool(router),
        next_numbers=router.catalog.next_numbers(),
        workers=[
            sn.WorkerState(worker.number, worker.hello.name, clocks_of(groups.model, worker.number))
            for worker in router.members.training()
        ],
        servers=[],
    )


def settings_of(router: Router) -> sn.Settings:
    """Return the settings in force."""
    return sn.Settings(
        policy=str(router.policy),
        optimizer=router.model_spec.to_plain(),
        plain=router.plain_spec.to_plain(),
        staleness=str(router.staleness),
        codec=router.coding.up.text,
        codec_down=router.coding.down.text,
        topology=str(router.topology),
    )


def owners_of(manifest: sn.Manifest) -> set[int]:
    """Return the servers that have something to write."""
    return {block.server for block in manifest.blocks}


def clocks_of(group: Group | None, number: int) -> int:
    """Return how many batches of a worker have become part of an update, or were refused."""
    if group is None or number not in group.sync.clocks:
        return 0
    waits = Counter(one.worker for one in group.sync.pending)
    return max(0, group.sync.clocks[number] - waits[number])


def _group(router: Router, number: int) -> sn.GroupState:
    group = router.groups.by_number.get(number)
    version = router.groups.version if group is None else group.version
    # Who has not come back since the snapshot that the run began from has its clock of then.
    clocks = dict(router.groups.begins_at(number)[1])
    if group is not None:
        clocks |= {worker: clocks_of(group, worker) for worker in group.sync.clocks}
    kids = router.layout.kids_in(number)
    return sn.GroupState(number, kids, version, sorted(clocks.items()))


def _pool(router: Router) -> sn.PoolState | None:
    pool = router.groups.draws.pool
    if pool is None:
        return None
    shard, left = pool.shard, pool.remaining()
    return sn.PoolState(
        n=shard.n,
        seed=shard.seed,
        size=shard.size,
        passes=shard.passes or 0,
        retry=shard.retry,
        pass_number=left.pass_number,
        fresh=left.fresh,
        back=list(left.back),
        settled=list(left.settled),
        shares=list(left.shares),
    )
