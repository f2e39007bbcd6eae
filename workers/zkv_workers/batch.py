"""What a batch is in both faces: values to compute on, gradients to hand over, and an outcome."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from zkv.dtypes import Array
from zkv.errors import Cancelled, Closed, Refused
from zkv.span_split import BETWEEN, COMPUTE
from zkv.spans import BATCHES, TRAINING
from zkv.time_split import Part
from zkv_workers import faces
from zkv_workers import signals as s
from zkv_workers.batch_values import BatchValues
from zkv_workers.faces import Clock, Key, Ledger
from zkv_workers.model import BatchState, check_weight
from zkv_workers.outgoing import Outgoing, Outlet
from zkv_workers.running import Running
from zkv_workers.table_rows import pushed_rows


class AnyBatch(BatchValues):
    """One mini-batch, used once as a context manager: entering waits, leaving finishes it."""

    def __init__(
        self,
        weight: float | None,
        ledger: Ledger,
        running: Running,
        outlet: Outlet,
    ) -> None:
        super().__init__(ledger, outlet.feed)
        self._weight = None if weight is None else check_weight(weight)
        self._running = running
        self._outlet = outlet
        self._encoder = outlet.encoder
        self._outgoing: Outgoing | None = None
        self._fate: Any = None
        self._withdrawn = False
        self._computing: Clock | None = None
        self._paused, self._paused_at = False, 0.0
        self._spent_s = 0.0

    @property
    def _inside(self) -> BatchState:
        state = self._open
        if self.outcome != "open":
            raise RuntimeError(
                f"batch {state.number} is over: its gradients, weight and loss are said inside of "
                "its block"
            )
        return state

    @property
    def _out(self) -> Outgoing:
        self._open  # noqa: B018 - says so where the batch is not open
        assert self._outgoing is not None
        return self._outgoing

    @property
    def samples(self) -> Array:
        """The numbers of this batch's samples: int64, from `worker.batches(data)`."""
        return self._handed[0]

    @property
    def pass_number(self) -> int:
        """The pass over the data that these samples belong to, from 1."""
        return self._handed[1]

    @property
    def _handed(self) -> tuple[Array, int]:
        if self._samples is None:
            raise RuntimeError("this batch has no samples: take it from worker.batches(data)")
        return self._samples

    def push(self, key: Key, gradient: Any, *, lend: bool = False) -> Future[None]:
        """Hand over one key's gradient (mean over the batch's samples); returns at once.

        `gradient`: NumPy's array or one on a GPU; or several of them on different GPUs, in a list
        (each the mean over as many samples) or `zkv.OnDevices`: they are combined here, and are one
        contribution. What is on a GPU may be overwritten in the order of the stream that is current
        there now; that it cannot be sent is told at the batch's end.

        A plain function in both faces. The array is copied, so it may be changed as soon as this
        returns; what a codec makes of it is made beside you, if it is large. `lend`: it is not
        copied where that is so, and must stay as it is until the future is done or the block is
        left. A lent array is read-only meanwhile; if it changes by another way, leaving the block
        raises BufferError, and nothing of the batch counts.

        Raises:
            Cancelled: the batch no longer counts; the `with` block swallows it.
            UnknownKey, KeyMismatch: not a key of the model, pushed twice, wrong shape or dtype.
            PushRefused: it has NaN or Inf, which its codec cannot send.
        """
        self._inside.check()
        self._touched = True
        meter = self._ledger.meter
        began = meter.clock()
        try:
            if self._ledger.spans is None:
                return self._out.push(key, gradient, lend=lend)
            with self._ledger.spans.timed(TRAINING, f"push {key}", batch=self.number):
                return self._out.push(key, gradient, lend=lend)
        finally:
            meter.encoded(meter.clock() - began)

    def push_all(self, gradients: Iterable[tuple[Key, Any]], *, give: bool = False) -> None:
        """Hand over the gradients of several keys, as (key, gradient) pairs; see `push`.

        They leave together, which takes less of the caller's time than one call for each. If one is
        refused, those before it count, and those behind it may. `give`: the arrays are given away,
        so they are not copied; nobody may write to them any more.

        Raises:
            Cancelled, UnknownKey, KeyMismatch, PushRefused: see `push`.
        """
        if self._ledger.spans is not None:
            for key, gradient in gradients:
                self.push(key, gradient)
            return
        self._inside.check()
        self._touched = True
        meter = self._ledger.meter
        began = meter.clock()
        try:
            self._out.push_all(gradients, own=give)
        finally:
            meter.encoded(meter.clock() - began)

    def push_rows(self, key: Key, ids: Any, gradients: Any) -> None:
        """Hand over gradients of rows of a table (each the mean over the batch's samples); returns
        at once.

        `ids`: whole numbers, an array of any shape; `gradients`: that shape, and then `dim`, of the
        table's dtype. Those of one row are added up, also over several calls, in their order. They
        are copied, so they may be changed as soon as this returns. A row that is not named counts
        as zero.

        Raises:
            Cancelled: the batch no longer counts; the `with` block swallows it.
            UnknownKey: no table of this name.
            KeyMismatch: wrong numbers, shape or dtype; the first such number, or both sides, are
                named. Nothing is sent then.
        """
        self._inside.check()
        self._touched = True
        with self._ledger.meter.on(Part.ENCODE):
            pieces = pushed_rows(self._open.layout, self.number, key, ids, gradients)
            self._feed(*pieces)

    def set_weight(self, weight: float) -> None:
        """Say of how many samples this batch is, before the block is left (for local
        rounds; default: how many samples it has from `worker.batches`).

        If another weight was named when the batch was begun, and something was pushed since, what
        was made of that is made again.
        """
        state = self._inside
        state.weight = check_weight(weight)
        state.declared = None if state.declared is None else state.weight

    def set_loss(self, loss: float) -> None:
        """Say the loss of this batch, before the block is left.

        What adapts the precision by the loss (`codec="bits:learned"`) listens to it; nothing else
        does.
        """
        self._inside.loss = float(loss)

    @property
    def outcome(self) -> str:
        """How the batch stands.

        "open" inside the block; then "pending", "committed", "cancelled" (the update happened
        without it), "discarded" (a guard refused it), "withdrawn" (an exception left the block) or
        "undone" (the run has gone back to a snapshot, and it was not in an update by then).
        """
        if self._withdrawn:
            return "withdrawn"
        return "open" if self._fate is None else faces.outcome(self._fate)

    @property
    def update(self) -> int | None:
        """The version that the batch's update has led to; None: it is in none that is known."""
        return faces.update(self._fate)

    def _settled(self, fate: s.Fate) -> None:
        """Book what became of it."""
        self._trace(fate.outcome)
        self._ledger.settled(fate, self._open.version, self._spent_s)
        self._encoder.settled(self._open.number, counted=fate.version is not None)
        error = faces.refusal(fate)
        if error is not None:
            self._ledger.refused.append(error)

    def _trace(self, outcome: str) -> None:
        spans, state = self._ledger.spans, self._state
        if spans is not None and state is not None:
            name, now = f"batch {state.number} {outcome}", spans.clock()
            spans.span(BATCHES, name, state.began, now, version=state.version, clock=state.clock)

    def _check_unused(self) -> None:
        if self._entered:
            raise RuntimeError("a batch is used once; ask the worker for the next one")
        self._ledger.raise_refused()

    def hand_out(self, grant: s.Grant, samples: Array, pass_number: int) -> None:
        """Give the batch its grant and its samples, before its block is entered."""
        self._samples, self._weight = (samples, pass_number), float(len(samples))
        self._grant(grant)

    def abandon(self) -> None:
        """Give up what was handed out, entered or not: nothing of it counts."""
        if self._state is not None:
            self._stop(self._state)
            self._withdraw()

    def pause(self, paused: bool) -> None:
        """Between two local batches of a round the program loads data, say: that is no
        computing."""
        if paused != self._paused:
            meter, spans, since = self._ledger.meter, self._ledger.spans, self._paused_at
            self._paused, self._paused_at = paused, meter.clock()
            (meter.enter if paused else meter.leave)(Part.BETWEEN)
            if spans is not None and not paused:
                spans.span(TRAINING, BETWEEN, since, self._paused_at)

    def _stop(self, state: BatchState) -> None:
        """Nothing is computed on this batch any more."""
        self.pause(False)
        if self._computing is not None:
            self._spent_s, self._computing = self._computing.stop(self._waited_s), None
        self._running.remove(state.number)
        self._running.leave(self)

    def _withdraw(self) -> None:
        assert self._outgoing is not None
        self._withdrawn = True
        self._trace("withdrawn")
        self._outgoing.drop()
        # Who has left meanwhile has nothing to withdraw, and an error that left the block matters
        # more.
        with contextlib.suppress(Closed):
            self._feed(s.Withdraw(self._outgoing.state.number))

    def _grant(self, grant: s.Grant | None) -> None:
        if grant is None:
            raise Refused(
                "the data of this run is used up: all passes are done, so there are no more batches"
            )
        if grant.samples is not None and self._samples is None:
            # The grant stays, so that the next batch of the right kind gets these samples.
            self._feed(s.Withdraw(grant.batch))
            raise Refused(
                "this run deals its samples out with the batches: take them from "
                "worker.batches(data), not from worker.batch(), and those of local rounds from "
                "local.batches(data)"
            )
        with self._ledger.meter.on(Part.ENCODE):
            # What is still encoded of a batch that was withdrawn must not meet another plan.
            self._outlet.pipeline.drain()
            faces.use_codecs(self._encoder, self._ledger, grant)
        self._encoder.begin()
        self._encoder.keeper.begun(grant)
        if self._state is not None:
            self._running.remove(self._state.number)
        self._state = self._running.add(
            BatchState(grant, self._weight, self._encoder, self._outlet.values)
        )
        self._outgoing = Outgoing(self._outlet, self._state)

    def _begin(self) -> None:
        self._entered = True
        about = {"batch": self.number, "version": self.version}
        self._computing = Clock(self._ledger, "compute_s", COMPUTE, **about)

    def _end(self, error: BaseException | None) -> Callable[[int], s.Finish] | None:
        """Leave the block: return what finishes the batch, or None if an exception withdraws it."""
        with self._ledger.meter.ending():
            return self._left(error)

    def _left(self, error: BaseException | None) -> Callable[[int], s.Finish] | None:
        state, out = self._open, self._out
        self._stop(state)
        if error is not None and not isinstance(error, Cancelled):
            self._withdraw()
            return None
        try:
            if not state.cancelled:
                out.rest()
            out.take_back()
        except BaseException:
            self._withdraw()
            raise
        report = self._ledger.report(self._encoder.to_tell(state.layout))
        if report is not None:
            self._feed(report)

        def finish(token: int) -> s.Finish:
            if out.error is not None:
                self._withdraw()
                self._ledger.refused.append(out.error)
                raise out.error
            # Of a gradient on a device it is known only now.
            skipped = state.packer.skipped()
            return s.Finish(token, state.number, state.weight, skipped, state.loss)

        return finish
