"""Rows of tables on their way here: what is asked of which server, and calls that wait for it.

Part of the session. A call's rows are asked of the servers that hold them, in pieces; each piece is
a message of its own, under byte credits by what its answer will bring, and is asked again if that
does not come. Knows no frames.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs

from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.errors import KeyMismatch, ZkvError
from zkv.layout import Layout
from zkv.tables import part_of, row_bytes, rows_per_piece
from zkv.window import Window, ready
from zkv.wire import TableSpec
from zkv_workers.config import SessionConfig
from zkv_workers.row_signals import AskRows
from zkv_workers.signals import SendData

NOTHING: Array = np.empty(0, np.uint8)


@dataclass(slots=True)
class _Call:
    """A call for rows: what has come of them, and the numbers of the requests that have not."""

    token: int
    batch: int
    spec: TableSpec
    out: Array | None
    """None: all rows are wanted, and come in `found`."""
    missing: set[int] = field(default_factory=set)
    found: list[tuple[Array, Array]] = field(default_factory=list)

    def answer(self) -> object:
        """Return what the call is answered with."""
        if self.out is not None:
            return self.out
        ids = np.concatenate([np.empty(0, np.uint64), *(ids for ids, _ in self.found)])
        nothing = np.empty((0, self.spec.dim), self.spec.dtype)
        rows = np.concatenate([nothing, *(rows for _, rows in self.found)])
        order = np.argsort(ids)
        return ids[order], rows[order]


@dataclass(slots=True)
class _Request:
    """One piece of a call: what was asked of which server, and where its rows belong."""

    call: _Call
    data: SendData
    ask: d.AskRows
    places: Array


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
        self._requests: dict[int, _Request] = {}
        """By number."""
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
        spec, ids = entry.spec, event.ids
        out = None if ids is None else np.empty((ids.size, spec.dim), spec.dtype)
        call = _Call(event.token, event.batch, spec, out)
        step = rows_per_piece(spec)
        for part, bid in enumerate(entry.bids):
            ask = d.AskRows(incarnation, group, grant, bid, 0, index)
            if ids is None:
                self._send(call, structs.replace(ask, start=0), NOTHING, NOTHING)
                continue
            places = np.flatnonzero(part_of(ids, len(entry.bids)) == part)
            for start in range(0, places.size, step):
                some = places[start : start + step]
                self._send(call, ask, some, ids[some].view(np.uint8))
        if not call.missing:
            self._answer(call.token, call.answer())

    def _send(self, call: _Call, ask: d.AskRows, places: Array, payload: Array) -> None:
        """Ask for one piece, as soon as there is room for what it brings."""
        self._count += 1
        ask = structs.replace(ask, number=self._count)
        server = self._layout.blocks[ask.bid].server
        data = SendData(server, ask, payload)
        self._requests[self._count] = _Request(call, data, ask, places)
        call.missing.add(self._count)
        count = rows_per_piece(call.spec) if call.out is None else places.size
        self._window(server).offer(self._count, count * row_bytes(call.spec), data)

    def take(self, message: d.Rows, payload: Array, now: float) -> None:
        """A server has sent rows, or says why there are none."""
        request = self._requests.pop(message.number, None)
        if request is None:
            return
        call = request.call
        self._window(request.data.server).acknowledge(message.number, now)
        why = message.refused or self._put(request, message, payload)
        if why:
            self._forget(call)
            self._fail(call.token, KeyMismatch(f"server {message.server}: {why}"))
            return
        self.bytes_received += payload.nbytes
        call.missing.discard(message.number)
        if not call.missing:
            self._answer(call.token, call.answer())

    def _put(self, request: _Request, message: d.Rows, payload: Array) -> str:
        """Take a piece in, and ask for the next one, if any; return what is wrong, or ""."""
        call, spec = request.call, request.call.spec
        count = message.count if call.out is None else request.places.size
        numbers = 8 * message.count if call.out is None else 0
        expected = numbers + count * row_bytes(spec)
        if payload.nbytes != expected:
            return f"{payload.nbytes} bytes came where {expected} were asked"
        rows: Array = np.empty((count, spec.dim), spec.dtype)
        rows.reshape(-1).view(np.uint8)[:] = payload[numbers:]
        if call.out is not None:
            call.out[request.places] = rows
            return ""
        call.found.append((payload[:numbers].copy().view(np.uint64), rows))
        if 0 <= message.following <= request.ask.start:
            return f"place {message.following} follows place {request.ask.start}"
        if message.following >= 0:
            ask = structs.replace(request.ask, start=message.following)
            self._send(call, ask, NOTHING, NOTHING)
        return ""

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
        return list({id(one.call): one.call for one in self._requests.values()}.values())

    def _forget(self, call: _Call) -> None:
        for number in call.missing & self._requests.keys():
            self._window(self._requests.pop(number).data.server).forget({number})

    def ready(self, now: float) -> list[SendData]:
        """Return the requests to send now."""
        return ready(self._windows.values(), now) if self._requests else []

    def owing(self) -> set[int]:
        """Return the servers that have not answered everything."""
        return {one.data.server for one in self._requests.values()}

    def clear(self) -> None:
        """Drop everything (the broker started anew)."""
        self._windows.clear()
        self._requests.clear()
