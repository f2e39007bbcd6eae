"""One batch of a PyTorch model: values in as they are needed, gradients out as they are ready.

It knows a batch of a worker and a model's parameters by key; hooks, optimizers and scalers are
above it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from zkv.errors import Cancelled
from zkv_workers import torch_tensors as tensors
from zkv_workers.torch_awaited import guard, guardable, release


class Step:
    """A batch that is being computed; `parameters` are those that are trained, by key."""

    def __init__(
        self,
        batch: Any,
        parameters: Mapping[str, Any],
        factor: float | None = None,
        together_bytes: int = 0,
    ) -> None:
        self.batch = batch
        self.explicit = False
        """The caller has a block around the batch, which `Cancelled` shall leave; without one the
        rest of it is computed in vain."""
        self.factor = factor
        """What undoes a scaler's scale; None: gradients are not scaled."""
        self.thread = threading.current_thread()
        self.vain = False
        """It was cancelled: nothing is received or sent any more."""
        self.overflow = False
        """A scaled gradient was not finite: nothing is sent any more, nothing will count."""
        self.in_backward = False
        """A backward pass has sent something, and has not come to its end."""
        self.cleared = False
        """Gradients were set to zero since the batch was cancelled."""
        self.sent: dict[str, tuple[int, int] | None] = {}
        """By key: where the gradient was and which version of it (see `changed`)."""
        self._parameters = parameters
        self._together_bytes = together_bytes
        self._gathered: list[tuple[str, Any]] = []
        self._gathered_bytes = 0
        self.pending = dict(parameters)
        """Parameters whose values are still missing."""

    # --- values ------------------------------------------------------------------------------

    def guard(self) -> None:
        """Let whoever uses a parameter whose values are still missing wait for them."""
        self.receive([key for key, one in self.pending.items() if not guardable(one)])
        for key, parameter in self.pending.items():
            guard(parameter, partial(self.receive, (key,)))

    def is_pending(self, key: str) -> bool:
        """Whether a parameter has old values."""
        return key in self.pending

    def receive(self, keys: Iterable[str] | None = None) -> None:
        """Write the values of these keys (None: of all) into their parameters, once they are here.

        Raises:
            Cancelled: the batch no longer counts, and is explicit.
        """
        if not self.pending:
            return
        for key in list(self.pending) if keys is None else keys:
            if key in self.pending:
                self._receive(key, self.pending[key])

    def _receive(self, key: str, parameter: Any) -> None:
        # First of all, as whatever is done to the parameter would wait for it again.
        release(parameter)
        if not self.vain:
            try:
                tensors.receive(self.batch, key, parameter)
            except Cancelled as error:
                self.cancel(error)
        self.pending.pop(key, None)

    def release(self) -> None:
        """Wait for nothing any more: parameters keep the values that they have."""
        for parameter in self.pending.values():
            release(parameter)
        self.pending.clear()

    # --- gradients ---------------------------------------------------------------------------

    def send(self, key: str, factor: float | None) -> None:
        """Push a parameter's gradient, times `factor` (of a scaler: then it must be finite).

        Raises:
            Cancelled: the batch no longer counts, and is explicit.
            KeyMismatch, PushRefused: see `Batch.push`.
        """
        if self.vain or self.overflow:
            return
        grad = self._parameters[key].grad
        self.sent[key] = _mark(grad)
        if factor is not None and not bool(torch.isfinite(_values(grad)).all()):
            self.overflow = True
            return
        self.send_given(key, grad, factor)

    def send_soon(self, key: str, grad: Any) -> None:
        """Push a parameter's gradient with those that come next, once they are `together_bytes`.

        In a backward pass nothing of Python's stays in the caches from one gradient to the next: a
        push by itself takes five times as long as one behind others.

        Raises: see `send`.
        """
        if self.vain or self.overflow:
            return
        if self.factor is not None or grad.layout is not torch.strided or not grad.is_cpu:
            self.send(key, self.factor)
            return
        self.sent[key] = (grad.data_ptr(), grad._version)
        self._gathered.append((key, grad))
        self._gathered_bytes += grad.nbytes
        if self._gathered_bytes >= self._together_bytes:
            self.flush()

    def flush(self) -> None:
        """Push what `send_soon` has kept.

        Raises: see `send`.
        """
        if not self._gathered:
            return
        gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if self.vain:
            return
        try:
            self.batch.push_all(
                ((key, tensors.clone_of(grad)) for key, grad in gathered), give=True
            )
        except Cancelled as error:
            self.cancel(error)

    def send_given(self, key: str, grad: Any, factor: float | None = None) -> None:
        """Push a gradient that need not be the parameter's own (see `send`)."""
        if self.vain:
            return
        try:
            with tensors.in_order_of(grad):
                self.batch.push(key, tensors.gradient_of(grad, factor))
        except Cancelled as error:
            self.cancel(error)

    def changed(self, bumps: int) -> str | None:
        """Return a key whose gradient was changed since it was sent, if there is one.

        `bumps`: how many changes in place are known to have changed nothing.
        """
        for key, mark in self.sent.items():
            grad = self._parameters[key].grad
            if mark is None or grad is None:
                continue
            now = _mark(grad)
            if now is not None and (now[0] != mark[0] or now[1] > mark[1] + bumps):
                return key
        return None

    # --- the end -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise Cancelled if the batch no longer counts and is explicit."""
        if self.vain and self.explicit:
            raise Cancelled("the batch was cancelled: the update happened without it")

    def cancel(self, error: Cancelled) -> None:
        """The policy has cancelled the batch; raise that again if the caller has a block."""
        self.vain = True
        self.release()
        if self.explicit:
            raise error

    def finish(self, weight: float | None, loss: float | None) -> str:
        """Leave the batch; return "pending", or "cancelled" if it is.

        Raises:
            ValueError, TypeError: weight or loss is none: then the batch is withdrawn.
        """
        self.release()
        try:
            self.flush()
            if weight is not None:
                self.batch.set_weight(weight)
            if loss is not None:
                self.batch.set_loss(loss)
        except BaseException as error:
            self.batch.__exit__(type(error), error, None)
            raise
        cancelled = self.vain or self.batch.cancelled
        self.batch.__exit__(None, None, None)
        return "cancelled" if cancelled else "pending"

    def withdraw(self) -> str:
        """Give the batch up: nothing of it counts. Return "withdrawn"."""
        self.release()
        if self.vain:
            return self.finish(None, None)
        error = _Given("the batch is given up")
        self.batch.__exit__(_Given, error, None)
        return "withdrawn"


class _Given(Exception):
    """What leaves a batch that is given up; nobody sees it."""


def _values(grad: Any) -> Any:
    return grad.detach() if grad.layout is torch.strided else grad.detach().coalesce().values()


def _mark(grad: Any) -> tuple[int, int] | None:
    """Return where a gradient is and its version; of a sparse one there is nothing to compare."""
    return (grad.data_ptr(), grad._version) if grad.layout is torch.strided else None
