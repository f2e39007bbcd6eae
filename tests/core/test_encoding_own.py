"""Blocks that are the encoder's own: their memory is used again, and no bit changes for that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from codec_texts import PLAIN, REMEMBERING
from hypothesis import given, settings
from hypothesis import strategies as st
from single_blocks import layout, spec

from zkv_codecs.backend import NUMPY, fastest
from zkv_codecs.packed import Packed, dense
from zkv_codecs.spec import codec
from zkv_workers.encoding import Encoder

Array = np.ndarray[Any, Any]
SIZE, BLOCKS = 1500, 3


def noise(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


@given(
    text=st.sampled_from([*REMEMBERING, *PLAIN, "auto", "none"]),
    turns=st.lists(
        st.tuples(
            st.integers(0, BLOCKS - 1), st.booleans(), st.booleans(), st.sampled_from(["", "none"])
        ),
        max_size=12,
    ),
)
@settings(max_examples=150, deadline=None)
def test_what_is_sent_and_remembered_is_the_same_whoever_owns_the_values(
    text: str, turns: list[tuple[int, bool, bool, str]]
) -> None:
    """Over blocks, batches that do not count, and changes of the codec."""
    there = layout(*(spec(f"w{at}", SIZE) for at in range(BLOCKS)))
    mine, copying = (Encoder(seed=1, backend=NUMPY) for _ in range(2))
    for batch, (bid, own, counted, other) in enumerate(turns, start=1):
        for one in (mine, copying):
            one.use(f"{other or text};small=0")
        values = noise(batch)
        sealed = mine.encode(there, there.blocks[bid], values.copy(), batch, own=own)
        alone = copying.encode(there, there.blocks[bid], values, batch)
        assert (sealed.codec, sealed.form) == (alone.codec, alone.form)
        # What was sent before must not change when its memory might be used again.
        np.testing.assert_array_equal(sealed.payload, alone.payload)
        np.testing.assert_array_equal(values, noise(batch))
        for one in (mine, copying):
            one.settled(batch, counted=counted)
    for one in (mine, copying):
        one.memories.hear()
    for bid, memory in copying.memories.by_block.items():
        for ours, theirs in zip(mine.memories.by_block[bid].state, memory.state, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("text", [*REMEMBERING, *PLAIN])
def test_room_decides_nothing_but_where_a_residual_lies(text: str) -> None:
    """Whatever is in it before, and of whatever size it is."""
    one, backend = codec(text), fastest()
    for size in (1, 300, SIZE):
        values = noise(3)[:size]
        state = one.start((size,))
        _, state = one.encode(dense(values), state, 1, backend)
        before = [array.copy() for array in state]
        expected, left = one.encode(Packed(values, (size,)), state, 2, backend)
        for room in (np.full(size, np.nan, np.float32), np.full(size + 1, np.nan, np.float32)):
            sent, kept = one.encode(Packed(values, (size,), room=room), state, 2, backend)
            assert sent.packed.room is None
            np.testing.assert_array_equal(sent.packed.values, expected.packed.values)
            for ours, theirs in zip(kept, left, strict=True):
                np.testing.assert_array_equal(ours, theirs)
        for now, then in zip(state, before, strict=True):
            np.testing.assert_array_equal(now, then)


def test_a_residual_lies_where_the_block_before_was() -> None:
    there = layout(*(spec(f"w{at}", SIZE) for at in range(BLOCKS)))
    one = Encoder(seed=1, backend=NUMPY)
    one.use("int8+ef;small=0")
    given_values = [noise(at) for at in range(BLOCKS)]
    for at, values in enumerate(given_values):
        one.encode(there, there.blocks[at], values, 1, own=True)
    residuals = [one.memories.by_block[at].state[0] for at in range(BLOCKS)]
    assert residuals[1] is given_values[0]
    assert residuals[2] is given_values[1]
    assert one._room is given_values[2]


def test_what_travels_as_it_is_is_never_written_to() -> None:
    """The payload of `none` is the block itself."""
    there = layout(*(spec(f"w{at}", SIZE) for at in range(BLOCKS)))
    one = Encoder(seed=1, backend=NUMPY)
    one.use("int8+ef;small=0;w1=none")
    values = noise(1)
    sealed = one.encode(there, there.blocks[1], values, 1, own=True)
    assert sealed.payload is values
    for at in (0, 2, 0, 2):
        one.encode(there, there.blocks[at], noise(7), 1, own=True)
    np.testing.assert_array_equal(sealed.payload, noise(1))
