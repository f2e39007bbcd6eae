"""Rows of tables on their way here: what is asked of which server, and calls that wait for it.

Part of the session. A call's rows are asked of the servers that hold them, in pieces; each piece is
a message of its own, under byte credits by what its answer will bring, and is asked again if that
does not come. Knows no frames.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.errors import KeyMismatch, ZkvError
from zkv.layout import Layout
from zkv.tables import part_of, row_bytes, rows_per_piece
from zkv.window import Window, ready
from zkv_workers.config import SessionConfig
from zkv_workers.row_signals import AskRows
from zkv_workers.signals import SendData


@dataclass(slots=True)
class _Call:
    """A call for rows: what has come of them, and the numbers of the requests that have not."""

    token: int
    batch: int
    out: Array
    missing: set[int] = field(default_factory=set)


class RowReads:
    """All calls for rows that are not answered. `answer` ends a call, `fail` with an error."""

    def __init__(
        self,
        layout: Layout,
        config: SessionConfig,
        answer: Callable[[int, object], None],
        fail: Callable[[int, ZkvError], None],
    ) -> None:
        self.bytes_received = 0
        self._layout = layout
        self._config = config
        self._answer, self._fail = answer, fail
        self._windows: dict[int, Window[SendData]] = {}
        self._requests: dict[int, tuple[_Call, int, Array]] = {}
        """By number: whose it is, the server, and where its rows belong in the call's."""
        self._count = 0

    def _window(self, server: int) -> Window[SendData]:
        if server not in self._windows:
            self._windows[server] = Window(
                self._config.window_bytes, resend_s=self._config.resend_s
            )
        return self._windows[server]

    def ask(self, event: AskRows, incarnation: int, group: int, grant: int, index: int) -> None:
        """A call wants rows of the version of a grant; servers know it from log index `index` on.

        Raises:
            KeyMismatch: there is no such table (any more).
        """
        entry = self._layout.tables.entries.get(event.kid)
        if entry is None:
            raise KeyMismatch(f"there is no table number {event.kid}")
        spec = entry.spec
        call = _Call(event.token, event.batch, np.empty((event.ids.size, spec.dim), spec.dtype))
        parts, step = part_of(event.ids, len(entry.bids)), rows_per_piece(spec)
        for part, bid in enumerate(entry.bids):
            places = np.flatnonzero(parts == part)
            for start in range(0, places.size, step):
                some = places[start : start + step]
                self._count += 1
                server = self._layout.blocks[bid].server
                message = d.AskRows(incarnation, group, grant, bid, self._count, index)
                data = SendData(server, message, event.ids[some].view(np.uint8))
                self._requests[self._count] = call, server, some
                call.missing.add(self._count)
                self._window(server).offer(self._count, some.size * row_bytes(spec), data)
        if not call.missing:
            self._answer(call.token, call.out)

    def take(self, message: d.Rows, payload: Array, now: float) -> None:
        """A server has sent rows, or says why there are none."""
        found = self._requests.pop(message.number, None)
        if found is None:
            return
        call, server, places = found
        self._window(server).acknowledge(message.number, now)
        rows = call.out[places]
        if message.refused or payload.nbytes != rows.nbytes:
            why = message.refused or f"{payload.nbytes} bytes came where {rows.nbytes} were asked"
            self._forget(call)
            self._fail(call.token, KeyMismatch(f"server {message.server}: {why}"))
            return
        self.bytes_received += payload.nbytes
        rows.reshape(-1).view(np.uint8)[:] = payload
        call.out[places] = rows
        call.missing.discard(message.number)
        if not call.missing:
            self._answer(call.token, call.out)

    def drop(self, batch: int | None) -> None:
        """A batch does not count any more: who waits for rows of it looks at it again."""
        for call in self._calls():
            if batch is not None and call.batch == batch:
                self._forget(call)
                self._answer(call.token, None)

    def give_up(self, token: int) -> None:
        """Nobody waits for this call's answer any more."""
        for call in self._calls():
            if call.token == token:
                self._forget(call)

    def _calls(self) -> list[_Call]:
        return list({id(call): call for call, _, _ in self._requests.values()}.values())

    def _forget(self, call: _Call) -> None:
        for number in call.missing & self._requests.keys():
            _, server, _ = self._requests.pop(number)
            self._window(server).forget({number})

    def ready(self, now: float) -> list[SendData]:
        """Return the requests to send now."""
        return ready(self._windows.values(), now) if self._requests else []

    def owing(self) -> set[int]:
        """Return the servers that have not answered everything."""
        return {server for _, server, _ in self._requests.values()}

    def clear(self) -> None:
        """Drop everything (the broker started anew)."""
        self._windows.clear()
        self._requests.clear()
