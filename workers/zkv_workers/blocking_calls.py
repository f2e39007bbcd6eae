"""How the blocking worker's calls reach the loop beside it, and come back."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Callable
from typing import Any

from zkv.errors import Closed, RolledBack
from zkv_workers import faces
from zkv_workers import signals as s
from zkv_workers.driver import Driver
from zkv_workers.faces import Ledger
from zkv_workers.outgoing import Outlet
from zkv_workers.pipeline import Pipeline
from zkv_workers.state_faces import GoesBack, restore
from zkv_workers.waiting import answer_of, copy_result


class BlockingCalls(GoesBack):
    """A part of `Worker`. What it calls runs on the loop of the I/O thread."""

    _driver: Driver
    _ledger: Ledger
    _outlet: Outlet
    _loop: asyncio.AbstractEventLoop
    _left: bool
    _pid: int

    def _on_loop(self, make: Callable[[], Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(make(), self._loop).result()

    def _check(self) -> None:
        self._check_process()
        if self._left or self._loop.is_closed():
            raise Closed("the worker has left")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Closed(
                "this worker belongs to the process that connected; connect again after a fork"
            )

    def _check_heard(self, future: concurrent.futures.Future[Any]) -> None:
        """Check that the future is done, or can be in this process."""
        if not future.done():
            self._check_process()

    def _feed(self, *events: s.Input) -> None:
        self._check()
        self._loop.call_soon_threadsafe(self._driver.feed, *events)

    def _start(
        self, make: Callable[[int], s.Input], behind: Pipeline | None = None
    ) -> concurrent.futures.Future[Any]:
        self._check()
        outer: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def begin() -> None:
            try:
                inner = self._driver.call(make)
            except Exception as error:
                # Nobody else would hear of it: this runs on the I/O thread.
                outer.set_exception(error)
                return
            inner.add_done_callback(lambda done: copy_result(done, outer))
            outer.add_done_callback(lambda done: self._loop.call_soon_threadsafe(inner.cancel))

        if behind is None:
            self._loop.call_soon_threadsafe(begin)
        else:
            behind.put(lambda: self._driver.beside(begin))
        return outer

    def _call(self, make: Callable[[int], s.Input], *, behind: bool = True) -> Any:
        while True:
            if behind:  # What the last batch has pushed, and its end.
                with faces.draining(self._ledger, self._outlet.pipeline):
                    self._outlet.pipeline.drain()
            try:
                with faces.calling(self._ledger):
                    return answer_of(self._start(make))
            except RolledBack as told:
                self._outlet.pipeline.drain()
                self._feed(*self._forget(told))
                restore(self._encoder, self._driver)
                self._hear_of(told)

    def _look_back(self) -> None:
        """Hear of it if the run has gone back to a snapshot."""
        if self._driver.session.back.told is not None:
            self._call(s.Ask)

    def _reason(self) -> str:
        """Return whom this worker waits for, as far as is known."""
        return self._driver.session.requests.whom
