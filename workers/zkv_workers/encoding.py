"""One worker's codecs: blocks of gradients become payloads, and what is cut off is remembered.

What a codec remembers is kept for each block. A contribution that does not count takes its part of
it back (rule 13). Fates are heard on another thread than the one that encodes: they are noted, and
taken in before the next block is encoded. Knows no messages and no sockets.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field, replace

from zkv.data_messages import Form
from zkv.dtypes import DTYPES, Array, widen
from zkv.errors import PushRefused
from zkv.layout import Layout
from zkv.wire import BlockSpec
from zkv_codecs.backend import Backend, fastest
from zkv_codecs.feedback import Codec
from zkv_codecs.frames import to_payload
from zkv_codecs.packed import State, dense, seed_of
from zkv_codecs.plan import NONE, Plan, plan
from zkv_workers import devices

LARGEST = 1e37
"""Above it sums with a residual, or what a codec makes of them, may be infinite."""
SUMS = ("bytes_before", "bytes_after", "encode_s", "residual_square")


@dataclass(slots=True)
class _Memory:
    """What is remembered for one block, and by which codec."""

    codec: Codec
    state: State
    owed: Array | None = None
    """What an earlier codec kept back: added to the next block."""
    home: int = devices.HOST
    """Where all of it lies, and what its steps keep: where the last block was given."""

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

    def moved(self, move: devices.Move) -> _Step:
        """Return the same step in another place."""
        old, new = tuple(map(move, self.old)), tuple(map(move, self.new))
        return replace(self, old=old, new=new, owed=move(self.owed))


@dataclass(slots=True)
class Account:
    """What encoding one block has saved and cost."""

    codec: str = "none"
    """The one in use."""
    bytes_before: int = 0
    bytes_after: int = 0
    encode_s: float = 0.0


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
    _plan: Plan = field(default_factory=Plan)
    _codecs: dict[int, tuple[BlockSpec, Codec]] = field(default_factory=dict)
    """By block, with the keys that it had then: one of them may move out."""
    _memories: dict[int, _Memory] = field(default_factory=dict)
    _steps: dict[int, list[_Step]] = field(default_factory=dict)
    """By batch."""
    _fates: deque[tuple[int, bool]] = field(default_factory=deque)

    def use(self, text: str, down: str = "none") -> None:
        """Encode with this plan from now on, and compile what it needs, and what `down` does."""
        if down != self.down:
            plan(down).warm(self.backend)
            self.down = down
        if text != self.text:
            chosen = plan(text)
            chosen.warm(self.backend)
            self._plan, self.text = chosen, text
            self._codecs.clear()

    def _codec(self, layout: Layout, block: BlockSpec) -> Codec:
        """Return the codec of a block: found once, as a bucket may have thousands of keys."""
        known = self._codecs.get(block.bid)
        if known is None or known[0] is not block:
            known = self._codecs[block.bid] = (block, self._plan.for_block(layout, block))
        return known[1]

    def settled(self, batch: int, *, counted: bool) -> None:
        """Say what became of a batch; may be called from any thread."""
        self._fates.append((batch, counted))

    def _hear(self) -> None:
        while self._fates:
            batch, counted = self._fates.popleft()
            for step in () if counted else reversed(self._steps.get(batch, ())):
                memory = self._memories[step.bid]
                with devices.working(memory.home):
                    self._take_back(memory, step)
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

    def _bring(self, bid: int, memory: _Memory, where: int) -> None:
        """Bring all that is remembered for a block to where the block is now."""
        if memory.home == where:
            return
        move, memory.home = devices.Move(where), where
        memory.state, memory.owed = tuple(map(move, memory.state)), move(memory.owed)
        for steps in self._steps.values():
            steps[:] = [step.moved(move) if step.bid == bid else step for step in steps]

    def on_device(self, layout: Layout, kid: int) -> bool:
        """Return whether a key's gradient may stay on its device: its codec has kernels there, and
        it shares its blocks with no other key."""
        return all(
            len(block.segments) == 1 and devices.has_kernels(self._codec(layout, block))
            for block in layout.blocks_for([kid])
        )

    def admit(self, layout: Layout, kid: int, values: Array) -> Array | None:
        """Return a key's flat, stored values as they may be sent; None: the key is skipped.

        Raises:
            PushRefused: a value is NaN, infinite or above 1e37, the codec is lossy, and the plan
                says "raise".
        """
        blocks = layout.blocks_for([kid])
        codec = next((c for b in blocks if (c := self._codec(layout, b)).lossy), None)
        dtype = DTYPES[layout.entries[kid].spec.dtype]
        if codec is None or devices.sendable(widen(values, dtype), LARGEST):
            return values
        if self._plan.nonfinite == "skip":
            return None
        wide, xp = widen(values, dtype), devices.module_of(values)
        bad = ~(xp.abs(wide) <= LARGEST)
        if self._plan.nonfinite == "zero":
            admitted: Array = xp.where(bad, values.dtype.type(0), values)
            return admitted
        at = int(bad.argmax())
        value = float(wide[at])
        raise PushRefused(
            f"key {layout.entries[kid].spec.key!r}: element {at} of the gradient is {value:g}, "
            f"which codec {codec.text} cannot send; put nonfinite=skip or nonfinite=zero into the "
            "codec's plan, or send this key with none"
        )

    def encode(self, layout: Layout, block: BlockSpec, values: Array, batch: int) -> Sealed:
        """Return a block as it travels; `values` are flat and stored, and stay the caller's.

        Of values on a device, the payload is complete when `devices.working` is left.
        """
        self._hear()
        codec = self._codec(layout, block)
        memory = self._memories.get(block.bid)
        if codec == NONE and memory is None:
            return Sealed(devices.own(values, values))
        given = dense(widen(values, layout.dtype(block)))
        given = replace(given, shape=layout.shape(block))
        if memory is None:
            memory = self._memories[block.bid] = _Memory(codec, codec.start(given.shape))
        where = devices.home(values)
        self._bring(block.bid, memory, where)
        if memory.codec != codec:
            memory.owe(memory.codec.carried(memory.state))
            memory.codec, memory.state = codec, devices.started(codec, given.shape, where)
        owed, memory.owed = memory.owed, None
        if owed is not None:
            given = replace(given, values=given.values + owed)
        began = time.perf_counter()
        old, seed = memory.state, seed_of(self.seed, batch, block.bid + 1)
        backend = self.backend if where == devices.HOST else devices.CUDA
        encoded, memory.state = codec.encode(given, old, seed, backend)
        step = _Step(block.bid, codec, old, memory.state, owed)
        self._steps.setdefault(batch, []).append(step)
        form, payload = to_payload(encoded, backend)
        payload = devices.own(payload, values)
        account = self.accounts.setdefault(block.bid, Account())
        account.codec = codec.text
        account.bytes_before += values.nbytes
        account.bytes_after += payload.nbytes
        account.encode_s += time.perf_counter() - began
        return Sealed(payload, encoded.chain.text, form)

    def report(self, layout: Layout) -> dict[str | int, dict[str, float | str]]:
        """Return, for each key that codecs have encoded: bytes before and after, seconds, and the
        norm of what is remembered. Of a block of several keys, each has its part by elements."""
        found: dict[str | int, dict[str, float | str]] = {}
        for bid, account in list(self.accounts.items()):
            block, memory = layout.blocks[bid], self._memories[bid]
            carried = memory.codec.carried(memory.state)
            square = 0.0 if carried is None else devices.square(carried)
            for segment in block.segments:
                part = (segment.stop - segment.start) / max(1, block.size)
                row = found.setdefault(
                    layout.entries[segment.kid].spec.key,
                    {"codec": account.codec, **dict.fromkeys(SUMS, 0.0)},
                )
                of_block = (account.bytes_before, account.bytes_after, account.encode_s, square)
                for name, value in zip(SUMS, of_block, strict=True):
                    row[name] = float(row[name]) + value * part
        for row in found.values():
            row["residual_norm"] = math.sqrt(float(row.pop("residual_square")))
        return found
