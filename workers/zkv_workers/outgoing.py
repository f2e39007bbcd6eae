"""One batch's blocks on their way out: what takes long to encode is encoded beside the caller.

A gradient is copied when it is pushed, unless it is lent: then it must stay as it is until its
future is done, or the block is left. A lent array is made read-only meanwhile; where its memory can
be written to by another way, a change is found out before the batch counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from zkv.dtypes import Array
from zkv.spans import ENCODER, TRAINING, Spans
from zkv.time_split import Meter
from zkv_net.spares import Spares
from zkv_workers import signals as s
from zkv_workers.encoding import Encoder, Sealed
from zkv_workers.model import BatchState
from zkv_workers.packing import Full, Key
from zkv_workers.pipeline import Pipeline

ROW = 256
"""Words of 8 bytes."""
TOGETHER_BYTES = 8 * 2**20
"""A gradient's blocks are handed over together, as each time wakes the I/O thread, which then takes
turns with the caller; but a larger gradient is on its way while its rest is copied."""


VALUES_BYTES_MAX = 2**30
"""Of a program's own copies of the model, so many bytes are used again when it has let them go."""


class Feed(Protocol):
    """Takes inputs of a session."""

    def __call__(self, *events: s.Input) -> None:
        """Take these, in this order."""


@dataclass(frozen=True, slots=True)
class Outlet:
    """A worker's way out: its encoder, its pipeline, and how inputs reach its session: from the
    caller's thread, and from any other."""

    encoder: Encoder
    pipeline: Pipeline
    feed: Feed
    feed_beside: Feed
    meter: Meter
    spans: Spans | None = None
    values: Spares = field(default_factory=lambda: Spares(VALUES_BYTES_MAX))
    """What `batch.params` is unpacked into."""


@dataclass(frozen=True, slots=True)
class _Lent:
    """An array that must not change before its blocks are encoded."""

    key: Key
    array: Array
    mark: int
    """What tells of a change."""


@dataclass(slots=True)
class Outgoing:
    """The blocks of one batch."""

    outlet: Outlet
    state: BatchState
    error: Exception | None = None
    """Why a block could not be encoded."""
    beside: bool = False
    """Whether anything went through the pipeline, so that the batch's end must, too."""
    dropped: bool = False
    """Whether nothing of the batch counts, so that nothing more has to be encoded."""
    _lent: list[_Lent] = field(default_factory=list)

    def push(self, key: Key, gradient: object, *, lend: bool) -> Future[None]:
        """Send what a gradient has completed; see `Batch.push`."""
        weight = self.state.declared
        full = self.state.packer.add(key, gradient)
        beside = self._send(full, lend, weight)
        if lend and beside and isinstance(gradient, np.ndarray):
            return self._lend(key, gradient)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def push_all(self, gradients: Iterable[tuple[Key, object]], *, own: bool) -> None:
        """Send what several gradients have completed; see `Batch.push_all`."""
        weight = self.state.declared
        full: list[Full] = []
        try:
            for one in self.state.packer.add_all(gradients, own=own):
                full.append(one)
        finally:
            # Whoever goes on without a key that was refused has handed over those before it.
            self._send(full, lend=False, weight=weight)

    def rest(self) -> None:
        """Send the buckets in which some keys were skipped."""
        self._send(self.state.packer.rest(), lend=False, weight=None)

    def drop(self) -> None:
        """Nothing of the batch counts: what was encoded of it is taken back."""
        self.dropped = True
        encoder, number = self.outlet.encoder, self.state.number
        if self.beside:
            # Not before the block that is being encoded now.
            self.outlet.pipeline.put(lambda: encoder.settled(number, counted=False))
        else:
            encoder.settled(number, counted=False)

    def _send(self, full: list[Full], lend: bool, weight: float | None) -> bool:
        """Send blocks, each encoded at once or by the pipeline; return whether that has one now."""
        state, encoder, beside = self.state, self.outlet.encoder, False
        self._send_staged([one for one in full if one.staged])
        ready: list[s.SendBlock] = []
        nbytes = 0
        for one in full:
            if one.staged:
                continue
            if encoder.takes_long(state.layout, state.layout.blocks[one.bid]):
                self._send_beside(one if one.own or one.lent or lend else one.copied(), weight)
                beside = True
                continue
            sealed = self._seal(one, TRAINING)
            ready.append(s.SendBlock(state.number, one.bid, sealed, weight))
            nbytes += sealed.payload.nbytes
            if nbytes >= TOGETHER_BYTES:
                self.outlet.feed(*ready)
                ready, nbytes = [], 0
        if ready:
            self.outlet.feed(*ready)
        return beside

    def _send_beside(self, full: Full, weight: float | None) -> None:
        """Let the pipeline encode a block."""
        self._put(lambda: iter([(full.bid, self._seal(full, ENCODER))]), full.values.nbytes, weight)

    def _send_staged(self, full: list[Full]) -> None:
        """Hand blocks whose gradients are on devices to the pipeline: only there they are waited
        for."""
        if not full:
            return
        nbytes = sum({one.kid: one.nbytes for each in full for one in each.staged}.values())
        packer, spans = self.state.packer, self.outlet.spans

        def blocks() -> Iterator[tuple[int, Sealed]]:
            if spans is None:
                yield from packer.sealing(full)
                return
            with spans.timed(ENCODER, f"encode {full[0].bid}", batch=self.state.number) as about:
                about["bytes"] = 0
                for bid, sealed in packer.sealing(full):
                    about |= {
                        "codec": sealed.codec,
                        "bytes": about["bytes"] + sealed.payload.nbytes,
                    }
                    yield bid, sealed

        # Whether a key of theirs is skipped is known only there.
        self._put(blocks, nbytes, None)

    def _put(
        self,
        blocks: Callable[[], Iterator[tuple[int, Sealed]]],
        nbytes: int,
        weight: float | None,
    ) -> None:
        """Let the pipeline make blocks and send each."""
        self.beside, state = True, self.state

        def job() -> None:
            if self.dropped or state.cancelled or self.error is not None:
                return
            meter = self.outlet.meter
            began = meter.clock()
            try:
                for bid, sealed in blocks():
                    self.outlet.feed_beside(s.SendBlock(state.number, bid, sealed, weight))
            except Exception as error:
                # Nobody is there to hear it: the batch's end says it.
                self.error = error
            finally:
                meter.beside(meter.clock() - began)

        self.outlet.pipeline.put(job, nbytes)

    def _seal(self, full: Full, track: str) -> Sealed:
        packer, spans = self.state.packer, self.outlet.spans
        if spans is None:
            return packer.seal(full)
        with spans.timed(track, f"encode {full.bid}", batch=self.state.number) as about:
            sealed = packer.seal(full)
            about |= {"codec": sealed.codec, "bytes": sealed.payload.nbytes}
        return sealed

    # --- lent arrays -------------------------------------------------------------------------

    def _lend(self, key: Key, gradient: Array) -> Future[None]:
        self._lent.append(_Lent(key, gradient, mark_of(gradient)))
        freezes = bool(gradient.flags.owndata and gradient.flags.writeable)
        if freezes:
            gradient.flags.writeable = False

        def free() -> None:
            if freezes:
                gradient.flags.writeable = True

        return self.outlet.pipeline.put(free)

    def take_back(self) -> None:
        """Wait until no array is lent any more.

        Raises:
            BufferError: one was changed while it was lent: what was sent of it is not known.
        """
        if not self._lent:
            return
        self.outlet.pipeline.drain()
        lent, self._lent = self._lent, []
        for one in lent:
            if mark_of(one.array) != one.mark:
                raise BufferError(
                    f"key {one.key!r}: the gradient was changed while it was lent, so what was "
                    "sent of it is not known; leave it alone until the block is left, or do not "
                    "lend it"
                )


def mark_of(array: Array) -> int:
    """Return a number that tells an array's bytes from others, their order included, up to chance.

    Its words lie in rows of `ROW`; the sums of rows and of columns are hashed, which takes little
    more time than to read it twice.
    """
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    rows = raw[: raw.size - raw.size % (8 * ROW)].view(np.uint64).reshape(-1, ROW)
    found = hashlib.blake2b(raw[rows.nbytes :].tobytes(), digest_size=8)
    for axis in (0, 1):
        found.update(rows.sum(axis=axis, dtype=np.uint64).tobytes())
    return int.from_bytes(found.digest(), "little")
