"""A worker that does not read what it is sent: it costs its servers one version of the model and a
window of bytes, nobody waits for it where the policy does not, and it goes on when it reads again.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from crew import begun, crew, end, work
from harness import cluster, until

ELEMENTS = 1 << 18
MODEL_BYTES = 4 * ELEMENTS
BLOCK_BYTES = 64 * 1024
WINDOW_BYTES = 2 * BLOCK_BYTES
UPDATES = 30


def deafen(worker: Any) -> Any:
    """Have a worker's data sockets not be read; return what has them read again."""
    loop, sockets = asyncio.get_running_loop(), set(worker._driver._data.values())
    for one in sockets:
        loop.remove_reader(one._fd)
        one.look = lambda: None

    def hear() -> None:
        for one in sockets:
            del one.look
            loop.add_reader(one._fd, one._drain)
            one.look()

    return hear


def kept_for(server: Any) -> int:
    """Bytes of values that a server keeps for grants, beside those that are current anyway."""
    grants, store = server.shard.grants, server.shard.store
    current = {id(block.current.values) for block in store.blocks.values()}
    kept = {
        id(piece.payload): piece.payload.nbytes
        for pieces in grants._open.values()
        for piece in pieces.values()
        if id(piece.payload) not in current
    }
    return sum(kept.values())


async def test_a_worker_that_does_not_read_costs_a_version_and_a_window():
    params = {"w": np.zeros(ELEMENTS, np.float32)}
    gradient = -np.ones(ELEMENTS, np.float32)
    options = {"window_bytes": WINDOW_BYTES, "shared_bytes": 0}
    async with (
        cluster(
            1,
            policy_text="asp",
            optimizer="sgd:lr=1",
            block_bytes=BLOCK_BYTES,
            server_options=options,
        ) as made,
        crew(made, 2, params, shared_bytes=0, wait_timeout_s=20.0) as (quick, slow),
    ):
        (server,) = made.servers
        # The start line is passed, and the slow one's own values of it are old.
        first = await asyncio.gather(work(quick, gradient), work(slow, gradient))
        assert [await batch.wait() for batch in first] == ["committed"] * 2
        hear = deafen(slow)
        waiting = asyncio.create_task(begun(slow))
        incarnation = made.broker.router.members.numbered(1).incarnation
        window = server.shard.grants._window(incarnation)
        await until(lambda: window.in_flight, what="something on its way to the slow one")
        for _ in range(UPDATES):
            batch = await work(quick, gradient)
            assert await batch.wait() == "committed"
            assert window.in_flight <= WINDOW_BYTES
            # Who has pushed may hear of the update before the server does.
            await until(lambda: kept_for(server), what="values that are kept for the slow one")
            assert kept_for(server) <= 2 * MODEL_BYTES
        assert not waiting.done()
        hear()
        batch = await waiting
        # What it was granted: an update or two of the first, and none of those since.
        assert 1 <= batch.version <= 2
        expected = np.full(ELEMENTS, batch.version, np.float32)
        np.testing.assert_array_equal(batch.params["w"], expected)
        await end(batch, gradient)
        assert await batch.wait() == "committed"
        np.testing.assert_array_equal(
            await quick.pull("w"), np.full(ELEMENTS, 3 + UPDATES, np.float32)
        )
