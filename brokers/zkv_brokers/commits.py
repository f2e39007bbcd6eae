"""Commits on one server: the log's words turned into shares, square sums and new values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zkv import control as c
from zkv.errors import ProtocolError
from zkv.optim import clip_factor
from zkv.optimizer_spec import OptimizerSpec
from zkv.spans import UPDATES, Spans, flow
from zkv.wire import MODEL, BlockSpec, ContributionId
from zkv_brokers.aggregates import Share
from zkv_brokers.bases import Bases
from zkv_brokers.contributions import Contributions, Open
from zkv_brokers.store import Store
from zkv_brokers.streaming import Streaming, made_of
from zkv_brokers.tables import Tables


class Commits:
    """Applies sets of contributions to this server's blocks."""

    def __init__(
        self, store: Store, contributions: Contributions, spans: Spans | None = None
    ) -> None:
        self.bases = Bases()
        self.spans = spans
        self.streaming = Streaming(store, contributions)
        self.tables = Tables(store)
        self.updates = 0
        """Of the model, since the start; they took `update_s` seconds by the store's clock."""
        self.update_s = 0.0
        self._store = store
        self._contributions = contributions

    def granted(self, entry: c.Grant, blocks: Sequence[BlockSpec]) -> None:
        """Keep what a grant is given on, if delay compensation will ask for it."""
        if entry.group == MODEL and self._store.settings.staleness.compensation:
            pinned = {block.bid: self._store.granted(block, entry.version) for block in blocks}
            self.bases.add(entry.incarnation, entry.grant, pinned)

    def square_sums(self, entry: c.Sum, blocks: Sequence[BlockSpec]) -> list[tuple[int, float]]:
        """Return Σ g² of each block's reduced gradient."""
        rows = self.tables.square_sums(entry, self._contributions.open)
        return rows + [
            (
                block.bid,
                self._store.square_sums(block, self._shares(block, entry), entry.version - 1),
            )
            for block in blocks
        ]

    def held(
        self, names: list[tuple[ContributionId, int]], index: int, blocks: Sequence[BlockSpec]
    ) -> c.Held:
        """Return the report that these are held, with their square sums if norms have a limit."""
        if not self._store.settings.norms:
            return c.Held(names, index)
        return c.Held(names, index, tuple(self._squares(name, blocks) for name, _ in names))

    def _squares(
        self, name: ContributionId, blocks: Sequence[BlockSpec]
    ) -> list[tuple[int, float]]:
        if name.group != MODEL or name not in self._contributions.open:
            return []
        # As if it were all of an update, with a weight of 1: nothing is divided.
        return self.square_sums(c.Sum(MODEL, 1, [c.Counted(name, 1.0)]), blocks)

    def commit(self, entry: c.Commit, blocks: Sequence[BlockSpec]) -> None:
        """Apply the update, and settle its contributions."""
        began = self._store.clock()
        self._traced(entry, blocks)
        if entry.group == MODEL:
            self.updates += 1
            self.update_s += self._store.clock() - began

    def _traced(self, entry: c.Commit, blocks: Sequence[BlockSpec]) -> None:
        if self.spans is None:
            self._commit(entry, blocks)
            return
        flows = [flow(one.contribution, b.bid) for one in entry.counted for b in blocks]
        about = {"group": entry.group, "blocks": len(blocks), "of": len(entry.counted)}
        decoded_s = sum(self._store.decode_s.values())
        with self.spans.timed(UPDATES, f"sum {entry.version}", into=flows, **about) as more:
            more["bytes"] = sum(self._nbytes(one, blocks) for one in entry.counted)
            self._commit(entry, blocks)
            more["decode_s"] = round(sum(self._store.decode_s.values()) - decoded_s, 6)

    def _nbytes(self, one: c.Counted, blocks: Sequence[BlockSpec]) -> int:
        """Return what a contribution's blocks take here."""
        held = self._contributions.open.get(one.contribution)
        payloads = {} if held is None else held.payloads
        return sum(payloads[b.bid].nbytes for b in blocks if b.bid in payloads)

    def _commit(self, entry: c.Commit, blocks: Sequence[BlockSpec]) -> None:
        for block in blocks:
            shares = self._shares(block, entry)
            adopted = self.adopted(block, entry, shares)
            update_block(self._store, block, shares, entry, adopted=adopted)
        if entry.group == MODEL:
            self.tables.commit(entry, self._contributions.open, scale_of(entry))
        for one in entry.counted:
            name = one.contribution
            held = self._contributions.open.get(name)
            # A server without a block of the group holds nothing of it; plain keys have no base.
            if held is not None and entry.group == MODEL:
                self.bases.release(name.incarnation, held.grant)
            self._contributions.settle(name)
        if entry.group == MODEL:
            self.streaming.clear()

    def adopted(self, block: BlockSpec, entry: c.Commit, shares: Sequence[Share]) -> bool:
        """Return whether a block, or a copy, was made ahead of this update, and of just that."""
        if entry.group != MODEL or entry.version != self.streaming.version:
            return False
        counted = zip(entry.counted, shares, strict=True)
        made = tuple(made_of(one.contribution, share, block) for one, share in counted)
        return self.streaming.adopt(block, made)

    def _shares(self, block: BlockSpec, entry: c.Sum | c.Commit) -> list[Share]:
        return shares_in(block.bid, entry, self.counted(entry), self.bases)

    def counted(self, entry: c.Sum | c.Commit) -> list[Open]:
        """Return what is held of the contributions of an update; ProtocolError if one is not."""
        found = []
        for one in entry.counted:
            held = self._contributions.open.get(one.contribution)
            if held is None:
                raise ProtocolError(
                    f"the update to version {entry.version} of group {entry.group} counts "
                    f"{one.contribution}, which is not held here"
                )
            found.append(held)
        return found


def shares_in(
    bid: int, entry: c.Sum | c.Commit, counted: Sequence[Open], bases: Bases
) -> list[Share]:
    """Return what the contributions of an update say of a block."""
    # Staleness is a matter of the model: a plain push is not computed on anything.
    model, shares = entry.group == MODEL, []
    for one, held in zip(entry.counted, counted, strict=True):
        who = one.contribution.incarnation
        base = bases.values(who, held.grant, bid) if model else None
        age = one.staleness if model else 0
        shares.append(Share(one.weight, held.dense(bid), held.skipped, age, base, one.clip))
    return shares


def scale_of(entry: c.Commit) -> Callable[[OptimizerSpec], float]:
    """Return what gives the factor of global-norm clipping of an update, by optimizer."""

    def scale(spec: OptimizerSpec) -> float:
        if entry.square_sum is None or spec.clip_global_norm is None:
            return 1.0
        return clip_factor(entry.square_sum, spec.clip_global_norm)

    return scale


def update_block(
    store: Store,
    block: BlockSpec,
    shares: Sequence[Share],
    entry: c.Commit,
    *,
    adopted: bool = False,
) -> None:
    """Make a block's next version of what is said of it (`adopted`: it is made), and its view."""
    if not adopted and store.commit(block, shares, entry.version - 1, scale_of(entry)):
        store.count(block, shares)
    if entry.group == MODEL:
        store.views.committed(block, store.blocks[block.bid].current.values)
