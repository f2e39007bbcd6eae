"""Blocks that are the encoder's own: their memory is used again, and no bit changes for that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from codec_texts import PLAIN, REMEMBERING
from hypothesis import given, settings
from hypothesis import strategies as st
from single_blocks import layout, spec

from zkv_codecs.backend import NUMPY, Backend
from zkv_codecs.packed import Packed, dense
from zkv_codecs.spec import codec
from zkv_workers.encoding import Encoder

Array = np.ndarray[Any, Any]
SIZE, BLOCKS = 1500, 3


def noise(seed: int, size: int = SIZE) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


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


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
@pytest.mark.parametrize("text", [*REMEMBERING, *PLAIN])
def test_whose_the_values_are_decides_nothing_but_where_a_residual_lies(
    text: str, kernels: str
) -> None:
    """Over random values and flat ones, for which a sample misleads, and with a tail."""
    if kernels == "numba":
        pytest.importorskip("numba")
    one, backend = codec(text), Backend(kernels)
    for size in (1, 300, 2 * SIZE, 70_001):
        peak = np.where(np.arange(size) % 97 == 5, 3.0, 1.0).astype(np.float32)
        for values in (noise(3, size), np.ones(size, np.float32), peak):
            state = one.start((size,))
            _, state = one.encode(dense(values), state, 1, backend)
            before = [array.copy() for array in state]
            expected, left = one.encode(Packed(values, (size,)), state, 2, backend)
            ours = values.copy()
            sent, kept = one.encode(Packed(ours, (size,), own=True), state, 2, backend)
            assert not sent.packed.own
            np.testing.assert_array_equal(sent.packed.values, expected.packed.values)
            for mine, theirs in zip(kept, left, strict=True):
                np.testing.assert_array_equal(mine, theirs)
            for now, then in zip(state, before, strict=True):
                np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize("text", ["int8+ef", "onebit+ef", "topk:0.01+ef"])
def test_a_residual_is_written_over_values_that_are_ours_and_no_others(text: str) -> None:
    there = layout(spec("w0", SIZE))
    one = Encoder(seed=1, backend=NUMPY)
    one.use(f"{text};small=0")
    for own in (True, False, True):
        values = noise(own)
        one.encode(there, there.blocks[0], values, 1, own=own)
        assert np.shares_memory(one.memories.by_block[0].state[0], values) is own


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
