"""How a model is divided into fragments: a function of keys and blocks alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv.errors import ConfigError
from zkv.layout import Layout
from zkv.wire import MODEL, BlockSpec, KeyEntry, KeySpec, Segment
from zkv_workers.batch import AnyBatch
from zkv_workers.copies import Divided
from zkv_workers.fragments import divided
from zkv_workers.model import BatchState
from zkv_workers.signals import Grant


def layout_of(sizes: list[int], together: set[int] = frozenset(), dtype: str = "float32") -> Layout:  # type: ignore[assignment]
    """Return the layout of keys of these sizes, some of them in one block."""
    layout = Layout()
    keys = [KeyEntry(kid, KeySpec(f"k{kid}", dtype, (size,))) for kid, size in enumerate(sizes)]
    apart = [
        BlockSpec(kid, 0, [Segment(kid, 0, size)])
        for kid, size in enumerate(sizes)
        if kid not in together
    ]
    shared = [Segment(kid, 0, sizes[kid]) for kid in sorted(together)]
    layout.add(keys, [*apart, BlockSpec(len(sizes), 0, shared)] if shared else apart)
    return layout


def test_layers_of_one_size_take_turns() -> None:
    """As the paper's strided fragments."""
    assert divided(layout_of([8] * 7), 3) == [[0, 3, 6], [1, 4], [2, 5]]


def test_keys_that_share_a_block_stay_together() -> None:
    """Or their block would travel with each of them."""
    assert divided(layout_of([8, 1, 8, 1, 1], {1, 3, 4}), 2) == [[0, 1, 3, 4], [2]]


def test_keys_that_are_not_trained_are_in_no_fragment() -> None:
    layout = layout_of([4, 4])
    layout.add([KeyEntry(2, KeySpec("n", "int64", (9,)))], [BlockSpec(2, 0, [Segment(2, 0, 9)])])
    assert divided(layout, 2) == [[0], [1]]
    with pytest.raises(ConfigError, match="only 2 parts"):
        divided(layout, 3)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 6), st.data())
def test_each_key_is_in_one_fragment_and_they_are_of_nearly_one_size(
    sizes: list[int], count: int, data: st.DataObject
) -> None:
    together = set(data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=5)))
    layout = layout_of(sizes, together)
    parts = len(sizes) - len(together) + bool(together)
    if count > parts:
        with pytest.raises(ConfigError, match=f"at most {parts}"):
            divided(layout, count)
        return
    found = divided(layout, count)
    assert sorted(kid for some in found for kid in some) == list(range(len(sizes)))
    assert all(found)
    assert sum(bool(together & set(some)) for some in found) == bool(together)
    held = [sum(sizes[kid] for kid in some) for some in found]
    largest = max([*sizes, sum(sizes[kid] for kid in together)])
    assert max(held) - min(held) <= largest


# --- what is kept from round to round ------------------------------------------------------------


def batch_of(layout: Layout, version: int) -> AnyBatch:
    """Return what a round needs of a batch whose values are all its version."""
    blocks = {
        block.bid: np.full(block.size, version, np.float32) for block in layout.blocks_in(MODEL)
    }
    grant = Grant(version + 1, version, version, 0, 0, 0, blocks, layout.snapshot())
    batch: Any = SimpleNamespace(cancelled=False, outcome="committed", update=version + 1)
    state = BatchState(grant, None)
    batch.settle = lambda: state
    return cast(AnyBatch, batch)


def test_only_what_an_update_has_changed_is_taken_over_unless_keys_are_others() -> None:
    """While keys are initialised a batch may have some that do not belong to the model later."""
    layout, copy = layout_of([4, 4, 4]), Divided(3)
    for version in range(3):
        batch = batch_of(layout, version)
        copy.begin(batch)
        for value in copy.params(batch).values():
            value += 100
    # Each round has added 100; the first fragment has been taken over at 1, the second at 2.
    assert [value[0] for value in copy.params(batch).values()] == [201, 102, 300]
    layout.remove([2])
    with pytest.raises(ConfigError, match="only 2 parts"):
        copy.begin(batch_of(layout, 3))
    layout.add([KeyEntry(3, KeySpec("k3", "float32", (4,)))], [BlockSpec(3, 0, [Segment(3, 0, 4)])])
    batch = batch_of(layout, 3)
    copy.begin(batch)
    assert {key: value[0] for key, value in copy.params(batch).items()} == dict.fromkeys(
        ["k0", "k1", "k3"], 3
    )
