"""One batch of a JAX model: what taps send early, and what is handed over at last.

Taps give a head start and no more: what counts are the gradients that are handed over. If one of
them is not what its tap has sent (it was clipped, accumulated or mapped over, or the tap's backward
pass has failed and another one followed), the batch is given up and sent again whole, under the
same grant. It knows no JAX: it runs inside of its callbacks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from zkv.dtypes import Array
from zkv.errors import Cancelled
from zkv_workers.blocking import Batch, Worker
from zkv_workers.outgoing import mark_of


class Step:
    """A batch that is being computed."""

    def __init__(self, worker: Worker, batch: Batch, *, explicit: bool) -> None:
        self.batch = batch
        self.explicit = explicit
        """The caller has a block around it."""
        self.handed = False
        """Its gradients were handed over."""
        self.resent = ""
        """Why it was sent again."""
        self._worker = worker
        self._lock = threading.Lock()
        self._sent: dict[str, int] = {}
        """What taps have sent, by key, with what tells of a change."""
        self._trouble = ""
        """Why a tap could not send."""
        self._closed = False
        """Taps come too late."""
        self._left = False
        """The batch's block was left."""

    def tapped(self, key: str, gradient: Array) -> None:
        """Send a gradient early, if it is the first of its key; never raises."""
        with self._lock:
            if self._closed or self._trouble or key in self._sent:
                return
            try:
                self.batch.push(key, gradient)
            except Cancelled:
                self._closed = True
            except Exception as error:
                # If it is in the gradient, handing that over raises it again, where it is heard.
                self._trouble = str(error)
            else:
                self._sent[key] = mark_of(gradient)

    @property
    def vain(self) -> bool:
        """Whether nothing of the batch can count any more."""
        return self._left or self.batch.cancelled

    @property
    def sent(self) -> tuple[str, ...]:
        """The keys whose gradients have left already, in that order."""
        return tuple(self._sent)

    def hand_over(self, gradients: Mapping[str, Array | None]) -> None:
        """Send what taps have not sent; None is a key without a gradient on this worker.

        Raises:
            RuntimeError: that was done already.
            Cancelled: the batch no longer counts.
            KeyMismatch, PushRefused: see `Batch.push`.
        """
        with self._lock:
            if self.handed:
                raise RuntimeError("the gradients of this batch were handed over already")
            self._closed = True
            if why := self._trouble or self._differing(gradients):
                self._again(why)
            for key, gradient in gradients.items():
                if gradient is not None and key not in self._sent:
                    self.batch.push(key, gradient)
            self.handed = True

    def _differing(self, gradients: Mapping[str, Array | None]) -> str:
        for key, mark in self._sent.items():
            gradient = gradients[key]
            if gradient is None or mark_of(gradient) != mark:
                return f"key {key!r}: the gradient handed over is not the one that its tap has sent"
        return ""

    def _again(self, why: str) -> None:
        """Give up what was sent, and begin the batch again under its grant.

        Raises:
            Cancelled: that grant was taken back meanwhile.
        """
        self.resent, before = why, self.batch
        weight = before._open.weight
        self._leave(_Given(why))
        self._sent.clear()
        grant = self._worker._next_grant()
        again = Batch(self._worker, weight)
        if grant is not None and before._samples is not None:
            again.hand_out(grant, *before._samples)
        else:
            again._grant(grant)
        again.__enter__()
        self.batch, self._left = again, False
        if again.version != before.version:
            self._leave(_Given(why))
            raise Cancelled("the batch was cancelled while it was sent again")

    def finish(self, weight: float | None = None, loss: float | None = None) -> str:
        """Leave the batch; return "pending", or "cancelled" if it is.

        Raises:
            ValueError, TypeError: weight or loss is none: then the batch is withdrawn.
        """
        with self._lock:
            self._closed = True
            if self._left:
                return "cancelled"
            try:
                if weight is not None:
                    self.batch.set_weight(weight)
                if loss is not None:
                    self.batch.set_loss(loss)
            except BaseException as error:
                self._leave(error)
                raise
            cancelled = self.batch.cancelled
            self._left = True
            self.batch.__exit__(None, None, None)
            return "cancelled" if cancelled else "pending"

    def withdraw(self) -> None:
        """Give the batch up: nothing of it counts."""
        with self._lock:
            self._closed = True
            if not self._left:
                self._leave(_Given("the batch is given up"))

    def _leave(self, error: BaseException) -> None:
        self._left = True
        self.batch.__exit__(type(error), error, None)


class _Given(Exception):
    """What leaves a batch that is given up; nobody sees it."""
