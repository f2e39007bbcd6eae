"""One batch's blocks on their way out: what takes long to encode is encoded beside the caller.

A gradient is copied when it is pushed, unless it is lent: then it must stay as it is until its
future is done, or the block is left. A lent array is made read-only meanwhile; where its memory can
be written to by another way, a change is found out before the batch counts.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from zkv.dtypes import Array
from zkv.spans import ENCODER, TRAINING, Spans
from zkv.time_split import Meter
from zkv_workers import signals as s
from zkv_workers.encoding import Encoder, Sealed
from zkv_workers.model import BatchState
from zkv_workers.packing import Full, Key
from zkv_workers.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Outlet:
    """A worker's way out: its encoder, its pipeline, and how inputs reach its session: from the
    caller's thread, and from any other."""

    encoder: Encoder
    pipeline: Pipeline
    feed: Callable[[s.Input], None]
    feed_beside: Callable[[s.Input], None]
    meter: Meter
    spans: Spans | None = None


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
        futures = [self._send(full, lend, weight) for full in self.state.packer.add(key, gradient)]
        if lend and any(futures) and isinstance(gradient, np.ndarray):
            return self._lend(key, gradient)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def rest(self) -> None:
        """Send the buckets in which some keys were skipped."""
        for full in self.state.packer.rest():
            self._send(full, lend=False, weight=None)

    def drop(self) -> None:
        """Nothing of the batch counts: what was encoded of it is taken back."""
        self.dropped = True
        encoder, number = self.outlet.encoder, self.state.number
        if self.beside:
            # Not before the block that is being encoded now.
            self.outlet.pipeline.put(lambda: encoder.settled(number, counted=False))
        else:
            encoder.settled(number, counted=False)

    def _send(self, full: Full, lend: bool, weight: float | None) -> bool:
        """Encode a block at once, or hand it to the pipeline; return whether that has it now."""
        state, encoder = self.state, self.outlet.encoder
        block = state.layout.blocks[full.bid]
        if full.sealed is not None or not encoder.takes_long(state.layout, block):
            sealed = self._seal(full, TRAINING)
            self.outlet.feed(s.SendBlock(state.number, full.bid, sealed, weight))
            return False
        if not (full.own or lend):
            full = full.copied()
        self.beside = True

        def job() -> None:
            if self.dropped or state.cancelled or self.error is not None:
                return
            meter = self.outlet.meter
            began = meter.clock()
            try:
                sealed = self._seal(full, ENCODER)
            except Exception as error:
                # Nobody is there to hear it: the batch's end says it.
                self.error = error
                return
            finally:
                meter.beside(meter.clock() - began)
            self.outlet.feed_beside(s.SendBlock(state.number, full.bid, sealed, weight))

        self.outlet.pipeline.put(job, full.values.nbytes)
        return True

    def _seal(self, full: Full, track: str) -> Sealed:
        packer, spans = self.state.packer, self.outlet.spans
        if spans is None or full.sealed is not None:
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
    """Return a number that tells an array's bytes from others, up to chance."""
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = raw.size - raw.size % 8
    total = int(raw[:whole].view(np.uint64).sum(dtype=np.uint64)) if whole else 0
    return total ^ int.from_bytes(raw[whole:].tobytes(), "little")
