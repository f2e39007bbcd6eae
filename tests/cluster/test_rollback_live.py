"""Roll-backs over real sockets and real files: servers that are gone without a word, and what all
the others do about it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Cluster, cluster, until
from keyrings import Keys, safe

import zkv
from zkv import control as c
from zkv.aio import AsyncWorker
from zkv.errors import BadSnapshot, Refused, RolledBack, ServerLost
from zkv.snapshot import server_file
from zkv_brokers.replay import replay
from zkv_brokers.server import Server, ServerConfig
from zkv_cli.ask import TOKEN, ask
from zkv_cli.tables import as_text

EMB = zkv.Table(4, initial="uniform:-1,1", rule="adam:lr=0.1")
SHAPES = {"w": (40, 100), "v": (3000,), "b": (5,)}
LAST = 14


def state_of(chance: np.random.Generator) -> bytes:
    return json.dumps(chance.bit_generator.state).encode()


def trains(
    last: int, told: list[RolledBack], *, tables: bool = False, codec: bool = False
) -> Callable[[AsyncWorker], Awaitable[list[bytes]]]:
    """Return a worker that trains up to a version with random numbers of its own, whatever happens
    meanwhile; it returns the bits of the model."""

    async def body(worker: AsyncWorker) -> list[bytes]:
        first = {key: np.zeros(shape, np.float32) for key, shape in SHAPES.items()}
        await worker.init(first, tables={"emb": EMB} if tables else {})
        chance, number = np.random.default_rng(worker.rank), 0
        while number < last:
            try:
                worker.save_state(state_of(chance))
                async with worker.batch(weight=1.0 + worker.rank) as batch:
                    for key, value in batch.params.items():
                        noise = chance.standard_normal(value.shape).astype(np.float32)
                        batch.push(key, value * np.float32(0.1) + noise)
                    if tables:
                        ids = chance.integers(0, 40, 25)
                        gradients = chance.standard_normal((25, 4)).astype(np.float32)
                        batch.push_rows("emb", ids, gradients)
                number = batch.version + 1
                if number == last:
                    await batch.wait()
            except RolledBack as error:
                told.append(error)
                number, kept = error.version, worker.load_state()
                assert kept is not None
                chance.bit_generator.state = json.loads(kept)
        await worker.barrier()
        model = await worker.pull()
        made = [model[key].tobytes() for key in SHAPES]
        if tables:
            made.append((await worker.rows("emb", np.arange(40))).tobytes())
        await worker.barrier()
        return made

    return body


async def lose(made: Cluster, index: int) -> None:
    """End a server without a word."""
    router = made.broker.router
    assert router is not None
    address = router.members.servers[index].hello.address
    at = next(at for at, one in enumerate(made.servers) if one.address == address)
    server = made.servers[at]
    assert server._stopped is not None
    server._stopped.set_result(None)
    await made.tasks[1 + at]
    server.close()
    del made.servers[at], made.tasks[1 + at]


def start(made: Cluster, **options: Any) -> None:
    """Start a server, in the place of a lost one."""
    server = Server(ServerConfig(made.address, **options))
    server.start()
    made.servers.append(server)
    made.tasks.append(asyncio.create_task(server.serve()))


def version(made: Cluster) -> int:
    router = made.broker.router
    assert router is not None
    return router.groups.version


async def can_go_back(made: Cluster, at: int) -> None:
    """Wait for a version, and a snapshot."""
    await until(lambda: made.broker.router.snapshots.kept, what="a snapshot")  # type: ignore[union-attr]
    await until(lambda: version(made) >= at, what=f"version {at}")


async def go_back(made: Cluster, name: str = "") -> dict[str, Any]:
    """Ask for it, as `zkv restore` does."""
    return dict(await asyncio.to_thread(ask, made.address, c.GoBack(TOKEN, name), 20.0))


CASES: dict[str, dict[str, Any]] = {
    "codec": {"optimizer": "adam:lr=0.1", "codec": "topk:0.1+ef;small=0", "route": "broker"},
    "tables": {"optimizer": "momentum:lr=0.1,momentum=0.9", "codec_down": "int8;small=0"},
    "ring": {"optimizer": "sgd:lr=0.1", "topology": "ring"},
}


@pytest.mark.one_loop
@pytest.mark.parametrize(
    ("case", "replaced"), [("codec", True), ("tables", False), ("ring", True), ("codec", False)]
)
async def test_bsp_behind_a_lost_server_ends_with_the_bits_of_a_run_that_lost_none(
    tmp_path: Path, case: str, replaced: bool
) -> None:
    tables = case == "tables"
    async with cluster(2, **CASES[case]) as made:
        straight = await made.run(*[trains(LAST, [], tables=tables)] * 2)
    folder, told = str(tmp_path / "s"), []
    options = CASES[case] | {"snapshot_dir": folder, "snapshot_every": "3updates"}
    records = [tmp_path / "s0", tmp_path / "s1"]
    wait_s = 20.0 if replaced else 0.1
    async with cluster(
        2, record=tmp_path / "b", server_records=records, server_back_s=wait_s, **options
    ) as made:

        async def fails() -> None:
            await can_go_back(made, 7)
            await lose(made, 1)
            if replaced:
                start(made)

        both = asyncio.create_task(made.run(*[trains(LAST, told, tables=tables)] * 2))
        await fails()
        again = await both
        status = await asyncio.to_thread(ask, made.address, c.Status(TOKEN), 10.0)
    assert again == straight
    assert len(told) == 2
    assert {one.version for one in told} == {one.version for one in told[:1]}
    assert told[0].version >= 3
    assert "server 1" in str(told[0])
    assert "load_state" in str(told[0])
    assert status["snapshots"]["gone_back"]["times"] == 1
    assert len(status["servers"]) == 1 + replaced
    assert f"gone back once, to version {told[0].version}" in as_text(status)
    for record in (tmp_path / "b", records[0]):
        assert replay(record).same, record


@pytest.mark.one_loop
async def test_asp_goes_on_and_each_batch_of_the_new_run_counts_once(tmp_path: Path) -> None:
    told: list[RolledBack] = []
    outcomes: list[tuple[int, Any]] = []

    async def body(worker: AsyncWorker) -> None:
        await worker.init({"n": np.zeros(400, np.float64), "far": np.zeros(3000, np.float32)})
        for token in range(60):
            hot = np.zeros(400)
            hot[200 * worker.rank + token] = 1.0
            try:
                async with worker.batch() as batch:
                    outcomes.append((200 * worker.rank + token, batch))
                    batch.push("n", hot)
                    batch.push("far", np.ones(3000, np.float32))
            except RolledBack as error:
                told.append(error)
            if token == 20:
                begun.set()
        await batch.wait()

    begun = asyncio.Event()
    options = {"snapshot_dir": str(tmp_path), "snapshot_every": "4updates"}
    async with cluster(
        2, policy_text="asp", optimizer="sgd:lr=1", server_back_s=0.1, **options
    ) as made:
        both = asyncio.create_task(made.run(body, body))
        await begun.wait()
        await can_go_back(made, 8)
        await lose(made, 0)
        await both
        async with made.worker(observer=True) as reader:
            counts = -(await reader.pull("n"))
    assert len(told) == 2
    assert set(counts) <= {0.0, 1.0}
    kept = told[0].version
    for token, batch in outcomes:
        assert batch.outcome in ("committed", "undone"), batch.outcome
        # Numbers of versions come again: what is up to the snapshot's is in the model.
        if batch.outcome == "undone":
            assert counts[token] == 0.0
        elif batch.update <= kept:
            assert counts[token] == 1.0
    later = [one for one, _ in outcomes if one % 200 == 59]
    assert counts[later].all()
    undone = [batch for _, batch in outcomes if batch.outcome == "undone"]
    assert undone


def asked_for(folder: Path, **options: Any) -> Any:
    return cluster(2, snapshot_dir=str(folder), optimizer="sgd:lr=1", **options)


@pytest.mark.one_loop
async def test_a_run_goes_back_when_somebody_asks_for_it(tmp_path: Path) -> None:
    one = np.ones(3, np.float32)
    async with asked_for(tmp_path) as made, made.worker(0) as worker:
        await worker.init({"w": np.zeros(3, np.float32)})
        with pytest.raises(BadSnapshot, match="no snapshot"):
            await go_back(made)
        names = []
        for count in (2, 3):
            for _ in range(count):
                async with worker.batch() as batch:
                    batch.push("w", one)
            await batch.wait()
            taken = await asyncio.to_thread(ask, made.address, c.TakeSnapshot(TOKEN), 20.0)
            names.append(taken["name"])
        asked = asyncio.create_task(go_back(made, names[0]))
        done = await asked
        assert done == {"name": names[0], "version": 2, "undone": 3, "url": str(tmp_path)}
        with pytest.raises(RolledBack, match=r"3 updates after version 2 are lost") as told:
            await worker.pull("w")
        assert (told.value.version, told.value.snapshot) == (2, names[0])
        assert (await worker.pull("w")).tolist() == [-2.0] * 3
        assert batch.outcome == "committed"
        assert (await go_back(made))["name"] == names[1]
        batch = worker.batch()
        with pytest.raises(RolledBack):
            await batch.__aenter__()
        async with worker.batch() as batch:
            assert batch.version == 5
            batch.push("w", one)
        assert await batch.wait() == "committed"


@pytest.mark.one_loop
async def test_what_cannot_be_gone_back_to_is_refused_and_nothing_is_touched(
    tmp_path: Path,
) -> None:
    async with asked_for(tmp_path / "other") as other, other.worker(0) as worker:
        await worker.init({"w": np.zeros((3, 3), np.float32)})
        foreign = await asyncio.to_thread(ask, other.address, c.TakeSnapshot(TOKEN), 20.0)
    async with asked_for(tmp_path / "mine") as made, made.worker(0) as worker:
        await worker.init({"w": np.zeros(3, np.float32)})
        async with worker.batch() as batch:
            batch.push("w", np.ones(3, np.float32))
        await batch.wait()
        taken = await asyncio.to_thread(ask, made.address, c.TakeSnapshot(TOKEN), 20.0)
        file = tmp_path / "mine" / taken["name"] / server_file(0)
        with pytest.raises(Refused, match="no snapshot's name"):
            await go_back(made, "newest")
        (tmp_path / "other" / foreign["name"]).rename(tmp_path / "mine" / foreign["name"])
        with pytest.raises(BadSnapshot, match="of another run: key 'w'"):
            await go_back(made, foreign["name"])
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(BadSnapshot, match=f"{server_file(0)}"):
            await go_back(made, taken["name"])
        async with worker.batch() as batch:
            assert batch.version == 1
    async with cluster(1) as made:
        with pytest.raises(Refused, match="--snapshot-dir"):
            await go_back(made)


async def goes_on(worker: AsyncWorker) -> None:
    """Do batches for ever."""
    while True:
        async with worker.batch() as batch:
            batch.push("w", np.ones(3, np.float32))
        await worker.barrier()


@pytest.mark.one_loop
async def test_of_a_torn_snapshot_the_one_before_is_gone_back_to_and_of_none_both_reasons_are_told(
    tmp_path: Path,
) -> None:
    async with asked_for(tmp_path, server_back_s=0.1) as made, made.worker(0) as worker:
        await worker.init({"w": np.zeros(3, np.float32), "far": np.zeros(3000, np.float32)})
        names = []
        for _ in range(2):
            async with worker.batch() as batch:
                batch.push("w", np.ones(3, np.float32))
            await batch.wait()
            taken = await asyncio.to_thread(ask, made.address, c.TakeSnapshot(TOKEN), 20.0)
            names.append(taken["name"])
        (tmp_path / names[1] / server_file(0)).unlink()
        await lose(made, 1)
        with pytest.raises(RolledBack, match="1 updates after version 1 are lost") as told:
            await goes_on(worker)
        assert told.value.snapshot == names[0]
        for name in names:
            for file in (tmp_path / name).glob("server-*"):
                file.unlink()
        start(made)
        await lose(made, 0)
        with pytest.raises(ServerLost, match=r"(?s)no snapshot can be gone back to.*server-0"):
            await goes_on(worker)


@pytest.mark.one_loop
async def test_a_loop_without_any_try_goes_on_where_a_callable_is_given(tmp_path: Path) -> None:
    """The blocking face; and a pull, a push and a barrier that were waiting simply go on."""
    told: list[RolledBack] = []
    found: list[Any] = []

    def loop(address: str) -> None:
        with zkv.connect(address, on_roll_back=told.append, wait_timeout_s=20.0) as worker:
            worker.init({"w": np.zeros(3, np.float32), "far": np.zeros(3000, np.float32)})
            worker.init({"p": np.zeros(3, np.float32)}, plain=True)
            version = 0
            while version < 30:
                with worker.batch() as batch:
                    batch.push("w", np.ones(3, np.float32))
                version = batch.version + 1
                if version == 12:
                    begun.set()
            batch.wait()
            worker.push("p", np.ones(3, np.float32)).result()
            found.append(worker.pull(["w", "p"]))
            found.append(worker.stats()["outcomes"])

    begun = threading.Event()
    async with asked_for(tmp_path, snapshot_every="3updates", server_back_s=0.1) as made:
        thread = asyncio.create_task(asyncio.to_thread(loop, made.address))
        await asyncio.to_thread(begun.wait)
        await can_go_back(made, 12)
        await lose(made, 0)
        await thread
    assert len(told) == 1
    assert found[0]["w"].tolist() == [-30.0] * 3


@pytest.mark.one_loop
async def test_with_keys_another_server_comes_in_and_all_are_who_they_were(tmp_path: Path) -> None:
    keys, told = Keys(tmp_path), []
    keys.make("node2", "worker")
    options = {"snapshot_dir": str(tmp_path / "s"), "snapshot_every": "3updates"}
    mine = {"name": "mine", "keys": keys.folder("node2")}
    async with (
        safe(keys, 2, journal=tmp_path / "journal", **options) as made,
        made.worker(0, **mine) as worker,
    ):
        training = asyncio.create_task(trains(LAST, told)(worker))
        await can_go_back(made, 6)
        await lose(made, 1)
        start(made, keys=keys.folder("node1"))
        await training
        assert len(told) == 1
        # The journal is of the new run, and knows it all.
        await made.restart_broker()
        async with worker.batch() as batch:
            assert batch.version == LAST
        assert await batch.wait() == "committed"
        assert made.broker.router.hub.lives == 2
        assert made.broker.router.rolling.times == 1


@pytest.mark.one_loop
async def test_samples_count_once_in_each_pass_though_the_loop_begins_again(tmp_path: Path) -> None:
    data, told, seen = zkv.data.shard(40, 3, size=5, passes=2), [], 0
    async with asked_for(tmp_path) as made, made.worker(0) as worker:
        await worker.init({"n": np.zeros(40, np.float64), "far": np.zeros(3000, np.float32)})
        done = False
        while not done:
            try:
                async for batch in worker.batches(data):
                    async with batch:
                        hot = np.zeros(40)
                        hot[batch.samples] = 1.0
                        batch.push("n", hot)
                    seen += 1
                    await batch.wait()
                    if seen == 5:
                        await asyncio.to_thread(ask, made.address, c.TakeSnapshot(TOKEN), 20.0)
                    if seen == 9:
                        assert (await go_back(made))["undone"] == 4
                done = True
            except RolledBack as error:
                told.append(error)
        assert (-(await worker.pull("n"))).tolist() == [2.0] * 40
    assert len(told) == 1
    assert seen == 16 + 4


@pytest.mark.one_loop
async def test_a_round_of_local_batches_is_given_up(tmp_path: Path) -> None:
    told, rounds = [], 0
    async with asked_for(tmp_path) as made, made.worker(0) as worker:
        await worker.init({"w": np.zeros(3, np.float32), "far": np.zeros(3000, np.float32)})
        while rounds < 4:
            try:
                async with worker.local(h=2) as local:
                    for number in range(2):
                        async with local.batch() as batch:
                            batch.params["w"] += 1.0
                            if rounds == 2 and number == 0 and not told:
                                await go_back(made)
                await local.last.wait()
                rounds = local.last.version + 1
                if rounds == 1:
                    await asyncio.to_thread(ask, made.address, c.TakeSnapshot(TOKEN), 20.0)
            except RolledBack as error:
                told.append(error)
                rounds = error.version
        assert (await worker.pull("w")).tolist() == [8.0] * 3
    assert [one.undone for one in told] == [1]
