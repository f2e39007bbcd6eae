"""Training with codecs under a virtual clock: what is sent is real, seconds are computed.

Workers take turns in one process. Each has the encoder of a live worker, the blocks are those that
a broker cuts, every payload is read as a server reads it, and zkv's own sum and update rule apply
it (BSP). Only time is not that of the machine, so that its load decides nothing. A step takes

    the model down + compute + the slowest worker's (encode + latency + bytes / speed) + decode

one after the other: the model comes down dense, and all contributions are decoded in turn. Seconds
of encoding and decoding are those of a table, `Costs`; what chooses by time, `auto` at a worker and
`bits:...` at the broker, reads this clock and that table too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from training_tasks import Task
from zkv import control as c
from zkv.dtypes import Array
from zkv.layout import Layout
from zkv.optim import init_slots, update
from zkv.optimizer_spec import OptimizerSpec, optimizer
from zkv.sums import weighted_mean
from zkv.wire import BlockSpec, ContributionId, KeySpec
from zkv_brokers.catalog import Catalog
from zkv_brokers.coding import Coding
from zkv_brokers.decisions import Arrival, Decisions
from zkv_brokers.widths import Widths
from zkv_codecs.auto import Measured
from zkv_codecs.backend import Backend, fastest
from zkv_codecs.bits import BitController
from zkv_codecs.feedback import Codec
from zkv_codecs.frames import from_payload, to_payload
from zkv_codecs.packed import Packed, dense
from zkv_codecs.plan import NONE, plan
from zkv_codecs.spec import codec as codec_of
from zkv_workers.choosing import Chooser, Traffic, Unit
from zkv_workers.encoding import Encoder, Sealed

REPEATS = 40
MBIT = 1e6 / 8
"""Bytes per second."""


@dataclass(frozen=True, slots=True)
class Link:
    """A worker's way to the server, the same in both directions."""

    bytes_per_s: float
    latency_s: float = 2e-4

    def seconds(self, nbytes: float) -> float:
        """Return for how long so many bytes are on their way."""
        return self.latency_s + nbytes / self.bytes_per_s


LOOPBACK = Link(6.8e9, 1.17e-4)
"""ZeroMQ over TCP on one machine, asyncio: 1 MiB messages without copying, and the round trip of 64
bytes (an earlier measurement on two cores)."""


@dataclass(slots=True)
class Costs:
    """Seconds that one block costs with one codec: the shortest of 40, as load only ever adds.

    Measured when first asked for, on normal noise, and then the same for the whole process.
    """

    backend: Backend = field(default_factory=fastest)
    repeats: int = REPEATS
    _known: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = field(default_factory=dict)

    def of(self, text: str, shape: tuple[int, ...]) -> tuple[float, float]:
        """Return seconds of encoding into a payload, and of reading it into a server's sum."""
        found = self._known.get((text, shape))
        if found is None:
            plan(text).warm(self.backend)
            found = self._known[text, shape] = self._measured(codec_of(text), shape)
        return found

    def _measured(self, codec: Codec, shape: tuple[int, ...]) -> tuple[float, float]:
        values = np.random.default_rng(0).standard_normal(shape).astype(np.float32).reshape(-1)
        given = replace(dense(values), shape=shape)
        total, state = np.zeros(values.size, np.float32), codec.start(shape)
        encode, decode = [], []
        for seed in range(self.repeats):
            began = time.perf_counter()
            if codec == NONE:
                sent = values.copy()
                encoded = time.perf_counter()
                total += sent
            else:
                made, state = codec.encode(given, state, seed, self.backend)
                form, payload = to_payload(made, self.backend)
                encoded = time.perf_counter()
                there = from_payload(made.chain.text, form, payload, shape, self.backend)
                there.chain.add(there.packed, 1.0, total, self.backend)
            encode.append(encoded - began)
            decode.append(time.perf_counter() - encoded)
        return min(encode), min(decode)


class TableChooser(Chooser):
    """`auto` at a worker, with the table's seconds in place of its own measurements."""

    def __init__(self, like: Chooser, costs: Costs, clock: Callable[[], float]) -> None:
        super().__init__(like.auto, costs.backend, clock)
        self._costs = costs

    def encoded(
        self, unit: Unit, codec: Codec, given: Packed, residual: Array | None, nbytes: int, s: float
    ) -> None:
        """See `Chooser`; the table says how long it took."""
        s, _ = self._costs.of(codec.text, given.shape)
        super().encoded(unit, codec, given, residual, nbytes, s)

    def _measured(self, codec: Codec, given: Packed, itemsize: int) -> Measured:
        # The clock stands still meanwhile: bytes and errors are measured, and seconds are 0.
        found = super()._measured(codec, given, itemsize)
        encode, decode = self._costs.of(codec.text, given.shape)
        return replace(found, encode_s=encode / given.size, decode_s=decode / given.size)


@dataclass(frozen=True, slots=True)
class Spent:
    """What one step has cost: for each worker seconds of encoding and bytes up, and the rest."""

    encode_s: tuple[float, ...]
    nbytes: tuple[int, ...]
    decode_s: float
    compute_s: float
    down: int
    """Bytes of the model."""

    def seconds(self, links: Sequence[Link]) -> float:
        """Return how long the step takes; `links` are those of the workers."""
        down = max(link.seconds(self.down) for link in links)
        each = zip(self.encode_s, self.nbytes, links, strict=True)
        up = max(encode + link.seconds(nbytes) for encode, nbytes, link in each)
        return down + self.compute_s + up + self.decode_s


def layout_of(
    params: dict[str, Array], rule: OptimizerSpec, coding: Coding, *, plain: bool = False
) -> Layout:
    """Return the blocks of a model on one server as a broker cuts them; `plain`: one for a key."""
    keys = [KeySpec(key, "float32", value.shape) for key, value in params.items()]
    catalog, out = Catalog(Layout(), coding), Decisions()
    made = catalog.offer(1, c.Offer(1, keys, plain), plain, 1, rule, out)
    if made is None or isinstance(made, Exception):
        raise ValueError(f"no layout of these keys: {made}")
    layout = Layout()
    layout.add(made.entries, made.blocks)
    return layout


class Training:
    """A run in progress. `text` is a plan of codecs; `links` has one for each worker; `rule` is
    another optimizer than the task's. Without `down` models come in no time.

    `mutate` may put another controller in the place of that of `bits:...`.
    """

    def __init__(
        self,
        task: Task,
        text: str,
        links: Sequence[Link],
        costs: Costs,
        *,
        rule: str = "",
        compute_s: float | None = None,
        plain: bool = False,
        down: bool = True,
        mutate: Callable[[BitController[Any]], BitController[Any]] = lambda one: one,
    ) -> None:
        if len(links) != task.workers:
            raise ValueError(f"{len(links)} links: this task has {task.workers} workers")
        self.task, self.text, self.links, self.costs = task, text, list(links), costs
        self.compute_s = task.compute_s if compute_s is None else compute_s
        self.now_s, self.bytes_up, self.steps = 0.0, 0, 0
        self.spent: list[Spent] = []
        self._squares = [0.0, 0.0]
        self.codecs: list[dict[int, str]] = []
        """By step: what the first worker's blocks were encoded with."""
        self._rule = optimizer(rule or task.rule)
        self._params = {key: value.copy() for key, value in task.initial().items()}
        coding = Coding(text, clock=lambda: self.now_s, rule=self._rule.rule.name)
        self.layout = layout_of(self._params, self._rule, coding, plain=plain)
        self._blocks = self.layout.blocks_in(0)
        self._down = sum(self.layout.block_bytes(block) for block in self._blocks) * down
        self._slots = {
            block.bid: init_slots(self._rule_of(block)[0], self._gather(self._params, block))
            for block in self._blocks
        }
        self.granted = coding.for_grants()["codec"]
        """The plan as workers are told of it."""
        self.widths: Widths | None = coding.widths
        if self.widths is not None:
            self.widths = Widths(mutate(self.widths.controller), lambda: self.now_s)
        self._worker_s = 0.0
        """The time at the workers while they encode: the same for all."""
        self._carried = [Traffic(0, 0.0, 0, 0.0)] * task.workers
        self.encoders = [self._encoder(worker) for worker in range(task.workers)]

    def _encoder(self, worker: int) -> Encoder:
        made = Encoder(seed=worker, backend=self.costs.backend)
        made.decoders = float(self.task.workers)
        made.traffic = lambda: self._carried[worker]
        made.use(self.granted, chosen="" if self.widths is None else self.widths.codec)
        if made._chooser is not None:
            made._chooser = TableChooser(made._chooser, self.costs, lambda: self._worker_s)
        return made

    # --- values ------------------------------------------------------------------------------

    @property
    def params(self) -> dict[str, Array]:
        """The model, float32."""
        return self._params

    def _key(self, kid: int) -> str:
        return str(self.layout.entries[kid].spec.key)

    def _rule_of(self, block: BlockSpec) -> tuple[Any, float]:
        return self._rule.for_key(self._key(block.segments[0].kid))

    def _gather(self, values: dict[str, Array], block: BlockSpec) -> Array:
        parts = [
            values[self._key(one.kid)].reshape(-1)[one.start : one.stop] for one in block.segments
        ]
        return np.concatenate(parts)

    def _apply(self, block: BlockSpec, means: list[Array]) -> None:
        mean = weighted_mean(means, [1.0] * len(means))
        rule, factor = self._rule_of(block)
        rate = self._rule.lr_at(self.steps) * factor
        value, self._slots[block.bid] = update(
            rule,
            self._gather(self._params, block),
            self._slots[block.bid],
            mean,
            lr=rate,
            count=self.steps + 1,
        )
        at = 0
        for one in block.segments:
            size = one.stop - one.start
            self._params[self._key(one.kid)].reshape(-1)[one.start : one.stop] = value[
                at : at + size
            ]
            at += size

    # --- steps -------------------------------------------------------------------------------

    def step(self) -> float:
        """Make one step; return the mean loss of its batches, before it."""
        given = [
            self.task.gradients(self._params, worker, self.steps)
            for worker in range(self.task.workers)
        ]
        self._worker_s = self.now_s + max(link.seconds(self._down) for link in self.links)
        for worker, link in enumerate(self.links):
            self._carry(worker, link, down=self._down)
        sealed = [self._encoded(worker, one) for worker, (one, _) in enumerate(given)]
        costs = [
            [self._cost(worker, block) for block in self._blocks] for worker in range(len(given))
        ]
        encode_s = tuple(sum(encode for encode, _ in mine) for mine in costs)
        decode_s = sum(decode for mine in costs for _, decode in mine)
        nbytes = tuple(sum(one.payload.nbytes for one in mine.values()) for mine in sealed)
        for worker, link in enumerate(self.links):
            self._carry(worker, link, up=nbytes[worker])
        for block in self._blocks:
            self._apply(block, [self._decoded(mine[block.bid], block) for mine in sealed])
        self._passed(Spent(encode_s, nbytes, decode_s, self.compute_s, self._down))
        losses = [loss for _, loss in given]
        self._told(losses, nbytes)
        return float(np.mean(losses))

    def _carry(self, worker: int, link: Link, *, up: int = 0, down: int = 0) -> None:
        old = self._carried[worker]
        self._carried[worker] = Traffic(
            old.up + up,
            old.up_s + (link.seconds(up) if up else 0.0),
            old.down + down,
            old.down_s + (link.seconds(down) if down else 0.0),
        )

    def _encoded(self, worker: int, given: dict[str, Array]) -> dict[int, Sealed]:
        encoder = self.encoders[worker]
        encoder.begin()
        sealed = {
            block.bid: encoder.encode(self.layout, block, self._gather(given, block), self.steps)
            for block in self._blocks
        }
        encoder.settled(self.steps, counted=True)
        if worker == 0:
            self._watched(given)
        return sealed

    def _watched(self, given: dict[str, Array]) -> None:
        """Take in what the first worker keeps back, of every tenth step."""
        if self.steps % 10:
            return
        for block in self._blocks:
            memory = self.encoders[0].memories.by_block.get(block.bid)
            kept = None if memory is None else memory.codec.carried(memory.state)
            if kept is not None:
                gradient = self._gather(given, block)
                self._squares[0] += float(np.dot(kept, kept))
                self._squares[1] += float(np.dot(gradient, gradient))

    @property
    def kept_back(self) -> float:
        """Norm of what the first worker's codecs with feedback keep back, in gradients."""
        kept, gradients = self._squares
        return math.sqrt(kept / gradients) if gradients else 0.0

    def _codec(self, worker: int, block: BlockSpec) -> str:
        account = self.encoders[worker].accounts.by_block.get(block.bid)
        return "none" if account is None else account.codec

    def _cost(self, worker: int, block: BlockSpec) -> tuple[float, float]:
        return self.costs.of(self._codec(worker, block), self.layout.shape(block))

    def _decoded(self, sealed: Sealed, block: BlockSpec) -> Array:
        if sealed.form is None:
            return sealed.payload
        there = from_payload(
            sealed.codec,
            sealed.form,
            sealed.payload,
            self.layout.shape(block),
            self.costs.backend,
        )
        values: Array = there.chain.decode(there.packed, self.costs.backend).values
        return values

    def _passed(self, spent: Spent) -> None:
        self.spent.append(spent)
        self.codecs.append({block.bid: self._codec(0, block) for block in self._blocks})
        self.bytes_up += sum(spent.nbytes)
        self.now_s += spent.seconds(self.links)
        self.steps += 1

    def _told(self, losses: Sequence[float], nbytes: Sequence[int]) -> None:
        """Tell the broker's controller of an update, and the workers of what it has chosen."""
        if self.widths is None:
            return
        arrivals = [
            Arrival(
                ContributionId(worker, 0, self.steps), worker, weight=1.0, loss=loss, nbytes=size
            )
            for worker, (loss, size) in enumerate(zip(losses, nbytes, strict=True))
        ]
        self.widths.updated(arrivals)
        for encoder in self.encoders:
            encoder.use(self.granted, chosen=self.widths.codec)
