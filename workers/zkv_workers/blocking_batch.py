"""One mini-batch of the blocking worker."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from zkv_workers import faces
from zkv_workers import signals as s
from zkv_workers.table_faces import BlockingRows
from zkv_workers.waiting import narrated, reclaim, watch

if TYPE_CHECKING:
    from zkv_workers.blocking import Worker


class Batch(BlockingRows):
    """One mini-batch: a context manager. Entering waits until the policy lets it begin."""

    def __init__(self, worker: Worker, weight: float | None) -> None:
        super().__init__(weight, worker._ledger, worker._running, worker._outlet)
        self._worker = worker

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until the batch is settled and return its outcome.

        Raises:
            WaitTimeout: it is not settled within `timeout_s` (None: the worker's
                `wait_timeout_s`); the batch may still count later.
            Closed: this is another process than the one that has computed it (after a fork).
        """
        if self._fate is not None:
            self._worker._check_heard(self._fate)
            config = self._worker._config
            patience_s = config.wait_timeout_s if timeout_s is None else timeout_s
            what = f"the fate of batch {self.number}"
            with faces.awaiting_fate(self._ledger):
                narrated(self._fate, config, patience_s, what, self._worker._reason)
            reclaim(self._encoder.buffers, config, self._worker._reason)
            self._worker._look_back()
        return self.outcome

    def __enter__(self) -> Batch:
        self._check_unused()
        with self._running.entering(self):
            if self._state is None:
                self._grant(self._worker._next_grant())
            worker = self._worker
            reclaim(self._encoder.buffers, worker._config, worker._reason)
            self._begin()
        return self

    def _begin_again(self) -> None:
        self._grant(self._worker._next_grant())

    def _wait_for(self, kids: tuple[int, ...], bids: tuple[int, ...]) -> None:
        self._worker._call(lambda token: s.Await(token, self.number, kids, bids), behind=False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        finish = self._end(error)
        if finish is None:
            self._encoder.buffers.left(self.number, None)
            return False
        self._fate = self._worker._start(
            finish, self._outlet.pipeline if self._out.beside else None
        )
        watch(self._fate, self._settled)
        self._encoder.buffers.left(self.number, self._fate)
        self._worker._look_back()
        return error is not None
