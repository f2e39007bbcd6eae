"""A broker that is started again goes on with more than training: keys, names, who is in
quarantine, snapshots that are on their way, and what the run began from."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from harness import Cluster, cluster, until
from keyrings import Keys, safe

from zkv import control as c
from zkv.aio import AsyncWorker
from zkv.errors import Evicted, NotAuthorised, PushRefused, Refused
from zkv_brokers import disk
from zkv_brokers.broker import Broker
from zkv_brokers.replay import replay
from zkv_brokers.shard_events import Wrote
from zkv_cli.ask import TOKEN, ask
from zkv_net import snapshot_folder as sf
from zkv_net.curve import Curve


async def batches(worker: AsyncWorker, count: int = 3) -> float:
    """Do batches of ones; return what the model's elements have become."""
    await worker.init({"w": np.zeros(4, np.float32)}, rule="sgd:lr=1")
    for _ in range(count):
        async with worker.batch() as batch:
            batch.push("w", np.ones(4, np.float32))
    await batch.wait()
    return float((await worker.pull("w"))[0])


def asked(made: Cluster, keys: str = "") -> asyncio.Task[Any]:
    """Ask for a snapshot, as `zkv snapshot` does."""
    request = c.TakeSnapshot(TOKEN)
    return asyncio.create_task(asyncio.to_thread(ask, made.address, request, 20.0, keys=keys))


# --- keys ------------------------------------------------------------------------------------


def dialled_at_once(patch: pytest.MonkeyPatch) -> None:
    """Have each broker from here on come to nothing before somebody has shown it a key."""
    shown, admits, decide = Event(), Curve._admits, Broker._decide

    def shows(self: Curve, key: str, address: str) -> str:
        found = admits(self, key, address)
        if self.key == self.broker:
            shown.set()
        return found

    def decides(self: Broker) -> None:
        assert shown.wait(10.0)
        decide(self)

    patch.setattr(Curve, "_admits", shows)
    patch.setattr(Broker, "_decide", decides)


@pytest.mark.one_loop
@pytest.mark.parametrize("route", ["direct", "broker"])
async def test_a_broker_with_keys_goes_on_with_whose_names_are_whose(
    tmp_path: Path,
    route: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = Keys(tmp_path)
    for name in ("node2", "node3"):
        keys.make(name, "worker")
    own = keys.folder("node2")
    async with safe(keys, 2, route=route, journal=tmp_path / "journal") as made:
        async with made.worker(name="first", keys=own) as gone:
            assert await batches(gone) == -3.0
        async with made.worker(0, name="mine", keys=own) as worker:
            assert await batches(worker) == -6.0
            dialled_at_once(monkeypatch)
            await made.restart_broker()
            assert await batches(worker) == -9.0
            assert made.broker.router.hub.lives == 2
            # Those that were in are not told that somebody has to let them in.
            assert "zkv keys add ROLE" not in caplog.text
            other = made.worker(1, name="first", keys=keys.folder("node3"))
            with pytest.raises(NotAuthorised, match="'first' belongs to the key"):
                await other.connect()
            await other.close()


@pytest.mark.one_loop
async def test_a_key_that_is_revoked_while_there_is_no_broker_is_put_out(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    for name in ("node2", "node3"):
        keys.make(name, "worker")
    async with safe(keys, 1, policy_text="asp", journal=tmp_path / "journal") as made:
        stays = made.worker(0, keys=keys.folder("node2"))
        goes = made.worker(1, keys=keys.folder("node3"))
        async with stays:
            await goes.connect()
            assert await batches(stays) == -3.0
            keys.head.revoke("node3")
            await made.restart_broker()
            assert await batches(stays) == -6.0
            await until(lambda: len(made.broker.router.members.workers) == 1)
        await goes.close()


async def put_out(worker: AsyncWorker) -> None:
    """Go on with gradients that are too large, until nothing more may be pushed."""
    for _ in range(2000):
        try:
            async with worker.batch() as batch:
                batch.push("w", np.full(4, 1e9, np.float32))
            await batch.wait()
        except PushRefused:
            continue


@pytest.mark.one_loop
async def test_who_is_in_quarantine_stays_there(tmp_path: Path) -> None:
    limits = {"norm_limit": 10.0, "norm_action": "quarantine"}
    async with (
        cluster(1, policy_text="asp", journal=tmp_path / "journal", **limits) as made,
        made.worker(0, name="good") as good,
        made.worker(1, name="bad") as bad,
    ):
        assert await batches(good) == -3.0
        await bad.init({"w": np.zeros(4, np.float32)}, rule="sgd:lr=1")
        with pytest.raises(Evicted, match="quarantine"):
            await put_out(bad)
        await made.restart_broker()
        assert await batches(good) == -6.0
        again = made.worker(1, name="bad")
        with pytest.raises(Refused, match="in quarantine until a new run begins"):
            await again.connect()
        await again.close()


# --- snapshots -------------------------------------------------------------------------------


class Held:
    """Lets the first call of a disk's function begin, and end when `go` is set."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self.began, self.go = Event(), Event()
        self.calls: list[Any] = []
        self._does = getattr(disk, name)
        patch.setattr(disk, name, self._call)

    def _call(self, action: Any) -> Any:
        self.calls.append(action)
        if len(self.calls) == 1:
            self.began.set()
            assert self.go.wait(30.0)
        return self._does(action)


async def taken(made: Cluster, folder: Path, asking: asyncio.Task[Any]) -> None:
    """See that the snapshot that was asked for is whole, and that it is the only one."""
    told = await asking
    url, manifest = sf.chosen(str(folder), whole=True)
    assert (told["name"], told["url"], told["version"]) == (manifest.name, url, 3)
    assert [one.name for one in sf.found(url)] == [manifest.name]
    plain = made.broker.router.snapshots.plain()
    assert (plain["taken"], plain["failed_tries"], plain["taking"]) == (1, 0, None)


@pytest.mark.one_loop
async def test_a_snapshot_whose_files_are_being_written_is_completed_by_the_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "next.rec"
    folder, write = tmp_path / "snaps", Held(monkeypatch, "write")
    places = {"snapshot_dir": str(folder), "journal": tmp_path / "journal"}
    async with cluster(2, **places) as made, made.worker(0) as worker:
        assert await batches(worker) == -3.0
        asking = asked(made)
        await until(write.began.is_set)
        await made.restart_broker(record=record)
        assert await batches(worker) == -6.0
        assert not asking.done()
        write.go.set()
        await taken(made, folder, asking)
    assert replay(record).same


@pytest.mark.one_loop
async def test_a_manifest_that_was_being_written_is_written_by_the_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, complete = tmp_path / "snaps", Held(monkeypatch, "complete")
    places = {"snapshot_dir": str(folder), "journal": tmp_path / "journal"}
    async with cluster(2, **places) as made, made.worker(0) as worker:
        assert await batches(worker) == -3.0
        asking = asked(made)
        await until(complete.began.is_set)
        await made.restart_broker()
        await taken(made, folder, asking)
        first, second = complete.calls
        assert first == second
        complete.go.set()


@pytest.mark.one_loop
async def test_a_snapshot_that_fails_under_the_next_life_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, write = tmp_path / "snaps", Held(monkeypatch, "write")
    write._does = lambda action: Wrote(action.number, why="the disk is full")
    places = {"snapshot_dir": str(folder), "journal": tmp_path / "journal"}
    async with cluster(1, **places) as made, made.worker(0) as worker:
        assert await batches(worker) == -3.0
        asking = asked(made)
        await until(write.began.is_set)
        await made.restart_broker()
        write.go.set()
        with pytest.raises(Refused, match="the disk is full"):
            await asking
        assert sf.found(str(folder)) == []
        monkeypatch.undo()
        assert await batches(worker) == -6.0
        assert (await asked(made))["version"] == 6


async def snapshot_in(folder: Path) -> None:
    """Leave a snapshot of three updates there."""
    async with cluster(1, snapshot_dir=str(folder)) as made, made.worker(0) as worker:
        assert await batches(worker) == -3.0
        assert (await asked(made))["version"] == 3


@pytest.mark.one_loop
async def test_restore_is_of_a_runs_beginning_and_not_of_its_brokers_next_lives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, journal = tmp_path / "snaps", tmp_path / "journal"
    await snapshot_in(folder)
    places = {"snapshot_dir": str(folder), "restore": str(folder), "journal": journal}
    # The policy of a command line is not that of the snapshot, which is in force.
    async with cluster(2, policy_text="asp", **places) as made, made.worker(0) as worker:
        assert await batches(worker) == -6.0
        # Now the newest one is another.
        assert (await asked(made))["version"] == 6
        assert await batches(worker) == -9.0
        await made.restart_broker()
        assert "goes on from its journal" in caplog.text
        assert f"{folder} (--restore)" in caplog.text
        assert await batches(worker) == -12.0
        shutil.rmtree(folder)
        await made.restart_broker()
        assert await batches(worker) == -15.0
        await made.restart_broker(restore="")
        assert await batches(worker) == -18.0
        assert str(made.broker.router.policy) == "bsp"


@pytest.mark.one_loop
async def test_a_run_that_is_being_read_from_a_snapshot_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "snaps"
    await snapshot_in(folder)
    load = Held(monkeypatch, "load")
    async with cluster(2, restore=str(folder), journal=tmp_path / "journal") as made:
        await until(load.began.is_set)
        await made.restart_broker()
        async with made.worker(0) as worker:
            # A later word of the broker's has come to the server by now.
            term = made.broker.router.members.term
            await until(lambda: made.servers[0].shard.term == term)
            load.go.set()
            assert await batches(worker) == -6.0
