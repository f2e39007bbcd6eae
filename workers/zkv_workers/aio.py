"""The asyncio worker: the same verbs as the blocking one, for code that has a loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Any, Unpack

from zkv.dtypes import Array
from zkv.errors import Closed, RolledBack, WaitTimeout
from zkv.pool import Shard
from zkv.tables import Table
from zkv.time_split import Part
from zkv_net import tracing
from zkv_net.spares import Spares
from zkv_workers import faces, figures
from zkv_workers import signals as s
from zkv_workers.aio_batch import AsyncBatch as AsyncBatch
from zkv_workers.config import SessionConfig
from zkv_workers.driver import Driver
from zkv_workers.encoding import Encoder
from zkv_workers.faces import Key, Ledger, Model
from zkv_workers.fragments import Fragments
from zkv_workers.local import AsyncLocal
from zkv_workers.model import ConnectOptions, session_config
from zkv_workers.outgoing import VALUES_BYTES_MAX, Outlet
from zkv_workers.pipeline import Pipeline
from zkv_workers.running import Running
from zkv_workers.samples import Source
from zkv_workers.state_faces import GoesBack, OnRollBack, restore
from zkv_workers.table_faces import AsyncTables

log = logging.getLogger("zkv.worker")


class AsyncWorker(AsyncTables, GoesBack):
    """A member of a cluster, for asyncio. Made by `zkv.aio.connect`; use it with `async with`."""

    def __init__(
        self, config: SessionConfig, route: str, on_roll_back: OnRollBack | None = None
    ) -> None:
        self._config, self._on_roll_back = config, on_roll_back
        self._route = route
        self._ledger = Ledger(keeps=figures.wanted(config), spans=tracing.recorder(config.trace))
        self._encoder = Encoder()
        self._pipeline = Pipeline(bytes_max=config.window_bytes, patience_s=config.wait_timeout_s)
        self._running = Running()
        self._values = Spares(VALUES_BYTES_MAX)
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
            self._values,
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
            await asyncio.to_thread(restore, self._encoder, self._made)
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

    def buffers(self, params: Any) -> dict[Key, Array]:
        """Return arrays of the shapes and dtypes of `params`, by the same keys, all zeros, to make
        gradients in.

        What is pushed from there is not copied, and servers of this machine read it where it lies.
        From its push on an array is lent: it is yours again when the next batch is entered, or when
        `batch.wait()` has returned. If it is changed before, that raises BufferError. So a batch
        waits for the one before it, and `prefetch=1` hides nothing. Of keys that share a block, all
        have to be asked for together, once they are initialised, and to be pushed: else they are
        copied. Under k-batch policies these are ordinary arrays.
        """
        driver = self._driver
        assert self._member is not None
        return faces.buffers(self._encoder, driver, self._member, params)

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
        while True:
            with faces.draining(self._ledger, self._pipeline):
                await self._drained()
            try:
                with faces.calling(self._ledger):
                    return await self._driver.call(make)
            except RolledBack as told:
                await self._drained()
                self._driver.feed(*self._forget(told))
                await asyncio.to_thread(restore, self._encoder, self._driver)
                said = self._hear_of(told)
                if inspect.isawaitable(said):
                    await said

    async def _look_back(self) -> None:
        """Hear of it if the run has gone back to a snapshot."""
        if self._driver.session.back.told is not None:
            await self._ask(s.Ask)

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
        self._encoder.keeper.rest()
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
        if self._made is None or self._closed:
            return
        await self._look_back()
        with contextlib.suppress(WaitTimeout):
            await self._drained()
        await asyncio.to_thread(self._encoder.keeper.finish)
        if (report := faces.last_accounts(self._encoder, self._made)) is not None:
            self._made.feed(report)
        future = self._made.call(s.Leave)
        for _ in range(round(faces.LEAVE_TIMEOUT_S / faces.LEAVE_LOOK_S)):
            await asyncio.wait({future}, timeout=faces.LEAVE_LOOK_S)
            if future.done() or self._made.broker_is_gone(faces.LEAVE_SILENT_S):
                # If the broker is gone, it will notice that nothing is heard of this worker.
                break
        told = future.exception() if future.done() and not future.cancelled() else None
        if isinstance(told, RolledBack):
            # What this worker has done last is undone: it must not be left without a word.
            await self.leave()

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
        try:
            await self.close()
        except RolledBack:
            await self.close()
            if error is None:
                raise


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
    return AsyncWorker(*session_config(broker, **options), options.get("on_roll_back"))
