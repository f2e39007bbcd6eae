"""Snapshots over real sockets and real files: a run that was stopped and begun again has the bits
of one that was not; what cannot be written or read is said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Cluster, cluster, until

import zkv
from zkv import control as c
from zkv.aio import AsyncWorker
from zkv.errors import BadSnapshot, KeyMismatch, Refused
from zkv.pool import Shard
from zkv_brokers.replay import replay
from zkv_cli.ask import TOKEN, ask
from zkv_cli.tables import as_text
from zkv_net import snapshot_folder as sf
from zkv_workers import keeper

SIZES = {"w": (300, 700), "b": (7,), "h": (90,), 5: (3, 3)}
EMB = zkv.Table(4, initial="uniform:-1,1", rule="adam:lr=0.1")
DATA = Shard(70, 3, 8, 2)
Body = Callable[[AsyncWorker], Awaitable[Any]]


def params() -> dict[str | int, Any]:
    chance = np.random.default_rng(1)
    made = {key: chance.standard_normal(shape) for key, shape in SIZES.items()}
    return {
        key: value.astype(np.float16 if key == "h" else np.float32) for key, value in made.items()
    }


async def init(worker: AsyncWorker, *, tables: bool = False) -> None:
    await worker.init(params(), tables={"emb": EMB} if tables else {})


async def push(worker: AsyncWorker, batch: Any, *, tables: bool = False) -> None:
    """Push gradients that follow from the values, the worker, and the version."""
    chance = np.random.default_rng([worker.rank, batch.version])
    values = batch.params
    for key, value in values.items():
        noise = chance.standard_normal(value.shape).astype(value.dtype)
        batch.push(key, value * value.dtype.type(0.1) + noise)
    if tables:
        ids = chance.integers(0, 40, 25).astype(np.uint64) << np.uint64(57)
        batch.push_rows("emb", ids, chance.standard_normal((25, 4)).astype(np.float32))


async def bits(worker: AsyncWorker, *, tables: bool = False) -> list[bytes]:
    await worker.barrier()
    found = await worker.pull()
    made = [found[key].tobytes() for key in SIZES]
    if tables:
        rows = await worker.rows("emb", np.arange(40, dtype=np.uint64) << np.uint64(57))
        made.append(rows.tobytes())
    await worker.barrier()
    return made


def trains(until_version: int, *, tables: bool = False, samples: bool = False) -> Body:
    """Return a worker that trains up to a version, or (`samples`) to the end of the pool."""

    async def body(worker: AsyncWorker) -> Any:
        await init(worker, tables=tables)
        seen: list[tuple[int, ...]] = []
        if samples:
            number = 0
            async for batch in worker.batches(DATA):
                async with batch:
                    seen.append((batch.version, *map(int, batch.samples)))
                    await push(worker, batch)
                    number = batch.version + 1
                if number == until_version:
                    break
        while not samples:
            async with worker.batch(weight=1.0 + worker.rank) as batch:
                number = batch.version + 1
                await push(worker, batch, tables=tables)
            if number == until_version:
                # A pull waits for no batch, and clipping takes servers another word.
                await batch.wait()
                break
        return await bits(worker, tables=tables), seen

    return body


async def take(made: Cluster) -> dict[str, Any]:
    """Take a snapshot as `zkv snapshot` does."""
    return dict(await asyncio.to_thread(ask, made.address, c.TakeSnapshot(TOKEN), 20.0))


CASES = {
    "adam": {"optimizer": "adam:lr=0.1"},
    "momentum": {"optimizer": "momentum:lr=0.1,momentum=0.9"},
    "codec_down": {"optimizer": "adam:lr=0.1", "codec_down": "int8;small=0"},
    "clip": {"optimizer": "sgd:lr=0.1,clip_global_norm=1.0"},
    "ring": {"optimizer": "sgd:lr=0.1", "topology": "ring"},
}


@pytest.mark.parametrize(
    ("case", "servers"),
    [("adam", 1), ("adam", 3), ("momentum", 2), ("codec_down", 3), ("clip", 3), ("ring", 1)],
)
async def test_a_run_that_was_stopped_goes_on_to_the_bits_of_one_that_was_not(
    case: str, servers: int, tmp_path: Path
) -> None:
    options, url = CASES[case], str(tmp_path)
    async with cluster(2, **options) as made:
        straight = await made.run(trains(9), trains(9))
    async with cluster(2, snapshot_dir=url, **options) as made:
        await made.run(trains(5), trains(5))
        assert (await take(made))["version"] == 5
    # Settings are the snapshot's, whatever the command line has.
    async with cluster(servers, restore=url) as made:
        assert made.broker.router is not None
        again = await made.run(trains(9), trains(9))
    assert again == straight


async def test_rows_of_tables_go_on_too(tmp_path: Path) -> None:
    url = str(tmp_path)
    async with cluster(2) as made:
        straight = await made.run(trains(8, tables=True), trains(8, tables=True))
    async with cluster(2, snapshot_dir=url) as made:
        await made.run(trains(4, tables=True), trains(4, tables=True))
        await take(made)
    for servers in (1, 3):
        async with cluster(servers, restore=url) as made:
            again = await made.run(trains(8, tables=True), trains(8, tables=True))
        assert again == straight


async def test_a_pool_of_samples_goes_on_in_mid_pass(tmp_path: Path) -> None:
    url = str(tmp_path)
    async with cluster(2) as made:
        straight = await made.run(trains(99, samples=True), trains(99, samples=True))
    async with cluster(2, snapshot_dir=url) as made:
        await made.run(trains(4, samples=True), trains(4, samples=True))
        await take(made)
    _, manifest = sf.chosen(url)
    assert manifest.pool is not None
    assert (1, 64) in manifest.pool.settled
    async with cluster(3, restore=url) as made:
        again = await made.run(trains(99, samples=True), trains(99, samples=True))
    for (now, seen), (then, all_seen) in zip(again, straight, strict=True):
        assert now == then
        assert seen == [one for one in all_seen if one[0] >= manifest.version]


async def test_training_goes_on_while_one_is_taken_and_it_is_one_version(tmp_path: Path) -> None:
    url = str(tmp_path)
    async with cluster(2, snapshot_dir=url, optimizer="adam:lr=0.1") as made:
        going = asyncio.create_task(made.run(trains(40), trains(40)))
        router = made.broker.router
        assert router is not None
        await until(lambda: router.groups.version > 3, what="a few updates")
        told = await take(made)
        version = told["version"]
        await going
        text = as_text(dict(await asyncio.to_thread(ask, made.address, c.Status(TOKEN), 5.0)))
        assert f"the last of version {version}" in text
    async with cluster(2, optimizer="adam:lr=0.1") as made:
        straight = await made.run(trains(version), trains(version))
    async with cluster(3, restore=f"{url}/{told['name']}") as made:

        async def looks(worker: AsyncWorker) -> Any:
            await init(worker)
            return await bits(worker)

        assert await made.run(looks, looks) == [values for values, _ in straight]


async def test_what_cannot_be_written_is_said_and_tried_again(tmp_path: Path) -> None:
    url = tmp_path / "snaps"
    url.write_text("this is a file, and no folder")
    async with cluster(2, snapshot_dir=str(url)) as made:
        going = asyncio.create_task(made.run(trains(60), trains(60)))
        router = made.broker.router
        assert router is not None
        await until(lambda: router.groups.version > 3, what="a few updates")
        with pytest.raises(Refused, match=r"server \d .*could not write its part: .*snaps"):
            await take(made)
        status = dict(await asyncio.to_thread(ask, made.address, c.Status(TOKEN), 5.0))
        assert "THE LAST TRY FAILED: server " in as_text(status)
        assert status["failed"] is None
        url.unlink()
        assert (await take(made))["version"] > 3
        await going
        status = dict(await asyncio.to_thread(ask, made.address, c.Status(TOKEN), 5.0))
        assert status["snapshots"]["failed"] == ""
        assert (status["snapshots"]["taken"], status["snapshots"]["failed_tries"]) == (1, 1)


async def test_without_a_folder_none_can_be_taken(tmp_path: Path) -> None:
    async with cluster(1) as made:
        with pytest.raises(Refused, match="start it with --snapshot-dir"):
            await take(made)


async def test_a_file_that_has_changed_is_refused_by_its_server_and_an_older_one_is_used(
    tmp_path: Path,
) -> None:
    url = str(tmp_path)
    async with cluster(2, snapshot_dir=url) as made:
        await made.run(trains(2), trains(2))
        await take(made)
        await take(made)
    newest, name = (one.name for one in sf.found(url))
    file = tmp_path / newest / "server-1.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    async def looks(worker: AsyncWorker) -> Any:
        await init(worker)
        return (await worker.status())["version"]

    async with cluster(1, restore=url) as made:
        with pytest.raises(BadSnapshot) as caught:
            await made.run(looks)
    said = str(caught.value)
    for words in (f"{newest}/server-1.safetensors has SHA-256", "changed", "restore an older one"):
        assert words in said
    async with cluster(1, restore=f"{url}/{name}") as made:
        assert await made.run(looks) == [2]
    async with cluster(1, restore=url, restore_whole=True) as made:
        assert await made.run(looks) == [2]


async def test_keys_of_another_shape_are_refused_as_ever(tmp_path: Path) -> None:
    url = str(tmp_path)
    async with cluster(1, snapshot_dir=url) as made:
        await made.run(trains(1))
        await take(made)
    async with cluster(1, restore=url) as made:

        async def other(worker: AsyncWorker) -> None:
            await worker.init({**params(), "b": np.zeros(8, np.float32)})

        with pytest.raises(
            KeyMismatch, match=r"key 'b' was initialised otherwise: shape is \(7,\)"
        ):
            await made.run(other)
        await made.run(trains(2))


async def test_a_run_with_snapshots_that_began_from_one_is_replayed_bit_for_bit(
    tmp_path: Path,
) -> None:
    url = str(tmp_path / "snaps")
    async with cluster(2, snapshot_dir=url) as made:
        await made.run(trains(2, tables=True), trains(2, tables=True))
        await take(made)
    files = [tmp_path / f"server-{index}.rec" for index in range(3)]
    options: dict[str, Any] = {"record": tmp_path / "broker.rec", "server_records": files}
    async with cluster(3, restore=url, snapshot_dir=url, **options) as made:
        await made.run(trains(4, tables=True), trains(4, tables=True))
        await take(made)
    broker = replay(tmp_path / "broker.rec")
    assert broker.same
    for path in files:
        server = replay(path)
        assert server.same
        assert (server.entries, server.version) == (broker.entries, 4)


# --- what workers keep themselves --------------------------------------------------------------


def chances(until_version: int, *, told: list[Any] | None = None) -> Body:
    """Return a worker whose gradients come from random numbers that it keeps in snapshots."""

    async def body(worker: AsyncWorker) -> Any:
        chance = np.random.Generator(np.random.PCG64(worker.rank))
        if (kept := worker.load_state()) is not None:
            chance.bit_generator.state = json.loads(kept)
        if told is not None:
            told.append(kept)
        await init(worker)
        number = 0
        while number < until_version:
            worker.save_state(json.dumps(chance.bit_generator.state).encode())
            async with worker.batch() as batch:
                number = batch.version + 1
                for key, value in batch.params.items():
                    noise = chance.standard_normal(value.shape).astype(value.dtype)
                    batch.push(key, value * value.dtype.type(0.1) + noise)
        return await bits(worker)

    return body


CODECS = ("topk:0.05+ef", "int8+ef;small=0", "topk:0.05+dgc:0.9", "qsgd:4")


@pytest.mark.parametrize("codec", CODECS)
async def test_codecs_go_on_with_what_they_remember(codec: str, tmp_path: Path) -> None:
    url, told = str(tmp_path), list[Any]()
    options = {"codec": codec, "optimizer": "adam:lr=0.05", "workers": 2}
    async with cluster(2, **options) as made:
        straight = await made.run(chances(16), chances(16))
    async with cluster(2, snapshot_dir=url, **options) as made:
        going = asyncio.create_task(made.run(chances(16), chances(16)))
        router = made.broker.router
        assert router is not None
        await until(lambda: router.groups.version > 3, what="a few updates")
        name = (await take(made))["name"]
        await going
    _, manifest = sf.chosen(f"{url}/{name}")
    assert 3 < manifest.version < 16
    assert [(one.number, one.lost) for one in manifest.workers] == [(0, ""), (1, "")]
    assert {clock for one in manifest.groups for _, clock in one.clocks} == {manifest.version}
    async with cluster(3, restore=f"{url}/{name}", workers=2) as made:
        again = await made.run(chances(16, told=told), chances(16, told=told))
    assert again == straight
    assert None not in told


async def test_a_state_that_is_lost_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, told = str(tmp_path), list[Any]()

    def fails(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keeper, "write_part", fails)
    async with cluster(1, snapshot_dir=url, workers=2) as made:
        going = asyncio.create_task(made.run(chances(16), chances(16)))
        router = made.broker.router
        assert router is not None
        await until(lambda: router.groups.version > 3, what="a few updates")
        name = (await take(made))["name"]
        await going
    manifest = sf.chosen(f"{url}/{name}")[1]
    assert all("No space left" in one.lost for one in manifest.workers)
    async with cluster(1, restore=f"{url}/{name}", workers=2) as made:
        await made.run(chances(30, told=told), chances(30, told=told))
    assert told == [None, None]
    assert "the state of worker 1 is not in" in caplog.text


async def test_a_worker_at_a_barrier_gives_what_it_has(tmp_path: Path) -> None:
    url = str(tmp_path)
    async with cluster(1, snapshot_dir=url, workers=2) as made:
        free = asyncio.Event()

        async def first(worker: AsyncWorker) -> None:
            await init(worker)
            async with worker.batch() as batch:
                await push(worker, batch)
            worker.save_state(b"at the barrier")
            await worker.barrier()

        async def second(worker: AsyncWorker) -> None:
            await init(worker)
            async with worker.batch() as batch:
                await push(worker, batch)
            await free.wait()
            await worker.barrier()

        going = asyncio.create_task(made.run(first, second))
        router = made.broker.router
        assert router is not None
        await until(
            lambda: any(one.barrier_token for one in router.members.training()), what="a barrier"
        )
        taking = asyncio.create_task(take(made))
        await until(lambda: router.snapshots.plain()["taking"], what="a snapshot")
        free.set()
        await asyncio.gather(going, taking)

    async def looks(worker: AsyncWorker) -> Any:
        return worker.load_state()

    async with cluster(1, restore=f"{url}/{taking.result()['name']}") as made:
        assert await made.run(looks) == [b"at the barrier"]


async def test_only_bytes_are_kept() -> None:
    async with cluster(1) as made:

        async def body(worker: AsyncWorker) -> None:
            with pytest.raises(TypeError, match="takes bytes, not dict"):
                worker.save_state({})  # type: ignore[arg-type]
            assert worker.load_state() is None

        await made.run(body)
