"""What grants were given on, kept for delay compensation until the contribution is settled.

The values stay pinned, so that a commit writes elsewhere; the price is one more copy of the shard
for each worker whose gradient is on its way. Knows no sockets.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from zkv.dtypes import Array
from zkv_brokers.store import Pinned


class Bases:
    """Pinned blocks by (incarnation, grant)."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Mapping[int, Pinned]] = {}

    def add(self, incarnation: int, grant: int, blocks: Mapping[int, Pinned]) -> None:
        """Keep these blocks as they are now."""
        for pinned in blocks.values():
            pinned.pins += 1
        self._kept[incarnation, grant] = blocks

    def values(self, incarnation: int, grant: int, bid: int) -> Array | None:
        """Return a block as it was granted (flat, stored dtype); None if it is not kept."""
        kept = self._kept.get((incarnation, grant), {})
        return kept[bid].values if bid in kept else None

    def of_block(self, bid: int) -> list[tuple[tuple[int, int], Pinned]]:
        """Return ((incarnation, grant), block) of all that is kept of one block."""
        return [(name, kept[bid]) for name, kept in self._kept.items() if bid in kept]

    def join(self, bid: int, others: Bases) -> None:
        """Keep beside the rest what others have kept of one block."""
        for name, pinned in others.of_block(bid):
            pinned.pins += 1
            self._kept[name] = {**self._kept.get(name, {}), bid: pinned}

    def release(self, incarnation: int, grant: int) -> None:
        """The contribution under this grant is settled."""
        for pinned in self._kept.pop((incarnation, grant), {}).values():
            pinned.pins -= 1

    def keep_only(self, incarnations: Set[int]) -> None:
        """Release what was granted to others."""
        for incarnation, grant in [name for name in self._kept if name[0] not in incarnations]:
            self.release(incarnation, grant)
