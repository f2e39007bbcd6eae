"""Blocks that move between servers over real sockets while workers train: a rebalance under hot
keys, a server that joins, one that is drained; and the bits of a run in which nothing moved."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import Cluster, cluster, until

import zkv
from zkv import control as c
from zkv.aio import AsyncWorker
from zkv.dtypes import Array
from zkv.errors import ConfigError, Refused
from zkv.rebalance import imbalance_of
from zkv.wire import ContributionId
from zkv_brokers.couriers import Couriers
from zkv_brokers.members import Worker
from zkv_brokers.replay import replay
from zkv_brokers.requests import check_finish
from zkv_brokers.router import Router
from zkv_brokers.server import Server, ServerConfig
from zkv_brokers.shard_events import ToServer
from zkv_cli.ask import TOKEN, ask

KEYS = [f"k{number}" for number in range(8)]
HOT = {"k0", "k2", "k4"}
"""Pushed in each batch; the others in one of eight. By size they all go to server 0."""
SIZE = 70_000

Operator = Callable[[Cluster], Awaitable[None]]


def router_of(made: Cluster) -> Router:
    assert made.broker.router is not None
    return made.broker.router


async def asked(made: Cluster, action: str, server: str = "", *keys: str, dry: bool = False) -> Any:
    """Ask the broker to move blocks, as `zkv rebalance` does; return its plan."""
    return await asyncio.to_thread(
        ask, made.address, c.Rearrange(TOKEN, action, server, keys, dry), 10.0
    )


async def version(made: Cluster, least: int) -> None:
    """Wait until so many updates are in the log."""
    await until(lambda: router_of(made).groups.version >= least, what=f"version {least}")


async def moved(made: Cluster) -> None:
    """Wait until no block moves any more."""
    moves = router_of(made).moves
    await until(lambda: moves.stage == "idle" and not moves.waiting, what="that moves are over")


@asynccontextmanager
async def one_more(made: Cluster, **options: Any) -> AsyncIterator[Server]:
    """Start one more server while the others run; it ends with the cluster."""
    server = Server(ServerConfig(made.address, name="late", joins=True, **options))
    server.start()
    made.servers.append(server)
    made.tasks.append(asyncio.create_task(server.serve()))
    yield server


async def train(
    made: Cluster, operator: Operator | None, batches: int = 0
) -> tuple[int, list[dict[Any, Array]]]:
    """Train with hot keys while an operator moves blocks, until it is done and a few batches more
    (or just so many); return how many batches that were, and what two workers pull at the end."""
    begun, last = [0, 0], [batches or 10**6]

    async def operate() -> None:
        try:
            if operator is not None:
                await version(made, 5)
                await operator(made)
        finally:
            last[0] = batches or max(begun) + 3

    async def body(worker: AsyncWorker) -> dict[Any, Array]:
        await worker.init({key: np.full(SIZE, at, np.float32) for at, key in enumerate(KEYS)})
        while begun[worker.rank] < last[0]:
            begun[worker.rank] += 1
            number = begun[worker.rank]
            chance = np.random.default_rng([worker.rank, number])
            async with worker.batch() as batch:
                params = batch.params
                for at, key in enumerate(KEYS):
                    if key in HOT or number % 8 == at:
                        noise = chance.standard_normal(SIZE).astype(np.float32)
                        batch.push(key, params[key] * np.float32(0.1) + noise)
        await batch.wait()
        await worker.barrier()
        pulled: dict[Any, Array] = await worker.pull()
        return pulled

    _, results = await asyncio.gather(operate(), made.run(body, body))
    return begun[0], list(results)


def assert_same(one: list[dict[Any, Array]], other: list[dict[Any, Array]]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            np.testing.assert_array_equal(value.view(np.uint32), theirs[key].view(np.uint32))


async def rebalance(made: Cluster) -> None:
    """Level the measured load, look that it is what was planned, and that it got better."""
    router = router_of(made)
    # The first values, which are alike for all, are little of what has travelled by then.
    await version(made, 32)

    def is_uneven() -> bool:
        # Of a server that has not told yet nothing is known, and a plan would be made without it.
        loads = router.loads.by_server([0, 1])
        return min(loads.values()) > 0 and imbalance_of(loads) > 1.35

    await until(is_uneven, what="an uneven load")
    plan = await asked(made, "rebalance")
    print(f"imbalance {plan['imbalance_before']} before, {plan['imbalance_after']} planned")
    assert plan["of"] == "measured"
    assert plan["imbalance_before"] > 1.3
    assert plan["imbalance_after"] < plan["imbalance_before"] - 0.2
    await moved(made)
    hot = [router.layout.blocks_with(router.layout.kid(key))[0].server for key in sorted(HOT)]
    assert set(hot) == {0, 1}


async def rearrange(made: Cluster) -> None:
    """Rebalance, let a server join and get its share, and drain the first one."""
    router = router_of(made)
    await rebalance(made)
    async with one_more(made) as server:
        await until(lambda: router.fleet.joined == {2}, what="the third server")
        await moved(made)
        assert any(block.server == 2 for block in router.layout.blocks.values())
        await asked(made, "drain", "0")
        await until(lambda: 0 not in router.members.servers, what="that server 0 has gone")
        first = next(
            one for one in made.servers if one is not server and not one.shard.store.blocks
        )
        await until(lambda: first._stopped is not None and first._stopped.done(), what="its end")
        assert first._stopped is not None
        assert first._stopped.exception() is None
    assert {block.server for block in router.layout.blocks.values()} == {1, 2}


@pytest.mark.parametrize(
    ("route", "options"),
    [
        ("direct", {}),
        ("broker", {}),
        ("direct", {"optimizer": "adam:lr=0.01", "codec_down": "int8"}),
        ("direct", {"optimizer": "sgd:lr=0.1,clip_global_norm=1.0"}),
    ],
)
async def test_blocks_move_under_bsp_and_no_bit_is_another(
    route: str, options: dict[str, Any]
) -> None:
    options = {"optimizer": "momentum:lr=0.1,momentum=0.9"} | options
    async with cluster(2, route=route, **options) as made:
        batches, moved_about = await train(made, rearrange)
        assert router_of(made).moves.moved >= 4
        assert not router_of(made).moves.given_up
    async with cluster(2, route=route, **options) as made:
        _, still = await train(made, None, batches)
        assert router_of(made).moves.moved == 0
    assert_same(moved_about, still)


@pytest.mark.parametrize("policy", ["asp", "ssp:1", "k-bsp:1"])
async def test_blocks_move_under_other_policies_and_nothing_is_lost(policy: str) -> None:
    async with cluster(2, policy_text=policy, optimizer="sgd:lr=0.1") as made:
        _, (one, other) = await train(made, rearrange)
        assert router_of(made).moves.moved >= 4
        for key in KEYS:
            assert np.isfinite(one[key]).all()
            assert np.isfinite(other[key]).all()


async def test_the_measured_load_is_more_even_afterwards() -> None:
    async def operate(made: Cluster) -> None:
        await rebalance(made)
        loads, reached = router_of(made).loads, router_of(made).groups.version
        await version(made, reached + 16)

        def measured() -> float:
            carried = loads.by_server([0, 1])
            return imbalance_of(carried) if all(carried.values()) else 2.0

        await until(lambda: measured() < 1.25, what="a more even load")
        status = await asyncio.to_thread(ask, made.address, c.Status(TOKEN), 10.0)
        print(f"measured afterwards: {status['measured_imbalance']}")
        assert status["moves"]["stage"] == "idle"
        assert status["moves"]["moved"] > 0

    async with cluster(2) as made:
        await train(made, operate)


async def test_plain_keys_move_and_every_push_counts_once() -> None:
    async with cluster(2) as made, made.worker(0, world=1) as worker:
        await worker.init({"p": np.zeros(5), "q": np.zeros(5)}, plain=True, rule="sgd:lr=1.0")
        for turn in range(6):
            pushes = [worker.push(key, np.ones(5)) for key in ("p", "q")]
            await asked(made, "move", str(turn % 2), "p")
            await moved(made)
            for push in pushes:
                assert await push == "committed"
            layout = router_of(made).layout
            assert layout.blocks_with(layout.kid("p"))[0].server == turn % 2
        np.testing.assert_array_equal((await worker.pull("p")), np.full(5, -6.0))
        np.testing.assert_array_equal((await worker.pull("q")), np.full(5, -6.0))


async def test_servers_live_again_with_what_has_moved_to_them(tmp_path: Path) -> None:
    records = [tmp_path / "a", tmp_path / "b"]

    async def operate(made: Cluster) -> None:
        await rebalance(made)
        async with one_more(made, record=tmp_path / "late"):
            await until(lambda: len(router_of(made).members.servers) == 3, what="one more")
            await moved(made)

    async with cluster(2, server_records=records, record=tmp_path / "broker") as made:
        await train(made, operate)
    for path in (*records, tmp_path / "late", tmp_path / "broker"):
        assert replay(path).same, path


async def test_servers_that_cannot_reach_each_other_do_by_way_of_the_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send, relayed = Couriers.send, list[ToServer]()

    def only_relayed(self: Couriers, action: ToServer) -> None:
        if action.relayed or not action.address:
            send(self, action)
        relayed.extend([action] if action.relayed else [])

    monkeypatch.setattr(Couriers, "send", only_relayed)
    async with cluster(2) as made, made.worker(0, world=1) as worker:
        await worker.init({"p": np.arange(5.0)}, plain=True)
        layout = router_of(made).layout
        owner = layout.blocks_with(layout.kid("p"))[0].server
        await asked(made, "move", str(1 - owner), "p")
        await moved(made)
        assert layout.blocks_with(layout.kid("p"))[0].server == 1 - owner
        assert {one.server for one in relayed} == {owner}
        np.testing.assert_array_equal(await worker.pull("p"), np.arange(5.0))


async def test_beside_tables_keys_move_and_rows_stay() -> None:
    async with cluster(2, optimizer="sgd:lr=1.0") as made, made.worker(0, world=1) as worker:
        await worker.init({"w": np.zeros(3, np.float32)}, tables={"emb": zkv.Table(dim=2)})
        router, batches = router_of(made), 0
        layout, moves = router.layout, router.moves
        # A move waits for the update that is foreseen, so that it needs some batches to come.
        while batches < 2 or moves.stage != "idle":
            batches += 1
            assert batches < 100
            async with worker.batch() as batch:
                batch.push("w", np.ones(3, np.float32))
                batch.push_rows("emb", np.array([1, 2, 3]), np.ones((3, 2), np.float32))
            if batches == 1:
                with pytest.raises(Refused, match="holds rows of table 'emb', which do not move"):
                    await asked(made, "drain", "0")
                async with one_more(made):
                    await until(lambda: router.fleet.joined == {2}, what="one more server")
                await asked(made, "move", "2", "w")
            assert await batch.wait() == "committed"
        assert layout.blocks_with(layout.kid("w"))[0].server == 2
        np.testing.assert_array_equal(await worker.pull("w"), np.full(3, -batches, np.float32))
        rows = await worker.rows("emb", np.array([1, 2, 3]))
        assert rows.shape == (3, 2)


# --- what cannot be done -----------------------------------------------------------------------


async def test_the_last_server_is_not_drained() -> None:
    async with cluster(2) as made, made.worker(0, world=1) as worker:
        await worker.init({"w": np.zeros(3)})
        with pytest.raises(Refused, match=r"no server 'nobody'; servers are 0 \(.*\), 1 \("):
            await asked(made, "drain", "nobody")
        await asked(made, "drain", "0")
        with pytest.raises(Refused, match=r"is the last server that takes blocks.*zkv server add"):
            await asked(made, "drain", "1")
        with pytest.raises(Refused, match=r"is drained: it takes no blocks|there is no server '0'"):
            await asked(made, "move", "0", "w")
        await until(lambda: 0 not in router_of(made).members.servers, what="the end of server 0")
        with pytest.raises(Refused, match="there is no server '0'; servers are 1"):
            await asked(made, "move", "0", "w")
        np.testing.assert_array_equal(await worker.pull("w"), np.zeros(3))


async def test_a_dry_run_moves_nothing_and_without_measured_load_there_is_no_plan() -> None:
    async with cluster(2) as made, made.worker(0, world=1) as worker:
        await worker.init({"w": np.zeros(3), "v": np.zeros(30_000)})
        loads = router_of(made).loads
        await until(lambda: bool(loads.by_block()) or loads.seconds(0.0) >= 0.0)
        plan = await asked(made, "drain", "0", dry=True)
        assert [one["to"] for one in plan["moves"]] == [1]
        assert router_of(made).fleet.draining == []
        loads.anew(0.0)
        with pytest.raises(Refused, match="no load was measured yet"):
            await asked(made, "rebalance", dry=True)
        with pytest.raises(Refused, match=r"no block begins with a key that matches 'x\*'"):
            await asked(made, "move", "0", "x*")
        with pytest.raises(Refused, match="is none of rebalance, drain, move"):
            await asked(made, "shuffle")


async def test_a_value_that_no_other_server_has_room_for_stays_and_is_named() -> None:
    async with (
        cluster(2, placement="by_size;bytes=300000") as made,
        made.worker(0, world=1) as worker,
    ):
        with pytest.raises(ConfigError, match="larger than the limit of every server"):
            await worker.init({"huge": np.zeros(40_000)})
        await worker.init({"w": np.zeros(30_000), "v": np.zeros(30_000)})
        with pytest.raises(ConfigError, match=r"no other server has room for key '[wv]' \(240,000"):
            await asked(made, "drain", "0")
        with pytest.raises(ConfigError, match=r"key 'w' \(240,000 bytes\) has no room on server 1"):
            await asked(made, "move", "1", "w")
        assert router_of(made).fleet.draining == []
        assert router_of(made).moves.stage == "idle"


async def test_a_server_without_room_for_more_contributions_gets_no_more_blocks() -> None:
    async def operate(made: Cluster) -> None:
        router = router_of(made)
        owner = router.layout.blocks_with(router.layout.kid("k0"))[0].server
        await asked(made, "move", str(1 - owner), "k0")
        await until(lambda: bool(router.moves.given_up), what="that the move is given up")
        ((why, count),) = router.moves.given_up.items()
        assert why.startswith(f"the budget of server {1 - owner} has no room for contributions")
        assert count == 1
        assert router.layout.blocks_with(router.layout.kid("k0"))[0].server == owner

    budget = 2 * 4 * SIZE * 4 + 1000
    async with cluster(2, server_options={"budget_bytes": budget}) as made:
        await train(made, operate)


def test_who_has_said_that_nothing_older_is_open_finishes_nothing_older() -> None:
    worker = Worker(1, 0, 7, c.WorkerHello("w", 0, 1, False, "host", 1))
    group: Any = SimpleNamespace(is_over=lambda *_: False, arrivals={}, is_open=lambda *_: True)
    said = c.Finish(ContributionId(7, 0, 3), 4, 1.0, placement=5)
    check_finish(group, said, worker, 5)
    with pytest.raises(Refused, match="finished batch 3 in placement 5, though it had nothing"):
        check_finish(group, said, worker, 6)


async def test_a_late_server_that_owns_nothing_may_die() -> None:
    async with cluster(1) as made, made.worker(0, world=1) as worker:
        router = router_of(made)
        async with one_more(made) as server:
            await until(lambda: len(router.members.servers) == 2, what="one more server")
            made.servers.remove(server)
            made.tasks.pop().cancel()
            server.close()
            await until(lambda: len(router.members.servers) == 1, what="that it is given up")
        await worker.init({"w": np.zeros(3, np.float32)})
        async with worker.batch() as batch:
            batch.push("w", np.ones(3, np.float32))
        assert await batch.wait() == "committed"
