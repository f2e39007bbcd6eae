"""One worker's codecs: blocks of gradients become payloads, and what is cut off is remembered.

What a codec remembers is kept for each block. A contribution that does not count takes its part of
it back (rule 13). Fates are heard on another thread than the one that encodes: they are noted, and
taken in before the next block is encoded. Knows no messages and no sockets.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from zkv import control as c
from zkv.data_messages import Form
from zkv.dtypes import DTYPES, Array, narrow, widen
from zkv.errors import PushRefused
from zkv.layout import Layout
from zkv.wire import BlockSpec
from zkv_codecs.auto import Auto
from zkv_codecs.backend import Backend, fastest
from zkv_codecs.feedback import Codec
from zkv_codecs.frames import to_payload
from zkv_codecs.packed import State, dense, seed_of
from zkv_codecs.plan import NONE, Plan, plan, suited
from zkv_codecs.spec import codec
from zkv_workers.choosing import Chooser, Traffic, Unit

LARGEST = 1e37
"""Above it sums with a residual, or what a codec makes of them, may be infinite."""
REPORT_EVERY_S = 5.0
ACCOUNTS_MAX = 256
"""Keys that the broker is told of, the largest ones."""


@dataclass(slots=True)
class _Memory:
    """What is remembered for one block, and by which codec."""

    codec: Codec
    state: State
    owed: Array | None = None
    """What an earlier codec kept back: added to the next block."""

    def owe(self, more: Array | None) -> None:
        """Add to what is owed."""
        if more is not None:
            self.owed = more if self.owed is None else self.owed + more


@dataclass(frozen=True, slots=True)
class _Step:
    """One encoding, so that it can be taken back."""

    bid: int
    codec: Codec
    old: State
    new: State
    owed: Array | None


@dataclass(slots=True)
class Account:
    """What encoding one block has saved and cost."""

    codec: str = "none"
    """The one in use."""
    bytes_before: int = 0
    bytes_after: int = 0
    encode_s: float = 0.0
    unit: Unit | None = None
    """What it is chosen with, if by measurement."""


@dataclass(frozen=True, slots=True)
class _Way:
    """How a block is encoded: by a codec, or by the one that its unit has at the time."""

    block: BlockSpec
    codec: Codec
    unit: Unit | None = None


@dataclass(frozen=True, slots=True)
class Sealed:
    """A block as it travels: its payload, and the codec and form that tell how to read it."""

    payload: Array
    codec: str = "none"
    form: Form | None = None


@dataclass(slots=True)
class Encoder:
    """Encodes the blocks of one worker's batches; `seed` is the worker's own."""

    seed: int = 0
    backend: Backend = field(default_factory=fastest)
    accounts: dict[int, Account] = field(default_factory=dict)
    """By block; those that were never encoded have none."""
    text: str = "none"
    """Of the plan in use."""
    down: str = "none"
    """Of the plan by which values come: its kernels must not be compiled where they are awaited."""
    traffic: Callable[[], Traffic] | None = None
    """What this worker's links have carried: for `auto`."""
    decoders: float = 1.0
    """Workers over servers: for `auto` too."""
    _plan: Plan = field(default_factory=Plan)
    _chosen: str = ""
    _chooser: Chooser | None = None
    _next_report: float = 0.0
    _ways: dict[int, _Way] = field(default_factory=dict)
    """By block, with the keys that it had then: one of them may move out."""
    _memories: dict[int, _Memory] = field(default_factory=dict)
    _steps: dict[int, list[_Step]] = field(default_factory=dict)
    """By batch."""
    _fates: deque[tuple[int, bool]] = field(default_factory=deque)

    def uses(self, text: str, down: str = "none", chosen: str = "") -> bool:
        """Whether `use` would change nothing."""
        return (text, down, chosen) == (self.text, self.down, self._chosen)

    def use(self, text: str, down: str = "none", chosen: str = "") -> None:
        """Encode with this plan from now on, and compile what it needs, and what `down` does.

        `chosen`: the codec that stands for `bits:...` in the plan at present.
        """
        if down != self.down:
            plan(down).warm(self.backend)
            self.down = down
        if text != self.text:
            made = plan(text)
            made.warm(self.backend)
            self._plan, self.text = made, text
            auto = made.adaptive if isinstance(made.adaptive, Auto) else None
            self._chooser = None if auto is None else Chooser(auto, self.backend)
            self._ways.clear()
        if chosen != self._chosen:
            self._chosen = chosen
            self._ways.clear()

    def begin(self) -> None:
        """A batch begins."""
        if self._chooser is not None and self.traffic is not None:
            self._chooser.decoders = self.decoders
            self._chooser.begin(self.traffic())

    def _way(self, layout: Layout, block: BlockSpec) -> _Way:
        """Return how a block is encoded: found once, as a bucket may have thousands of keys."""
        known = self._ways.get(block.bid)
        if known is None or known.block is not block:
            adapts = self._plan.adapts(layout, block)
            if adapts and self._chooser is not None:
                known = _Way(block, NONE, self._chooser.unit(layout, block))
            elif adapts and self._chosen:
                known = _Way(block, suited(codec(self._chosen), block))
            else:
                known = _Way(block, self._plan.for_block(layout, block))
            self._ways[block.bid] = known
        return known

    def settled(self, batch: int, *, counted: bool) -> None:
        """Say what became of a batch; may be called from any thread."""
        self._fates.append((batch, counted))

    def _hear(self) -> None:
        while self._fates:
            batch, counted = self._fates.popleft()
            for step in () if counted else reversed(self._steps.get(batch, ())):
                self._take_back(self._memories[step.bid], step)
            self._steps.pop(batch, None)

    @staticmethod
    def _take_back(memory: _Memory, step: _Step) -> None:
        memory.owe(step.owed)
        if memory.codec == step.codec:
            memory.state = memory.codec.restore(memory.state, step.old, step.new)
            return
        before, after = step.codec.carried(step.old), step.codec.carried(step.new)
        if before is not None and after is not None:
            memory.owe(before - after)

    def admit(self, layout: Layout, kid: int, values: Array) -> Array | None:
        """Return a key's flat, stored values as they may be sent; None: the key is skipped.

        Raises:
            PushRefused: a value is NaN, infinite or above 1e37, the codec is lossy, and the plan
                says "raise".
        """
        blocks = layout.blocks_for([kid])
        ways = [self._way(layout, block) for block in blocks]
        lossy = next((one for one in ways if one.unit is not None or one.codec.lossy), None)
        dtype = DTYPES[layout.entries[kid].spec.dtype]
        if lossy is None or _sendable(widen(values, dtype)):
            return values
        if self._plan.nonfinite == "skip":
            return None
        wide = widen(values, dtype)
        bad = ~(np.abs(wide) <= LARGEST)
        if self._plan.nonfinite == "zero":
            return narrow(np.where(bad, wide.dtype.type(0), wide), dtype)
        at = int(np.flatnonzero(bad)[0])
        named = lossy.codec.text if lossy.unit is None else self.text
        raise PushRefused(
            f"key {layout.entries[kid].spec.key!r}: element {at} of the gradient is {wide[at]:g}, "
            f"which codec {named} cannot send; put nonfinite=skip or nonfinite=zero into the "
            "codec's plan, or send this key with none"
        )

    def encode(self, layout: Layout, block: BlockSpec, values: Array, batch: int) -> Sealed:
        """Return a block as it travels; `values` are flat and stored, and stay the caller's."""
        self._hear()
        way, memory = self._way(layout, block), self._memories.get(block.bid)
        if way.unit is None and way.codec == NONE and memory is None:
            return Sealed(values.copy())
        given = dense(widen(values, layout.dtype(block)))
        given = replace(given, shape=layout.shape(block))
        codec = way.codec
        if way.unit is not None and self._chooser is not None:
            codec = self._chooser.codec(way.unit, given)
        if memory is None:
            memory = self._memories[block.bid] = _Memory(codec, codec.start(given.shape))
        elif memory.codec != codec:
            memory.owe(memory.codec.carried(memory.state))
            memory.codec, memory.state = codec, codec.start(given.shape)
        owed, memory.owed = memory.owed, None
        if codec == NONE and owed is None:
            self._account(way, codec, values, values.nbytes, 0.0)
            return Sealed(values.copy())
        if owed is not None:
            given = replace(given, values=given.values + owed)
        began = time.perf_counter()
        old, seed = memory.state, seed_of(self.seed, batch, block.bid + 1)
        encoded, memory.state = codec.encode(given, old, seed, self.backend)
        step = _Step(block.bid, codec, old, memory.state, owed)
        self._steps.setdefault(batch, []).append(step)
        form, payload = to_payload(encoded, self.backend)
        if np.may_share_memory(payload, values):
            payload = payload.copy()
        spent_s = time.perf_counter() - began
        self._account(way, codec, values, payload.nbytes, spent_s)
        if way.unit is not None and self._chooser is not None:
            kept = codec.carried(memory.state)
            self._chooser.encoded(way.unit, codec, given, kept, payload.nbytes, spent_s)
        return Sealed(payload, encoded.chain.text, form)

    def _account(self, way: _Way, codec: Codec, values: Array, nbytes: int, spent_s: float) -> None:
        account = self.accounts.setdefault(way.block.bid, Account())
        account.codec, account.unit = codec.text, way.unit
        account.bytes_before += values.nbytes
        account.bytes_after += nbytes
        account.encode_s += spent_s

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
        if not self.accounts or now < self._next_report:
            return []
        self._next_report = now + REPORT_EVERY_S
        return self.latest(layout)

    def latest(self, layout: Layout) -> list[c.Account]:
        """Return the accounts of the keys of most bytes, 256 at most."""
        return sorted(self._by_key(layout).values(), key=lambda one: -one.before)[:ACCOUNTS_MAX]

    def _by_key(self, layout: Layout) -> dict[int, c.Account]:
        sums: dict[int, list[float]] = {}
        last: dict[int, Account] = {}
        for bid, account in list(self.accounts.items()):
            block, memory = layout.blocks[bid], self._memories[bid]
            carried = memory.codec.carried(memory.state)
            square = 0.0 if carried is None else float(np.dot(carried, carried))
            of_block = (account.bytes_before, account.bytes_after, account.encode_s, square)
            for segment in block.segments:
                part = (segment.stop - segment.start) / max(1, block.size)
                row = sums.setdefault(segment.kid, [0.0] * len(of_block))
                for at, value in enumerate(of_block):
                    row[at] += value * part
                last[segment.kid] = account
        return {
            kid: c.Account(
                kid,
                last[kid].codec,
                round(before),
                round(after),
                spent_s,
                math.sqrt(square),
                "" if (unit := last[kid].unit) is None else unit.why,
            )
            for kid, (before, after, spent_s, square) in sums.items()
        }


def _sendable(wide: Array) -> bool:
    """Return whether no element is NaN, infinite or too large; mostly one dot product tells."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(wide, wide)) or (np.abs(wide) <= LARGEST).all())
