"""One batch of an attached model as a context manager."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from zkv.errors import Cancelled
from zkv_workers.blocking import Batch
from zkv_workers.torch_step import Step

if TYPE_CHECKING:
    from zkv_workers.torch_optimizer import Optimizer


class Block:
    """One batch as a context manager (made by `Optimizer.batch` and `Optimizer.batches`).

    Entering waits until the policy lets it begin and returns the worker's `Batch`; leaving finishes
    it. In a cancelled batch the next hook raises `Cancelled`, which the block swallows; any other
    exception withdraws it, and goes on.
    """

    def __init__(self, optimizer: Optimizer, batch: Batch) -> None:
        self._optimizer, self._batch = optimizer, batch
        self._step: Step | None = None

    def __enter__(self) -> Batch:
        self._step = self._optimizer._begin(self._batch, explicit=True)
        return self._batch

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        step = self._step
        if step is None or self._optimizer._step is not step:
            return False  # It was finished inside, by step().
        if error is None:
            try:
                self._optimizer.step()
                return False
            except Cancelled as late:
                error = late
        step.vain = step.vain or isinstance(error, Cancelled)
        self._optimizer._close()
        return isinstance(error, Cancelled)
