"""Waiting in one thread for what another one's loop finds out."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable
from typing import Any

from zkv.errors import WaitTimeout
from zkv_workers import faces
from zkv_workers import signals as s
from zkv_workers.buffers import Buffers
from zkv_workers.config import SessionConfig

log = logging.getLogger("zkv.worker")


class Pushed:
    """A plain push on its way. `result()` waits until it is settled."""

    def __init__(
        self,
        future: concurrent.futures.Future[s.Fate],
        check: Callable[[concurrent.futures.Future[Any]], None],
    ) -> None:
        self._future, self._check = future, check

    def done(self) -> bool:
        """Return whether the push is settled."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> str:
        """Return "committed", "cancelled" or "discarded".

        Raises:
            PushRefused: a guard refused it; key and reason are named.
            WaitTimeout: it is not settled within `timeout_s`.
            Closed: this is another process than the one that has pushed (after a fork).
        """
        self._check(self._future)
        fate: s.Fate = result_of(self._future, timeout_s, "the fate of a push")
        error = faces.refusal(fate)
        if error is not None:
            raise error
        return fate.outcome


def copy_result(source: asyncio.Future[Any], target: concurrent.futures.Future[Any]) -> None:
    """Give a future of another thread the outcome of one of the loop."""
    if source.cancelled():
        target.cancel()
    elif target.set_running_or_notify_cancel():
        error = source.exception()
        if error is not None:
            target.set_exception(error)
        else:
            target.set_result(source.result())


def answer_of(future: concurrent.futures.Future[Any]) -> Any:
    """Wait for the answer of a call; Ctrl-C gives the call up."""
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        raise


def result_of(future: concurrent.futures.Future[Any], timeout_s: float | None, what: str) -> Any:
    """Wait for a future of the I/O thread.

    Raises:
        WaitTimeout: nothing came within `timeout_s`; `what` is named.
    """
    try:
        return future.result(timeout_s)
    except concurrent.futures.TimeoutError:
        if future.done():
            raise
        raise WaitTimeout(f"{what} is not known after {timeout_s} s") from None


def narrated(
    future: concurrent.futures.Future[Any],
    config: SessionConfig,
    patience_s: float,
    what: str,
    reason: Callable[[], str],
) -> Any:
    """Wait for a future of the I/O thread, and log why it takes so long.

    Raises:
        WaitTimeout: nothing came within `patience_s`; `what` is named, and who is missing.
    """
    for turn, pause_s in enumerate(faces.pauses(config, patience_s)):
        if turn:
            log.warning("%s", faces.explained(f"waiting for {what}", reason()))
        if concurrent.futures.wait([future], pause_s).done:
            return future.result()
    raise WaitTimeout(faces.explained(f"{what} did not come within {patience_s:g} s", reason()))


def reclaim(buffers: Buffers, config: SessionConfig, reason: Callable[[], str]) -> None:
    """Wait until the arrays that earlier batches have lent are the caller's again.

    Raises:
        WaitTimeout: some are not within `wait_timeout_s`; the batch is named, and who is missing.
        BufferError: one was changed while it was lent.
    """
    for batch, fate in buffers.lent:
        what = f"the fate of batch {batch}, whose gradients lie in `worker.buffers`"
        if fate is not None and not fate.done():
            narrated(fate, config, config.wait_timeout_s, what, reason)
        for _ in faces.looks(config.wait_timeout_s):
            if buffers.free(batch):
                break
            time.sleep(faces.LOOK_S)
        else:
            raise WaitTimeout(faces.still_lent(batch, config.wait_timeout_s))


def watch(fate: concurrent.futures.Future[s.Fate], settled: Callable[[s.Fate], None]) -> None:
    """Call `settled` with what becomes of a batch, once that is known."""
    # Futures keep what they have called: a batch would be a cycle, and its values would be here
    # until some day cycles are looked for.
    waiting = [settled]

    def done(done: concurrent.futures.Future[s.Fate]) -> None:
        settled = waiting.pop()
        if not done.cancelled() and done.exception() is None:
            settled(done.result())

    fate.add_done_callback(done)
