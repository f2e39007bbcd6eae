"""The books of one worker's codecs: what they have saved and cost, by block and by key."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from zkv import control as c
from zkv.layout import Layout
from zkv_workers.choosing import Unit
from zkv_workers.memories import Memories

EVERY_S, SHARE = 1.0, 0.02
"""How often the broker is told; less often if putting the books together takes a larger share."""


@dataclass(slots=True)
class Account:
    """What encoding one block has saved and cost."""

    codec: str = "none"
    """The one in use."""
    bytes_before: int = 0
    bytes_after: int = 0
    encode_s: float = 0.0
    unit: Unit | None = None
    """What the codec is chosen with, if by measurement."""

    def add(self, codec: str, before: int, after: int, encode_s: float) -> None:
        """Note one encoding."""
        self.codec = codec
        self.bytes_before += before
        self.bytes_after += after
        self.encode_s += encode_s


@dataclass(slots=True)
class Accounts:
    """By block; those that were never encoded have none."""

    memories: Memories
    by_block: dict[int, Account] = field(default_factory=dict)
    _next: float = 0.0

    def of(self, bid: int) -> Account:
        """Return a block's account."""
        return self.by_block.setdefault(bid, Account())

    def report(self, layout: Layout) -> dict[str | int, dict[str, float | str]]:
        """Return, for each key that codecs have encoded: bytes before and after, seconds, and the
        norm of what is remembered. Of a block of several keys, each has its part by elements."""
        return {
            layout.entries[kid].spec.key: {
                "codec": one.codec,
                "bytes_before": one.before,
                "bytes_after": one.after,
                "encode_s": one.encode_s,
                "residual_norm": one.residual_norm,
                "why": one.why,
            }
            for kid, one in self._by_key(layout).items()
        }

    def due(self, layout: Layout) -> list[c.Account]:
        """Return what the broker is to be told now: nothing, if it was told a short while ago."""
        now = time.monotonic()
        if not self.by_block or now < self._next:
            return []
        found = self.latest(layout)
        spent_s = time.monotonic() - now
        self._next = now + spent_s + max(EVERY_S, spent_s / SHARE)
        return found

    def latest(self, layout: Layout) -> list[c.Account]:
        """Return the accounts of the keys of most bytes, `KEYS_TOLD_MAX` of them."""
        found = sorted(self._by_key(layout).values(), key=lambda one: -one.before)
        return found[: c.KEYS_TOLD_MAX]

    def _by_key(self, layout: Layout) -> dict[int, c.Account]:
        blocks = {bid: one for bid, one in self.by_block.items() if bid in layout.blocks}
        last = {kid: one for bid, one in blocks.items() for kid in layout.blocks[bid].kids}
        before = layout.spread({bid: one.bytes_before for bid, one in blocks.items()})
        after = layout.spread({bid: one.bytes_after for bid, one in blocks.items()})
        spent_s = layout.spread({bid: one.encode_s for bid, one in blocks.items()})
        kept = layout.spread({bid: self.memories.by_block[bid].square() for bid in blocks})
        return {
            kid: c.Account(
                kid,
                one.codec,
                round(before[kid]),
                round(after[kid]),
                spent_s[kid],
                math.sqrt(kept[kid]),
                "" if one.unit is None else one.unit.why,
            )
            for kid, one in last.items()
        }
