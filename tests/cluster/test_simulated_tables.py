"""Tables in the simulated cluster: under loss, repetition, reordering and crashes every row that is
read, and every row in the end, is that of a replay of the log. Broken variants have to be caught.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from drawn_runs import assert_caught
from simtables import DIM, SIZE_BYTES, Rows, TableSim, simulate_tables, with_tables

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.layout import Layout
from zkv.window import Window
from zkv.wire import MODEL
from zkv_brokers import tables
from zkv_brokers.row_store import RowStore
from zkv_brokers.rules import Rules
from zkv_brokers.tables import Tables
from zkv_workers import cycle
from zkv_workers.cycle import Cycle
from zkv_workers.model import BatchState

SEEDS = 25
MUTANT_SEEDS = 100


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows in a piece, so that most pushes and reads have several."""
    monkeypatch.setattr("zkv.tables.PIECE_BYTES", SIZE_BYTES)


@pytest.fixture(autouse=True)
def nothing_stays_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A law of every run: what is pinned for a worker are its batch's version, the one before with
    `prefetch`, the one that it is granted ahead, and that of one pull."""
    granted = Tables.granted

    def checked(self: Tables, entry: c.Grant) -> None:
        granted(self, entry)
        mine = [name for name in self.pins if name[0] == entry.incarnation]
        batches = [name for name in mine if name[1] == MODEL]
        assert len(mine) - len(batches) <= 1, f"pinned at once: {mine}"
        assert len(batches) <= 3, f"pinned at once: {mine}"

    monkeypatch.setattr(Tables, "granted", checked)


def test_with_faults_every_row_is_that_of_a_replay() -> None:
    reads = pushes = tables_read = 0
    for seed in range(SEEDS):
        sim = simulate_tables(seed, with_tables(seed))
        reads += len(sim.seen_rows)
        pushes += sum(len(calls) for calls in sim.pushed_rows.values())
        tables_read += len(sim.seen_tables)
    assert reads > 10 * SEEDS
    assert pushes > 5 * SEEDS
    assert tables_read > SEEDS / 2


def test_without_losses_no_row_is_asked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is ahead of the log, or of its version, waits at the server for it."""
    again: list[Any] = []
    original = Window.repeats

    def repeats(self: Window[Any], now: float) -> list[Any]:
        found = original(self, now)
        again.extend(one for one in found if isinstance(getattr(one, "message", None), d.AskRows))
        return found

    monkeypatch.setattr(Window, "repeats", repeats)
    for seed in range(8):
        simulate_tables(seed, with_tables(seed, **SMOOTH, **STREAMED))
    assert not again


SMOOTH: dict[str, Any] = {
    "loss": 0.0,
    "duplicate": 0.0,
    "crashes": 0,
    "broker_restarts": 0,
    "reorder": False,
    "batches": 4,
}


STREAMED: dict[str, Any] = {
    "policy": "bsp",
    "workers": 3,
    "streaming": True,
    "optimizer": "adam:lr=0.1",
    "staleness": "none",
    "codec_down": "none",
    "layer_s": 0.05,
    "compute_s": (0.001,),
    "delay_s": 0.005,
}
"""Batches begin on the first values of a version that comes into the log only later."""


def test_the_order_of_arrival_and_the_number_of_servers_change_no_bit() -> None:
    """BSP: the same rows whatever the delays, the losses, and on how many servers they lie."""
    fixed: dict[str, Any] = {
        **SMOOTH,
        "policy": "bsp",
        "workers": 3,
        "optimizer": "adam:lr=0.1",
        "staleness": "none",
        "void": 0.0,
        "row_void": 0.0,
        "withdraw": 0.0,
        "rates": 0.0,
        "row_rule": "adam:lr=0.1",
        "row_pull": 0.0,
        "pull": 0.0,
        "uneven": False,
        "barrier": False,
        "plain": 0,
        "undeclared": 0.0,
        "prefetch": 0,
    }
    found = []
    for servers, delay_s, loss in ((1, 0.001, 0.0), (2, 0.05, 0.1), (3, 0.01, 0.0), (3, 0.05, 0.1)):
        options = with_tables(7, **{**fixed, "servers": servers, "delay_s": delay_s, "loss": loss})
        sim = FixedRows(7, options)
        sim.run()
        sim.check()
        found.append(sim.rows())
    assert found[0]
    assert all(one == found[0] for one in found)


class FixedRows(TableSim):
    """Workers push rows that depend on who they are and which batch it is alone."""

    def _made(self, rank: int, state: BatchState) -> Rows:
        numbers = np.random.default_rng([5, rank, state.number])
        ids = numbers.integers(0, 40, 12).tolist()
        return [(ids, numbers.standard_normal((12, DIM)).astype(np.float32))]

    def rows(self) -> dict[int, bytes]:
        """Return the rows that the servers hold."""
        parts = [part for node in self.nodes for part in node.shard.tables.parts.values()]
        held = [zip(*part.arrays()[:2], strict=True) for part in parts]
        return {int(one): row.tobytes() for rows in held for one, row in rows}


# --- broken variants, each without one rule ----------------------------------------------------


def _nothing_is_pinned(patch: pytest.MonkeyPatch) -> None:
    """Rows are what they are when they are asked for."""
    original = RowStore.read

    def read(self: RowStore, ids: Array, version: int) -> Array:
        return original(self, ids, 2**60)

    patch.setattr(RowStore, "read", read)


def _a_finished_batch_is_not_heard_of(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tables, "done", lambda self, message: None)


def _a_grant_that_is_taken_back_stays_pinned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tables, "free", lambda self, incarnation, group, grant: None)


def _who_is_gone_keeps_its_pins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tables, "keep_only", lambda self, members: None)


def _the_version_of_the_grant_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    original = Tables.ask

    def ask(self: Tables, message: d.AskRows, payload: Array) -> None:
        kept, self._version = self._version, 2**60
        original(self, message, payload)
        self._version = kept

    patch.setattr(Tables, "ask", ask)


def _an_end_names_no_rows(patch: pytest.MonkeyPatch) -> None:
    """A contribution is complete before its rows are here."""
    original = Layout.places_by_server

    def places(self: Layout, group: int, found: Any) -> dict[int, list[int]]:
        return original(self, group, ())

    patch.setattr(Layout, "places_by_server", places)


def _pieces_have_one_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cycle, "place_of", lambda bid, piece: bid)


def _a_row_that_is_not_named_is_left_out_of_the_mean(patch: pytest.MonkeyPatch) -> None:
    original = tables.divided

    def divided(values: Array, by: float) -> Array:
        return original(values, by if by == 1.0 else 1.0)

    patch.setattr(tables, "divided", divided)


def _rows_of_a_table_are_summed_as_they_came(patch: pytest.MonkeyPatch) -> None:
    """The last contribution first."""
    original = tables.total_rows

    def total(terms: Any, factors: Any) -> Any:
        return original(terms[::-1], factors[::-1])

    patch.setattr(tables, "total_rows", total)


def _a_row_counts_its_updates_with_all_others(patch: pytest.MonkeyPatch) -> None:
    original = RowStore.update

    def update(self: RowStore, ids: Array, *rest: Any) -> None:
        original(self, ids, *rest)
        self._counts[:] = self._counts.max()

    patch.setattr(RowStore, "update", update)


def _a_grant_of_what_is_held_is_not_told(patch: pytest.MonkeyPatch) -> None:
    """A worker that holds the model's version already is granted it without the servers' word."""
    patch.setattr(Rules, "tables", property(lambda self: False, lambda self, value: None))


def _rows_pushed_before_a_withdrawal_count(patch: pytest.MonkeyPatch) -> None:
    original = Cycle.begin

    def begin(self: Cycle, layout: Layout) -> Any:
        kept = list(self.places)
        found = original(self, layout)
        if found is not None:
            self.places[:] = kept
        return found

    patch.setattr(Cycle, "begin", begin)


def _a_batch_on_older_values_reads_newer_rows(patch: pytest.MonkeyPatch) -> None:
    """With prefetch=1: rows of what was granted, not of what is computed on."""
    original = Cycle.begin

    def begin(self: Cycle, layout: Layout) -> Any:
        found = original(self, layout)
        if found is not None and self.current is not None:
            self.reads = self.current[1]
        return found

    patch.setattr(Cycle, "begin", begin)


def _rows_that_came_later_are_in_older_versions(patch: pytest.MonkeyPatch) -> None:
    """All rows: those that no update had changed then, with what they begin with."""
    original = RowStore.part

    def part(self: RowStore, start: int, count: int, version: int) -> Any:
        ids = self.index.ids[start : start + count]
        return ids, self.read(ids, version), original(self, start, count, version)[2]

    patch.setattr(RowStore, "part", part)


MUTANTS = (
    _nothing_is_pinned,
    _a_finished_batch_is_not_heard_of,
    _a_grant_that_is_taken_back_stays_pinned,
    _who_is_gone_keeps_its_pins,
    _the_version_of_the_grant_is_not_waited_for,
    _an_end_names_no_rows,
    _pieces_have_one_place,
    _a_row_that_is_not_named_is_left_out_of_the_mean,
    _rows_of_a_table_are_summed_as_they_came,
    _a_row_counts_its_updates_with_all_others,
    _a_grant_of_what_is_held_is_not_told,
    _rows_pushed_before_a_withdrawal_count,
    _a_batch_on_older_values_reads_newer_rows,
    _rows_that_came_later_are_in_older_versions,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_variant_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)

    def run(seed: int) -> None:
        # Without losses nothing takes a minute, and what waits for ever is soon found.
        quick = {**SMOOTH, "until_s": 60.0} if seed % 2 else {}
        quick |= STREAMED if seed % 4 == 3 else {}
        simulate_tables(seed, with_tables(seed, **quick))

    assert_caught(mutant, MUTANT_SEEDS, run)
