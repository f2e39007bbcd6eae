"""The optimizer of an attached PyTorch model: its steps are batches of a worker.

Hooks call it from inside the forward and the backward pass; what they see of a batch is in
`torch_step`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zkv.errors import Cancelled, StaleValues
from zkv.optimizer_spec import optimizer as optimizer_spec
from zkv.pool import Shard
from zkv_workers import torch_tensors as tensors
from zkv_workers.blocking import Batch, Worker
from zkv_workers.outgoing import TOGETHER_BYTES
from zkv_workers.torch_block import Block
from zkv_workers.torch_buffers import Buffers
from zkv_workers.torch_hooks import Hooks
from zkv_workers.torch_passes import Passes
from zkv_workers.torch_step import Step
from zkv_workers.torch_survey import Survey

PARTS = 16
"""Gradients leave in about so many parts: few enough that handing them over takes little of a
backward pass, and enough that the first leaves when the pass has hardly begun."""


class Optimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """The optimizer of an attached model: rule and state are on the servers (made by `attach`).

    `step` finishes the batch that the first forward pass since the last one has begun; or
    ``with optimizer.batch(weight=len(x)):`` is around it, without `step`. `param_groups` is one
    group; what a scheduler of PyTorch writes into its "lr" on rank 0 holds for all from that step
    on.

    Calls may come from any one thread at a time. PyTorch runs the backward pass of what is on a GPU
    on a thread of its own while the caller waits for it; this is no second thread in this sense.
    """

    _step_supports_amp_scaling = True
    """A GradScaler leaves the skipping of steps to `step`, and tells it what it has found."""

    def __init__(
        self,
        model: Survey,
        worker: Worker,
        buffers: Buffers,
        *,
        weight: float,
        overlap: bool,
        early: bool,
        scaler: Any,
    ) -> None:
        rate = optimizer_spec(worker.status()["optimizer"]).lr
        self._survey, self._worker, self._buffers = model, worker, buffers
        self._weight, self._overlap, self._early = weight, overlap, early
        self._fixed = False
        """Whether the last step() has left the weight as it is."""
        self._scaler, self._lr, self._back = scaler, rate, worker.gone_back
        whole = sum(parameter.nbytes for parameter in model.trained.values())
        self._together_bytes = min(whole // PARTS, TOGETHER_BYTES)
        self._step: Step | None = None
        self._syncing = True
        self._ran: set[int] = set()
        self._at_once: set[str] | None = None
        """Keys that are waited for when a batch begins; None: all, as no batch has shown yet
        which modules' hooks are run."""
        self._hooks: Hooks | None = None
        self.last: Batch | None = None
        """The batch of the newest step; its `outcome` tells what became of it, `wait()` waits."""
        super().__init__(list(model.trained.values()), {"lr": rate})
        # A graph that is compiled is broken here, quietly.
        forward = self._forward if early else torch.compiler.disable(self._forward)
        self._passes = Passes(model.model, worker._ledger.spans)
        self._hooks = Hooks(model, forward, self._gradient, owners=early)

    # --- the loop ----------------------------------------------------------------------------

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        weight: float | None = None,
        loss: float | None = None,
    ) -> Any:
        """Finish the batch; return "pending", "cancelled" or "withdrawn", or what `closure` does.

        A parameter without a gradient is a skipped key; one whose gradient has only been
        accumulated is sent now. When it returns, the model's parameters are one whole version: the
        one that this batch was computed on (unless it was cancelled).

        Args:
            closure: computes the loss and its gradients first, as for any optimizer of PyTorch.
            weight: how many samples the gradients are the mean of; None: attach's `weight`.
            loss: see `Batch.set_loss`.

        Raises:
            RuntimeError: no batch has begun; or a gradient was changed after it was sent, which
                withdraws it.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        if self._scales and not hasattr(self, "found_inf"):
            outcome = self._scaler.step(self, weight=weight, loss=loss)
            self._scaler.update()
        else:
            outcome = self._finish(weight, loss)
        return outcome if closure is None else value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, or to zero.

        If some were sent already and `step` was not called, the batch is withdrawn: nothing of it
        counts, and the next forward pass begins another.

        Raises:
            RuntimeError: they were sent inside of a block, which only an exception withdraws.
        """
        if self._step is not None:
            if self._step.sent and self._step.explicit:
                raise RuntimeError(
                    "gradients of this batch are sent already, so they cannot be set to zero; "
                    "raise an exception in its block to withdraw it"
                )
            if self._step.sent:
                self._close()
            else:
                self._step.cleared = True
        super().zero_grad(set_to_none)

    def batch(self, weight: float | None = None) -> Block:
        """Return the next batch, of `weight` samples (None: attach's), as a context manager."""
        return Block(self, self._worker.batch(self._weight if weight is None else weight))

    def batches(self, data: Shard) -> Iterator[Block]:
        """Return all batches that the run deals to this worker (see `Worker.batches`):
        ``for block in …: with block as batch:``, where `batch.samples` are its samples."""
        for batch in self._worker.batches(data):
            yield Block(self, batch)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate gradients; the next one outside sends the sum."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def pull(self) -> int:
        """Write the newest whole version of the model into its parameters; return its number.

        Raises:
            RuntimeError: inside of a batch, whose values must stay.
        """
        if self._step is not None:
            raise RuntimeError("a batch is open: its gradients belong to the values that are here")
        model = self._worker.evaluate()
        for key, parameter in self._survey.trained.items():
            tensors.write(key, model.params[key], parameter)
        return model.version

    def sync_buffers(self) -> None:
        """Keep the buffers alike now, before an evaluation, say: all workers have to call it.

        Raises:
            WaitTimeout: the others did not call it in time; the text says who is missing.
            PushRefused: a buffer of this worker is not finite; it is named.
        """
        self._buffers.sync()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate from the next step on (rank 0's holds for all)."""
        self.param_groups[0]["lr"] = lr

    def detach(self) -> None:
        """Remove all hooks; an open batch is withdrawn. The model keeps its values."""
        if self._hooks is not None:
            if self._step is not None:
                self._close()
            self._hooks.remove()
            self._passes.remove()
            self._hooks = None

    def state_dict(self) -> dict[str, Any]:
        """Raise RuntimeError: the state is on the servers."""
        raise RuntimeError(
            "this optimizer's state is on the servers, so there is none to save or to load here; "
            "optimizer.pull() brings the newest model, and model.state_dict() or `zkv export` "
            "saves it"
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """Raise RuntimeError: the state is on the servers."""
        self.state_dict()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError: keys are those of the model when it was attached."""
        if self._hooks is not None:
            raise RuntimeError(
                "an attached model has one group of parameters; rates and decay by key belong into "
                "the servers' optimizer, such as 'sgd:lr=0.1;head.*:lr=10x'"
            )
        super().add_param_group(param_group)

    # --- inside ------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether the model still has its hooks."""
        return self._hooks is not None

    @property
    def _scales(self) -> bool:
        return self._scaler is not None and self._scaler.is_enabled()

    def _begin(self, batch: Batch, *, explicit: bool) -> Step:
        if self._hooks is None:
            raise RuntimeError("the model was detached from this optimizer")
        if self._step is not None:
            raise RuntimeError("a batch is open already: step() or its block's end finishes it")
        self._survey.check()
        factor = 1.0 / self._scaler.get_scale() if self._scales else None
        batch.__enter__()
        self._passes.begun()
        step = self._step_of(batch, factor)
        self._step, self.last = step, batch
        self._ran.clear()
        try:
            step.receive(self._at_once if self._early else None)
            step.guard()
        except BaseException:
            self._close()
            raise
        # From here on there is a block that `Cancelled` may leave.
        step.explicit = explicit
        return step

    def _step_of(self, batch: Batch, factor: float | None) -> Step:
        return Step(batch, self._survey.trained, factor, self._together_bytes)

    def _forward(self, module: Any, place: int) -> None:
        """A module's forward begins."""
        step = self._step
        inside = torch._C._current_graph_task_id() != -1
        if step is not None and not step.explicit and not inside:
            # A backward pass that has failed, or a batch computed in vain whose gradients are gone.
            again = step.vain and step.cleared and module is self._survey.model
            if step.in_backward or again:
                self._close()
                step = None
        if step is None:
            if not torch.is_grad_enabled():
                return
            # What step() says may be another weight; servers need not guess twice.
            weight = self._weight if self._fixed else None
            step = self._begin(self._worker.batch(weight), explicit=False)
        if not inside and step.thread is not threading.current_thread():
            raise RuntimeError(
                f"the model is computed on thread {threading.current_thread().name!r} while a "
                f"batch is open on {step.thread.name!r}: give the other thread a copy of the model"
            )
        step.check()
        self._ran.add(place)
        if place >= 0:
            step.receive(self._survey.owners[place].keys)

    def _gradient(self, key: str, parameter: Any) -> None:
        """A parameter's gradient is complete."""
        step = self._step
        if step is None:
            raise RuntimeError(
                f"key {key!r}: a gradient came while no batch is open; call the model (its forward "
                "pass begins one) and step() once for each, or use `with optimizer.batch():`"
            )
        if not step.in_backward:
            step.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._passes.ended(step))
        if step.vain:
            step.check()
        if step.pending and step.is_pending(key):
            if self._at_once is not None:
                self._at_once.add(key)
            raise StaleValues(
                f"key {key!r}: its gradient was computed on values of an earlier batch, by code "
                "that PyTorch cannot be asked about; from the next batch on they are waited for at "
                "its begin (attach(early=False) does that for all)"
            )
        if not self._syncing or not self._overlap:
            return
        if key in step.sent:
            raise RuntimeError(
                f"key {key!r}: a second gradient in one batch, after the first was sent; put all "
                "but the last backward pass into `with optimizer.no_sync():`"
            )
        step.send_soon(key, parameter.grad)

    def _finish(self, weight: float | None, loss: float | None) -> str:
        step = self._step
        if step is None:
            raise RuntimeError(
                "step() without a batch: the forward pass of the model, with gradients enabled, "
                "begins one"
            )
        if step.in_backward or step.overflow or float(getattr(self, "found_inf", 0.0)) > 0:
            return self._close()
        try:
            if not step.vain:
                self._send_rest(step)
            self._forward_lr()
        except Cancelled:
            raise  # Of a block, which ends it.
        except BaseException:
            self._close()
            raise
        self._step = None
        self._fixed = weight is None
        weight = self._weight if weight is None and not step.explicit else weight
        outcome = step.finish(weight, loss)
        self._note_hooks(step)
        self._buffers.finished()
        return outcome

    def _send_rest(self, step: Step) -> None:
        scaled = getattr(self, "grad_scale", None)
        if scaled is not None and step.sent and step.factor is None:
            raise RuntimeError(
                "gradients were sent with a scaler's factor on them: attach(..., scaler=scaler)"
            )
        changed = step.changed(1 if hasattr(self, "found_inf") else 0)
        if changed is not None:
            raise RuntimeError(
                f"key {changed!r}: its gradient was changed after it was sent; clip on the servers "
                "(clip_global_norm), or attach(overlap=False), which sends gradients in step()"
            )
        for key, parameter in self._survey.trained.items():
            if parameter.grad is not None and key not in step.sent:
                step.send(key, None if scaled is None else 1.0 / float(scaled))
        for key, parameter in self._survey.frozen.items():
            if parameter.grad is not None:
                raise RuntimeError(
                    f"key {key!r} has a gradient, but was frozen when the model was attached; call "
                    "optimizer.detach() and attach it again"
                )
        step.receive()

    def _forward_lr(self) -> None:
        # A run that has gone back has the rate that it had there.
        rate, back = float(self.param_groups[0]["lr"]), self._worker.gone_back
        if (rate, back) != (self._lr, self._back):
            if self._worker.rank == 0:
                self._worker.set(lr=rate)
            self._lr, self._back = rate, back

    def _note_hooks(self, step: Step) -> None:
        """Note, once, whose modules' hooks were not run: a function may use their parameters."""
        if self._at_once is None and not step.vain:
            self._at_once = {
                key
                for place, one in enumerate(self._survey.owners)
                if place not in self._ran
                for key in one.keys
            }

    def _close(self) -> str:
        """Give the open batch up."""
        step, self._step = self._step, None
        return "withdrawn" if step is None else step.withdraw()
