"""Positions on a device, through a stand-in for CuPy: coded and read there, as on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cupy_on_cpu
import numpy as np
import pytest
from cupy_on_cpu import Machine, ndarray
from hypothesis import given
from hypothesis import strategies as st

from zkv.errors import ProtocolError
from zkv_codecs import indices
from zkv_codecs.backend import Backend

CUDA = Backend("cuda")
pytestmark = pytest.mark.timeout(300)
sizes = st.integers(0, 3000)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with cupy_on_cpu.installed() as made:
        yield made


def drawn(n: int, share: float) -> Any:
    chosen = np.random.default_rng(n).random(n) < share
    return np.flatnonzero(chosen).astype(np.uint32)


@given(n=sizes, share=st.sampled_from([0, 0.001, 0.02, 0.3, 1]))
def test_the_same_bytes_and_back(n: int, share: float) -> None:
    with cupy_on_cpu.installed():
        here = drawn(n, share)
        there = ndarray(here.copy())
        name, coded = indices.encode_best(there, n, CUDA)
        assert (name, coded.get().tobytes()) == (
            indices.best(here, n),
            indices.encode(indices.best(here, n), here, n).tobytes(),
        )
        for name in indices.CODINGS:
            coded = indices.encode(name, there, n, CUDA)
            assert coded.get().tobytes() == indices.encode(name, here, n).tobytes()
            for data in (coded, coded.get()):
                read = indices.decode(name, data, here.size, n, CUDA)
                assert read.get().tobytes() == here.tobytes()


@pytest.mark.parametrize("name", indices.CODINGS)
def test_what_a_peer_has_spoiled_is_refused_there_too(machine: Machine, name: str) -> None:
    here = drawn(2000, 0.05)
    spoiled = indices.encode(name, here, 2000).copy()
    spoiled[: spoiled.size // 2] ^= 0x11
    with pytest.raises(ProtocolError) as mine:
        indices.decode(name, spoiled, here.size, 2000)
    with pytest.raises(ProtocolError, match="indices as") as theirs:
        indices.decode(name, spoiled, here.size, 2000, CUDA)
    assert str(theirs.value) == str(mine.value)


def test_numbers_that_are_no_positions_are_refused(machine: Machine) -> None:
    for wrong in ([3, 2], [5, 5], [1, 99]):
        with pytest.raises(ValueError, match="ascending and below 9"):
            indices.encode_best(ndarray(np.array(wrong, np.uint32)), 9, CUDA)
