"""Local SGD: some batches on the worker's own copy, then one contribution of what they changed.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv:1805.09767; with an
outer Nesterov on the servers it is DiLoCo: Douillard et al., "DiLoCo: Distributed Low-Communication
Training of Language Models", arXiv:2311.08105. The contribution of a round is start − end, summed
up over its batches by the user's own inner rule; the servers' rule is the outer one, and `sgd:lr=1`
there makes plain averaging.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from zkv.dtypes import Array
from zkv.errors import Cancelled
from zkv_workers.batch import AnyBatch
from zkv_workers.faces import Key
from zkv_workers.model import check_weight

if TYPE_CHECKING:
    from zkv_workers.aio import AsyncBatch, AsyncWorker
    from zkv_workers.blocking import Batch, Worker


class _Round:
    """One round: `h` local batches on one version of the model, and their weight so far."""

    def __init__(self, batch: AnyBatch) -> None:
        self.batch = batch
        self.start = {key: value.copy() for key, value in batch.params.items()}
        self.done = 0
        self.weight = 0.0

    def contribute(self) -> None:
        """Push start − end of every trained key; the weight is all that the round has seen."""
        self.batch.set_weight(self.weight)
        pushed: set[int] = set()
        for key, end in self.batch.params.items():
            if end.dtype.kind in "iu" or id(end) in pushed:
                continue
            pushed.add(id(end))
            self.batch.push(key, (self.start[key] - end).astype(end.dtype, copy=False))


class _LocalBatch:
    """One local batch: the round's parameters, to be changed in place."""

    def __init__(self, weight: float) -> None:
        self._weight = check_weight(weight)
        self._round: _Round | None = None

    @property
    def _open(self) -> _Round:
        if self._round is None:
            raise RuntimeError("use the local batch inside its block")
        return self._round

    @property
    def params(self) -> dict[Key, Array]:
        """The worker's own copy of the model: change it in place.

        Raises:
            Cancelled: the round no longer counts; the block swallows it.
        """
        return self._open.batch.params

    def __getitem__(self, key: Key) -> Array:
        return self.params[key]

    @property
    def version(self) -> int:
        """The model version that the round began with."""
        return self._open.batch.version

    @property
    def cancelled(self) -> bool:
        """Whether the policy has cancelled the round."""
        return self._open.batch.cancelled


def check_h(h: int) -> int:
    """Return the number of local batches of a round.

    Raises:
        ValueError: it is less than 1.
    """
    if type(h) is not int or h < 1:
        raise ValueError(f"h={h!r}: a round has at least one local batch")
    return h


_Left = tuple[bool, BaseException | None]


class _Rounds:
    """What both faces decide alike: when a round is over, and how its batch is left."""

    def __init__(self, h: int) -> None:
        self._h = check_h(h)
        self._round: _Round | None = None

    def _leave(
        self, weight: float, error: BaseException | None
    ) -> tuple[bool, BaseException | None]:
        """Leave a local batch; return whether the round's batch is left too, and with which
        error."""
        current = self._round
        if current is None or error is not None:
            self._round = None
            return True, error
        current.done += 1
        current.weight += weight
        if current.done < self._h and not current.batch.cancelled:
            return False, None
        return self._close(None)

    def _close(self, error: BaseException | None) -> _Left:
        """End the round, early or not: what it has changed is its contribution."""
        current, self._round = self._round, None
        if current is None:
            return False, None
        if error is None:
            try:
                current.contribute()
            except Cancelled as cancelled:
                return True, cancelled
        return True, error


class LocalBatch(_LocalBatch):
    """One local batch as a context manager (made by `Local.batch`)."""

    def __init__(self, local: Local, weight: float) -> None:
        super().__init__(weight)
        self._local = local

    def __enter__(self) -> LocalBatch:
        self._round = self._local._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return self._local._exit(*self._local._leave(self._weight, error))


class Local(_Rounds):
    """Rounds of `h` local batches. Use it as a context manager, so that a part of a round
    counts."""

    def __init__(self, worker: Worker, h: int) -> None:
        super().__init__(h)
        self._worker = worker
        self.last: Batch | None = None
        """The batch that carries the newest round; its `outcome` tells what became of it."""

    def batch(self, weight: float = 1.0) -> LocalBatch:
        """Return the next local batch, of `weight` samples."""
        return LocalBatch(self, weight)

    def _begin(self) -> _Round:
        if self._round is None:
            self.last = self._worker.batch()
            self._round = _Round(self.last.__enter__())
        return self._round

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


class AsyncLocalBatch(_LocalBatch):
    """One local batch as an async context manager (made by `AsyncLocal.batch`)."""

    def __init__(self, local: AsyncLocal, weight: float) -> None:
        super().__init__(weight)
        self._local = local

    async def __aenter__(self) -> AsyncLocalBatch:
        self._round = await self._local._begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return await self._local._exit(*self._local._leave(self._weight, error))


class AsyncLocal(_Rounds):
    """Rounds of `h` local batches, for asyncio (see `Local`)."""

    def __init__(self, worker: AsyncWorker, h: int) -> None:
        super().__init__(h)
        self._worker = worker
        self.last: AsyncBatch | None = None
        """The batch that carries the newest round; its `outcome` tells what became of it."""

    def batch(self, weight: float = 1.0) -> AsyncLocalBatch:
        """Return the next local batch, of `weight` samples."""
        return AsyncLocalBatch(self, weight)

    async def _begin(self) -> _Round:
        if self._round is None:
            self.last = self._worker.batch()
            self._round = _Round(await self.last.__aenter__())
        return self._round

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
