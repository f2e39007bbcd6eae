"""Gradients of keys that share a block: sent from where they were made, if all lie there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import placed

from zkv.wire import KeySpec
from zkv_workers.buffers import Buffers
from zkv_workers.encoding import Encoder
from zkv_workers.packing import Full, Packer

SIZES = (3, 1, 4, 2)
KEYS = tuple(f"k{at}" for at in range(len(SIZES)))
HOW = st.sampled_from(["buffer", "view", "other", "skip"])


def packer_of(*, shared: bool = True) -> tuple[Packer, Buffers, dict[Any, Any]]:
    """One block of four keys, and what `worker.buffers` returns of them."""
    specs = [KeySpec(key, "float32", (size,)) for key, size in zip(KEYS, SIZES, strict=True)]
    model = placed(specs, 1, bucket_bytes=1000)
    assert len(model.blocks) == 1
    encoder = Encoder()
    buffers = encoder.buffers = Buffers(np.empty, lambda array: False)
    arrays = {key: np.zeros(spec.shape, np.float32) for key, spec in zip(KEYS, specs, strict=True)}
    own = buffers.make(arrays, [KEYS] if shared else [])
    for at, array in enumerate(own.values()):
        array[:] = np.arange(array.size) + 10.0 * at + 1
    return Packer(model.layout, range(len(KEYS)), encoder), buffers, own


@given(
    hows=st.lists(HOW, min_size=4, max_size=4),
    order=st.permutations(range(4)),
    together=st.booleans(),
)
@settings(max_examples=150)
def test_what_is_sent_is_what_was_pushed_and_the_callers_memory_stays_as_it_is(
    hows: list[str], order: list[int], together: bool
) -> None:
    packer, _, own = packer_of()
    before = {key: array.copy() for key, array in own.items()}
    given_arrays: dict[str, Any] = {}
    for at in order:
        if hows[at] != "skip":
            mine, other = own[KEYS[at]], np.full(SIZES[at], -1.0 - at, np.float32)
            given_arrays[KEYS[at]] = {"buffer": mine, "view": mine[:], "other": other}[hows[at]]
    full: list[Full] = []
    if together:
        full += packer.add_all(given_arrays.items())
    else:
        for key, array in given_arrays.items():
            full += packer.add(key, array)
    full += packer.rest()
    zeros = {key: np.zeros(size, np.float32) for key, size in zip(KEYS, SIZES, strict=True)}
    expected = np.concatenate([given_arrays.get(key, zeros[key]) for key in KEYS])
    if not given_arrays:
        assert full == []
        return
    (only,) = full
    np.testing.assert_array_equal(only.values, expected)
    if set(hows) == {"buffer"}:
        assert only.lent
        assert not only.own
        assert np.may_share_memory(only.values, own["k0"])
    elif set(hows) != {"buffer", "view"} and set(hows) != {"view"}:
        assert not only.lent
        assert not np.may_share_memory(only.values, own["k0"])
    for key, array in own.items():
        np.testing.assert_array_equal(array, before[key])


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("at", range(4))
def test_who_writes_to_one_of_them_too_early_is_told_which(together: bool, at: int) -> None:
    packer, buffers, own = packer_of()
    if together:
        list(packer.add_all(own.items()))
    else:
        for key, array in own.items():
            packer.add(key, array)
    own[KEYS[at]][-1] += 1
    with pytest.raises(BufferError, match=f"'k{at}'"):
        buffers.free(0)


def test_the_whole_block_is_lent_until_its_reader_has_let_go() -> None:
    asked: list[Any] = []
    packer, buffers, own = packer_of()
    buffers._is_lent = lambda array: asked.append(array) is None and len(asked) < 2
    list(packer.add_all(own.items()))
    assert not buffers.free(0)
    assert buffers.free(0)
    assert all(array.size == sum(SIZES) for array in asked)


def test_without_one_of_its_keys_a_block_is_copied() -> None:
    packer, _, own = packer_of(shared=False)
    (only,) = packer.add_all(own.items())
    assert only.own
    assert not np.may_share_memory(only.values, own["k0"])
