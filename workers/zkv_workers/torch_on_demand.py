"""The optimizer of a model that its worker does not hold: each layer's values come just in time.

It is `torch_optimizer`'s, whose hooks also say when a layer begins and ends; gradients go as they
come, and their memory with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from zkv.dtypes import Array
from zkv.errors import Cancelled
from zkv.placement import BLOCK_BYTES
from zkv_workers import signals as s
from zkv_workers.blocking import Batch, Worker
from zkv_workers.torch_buffers import Buffers
from zkv_workers.torch_hooks import OwnHook
from zkv_workers.torch_layers import Layers
from zkv_workers.torch_memory import Memory
from zkv_workers.torch_optimizer import Optimizer
from zkv_workers.torch_step import Step
from zkv_workers.torch_survey import Survey

NOT_HERE = (
    "with just_in_time the model is at the servers: worker.pull(keys) reads some of it, and "
    "`zkv export` saves all of it"
)


class JustInTimeStep(Step):
    """A batch whose values nobody waits for: layers fetch their own."""

    def guard(self) -> None:
        """Do nothing: who uses a parameter without values fetches them."""

    def is_pending(self, key: str) -> bool:
        """Return that no parameter has old values."""
        return False

    def receive(self, keys: Iterable[str] | None = None) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing: the optimizer does, when the batch is over."""


class JustInTime(Optimizer):
    """The optimizer of `attach(just_in_time=True)`: no more of the model is here than is in use.

    `memory.held_bytes` tells how much that is, and `memory.held_bytes_max` how much it was at most.
    """

    def __init__(
        self, model: Survey, worker: Worker, buffers: Buffers, *, weight: float, ahead: int
    ) -> None:
        worker.on_demand = True
        super().__init__(
            model, worker, buffers, weight=weight, overlap=True, early=True, scaler=None
        )
        self.memory = Memory(model.trained, self._use)
        self._layers = Layers(
            model.owners, self.memory, ahead, self._fill, self._want, self._forget
        )
        self._room_bytes = max(
            4 * BLOCK_BYTES, *(self.memory.nbytes(one.keys) for one in model.owners)
        )
        """So much of the gradients may be on its way while the backward pass goes on."""
        self._every_bytes = BLOCK_BYTES
        """After how much of them that is looked at."""
        self._pushed_bytes = 0
        places = {id(one.module): place for place, one in enumerate(model.owners)}
        modules = {id(one.module): one.module for one in model.owners}
        modules[id(model.model)] = model.model
        self._leaving = []
        for number, module in modules.items():
            left = partial(self._left, places.get(number, -1))
            hook = OwnHook(module, lambda args, output, left=left: left(output))
            self._leaving.append(module.register_forward_hook(hook, always_call=True))

    # --- what is different -------------------------------------------------------------------

    def pull(self) -> int:
        """Raise RuntimeError: there is no room for the model here."""
        raise RuntimeError(f"optimizer.pull() has nowhere to put the model: {NOT_HERE}")

    def no_sync(self) -> Any:
        """Raise RuntimeError: gradients are not kept here."""
        raise RuntimeError(
            "just_in_time keeps no gradients, so it cannot accumulate them: make batches smaller "
            "and let more of them count (`weight`), or attach without just_in_time"
        )

    def state_dict(self) -> dict[str, Any]:
        """Raise RuntimeError: the state is on the servers."""
        raise RuntimeError(f"this optimizer's state is on the servers; {NOT_HERE}")

    def detach(self) -> None:
        """Remove all hooks; an open batch is withdrawn. The parameters stay without values: attach
        the model again, or give them memory of their own."""
        super().detach()
        for handle in self._leaving:
            handle.remove()
        self._leaving.clear()
        self._layers.over()

    # --- values ------------------------------------------------------------------------------

    def _fill(self, outs: dict[str, Array]) -> None:
        """Write these keys' values of the batch's version; where none counts, of the newest one."""
        step = self._step
        if step is not None and not step.vain:
            try:
                step.batch.fetch(outs)
            except Cancelled as error:
                step.cancel(error)
            else:
                return
        for key, array in self._worker.pull(list(outs)).items():
            outs[key][...] = array

    def _want(self, keys: list[str]) -> None:
        if self._step is not None and not self._step.vain:
            self._step.batch.want(keys)

    def _forget(self, keys: list[str]) -> None:
        if self._step is not None and not self._step.vain:
            self._step.batch.forget(keys)

    def _use(self, key: str) -> None:
        """A parameter without values is used."""
        evaluating = self._layers.running and not torch.is_grad_enabled()
        if self._step is None and not evaluating:
            raise RuntimeError(
                f"key {key!r} has no values here: they come when the model is computed, inside of "
                f"a batch or without gradients; {NOT_HERE}"
            )
        self._layers.use(key)

    # --- passes ------------------------------------------------------------------------------

    def _step_of(self, batch: Batch, factor: float | None) -> Step:
        self._layers.over()
        return JustInTimeStep(batch, self._survey.trained, factor)

    def _forward(self, module: Any, place: int) -> None:
        # Without gradients and outside of a batch the newest values are read, and none is begun.
        if self._step is not None or torch.is_grad_enabled():
            super()._forward(module, place)
        self._layers.enter(place)

    def _left(self, place: int, output: Any) -> None:
        self._layers.leave(place, output)
        if self._step is None and not self._layers.running:
            self._layers.over()

    def _gradient(self, key: str, parameter: Any) -> None:
        step = self._step
        if step is not None and key in step.sent:
            step.in_backward = True  # It will not come to its end.
            raise RuntimeError(
                f"key {key!r}: a second gradient in one batch, after the first was sent; with "
                "just_in_time a batch has one backward pass: add the losses up before it"
            )
        super()._gradient(key, parameter)
        parameter.grad = None
        self._layers.sent(key)
        self._pushed_bytes += self.memory.nbytes([key])
        if self._pushed_bytes >= self._every_bytes:
            self._pushed_bytes = 0
            # Else all gradients would be here at once where they are made faster than they go.
            self._worker._call(lambda token: s.Room(token, self._room_bytes), behind=False)

    def _finish(self, weight: float | None, loss: float | None) -> str:
        try:
            return super()._finish(weight, loss)
        finally:
            if self._step is None:
                self._layers.over(whole=True)

    def _note_hooks(self, step: Step) -> None:
        """Note nothing: each parameter is fetched by whoever uses it."""

    def _close(self) -> str:
        try:
            return super()._close()
        finally:
            self._layers.over()
