"""The blocking worker, for ordinary training loops: its I/O runs beside them, in a thread."""

from __future__ import annotations

import atexit
import concurrent.futures
import os
from collections.abc import Iterator, Mapping
from threading import Event, Thread
from types import TracebackType
from typing import Any, Unpack

from zkv.dtypes import Array
from zkv.errors import RolledBack
from zkv.pool import Shard
from zkv.tables import Table
from zkv_net import tracing
from zkv_net.loop import loop_factory
from zkv_workers import faces, figures
from zkv_workers import signals as s
from zkv_workers.blocking_batch import Batch as Batch
from zkv_workers.blocking_calls import BlockingCalls
from zkv_workers.config import SessionConfig
from zkv_workers.driver import Driver
from zkv_workers.encoding import Encoder
from zkv_workers.faces import Key, Ledger, Model
from zkv_workers.fragments import Fragments
from zkv_workers.local import Local
from zkv_workers.model import ConnectOptions, session_config
from zkv_workers.outgoing import Outlet
from zkv_workers.pipeline import Pipeline
from zkv_workers.running import Running
from zkv_workers.samples import Source
from zkv_workers.state_faces import OnRollBack, restore
from zkv_workers.table_faces import BlockingTables
from zkv_workers.waiting import Pushed

CLOSE_TIMEOUT_S = 5.0


class Worker(BlockingCalls, BlockingTables):
    """A member of a cluster, for blocking code. Made by `zkv.connect`; use it as a context manager.

    Calls may come from any one thread at a time. It does not survive a fork.
    """

    def __init__(
        self, config: SessionConfig, route: str, on_roll_back: OnRollBack | None = None
    ) -> None:
        self._config, self._on_roll_back = config, on_roll_back
        self._ledger = Ledger(keeps=figures.wanted(config), spans=tracing.recorder(config.trace))
        self._encoder = Encoder()
        pipeline = Pipeline(bytes_max=config.window_bytes, patience_s=config.wait_timeout_s)
        feed, kept = self._feed, self._ledger
        self._outlet = Outlet(self._encoder, pipeline, feed, feed, kept.meter, kept.spans)
        self._running = Running()
        self._pid = os.getpid()
        self._left = False
        self.on_demand = False
        """Whether values of batches are sent only as they are needed (see `attach`)."""
        self._loop = loop_factory()()
        self._thread = Thread(target=self._loop.run_forever, name="zkv-worker", daemon=True)
        self._thread.start()
        try:
            self._driver: Driver = self._on_loop(lambda: self._make_driver(route))
            self._member: s.Membership = self._call(s.Join)
            faces.prepare(self._encoder, self._driver, self._member)
            restore(self._encoder, self._driver)
            figures.before_sigterm(config, self._member, self._driver, self._ledger)
        except BaseException:
            self._left = True
            self._stop()
            raise
        atexit.register(self.close)

    async def _make_driver(self, route: str) -> Driver:
        driver = Driver(self._config, route=route, spans=self._ledger.spans)
        driver.cancelled = self._running.cancel
        return driver

    # --- what users call ---------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's number: its place in sums, and its rank if it was given one."""
        return self._member.number

    @property
    def world(self) -> int:
        """How many workers take part, as stated at the start, or as were here when it joined."""
        return self._member.world

    @property
    def name(self) -> str:
        """This worker's name."""
        return self._config.name

    def init(
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
        """Initialise keys: the first worker's values count, the others get them.

        Args:
            params: a dict of arrays, a state_dict, or the path of a safetensors file. Two names of
                one array are tied: one key with two names.
            rule: an optimizer for just these keys, such as "sgd:lr=0.1"; "" for the broker's.
            reduce: "sum" or "mean"; "" for mean inside batches and sum for plain pushes.
            allow_nan: whether gradients may hold NaN and Inf.
            absent: what a batch without a gradient for a key means: "zero", or "out" of the mean.
            plain: these keys are pushed by themselves, outside of batches.
            tables: keys whose value is rows by number, such as {"emb": zkv.Table(dim=64)}; none of
                the options above is for them. `params` may be empty then.

        Raises:
            KeyMismatch: the keys were initialised otherwise; the key and both specs are named.
        """
        make = faces.initialise(
            params,
            rule=rule,
            reduce=reduce,
            allow_nan=allow_nan,
            absent=absent,
            plain=plain,
            tables=tables,
        )
        self._call(make)

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
        self._check()
        return faces.buffers(self._encoder, self._driver, self._member, params)

    def batch(self, weight: float | None = 1.0) -> Batch:
        """Return the next mini-batch, of `weight` samples (None: `set_weight` says it before the
        block is left, and servers wait for it), as a context manager."""
        return Batch(self, weight)

    def batches(self, data: Shard) -> Iterator[Batch]:
        """Return all batches that the run deals to this worker: ``for batch in …: with batch:``.

        `batch.samples` are the numbers of its samples, `batch.pass_number` is the pass they are of,
        and its weight is how many they are. Every worker of the run takes all its batches from
        here, of equal `data` (`zkv.data.shard`); the loop ends when all passes are done, for
        samples of a worker that is lost are done by the others.

        Raises:
            Refused: the other workers share other data, or take their batches without any.
            RuntimeError: a batch was not entered, or not left, before the next one.
        """
        source = Source(data)
        self._call(lambda token: s.UsePool(token, data))
        while True:
            source.check()
            self._ledger.raise_refused()
            grant = self._next_grant()
            if grant is None:
                return
            batch = Batch(self, 1.0)
            source.hand_out(batch, grant)
            yield batch

    def _next_grant(self) -> s.Grant | None:
        with faces.awaiting_grant(self._ledger, self._driver.session):
            grant: s.Grant | None = self._call(lambda token: s.Begin(token, self.on_demand))
        return grant

    def local(self, h: int, *, fragments: Fragments = 1, mixing: float = 0.0) -> Local:
        """Return rounds of `h` local batches: one contribution for what each round has changed.

        ``with worker.local(h=8) as local:``, and in it ``with local.batch(weight=32) as batch:``,
        whose `batch.params` are the worker's own and changed in place by a rule of your own. Where
        the run deals the samples out: ``for batch in local.batches(data):``, see `Local.batches`.

        `fragments=F`: a contribution every h / F local batches, of a part of the model, so that
        each key is contributed every `h` (Streaming DiLoCo, arXiv:2501.18512). The others go on
        from the worker's own values. Keys are divided by bytes, or by patterns: a list with those
        of each fragment. With `zkv.connect(prefetch=1)` it travels while the next round is
        computed. What comes of a fragment replaces the worker's own values of it, or with
        `mixing=0.5` half of them. All workers give the same `h` and `fragments`.

        Raises:
            ValueError: `h` is no multiple of the number of fragments, say.
            ConfigError: the policy mixes fragments in an update; or (at the first round) a key is
                in no fragment, or a fragment has no key.
        """
        return Local(self, h, fragments, mixing)

    def push(self, key: Key, value: Any, *, weight: float = 1.0) -> Pushed:
        """Push one key by itself, to be combined with the other workers' pushes; returns at
        once."""
        self._check()
        self._look_back()
        self._ledger.raise_refused()
        key, flat, number = faces.plain_push(self._driver, key, value, weight)
        return Pushed(
            self._start(lambda token: s.PushPlain(token, key, flat, number)), self._check_heard
        )

    def pull(self, keys: Any = None) -> Any:
        """Return a key's value, a dict for a list of keys, or the whole model as one version.

        Fresh arrays, yours to change. Own plain pushes of these keys are waited for first, so that
        under BSP the pull after a push has what all workers have pushed.

        Raises:
            UnknownKey: a key was never initialised.
            WaitTimeout: it did not come in time; the text says who is missing.
        """
        self._ledger.raise_refused()
        wanted = faces.keys_of(keys)
        arrays = faces.pulled(self._call(lambda token: s.Pull(token, wanted)), wanted)
        return arrays[wanted[0]] if isinstance(keys, str | int) else arrays

    def pushpull(self, key: Key, value: Any, *, weight: float = 1.0) -> Array:
        """Push one key and return its value once the push is part of it."""
        pushed = self.push(key, value, weight=weight)
        array: Array = self.pull(key)
        pushed.result()
        return array

    def evaluate(self) -> Model:
        """Return one consistent version of the whole model: `.version` and `.params`.

        It only reads: no batch is counted, no clock moves, and inside a batch or between two it
        holds no update back. An evaluation that takes long is better done by an observer
        (`connect(observer=True)`), which no policy ever waits for.

        Raises:
            UnknownKey: there is no model: all keys are plain.
            WaitTimeout: it did not come in time; the text says who is missing.
        """
        return faces.evaluated(self._call(lambda token: s.Pull(token, ())))

    def barrier(self) -> None:
        """Wait until every worker is here and all that was finished before has arrived."""
        self._encoder.keeper.rest()
        self._call(s.Barrier)

    def set(self, **settings: Any) -> dict[str, Any]:
        """Change live settings (`lr`, `codec_down`, ...) for all.

        Return from which model version each holds.
        """
        return {
            name: self._call(lambda token, n=name, v=value: s.Ask(token, n, str(v)))["version"]  # type: ignore[misc]
            for name, value in settings.items()
        }

    def status(self) -> dict[str, Any]:
        """Return how the cluster stands, as `zkv status --json` prints it."""
        plain: Mapping[str, Any] = self._call(s.Ask)
        return dict(plain)

    def stats(self) -> dict[str, Any]:
        """Return this worker's own figures: batches, outcomes, seconds, bytes."""
        self._check()
        return faces.stats(self._driver, self._ledger, self._encoder)

    def leave(self) -> None:
        """Stop taking part: what was finished still counts, nobody waits for this worker any
        more."""
        if self._left or os.getpid() != self._pid:
            return
        self._look_back()
        self._outlet.pipeline.wait()
        self._encoder.keeper.finish()
        if (report := faces.last_accounts(self._encoder, self._driver)) is not None:
            self._feed(report)
        future = self._start(s.Leave)
        self._left = True
        for _ in range(round(faces.LEAVE_TIMEOUT_S / faces.LEAVE_LOOK_S)):
            concurrent.futures.wait([future], faces.LEAVE_LOOK_S)
            if future.done() or self._driver.broker_is_gone(faces.LEAVE_SILENT_S):
                # If the broker is gone, it will notice that nothing is heard of this worker.
                break
        if future.done() and isinstance(future.exception(), RolledBack):
            # What this worker has done last is undone: it must not be left without a word.
            self._left = False
            self.leave()

    def close(self) -> None:
        """Leave, and end the I/O thread, in bounded time. A second call does nothing."""
        if os.getpid() != self._pid or self._loop.is_closed():
            return
        self.leave()
        figures.write(self._config, self._member, self._driver, self._ledger, self._encoder)
        self._stop()
        atexit.unregister(self.close)

    def _stop(self) -> None:
        self._outlet.pipeline.close()
        if hasattr(self, "_driver"):
            done = Event()

            def end() -> None:
                self._driver.close()
                done.set()

            self._loop.call_soon_threadsafe(end)
            done.wait(CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except RolledBack:
            self.close()
            if error is None:
                raise


def connect(broker: str | None = None, **options: Unpack[ConnectOptions]) -> Worker:
    """Join a cluster and return a worker; use it as a context manager.

    Args:
        broker: the broker's address, such as "tcp://10.0.0.2:5555"; default: ZKV_BROKER.
        options: see `zkv_workers.model.ConnectOptions`.

    Raises:
        ConfigError: no broker is named, or an address or a variable is wrong.
        ClusterNotReady: the cluster is not complete within `connect_timeout_s`; the text says who
            is missing.
        NameInUse, Refused: a live worker has this name, or this rank.
    """
    return Worker(*session_config(broker, **options), options.get("on_roll_back"))
