"""Forward and backward passes as spans of a trace; nothing at all where nothing is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zkv.spans import TRAINING, Spans
from zkv_workers.torch_hooks import OwnHook
from zkv_workers.torch_step import Step


class Passes:
    """One model's passes: forward from a batch's begin (or the last backward's end) until the
    model's forward returns, and backward, the loss included, from there to its end."""

    def __init__(self, model: Any, spans: Spans | None) -> None:
        self._spans = spans
        self._since = self._forwarded = 0.0
        hook = OwnHook(model, lambda args, output: self.forwarded())
        self._handle = None if spans is None else model.register_forward_hook(hook)

    def begun(self) -> None:
        """A batch begins."""
        if self._spans is not None:
            self._since = self._forwarded = self._spans.clock()

    def forwarded(self) -> None:
        """The model's forward has returned."""
        # A backward pass may compute parts of it again.
        if self._spans is not None and torch._C._current_graph_task_id() == -1:
            self._forwarded = self._spans.clock()

    def ended(self, step: Step) -> Callable[[], None]:
        """Return what PyTorch calls when the backward pass has come to its end."""

        def ended() -> None:
            step.flush()
            step.in_backward = False
            if self._spans is not None:
                now, number = self._spans.clock(), step.batch.number
                self._spans.span(TRAINING, "forward", self._since, self._forwarded, batch=number)
                self._spans.span(TRAINING, "backward", self._forwarded, now, batch=number)
                self._since = self._forwarded = now

        return ended

    def remove(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
