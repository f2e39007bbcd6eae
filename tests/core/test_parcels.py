"""A block's state as bytes between servers: it comes out as it went in, and nothing else does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from single_blocks import SIZE, trained

from zkv.errors import ProtocolError
from zkv.marks import Marks
from zkv_brokers import parcels
from zkv_brokers.bases import Bases
from zkv_brokers.store import Pinned, Store


def packed(store: Store, bases: Bases | None = None, marks: Any = ()) -> tuple[int, Any]:
    return parcels.pack(store, bases or Bases(), store.layout.blocks[0], marks)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "float64"])
@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("view", [False, True])
def test_a_state_comes_out_as_it_went_in(dtype: str, slots: int, view: bool) -> None:
    store = trained(dtype, slots, view=view)
    bases, old = Bases(), Pinned(np.ones(SIZE, store.blocks[0].current.values.dtype))
    bases.add(11, 3, {0: old})
    bases.add(12, 4, {0: old})
    bases.add(12, 5, {0: store.blocks[0].current})
    head, stream = packed(store, bases, [(11, Marks(4, {7, 9}))])
    found = parcels.unpack(head, stream, SIZE)
    state, was = found.state, store.blocks[0]
    assert (state.rule, state.counts, state.changed) == ("adam", {0: 7}, 5)
    for mine, theirs in zip(
        (state.current.values, *state.slots), (was.current.values, *was.slots), strict=True
    ):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
        assert mine.flags.writeable
        assert not np.shares_memory(mine, stream)
    assert (state.master is None) == (was.master is None)
    assert (found.view is None) != view
    if found.view is not None:
        kept = store.views.kept(0)
        assert kept is not None
        assert (found.view.version, found.view.since) == (9, 9)
        np.testing.assert_array_equal(found.view.values, kept.values)
    assert found.bases.keys() == {(11, 3), (12, 4), (12, 5)}
    assert found.bases[11, 3] is found.bases[12, 4]
    np.testing.assert_array_equal(found.bases[12, 5].values, was.current.values)
    assert found.marks == {11: Marks(4, {7, 9})}


def test_a_large_state_travels_in_parts_that_make_the_whole() -> None:
    stream = np.arange(2 * parcels.PART_BYTES + 17, dtype=np.uint64).astype(np.uint8)
    count = parcels.parts_of(stream)
    assert count == 3
    parts = [parcels.part(stream, at) for at in range(count)]
    assert max(part.nbytes for part in parts) == parcels.PART_BYTES
    np.testing.assert_array_equal(np.concatenate(parts), stream)
    assert parcels.parts_of(stream[:0]) == 1


@given(
    cut=st.integers(0, 60),
    extra=st.binary(max_size=20),
    at=st.integers(0, 80),
    bit=st.integers(0, 7),
)
def test_what_is_no_state_is_refused_or_is_one_of_the_right_size(
    cut: int, extra: bytes, at: int, bit: int
) -> None:
    head, stream = packed(trained())
    broken = np.concatenate([stream[: stream.size - cut], np.frombuffer(extra, np.uint8)])
    broken[at] ^= 1 << bit
    try:
        found = parcels.unpack(head, broken, SIZE)
    except ProtocolError:
        return
    assert found.state.current.values.shape == (SIZE,)
