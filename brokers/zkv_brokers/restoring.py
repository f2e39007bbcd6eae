"""A run that begins from a snapshot: keys, versions, clocks and samples are those of the snapshot.

Blocks get servers anew, as there may be more or fewer; their borders stay, since codecs remember
what they have done to a block. Each server is told by the log to take its blocks out of the
snapshot's files (`Restore`), and nobody is granted anything before all have them: until then the
keys are as any others whose first values are on their way. Pure. Part of the router.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zkv import control as c
from zkv import snapshot as sn
from zkv.optimizer_spec import OptimizerSpec
from zkv.placement import placed_again
from zkv.policy import policy
from zkv.pool import Pool, Remaining, Shard
from zkv.wire import MODEL, BlockSpec, KeySpec, TableSpec
from zkv.wishes import Wishes
from zkv_brokers import offers
from zkv_brokers.catalog import Pending
from zkv_brokers.config import RouterConfig
from zkv_brokers.decisions import Decisions
from zkv_brokers.members import Server, Worker

if TYPE_CHECKING:
    from zkv_brokers.router import Router


def manifest_in(config: RouterConfig) -> sn.Manifest | None:
    """Return the manifest of the snapshot that a broker begins from; None: it begins from nothing.

    Raises:
        BadSnapshot: it is none.
    """
    if not config.restored:
        return None
    return sn.decode(config.restored.encode(), f"{config.restored_from}/{sn.MANIFEST}")


def as_restored(config: RouterConfig) -> RouterConfig:
    """Return a configuration with the settings that were in force in its snapshot, if it has one.

    Raises:
        BadSnapshot: it is none.
    """
    manifest = manifest_in(config)
    if manifest is None:
        return config
    there = manifest.settings
    return replace(
        config,
        policy=policy(there.policy),
        staleness=there.staleness,
        codec=there.codec,
        codec_down=there.codec_down,
        topology=there.topology,
    )


class Restoring:
    """What a router takes over of a snapshot; of none, nothing."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.manifest = manifest_in(router.config)
        self._begun = False
        self._missing: set[int] = set()
        """Servers that do not hold their part yet."""
        self._groups: dict[int, sn.GroupState] = {}
        """By key; that of the model by `MODEL` alone."""
        if self.manifest is not None:
            self._take_over(self.manifest)

    def _take_over(self, manifest: sn.Manifest) -> None:
        router, there = self._router, manifest.settings
        router.model_spec = OptimizerSpec.from_plain(there.optimizer)
        router.plain_spec = OptimizerSpec.from_plain(there.plain)
        for group in manifest.groups:
            kids = [-1] if group.group == MODEL else group.kids
            self._groups.update(dict.fromkeys(kids, group))
        if manifest.pool is not None:
            router.groups.draws.pool = _pool(manifest.pool)
        router.catalog.take_over(_specs(manifest), manifest.next_numbers)
        router.groups.begins_at = self._begins_at
        router.hub.note(
            "info",
            f"beginning from snapshot {manifest.name} of version {manifest.version}: policy "
            f"{there.policy}, optimizer {router.model_spec}, codecs {there.codec} up and "
            f"{there.codec_down} down are those of the snapshot",
        )

    def _begins_at(self, number: int) -> tuple[int, dict[int, int]]:
        """Return the version and the clocks (by worker number) that a group begins with."""
        kids = [-1] if number == MODEL else self._router.layout.kids_in(number)
        group = self._groups.get(kids[0]) if kids else None
        return (0, {}) if group is None else (group.version, dict(group.clocks))

    def is_plain(self, kid: int) -> bool:
        """Return whether a key was no part of the model."""
        return kid in self._groups

    def state_of(self, worker: Worker) -> c.StateAt | None:
        """Return where a worker's own state is; None: there was no such worker, or it comes back to
        a run that has gone on since."""
        model = self._router.groups.model
        if self.manifest is None or (model is not None and model.under_way):
            return None
        there = {one.number: one for one in self.manifest.workers}
        one = None if worker.hello.observer else there.get(worker.number)
        if one is None:
            return None
        url, name = self._router.config.restored_from, self.manifest.name
        if one.part is None:
            return c.StateAt(url, name, lost=one.lost[:4000] or "it was not written")
        return c.StateAt(url, name, one.part.file, one.part.nbytes, one.part.sha256)

    def look(self, out: Decisions) -> None:
        """Have servers take their parts, once all are here."""
        router = self._router
        if self.manifest is None or self._begun or not router.members.complete:
            return
        self._begun = True
        blocks = self._placed(self.manifest)
        for init in self.manifest.inits:
            self._begin(init, blocks, out)
        versions = [(MODEL, self._begins_at(MODEL)[0])]
        checksum = sn.decode_checksum(router.config.restored.encode())
        url, name = router.config.restored_from, self.manifest.name
        out.log(c.Restore(url, name, checksum, versions))
        self._missing = {block.server for block in blocks.values()}

    def _placed(self, manifest: sn.Manifest) -> dict[int, BlockSpec]:
        """Return the blocks with their new servers, by number."""
        router = self._router
        placement, names = router.catalog.placement, router.members.names()
        count = router.members.places
        entries = [entry for init in manifest.inits for entry in init.keys]
        keys = [block for block in manifest.blocks if block.segments]
        found = placed_again(keys, entries, count, placement, names)
        tables = [entry for init in manifest.inits for entry in init.tables]
        wishes = Wishes(placement, count, [one.spec.key for one in tables], names)
        for entry in tables:
            pin = wishes.pin(entry.spec.key)
            for part, bid in enumerate(entry.bids):
                found.append(BlockSpec(bid, part % count if pin is None else pin, []))
        return {block.bid: block for block in found}

    def _begin(self, init: sn.Init, blocks: dict[int, BlockSpec], out: Decisions) -> None:
        """Keys that were initialised together are on their way to the servers."""
        kids = {entry.kid for entry in init.keys}
        mine = [one for one in blocks.values() if kids & set(one.kids)]
        mine += [blocks[bid] for entry in init.tables for bid in entry.bids]
        pending = Pending(
            init=init.init,
            incarnation=0,
            specs=_specs_of(init),
            order=[entry.spec for entry in init.keys],
            plain=False,
            entries=init.keys,
            blocks=sorted(mine, key=lambda block: block.bid),
            missing=set(),
            tables=tuple(init.tables),
        )
        self._router.catalog.pending[init.init] = pending
        out.log(c.Init(init.init, 0, init.keys, pending.blocks, False, pending.tables))

    def restored(self, server: Server, message: c.Restored, out: Decisions) -> None:
        """A server holds its part, or cannot."""
        rolling = self._router.rolling
        if message.why:
            if not rolling.unusable(server, message.why):
                self._router.fail("BadSnapshot", "; before that, ".join(rolling.problems[::-1]))
            return
        if server.index not in self._missing:
            return
        self._missing.discard(server.index)
        if self._missing or self.manifest is None:
            return
        pending = self._router.catalog.pending
        done = [pending.pop(init.init) for init in self.manifest.inits]
        for one in done:
            offers.seeded(self._router, one, out)
        self._router.hub.note("info", f"all servers hold their part of {self.manifest.name}")
        rolling.done()


def _specs_of(init: sn.Init) -> dict[str | int, KeySpec | TableSpec]:
    keys: dict[str | int, KeySpec | TableSpec] = {one.spec.key: one.spec for one in init.keys}
    return keys | {one.spec.key: one.spec for one in init.tables}


def _specs(manifest: sn.Manifest) -> list[dict[str | int, KeySpec | TableSpec]]:
    return [_specs_of(init) for init in manifest.inits]


def _pool(state: sn.PoolState) -> Pool:
    shard = Shard(state.n, state.seed, state.size, state.passes or None, state.retry)
    left = Remaining(
        state.pass_number,
        state.fresh,
        tuple(state.back),
        tuple(state.settled),
        tuple(state.shares),
    )
    return Pool.of(shard, left)
