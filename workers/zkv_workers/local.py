"""Local SGD: some batches on the worker's own copy, then one contribution of what they changed.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv:1805.09767; with an
outer Nesterov on the servers it is DiLoCo: Douillard et al., "DiLoCo: Distributed Low-Communication
Training of Language Models", arXiv:2311.08105. The contribution of a round is start − end, summed
up over its batches by the user's own inner rule; the servers' rule is the outer one, and `sgd:lr=1`
there makes plain averaging. With `fragments` it is Streaming DiLoCo (arXiv:2501.18512): a round
contributes a part of the model at a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from zkv.pool import Shard
from zkv_workers.fragments import Fragments
from zkv_workers.rounds import AnyLocalBatch, Part, Rounds

if TYPE_CHECKING:
    from zkv_workers.aio import AsyncBatch, AsyncWorker
    from zkv_workers.blocking import Batch, Worker


class LocalBatch(AnyLocalBatch):
    """One local batch as a context manager (made by `Local.batch` and `Local.batches`)."""

    def __init__(self, local: Local, weight: float, part: Part | None = None) -> None:
        super().__init__(weight, part)
        self._local = local

    def __enter__(self) -> LocalBatch:
        self._local._begin(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return self._local._exit(*self._local._leave(self, error))


class Local(Rounds):
    """Rounds of `h` local batches. Use it as a context manager, so that a part of a round
    counts, or (of `batches`) its samples are dealt out again."""

    def __init__(self, worker: Worker, h: int, fragments: Fragments, mixing: float) -> None:
        super().__init__(h, fragments, mixing, lambda: worker._member.policy)
        self._worker = worker
        self.last: Batch | None = None
        """The batch that carries the newest round; its `outcome` tells what became of it."""

    def batch(self, weight: float = 1.0) -> LocalBatch:
        """Return the next local batch, of `weight` samples.

        Raises:
            RuntimeError: (when it is entered) `batches` was used here before.
        """
        return LocalBatch(self, weight)

    def batches(self, data: Shard) -> Iterator[LocalBatch]:
        """Return all local batches that the run deals to this worker: ``for batch in …: with
        batch:``.

        Each round draws `h * data.size` samples at once, and hands them out `data.size` at a time:
        `batch.samples` are their numbers, `batch.pass_number` is the pass they are of, and their
        number is the weight. The last round of a pass may have fewer local batches, and its last
        one fewer samples. Every worker of the run takes its batches from here, of equal `data` and
        `h` (or from `worker.batches` with `h` times the size); the loop ends when all passes are
        done.

        The samples of a round count together, or none does. If the policy cancels the round, the
        rest of it is not handed out: its samples come back (`data.retry`), and the loop goes on
        with a new draw. If an exception leaves one of its blocks, the round is withdrawn: what it
        has computed does not count, and its samples are dealt to this worker again, or come back
        when it takes no more. So is a round that is not complete when `with worker.local(h):` is
        left or another loop begins, since samples that nobody has computed would count with it: to
        stop early without loss, leave the loop where a round ends (`local.last.outcome` is not
        "open").

        Raises:
            Refused: the other workers share other data or another `h`, or take their batches
                without any.
            RuntimeError: a batch was not entered, or not left, before the next one; or
                `batch(weight)` was used here before.
            TypeError: `data` is no shard.
        """
        for carrier in self._worker.batches(self._draws(data)):
            # A loop that was left in mid-round: this one has the grant now, and begins anew.
            self._give_up()
            self.last = carrier
            for part in self._deal(carrier.__enter__(), data.size):
                batch = LocalBatch(self, len(part[1]), part)
                yield batch
                self._exit(*self._go_on(batch))

    def _begin(self, batch: LocalBatch) -> None:
        if self._needs_round(batch):
            self.last = self._worker.batch(None)
            self._start(self.last.__enter__(), self._h, dealt=False)
        self._enter(batch)

    def _exit(self, left: bool, error: BaseException | None) -> bool:
        if not left or self.last is None:
            return False
        return self.last.__exit__(None if error is None else type(error), error, None)

    def __enter__(self) -> Local:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exit(*self._close(error))


class AsyncLocalBatch(AnyLocalBatch):
    """One local batch as an async context manager (made by `AsyncLocal.batch` and
    `AsyncLocal.batches`)."""

    def __init__(self, local: AsyncLocal, weight: float, part: Part | None = None) -> None:
        super().__init__(weight, part)
        self._local = local

    async def __aenter__(self) -> AsyncLocalBatch:
        await self._local._begin(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return await self._local._exit(*self._local._leave(self, error))


class AsyncLocal(Rounds):
    """Rounds of `h` local batches, for asyncio (see `Local`)."""

    def __init__(self, worker: AsyncWorker, h: int, fragments: Fragments, mixing: float) -> None:
        super().__init__(h, fragments, mixing, lambda: worker._joined.policy)
        self._worker = worker
        self.last: AsyncBatch | None = None
        """The batch that carries the newest round; its `outcome` tells what became of it."""

    def batch(self, weight: float = 1.0) -> AsyncLocalBatch:
        """Return the next local batch, of `weight` samples (see `Local.batch`)."""
        return AsyncLocalBatch(self, weight)

    async def batches(self, data: Shard) -> AsyncIterator[AsyncLocalBatch]:
        """Return all local batches that the run deals to this worker (see `Local.batches`):
        ``async for batch in …: async with batch:``."""
        async for carrier in self._worker.batches(self._draws(data)):
            self._give_up()
            self.last = carrier
            for part in self._deal(await carrier.__aenter__(), data.size):
                batch = AsyncLocalBatch(self, len(part[1]), part)
                yield batch
                await self._exit(*self._go_on(batch))

    async def _begin(self, batch: AsyncLocalBatch) -> None:
        if self._needs_round(batch):
            self.last = self._worker.batch(None)
            self._start(await self.last.__aenter__(), self._h, dealt=False)
        self._enter(batch)

    async def _exit(self, left: bool, error: BaseException | None) -> bool:
        if not left or self.last is None:
            return False
        return await self.last.__aexit__(None if error is None else type(error), error, None)

    async def __aenter__(self) -> AsyncLocal:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._exit(*self._close(error))
