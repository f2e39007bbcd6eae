"""How both faces of a worker read rows of tables: in a batch, and by themselves.

Parts of the faces' classes, which have the calls that are used here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zkv.dtypes import Array
from zkv.span_split import VALUES
from zkv.tables import checked_ids
from zkv_workers import signals as s
from zkv_workers.batch import AnyBatch
from zkv_workers.devices import to_host
from zkv_workers.faces import Clock, Key
from zkv_workers.table_rows import WantedRows, wanted_rows

if TYPE_CHECKING:
    from zkv_workers.aio import AsyncWorker
    from zkv_workers.blocking import Worker
    from zkv_workers.driver import Driver


class _RowsOfBatch(AnyBatch):
    """What a batch does about rows in both faces."""

    def _wanted(self, key: Key, ids: Any) -> WantedRows:
        return wanted_rows(self._inside.layout, key, ids)

    def _waiting_for(self, key: Key) -> Clock:
        self._open.check()
        return Clock(self._ledger, "wait_s", VALUES, keys=str(key))

    def _taken(self, wanted: WantedRows, rows: Array) -> Array:
        self._touched = True
        return wanted.handed(rows)


class BlockingRows(_RowsOfBatch):
    """A batch of the blocking worker reads rows."""

    _worker: Worker

    def rows(self, key: Key, ids: Any) -> Array:
        """Return rows of a table, as they are in this batch's version, whatever is updated since.

        `ids`: whole numbers, an array of any shape, in which a number may stand several times.
        Fresh, of the shape of `ids` and then `dim`, yours to change. A row that no update has
        changed has the value that its table begins with.

        Raises:
            Cancelled: the batch no longer counts; the `with` block swallows it.
            UnknownKey: no table of this name.
            KeyMismatch: not whole numbers, negative, or out of range; the first is named.
            WaitTimeout: they did not come in time; the text says from whom.
        """
        wanted = self._wanted(key, ids)
        while True:
            if self._is_to_begin_again:
                self._begin_again()
            waiting, number = self._waiting_for(key), self.number
            try:
                rows = self._worker._call(
                    lambda token, number=number: wanted.asked(token, batch=number),  # type: ignore[misc]
                    behind=False,
                )
            finally:
                self._waited_s += waiting.stop()
            if rows is not None:
                return self._taken(wanted, rows)


class AsyncRows(_RowsOfBatch):
    """A batch of the asyncio worker reads rows."""

    _worker: AsyncWorker

    async def rows(self, key: Key, ids: Any) -> Array:
        """Return rows of a table, as they are in this batch's version (see `Batch.rows`)."""
        wanted = self._wanted(key, ids)
        while True:
            if self._is_to_begin_again:
                self._grant(await self._worker._next_grant())
            waiting, number = self._waiting_for(key), self.number
            try:
                rows = await self._worker._driver.call(
                    lambda token, number=number: wanted.asked(token, batch=number)  # type: ignore[misc]
                )
            finally:
                self._waited_s += waiting.stop()
            if rows is not None:
                return self._taken(wanted, rows)


class _Pull:
    """A pull of rows, made as a call of the session; `end` lets its version go.

    Its token is kept, as whoever is cancelled when the answer is here already never sees that.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []

    def __call__(self, token: int) -> s.Pull:
        self._tokens.append(token)
        return s.Pull(token, (), rows=True)

    def end(self) -> list[s.ReleaseRows]:
        """Return what ends it, as far as it was made."""
        return [s.ReleaseRows(token) for token in self._tokens]


def _check(driver: Driver, key: Key, ids: Any) -> None:
    """Check row numbers before anything is sent, as far as the table is known here by now."""
    known = driver.session.layout.tables.find(key)
    checked_ids(key, to_host(ids), 0 if known is None else known.spec.rows)


class BlockingTables:
    """The blocking worker reads rows outside of a batch."""

    _driver: Driver

    @abstractmethod
    def _call(self, make: Callable[[int], s.Input], *, behind: bool = True) -> Any: ...

    @abstractmethod
    def _feed(self, *events: s.Input) -> None: ...

    def rows(self, key: Key, ids: Any) -> Array:
        """Return rows of a table as they are now, all of one version; it counts as no batch.

        `ids`, and what comes of them: see `Batch.rows`.

        Raises:
            UnknownKey: no table of this name.
            KeyMismatch: not whole numbers, negative, or out of range; the first is named.
            WaitTimeout: they did not come in time; the text says from whom.
        """
        _check(self._driver, key, ids)
        pull = _Pull()
        try:
            pulled = self._call(pull)
            wanted = wanted_rows(pulled.layout, key, ids)
            return wanted.handed(self._call(lambda token: wanted.asked(token, pull=pulled.pull)))
        finally:
            self._feed(*pull.end())

    def all_rows(self, key: Key) -> tuple[Array, Array]:
        """Return the numbers (uint64, ascending) and the values of all rows of a table that updates
        have changed, as they are now, all of one version; fresh. It counts as no batch.

        Raises:
            UnknownKey: no table of this name.
            WaitTimeout: they did not come in time; the text says from whom.
        """
        pull = _Pull()
        try:
            pulled = self._call(pull)
            kid = pulled.layout.table(key).kid
            found: tuple[Array, Array] = self._call(
                lambda token: s.AskRows(token, kid, None, 0, pulled.pull)
            )
            return found
        finally:
            self._feed(*pull.end())


class AsyncTables:
    """The asyncio worker reads rows outside of a batch."""

    @abstractmethod
    async def _ask(self, make: Callable[[int], s.Input]) -> Any: ...

    @property
    @abstractmethod
    def _driver(self) -> Driver: ...

    async def rows(self, key: Key, ids: Any) -> Array:
        """Return rows of a table as they are now, all of one version (see `Worker.rows`)."""
        _check(self._driver, key, ids)
        pull = _Pull()
        try:
            pulled = await self._ask(pull)
            wanted = wanted_rows(pulled.layout, key, ids)
            rows = await self._ask(lambda token: wanted.asked(token, pull=pulled.pull))
            return wanted.handed(rows)
        finally:
            self._driver.feed(*pull.end())

    async def all_rows(self, key: Key) -> tuple[Array, Array]:
        """Return numbers and values of all rows that updates have changed (see
        `Worker.all_rows`)."""
        pull = _Pull()
        try:
            pulled = await self._ask(pull)
            kid = pulled.layout.table(key).kid
            found: tuple[Array, Array] = await self._ask(
                lambda token: s.AskRows(token, kid, None, 0, pulled.pull)
            )
            return found
        finally:
            self._driver.feed(*pull.end())
