"""Gradients that are made where servers read them: not copied, and never read too late."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest
from crew import crew
from harness import Cluster, cluster, until

import zkv
from zkv import control as c
from zkv.aio import AsyncWorker
from zkv.wire import open_envelope
from zkv_brokers.node import Action
from zkv_brokers.server import Server
from zkv_workers.buffers import STRIDE_BYTES, Buffers, words_of
from zkv_workers.encoding import Encoder

LARGE = 200_000
PARAMS = {"w": np.zeros(LARGE, np.float32), "b": np.zeros(7, np.float32)}


def gradients(rank: int, batch: int) -> dict[str, Any]:
    chance = np.random.default_rng((rank, batch))
    return {key: chance.standard_normal(one.shape, np.float32) for key, one in PARAMS.items()}


async def in_memory(made: Cluster) -> None:
    await until(
        lambda: all(
            one.transport == "memory" for one in made.broker.router.members.workers.values()
        )
    )


async def trained(made: Cluster, *, buffers: bool, batches: int = 4) -> bytes:
    """Two workers, whose arrays are overwritten as soon as that is allowed."""
    async with crew(made, 2, PARAMS) as workers:
        await in_memory(made)

        async def run(rank: int, worker: AsyncWorker) -> None:
            own = worker.buffers(PARAMS) if buffers else None
            for number in range(batches):
                async with worker.batch() as batch:
                    for key, gradient in gradients(rank, number).items():
                        if own is None:
                            batch.push(key, gradient)
                            continue
                        own[key][:] = np.nan
                        own[key][:] = gradient
                        batch.push(key, own[key])
            await batch.wait()

        await asyncio.gather(*(run(rank, one) for rank, one in enumerate(workers)))
        pulled = await workers[0].pull()
        return b"".join(pulled[key].tobytes() for key in PARAMS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": "sgd:lr=0.1,clip_global_norm=0.5"},
        {"codec": "int8+ef"},
        {"codec": "topk:0.1", "optimizer": "adam:lr=0.01"},
    ],
)
async def test_a_run_from_buffers_has_the_bits_of_one_from_ordinary_arrays(
    options: dict[str, Any],
) -> None:
    found = []
    for buffers in (False, True):
        async with cluster(2, **options) as made:
            found.append(await trained(made, buffers=buffers))
    assert found[0] == found[1]


@pytest.mark.parametrize("policy", ["asp", "ssp:1", "k-bsp:2", "k-asp:2", "k-batch-asp:2"])
async def test_under_each_policy_nothing_is_overwritten_that_is_still_read(policy: str) -> None:
    """Each worker adds as many ones as it has batches that count."""
    async with (
        cluster(1, policy_text=policy, optimizer="sgd:lr=1") as made,
        crew(made, 2, PARAMS) as workers,
    ):
        await in_memory(made)
        counted = 0.0

        async def run(worker: AsyncWorker) -> None:
            nonlocal counted
            own = worker.buffers(PARAMS)
            for _ in range(6):
                async with worker.batch() as batch:
                    own["w"][:] = -1.0
                    batch.push("w", own["w"])
                    batch.push("b", own["b"])
                if await batch.wait() == "committed":
                    counted += 1.0
                own["w"][:] = 1e9

        async def both() -> None:
            await asyncio.gather(*(run(one) for one in workers))

        if policy.startswith("k-batch"):
            assert not workers[0]._encoder.buffers.holds(workers[0].buffers(PARAMS)["w"])
        await both()
        final = (await workers[0].pull("w"))[[0, -1]].tolist()
        of_one = policy in ("asp", "ssp:1")
        assert final == [counted if of_one else counted / 2] * 2
        assert counted >= 6


async def test_the_next_batch_is_not_entered_while_a_server_still_reads() -> None:
    """A worker may know that its batch is committed before a server has heard that it is."""
    async with (
        cluster(1, optimizer="sgd:lr=1,clip_global_norm=1e9") as made,
        crew(made, 1, PARAMS) as (worker,),
    ):
        await in_memory(made)
        own, buffers = worker.buffers(PARAMS), worker._encoder.buffers
        kept = _KeptFromCommit(made.servers[0])
        async with worker.batch() as batch:
            own["w"][:] = -1
            batch.push("w", own["w"])
        assert batch._fate is not None
        await batch._fate
        following = worker.batch(early=True)
        entering = asyncio.create_task(following.__aenter__())
        await until(lambda: following._state is not None)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not entering.done()
        assert not buffers.free(batch.number)
        kept.release()
        await entering
        own["w"][:] = 1e9
        following.abandon()
        assert (await worker.pull("w"))[[0, -1]].tolist() == [1.0, 1.0]


class _KeptFromCommit:
    """Keeps what a broker says from a server, from the entry on that commits."""

    def __init__(self, server: Server) -> None:
        assert server.node is not None
        self._server, self._frames = server, list[bytes]()
        self._hears = server.node.broker_says
        server.node.broker_says = self._says  # type: ignore[method-assign]

    def _says(self, frame: bytes, now: float) -> list[Action]:
        messages = c.decode_messages(open_envelope(frame, whole=True)).messages
        entries = [entry for one in messages if isinstance(one, c.Log) for entry in one.entries]
        if not self._frames and not any(isinstance(entry, c.Commit) for entry in entries):
            return self._hears(frame, now)
        self._frames.append(frame)
        return []

    def release(self) -> None:
        """Let the server hear it all."""
        assert self._server.node is not None
        self._server.node.broker_says = self._hears  # type: ignore[method-assign]
        for frame in self._frames:
            self._server._carry_out(self._hears(frame, self._server._now()))


async def test_they_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    whole = Encoder._owned

    def owned(encoder: Encoder, values: Any) -> Any:
        copied.append(values.size)
        return whole(encoder, values)

    monkeypatch.setattr(Encoder, "_owned", owned)
    async with cluster(1) as made:
        await trained(made, buffers=True)
        assert copied == []
    async with cluster(1) as made:
        await trained(made, buffers=False)
        assert LARGE in copied


@pytest.mark.parametrize("when", ["in the block", "behind the block"])
def test_who_writes_too_early_is_told(when: str) -> None:
    with zkv.local(workers=1) as made, zkv.connect(made.address) as worker:
        worker.init(PARAMS)
        own = worker.buffers(PARAMS)
        with worker.batch() as batch:
            batch.push("w", own["w"])
            if when == "in the block":
                own["w"][:] = 1
        own["w"][:] = 1
        with pytest.raises(
            BufferError, match="key 'w': the gradient was changed while it was lent"
        ):
            batch.wait()
        with worker.batch() as batch:
            own["w"][:] = 2
            batch.push("w", own["w"])
        assert batch.wait() == "committed"
        own["w"][:] = 3


def test_a_batch_that_is_withdrawn_gives_them_back() -> None:
    with zkv.local(workers=1) as made, zkv.connect(made.address) as worker:
        worker.init(PARAMS)
        own = worker.buffers(PARAMS)
        with contextlib.suppress(ZeroDivisionError), worker.batch() as batch:
            batch.push("w", own["w"])
            _ = 1 / 0
        for number in range(2):
            with worker.batch() as batch:
                own["w"][:] = number
                batch.push("w", own["w"])
            assert batch.wait() == "committed"


def test_views_and_other_arrays_are_copied_as_ever() -> None:
    buffers = Buffers(np.empty, lambda array: False)
    own = buffers.make({"w": np.ones((4, 6), np.float32), "e": np.ones(0, np.float32)})
    assert own["w"].shape == (4, 6)
    assert not own["w"].any()
    assert buffers.holds(own["w"])
    assert buffers.holds(own["w"].reshape(-1))
    for other in (own["w"][1:], own["w"].T, own["w"][:1], np.ones((4, 6), np.float32), [1.0]):
        assert not buffers.holds(other)


@pytest.mark.parametrize("size", [1, 7, 8, STRIDE_BYTES - 1, 3 * STRIDE_BYTES + 5])
def test_an_array_that_is_filled_anew_is_seen_to_have_changed(size: int) -> None:
    array = np.zeros(size, np.uint8)
    before = words_of(array)
    assert words_of(array.copy()) == before
    array[-1] = 1
    assert words_of(array) != before
    array[:] = 1
    assert words_of(array) != before
