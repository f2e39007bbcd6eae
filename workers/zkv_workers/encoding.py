"""One worker's codecs: blocks of gradients become payloads, by a plan that may adapt.

What a codec remembers is kept for each block (`zkv_workers.memories`), and so is what it has saved
and cost (`zkv_workers.accounts`). Knows no messages and no sockets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from zkv import control as c
from zkv.data_messages import Form
from zkv.dtypes import DTYPES, Array, widen
from zkv.errors import PushRefused
from zkv.layout import Layout
from zkv.wire import BlockSpec
from zkv_codecs.auto import Auto
from zkv_codecs.backend import Backend, fastest
from zkv_codecs.feedback import Codec
from zkv_codecs.frames import to_payload
from zkv_codecs.packed import dense, seed_of
from zkv_codecs.plan import NONE, Plan, plan, suited
from zkv_codecs.spec import codec
from zkv_net.spares import Spares
from zkv_workers import devices
from zkv_workers.accounts import Accounts
from zkv_workers.buffers import Buffers
from zkv_workers.choosing import Chooser, Traffic, Unit
from zkv_workers.keeper import Keeper
from zkv_workers.memories import Memories, Step

LONG = 2**16
"""Elements: fewer are encoded in less time than it takes to hand them to another thread."""
LARGEST = 1e37
"""Above it sums with a residual, or what a codec makes of them, may be infinite."""


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
    memories: Memories = field(default_factory=Memories)
    accounts: Accounts = field(init=False)
    keeper: Keeper = field(init=False)
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
    _ways: dict[int, _Way] = field(default_factory=dict)
    """By block, with the keys that it had then: one of them may move out."""
    spares: Spares = field(default_factory=Spares)
    """Where blocks lie that are sent as they are."""
    buffers: Buffers = field(default_factory=lambda: Buffers(np.empty, lambda array: False))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Two blocks of a batch may be encoded on two threads; one after the other."""

    def __post_init__(self) -> None:
        self.accounts = Accounts(self.memories)
        self.keeper = Keeper(self.memories)

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

    def report(self, layout: Layout) -> dict[str | int, dict[str, float | str]]:
        """Return what codecs have saved and cost, by key (see `Accounts.report`)."""
        with self._lock:
            return self.accounts.report(layout)

    def to_tell(self, layout: Layout, *, now: bool = False) -> list[c.Account]:
        """Return what the broker is to be told, `now` or if it is time."""
        with self._lock:
            return self.accounts.latest(layout) if now else self.accounts.due(layout)

    def restart(self) -> None:
        """Begin anew, as the run has gone back to a snapshot: nothing is being encoded."""
        with self._lock:
            self.memories.clear()
            self.keeper.restart()
            self.text, self._plan, self._chosen, self._chooser = "none", Plan(), "", None
            self._ways.clear()

    def settled(self, batch: int, *, counted: bool) -> None:
        """Say what became of a batch; may be called from any thread."""
        self.memories.settled(batch, counted=counted)

    def on_device(self, layout: Layout, kid: int) -> bool:
        """Return whether a key's gradient may stay on its device: its codec has kernels there, and
        it shares its blocks with no other key. What `auto` measures, it measures on the host."""
        ways = [self._way(layout, block) for block in layout.blocks_with(kid)]
        return all(
            len(one.block.segments) == 1 and one.unit is None and devices.has_kernels(one.codec)
            for one in ways
        )

    def admit(self, layout: Layout, kid: int, values: Array, first: int = 0) -> Array | None:
        """Return a key's flat, stored values as they may be sent; None: the key is skipped.

        `first`: the place of their first in the key.

        Raises:
            PushRefused: a value is NaN, infinite or above 1e37, the codec is lossy, and the plan
                says "raise".
        """
        blocks = layout.blocks_with(kid)
        ways = [self._way(layout, block) for block in blocks]
        lossy = next((one for one in ways if one.unit is not None or one.codec.lossy), None)
        dtype = DTYPES[layout.entries[kid].spec.dtype]
        if lossy is None or devices.sendable(widen(values, dtype), LARGEST):
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
        named = lossy.codec.text if lossy.unit is None else self.text
        raise PushRefused(
            f"key {layout.entries[kid].spec.key!r}: element {first + at} of the gradient is "
            f"{value:g}, which codec {named} cannot send; put nonfinite=skip or nonfinite=zero "
            "into the codec's plan, or send this key with none"
        )

    def as_is(self, layout: Layout, block: BlockSpec) -> bool:
        """Return whether a block's values are sent as they are, so that any value may be."""
        way = self._way(layout, block)
        return way.unit is None and not way.codec.lossy

    def takes_long(self, layout: Layout, block: BlockSpec) -> bool:
        """Return whether encoding a block is worth handing over to another thread."""
        way = self._way(layout, block)
        return block.size >= LONG and (way.unit is not None or bool(way.codec.chain.stages))

    def encode(
        self,
        layout: Layout,
        block: BlockSpec,
        values: Array,
        batch: int,
        *,
        own: bool = False,
        lent: bool = False,
    ) -> Sealed:
        """Return a block as it travels; `values` are flat and stored.

        `own`: they are the encoder's from now on, else they stay the caller's; `lent`: and stay as
        they are until the batch is settled. Of values on a
        device, the payload is complete when `devices.working` is left. May be called from several
        threads.
        """
        way = self._way(layout, block)
        if way.unit is None and way.codec == NONE and block.bid not in self.memories.by_block:
            return Sealed(values if own or lent else self._owned(values))
        with self._lock:
            return self._encode(layout, way, values, batch, own, lent)

    def _owned(self, values: Array) -> Array:
        if devices.home(values) != devices.HOST:
            return devices.own(values, values)
        return self.spares.copy_of(values)

    def _encode(
        self, layout: Layout, way: _Way, values: Array, batch: int, own: bool, lent: bool
    ) -> Sealed:
        self.memories.hear()
        block = way.block
        given = dense(widen(values, layout.dtype(block)))
        given = replace(given, shape=layout.shape(block))
        codec = way.codec
        if way.unit is not None and self._chooser is not None:
            codec = self._chooser.codec(way.unit, given)
        where, account = devices.home(values), self.accounts.of(block.bid)
        memory, account.unit = self.memories.ready(block.bid, codec, given.shape, where), way.unit
        owed, memory.owed = memory.owed, None
        if codec == NONE and owed is None:
            account.add(codec.text, values.nbytes, values.nbytes, 0.0)
            return Sealed(values if own or lent else self._owned(values))
        if owed is not None:
            given = replace(given, values=given.values + owed)
        # A chooser looks at what was given after it was encoded.
        if where == devices.HOST and way.unit is None:
            given = replace(given, own=own or not np.may_share_memory(given.values, values))
        began = time.perf_counter()
        old, seed = memory.state, seed_of(self.seed, batch, block.bid + 1)
        backend = self.backend if where == devices.HOST else devices.CUDA
        encoded, memory.state = codec.encode(given, old, seed, backend)
        self.memories.keep(batch, Step(block.bid, codec, old, memory.state, owed))
        form, payload = to_payload(encoded, backend)
        payload = payload if own else devices.own(payload, values)
        spent_s = time.perf_counter() - began
        account.add(codec.text, values.nbytes, payload.nbytes, spent_s)
        if way.unit is not None and self._chooser is not None:
            kept = codec.carried(memory.state)
            self._chooser.encoded(way.unit, codec, given, kept, payload.nbytes, spent_s)
        return Sealed(payload, encoded.chain.text, form)
