"""Gradients on devices through a whole cluster, with a stand-in for CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cupy_on_cpu
import numpy as np
import pytest
from cupy_on_cpu import Device, Machine, Stream

import zkv
from zkv.errors import PushRefused
from zkv.reduction import InParts, OneDevice
from zkv.sums import weighted_mean

Array = np.ndarray[Any, Any]
pytestmark = pytest.mark.cluster
SHAPES = {"w": (2, 262_144), "small": (7,), "tiny": (2,)}


@pytest.fixture
def machine() -> Iterator[Machine]:
    with cupy_on_cpu.installed() as made:
        yield made


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with zkv.local(servers=2, optimizer="sgd:lr=1", codec="int8;small=65536") as cluster:
        yield cluster.address


def there(array: Array, device: int = 0) -> Any:
    import cupy

    with Device(device):
        return cupy.ndarray(array.copy())


def gradients(seed: int) -> dict[str, Array]:
    """Whole numbers of which 127 is the largest: int8 sends them as they are."""
    chance = np.random.default_rng(seed)
    made = {}
    for key, shape in SHAPES.items():
        made[key] = chance.integers(-127, 128, shape).astype(np.float32)
        made[key].reshape(-1)[::32] = 127
    return made


def test_several_devices_and_their_streams_train_one_model(machine: Machine, address: str) -> None:
    """Exactly: each batch is the mean by samples over two devices, overwritten behind its push."""
    samples = (3, 1)
    with zkv.connect(address, rank=0, world=1) as worker:
        worker.init({key: np.zeros(shape, np.float32) for key, shape in SHAPES.items()})
        expected = {key: np.zeros(shape, np.float32) for key, shape in SHAPES.items()}
        for number, strategy in enumerate([OneDevice(), InParts(), None]):
            with worker.batch(weight=4) as batch:
                into = [there(np.zeros(SHAPES["w"], np.float32), at) for at in range(2)]
                batch.read_into("w", into)
                for at, one in enumerate(into):
                    with Device(at):
                        np.testing.assert_array_equal(one.get(), expected["w"])
                for key, gradient in gradients(number).items():
                    parts = []
                    for at in range(2):
                        with Device(at), Stream(20 + at):
                            parts.append(there(gradient, at))
                    with Device(0), Stream(20), Device(1), Stream(21):
                        batch.push(key, zkv.OnDevices(parts, samples, strategy))
                    for at, one in enumerate(parts):
                        with Device(at), Stream(20 + at):
                            one.fill(np.nan)
                    expected[key] -= weighted_mean([gradient, gradient], samples)
            assert batch.wait() == "committed"
            newest = worker.pull()
            for key, values in expected.items():
                np.testing.assert_array_equal(newest[key], values)
    assert {device for device, _, _ in machine.launched} == {0, 1}
    assert not machine.pending


def test_a_nan_is_told_where_the_batch_ends_and_the_next_one_counts(
    machine: Machine, address: str
) -> None:
    with zkv.connect(address, rank=0, world=1) as worker:
        worker.init({key: np.zeros(shape, np.float32) for key, shape in SHAPES.items()})
        before = worker.pull()
        with worker.batch() as batch:
            bad = gradients(1)
            bad["w"][1, 5] = np.inf
            for key, gradient in bad.items():
                batch.push(key, there(gradient))
        with pytest.raises(PushRefused, match="key 'w': element 262149 of the gradient is inf"):
            batch.wait()
        assert batch.outcome == "withdrawn"
        with pytest.raises(PushRefused, match="key 'w'"), worker.batch():
            pass
        with worker.batch() as batch:
            for key, gradient in gradients(2).items():
                batch.push(key, there(gradient))
        assert batch.wait() == "committed"
        newest = worker.pull()
        for key, gradient in gradients(2).items():
            np.testing.assert_array_equal(newest[key], before[key] - gradient)


async def test_with_asyncio_it_is_the_same(machine: Machine) -> None:
    from harness import cluster

    async def body(worker: Any) -> None:
        await worker.init({"w": np.zeros(70_000, np.float32)})
        gradient = np.ones(70_000, np.float32)
        async with worker.batch() as batch:
            batch.push("w", [there(gradient, 0), there(3 * gradient, 1)])
        await batch.wait()
        np.testing.assert_array_equal(await worker.pull("w"), -2 * gradient)
        bad = gradient.copy()
        bad[69_999] = np.nan
        async with worker.batch() as batch:
            batch.push("w", there(bad))
        with pytest.raises(PushRefused, match="element 69999"):
            await batch.wait()

    async with cluster(2, optimizer="sgd:lr=1", codec="int8") as made:
        await made.run(body)
