"""Tables in the simulated cluster: rows are read and pushed beside the model's keys.

Every read is of one version, looked at twice while others go on; in the end all rows of all
versions that anybody has seen, and those of the servers, are compared with a replay of the log, row
by row. It knows `simcluster`'s runs and adds to their laws; it must not know servers' arrays.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from drawn_runs import drawn
from simcluster import Options, Program, Sim, SimWorker

from zkv.dtypes import Array
from zkv.errors import Cancelled, ZkvError
from zkv.optim import init_slots, update
from zkv.optimizer_spec import optimizer
from zkv.staleness import staleness
from zkv.sums import divided, tree_sum, weighted
from zkv.tables import Table, initial_of, part_of, state_of
from zkv_workers import signals as s
from zkv_workers.model import BatchState
from zkv_workers.table_rows import pushed_rows, wanted_rows

RULES = ("sgd:lr=0.1", "adagrad:lr=0.1", "adam:lr=0.1")
NUMBERS = [*range(24), 2**40, 2**63, 2**64 - 1]
DIM = 3
SIZE_BYTES = 64
"""Of a piece: three rows."""


@dataclass(frozen=True)
class TableOptions(Options):
    """What a run with tables is made of, beside what all are."""

    row_rule: str = "adagrad:lr=0.1"
    row_reduce: str = "mean"
    row_void: float = 0.0
    """How often a gradient of a row has NaN."""
    row_pull: float = 0.0
    """How often rows are read between two batches."""


def with_tables(seed: int, **fixed: Any) -> TableOptions:
    """Draw a run with tables from a seed."""
    rng = random.Random(seed + 1_000_003)
    ranks = tuple(rank for rank in range(4) if rng.random() < 0.2)
    options: dict[str, Any] = {
        "row_rule": rng.choice(RULES),
        "row_reduce": rng.choice(("mean", "sum")),
        "row_void": rng.choice((0.0, 0.1)),
        "row_pull": rng.choice((0.0, 0.3)),
    }
    drawn_options = {name for name in fixed if name not in TableOptions.__annotations__}
    base = drawn(seed, on_demand=ranks, **{name: fixed[name] for name in drawn_options})
    own = {name: value for name, value in fixed.items() if name not in drawn_options}
    return TableOptions(**{**asdict(base), **options, **own})


Rows = list[tuple[list[int], Array]]
"""What a contribution has pushed: calls, each with row numbers and gradients."""


class TableSim(Sim):
    """A run whose workers read and push rows of the table "emb"."""

    options: TableOptions

    def __init__(self, seed: int, options: TableOptions) -> None:
        self.pushed_rows: dict[tuple[int, int], Rows] = {}
        self.seen_rows: list[tuple[int, list[int], Array]] = []
        self.seen_tables: list[tuple[int, dict[int, Array]]] = []
        self.running: tuple[bytes, SimWorker]
        """Whose program is running."""
        super().__init__(seed, options)

    @property
    def table(self) -> Table:
        options = self.options
        return Table(DIM, initial="uniform:-1,1", rule=options.row_rule, reduce=options.row_reduce)

    def _initialise(self) -> Program:
        for made in super()._initialise():
            event = made(0)
            if event.plain:
                yield made
                continue
            tables = (self.table.spec("emb"),)
            yield lambda token, event=event, tables=tables: s.Initialise(
                token, event.specs, event.values, event.plain, tables=tables
            )

    def _advance(self, route: bytes, worker: SimWorker, value: Any) -> None:
        self.running = route, worker
        super()._advance(route, worker, value)

    # --- what workers do -------------------------------------------------------------------------

    def _some(self) -> list[int]:
        """Return some row numbers, a few of which are named by nearly everybody."""
        few, chance = NUMBERS[-4:], self.rng
        count = chance.choice((1, 2, 9))
        return [chance.choice(few if chance.random() < 0.4 else NUMBERS) for _ in range(count)]

    def _read(self, state: BatchState) -> Program:
        """Read rows of a batch's version; None if the batch was cancelled."""
        numbers = self._some()
        wanted = wanted_rows(state.layout, "emb", numbers)
        for _ in range(2):
            rows = yield lambda token: wanted.asked(token, batch=state.number)
            state.check()
            self.seen_rows.append((state.version, numbers, wanted.handed(rows)))
            yield self.rng.random() * 0.1
            state.check()

    def _begun(self, state: BatchState) -> Program:
        """Read rows at once, some of a version that is not in the log yet."""
        if self.rng.random() < 0.5 and not state.cancelled:
            with contextlib.suppress(Cancelled):
                yield from self._read(state)

    def _made(self, rank: int, state: BatchState) -> Rows:
        """Return what a batch pushes to the table."""
        numbers = np.random.default_rng([self.seed, self.rng.getrandbits(30)])
        made = []
        for _ in range(self.rng.choice((0, 1, 1, 2))):
            ids = self._some()
            gradients = numbers.standard_normal((len(ids), DIM)).astype(np.float32)
            if self.rng.random() < self.options.row_void:
                gradients[0, 1] = np.nan
            made.append((ids, gradients))
        return made

    def _push(self, route: bytes, worker: SimWorker, rank: int, state: BatchState) -> Program:
        state.check()
        yield from self._read(state)
        assert worker.session.member is not None
        name = worker.session.member.incarnation, state.number
        self.pushed_rows[name] = made = self._made(rank, state)
        for ids, gradients in made:
            for piece in pushed_rows(state.layout, state.number, "emb", ids, gradients):
                self.feed(route, worker, piece)
            if self.options.layer_s:
                yield self.rng.random() * self.options.layer_s
                state.check()
        yield from super()._push(route, worker, rank, state)

    def _change_rate(self) -> Program:
        yield from super()._change_rate()
        if self.rng.random() < self.options.row_pull:
            yield from self._read_alone()

    def _read_alone(self) -> Program:
        """Read rows outside of a batch, twice: they are of one version."""
        pulled = yield lambda token: s.Pull(token, (), rows=True)
        numbers = self._some()
        wanted = wanted_rows(pulled.layout, "emb", numbers)
        for _ in range(2):
            rows = yield lambda token: wanted.asked(token, pull=pulled.pull)
            self.seen_rows.append((pulled.version, numbers, wanted.handed(rows)))
            yield self.rng.random() * 0.1
        if self.rng.random() < 0.5:
            kid = wanted.entry.kid
            ids, rows = yield lambda token: s.AskRows(token, kid, None, 0, pulled.pull)
            assert ids.tolist() == sorted(set(ids.tolist())), self.story()
            self.seen_tables.append((pulled.version, dict(zip(ids.tolist(), rows, strict=True))))
        self.feed(*self.running, s.ReleaseRows(pulled.pull))

    # --- laws ------------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        history = self._replay()
        for version, numbers, rows in self.seen_rows:
            assert version < len(history), f"version {version} never was; {self.story()}"
            for one, row in zip(numbers, rows, strict=True):
                expected = self._row(history[version], one)
                assert row.tobytes() == expected.tobytes(), (
                    f"row {one} of version {version}: {row}, expected {expected}; {self.story()}"
                )
        for version, table in self.seen_tables:
            bits = {one: row.tobytes() for one, row in table.items()}
            expected_bits = {one: row.tobytes() for one, row in history[version].items()}
            assert bits == expected_bits, f"all rows of version {version}; {self.story()}"
        self._check_servers(history[-1])

    def _row(self, version: dict[int, Array], one: int) -> Array:
        if one in version:
            return version[one]
        spec = self.table.spec("emb")
        ids = np.asarray([one], np.uint64)
        return initial_of(spec.initial).rows(state_of(spec), ids, DIM, spec.dtype)[0]

    def _replay(self) -> list[dict[int, Array]]:
        """Return the rows of each version that updates have changed, as one process makes them."""
        spec = optimizer(self.options.row_rule)
        stale, mean = staleness(self.options.staleness), self.options.row_reduce == "mean"
        history: list[dict[int, Array]] = [{}]
        state: dict[int, Any] = {}
        counts: dict[int, int] = {}
        for commit in self.commits():
            made = [
                _added(self.pushed_rows[one.contribution.incarnation, one.contribution.batch])
                for one in commit.counted
            ]
            factors = [
                (one.weight if mean else 1.0) * stale.factor(one.staleness)
                for one in commit.counted
            ]
            divisor = sum(one.weight for one in commit.counted) if mean else 1.0
            now = dict(history[-1])
            for one in sorted({one for rows in made for one in rows}):
                counts[one] = counts.get(one, 0) + 1

                def term(at: int, one: int = one, made: Any = made, by: Any = factors) -> Any:
                    return weighted(made[at][one], by[at]) if one in made[at] else None

                total = tree_sum(term, len(made))
                assert total is not None
                value = self._row(now, one)
                slots = state.get(one, init_slots(spec.rule, value))
                now[one], state[one] = update(
                    spec.rule, value, slots, divided(total, divisor), lr=spec.lr, count=counts[one]
                )
            history.append(now)
        return history

    def _check_servers(self, last: dict[int, Array]) -> None:
        """Each row is on its server, once, with its bits; what was only read is nowhere."""
        (entry,) = self.router.layout.tables.entries.values()
        found: dict[int, Array] = {}
        for part, bid in enumerate(entry.bids):
            node = self.nodes[self.place(self.router.layout.blocks[bid].server)]
            tables = node.shard.tables
            ids, values = tables.parts[bid].arrays()[:2]
            assert set(part_of(ids, len(entry.bids)).tolist()) <= {part}, self.story()
            assert not found.keys() & set(ids.tolist()), self.story()
            found.update(zip(ids.tolist(), values, strict=True))
            # Nobody looks at anything who has left; of who has crashed it may not be known yet.
            pins = tables.pins.items()
            there = {version for name, version in pins if name[0] in self.router.members.workers}
            assert set(tables.pins.values()) == there, f"pinned: {tables.pins}; {self.story()}"
            kept = tables.parts[bid].history.by_version
            assert kept.keys() <= there, f"kept: {kept.keys()}; {self.story()}"
        assert found.keys() == last.keys(), f"{found.keys() ^ last.keys()}; {self.story()}"
        for one, row in last.items():
            assert found[one].tobytes() == row.tobytes(), f"row {one}; {self.story()}"


def _added(calls: Rows) -> dict[int, Array]:
    """Return the gradient of each row of a contribution: added up in each call, then over calls."""
    total: dict[int, Array] = {}
    for ids, gradients in calls:
        own: dict[int, Array] = {}
        for one, row in zip(ids, gradients, strict=True):
            own[one] = row.copy() if one not in own else own[one] + row
        for one, row in own.items():
            total[one] = row if one not in total else total[one] + row
    return total


def simulate_tables(seed: int, options: TableOptions) -> TableSim:
    """Run one cluster with tables to its end and check all laws."""
    sim = TableSim(seed, options)
    try:
        sim.run()
    except ZkvError as error:
        raise AssertionError(f"{error}; {sim.story()}") from error
    sim.check()
    return sim
