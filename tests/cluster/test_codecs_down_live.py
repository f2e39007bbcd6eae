"""Parameters through a codec, over real sockets: all workers compute on the same bits."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from codec_texts import DOWN
from crew import all_begun, crew, end, version, work
from harness import Cluster, cluster

from zkv.aio import AsyncWorker
from zkv.dtypes import Array
from zkv.errors import Refused
from zkv_codecs.backend import NUMPY
from zkv_codecs.packed import Packed, seed_of
from zkv_codecs.spec import codec

SGD = "sgd:lr=1"
SIZE = 1200
SHAPE = (40, 30)
WORKERS = 3


def noise(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


async def trained(made: Cluster, updates: int) -> list[list[Array]]:
    """Train three workers; return what each computed on, batch by batch, and then the end."""

    async def body(worker: AsyncWorker) -> list[Array]:
        await worker.init({"w": noise(0)})
        seen = []
        for turn in range(updates):
            async with worker.batch() as batch:
                seen.append(batch.params["w"].copy())
                batch.push("w", noise(1 + WORKERS * turn + worker.rank))
        await batch.wait()
        async with worker.batch() as batch:
            # Of one version: the view, and the exact values.
            seen += [batch.params["w"].copy(), await worker.pull("w")]
        return seen

    found: list[list[Array]] = await made.run(*[body] * WORKERS)
    return found


def same(rows: list[list[Array]]) -> None:
    for at, values in enumerate(zip(*rows, strict=True)):
        assert len({one.tobytes() for one in values}) == 1, f"batch {at}"


@pytest.mark.parametrize("route", ["direct", "broker"])
@pytest.mark.parametrize("text", DOWN)
async def test_all_workers_compute_on_the_bits_that_one_process_computes(
    text: str, route: str
) -> None:
    async with cluster(2, route=route, optimizer=SGD, codec_down=f"{text};small=0") as made:
        rows = await trained(made, 12)
    same(rows)
    one = codec(text)
    exact = noise(0).reshape(-1)
    view = exact.copy()
    for turn, seen in enumerate(rows[0][:-1]):
        np.testing.assert_array_equal(seen.reshape(-1), view if one.lossy else exact)
        if turn == len(rows[0]) - 2:
            break
        gradients = [noise(1 + WORKERS * turn + rank).reshape(-1) for rank in range(WORKERS)]
        total = (gradients[0] + gradients[1]) + gradients[2]
        exact = exact - total / np.float32(WORKERS)
        if one.lossy:
            error = Packed(exact - view, SHAPE)
            sent, _ = one.encode(error, one.start(SHAPE), seed_of(1, turn + 1), NUMPY)
            view = view + one.chain.decode(sent.packed, NUMPY).values
    # A pull reads the exact parameters.
    np.testing.assert_array_equal(rows[0][-1].reshape(-1), exact)


async def test_a_thousand_updates_drift_nowhere() -> None:
    async with cluster(
        1, optimizer=SGD, codec="int8+ef;small=0", codec_down="int8;small=0"
    ) as made:
        rows = await trained(made, 1000)
    same(rows)
    *_, view, exact = rows[0]
    # Parameters are some dozens, updates are about one: half a code of a byte is a hundredth.
    assert np.abs(exact).max() > 20
    assert 0 < np.abs(view - exact).max() < 0.02


async def test_bytes_down_are_what_the_codec_promises() -> None:
    """Once all values, then deltas: one byte for each element, four for each 256."""
    updates, whole, delta = 6, 4 * SIZE, SIZE + 4 * 5
    found = {}
    for text in ("none", "int8;small=0"):
        async with (
            cluster(1, optimizer=SGD, codec_down=text) as made,
            crew(made, 1, {"w": noise(0)}) as (worker,),
        ):
            for turn in range(updates):
                async with worker.batch() as batch:
                    # As many grants as batches are here: the next one follows the update.
                    found[text] = worker.stats()["bytes_down"]
                    batch.push("w", noise(turn))
                await batch.wait()
            assert (await worker.status())["codec_down"] == text
    assert found["none"] == updates * whole
    assert found["int8;small=0"] == whole + (updates - 1) * -(-delta // 8) * 8


async def test_a_joiner_and_a_worker_that_slept_compute_on_the_same_view() -> None:
    """ASP: one is many versions behind, more than deltas are kept of; another is new."""
    async with (
        cluster(2, policy_text="asp", optimizer=SGD, codec_down="int8;small=0", workers=2) as made,
        crew(made, 2, {"w": noise(0)}) as (fast, slow),
    ):
        batches = await all_begun([fast, slow])
        await end(batches[0], noise(1))
        await batches[0].wait()
        for turn in range(12):
            await (await work(fast, noise(2 + turn))).wait()
        await end(batches[1], noise(90))
        await batches[1].wait()
        async with made.worker(2, world=3) as late:
            await late.init({"w": noise(0)})
            found: dict[int, set[bytes]] = {}
            for batch in await all_begun([fast, slow, late]):
                found.setdefault(batch.version, set()).add(batch.params["w"].tobytes())
                await end(batch, noise(91))
            # The slow one and the new one begin at the newest version.
            assert len(found) < 3
            assert {len(bits) for bits in found.values()} == {1}


async def test_none_gives_the_exact_parameters_back() -> None:
    async with (
        cluster(2, optimizer=SGD, codec_down="int8;small=0") as made,
        crew(made, 1, {"w": noise(0)}) as (worker,),
    ):

        async def turn(seed: int) -> tuple[Array, Array]:
            """Return what a batch computes on, and the exact values of that version."""
            exact = await worker.pull("w")
            async with worker.batch() as batch:
                seen = batch.params["w"].copy()
                batch.push("w", noise(seed))
            await batch.wait()
            return seen, exact

        await turn(1)
        seen, exact = await turn(2)
        assert seen.tobytes() != exact.tobytes()
        np.testing.assert_allclose(seen, exact, atol=0.05)
        for text, equal in (("none", True), ("int8;small=10", False), ("none", True)):
            answer = await worker.set(codec_down=text)
            assert answer == {"codec_down": version(made)}
            assert (await worker.status())["codec_down"] == text
            await turn(3)  # It was granted before that.
            for seed in (4, 5):
                seen, exact = await turn(seed)
            assert (seen.tobytes() == exact.tobytes()) == equal
        for text, why in (("int8+ef", "by themselves"), ("powersgd:2", "same on every machine")):
            with pytest.raises(Refused, match=why):
                await worker.set(codec_down=text)


async def test_evaluation_reads_the_exact_parameters() -> None:
    async with (
        cluster(2, optimizer=SGD, codec_down="int8;small=0") as made,
        crew(made, 2, {"w": noise(0)}) as workers,
    ):
        for turn in range(2):
            batches = await asyncio.gather(*(work(worker, noise(turn)) for worker in workers))
            await asyncio.gather(*(batch.wait() for batch in batches))
        read, pulled = await workers[0].evaluate(), await workers[1].pull("w")
        assert read.version == version(made)
        assert read.params["w"].tobytes() == pulled.tobytes()
