"""The parts of tables that one server holds: what is pushed to them, asked of them, and pinned.

A grant pins the version that it is given on: rows of it are answered as they were, whatever is
committed meanwhile, until the worker has finished the batch, or a pull. Under a grant ahead of the
log they are answered once that version is in it. Part of one server's shard; knows no sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from msgspec import structs

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import DTYPES, Array, all_finite
from zkv.errors import ProtocolError
from zkv.layout import Layout
from zkv.optim import square_sum
from zkv.optimizer_spec import OptimizerSpec, optimizer
from zkv.sums import divided
from zkv.table_layout import bid_of
from zkv.tables import disorder, row_bytes, rows_per_piece
from zkv.wire import MODEL, ContributionId, TableEntry, TableSpec
from zkv_brokers.contributions import Open
from zkv_brokers.grants import NO_BYTES, ToWorker
from zkv_brokers.row_store import RowStore
from zkv_brokers.rows import PushedRows, joined, total_rows
from zkv_brokers.store import Store
from zkv_codecs.frames import aligned

WAITING_MAX = 1024
"""Requests of one grant ahead of the log that are kept; others are asked again."""
GrantName = tuple[int, int, int]
"""Incarnation, group, number."""


class Tables:
    """All parts of tables here. The settings in force, and the layout, are those of `store`."""

    def __init__(self, store: Store) -> None:
        self.parts: dict[int, RowStore] = {}
        """By the number of their block."""
        self.pins: dict[GrantName, int] = {}
        """The version that each grant is given on."""
        self._versions: list[int] = []
        """Those, ascending, each once."""
        self._store = store
        self._version = 0
        self._own_rules: dict[str, OptimizerSpec] = {}
        self._waiting: dict[GrantName, dict[int, tuple[d.AskRows, Array]]] = {}
        """Requests for rows of a version that is not in the log yet, by their numbers."""
        self._answers: list[tuple[d.Rows, Array]] = []

    @property
    def _layout(self) -> Layout:
        return self._store.layout

    def add(self, entries: Sequence[TableEntry], server: int) -> None:
        """Hold these tables' parts that are for this server: they take nothing yet."""
        for entry in entries:
            for bid in entry.bids:
                if self._layout.blocks[bid].server == server:
                    self.parts[bid] = RowStore(entry.spec)

    def begin(self, version: int) -> None:
        """What is here is of this version of the model."""
        self._version = version

    def held(self) -> tuple[tuple[int, int, int], ...]:
        """Return of each table here its number, how many rows there are, and their bytes."""
        return tuple(
            (self._layout.tables.of_block[bid][0], len(part), part.nbytes)
            for bid, part in sorted(self.parts.items())
        )

    def drop(self, kids: Sequence[int]) -> None:
        """Forget the tables among these numbers."""
        for bid in [bid for bid in self.parts if self._layout.tables.of_block[bid][0] in kids]:
            del self.parts[bid]

    def _spec(self, bid: int) -> TableSpec:
        return self.parts[bid].spec

    # --- versions that are looked at ---------------------------------------------------------

    def granted(self, entry: c.Grant) -> None:
        """A grant is in the log: its version may be looked at from here on."""
        if self.parts and (entry.group == MODEL or entry.rows):
            self.pins[entry.incarnation, entry.group, entry.grant] = entry.version
            self._versions = sorted(set(self.pins.values()))

    def free(self, incarnation: int, group: int, grant: int) -> None:
        """Nobody looks at the version of a grant any more."""
        self._free([(incarnation, group, grant)])

    def done(self, message: d.Done) -> None:
        """A batch is finished: its worker looks at no older one's version, and at its own only if
        it says so."""
        who, group = message.contribution.incarnation, message.contribution.group
        last = message.grant - 1 if message.keeps else message.grant
        self._free([name for name in self.pins if name[:2] == (who, group) and name[2] <= last])

    def keep_only(self, members: set[int]) -> None:
        """Forget what was granted to others."""
        self._free([name for name in self.pins if name[0] not in members])

    def _free(self, names: Sequence[GrantName]) -> None:
        freed = {self.pins.pop(name) for name in names if name in self.pins}
        for name in names:
            self._waiting.pop(name, None)
        if not freed:
            return
        self._versions = sorted(set(self.pins.values()))
        for version in sorted(freed - set(self._versions), reverse=True):
            for part in self.parts.values():
                part.history.release(version, self._versions)

    # --- what is asked -----------------------------------------------------------------------

    def ask(self, message: d.AskRows, payload: Array) -> None:
        """A worker asks for rows: they are among `answers` now, or when their version is in the
        log; never, if the grant does not count any more."""
        name = (message.incarnation, message.group, message.grant)
        version = self.pins.get(name)
        if version is None:
            return
        part = self.parts.get(message.bid)
        problem = "" if part is not None else f"there is no part of a table in block {message.bid}"
        if part is not None and payload.nbytes % 8:
            problem = f"{payload.nbytes} bytes are no row numbers"
        elif part is not None and payload.nbytes // 8 > rows_per_piece(part.spec):
            most = rows_per_piece(part.spec)
            problem = f"{payload.nbytes // 8} rows are asked for at once; {most} are the most"
        if not problem:
            ids = aligned(payload).view(np.uint64)
            problem = self._disorder(message.bid, ids)
        if problem:
            refusal = d.Rows(0, message.incarnation, message.number, problem)
            self._answers.append((refusal, NO_BYTES))
        elif version <= self._version:
            self._answer(message, ids, version)
        else:
            waiting = self._waiting.setdefault(name, {})
            if len(waiting) < WAITING_MAX:
                waiting[message.number] = message, ids

    def _answer(self, message: d.AskRows, ids: Array, version: int) -> None:
        part, who, number = self.parts[message.bid], message.incarnation, message.number
        if message.start < 0:
            rows = part.read(ids, version).reshape(-1).view(np.uint8)
            self._answers.append((d.Rows(0, who, number), rows))
            return
        most = rows_per_piece(part.spec)
        ids, values, following = part.part(message.start, most, version)
        rows = np.concatenate([ids.view(np.uint8), values.reshape(-1).view(np.uint8)])
        self._answers.append((d.Rows(0, who, number, "", ids.size, following), rows))

    def _disorder(self, bid: int, ids: Array) -> str:
        kid, part = self._layout.tables.of_block[bid]
        entry = self._layout.tables.entries[kid]
        problem = disorder(ids, entry.spec, part, len(entry.bids))
        return f"table {entry.spec.key!r}: {problem}" if problem else ""

    def outgoing(self, server: int) -> list[ToWorker]:
        """Return what is answered since."""
        answers, self._answers = self._answers, []
        return [
            ToWorker(rows.incarnation, structs.replace(rows, server=server), payload)
            for rows, payload in answers
        ]

    # --- what is pushed ----------------------------------------------------------------------

    def admit(self, message: d.Push, payload: Array) -> PushedRows | tuple[str | int, str] | None:
        """Return a piece as it is kept, or (table, reason) if it must be refused (rule 9); None if
        it is for no table."""
        bid = bid_of(message.bid)
        if bid not in self.parts:
            return None
        spec = self._spec(bid)
        size = 8 + row_bytes(spec)
        if message.codec != "none" or message.form is not None:
            return spec.key, f"codec {message.codec!r} cannot be used for rows of a table"
        if payload.nbytes % size:
            return spec.key, f"{payload.nbytes} bytes are no rows of {size} bytes with their number"
        count = payload.nbytes // size
        whole = aligned(payload)
        ids = whole[: 8 * count].view(np.uint64)
        values = whole[8 * count :].view(spec.dtype)
        problem = self._disorder(bid, ids)
        if problem:
            return spec.key, problem
        if not spec.allow_nan and not all_finite(values, DTYPES[spec.dtype]):
            rows = np.isfinite(values.reshape(count, spec.dim)).all(axis=1)
            return spec.key, (
                f"the gradient of row {ids[int(np.argmin(rows))]} has NaN or Inf; allow it with "
                "zkv.Table(…, allow_nan=True)"
            )
        return PushedRows(ids, values.reshape(count, spec.dim))

    # --- updates -----------------------------------------------------------------------------

    def commit(
        self,
        entry: c.Commit,
        held: Mapping[ContributionId, Open],
        scale: Callable[[OptimizerSpec], float],
    ) -> None:
        """Apply an update of the model to all parts, and answer who has waited for its version.

        `scale(spec)` is the factor of global-norm clipping (1.0 for none).
        """
        for bid, gradient in self._gradients(entry, held):
            part = self.parts[bid]
            spec = self._optimizer(part.spec)
            rule, lr_factor = spec.for_key(part.spec.key)
            factor, values = scale(spec), gradient.values
            if factor != 1.0:
                with np.errstate(all="ignore"):
                    values = values * values.dtype.type(factor)
            rate = spec.lr_at(entry.version - 1) * lr_factor
            part.update(gradient.ids, values, rule, rate, entry.version, self._versions)
        self._version = entry.version
        for name in [name for name in self._waiting if self.pins[name] <= entry.version]:
            for message, ids in self._waiting.pop(name).values():
                self._answer(message, ids, self.pins[name])

    def square_sums(
        self, entry: c.Sum, held: Mapping[ContributionId, Open]
    ) -> list[tuple[int, float]]:
        """Return Σ g² of the reduced gradient of each part here, by the number of its block."""
        if entry.group != MODEL:
            return []
        return [(bid, square_sum(rows.values)) for bid, rows in self._gradients(entry, held)]

    def _gradients(
        self, entry: c.Sum | c.Commit, held: Mapping[ContributionId, Open]
    ) -> Iterator[tuple[int, PushedRows]]:
        """Yield the reduced gradient of each part that has one.

        A row that a contribution does not name counts as zero with its full weight.
        """
        if not self.parts:
            return
        missing = [one.contribution for one in entry.counted if one.contribution not in held]
        if missing:
            raise ProtocolError(
                f"the update to version {entry.version} of the model counts {missing[0]}, of which "
                "no end was held here"
            )
        by_part = [_pieces(held[one.contribution]) for one in entry.counted]
        everyone = float(np.sum(np.asarray([one.weight for one in entry.counted], np.float64)))
        stale = self._store.settings.staleness
        for bid in sorted(self.parts):
            mean = self._spec(bid).reduce == "mean"
            factors = [
                (one.weight if mean else 1.0) * stale.factor(one.staleness) * one.clip
                for one in entry.counted
            ]
            total = total_rows([joined(pieces.get(bid, ())) for pieces in by_part], factors)
            divisor = everyone if mean else 1.0
            if total is not None and divisor > 0.0:
                yield bid, PushedRows(total.ids, divided(total.values, divisor))

    def _optimizer(self, spec: TableSpec) -> OptimizerSpec:
        if not spec.rule:
            return self._store.settings.model
        if spec.rule not in self._own_rules:
            self._own_rules[spec.rule] = optimizer(spec.rule)
        return self._own_rules[spec.rule]


def _pieces(held: Open) -> dict[int, list[PushedRows]]:
    """Return what a contribution has pushed to tables, by block, in the order in which it did."""
    found: dict[int, list[PushedRows]] = {}
    for place, payload in sorted(held.payloads.items(), key=lambda one: one[0]):
        if isinstance(payload, PushedRows):
            found.setdefault(bid_of(place), []).append(payload)
    return found
