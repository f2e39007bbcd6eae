"""The asyncio worker: the same verbs as the blocking one, for code that has a loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Unpack

from zkv.dtypes import Array
from zkv.errors import Closed, WaitTimeout
from zkv.pool import Shard
from zkv.span_split import VALUES
from zkv.tables import Table
from zkv.time_split import Part
from zkv_net import tracing
from zkv_workers import faces, figures
from zkv_workers import signals as s
from zkv_workers.config import SessionConfig
from zkv_workers.driver import Driver
from zkv_workers.encoding import Encoder
from zkv_workers.faces import Clock, Key, Ledger, Model
from zkv_workers.fragments import Fragments
from zkv_workers.local import AsyncLocal
from zkv_workers.model import ConnectOptions, session_config
from zkv_workers.outgoing import Outlet
from zkv_workers.pipeline import Pipeline
from zkv_workers.running import Running
from zkv_workers.samples import Source
from zkv_workers.table_faces import AsyncRows, AsyncTables

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

    def _wait_for(self, kids: tuple[int, ...]) -> None:
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
        return self.outcome

    async def _narrated(
        self, fate: asyncio.Future[s.Fate], config: SessionConfig, patience_s: float, what: str
    ) -> None:
        requests = self._worker._driver.session.requests
        for turn, pause_s in enumerate(faces.pauses(config, patience_s)):
            if turn:
                log.warning("%s", faces.explained(f"waiting for {what}", requests.reason))
            if (await asyncio.wait({fate}, timeout=pause_s))[0]:
                break
        else:
            text = f"{what} did not come within {patience_s:g} s"
            raise WaitTimeout(faces.explained(text, requests.reason))
        await asyncio.shield(fate)

    def _done(self, fate: asyncio.Future[s.Fate]) -> None:
        if not fate.cancelled() and fate.exception() is None:
            self._settled(fate.result())

    async def __aenter__(self) -> AsyncBatch:
        self._check_unused()
        with self._running.entering(self):
            if self._state is None:
                self._grant(await self._worker._next_grant())
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
            return False
        behind = self._outlet.pipeline if self._out.beside else None
        self._fate = self._worker._driver.call(finish, behind)
        self._fate.add_done_callback(self._done)
        return error is not None


class AsyncWorker(AsyncTables):
    """A member of a cluster, for asyncio. Made by `zkv.aio.connect`; use it with `async with`."""

    def __init__(self, config: SessionConfig, route: str) -> None:
        self._config = config
        self._route = route
        self._ledger = Ledger(keeps=figures.wanted(config), spans=tracing.recorder(config.trace))
        self._encoder = Encoder()
        self._pipeline = Pipeline(bytes_max=config.window_bytes, patience_s=config.wait_timeout_s)
        self._running = Running()
        self._member: s.Membership | None = None
        self._made: Driver | None = None
        self._closed = False

    @property
    def _driver(self) -> Driver:
        if self._made is None:
            raise Closed(
                "the worker is not connected: `async with zkv.aio.connect(...) as worker:`"
            )
        return self._made

    @property
    def _outlet(self) -> Outlet:
        driver = self._driver
        return Outlet(
            self._encoder,
            self._pipeline,
            driver.feed,
            lambda *events: driver.beside(driver.feed, *events),
            self._ledger.meter,
            self._ledger.spans,
        )

    async def connect(self) -> AsyncWorker:
        """Join the cluster.

        Raises:
            ClusterNotReady: it is not complete within `connect_timeout_s`; the text says who is
            missing.
        """
        self._made = Driver(self._config, route=self._route, spans=self._ledger.spans)
        self._made.cancelled = self._running.cancel
        try:
            self._member = await self._made.call(s.Join)
            faces.prepare(self._encoder, self._made, self._member)
            figures.before_sigterm(self._config, self._member, self._made, self._ledger)
        except BaseException:
            self._made.close()
            raise
        return self

    @property
    def rank(self) -> int:
        """This worker's number: its place in sums, and its rank if it was given one."""
        return self._joined.number

    @property
    def world(self) -> int:
        """How many workers take part, as stated at the start, or as were here when this one
        joined."""
        return self._joined.world

    @property
    def _joined(self) -> s.Membership:
        if self._member is None:
            raise Closed(
                "the worker is not connected: `async with zkv.aio.connect(...) as worker:`"
            )
        return self._member

    async def init(
        self,
        params: Any,
        *,
        rule: str = "",
        reduce: str = "",
        allow_nan: bool = False,
        absent: str = "zero",
        plain: bool = False,
        tables: Mapping[Key, Table] | None = None,
    ) -> None:
        """Initialise keys: the first worker's values count, the others get them (see
        `Worker.init`)."""
        make = faces.initialise(
            params,
            rule=rule,
            reduce=reduce,
            allow_nan=allow_nan,
            absent=absent,
            plain=plain,
            tables=tables,
        )
        await self._ask(make)

    def batch(self, weight: float | None = 1.0, *, early: bool = False) -> AsyncBatch:
        """Return the next mini-batch, of `weight` samples, as an async context manager.

        `weight` None: `set_weight` says it before the block is left; servers wait for it.

        `early`: enter it as soon as it is granted, while its values are on their way; then
        `await batch.arrived("w1")` before `batch["w1"]`.
        """
        return AsyncBatch(self, weight, early=early)

    async def batches(self, data: Shard) -> AsyncIterator[AsyncBatch]:
        """Return all batches that the run deals to this worker (see `Worker.batches`):
        ``async for batch in …: async with batch:``."""
        source = Source(data)
        await self._ask(lambda token: s.UsePool(token, data))
        while True:
            source.check()
            self._ledger.raise_refused()
            grant = await self._next_grant()
            if grant is None:
                return
            batch = AsyncBatch(self, 1.0)
            source.hand_out(batch, grant)
            yield batch

    async def _next_grant(self) -> s.Grant | None:
        with faces.awaiting_grant(self._ledger, self._driver.session):
            grant: s.Grant | None = await self._ask(s.Begin)
        if grant is not None:
            codecs = (grant.codec, grant.codec_down, grant.chosen)
            if not self._encoder.uses(*codecs):
                # Kernels that were never compiled on this machine take seconds.
                with self._ledger.meter.on(Part.ENCODE):
                    await asyncio.to_thread(faces.use_codecs, self._encoder, self._ledger, grant)
        return grant

    async def _drained(self) -> None:
        """Wait until all that was pushed is encoded and given to the session; no job needs the
        loop."""
        if self._pipeline.idle:
            # The last job may have left its end to the loop's next turn.
            await asyncio.sleep(0)
        else:
            await asyncio.to_thread(self._pipeline.drain)

    async def _ask(self, make: Callable[[int], s.Input]) -> Any:
        """Make a call behind what the last batch has pushed, and its end."""
        with faces.draining(self._ledger, self._pipeline):
            await self._drained()
        with faces.calling(self._ledger):
            return await self._driver.call(make)

    def local(self, h: int, *, fragments: Fragments = 1, mixing: float = 0.0) -> AsyncLocal:
        """Return rounds of `h` local batches (see `Worker.local`), entered with `async with`."""
        return AsyncLocal(self, h, fragments, mixing)

    def push(self, key: Key, value: Any, *, weight: float = 1.0) -> asyncio.Future[str]:
        """Push one key by itself; returns at once, the future has the outcome."""
        self._ledger.raise_refused()
        key, flat, number = faces.plain_push(self._driver, key, value, weight)
        fate = self._driver.call(lambda token: s.PushPlain(token, key, flat, number))
        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        fate.add_done_callback(lambda done: _outcome(done, outcome))
        return outcome

    async def pull(self, keys: Any = None) -> Any:
        """Return a key's value, a dict for a list of keys, or the whole model (see
        `Worker.pull`)."""
        self._ledger.raise_refused()
        wanted = faces.keys_of(keys)
        arrays = faces.pulled(await self._ask(lambda token: s.Pull(token, wanted)), wanted)
        return arrays[wanted[0]] if isinstance(keys, str | int) else arrays

    async def pushpull(self, key: Key, value: Any, *, weight: float = 1.0) -> Array:
        """Push one key and return its value once the push is part of it."""
        outcome = self.push(key, value, weight=weight)
        array: Array = await self.pull(key)
        await outcome
        return array

    async def evaluate(self) -> Model:
        """Return one consistent version of the whole model (see `Worker.evaluate`)."""
        return faces.evaluated(await self._ask(lambda token: s.Pull(token, ())))

    async def barrier(self) -> None:
        """Wait until every worker is here and all that was finished before has arrived."""
        await self._ask(s.Barrier)

    async def set(self, **settings: Any) -> dict[str, Any]:
        """Change live settings (`lr`, `codec_down`, ...) for all.

        Return from which model version each holds.
        """
        versions = {}
        for name, value in settings.items():
            reply = await self._ask(lambda token, n=name, v=value: s.Ask(token, n, str(v)))  # type: ignore[misc]
            versions[name] = reply["version"]
        return versions

    async def status(self) -> dict[str, Any]:
        """Return how the cluster stands, as `zkv status --json` prints it."""
        plain: Mapping[str, Any] = await self._ask(s.Ask)
        return dict(plain)

    def stats(self) -> dict[str, Any]:
        """Return this worker's own figures: batches, outcomes, seconds, bytes."""
        return faces.stats(self._driver, self._ledger, self._encoder)

    async def leave(self) -> None:
        """Stop taking part: what was finished still counts, nobody waits for this worker any
        more."""
        if self._made is None:
            return
        with contextlib.suppress(WaitTimeout):
            await self._drained()
        if (report := faces.last_accounts(self._encoder, self._made)) is not None:
            self._made.feed(report)
        future = self._made.call(s.Leave)
        for _ in range(round(faces.LEAVE_TIMEOUT_S / faces.LEAVE_LOOK_S)):
            await asyncio.wait({future}, timeout=faces.LEAVE_LOOK_S)
            if future.done() or self._made.silent_s > faces.LEAVE_SILENT_S:
                # If the broker is gone, it will notice that nothing is heard of this worker.
                break
        if future.done() and not future.cancelled():
            future.exception()

    async def close(self) -> None:
        """Leave and close all sockets, in bounded time."""
        await self.leave()
        if self._made is not None:
            if self._member is not None and not self._closed:
                figures.write(self._config, self._member, self._made, self._ledger, self._encoder)
            self._closed = True
            await asyncio.to_thread(self._pipeline.close)
            self._made.close()

    async def __aenter__(self) -> AsyncWorker:
        return await self.connect()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _outcome(fate: asyncio.Future[s.Fate], outcome: asyncio.Future[str]) -> None:
    if outcome.done():
        return
    if fate.cancelled():
        outcome.cancel()
        return
    error = fate.exception() or faces.refusal(fate.result())
    if error is not None:
        outcome.set_exception(error)
        # Whoever does not await the outcome is told at the next call; no "never retrieved" warning.
        outcome.exception()
    else:
        outcome.set_result(fate.result().outcome)


def connect(broker: str | None = None, **options: Unpack[ConnectOptions]) -> AsyncWorker:
    """Return a worker to be entered with `async with` (see `zkv.connect` for the arguments)."""
    return AsyncWorker(*session_config(broker, **options))
