"""Layouts of a few keys, each in a block of its own, and what arrives of such a block."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from zkv.layout import Layout
from zkv.optimizer_spec import optimizer
from zkv.wire import BlockSpec, KeyEntry, KeySpec, Segment
from zkv_brokers.store import BlockState, Pinned, Settings, Store
from zkv_codecs.backend import NUMPY, Backend
from zkv_codecs.deltas import View
from zkv_codecs.frames import from_payload
from zkv_workers.encoding import Sealed

Array = np.ndarray[Any, Any]
SIZE = 600


def layout(*keys: KeySpec, bucket: bool = False) -> Layout:
    """Each key in a block of its own, or all in one."""
    made = Layout()
    entries = [KeyEntry(kid, spec) for kid, spec in enumerate(keys)]
    sizes = [int(np.prod(spec.shape, dtype=np.int64)) for spec in keys]
    parts = [Segment(kid, 0, size) for kid, size in enumerate(sizes)]
    blocks = (
        [BlockSpec(0, 0, parts)]
        if bucket
        else [BlockSpec(kid, 0, [part]) for kid, part in enumerate(parts)]
    )
    made.add(entries, blocks)
    return made


def spec(key: str | int, size: int = SIZE, dtype: str = "float32") -> KeySpec:
    return KeySpec(key, dtype, (size,))


def received(sealed: Sealed, shape: tuple[int, ...] = (SIZE,)) -> Array:
    if sealed.form is None:
        return sealed.payload
    there = from_payload(sealed.codec, sealed.form, sealed.payload, shape)
    values: Array = there.chain.decode(there.packed, NUMPY).values
    return values


def store_of(
    size: int, backend: Backend, rule: str = "sgd:lr=0.1", dtype: str = "float32", cut: int = 0
) -> tuple[Store, BlockSpec]:
    """A store with one block of one key, or of two that meet at `cut`."""
    edges = sorted({0, cut, size}) if size else [0, 0]
    layout = Layout()
    parts = list(pairwise(edges))
    entries = [
        KeyEntry(kid, KeySpec(f"k{kid}", dtype, (stop - start,)))
        for kid, (start, stop) in enumerate(parts)
    ]
    block = BlockSpec(
        0, 0, [Segment(kid, 0, stop - start) for kid, (start, stop) in enumerate(parts)]
    )
    layout.add(entries, [block])
    store = Store(layout)
    store.backend = backend
    store.configure(Settings(optimizer(rule), optimizer("assign")))
    return store, block


def trained(dtype: str = "float32", slots: int = 2, *, view: bool = True) -> Store:
    """A store with one block in the middle of a training."""
    made = layout(spec("a", SIZE, dtype))
    store, chance = Store(made), np.random.default_rng(1)
    values = (chance.standard_normal(SIZE) * 50).astype("float16" if dtype == "float16" else dtype)
    state = store.blocks[0] = BlockState(Pinned(values), None, "adam")
    state.slots = tuple(chance.standard_normal(SIZE).astype("float32") for _ in range(slots))
    state.counts, state.changed = {0: 7}, 5
    if dtype == "float16":
        state.master = values.astype("float32")
    if view:
        store.views.adopt(0, View(9, chance.standard_normal(SIZE).astype("float32"), 3))
    return store
