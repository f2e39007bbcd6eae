"""Blocks of the next version, made before its update is in the log.

Where the log has said what an update will be made of (`Expect`, the design's rules 5 and 6), each
block is summed and updated as soon as all of these contributions are here for it: into arrays of
its own, which grants of that version send. The update adopts them if it is made of just that, and
else makes the block again. Part of one server's shard; knows no sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from zkv import control as c
from zkv.errors import ProtocolError
from zkv.wire import MODEL, BlockSpec, ContributionId
from zkv_brokers.aggregates import Share
from zkv_brokers.contributions import Contributions, Open
from zkv_brokers.store import BlockState, Store

Made = tuple[tuple[ContributionId, float, bool, frozenset[int]], ...]
"""What a block was made of: contributions, their weights, whether they have it, keys skipped."""


@dataclass(slots=True)
class Streaming:
    """What is known of the model's next update, and the blocks that are made of it."""

    store: Store
    contributions: Contributions
    version: int = 0
    """That the update leads to; 0: nothing is known."""
    expected: list[c.Expected] = field(default_factory=list)
    by_block: dict[int, tuple[Made, BlockState]] = field(default_factory=dict)
    made: int = 0
    """How many blocks were made ahead of their update."""
    adopted: int = 0
    """How many of them were what the update was."""
    copy_of: Callable[[int], Store | None] = lambda bid: None
    """Returns what a live copy of a block is in; None: there is none, the block is in `store`."""
    _names: dict[c.Expected, ContributionId] = field(default_factory=dict)
    """The contributions that are expected, as far as they have begun to come."""

    def expect(self, entry: c.Expect) -> None:
        """The log says what the next update is made of, or (nothing) that it is not known."""
        self.clear()
        if entry.expected:
            self.version, self.expected = entry.version, entry.expected
            for name, held in self.contributions.open.items():
                self.begun(name, held)

    def clear(self) -> None:
        """Nothing is known any more."""
        self.version, self.expected = 0, []
        self.by_block.clear()
        self._names.clear()

    def check_settings(self) -> None:
        """Check that nothing was made with settings that change here.

        Raises:
            ProtocolError: something was; the broker keeps settings back while that may be.
        """
        if self.by_block:
            raise ProtocolError(
                f"settings changed though {len(self.by_block)} blocks of version {self.version} "
                "were made with the old ones: the broker wrote them into the log too early"
            )

    def begun(self, name: ContributionId, held: Open) -> bool:
        """Note a contribution of which something has come; return whether it is expected."""
        one = c.Expected(name.incarnation, held.grant)
        if name.group != MODEL or one not in self.expected:
            return False
        self._names[one] = name
        return True

    def make(
        self, block: BlockSpec, sound: Callable[[ContributionId, BlockSpec], bool]
    ) -> BlockState | None:
        """Return a block as the update will leave it, once, when all that it is made of is here.

        `sound` looks at values that were not looked at yet, and says whether they may count.
        """
        if not self.version or block.bid in self.by_block or not block.segments:
            return None
        found = self._shares(block)
        if found is None:
            return None
        shares, made = found
        state, finite = self._store(block.bid).ahead(block, shares, self.version - 1)
        # A sum of something that is not finite is not, either.
        for name, *_ in made:
            unseen = self.contributions.open[name].unseen
            if block.bid in unseen and not finite and not sound(name, block):
                return None
            unseen.discard(block.bid)
        self.by_block[block.bid] = (made, state)
        self.made += 1
        return state

    def _store(self, bid: int) -> Store:
        return self.copy_of(bid) or self.store

    def _shares(self, block: BlockSpec) -> tuple[list[Share], Made] | None:
        """Return what a block is made of; None: not all of it is here."""
        shares, made = [], []
        for one in self.expected:
            name = self._names.get(one)
            held = None if name is None else self.contributions.open.get(name)
            if name is None or held is None or held.void:
                return None
            share = held.share(block.bid)
            if share is None:
                return None
            shares.append(share)
            made.append(made_of(name, share, block))
        if all(share.payload is None for share in shares):
            return None
        return shares, tuple(made)

    def adopt(self, block: BlockSpec, made: Made) -> bool:
        """Make a block what was made of just these contributions; False: nothing was."""
        known = self.by_block.pop(block.bid, None)
        if known is None or known[0] != made:
            return False
        self._store(block.bid).blocks[block.bid] = known[1]
        self.adopted += 1
        return True


def made_of(
    name: ContributionId, share: Share, block: BlockSpec
) -> tuple[ContributionId, float, bool, frozenset[int]]:
    """Return what one contribution is to a block."""
    # A bucket may have a thousand keys.
    skipped = share.skipped & frozenset(block.kids) if share.skipped else share.skipped
    return name, share.weight, share.payload is not None, skipped
