"""Topologies over real sockets: counted bytes, bits, and what is lost on the way."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import numpy as np
import pytest
from harness import Cluster, cluster, until
from processes import Launched

import zkv
from zkv.aggregation_costs import ring_sent_bytes
from zkv.aio import AsyncWorker
from zkv.dtypes import Array
from zkv.errors import ConfigError, PushRefused
from zkv_brokers import together
from zkv_workers import signals as s
from zkv_workers.session import Session

ELEMENTS = 1_200_000
"""Of float32: 4.8 MB, which 2, 3 and 4 divide."""
NBYTES = 4 * ELEMENTS
UPDATES = 3
SGD = "sgd:lr=0.1"
LOST_S = 1.0
ONLY_HERE = together.only_here


def gradient(rank: int, turn: int, size: int = ELEMENTS) -> Array:
    return np.random.default_rng([rank, turn]).standard_normal(size).astype(np.float32)


def two_hosts(patch: pytest.MonkeyPatch) -> None:
    """Let ranks 0 and 1 be on one machine, 2 and 3 on another, which reach each other."""
    patch.setattr(together, "only_here", lambda address: False)
    original = Session.take

    def take(self: Session, event: s.Input, now: float) -> None:
        if isinstance(event, s.Listening):
            event = s.Listening(event.address, f"host-{self.config.rank // 2}")
        original(self, event, now)

    patch.setattr(Session, "take", take)


async def train(
    made: Cluster, count: int, between: list[int] | None = None
) -> list[tuple[Array, dict[str, Any]]]:
    """Do some updates with so many workers; return what each has at the end, and its figures.

    `between`: what each worker has sent others in the end, which is waited for.
    """

    async def body(worker: AsyncWorker) -> tuple[Array, dict[str, Any]]:
        await worker.init({"w": np.zeros(ELEMENTS, np.float32)})
        for turn in range(UPDATES):
            async with worker.batch(weight=1.0 + worker.rank) as batch:
                batch.push("w", gradient(worker.rank, turn))
        assert await batch.wait() == "committed"
        if between is not None:
            await until(
                lambda: worker.stats()["topology"]["bytes_to_workers"] == between[worker.rank],
                what=f"that worker {worker.rank} has handed on all values",
            )
        return await worker.pull("w"), worker.stats()

    return await made.run(*[body] * count)


async def trained(topology: str, count: int, between: list[int] | None = None) -> Any:
    async with cluster(2, topology=topology, workers=count, optimizer=SGD) as made:
        found = await train(made, count, between)
        assert made.broker.router is not None
        model = made.broker.router.groups.model
        assert model is not None
        return found, model.together


@pytest.mark.parametrize("count", [2, 3, 4])
async def test_each_node_of_a_ring_sends_two_times_n_minus_one_nth_of_the_model(count: int) -> None:
    """The last update's values are handed on, too, before anybody leaves."""
    each = int(ring_sent_bytes(NBYTES, count)) * UPDATES
    assert each == 2 * (count - 1) * NBYTES // count * UPDATES
    found, together = await trained("ring", count, [each] * count)
    assert (together.updates, together.came_apart) == (UPDATES, 0)
    for _, figures in found:
        assert figures["topology"]["bytes_to_workers"] == each
        assert figures["topology"]["bytes_from_workers"] == each
        # Beside the first values, which one of them has sent, each sends 1/N as sums.
        assert figures["bytes_up"] - UPDATES * NBYTES // count in (0, NBYTES)
    ups = sum(figures["bytes_up"] for _, figures in found)
    assert ups == (UPDATES + 1) * NBYTES


async def test_of_each_host_one_contribution_travels_to_the_bits_of_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two workers on each of two hosts: the tree of sums is the one of servers."""
    reference, _ = await trained("servers", 4)
    two_hosts(monkeypatch)
    each = NBYTES * UPDATES
    found, together = await trained("hierarchical", 4, [each] * 4)
    assert (together.updates, together.came_apart) == (UPDATES, 0)
    ups = [figures["bytes_up"] for _, figures in found]
    # One of them has sent the first values.
    assert [up // each for up in ups] == [1, 0, 1, 0]
    assert sorted(up % each for up in ups) == [0, 0, 0, NBYTES]
    for values, _ in found:
        assert values.tobytes() == reference[0][0].tobytes()


async def test_a_ring_of_two_has_the_bits_of_servers_and_one_of_four_differs_by_rounding() -> None:
    for count, exact in ((2, True), (4, False)):
        reference, _ = await trained("servers", count)
        found, _ = await trained("ring", count)
        for values, _ in found:
            assert values.tobytes() == found[0][0].tobytes()
        same = found[0][0].tobytes() == reference[0][0].tobytes()
        assert same == exact
        np.testing.assert_allclose(found[0][0], reference[0][0], rtol=2e-5, atol=1e-6)


async def test_gradients_are_made_in_buffers_that_nobody_copies() -> None:
    """They are the program's again when the batch is settled, which the sums wait for, too."""

    async def body(worker: AsyncWorker) -> Array:
        params = {"w": np.zeros(ELEMENTS, np.float32)}
        await worker.init(params)
        made = worker.buffers(params)
        for turn in range(UPDATES):
            async with worker.batch(weight=1.0 + worker.rank) as batch:
                made["w"][:] = gradient(worker.rank, turn)
                batch.push("w", made["w"])
        assert await batch.wait() == "committed"
        return await worker.pull("w")

    reference, _ = await trained("servers", 2)
    async with cluster(2, topology="ring", workers=2, optimizer=SGD) as made:
        for values in await made.run(body, body):
            assert values.tobytes() == reference[0][0].tobytes()


async def test_with_one_server_all_keys_are_there() -> None:
    options: dict[str, Any] = {"topology": "one-server", "placement": "by_hash"}
    async with cluster(3, **options) as made, made.worker(0, world=1) as worker:
        await worker.init({f"k{at}": np.zeros(70_000, np.float32) for at in range(5)})
        status = await worker.status()
    assert [one["blocks"] > 0 for one in status["servers"]] == [True, False, False]
    assert status["topology"]["name"] == "one-server"


VICTIM = """
import os, signal, sys, numpy as np, zkv
def gradient(rank, turn):
    return np.random.default_rng([rank, turn]).standard_normal(300_000).astype(np.float32)
with zkv.connect(sys.argv[1], rank=2, world=3) as worker:
    worker.init({key: np.zeros(300_000, np.float32) for key in "ab"})
    with worker.batch(weight=3.0) as batch:
        batch.push("a", gradient(2, 0))
        print("in mid-reduce", flush=True)
        signal.pause()
"""


async def survived(topology: str) -> tuple[Array, Any, bool]:
    """Kill the third of three workers when one of two keys is added up: return what the others end
    with, and the broker's figures, and whether servers had sums with its part."""
    options: dict[str, Any] = {"worker_lost_s": LOST_S, "optimizer": "momentum:lr=0.1,momentum=0.9"}
    async with cluster(2, topology=topology, workers=3, **options) as made:
        victim = Launched(sys.executable, "-c", VICTIM, made.address)
        killed = asyncio.Event()

        def joined() -> list[int]:
            return [bid for one in made.servers for bid in one.shard.joints.senders]

        def arrived() -> bool:
            """All of key a is at the servers, with all three contributions."""
            assert made.broker.router is not None
            layout = made.broker.router.layout
            bids = layout.blocks_of_key[layout.kid("a")] if "a" in layout.kid_of else []
            held = [
                bid
                for one in made.servers
                for contribution in one.shard.contributions.open.values()
                for bid in contribution.payloads
                if bid in bids
            ]
            return bool(bids) and len(held) == 3 * len(bids)

        async def kill() -> bool:
            await asyncio.to_thread(victim.line, "in mid-reduce")
            await until(arrived, what="that servers hold all of one key")
            found = bool(joined())
            os.kill(victim.process.pid, signal.SIGKILL)
            killed.set()
            return found

        async def body(worker: AsyncWorker) -> Array:
            await worker.init({key: np.zeros(300_000, np.float32) for key in "ab"})
            for turn in range(UPDATES):
                async with worker.batch(weight=1.0 + worker.rank) as batch:
                    for key in "ab":
                        batch.push(key, gradient(worker.rank, 2 * turn + (key == "b"), 300_000))
                    if turn == 0:
                        await killed.wait()
            assert await batch.wait() == "committed"
            pulled = await worker.pull(["a", "b"])
            return np.concatenate([pulled["a"], pulled["b"]])

        ended, sums = await asyncio.gather(made.run(body, body, world=3), kill())
        victim.end()
        assert made.broker.router is not None
        model = made.broker.router.groups.model
        assert model is not None
        assert ended[0].tobytes() == ended[1].tobytes()
        return ended[0], model.together, sums


@pytest.mark.cluster
async def test_who_is_killed_in_mid_reduce_leaves_the_bits_of_servers() -> None:
    """One key is summed up with the victim's part in it, the other is not: both end as if the two
    others had sent theirs to the servers, and go on as a ring of two."""
    reference, _, sums = await survived("servers")
    assert not sums
    for topology in ("ring", "hierarchical"):
        values, together, sums = await survived(topology)
        assert sums
        assert together.came_apart == 1
        assert together.updates == UPDATES - 1
        assert values.tobytes() == reference.tobytes()


async def test_what_servers_refuse_is_found_out_one_by_one() -> None:
    """A NaN makes a sum NaN: it comes apart, and the guard names who has sent it."""
    async with cluster(2, topology="ring", workers=3, optimizer=SGD) as made:

        async def body(worker: AsyncWorker) -> str:
            await worker.init({"w": np.zeros(100_000, np.float32)})
            for turn in range(2):
                async with worker.batch() as batch:
                    bad = worker.rank == 1 and turn == 0
                    values = gradient(worker.rank, turn, 100_000)
                    values[7] = np.nan if bad else values[7]
                    batch.push("w", values)
                if bad:
                    assert await batch.wait() == "discarded"
                    with pytest.raises(PushRefused, match=r"'w'.*NaN"):
                        await worker.batch().__aenter__()
                else:
                    assert await batch.wait() == "committed"
            return str(batch.outcome)

        assert await made.run(body, body, body) == ["committed"] * 3
        assert made.broker.router is not None
        assert made.broker.router.groups.model is not None
        together = made.broker.router.groups.model.together
        assert together.came_apart == 1
        assert "NaN" in together.why


async def test_who_can_only_dial_out_keeps_all_with_the_servers() -> None:
    async with cluster(1, topology="ring", workers=2, optimizer=SGD, route="broker") as made:
        found = await train(made, 2)
        async with made.worker(None) as worker:
            status = await worker.status()
    assert found[0][0].tobytes() == found[1][0].tobytes()
    assert status["topology"]["updates"] == 0
    assert "cannot be reached by other workers" in status["topology"]["why"]


async def test_a_worker_that_only_its_own_machine_reaches_keeps_all_with_the_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has dialled the broker on loopback, and others come from elsewhere."""
    two_hosts(monkeypatch)
    monkeypatch.setattr(together, "only_here", ONLY_HERE)
    _, figures = await trained("ring", 4)
    assert (figures.updates, figures.came_apart) == (0, 0)
    assert "which only its own machine reaches" in figures.why
    assert [ONLY_HERE(f"tcp://{host}:7") for host in ("127.0.0.1", "[::1]", "10.0.0.1")] == [
        True,
        True,
        False,
    ]


async def test_momentum_is_the_servers_matter() -> None:
    """Values go round, not sums: any rule that updates block by block may be used."""
    options: dict[str, Any] = {"optimizer": "adam:lr=0.1", "workers": 2}
    ends = []
    for topology in ("servers", "ring"):
        async with cluster(2, topology=topology, **options) as made:
            ends.append((await train(made, 2))[0][0])
    assert ends[0].tobytes() == ends[1].tobytes()


def test_a_topology_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="topology 'star' is none of servers, one-server"):
        zkv.local(topology="star")
