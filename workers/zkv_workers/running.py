"""The batches of one worker that are being computed, for those who begin, leave and cancel them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zkv_workers.model import BatchState


class Running:
    """The batches that are being computed, so that a cancellation finds them.

    Grants are taken on one thread and cancellations heard on another: one that comes in between is
    kept for the batch. Each side writes its own part before it reads the other's.
    """

    def __init__(self) -> None:
        self._states: dict[int, BatchState] = {}
        self._entered: dict[None, object] = {}
        """The batch whose block is entered, if there is one."""
        self._cancelled = 0
        """The newest batch that was cancelled: they are numbered, and only one runs at a time."""

    def add(self, state: BatchState) -> BatchState:
        """A batch begins; it may have been cancelled already."""
        self._states[state.number] = state
        if self._cancelled == state.number:
            state.cancelled = True
        return state

    @contextmanager
    def entering(self, batch: object) -> Iterator[None]:
        """A batch's block is being entered: it is the worker's only one from here on.

        Raises:
            RuntimeError: another one's is.
        """
        if self._entered.setdefault(None, batch) is not batch:
            raise RuntimeError(
                "a batch of this worker is open already: leave its block before the next one is "
                "entered, and use a worker from one thread (or task) at a time"
            )
        try:
            yield
        except BaseException:
            self.leave(batch)
            raise

    def leave(self, batch: object) -> None:
        """A batch's block is left."""
        if self._entered.get(None) is batch:
            self._entered.clear()

    def remove(self, number: int) -> None:
        """A batch is over."""
        self._states.pop(number, None)

    def is_cancelled(self, number: int) -> bool:
        """Return whether this batch is being computed in vain."""
        return number in self._states and self._states[number].cancelled

    def restart(self) -> None:
        """The run has gone back: nothing that runs counts, and batches are numbered anew."""
        for state in self._states.values():
            state.cancelled = True
        self._states.clear()
        self._cancelled = 0

    def cancel(self, number: int) -> None:
        """The policy cancels a batch."""
        self._cancelled = number
        state = self._states.get(number)
        if state is not None:
            state.cancelled = True
