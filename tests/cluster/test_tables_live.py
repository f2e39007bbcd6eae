"""Tables over real sockets: the same rows on both faces, on any number of servers, in any order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import cluster, until
from safetensors.numpy import load_file

import zkv
from zkv.aio import AsyncWorker
from zkv.dtypes import Array
from zkv.errors import KeyMismatch, PushRefused, UnknownKey
from zkv.optim import init_slots, rule, update
from zkv.sums import divided, tree_sum, weighted
from zkv.tables import initial_of, state_of
from zkv_brokers.replay import replay
from zkv_cli.export import write_model

DIM = 4
EMB = zkv.Table(DIM, initial="uniform:-1,1", rule="adam:lr=0.1")
W = {"w": np.zeros(3, np.float32)}
ONES = np.ones(3, np.float32)


def first(table: zkv.Table, ids: Any, key: str = "emb") -> Array:
    """Return what rows hold before any update."""
    spec = table.spec(key)
    numbers = np.asarray(ids, np.uint64)
    return initial_of(spec.initial).rows(state_of(spec), numbers, spec.dim, spec.dtype)


def pushed(rank: int, turn: int) -> tuple[Array, Array]:
    """Return what a worker pushes in a batch: some rows several times."""
    rng = np.random.default_rng([rank, turn])
    ids = rng.integers(0, 30, 40).astype(np.uint64) << np.uint64(58)
    return ids, rng.standard_normal((40, DIM)).astype(np.float32)


def reference(turns: int, workers: int) -> dict[int, Array]:
    """Return the rows that updates have changed, made by one process with dictionaries."""
    chosen = rule("adam")
    rows: dict[int, Array] = {}
    state: dict[int, Any] = {}
    counts: dict[int, int] = {}
    for turn in range(turns):
        made = []
        for rank in range(workers):
            own: dict[int, Array] = {}
            for one, row in zip(*pushed(rank, turn), strict=True):
                number = int(one)
                own[number] = row.copy() if number not in own else own[number] + row
            made.append(own)
        weights = [1.0 + rank for rank in range(workers)]
        for one in sorted({one for own in made for one in own}):

            def term(at: int, one: int = one, made: Any = made, weights: Any = weights) -> Any:
                return weighted(made[at][one], weights[at]) if one in made[at] else None

            total = tree_sum(term, workers)
            assert total is not None
            now = rows.get(one, first(EMB, [one])[0])
            counts[one] = counts.get(one, 0) + 1
            slots = state.get(one, init_slots(chosen, now))
            rows[one], state[one] = update(
                chosen, now, slots, divided(total, sum(weights)), lr=0.1, count=counts[one]
            )
    return rows


async def train(worker: AsyncWorker, turns: int = 6, tables: Any = None) -> None:
    """Train "emb" in batches of different weights, and a key beside it."""
    await worker.init(W, tables={"emb": EMB} if tables is None else tables)
    for turn in range(turns):
        async with worker.batch(weight=1.0 + worker.rank) as batch:
            ids, gradients = pushed(worker.rank, turn)
            rows = await batch.rows("emb", ids)
            assert rows.shape == (40, DIM)
            batch.push_rows("emb", ids, gradients)
            batch.push("w", ONES)
    assert await batch.wait() == "committed"


@pytest.mark.parametrize("route", ["direct", "broker"])
@pytest.mark.parametrize("servers", [1, 2, 3])
async def test_rows_are_those_of_one_process_bit_for_bit(servers: int, route: str) -> None:
    async with cluster(servers, route=route, optimizer="momentum:lr=0.1") as made:

        async def body(worker: AsyncWorker) -> Array:
            await train(worker)
            await worker.barrier()
            rows: Array = await worker.rows("emb", list(expected))
            return rows

        expected = reference(6, 3)
        for rows in await made.run(body, body, body):
            assert rows.tobytes() == np.stack(list(expected.values())).tobytes()
        held = [part for one in made.servers for part in one.shard.tables.parts.values()]
        assert sum(map(len, held)) == len(expected)
        assert len(held) == servers
        assert servers == 1 or all(map(len, held))


def test_the_blocking_worker_reads_and_pushes_rows() -> None:
    with zkv.local(workers=1, servers=2, optimizer="sgd:lr=1") as made, made.connect() as worker:
        worker.init({}, tables={"emb": zkv.Table(2, initial="zeros", rows=10)})
        with worker.batch() as batch:
            assert not batch.rows("emb", [[1, 2], [2, 9]]).any()
            batch.push_rows("emb", [[1, 2], [2, 9]], np.ones((2, 2, 2), np.float32))
            batch.push_rows("emb", 2, np.ones(2, np.float32))
            with pytest.raises(KeyMismatch, match="row 10 is out of range: it has rows 0 to 9"):
                batch.rows("emb", [3, 10])
        assert batch.wait() == "committed"
        assert worker.rows("emb", [9, 1, 2, 2, 0])[:, 0].tolist() == [-1, -1, -3, -3, 0]
        assert worker.rows("emb", []).shape == (0, 2)
        assert worker.rows("emb", np.int8(2)).tolist() == [-3, -3]
        with pytest.raises(UnknownKey, match="there is no model yet"):
            worker.pull()


def test_an_export_has_the_rows_of_all_tables_of_the_version_of_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with zkv.local(workers=1, servers=2, optimizer="sgd:lr=1") as made, made.connect() as worker:
        with pytest.raises(UnknownKey, match="has no model yet"):
            write_model(made.address, file, 10.0)
        worker.init({}, tables={"emb": zkv.Table(2, initial="zeros"), 7: zkv.Table(3)})
        ids = [2**64 - 1, 5, 9]
        with worker.batch() as batch:
            batch.push_rows("emb", ids, -np.asarray([[1, 2], [3, 4], [5, 6]], np.float32))
        assert batch.wait() == "committed"
        version, arrays, size = write_model(made.address, file, 10.0)
        assert (version, arrays, size) == (1, 4, file.stat().st_size)
    found = load_file(file)
    assert found["emb.ids"].tolist() == sorted(ids)
    assert found["emb.rows"].tolist() == [[3, 4], [5, 6], [1, 2]]
    assert (found["7.ids"].shape, found["7.rows"].shape) == ((0,), (0, 3))


async def test_a_model_of_tables_alone_is_trained_under_every_policy() -> None:
    for policy in ("bsp", "asp", "ssp:1", "k-bsp:1", "k-batch-asp:2"):
        async with cluster(2, policy_text=policy) as made:

            async def body(worker: AsyncWorker) -> None:
                await worker.init({}, tables={"emb": EMB})
                for turn in range(4):
                    async with worker.batch() as batch:
                        ids, gradients = pushed(worker.rank, turn)
                        await batch.rows("emb", ids)
                        batch.push_rows("emb", ids, gradients)
                await worker.barrier()
                assert (await worker.rows("emb", [2**58])).shape == (1, DIM)

            await made.run(body, body)


# --- versions ----------------------------------------------------------------------------------


async def test_a_batch_reads_its_own_version_whatever_is_updated_meanwhile() -> None:
    async with cluster(2, policy_text="asp") as made, made.worker(0, world=1) as slow:
        await slow.init({}, tables={"emb": EMB})
        async with slow.batch() as batch:
            async with made.worker(1) as quick:
                for turn in range(5):
                    async with quick.batch() as other:
                        other.push_rows("emb", [7, 8 + turn], np.ones((2, DIM), np.float32))
                    assert await other.wait() == "committed"
                now = await quick.rows("emb", range(20))
            seen = await batch.rows("emb", range(20))
            assert seen.tobytes() == first(EMB, range(20)).tobytes()
            changed = np.flatnonzero((now != seen).any(axis=1)).tolist()
            assert changed == [7, 8, 9, 10, 11, 12]
            kept = [
                p.history.nbytes for one in made.servers for p in one.shard.tables.parts.values()
            ]
            # What a row begins with can be made again.
            assert not any(kept)
        await batch.wait()
        async with slow.batch() as batch:
            assert (await batch.rows("emb", range(20))).tobytes() == now.tobytes()


async def test_what_is_kept_for_a_pinned_version_goes_with_it() -> None:
    async with cluster(1, policy_text="asp") as made, made.worker(0, world=1) as slow:
        await slow.init({}, tables={"emb": EMB})
        tables = made.servers[0].shard.tables
        (part,) = tables.parts.values()
        async with made.worker(1) as quick:

            async def push() -> None:
                async with quick.batch() as other:
                    other.push_rows("emb", range(10), np.ones((10, DIM), np.float32))
                assert await other.wait() == "committed"

            await push()
            before = await quick.rows("emb", range(10))
            async with slow.batch() as batch:
                for _ in range(5):
                    await push()
                assert part.history.nbytes > 0
                assert (await batch.rows("emb", range(10))).tobytes() == before.tobytes()
            one_version = part.history.nbytes
            await batch.wait()
            for _ in range(5):
                await push()
        # That of the batch which is granted to it already, and nothing of those before.
        await until(lambda: len(tables.pins) == 1, what="one version is pinned")
        assert part.history.nbytes <= one_version
        await slow.leave()
        await until(lambda: not tables.pins and part.history.nbytes == 0, what="nothing is kept")


async def test_a_batch_on_the_values_before_reads_their_rows() -> None:
    """With prefetch=1 rows and values of a batch are of one version, that of the batch before."""
    async with cluster(2, optimizer="sgd:lr=1") as made:

        async def body(worker: AsyncWorker) -> list[tuple[int, float, float]]:
            await worker.init(W, tables={"emb": zkv.Table(DIM, initial="zeros")})
            seen = []
            for _ in range(5):
                async with worker.batch() as batch:
                    rows = await batch.rows("emb", [3])
                    seen.append((batch.version, float(rows[0, 0]), float(batch["w"][0])))
                    batch.push_rows("emb", [3], np.ones((1, DIM), np.float32))
                    batch.push("w", ONES)
            await batch.wait()
            return seen

        async with made.worker(0, world=1, prefetch=1) as worker:
            seen = await body(worker)
        assert [(row, value) for _, row, value in seen] == [(-one, -one) for one, _, _ in seen]
        assert seen[-1][0] == 3


async def test_nothing_of_a_batch_that_is_withdrawn_or_refused_is_left() -> None:
    async with cluster(2) as made, made.worker(0, world=1) as worker:
        await worker.init(W, tables={"emb": EMB, "nan": zkv.Table(2, rule="sgd", allow_nan=True)})
        batch = worker.batch()
        await batch.__aenter__()
        batch.push_rows("emb", range(50), np.ones((50, DIM), np.float32))
        error = ZeroDivisionError()
        assert not await batch.__aexit__(ZeroDivisionError, error, None)
        assert batch.outcome == "withdrawn"
        bad = np.ones((3, DIM), np.float32)
        bad[1, 2] = np.inf
        async with worker.batch() as batch:
            batch.push_rows("emb", [9, 7, 5], bad)
        assert await batch.wait() == "discarded"
        says = r"key 'emb': the gradient of row 7 has NaN or Inf; allow it with zkv.Table\(…, allow"
        with pytest.raises(PushRefused, match=says):
            await worker.batch().__aenter__()
        async with worker.batch() as batch:
            batch.push_rows("nan", [4], np.full((1, 2), np.nan, np.float32))
        assert await batch.wait() == "committed"
        assert np.isnan(await worker.rows("nan", [4])).all()
        assert (await worker.rows("emb", range(50))).tobytes() == first(EMB, range(50)).tobytes()
        parts = [p for one in made.servers for p in one.shard.tables.parts.values()]
        assert sum(len(part) for part in parts if part.spec.key == "emb") == 0
        assert all(one.shard.contributions.bytes_held == 0 for one in made.servers)


# --- how tables are made -----------------------------------------------------------------------


async def test_all_workers_make_the_same_tables_and_a_late_one_finds_them() -> None:
    async with cluster(2, optimizer="momentum") as made:
        await made.run(train, train)
        async with made.worker(0, world=1) as late:
            await late.init(W, tables={"emb": EMB})
            expected = reference(6, 2)
            rows = await late.rows("emb", list(expected))
            assert rows.tobytes() == np.stack(list(expected.values())).tobytes()
            for other, says in (
                (
                    zkv.Table(5, rule="sgd"),
                    "table 'emb' was initialised otherwise: dim is 4, given 5",
                ),
                (zkv.Table(DIM, initial="uniform:-1,1", rule="adam:lr=0.1", seed=1), "seed is 0"),
            ):
                with pytest.raises(KeyMismatch) as refused:
                    await late.init(W, tables={"emb": other})
                assert says.removeprefix("table ") in str(refused.value)
            with pytest.raises(KeyMismatch, match="lacks 'emb'"):
                await late.init(W)
            with pytest.raises(KeyMismatch, match="it is a table, given as a key"):
                await late.init({**W, "emb": np.zeros(3, np.float32)})
            with pytest.raises(KeyMismatch, match="initialised before its first batch"):
                await late.init({}, tables={"new": EMB})


async def test_keys_and_tables_may_be_made_one_after_the_other() -> None:
    async with cluster(2) as made, made.worker(0, world=1) as worker:
        await worker.init(W)
        await worker.init({}, tables={"emb": EMB, 7: EMB})
        await worker.init({"v": np.zeros(2, np.float32)})
        async with worker.batch() as batch:
            assert list(batch.params) == ["w", "v"]
            batch.push_rows(7, [1], np.ones((1, DIM), np.float32))
            # Of one seed, and yet not the same.
            assert (await batch.rows("emb", [1]) != await batch.rows(7, [1])).all()
        assert await batch.wait() == "committed"


@pytest.mark.parametrize(
    ("optimizer", "table", "says"),
    [
        ("momentum:lr=0.1", zkv.Table(2), "rule momentum is not for tables"),
        ("adam:lr=0.1,weight_decay=0.1", zkv.Table(2), "weight decay is not for tables"),
        ("sgd:lr=0.1", zkv.Table(2, rule="adamw:lr=0.1"), "rule adamw is not for tables"),
        ("sgd:lr=0.1", zkv.Table(2, rule="nonsense"), "unknown update rule 'nonsense'"),
    ],
)
async def test_a_rule_that_tables_do_not_take_is_refused_at_init(
    optimizer: str, table: zkv.Table, says: str
) -> None:
    async with cluster(1, optimizer=optimizer) as made, made.worker(0, world=1) as worker:
        with pytest.raises(KeyMismatch) as refused:
            await worker.init(W, tables={"emb": table})
        assert "'emb'" in str(refused.value) or "nonsense" in says
        assert says in str(refused.value)
        # Nothing was made of it.
        await worker.init(W)
        async with worker.batch() as batch:
            batch.push("w", ONES)


async def test_tables_are_no_plain_keys_and_no_arrays() -> None:
    async with cluster(1) as made, made.worker(0, world=1) as worker:
        with pytest.raises(KeyMismatch, match="not with plain=True"):
            await worker.init({}, tables={"emb": EMB}, plain=True)
        with pytest.raises(TypeError, match=r"table 'emb': a zkv.Table is needed, not int"):
            await worker.init({}, tables={"emb": 64})  # type: ignore[dict-item]
        with pytest.raises(KeyMismatch, match="'w' stands twice in one init"):
            await worker.init(W, tables={"w": EMB})
        await worker.init(W, tables={"emb": EMB})
        hint = "key 'emb' is a table: its rows are read by batch.rows or worker.rows"
        with pytest.raises(UnknownKey, match=hint):
            await worker.pull("emb")
        with pytest.raises(UnknownKey, match=hint):
            worker.push("emb", ONES)
        async with worker.batch() as batch:
            assert list(batch.params) == ["w"]
            with pytest.raises(UnknownKey, match=hint):
                batch["emb"]
            with pytest.raises(UnknownKey, match=hint):
                batch.push("emb", ONES)
            with pytest.raises(UnknownKey, match="key 'w' is no table"):
                await batch.rows("w", [1])
            with pytest.raises(UnknownKey, match="unknown key 'other'; initialised are 'emb'"):
                batch.push_rows("other", [1], np.ones((1, DIM), np.float32))


@pytest.mark.parametrize(
    ("ids", "gradients", "says"),
    [
        ([-1], np.ones((1, DIM), np.float32), "row -1 is negative"),
        ([1.5], np.ones((1, DIM), np.float32), "whole numbers"),
        ([1], np.ones((1, DIM)), "dtype float32 expected, given float64; convert it with .astype"),
        ([1, 2], np.ones((1, DIM), np.float32), r"shape \(2, 4\) expected, given \(1, 4\)"),
        ([[1, 2]], np.ones((2, DIM), np.float32), r"shape \(1, 2, 4\) expected"),
        ([1], [[1.0] * DIM], "push_rows takes arrays, not list"),
    ],
)
async def test_what_cannot_be_pushed_is_refused_before_anything_is_sent(
    ids: Any, gradients: Any, says: str
) -> None:
    async with cluster(1) as made, made.worker(0, world=1) as worker:
        await worker.init({}, tables={"emb": EMB})
        async with worker.batch() as batch:
            with pytest.raises(KeyMismatch, match=f"table 'emb'.*{says}"):
                batch.push_rows("emb", ids, gradients)
            if says in ("row -1 is negative", "whole numbers"):
                with pytest.raises(KeyMismatch, match=says):
                    await batch.rows("emb", ids)
                with pytest.raises(KeyMismatch, match=says):
                    await worker.rows("emb", ids)
        await batch.wait()
        assert worker.stats()["bytes_up"] == 0


# --- and what else there is --------------------------------------------------------------------


async def test_rows_above_what_a_float_holds_are_exactly_those_that_are_asked_for() -> None:
    """D18: numbers above 2**24 and 2**31, as all integers that hold them, and as no floats."""
    numbers = [16_777_216, 16_777_217, 59_000_000, 59_000_001, 2**31 + 5, 2**32 - 1]
    table = zkv.Table(1, initial="zeros", rule="sgd:lr=1", rows=2**32)
    async with cluster(3) as made, made.worker(0, world=1) as worker:
        await worker.init({}, tables={"emb": table})
        async with worker.batch() as batch:
            # A float32 would name two of them alike.
            batch.push_rows("emb", numbers, -np.arange(1, 7, dtype=np.float32)[:, None])
        assert await batch.wait() == "committed"
        for kind in (np.int64, np.uint64, np.uint32):
            rows = await worker.rows("emb", np.asarray(numbers, kind))
            assert rows[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
        rows = await worker.rows("emb", np.asarray(numbers[:4], np.int32))
        assert rows[:, 0].tolist() == [1, 2, 3, 4]
        for wrong in (np.asarray(numbers, np.float32), np.asarray(numbers, float), [16_777_217.0]):
            with pytest.raises(KeyMismatch, match=r"whole numbers of 0 to 2\*\*64-1, not float"):
                await worker.rows("emb", wrong)
        pulls = worker.stats()["pulls"]
        with pytest.raises(KeyMismatch, match=f"row {2**32} is out of range"):
            await worker.rows("emb", [2**32])
        assert worker.stats()["pulls"] == pulls, "it was refused before anything was sent"
        held = [part for one in made.servers for part in one.shard.tables.parts.values()]
        assert sum(map(len, held)) == 6


async def test_large_pushes_and_reads_travel_in_pieces() -> None:
    table = zkv.Table(256, initial="zeros", rule="sgd:lr=1")
    async with cluster(2) as made, made.worker(0, world=1, window_bytes=3 << 20) as worker:
        await worker.init({}, tables={"emb": table})
        ids = np.arange(20_000)
        gradients = np.repeat(-ids.astype(np.float32)[:, None], 256, axis=1)
        async with worker.batch() as batch:
            batch.push_rows("emb", ids, gradients)
        assert await batch.wait() == "committed"
        rows = await worker.rows("emb", ids[::-1])
        np.testing.assert_array_equal(rows, -gradients[::-1])
        assert worker.stats()["bytes_down"] == rows.nbytes
        assert worker.stats()["bytes_up"] == rows.nbytes + 8 * 20_000


async def test_all_rows_are_read_of_one_version_while_others_are_updated() -> None:
    async with cluster(2, policy_text="asp", optimizer="sgd:lr=1") as made:
        table = zkv.Table(64, initial="zeros")
        ids = np.arange(20_000, dtype=np.uint64) * np.uint64(2**45 + 1)
        stop = asyncio.Event()

        async def train(worker: AsyncWorker) -> None:
            """Each update changes all rows that there are, and makes a thousand more."""
            await worker.init({}, tables={"emb": table})
            assert [one.size for one in await worker.all_rows("emb")] == [0, 0]
            turn = 1
            while not stop.is_set():
                async with worker.batch() as batch:
                    some = ids[: min(1000 * turn, ids.size)]
                    batch.push_rows("emb", some, -np.ones((some.size, 64), np.float32))
                assert await batch.wait() == "committed"
                turn += 1

        async def look(worker: AsyncWorker) -> None:
            for _ in range(8):
                found, rows = await worker.all_rows("emb")
                count = found.size
                assert found.tobytes() == ids[:count].tobytes()
                updates = rows[:, 0].astype(int)
                # Of version v row i has had one update in each from that on which has made it.
                made_in = np.arange(count) // 1000 + 1
                assert count == 0 or len(set((updates + made_in).tolist())) == 1
                assert (rows == rows[:, :1]).all()
            stop.set()

        async with made.worker(0, world=1) as one, made.worker(observer=True) as other:
            await asyncio.gather(train(one), look(other))
            with pytest.raises(UnknownKey, match="unknown key 'other'"):
                await other.all_rows("other")


async def test_clipping_by_the_global_norm_counts_rows_too() -> None:
    optimizer = "sgd:lr=1,clip_global_norm=1"
    async with cluster(2, optimizer=optimizer) as made, made.worker(0, world=1) as worker:
        await worker.init(W, tables={"emb": zkv.Table(1, initial="zeros")})
        async with worker.batch() as batch:
            batch.push("w", np.asarray([3, 0, 0], np.float32))
            batch.push_rows("emb", [1, 2], np.asarray([[4], [0]], np.float32))
        assert await batch.wait() == "committed"
        assert (await worker.pull("w"))[0] == pytest.approx(-0.6, abs=1e-5)
        rows = await worker.rows("emb", [1, 2])
        assert rows[:, 0].tolist() == [pytest.approx(-0.8, abs=1e-5), 0]


async def test_an_observer_reads_rows_and_is_told_what_there_is() -> None:
    async with cluster(2) as made, made.worker(observer=True) as observer:
        early = asyncio.ensure_future(observer.rows("emb", [5]))
        async with made.worker(0, world=1) as worker:
            await worker.init(W, tables={"emb": EMB})
            assert (await early).tobytes() == first(EMB, [5]).tobytes()
            async with worker.batch() as batch:
                batch.push_rows("emb", range(9), np.ones((9, DIM), np.float32))
            await batch.wait()
            assert made.broker.router is not None
            servers = made.broker.router.members.servers.values()
            await until(lambda: sum(rows for one in servers for _, rows, _ in one.rows) == 9)
            (told,) = (await observer.status())["tables"]
            assert (told["key"], told["dim"], told["servers"]) == ("emb", DIM, [0, 1])
            # Values, and the mean and the square of each.
            assert (told["rows_held"], told["bytes_held"]) == (9, 9 * 3 * DIM * 4)
            await worker.leave()
            await until(lambda: not any(one.shard.tables.pins for one in made.servers))


async def test_a_read_that_is_given_up_leaves_no_version_pinned() -> None:
    """Whenever that is: before it is granted, when it is, or while its rows come."""
    async with cluster(1) as made, made.worker(0, world=1) as worker:
        await worker.init({}, tables={"emb": EMB})
        tables = made.servers[0].shard.tables
        for turns in range(300):
            reading = asyncio.ensure_future(worker.rows("emb", range(50)))
            for _ in range(turns):
                await asyncio.sleep(0)
            if reading.done():
                break
            reading.cancel()
            await asyncio.wait({reading})
        # What comes behind it in the log has come.
        await worker.rows("emb", [1])
        await until(lambda: not tables.pins, what="nothing is pinned")


async def test_a_pinned_table_lies_on_one_server() -> None:
    async with cluster(3, placement="by_size;pin:emb=1") as made:
        await made.run(train)
        shards = [one.shard for one in made.servers]
        held = {one.number: sum(map(len, one.tables.parts.values())) for one in shards}
        assert [bool(held[number]) for number in range(3)] == [False, True, False]


async def test_a_recorded_run_with_tables_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    files = [tmp_path / f"server-{index}.rec" for index in range(2)]
    record = tmp_path / "broker.rec"
    async with cluster(2, record=record, server_records=files) as made:
        await made.run(train, train)
    for path in (record, *files):
        assert replay(path).same, replay(path)
