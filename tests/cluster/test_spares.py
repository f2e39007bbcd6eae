"""Arrays that are used again: never while anybody else has them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq
from crew import crew
from harness import cluster
from hypothesis import given
from hypothesis import strategies as st

from zkv_net.spares import LEAST_BYTES, Spares

SIZE = LEAST_BYTES


@given(
    actions=st.lists(
        st.tuples(st.booleans(), st.integers(0, 9), st.sampled_from([SIZE, 2 * SIZE])), max_size=60
    ),
    bytes_max=st.sampled_from([0, 3 * SIZE, 100 * SIZE]),
)
def test_what_somebody_has_is_nobody_elses(
    actions: list[tuple[bool, int, int]], bytes_max: int
) -> None:
    spares = Spares(bytes_max)
    held: list[tuple[int, Any]] = []
    for number, (asks, which, size) in enumerate(actions):
        if asks:
            fresh = spares.empty(size, np.uint8)
            assert fresh.size == size
            fresh[:] = number % 251
            # A view is all that is left of it.
            held.append((number % 251, fresh[1:-1].reshape(2, -1)))
            del fresh
        elif held:
            held.pop(which % len(held))
        assert all((one == mark).all() for mark, one in held)
        assert spares.nbytes <= bytes_max


def _memoryview(array: Any) -> Any:
    return memoryview(array)


def _frame(array: Any) -> Any:
    return zmq.Frame(array.view(np.uint8), copy=False)


def _view(array: Any) -> Any:
    return array.view(np.uint8)[5:].reshape(-1, 1)


def _itself(array: Any) -> Any:
    return [array]


@pytest.mark.parametrize("hold", [_memoryview, _frame, _view, _itself])
def test_it_is_used_again_when_the_last_who_refers_to_it_is_gone(
    hold: Callable[[Any], Any],
) -> None:
    spares = Spares()
    first = spares.empty(SIZE, np.float32)
    where = first.ctypes.data
    other = hold(first)
    del first
    second = spares.empty(SIZE, np.float32)
    assert second.ctypes.data != where
    # An array of another kind is another one.
    assert spares.empty(SIZE, np.int32).ctypes.data != where
    del other
    if hold is not _frame:  # What a socket was given is let go by another thread, some time later.
        assert spares.empty(SIZE, np.float32).ctypes.data == where


def test_small_ones_are_not_remembered() -> None:
    spares = Spares()
    spares.empty(LEAST_BYTES - 1, np.uint8)
    assert spares.nbytes == 0
    spares.empty(LEAST_BYTES, np.uint8)
    assert spares.nbytes == LEAST_BYTES
    spares.clear()
    assert spares.nbytes == 0


async def test_values_that_a_program_keeps_are_not_written_over() -> None:
    """And those that it has let go are where the next ones are."""
    zeros = {"w": np.zeros(SIZE, np.float32)}
    async with cluster(1, optimizer="sgd:lr=1") as made, crew(made, 1, zeros) as (worker,):
        kept, places = [], []
        for at in range(6):
            async with worker.batch() as batch:
                values = batch["w"]
                places.append(values.ctypes.data)
                if at < 2:
                    kept.append(values)
                del values
                batch.push("w", np.full(SIZE, -1, np.float32))
            assert await batch.wait() == "committed"
            del batch
        assert [float(one[0]) for one in kept] == [0, 1]
        assert all((one == one[0]).all() for one in kept)
        assert len(set(places[:3])) == 3
        assert len(set(places)) < 6


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library keeps nothing")
def test_a_kept_heap_gives_nothing_back() -> None:
    """Arrays of a block, made and freed again and again, are no faults from the second time on."""
    program = (
        "import resource, numpy as np\n"
        "from zkv_net import heap\n"
        "assert heap.keep() and heap.keep()\n"
        "faults = []\n"
        "for _ in range(4):\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    made = [np.ones(2**18, np.float32) for _ in range(64)]\n"
        "    del made\n"
        "    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
        "print(*faults)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env
    )
    first, *others = map(int, done.stdout.split())
    assert first > 64 * 256 / 2
    assert max(others) < 64
