"""One mini-batch of the asyncio worker."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from zkv.errors import WaitTimeout
from zkv.span_split import VALUES
from zkv_workers import faces
from zkv_workers import signals as s
from zkv_workers.config import SessionConfig
from zkv_workers.faces import Clock, Key
from zkv_workers.table_faces import AsyncRows

if TYPE_CHECKING:
    from zkv_workers.aio import AsyncWorker

log = logging.getLogger("zkv.worker")


class AsyncBatch(AsyncRows):
    """One mini-batch: an async context manager. Entering waits until the policy lets it begin."""

    def __init__(self, worker: AsyncWorker, weight: float | None, *, early: bool = False) -> None:
        super().__init__(weight, worker._ledger, worker._running, worker._outlet)
        self._worker = worker
        self._early = early

    async def arrived(self, *keys: Key) -> None:
        """Wait until the values of these keys (none named: of all) are here.

        Only a batch that is entered early has to.

        Raises:
            UnknownKey: no key of the model.
            WaitTimeout: they did not come in time; the text says from whom.
        """
        while True:
            if self._is_to_begin_again:
                self._grant(await self._worker._next_grant())
            kids, number = self._lacking(keys or None), self.number
            if not kids:
                return
            wanted = faces.named(keys or None)
            waiting = Clock(self._ledger, "wait_s", VALUES, keys=wanted)
            try:
                await self._worker._driver.call(partial(s.Await, batch=number, kids=kids))
            finally:
                self._waited_s += waiting.stop()

    def _begin_again(self) -> None:
        """Nothing can be waited for here: `arrived` does it."""

    def _wait_for(self, kids: tuple[int, ...], bids: tuple[int, ...]) -> None:
        raise RuntimeError(
            "these values are still on their way, as the batch was entered early: "
            "`await batch.arrived(key)` first"
        )

    async def wait(self, timeout_s: float | None = None) -> str:
        """Wait until the batch is settled and return its outcome.

        Raises:
            WaitTimeout: it is not settled within `timeout_s` (None: the worker's
                `wait_timeout_s`); the batch may still count later.
        """
        if self._fate is not None:
            config = self._worker._config
            patience_s = config.wait_timeout_s if timeout_s is None else timeout_s
            what = f"the fate of batch {self.number}"
            with faces.awaiting_fate(self._ledger):
                await self._narrated(self._fate, config, patience_s, what)
            await self._reclaim()
            await self._worker._look_back()
        return self.outcome

    async def _reclaim(self) -> None:
        """Wait until the arrays that earlier batches have lent are the caller's again."""
        buffers, patience_s = self._encoder.buffers, self._worker._config.wait_timeout_s
        for batch, fate in buffers.lent:
            what = f"the fate of batch {batch}, whose gradients lie in `worker.buffers`"
            if fate is not None and not fate.done():
                await self._narrated(fate, self._worker._config, patience_s, what)
            for _ in faces.looks(patience_s):
                if buffers.free(batch):
                    break
                await asyncio.sleep(faces.LOOK_S)
            else:
                raise WaitTimeout(faces.still_lent(batch, patience_s))

    async def _narrated(
        self, fate: asyncio.Future[s.Fate], config: SessionConfig, patience_s: float, what: str
    ) -> None:
        requests = self._worker._driver.session.requests
        for turn, pause_s in enumerate(faces.pauses(config, patience_s)):
            if turn:
                log.warning("%s", faces.explained(f"waiting for {what}", requests.whom))
            if (await asyncio.wait({fate}, timeout=pause_s))[0]:
                break
        else:
            text = f"{what} did not come within {patience_s:g} s"
            raise WaitTimeout(faces.explained(text, requests.whom))
        await asyncio.shield(fate)

    def _done(self, fate: asyncio.Future[s.Fate]) -> None:
        if not fate.cancelled() and fate.exception() is None:
            self._settled(fate.result())

    async def __aenter__(self) -> AsyncBatch:
        self._check_unused()
        with self._running.entering(self):
            if self._state is None:
                self._grant(await self._worker._next_grant())
            await self._reclaim()
            self._begin()
        if not self._early:
            try:
                await self.arrived()
            except BaseException:
                # Its block is not entered, so nobody else would give the grant back.
                self.abandon()
                raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        finish = self._end(error)
        if finish is None:
            self._encoder.buffers.left(self.number, None)
            return False
        behind = self._outlet.pipeline if self._out.beside else None
        self._fate = self._worker._driver.call(finish, behind)
        self._fate.add_done_callback(self._done)
        self._encoder.buffers.left(self.number, self._fate)
        await self._worker._look_back()
        return error is not None
